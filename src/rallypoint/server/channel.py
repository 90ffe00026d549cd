"""The server's end of one channel: a session's bytes, within the windows of both sides.

A channel is to its `NativeConnection` what a `Connection` is: a `Carrier`. It has credit for what it sends; beyond that
its output stays here, and it counts as paused, so that its handler answers no more requests. The peer has credit for
what it sends, and gets more for what the handler has taken; what comes while the handler is blocked or stalled waits
here, a window at most. Nothing here calls a handler from inside another's work: `MultiplexedConnection` gives every
channel its turn.

Rejected: to let the handler take whatever comes, and to bound its backlog. It would decode what it cannot answer yet.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from rallypoint.core.ops import Act
from rallypoint.protocol import BadMessage
from rallypoint.protocol.channels import MAX_CHUNK, MAX_HEAD, WINDOW, credit_frame, data_head
from rallypoint.protocol.native import SharedReply
from rallypoint.server.native_connection import NativeConnection

if TYPE_CHECKING:
    from rallypoint.server.multiplexed import MultiplexedConnection
    from rallypoint.server.server import StoreServer

__all__ = ["Channel", "end_channels"]

GRANT_BYTES = WINDOW // 2
"""How much of a window must have been taken before the peer gets credit for it."""

ENDS = 256
"""How many channels of a connection that is gone are seen to in one turn of the event loop."""


class Channel:
    """One channel, as long as it is open."""

    __slots__ = (
        "_at", "_closing", "_counted", "_credit", "_dealt_with", "_ended", "_inbox", "_output", "_over", "_parent",
        "_server", "_shared", "_stalled", "_unsent", "_window", "handler", "number", "runs", "sends"
    )  # fmt: skip

    def __init__(self, server: StoreServer, parent: MultiplexedConnection, number: int) -> None:
        self.number = number
        self.runs = self.sends = False
        """Whether it stands in line to carry out requests, and to send."""

        self._server = server
        self._parent = parent
        self._window = WINDOW  # what the peer may still send
        self._dealt_with = 0  # of what it sent, what it has no new credit for yet
        self._inbox = bytearray()  # what came and waits
        self._credit = WINDOW  # what may still be sent
        self._output: deque[bytes] = deque()
        self._at = 0  # how much of the first piece of it is sent
        self._unsent = 0
        self._shared = 0  # how much of that others get too
        self._stalled = self._closing = self._over = self._ended = False
        self._counted = 0
        self.handler = NativeConnection(server, self, server.state.namespaces[0])

    # What the connection calls

    def receive(self, data: bytes) -> None:
        """Take what came. Raises BadMessage where that is more than the window allows."""
        self._window -= len(data)
        if self._window < 0:
            raise BadMessage(f"channel {self.number} was sent {-self._window} bytes more than its window allows")
        if self._closing:
            return
        if self._inbox or self._stalled or self._unsent or self._parent.paused or self.handler.blocked:
            self._inbox += data
            self._count()
            self.go_on()
        else:
            self._hand(data)

    def arrival(self, data: bytes) -> Act | None:
        """Take what came as an arrival at a shared object, if it is one that can be carried out at once."""
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
        """Carry out some of what waits."""
        if self._can_run:
            data = b"" if self.handler.blocked else bytes(self._inbox[:MAX_CHUNK])
            del self._inbox[: len(data)]
            self._hand(data)

    def add_credit(self, size: int) -> None:
        """Note that the peer takes so many more bytes."""
        self._credit += size
        if self._unsent:
            self._parent.line_up_to_send(self)

    def take(self, out: list[bytes]) -> int:
        """Add the next frame of what is to be sent, as far as there is credit; return its size."""
        size = left = min(self._unsent, self._credit, MAX_CHUNK)
        if not size:
            return 0
        out.append(data_head(self.number, size))
        while left:
            first, at = self._output[0], self._at
            piece = first if not at and len(first) <= left else first[at : at + left]
            out.append(piece)
            left -= len(piece)
            self._at += len(piece)
            if self._at == len(first):
                self._output.popleft()
                self._at = 0
        self._unsent -= size
        self._credit -= size
        self._after_sending()
        return size

    def _after_sending(self) -> None:
        if self._unsent:
            if self._credit:
                self._parent.line_up_to_send(self)
        else:
            self._shared = 0
            if self._closing:
                self._finish("")
        self._count()
        self.go_on()

    def end(self) -> None:
        """Forget the channel: its peer has closed it, or the connection is gone."""
        self._closing = self._over = True
        self._discard()
        if not self._ended:
            self._ended = True
            self.handler.end()

    # What the handler calls

    @property
    def paused(self) -> bool:
        """Whether the peer has to read before more is written for it."""
        return self._unsent > 0 or self._parent.paused

    @property
    def closing(self) -> bool:
        """Whether what is sent now reaches nobody."""
        return self._closing or self._parent.closing

    def send(self, data: bytes | SharedReply) -> None:
        """Send an answer, now if there is credit; what others get too is counted once."""
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
        if not isinstance(data, SharedReply):
            self.send_parts([data])
            return
        self._shared += len(data.body)  # first, for it is about to be counted
        self.send_parts([data.head, data.body])
        if not self._unsent:
            self._shared = 0

    def send_parts(self, parts: list[bytes]) -> None:
        """Send an answer in parts, of which no copy is kept, when its turn comes."""
        if self.closing:
            return
        size = sum(map(len, parts))
        self._output.extend(parts)
        self._unsent += size
        self._count()
        if self._credit:
            self._parent.line_up_to_send(self)

    def stall(self) -> None:
        """Let the handler have no more, and give the peer no credit, until `read_on`."""
        self._stalled = True

    def read_on(self) -> None:
        """Go on after `stall`."""
        if self._stalled:
            self._stalled = False
            self._grant()
            self.go_on()

    def go_on(self) -> None:
        """Stand in line, if there is something to carry out."""
        if self._can_run:
            self._parent.line_up_to_run(self)

    def recount(self) -> None:
        """Count again what is held for the peer."""
        self._count()

    def drop(self, why: str) -> None:
        """Close the channel because of what the peer did, and say so in the log and to the peer."""
        if not self._over:
            self._server.complain(self, why)
            self._finish(why)

    def close(self) -> None:
        """Close the channel once what was written is sent."""
        if not self._closing:
            self._closing = True
            if not self._unsent:
                self._finish("")

    def who(self) -> str:
        """Return the address of the peer, which has many channels."""
        return f"{self._parent.who()} (channel {self.number})"

    # Inside

    @property
    def _can_run(self) -> bool:
        if self._closing or self._unsent:
            return False
        return self.handler.blocked or (bool(self._inbox) and not self._stalled)

    def _hand(self, data: bytes) -> None:
        """Have the handler take bytes, and send what it answers."""
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
        """Give the peer credit for what was taken, when it is worth a frame."""
        size = self._dealt_with
        if size >= GRANT_BYTES and not (self._stalled or self._closing or self.handler.blocked):
            self._window += size
            self._dealt_with = 0
            self._parent.put(credit_frame(self.number, size))

    def _finish(self, why: str) -> None:
        """Tell the peer that the channel has ended. The handler learns of it later, as from a transport."""
        self._closing = self._over = True
        self._discard()
        self._parent.closed(self, why)
        asyncio.get_running_loop().call_soon(self.end)

    def _discard(self) -> None:
        self._inbox.clear()
        self._output.clear()
        self._unsent = self._shared = self._at = 0
        self._count()

    def _count(self) -> None:
        """Tell the connection how much is held here; what the peer does not take of a shared answer counts once."""
        held = 0 if self._over else self.handler.held + len(self._inbox) + max(0, self._unsent - self._shared)
        if held != self._counted:
            grown, self._counted = held - self._counted, held
            self._parent.count(grown)


def end_channels(channels: list[Channel]) -> None:
    """End channels, some at a time: to give their sessions back takes its time."""
    for channel in channels[:ENDS]:
        channel.end()
    if len(channels) > ENDS:
        asyncio.get_running_loop().call_soon(end_channels, channels[ENDS:])
