"""One accepted connection: find out who calls, then carry bytes between the socket and that protocol's core.

The first byte decides: 0 is PyTorch's greeting, a capital letter an HTTP method; our own protocol will have a byte of
its own, and TLS has 22. Anything else is dropped. Whoever reads slower than it asks is not read from until it has
caught up, so what is held for it stays bounded; `House` adds up what all hold. One that reads nothing at all is cut by
the kernel (`net.keep_alive`).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol, cast

from rallypoint.core.c10d import BadMessage, Conversation

if TYPE_CHECKING:
    from rallypoint.server.house import House

__all__ = ["Connection", "Face"]


class Face(Protocol):
    """The server's end of one protocol on one connection."""

    held: int
    """How many bytes of requests are held that could not be carried out yet."""

    @property
    def blocked(self) -> bool:
        """Whether requests wait until the answers so far have been sent."""

    def receive(self, data: bytes) -> bytes:
        """Take what came, return what to send; raise BadMessage when the connection has to go."""

    def end(self) -> None:
        """Forget the connection."""


class Connection(asyncio.Protocol):
    """The server's side of one socket."""

    __slots__ = ("_held", "_house", "_paused", "_transport", "face", "peer", "since")

    def __init__(self, house: House) -> None:
        self._house = house
        self._paused = False
        self._held = 0
        self.face: Face | None = None
        self.peer = ""
        self.since = 0.0

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._house.arrived(self)

    def connection_lost(self, error: Exception | None) -> None:
        if self.face is not None:
            self.face.end()
            self.face = None
        self._hold(0)
        self._house.left(self)

    def data_received(self, data: bytes) -> None:
        face = self.face
        if face is None:
            face = self._recognise(data)
            if face is None:
                return
        try:
            reply = face.receive(data)
        except BadMessage as error:
            self.drop(str(error))
        else:
            if reply:
                self._transport.write(reply)
            if face.held or self._held or len(reply) > 65536:
                self._settle(face)
        if self._house.engine.outbox:
            self._house.deliver()

    def pause_writing(self) -> None:
        self._paused = True
        self._transport.pause_reading()
        if self.face is not None:
            self._hold(self.face.held + self._transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._paused = False
        self._go_on()

    # What the house calls

    def send(self, data: bytes) -> None:
        """Send an answer that became ready later."""
        self._transport.write(data)

    def drop(self, why: str) -> None:
        """Close the connection because of what the peer did, and say so in the log."""
        self._house.complain(self, why)
        self._hold(0)
        self._transport.abort()

    def close(self) -> None:
        """Close the connection once what was written is sent."""
        self._transport.close()

    def who(self) -> str:
        """Return the peer's address."""
        address = self._transport.get_extra_info("peername")
        return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else str(address)

    # Inside

    def _recognise(self, data: bytes) -> Face | None:
        first = data[0]
        if first == 0:
            self.face = Conversation(self._house.engine, self._house.settings.max_connection_memory, self)
        elif 65 <= first <= 90:
            from rallypoint.server.http import WebFace  # only when somebody looks

            self.face = WebFace(self._house, self)
        else:
            self.drop(f"first bytes {data[:16]!r} are of no protocol spoken here")
            return None
        self._house.recognised(self)
        return self.face

    def _settle(self, face: Face) -> None:
        """Count what is held for the peer, and read no more from one that has to take its answers first."""
        self._hold(face.held + self._transport.get_write_buffer_size())
        if face.blocked:
            self._transport.pause_reading()
            if not self._paused:
                asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        """After answers were sent: carry out what waited for that, then read on."""
        if self._paused or self.face is None or self._transport.is_closing():
            return
        blocked = self.face.blocked
        if blocked:
            self.data_received(b"")
        if self.face is not None and not self.face.blocked:
            self._hold(self.face.held)
            if not self._paused:
                self._transport.resume_reading()

    def _hold(self, amount: int) -> None:
        grown, self._held = amount - self._held, amount
        self._house.hold(self, amount, grown)
