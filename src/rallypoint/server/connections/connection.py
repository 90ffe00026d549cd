"""One accepted connection: carries bytes between the socket and the handler of the protocol that its peer speaks.

The first handler is the `Greeting` (`greeting.py`), which recognizes the protocol and gives way to its handler. The
server stops reading from a peer that takes its replies too slowly, so the bytes held for it stay bounded; the listener
sums them over all connections. Long replies go out in pieces (`outgoing.py`). The kernel resets a peer that reads
nothing at all; we abort one whose host is gone (`liveness.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from rallypoint import net
from rallypoint.core.records import show
from rallypoint.liveness import PeerWatch
from rallypoint.protocol import BadMessage
from rallypoint.protocol.long_reply import LongReply
from rallypoint.protocol.native import Reply, SharedReply
from rallypoint.security.local_peer import is_local
from rallypoint.server.connections.limits import COUNTED_BYTES
from rallypoint.server.connections.outgoing import PIECE_BYTES, TURN_BYTES, AnswerPart, Outgoing, Part

if TYPE_CHECKING:
    import socket
    import ssl

    from rallypoint.server.connections.limits import ConnectionMemory
    from rallypoint.server.listener import PeerLog
    from rallypoint.server.turn_budget import TurnBudget

__all__ = ["Acceptor", "Connection", "PeerAddress", "ProtocolHandler"]

_SPEAKS = {
    **dict.fromkeys(("NoHandler", "Greeting"), "nothing yet"),
    "MultiplexedConnection": "rallypoint channels",
    **dict.fromkeys(("NativeConnection", "NativeForward"), "rallypoint"),
    **dict.fromkeys(("C10dConnection", "TorchRelayConnection"), "torch"),
}


class ProtocolHandler(Protocol):
    """The server's end of one protocol on one connection."""

    @property
    def held(self) -> int:
        """Bytes of received requests that wait to be executed."""

    @property
    def blocked(self) -> bool:
        """Whether requests wait until the replies so far have been sent."""

    @property
    def greeted(self) -> bool:
        """Whether the peer has completed the greeting of this protocol."""

    def receive(self, data: bytes) -> bytes:
        """Process received data and return the replies; raise BadMessage if the connection must be dropped."""

    def end(self) -> None:
        """Release the connection: it is gone."""


class NoHandler:
    """The handler of a connection that was not admitted, or is gone."""

    held = 0
    blocked = greeted = False

    def receive(self, data: bytes) -> bytes:
        """Ignore the data."""
        return b""

    def end(self) -> None:
        """Do nothing."""


_NO_HANDLER = NoHandler()


class PeerAddress(NamedTuple):
    """The address of the other end of a connection."""

    host: str
    """Empty for a Unix socket."""

    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" if self.host else "unix socket"


class Acceptor(Protocol):
    """What a connection asks of the listener that accepted it."""

    @property
    def memory(self) -> ConnectionMemory:
        """The bytes held for all connections."""

    @property
    def peer_log(self) -> PeerLog:
        """Logs errors of peers."""

    @property
    def turns(self) -> TurnBudget:
        """The time for pipelined requests in each turn of the event loop."""

    def admit(self, connection: Connection) -> None:
        """Give a new connection its first handler, or close it."""

    def left(self, connection: Connection) -> None:
        """Forget a connection: it is gone."""


class Connection(asyncio.Protocol):
    """The server's side of one socket."""

    __slots__ = (
        "_closes", "_full", "_held", "_listener", "_outgoing", "_queued", "_shared", "_stalled", "_stopped",
        "_transport", "_watch", "handler", "over_tls", "paused", "peer"
    )  # fmt: skip

    def __init__(self, listener: Acceptor) -> None:
        self._listener = listener
        self.paused = False
        """Whether the peer must read before more is written."""

        self._full = False  # whether the transport takes no more now
        self._outgoing: Outgoing | None = None  # long replies that the transport has not taken yet
        self._closes = False  # whether to close once they are sent
        self._stalled = self._stopped = False
        self._queued = False  # whether requests wait for a later turn of the event loop
        self._held = 0
        self._shared = 0  # unsent bytes, at most, of replies shared with other connections
        self._watch: PeerWatch | None = None
        self.peer = PeerAddress("", 0)
        self.over_tls = False
        self.handler: ProtocolHandler = _NO_HANDLER

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        address = transport.get_extra_info("peername")
        if isinstance(address, tuple):
            self.peer = PeerAddress(*address[:2])
        self._listener.admit(self)
        if not transport.is_closing():
            self._watch = net.watch(asyncio.get_running_loop(), transport, self._vanished)

    def connection_lost(self, error: Exception | None) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        self.handler.end()
        self.handler = _NO_HANDLER
        self._discard()
        self._listener.left(self)

    def data_received(self, data: bytes) -> None:
        handler = self.handler
        try:
            reply = handler.receive(data)
        except BadMessage as error:
            self.drop(str(error))
            return
        if reply:
            if self._outgoing is None and len(reply) <= PIECE_BYTES:
                self._transport.write(reply)
            else:
                self._enqueue((reply,))
        if self._held or handler.held or len(reply) > 65536:
            self._settle(handler)

    def pause_writing(self) -> None:
        self.paused = self._full = True
        self._transport.pause_reading()
        self._hold(self.handler.held + self._unsent())

    def resume_writing(self) -> None:
        self._full = False
        self._shared = 0
        self._write_on()

    # Called by the server and by protocol handlers

    def send(self, data: Reply) -> None:
        """Send a reply that became ready later; the body of a shared reply is not copied, and is counted once."""
        if self.closing:  # uvloop's transport would raise
            return
        if isinstance(data, LongReply):
            self._enqueue(data.parts)
        elif self._outgoing is not None or len(data) > PIECE_BYTES:
            self._enqueue((data.head, AnswerPart(data.answer)) if isinstance(data, SharedReply) else (data,))
        elif isinstance(data, SharedReply):
            self._shared += len(data.body)  # first, for the transport may call pause_writing
            self._transport.writelines((data.head, data.body))
            if not self.paused:  # the peer keeps up
                self._shared = 0
        else:
            self._transport.write(data)
        if self.paused:
            self.recount()

    @property
    def socket(self) -> socket.socket:
        """The socket, to ask the kernel about its peer."""
        sock: socket.socket = self._transport.get_extra_info("socket")
        return sock

    @property
    def is_local(self) -> bool:
        """Whether the peer is on this machine."""
        known = self._transport.get_extra_info
        return is_local(known("sockname"), known("peername"))

    def start_tls(self, context: ssl.SSLContext, first: bytes, on_failed: Callable[[str], None]) -> None:
        """Go on in TLS, beginning with these bytes; `on_failed` ends the connection if the handshake fails."""
        from rallypoint.server.connections.tls import TlsTransport  # imported on first use

        self.over_tls = True
        layer = TlsTransport(self._transport, self, context, on_failed)
        self._transport = cast(asyncio.Transport, layer)
        layer.data_received(first)

    def deny(self, answer: bytes) -> None:
        """Close the connection of a peer that may not use the server."""
        self.send(answer)
        self.close()

    def send_parts(self, parts: Sequence[Part]) -> None:
        """Send a long reply without copying it."""
        if not self.closing:
            self._enqueue(parts)

    @property
    def closing(self) -> bool:
        return self._closes or self._transport.is_closing()

    @property
    def memory(self) -> ConnectionMemory:
        """The bytes held for all connections."""
        return self._listener.memory

    @property
    def shares(self) -> bool:
        """Whether unsent replies share bytes with the store or with other replies."""
        return self._outgoing is not None and self._outgoing.shared > 0

    def stall(self) -> None:
        """Stop reading until `read_on`: too many requests wait."""
        if not self._stalled:
            self._stalled = True
            self._transport.pause_reading()

    def read_on(self) -> None:
        """Read again after `stall`, and process waiting requests."""
        if self._stalled:
            self._stalled = self._stopped
            self.go_on()

    def stop(self) -> None:
        """Stop reading for good: the server is about to end."""
        self._stopped = True
        if not self._transport.is_closing():
            self.stall()

    def recount(self) -> None:
        """Update the count of bytes held for the peer when it changes without received data."""
        handler = self.handler
        if not self.closing and (self._held or self.paused or handler.held > COUNTED_BYTES):
            self._hold(handler.held + self._unsent())

    def drop(self, why: str) -> None:
        """Abort the connection because of a peer's error, and log it."""
        self.log_error(why)
        self._discard()
        self._transport.abort()

    def log_error(self, why: str, channel: str = "") -> None:
        """Log an error of the peer, and on which channel, unless an earlier error from its address was logged."""
        self._listener.peer_log.protocol_error(self.peer.host, f"{self.peer}{channel}", why)

    def close(self) -> None:
        """Close the connection once all written data is sent."""
        if self._outgoing is None:
            self._transport.close()
        self._closes = True

    @property
    def turns(self) -> TurnBudget:
        """The time for long work in each turn of the event loop."""
        return self._listener.turns

    def who(self) -> str:
        return str(self.peer)

    def describe(self) -> dict[str, Any]:
        """Return the entry of this connection in the statistics: peer, protocol, and awaited keys."""
        speaks = _SPEAKS.get(type(self.handler).__name__, "http")
        waits_for: tuple[bytes, ...] = getattr(self.handler, "waits_for", ())
        facts = {"peer": self.who(), "speaks": speaks, "waits_for": [show(key) for key in waits_for[:100]]}
        return {**facts, **getattr(self.handler, "more_facts", {})}

    # Private

    def _settle(self, handler: ProtocolHandler) -> None:
        """Count the bytes held for the peer; stop reading if it must take its replies first."""
        if handler is not self.handler:
            return  # it has passed the connection on, with its data
        held = handler.held + self._unsent()
        if self._held or held > COUNTED_BYTES:
            self._hold(held)
        if handler.blocked:
            self._transport.pause_reading()
            self._resume_later()

    def _resume_later(self) -> None:
        """Have waiting requests processed in a later turn of the event loop."""
        if not self._queued and not self.paused:
            self._queued = True
            self._listener.turns.resume(self._resume)

    def _resume(self) -> None:
        self._queued = False
        self.go_on()

    def _vanished(self, silent_s: float) -> None:
        self._listener.peer_log.vanished(self.who(), silent_s)
        self._discard()
        self._transport.abort()

    def _unsent(self) -> int:
        """Return the number of bytes written but not sent, without shared replies, which are counted once."""
        unsent = max(0, self._transport.get_write_buffer_size() - self._shared)
        return unsent if self._outgoing is None else unsent + self._outgoing.owned

    def _enqueue(self, parts: Sequence[Part]) -> None:
        """Pass parts to the transport in pieces, behind those that wait."""
        if self._outgoing is None:
            self._outgoing = Outgoing(self._listener.memory)
        self._outgoing.add(parts)
        if not self.paused:
            self.paused = True
            self._transport.pause_reading()
            self._write_on()
        else:
            self._hold(self.handler.held + self._unsent())

    def _write_on(self) -> None:
        """Pass pieces to the transport while it takes them, but not for long; then go on with requests."""
        outgoing, left = self._outgoing, TURN_BYTES
        while outgoing is not None and not self._full and left > 0 and not self._transport.is_closing():
            piece = outgoing.take()
            left -= len(piece)
            if piece:
                self._transport.write(piece)
            else:
                outgoing = self._outgoing = None
        if outgoing is not None:
            self._hold(self.handler.held + self._unsent())
            if not self._full and self._outgoing is not None:
                asyncio.get_running_loop().call_soon(self._write_on)
        elif self._closes:
            self._transport.close()
        elif not self._full:
            self.paused = False
            self.go_on()

    def _discard(self) -> None:
        """Hold nothing more for the peer."""
        if self._outgoing is not None:
            self._outgoing.clear()
            self._outgoing = None
        self._hold(0)

    def go_on(self) -> None:
        """After replies were sent: process waiting requests, then read again."""
        if self.paused or self._transport.is_closing():
            return
        if self.handler.blocked:
            self.data_received(b"")
        if self.handler.blocked:
            self._resume_later()
        else:
            self._hold(self.handler.held)
            if not self.paused and not self._stalled:
                self._transport.resume_reading()

    def _hold(self, amount: int) -> None:
        grown, self._held = amount - self._held, amount
        self._listener.memory.hold(self, amount, grown)
