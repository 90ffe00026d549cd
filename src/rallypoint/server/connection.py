"""One accepted connection: find out who calls, then carry bytes between the socket and that protocol's core.

The first bytes decide: one of our prefaces, or any other greeting in PyTorch's protocol, which all begin with 0; a
capital letter is an HTTP method. Anything else is dropped, and so is a peer that does not greet in time. Whoever reads
slower than it asks is not read from until it has caught up, so what is held for it stays bounded; the server adds up
what all hold. One that reads nothing at all is cut by the kernel, and one whose host is gone by us (`liveness.py`).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol, cast

from rallypoint import net
from rallypoint.core.records import show
from rallypoint.liveness import PeerWatch
from rallypoint.protocol import BadMessage, channels
from rallypoint.protocol.native import ACCEPTED, PREFACE, SharedReply

if TYPE_CHECKING:
    from rallypoint.server.base import ServerBase

__all__ = ["COUNTED_BYTES", "Connection", "ProtocolHandler"]

COUNTED_BYTES = 4096
"""What is held for one connection counts from here on: counting a small request costs as much as carrying it out."""

_SPEAKS = {
    "NoneType": "nothing yet",
    "MultiplexedConnection": "rallypoint channels",
    **dict.fromkeys(("NativeConnection", "NativeForward"), "rallypoint"),
    **dict.fromkeys(("C10dConnection", "TorchRelayConnection"), "torch"),
}


class ProtocolHandler(Protocol):
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

    def receive(self, data: bytes) -> bytes:
        """Take what came, return what to send; raise BadMessage when the connection has to go."""

    def end(self) -> None:
        """Forget the connection."""


class Connection(asyncio.Protocol):
    """The server's side of one socket."""

    __slots__ = (
        "_early", "_held", "_server", "_shared", "_stalled", "_stopped", "_transport", "_watch", "handler", "paused"
    )  # fmt: skip

    def __init__(self, server: ServerBase) -> None:
        self._server = server
        self.paused = False
        """Whether the peer has to read before more is written for it."""

        self._stalled = self._stopped = False
        self._held = 0
        self._shared = 0  # of what was written since the transport was last able to keep up, what others get too
        self._early = b""
        self._watch: PeerWatch | None = None
        self.handler: ProtocolHandler | None = None

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server.arrived(self)
        if not transport.is_closing():
            self._watch = net.watch(asyncio.get_running_loop(), transport, self._vanished)

    def connection_lost(self, error: Exception | None) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        if self.handler is not None:
            self.handler.end()
            self.handler = None
        self._hold(0)
        self._server.left(self)

    def data_received(self, data: bytes) -> None:
        handler = self.handler
        if handler is None:
            data = self._recognise(self._early + data)
            handler = self.handler
            if handler is None:
                return
        try:
            reply = handler.receive(data)
        except BadMessage as error:
            self.drop(str(error))
            return
        if reply:
            self._transport.write(reply)
        if self._held or handler.held > COUNTED_BYTES or len(reply) > 65536:
            self._settle(handler)

    def pause_writing(self) -> None:
        self.paused = True
        self._transport.pause_reading()
        if self.handler is not None:
            self._hold(self.handler.held + self._unsent())

    def resume_writing(self) -> None:
        self.paused = False
        self._shared = 0
        self.go_on()

    # What the server and protocol handlers call

    def send(self, data: bytes | SharedReply) -> None:
        """Send an answer that became ready later; of what others get too, no copy is made, and it is counted once."""
        if self._transport.is_closing():  # uvloop's would raise
            return
        if isinstance(data, SharedReply):
            self._shared += len(data.body)  # first, for the transport may call pause_writing
            self._transport.writelines((data.head, data.body))
            if not self.paused:  # it keeps up
                self._shared = 0
        else:
            self._transport.write(data)
        if self.paused:
            self.recount()

    def send_parts(self, parts: list[bytes]) -> None:
        """Send a long answer, of which no copy is made."""
        if not self._transport.is_closing():
            self._transport.writelines(parts)
            self.recount()

    @property
    def closing(self) -> bool:
        return self._transport.is_closing()

    def stall(self) -> None:
        """Read no more, for as much has come as can be dealt with, until `read_on`."""
        if not self._stalled:
            self._stalled = True
            self._transport.pause_reading()

    def read_on(self) -> None:
        """Read again after `stall`, and go on with what waits."""
        if self._stalled:
            self._stalled = self._stopped
            self.go_on()

    def stop(self) -> None:
        """Read no more, for the server is about to end."""
        self._stopped = True
        if not self._transport.is_closing():
            self.stall()

    def recount(self) -> None:
        """Count again what is held for the peer, where that changes without anything having come from it."""
        handler = self.handler
        if handler is not None and not self.closing and (self._held or self.paused or handler.held > COUNTED_BYTES):
            self._hold(handler.held + self._unsent())

    def drop(self, why: str) -> None:
        """Close the connection because of what the peer did, and say so in the log."""
        self._server.complain(self, why)
        self._hold(0)
        self._transport.abort()

    def close(self) -> None:
        """Close the connection once what was written is sent."""
        self._transport.close()

    def who(self) -> str:
        address = self._transport.get_extra_info("peername")
        return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else str(address or "unix socket")

    def greeted(self) -> bool:
        """Say whether the peer has said who it is, to the end."""
        return self.handler is not None and self.handler.greeted

    def describe(self) -> dict[str, Any]:
        """Return who this is, which protocol it speaks, and what it waits for."""
        speaks = _SPEAKS.get(type(self.handler).__name__, "http")
        waits_for: tuple[bytes, ...] = getattr(self.handler, "waits_for", ())
        facts = {"peer": self.who(), "speaks": speaks, "waits_for": [show(key) for key in waits_for[:100]]}
        return {**facts, **getattr(self.handler, "more_facts", {})}

    # Inside

    def _recognise(self, data: bytes) -> bytes:
        """Find out who calls, if that can be said yet; return what is then for its handler."""
        server = self._server
        if server.elsewhere and data[0] == 0:
            return self._send_elsewhere(data)
        if data.startswith(PREFACE):
            self._transport.write(ACCEPTED)
            self.handler = server.native_handler(self)
            data = data[len(PREFACE) :]
        elif data.startswith(channels.PREFACE) and (handler := server.multiplexed_handler(self)) is not None:
            self._transport.write(channels.ACCEPTED)
            self.handler = handler
            data = data[len(channels.PREFACE) :]
        elif len(data) < len(PREFACE) and any(one.startswith(data) for one in (PREFACE, channels.PREFACE)):
            self._early = data
            return b""
        elif data[0] == 0:
            self.handler = server.torch_handler(self)
        elif 65 <= data[0] <= 90:
            from rallypoint.server.http import HttpHandler  # only when somebody looks

            self.handler = HttpHandler(server, self)
        else:
            self.drop(f"first bytes {data[:16]!r} are of no protocol spoken here")
            return b""
        self._early = b""
        return data

    def _send_elsewhere(self, data: bytes) -> bytes:
        """Tell a client of ours which server leads; PyTorch's clients know no such answer."""
        if data.startswith((PREFACE, channels.PREFACE)):
            self._transport.write(self._server.elsewhere)
            self._transport.close()
        elif any(one.startswith(data) for one in (PREFACE, channels.PREFACE)):
            self._early = data
        else:
            self.drop("a PyTorch client, and this server stands by: have a relay find the leader (rallypoint relay)")
        return b""

    def _settle(self, handler: ProtocolHandler) -> None:
        """Count what is held for the peer, and read no more from one that has to take its answers first."""
        self._hold(handler.held + self._unsent())
        if handler.blocked:
            self._transport.pause_reading()
            if not self.paused:
                asyncio.get_running_loop().call_soon(self.go_on)

    def _vanished(self, silent_s: float) -> None:
        self._server.vanished(self, silent_s)
        self._hold(0)
        self._transport.abort()

    def _unsent(self) -> int:
        """Return how many bytes are written and not sent, but for those that the sessions' ledger counts."""
        return max(0, self._transport.get_write_buffer_size() - self._shared)

    def go_on(self) -> None:
        """After answers were sent: carry out what waited for that, then read on."""
        if self.paused or self.handler is None or self._transport.is_closing():
            return
        blocked = self.handler.blocked
        if blocked:
            self.data_received(b"")
        if self.handler is not None and not self.handler.blocked:
            self._hold(self.handler.held)
            if not self.paused and not self._stalled:
                self._transport.resume_reading()

    def _hold(self, amount: int) -> None:
        grown, self._held = amount - self._held, amount
        self._server.hold(self, amount, grown)
