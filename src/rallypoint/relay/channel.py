"""One channel of a relay to its server: what its owner wrote and has not been sent, and credit both ways.

`protocol/channels.py` has the rules. The server gets credit for what an owner has dealt with (`Channel.consumed`), half
a window at a time. A channel that its owner closes sends what was written first, for a client's last word may be its
goodbye; what comes meanwhile is thrown away, with credit, or the server could not go on to read.

No I/O: the connection (`relay/channel_connection.py`) asks each channel for what it has to send.

Rejected: to refuse writes beyond the window. Whoever wrote half a request would have to keep the other half itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from rallypoint.protocol import BadMessage
from rallypoint.protocol.channels import MAX_CHUNK, WINDOW

if TYPE_CHECKING:
    from rallypoint.relay.channel_connection import ChannelConnection

__all__ = ["Channel", "ChannelOwner"]


class ChannelOwner(Protocol):
    """Whoever uses a channel."""

    def received(self, data: bytes) -> None:
        """Take bytes from the server; `Channel.consumed` gives the server credit for them."""

    def closed(self, why: str) -> None:
        """Note that the server closed the channel, or that the connection was lost; nothing follows."""

    def writable(self) -> None:
        """Note that everything has been sent, after some of it had to wait (`Channel.unsent`)."""


class Channel:
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
        self._waiting = 0  # bytes in there
        self._credit = WINDOW
        self._held_back = False  # whether the owner is to hear when all is sent
        self._owed = 0  # bytes that came, and that the server has no credit for yet
        self._consumed = 0  # of these, what the owner has dealt with

    @property
    def unsent(self) -> int:
        """How many bytes were written and have to wait, for credit or for the transport."""
        return self._waiting if self._connection.paused else max(0, self._waiting - self._credit)

    def write(self, data: bytes) -> None:
        """Send bytes at the end of this turn of the event loop, as far as there is credit; never refuses."""
        if self.closing or self.ended or not data:
            return
        self._out.append(data)
        self._waiting += len(data)
        if self._waiting > self._credit or self._connection.paused:
            self._held_back = True
        self._connection.has_bytes(self)

    def before_flush(self, write: Callable[[], None]) -> None:
        """Have `write` called at the end of this turn of the event loop; what it writes is sent at once."""
        self._connection.before_flush(write)

    def consumed(self, size: int) -> None:
        """Give the server credit for bytes that were dealt with."""
        self._consumed += size
        if self._consumed >= WINDOW // 2 and not self.ended:
            self._connection.owes_credit(self)

    def close(self) -> None:
        """End the channel once what was written is sent; the owner hears nothing more."""
        if not self.closing and not self.ended:
            self.closing = True
            self.consumed(self._owed - self._consumed)
            self._connection.closing(self, self._waiting)

    # What the connection calls

    @property
    def sendable(self) -> bool:
        """Whether there are bytes, and credit for some of them."""
        return self._waiting > 0 and self._credit > 0

    @property
    def empty(self) -> bool:
        """Whether everything that was written is sent."""
        return not self._waiting

    def take(self) -> bytes:
        """Return the next bytes to send: one chunk at most, and no more than there is credit for."""
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
        """Throw away what waits; return how many bytes that were."""
        size, self._waiting = self._waiting, 0
        self._out.clear()
        return size

    def take_credit(self) -> int:
        """Return how many bytes the server may send on top, and count them as given."""
        size, self._consumed = self._consumed, 0
        self._owed -= size
        return size

    def credited(self, size: int) -> None:
        """Take credit from the server."""
        self._credit += size
        if self._credit > WINDOW:
            raise BadMessage(f"credit for {self._credit} bytes on channel {self.number}, the window is {WINDOW}")

    def feed(self, data: bytes) -> None:
        """Take bytes from the server."""
        self._owed += len(data)
        if self._owed > WINDOW:
            raise BadMessage(f"{self._owed} bytes on channel {self.number}, the window is {WINDOW}")
        if self.closing:
            self.consumed(len(data))
        else:
            self.owner.received(data)

    def sent(self) -> None:
        """Tell the owner that everything is sent, if it waits for that."""
        if self._held_back and not self._waiting and not self.closing and not self.ended:
            self._held_back = False
            self.owner.writable()

    def end(self, why: str) -> None:
        """Tell the owner, unless it closed the channel itself, that there is nothing more."""
        if not self.ended:
            self.ended = True
            self._out.clear()
            self._waiting = 0
            if not self.closing:
                self.owner.closed(why)
