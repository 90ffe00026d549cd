"""Connect to a server, or to the first of several that replies; identify it, and open or resume a session.

PyTorch's server replies to the greeting, too, in its own way: then `ForeignServer` is raised, with the connection.

After a failure at a relay, the other addresses are tried: the relay may have ended, and another program may have its
address. A reply from there ends the session only if it says that the session has ended, and the server has the
session's identity.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping
from typing import NamedTuple, cast

from rallypoint import net
from rallypoint.client.routing.relay_address import RelayAddress
from rallypoint.client.routing.route import Address, Route
from rallypoint.client.routing.search import Search
from rallypoint.client.routing.server_replies import IsStandby, SessionRefused, accepts
from rallypoint.deadline import Deadline
from rallypoint.errors import ConnectFailed
from rallypoint.protocol import BadMessage
from rallypoint.protocol.challenge import Denied
from rallypoint.protocol.native import PREFACE, STANDBY
from rallypoint.protocol.native_client import ClientProtocol, Reply
from rallypoint.security.client_security import ClientSecurity

__all__ = ["DialResult", "Dialer", "ForeignServer", "answers", "dial", "serves"]

LEAST_S = 0.1
"""Minimum timeout of each step of the greeting, however little time is left."""

Lock = contextlib.AbstractContextManager[object]


class ForeignServer(Exception):
    """The server replied to the greeting as PyTorch's does; the connection can be used for its protocol."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self.socket = sock


class DialResult(NamedTuple):
    """An opened session: its connection, its grace period, and the replies that followed the welcome."""

    socket: socket.socket
    grace_s: float
    replies: list[Reply]


class Dialer:
    """Tries the addresses of a route, round by round; holds `lock` whenever it uses the protocol core.

    Resumes the session of the core, if it has one. The caller repeats unanswered requests.
    """

    def __init__(self, route: Route, core: ClientProtocol, lock: Lock, deadline: Deadline) -> None:
        self._route, self._core, self._lock = route, core, lock
        self._search = Search(route, deadline, resumes=bool(core.session), recovers=core.recovers)

    @property
    def explain_failure(self) -> str:
        """Why the last round failed."""
        return self._search.explain_failure

    @property
    def no_quorum(self) -> Mapping[str, str]:
        """The reason at each address, if one of them reported that etcd has no quorum; else empty."""
        return self._search.no_quorum

    def pause_s(self) -> float:
        """Return the pause before the next round; raise ConnectFailed or NoQuorum if there is none."""
        return self._search.pause_s()

    def try_all(self) -> DialResult | None:
        """Try every address once; after a success, the route knows the current address.

        Raises ForeignServer (from a single address), or the error that ends the session.
        """
        for address, turn in self._search.round():
            self._core.trouble = ""  # reported by an earlier server
            try:
                return self._dial(address, turn)
            except ConnectFailed as error:
                self._search.unreachable(address, error)
            except (BadMessage, Denied, ValueError, OSError) as raised:  # ValueError: an invalid host name
                cause = self._route.security.failure(raised, self._route.peer(address)) or raised
                if self._search.ends(address, cause) or (isinstance(cause, ValueError) and not self._route.several):
                    raise cause from None
                why = (cause.strerror if isinstance(cause, OSError) else None) or str(cause)
                self._search.attempt_failed(address, cause, why, self._core.trouble)
        if self._search.wants_look:
            self._search.look()
        return None

    def _dial(self, address: Address, turn: Deadline) -> DialResult:
        with self._route.expecting_identity(address, self._core), contextlib.ExitStack() as undo:
            security = self._route.security
            sock = _connect(address, turn, security, once=self._route.several or bool(self._core.session))
            undo.callback(sock.close)
            greeting = security.greet(sock, PREFACE, turn)
            if greeting.standby is not None:
                raise IsStandby(greeting.standby)
            if not accepts(greeting.answer, self._route, address):
                security.check_foreign(sock, self._route.peer(address))
                undo.pop_all()
                raise ForeignServer(sock)
            contact = self._greet(sock, self._route.peer(address), turn)
            undo.pop_all()
        self._route.arrived(address, self._core)
        return contact

    def _greet(self, sock: socket.socket, peer: str, deadline: Deadline) -> DialResult:
        with self._lock:
            hello = self._core.greet()
        replies: list[Reply] = []
        try:
            sock.sendall(hello)
            while not replies:
                data = _receive(sock, 65536, deadline)
                with self._lock:
                    replies = self._core.receive(data)
        except ConnectionError as error:
            raise SessionRefused(error.strerror or str(error)) from error
        with self._lock:
            return DialResult(sock, self._core.welcome(replies[0], peer), replies[1:])


def dial(route: Route, core: ClientProtocol, lock: Lock, deadline: Deadline) -> DialResult:
    """Connect and open a session, retrying until the deadline.

    Raises ConnectFailed, NoQuorum, ForeignServer (from a single address), or the error that ends the session.
    """
    dialer = Dialer(route, core, lock, deadline)
    while (contact := dialer.try_all()) is None:
        time.sleep(dialer.pause_s())
    return contact


def answers(address: Address, deadline: Deadline, security: ClientSecurity) -> bool:
    """Return whether a server replies, or hangs up, in time, on a new connection without pending requests.

    A relay replies itself, even while its server is down, and a server even while it is a standby.
    """
    return _read_greeting(address, deadline, security) is not None


def serves(address: Address, deadline: Deadline, security: ClientSecurity) -> bool:
    """Return the result of `answers`, but False for a standby: it was deposed, and no longer serves its clients."""
    return _read_greeting(address, deadline, security) not in (None, STANDBY)


def _read_greeting(address: Address, deadline: Deadline, security: ClientSecurity) -> bytes | None:
    """Return a server's reply to the preface; b"" if it denies us or hangs up, None if there is no reply."""
    try:
        with _connect(address, deadline, security, once=True) as sock:
            return security.greet(sock, PREFACE, deadline).answer
    except (OSError, BadMessage, Denied) as error:
        return None if isinstance(error, (ConnectFailed, TimeoutError)) else b""


def _connect(address: Address, deadline: Deadline, security: ClientSecurity, once: bool) -> socket.socket:
    """Connect, and start TLS if the address needs it; raise ssl.SSLError and OSError."""
    if isinstance(address, RelayAddress):
        return address.connect(deadline)
    context = security.context_for(address.host)  # first: it may raise
    sock = net.connect(*address, deadline, once=once)
    if context is None:
        return sock
    from rallypoint.client.tls_socket import wrap  # imported on first use

    return cast(socket.socket, wrap(sock, context, address.host, deadline))


def _receive(sock: socket.socket, most: int, deadline: Deadline) -> bytes:
    sock.settimeout(max(deadline.remaining(), LEAST_S))
    if deadline.expired():
        raise TimeoutError(f"the greeting took longer than {deadline.timeout_s:g} s")
    data = sock.recv(most)
    if not data:
        raise ConnectionError("the server closed it")
    return data
