"""The greeting: the first handler of every connection, until its first bytes tell the protocol, and it may speak it.

One of our prefaces, or PyTorch's protocol, whose messages begin with 0; a capital letter is an HTTP method, and 22 is
TLS, in which the same begins again. Anything else is dropped. `Admission` says what the peer must show: a preface may
be answered by a challenge, and then everything waits for the proof. The application that is served provides the handler
of the protocol, which takes over the connection.

Rejected: recognition inside of `Connection`. A connection carries bytes, whatever they mean; and every later step
before the first request (who the peer is, whether it may speak this protocol) belongs here as well.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from rallypoint.protocol import BadMessage, challenge, channels, native

if TYPE_CHECKING:
    from rallypoint.protocol.challenge import ServerChallenge
    from rallypoint.server.admission import Admission
    from rallypoint.server.connections.connection import Connection, ProtocolHandler
    from rallypoint.server.http_site import HttpSite
    from rallypoint.server.tls_queue import TlsTurn

__all__ = ["Application", "Greeting", "PeerProtocol", "Redirect", "recognise"]


class PeerProtocol(Enum):
    """The protocols that a peer may speak."""

    NATIVE = "our protocol"
    CHANNELS = "channels of our protocol"
    OWN_HTTP = "HTTP of our own clients"
    TORCH = "PyTorch's protocol"
    HTTP = "HTTP"


TLS_FIRST_BYTE = b"\x16"
"""The first byte of every TLS connection: a handshake record."""

MAX_HELLO_BYTES = 16 * 1024
"""The most that a connection may send while it waits to begin TLS: one record, and a client's first is shorter."""

_PREFACES = {
    PeerProtocol.NATIVE: (native.PREFACE, native.ACCEPTED),
    PeerProtocol.CHANNELS: (channels.PREFACE, channels.ACCEPTED),
    PeerProtocol.OWN_HTTP: (challenge.HTTP_PREFACE, native.ACCEPTED),
}
"""The first bytes of a peer, and the reply to them."""


class Redirect(NamedTuple):
    """The reply to a preface that sends the peer to another server."""

    reply: bytes


class Application(Protocol):
    """What a listener serves: a store, a relay, or one round of a relay."""

    @property
    def site(self) -> HttpSite:
        """What is shown over HTTP."""

    def handler(self, protocol: PeerProtocol, connection: Connection) -> ProtocolHandler | Redirect | None:
        """Return the handler of a new connection for any protocol but HTTP; None if it has no channels.

        Raise BadMessage to drop the peer.
        """

    def held_bytes(self) -> int:
        """Return the size of the state in bytes."""


def recognise(data: bytes) -> PeerProtocol | None:
    """Return the protocol of a peer by its first bytes; None: more are needed. Raises BadMessage."""
    for protocol, (preface, _) in _PREFACES.items():
        if data.startswith(preface):
            return protocol
    if any(preface.startswith(data) for preface, _ in _PREFACES.values()):
        return None
    if data[0] == 0:
        return PeerProtocol.TORCH
    if 65 <= data[0] <= 90:
        return PeerProtocol.HTTP
    raise BadMessage(f"unrecognized protocol; first bytes: {data[:16]!r}")


class Greeting:
    """The handler of a connection until its peer has shown what it speaks, and that it may."""

    __slots__ = ("_admission", "_application", "_challenge", "_connection", "_data", "_denied", "_protocol", "_turn")

    held = 0
    blocked = greeted = False

    def __init__(self, application: Application, connection: Connection, admission: Admission) -> None:
        self._application = application
        self._connection = connection
        self._admission = admission
        self._data = b""
        self._denied = False
        self._protocol: PeerProtocol | None = None
        self._challenge: ServerChallenge | None = None
        self._turn: TlsTurn | None = None

    def receive(self, data: bytes) -> bytes:
        """Pass the connection to the handler of its protocol, if that can be told by now."""
        if self._challenge is not None:
            self._check_proof(self._challenge, data)
            return b""
        self._data += data
        if self._data[:1] == TLS_FIRST_BYTE and not self._connection.over_tls:
            self._await_tls()
            return b""
        protocol = recognise(self._data)
        if protocol is not None:
            self._admit(protocol)
        return b""

    def end(self) -> None:
        """Count a peer that hung up when it was asked for the token, or for a certificate.

        Not one of this machine: a process that looks who has a port asks as well, and hangs up.
        """
        self._settle_turn(proved=False)
        if self._denied or self._connection.is_local:
            return
        if self._challenge is not None:
            self._note("no token")
        elif self._connection.over_tls and not self._data and self._admission.demands_certificate:
            self._note("it hung up when it was asked for a certificate")

    # TLS

    def _await_tls(self) -> None:
        """Begin TLS in turn; a server without it says so, or the client would try again and again."""
        admission, connection = self._admission, self._connection
        if admission.tls is None:
            connection.log_error("it speaks TLS, and this server has no certificate (--tls-cert)")
            connection.deny(challenge.NO_TLS)
        elif self._turn is None:
            peer = admission.tls_peer(connection)
            self._turn = admission.tls_queue.enter(peer, self._begin_tls, connection.close)
        elif len(self._data) > MAX_HELLO_BYTES:
            raise BadMessage(f"more than {MAX_HELLO_BYTES} bytes before the TLS handshake")

    def _begin_tls(self) -> None:
        tls, connection = self._admission.tls, self._connection
        if tls is not None and not connection.closing:
            first, self._data = self._data, b""
            connection.start_tls(tls.context(), first, self._tls_failed)

    def _tls_failed(self, why: str) -> None:
        """Count the peer as denied, and let it read the alert."""
        self._denied = True
        self._note(why)
        self._connection.close()

    def _settle_turn(self, proved: bool) -> None:
        """Make room for the next handshake of this host, at once if the peer has proved who it is."""
        if self._turn is not None:
            self._turn.proved() if proved else self._turn.ended()

    # The protocol

    def _admit(self, protocol: PeerProtocol) -> None:
        """Begin, if the peer may speak this protocol; challenge it first, if it must prove that it knows the token."""
        admission, connection = self._admission, self._connection
        if not admission.protects:
            self._begin(protocol, b"")
            return
        preface = _PREFACES.get(protocol, (b"", b""))[0]
        if preface:
            why = admission.why_not_native(connection.socket, connection.over_tls)
            if why:
                self._deny(why, challenge.NEEDS_TLS)
                return
            self._challenge = admission.challenge(preface)
            if self._challenge is not None:
                self._protocol, rest, self._data = protocol, self._data[len(preface) :], preface
                connection.send(self._challenge.question)
                self._check_proof(self._challenge, rest)
                return
        elif protocol is PeerProtocol.TORCH and (why := admission.why_not_torch(connection.socket)):
            self._deny(why)
            return
        self._begin(protocol, b"")

    def _check_proof(self, asked: ServerChallenge, data: bytes) -> None:
        try:
            proved = asked.feed(data)
        except challenge.Denied as error:
            self._challenge = None
            self._deny(str(error), challenge.DENIED)
            return
        if proved is not None and self._protocol is not None:
            self._challenge = None
            proof, rest = proved
            self._data += rest
            self._begin(self._protocol, proof)

    def _deny(self, why: str, answer: bytes = b"") -> None:
        """Refuse the peer: at once, or later if its host has failed often."""
        connection = self._connection
        self._settle_turn(proved=False)
        connection.stall()
        self._admission.denied.deny(self._host, why, lambda: connection.deny(answer), connection.close)

    def _note(self, why: str) -> None:
        """Count a peer that ended the connection itself."""
        self._admission.denied.note(self._host, why)

    @property
    def _host(self) -> str:
        return self._connection.peer.host or "unix socket"

    def _begin(self, protocol: PeerProtocol, proof: bytes) -> None:
        """Answer the preface, with our proof if there was a challenge, and pass the connection on."""
        connection, application = self._connection, self._application
        self._settle_turn(proved=bool(proof) or not self._admission.token)
        preface, accepted = _PREFACES.get(protocol, (b"", b""))
        if protocol in (PeerProtocol.HTTP, PeerProtocol.OWN_HTTP):
            from rallypoint.server.http import HttpHandler  # imported on first use

            connection.send(accepted + proof)
            trusted = bool(proof) or protocol is PeerProtocol.OWN_HTTP
            self._pass_on(HttpHandler(application.site, connection, self._admission, trusted), len(preface))
            return
        handler = application.handler(protocol, connection)
        if isinstance(handler, Redirect):
            connection.send(handler.reply[:4] + proof + handler.reply[4:])
            connection.close()
        elif handler is None and proof:
            connection.send(challenge.NO_CHANNELS + proof)
            connection.close()
        elif handler is None:  # a preface is valid in PyTorch's protocol, too: a ping
            self._admit(PeerProtocol.TORCH)
        else:
            connection.send(accepted + proof)
            self._pass_on(handler, len(preface))

    def _pass_on(self, handler: ProtocolHandler, start: int) -> None:
        self._connection.handler = handler
        self._connection.data_received(self._data[start:])
