"""The server's end of one channel: the bytes of one session, with a flow-control window in each direction.

To its `NativeConnection` a channel is a `SessionTransport`, as a `Connection` is. It has credit for the bytes that it
sends; output beyond the credit stays here, and the channel counts as paused, so that its handler executes no more
requests. The peer has credit as well, and gets more as the handler takes data; data that arrives while the handler is
blocked or stalled waits here, one window at most. A channel never calls a handler during another's work:
`MultiplexedConnection` schedules the channels.

Rejected: passing all data to the handler and limiting its backlog. It would decode requests that it cannot execute yet.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rallypoint.core.ops import Act
from rallypoint.protocol import BadMessage
from rallypoint.protocol.channels import MAX_CHUNK, MAX_HEAD, WINDOW, credit_frame, data_head
from rallypoint.protocol.long_reply import LongReply
from rallypoint.protocol.native import Reply, SharedReply
from rallypoint.server.connections.limits import COUNTED_BYTES
from rallypoint.server.connections.native_connection import NativeConnection
from rallypoint.server.connections.outgoing import AnswerPart, Part

if TYPE_CHECKING:
    from rallypoint.server.connections.multiplexed import MultiplexedConnection
    from rallypoint.server.connections.store_access import StoreAccess

__all__ = ["ServerChannel", "end_channels"]

GRANT_BYTES = WINDOW // 2
"""Bytes that the handler must have taken before the peer gets new credit."""


class ServerChannel:
    """One open channel."""

    __slots__ = (
        "_at", "_closing", "_counted", "_credit", "_dealt_with", "_ended", "_inbox", "_output", "_over", "_parent",
        "_shared", "_stalled", "_unsent", "_window", "handler", "number", "runs", "sends"
    )  # fmt: skip

    def __init__(self, server: StoreAccess, parent: MultiplexedConnection, number: int) -> None:
        self.number = number
        self.runs = self.sends = False
        """Whether the channel is queued to execute requests, and to send."""

        self._parent = parent
        self._window = WINDOW  # bytes that the peer may still send
        self._dealt_with = 0  # bytes taken by the handler for which the peer has no new credit yet
        self._inbox = bytearray()  # received data that waits
        self._credit = WINDOW  # bytes that may still be sent
        self._output: deque[Part] = deque()
        self._at = 0  # bytes of the first piece of output already sent
        self._unsent = 0
        self._shared = 0  # unsent bytes that belong to shared replies
        self._stalled = self._closing = self._over = self._ended = False
        self._counted = 0
        self.handler = NativeConnection(server, self, server.state.namespaces[0])

    # Called by the connection

    def receive(self, data: bytes, later: bool = False) -> None:
        """Process received data, now or in a `later` turn. Raises BadMessage if it exceeds the window."""
        self._window -= len(data)
        if self._window < 0:
            raise BadMessage(f"channel {self.number} received {-self._window} bytes more than its window allows")
        if self._closing:
            return
        if later or self._inbox or self._stalled or self._unsent or self._parent.paused or self.handler.blocked:
            self._inbox += data
            self._count()
            self.go_on()
        else:
            self._hand(data)

    def arrival(self, data: bytes) -> Act | None:
        """Take the data and return it as an arrival at a shared object, if it is one that can be executed now."""
        if self._inbox or self._stalled or self._unsent or self._closing or len(data) > self._window:
            return None
        op = self.handler.arrival(data)
        if op is not None:
            self._window -= len(data)
            self._dealt_with += len(data)
            if self._dealt_with >= GRANT_BYTES:
                self._grant()
        return op

    def run(self) -> None:
        """Execute some of the waiting requests."""
        if self._can_run:
            data = b"" if self.handler.blocked else bytes(self._inbox[:MAX_CHUNK])
            del self._inbox[: len(data)]
            self._hand(data)

    def add_credit(self, size: int) -> None:
        """Add credit: the peer accepts this many more bytes."""
        self._credit += size
        if self._unsent:
            self._parent.line_up_to_send(self)

    def take(self, out: list[bytes]) -> int:
        """Append the next frame of output to `out`, within the credit; return its size."""
        size = left = min(self._unsent, self._credit, MAX_CHUNK)
        if not size:
            return 0
        out.append(data_head(self.number, size))
        while left:
            part, at = self._output[0], self._at
            first = part if isinstance(part, bytes) else part.data
            piece = first if not at and len(first) <= left else first[at : at + left]
            out.append(piece)
            left -= len(piece)
            self._at += len(piece)
            if first is not part:
                self._shared -= len(piece)
            if self._at == len(first):
                self._release(self._output.popleft())
                self._at = 0
        self._unsent -= size
        self._credit -= size
        self._after_sending()
        return size

    def _after_sending(self) -> None:
        if self._unsent:
            if self._credit:
                self._parent.line_up_to_send(self)
        elif self._closing:
            self._finish("")
        self._count()
        self.go_on()

    def end(self) -> None:
        """Release the channel: the peer has closed it, or the connection is gone."""
        self._closing = self._over = True
        self._discard()
        if not self._ended:
            self._ended = True
            self.handler.end()

    # Called by the handler

    @property
    def paused(self) -> bool:
        """Whether the peer must read before more is written."""
        return self._unsent > 0 or self._parent.paused

    @property
    def closing(self) -> bool:
        """Whether the channel is closed or closing: data sent now is lost."""
        return self._closing or self._parent.closing

    def send(self, data: Reply) -> None:
        """Send a reply, in this turn if there is credit; the body of a shared reply is counted once."""
        if isinstance(data, LongReply):
            self.send_parts(data.parts)
            return
        size = len(data)
        if not self._unsent and size <= self._credit and not self._closing and self._parent.has_room:
            if not isinstance(data, SharedReply):
                if size <= MAX_CHUNK:
                    self._credit -= size
                    self._parent.put_piece(self.number, data)
                    return
            elif len(data.head) <= MAX_HEAD:
                self._credit -= size
                self._parent.put_shared(self.number, data)
                return
        self.send_parts([data.head, AnswerPart(data.answer)] if isinstance(data, SharedReply) else [data])

    def send_parts(self, parts: Sequence[Part]) -> None:
        """Queue a reply in parts, without copying it."""
        if self.closing:
            return
        for part in parts:
            if isinstance(part, bytes):
                self._unsent += len(part)
            else:
                self._unsent += len(part.data)
                self._shared += len(part.data)
                self._parent.memory.share(part)
        self._output.extend(parts)
        self._count()
        if self._credit:
            self._parent.line_up_to_send(self)

    def stall(self) -> None:
        """Pass no data to the handler, and give the peer no credit, until `read_on`."""
        self._stalled = True

    def read_on(self) -> None:
        """Continue after `stall`."""
        if self._stalled:
            self._stalled = False
            self._grant()
            self.go_on()

    def go_on(self) -> None:
        """Queue the channel, if it has requests to execute."""
        if self._can_run:
            self._parent.line_up_to_run(self)

    def recount(self) -> None:
        """Update the count of bytes held for the peer."""
        self._count()

    def drop(self, why: str) -> None:
        """Close the channel because of a peer's error; log it and tell the peer."""
        if not self._over:
            self._parent.log_error(why, f" (channel {self.number})")
            self._finish(why)

    def close(self) -> None:
        """Close the channel once all output is sent."""
        if not self._closing:
            self._closing = True
            if not self._unsent:
                self._finish("")

    def who(self) -> str:
        """Return the peer's address and the channel number."""
        return f"{self._parent.who()} (channel {self.number})"

    # Private

    @property
    def _can_run(self) -> bool:
        if self._closing or self._unsent:
            return False
        return self.handler.blocked or (bool(self._inbox) and not self._stalled)

    def _hand(self, data: bytes) -> None:
        """Pass data to the handler, and send its replies."""
        self._dealt_with += len(data)
        handler = self.handler
        try:
            reply = handler.receive(data)
        except BadMessage as error:
            self.drop(str(error))
            return
        if reply:
            self.send(reply)
        if self._dealt_with >= GRANT_BYTES:
            self._grant()
        if handler.held or self._counted:
            self._count()
        if self._inbox or handler.blocked:
            self.go_on()

    def _grant(self) -> None:
        """Give the peer credit for the data taken, once that is worth a frame."""
        size = self._dealt_with
        if size >= GRANT_BYTES and not (self._stalled or self._closing or self.handler.blocked):
            self._window += size
            self._dealt_with = 0
            self._parent.put(credit_frame(self.number, size))

    def _finish(self, why: str) -> None:
        """Tell the peer that the channel is closed. The handler is told in a later turn, as by a transport."""
        self._closing = self._over = True
        self._discard()
        self._parent.closed(self, why)
        asyncio.get_running_loop().call_soon(self.end)

    def _release(self, part: Part) -> None:
        if not isinstance(part, bytes):
            self._parent.memory.unshare(part)

    def _discard(self) -> None:
        self._inbox.clear()
        while self._output:
            self._release(self._output.popleft())
        self._unsent = self._shared = self._at = 0
        self._count()

    def _count(self) -> None:
        """Tell the connection the bytes held here, without shared parts, which are counted once elsewhere.

        A channel with shared parts holds enough for its connection to be among those that can be dropped.
        """
        held = 0 if self._over else self.handler.held + len(self._inbox) + self._unsent - self._shared
        if self._shared:
            held += COUNTED_BYTES + 1
        if held != self._counted:
            grown, self._counted = held - self._counted, held
            self._parent.count(grown)


def end_channels(channels: list[ServerChannel]) -> Iterator[None]:
    """End channels, one in each step: detaching many sessions takes long."""
    for channel in channels:
        channel.end()
        yield
