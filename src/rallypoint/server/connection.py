"""One accepted connection: find out who calls, then carry bytes between the socket and that protocol's core.

The first bytes decide: our preface, or any other greeting in PyTorch's protocol, which both begin with 0; a capital
letter is an HTTP method. Anything else is dropped, and so is who does not finish its greeting in time. Whoever reads
slower than it asks is not read from until it has caught up, so what is held for it stays bounded; `House` adds up
what all hold. One that reads nothing at all is cut by the kernel, and one whose host is gone by us (`liveness.py`).
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Protocol, cast

from rallypoint import net
from rallypoint.core.c10d import BadMessage
from rallypoint.core.ledger import Split
from rallypoint.core.native import ACCEPTED, PREFACE
from rallypoint.core.records import show
from rallypoint.liveness import PeerWatch

if TYPE_CHECKING:
    from rallypoint.server.house import House

__all__ = ["Connection", "Face"]


_SPEAKS = {
    "NoneType": "nothing yet",
    "Caller": "rallypoint",
    "GatewayCaller": "rallypoint",
    "Conversation": "torch",
    "GatewayConversation": "torch",
}


class Face(Protocol):
    """The server's end of one protocol on one connection."""

    @property
    def held(self) -> int:
        """How many bytes of requests are held that could not be carried out yet."""

    @property
    def blocked(self) -> bool:
        """Whether requests wait until the answers so far have been sent."""

    @property
    def greeted(self) -> bool:
        """Whether the peer has done what this protocol begins with."""

    def receive(self, data: bytes, now: float) -> bytes:
        """Take what came, return what to send; raise BadMessage when the connection has to go."""

    def end(self, now: float) -> None:
        """Forget the connection."""


class Connection(asyncio.Protocol):
    """The server's side of one socket."""

    __slots__ = ("_early", "_held", "_house", "_shared", "_stalled", "_transport", "_watch", "face", "paused")

    def __init__(self, house: House) -> None:
        self._house = house
        self.paused = False
        """Whether the peer has to read before more is written for it."""

        self._stalled = False
        self._held = 0
        self._shared = 0  # of what was written since the transport was last able to keep up, what others get too
        self._early = b""
        self._watch: PeerWatch | None = None
        self.face: Face | None = None

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._house.arrived(self)
        if not transport.is_closing():
            self._watch = net.watch(asyncio.get_running_loop(), transport, self._vanished)

    def connection_lost(self, error: Exception | None) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        if self.face is not None:
            self.face.end(time.monotonic())
            self.face = None
        self._hold(0)
        self._house.left(self)

    def data_received(self, data: bytes) -> None:
        face = self.face
        if face is None:
            data = self._recognise(self._early + data)
            face = self.face
            if face is None:
                return
        house = self._house
        engine = house.engine
        try:
            reply = face.receive(data, time.monotonic())
        except BadMessage as error:
            self.drop(str(error))
            reply = b""
        if engine.outbox:  # first those who have waited: the caller would only compete with them
            house.deliver()
        if reply:
            self._transport.write(reply)
        if face.held or self._held or len(reply) > 65536:
            self._settle(face)
        if engine.earliest < house.ticks_at:
            house.tick()

    def pause_writing(self) -> None:
        self.paused = True
        self._transport.pause_reading()
        if self.face is not None:
            self._hold(self.face.held + self._unsent())

    def resume_writing(self) -> None:
        self.paused = False
        self._shared = 0
        self._go_on()

    # What the house calls

    def send(self, data: bytes | Split) -> None:
        """Send an answer that became ready later; of what others get too, no copy is made, and it is counted once."""
        if isinstance(data, Split):
            self._shared += len(data.body.data)  # first, for the transport may call pause_writing
            self._transport.writelines((data.head, data.body.data))
            if not self.paused:  # it keeps up
                self._shared = 0
        else:
            self._transport.write(data)

    @property
    def closing(self) -> bool:
        """Whether what is sent now reaches nobody."""
        return self._transport.is_closing()

    def stall(self) -> None:
        """Read no more, for as much has come as can be dealt with, until `read_on`."""
        if not self._stalled:
            self._stalled = True
            self._transport.pause_reading()

    def read_on(self) -> None:
        """Read again after `stall`."""
        if self._stalled:
            self._stalled = False
            self._go_on()

    def recount(self) -> None:
        """Count again what is held for the peer, where that changes without anything having come from it."""
        if self.face is not None and not self._transport.is_closing():
            self._hold(self.face.held + self._unsent())

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

    def greeted(self) -> bool:
        """Say whether the peer has said who it is, to the end."""
        return self.face is not None and self.face.greeted

    def describe(self) -> dict[str, Any]:
        """Return who this is, which protocol it speaks, and what it waits for."""
        speaks = _SPEAKS.get(type(self.face).__name__, "http")
        waits_for: tuple[bytes, ...] = getattr(self.face, "waits_for", ())
        return {"peer": self.who(), "speaks": speaks, "waits_for": [show(key) for key in waits_for[:100]]}

    # Inside

    def _recognise(self, data: bytes) -> bytes:
        """Find out who calls, if that can be said yet; return what is then for its face."""
        house = self._house
        if data.startswith(PREFACE):
            self._transport.write(ACCEPTED)
            self.face = house.native_face(self)
            data = data[len(PREFACE) :]
        elif PREFACE.startswith(data):  # may become ours, or PyTorch's, which begins alike
            self._early = data
            return b""
        elif data[0] == 0:
            self.face = house.torch_face(self)
        elif 65 <= data[0] <= 90:
            from rallypoint.server.http import WebFace  # only when somebody looks

            self.face = WebFace(house, self)
        else:
            self.drop(f"first bytes {data[:16]!r} are of no protocol spoken here")
            return b""
        self._early = b""
        return data

    def _settle(self, face: Face) -> None:
        """Count what is held for the peer, and read no more from one that has to take its answers first."""
        self._hold(face.held + self._unsent())
        if face.blocked:
            self._transport.pause_reading()
            if not self.paused:
                asyncio.get_running_loop().call_soon(self._go_on)

    def _vanished(self, silent_s: float) -> None:
        self._house.vanished(self, silent_s)
        self._hold(0)
        self._transport.abort()

    def _unsent(self) -> int:
        """Return how many bytes are written and not sent, but for those that the sessions' ledger counts."""
        return max(0, self._transport.get_write_buffer_size() - self._shared)

    def _go_on(self) -> None:
        """After answers were sent: carry out what waited for that, then read on."""
        if self.paused or self.face is None or self._transport.is_closing():
            return
        blocked = self.face.blocked
        if blocked:
            self.data_received(b"")
        if self.face is not None and not self.face.blocked:
            self._hold(self.face.held)
            if not self.paused and not self._stalled:
                self._transport.resume_reading()

    def _hold(self, amount: int) -> None:
        grown, self._held = amount - self._held, amount
        self._house.hold(self, amount, grown)
