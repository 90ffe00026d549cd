"""One channel of a relay to its server: unsent bytes of its owner, and credit in both directions.

`protocol/channels.py` has the rules. The server gets credit for bytes that the owner has processed
(`UpstreamChannel.consumed`), half a window at a time. A channel that its owner closes first sends all written bytes,
because the last request of a client may be its Bye. Bytes received meanwhile are discarded, but credited, or the server
would stop reading.

No I/O: the connection (`relay/upstream/channel_connection.py`) takes the bytes to send from each channel.

Rejected: refuse writes beyond the window. An owner that wrote half a request would have to keep the other half.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from rallypoint.protocol import BadMessage
from rallypoint.protocol.channels import MAX_CHUNK, WINDOW

if TYPE_CHECKING:
    from rallypoint.relay.upstream.channel_connection import ChannelConnection

__all__ = ["UpstreamChannel", "ChannelOwner"]


class ChannelOwner(Protocol):
    """The user of a channel."""

    def received(self, data: bytes) -> None:
        """Process bytes from the server; `UpstreamChannel.consumed` gives the server credit for them."""

    def closed(self, why: str) -> None:
        """Called once when the server closes the channel or the connection is lost; no other call follows."""

    def writable(self) -> None:
        """Called when all bytes have been sent, after some had to wait (`UpstreamChannel.unsent`)."""


class UpstreamChannel:
    """One byte stream to the server; opened by `Upstream.open_channel`."""

    __slots__ = (
        "_connection", "_consumed", "_credit", "_held_back", "_out", "_owed", "_waiting", "closing", "ended", "number",
        "owner",
    )  # fmt: skip

    def __init__(self, connection: ChannelConnection, owner: ChannelOwner) -> None:
        self._connection = connection
        self.owner = owner
        self.number = 0  # until its first bytes are sent
        self.closing = self.ended = False
        self._out: deque[bytes] = deque()
        self._waiting = 0  # bytes in `_out`
        self._credit = WINDOW
        self._held_back = False  # whether to call `writable` when all is sent
        self._owed = 0  # bytes received for which the server has no new credit yet
        self._consumed = 0  # those of them that the owner has processed

    @property
    def unsent(self) -> int:
        """Number of written bytes that wait for credit or for the transport."""
        return self._waiting if self._connection.paused else max(0, self._waiting - self._credit)

    def write(self, data: bytes) -> None:
        """Queue bytes, to be sent at the end of this turn of the event loop as far as there is credit."""
        if self.closing or self.ended or not data:
            return
        self._out.append(data)
        self._waiting += len(data)
        if self._waiting > self._credit or self._connection.paused:
            self._held_back = True
        self._connection.has_bytes(self)

    def before_flush(self, write: Callable[[], None]) -> None:
        """Call `write` at the end of this turn of the event loop; its bytes are sent at once."""
        self._connection.before_flush(write)

    def consumed(self, size: int) -> None:
        """Give the server credit for processed bytes."""
        self._consumed += size
        if self._consumed >= WINDOW // 2 and not self.ended:
            self._connection.owes_credit(self)

    def close(self) -> None:
        """End the channel after all written bytes are sent; the owner gets no further calls."""
        if not self.closing and not self.ended:
            self.closing = True
            self.consumed(self._owed - self._consumed)
            self._connection.closing(self, self._waiting)

    # Called by the connection

    @property
    def sendable(self) -> bool:
        """Whether there are bytes, and credit for some of them."""
        return self._waiting > 0 and self._credit > 0

    @property
    def empty(self) -> bool:
        """Whether all written bytes have been sent."""
        return not self._waiting

    def take(self) -> bytes:
        """Remove and return the next bytes to send: at most one chunk, within the credit."""
        limit = min(MAX_CHUNK, self._credit)
        parts, size = [], 0
        while self._out and size < limit:
            part = self._out.popleft()
            if size + len(part) > limit:
                self._out.appendleft(part[limit - size :])
                part = part[: limit - size]
            parts.append(part)
            size += len(part)
        self._waiting -= size
        self._credit -= size
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def drop_unsent(self) -> int:
        """Discard unsent bytes; return their number."""
        size, self._waiting = self._waiting, 0
        self._out.clear()
        return size

    def take_credit(self) -> int:
        """Return the credit to give the server, and count it as given."""
        size, self._consumed = self._consumed, 0
        self._owed -= size
        return size

    def credited(self, size: int) -> None:
        """Add credit from the server."""
        self._credit += size
        if self._credit > WINDOW:
            raise BadMessage(f"credit for {self._credit} bytes on channel {self.number}, the window is {WINDOW}")

    def feed(self, data: bytes) -> None:
        """Process bytes from the server."""
        self._owed += len(data)
        if self._owed > WINDOW:
            raise BadMessage(f"{self._owed} bytes on channel {self.number}, the window is {WINDOW}")
        if self.closing:
            self.consumed(len(data))
        else:
            self.owner.received(data)

    def sent(self) -> None:
        """Call `writable` of the owner if it waits for that and all bytes are sent."""
        if self._held_back and not self._waiting and not self.closing and not self.ended:
            self._held_back = False
            self.owner.writable()

    def end(self, why: str) -> None:
        """End the channel, and call `closed` of the owner unless the owner closed it."""
        if not self.ended:
            self.ended = True
            self._out.clear()
            self._waiting = 0
            if not self.closing:
                self.owner.closed(why)
