"""Call a server, or the first of several that answers: find out whose it is, and open or resume a session there.

PyTorch's server understands the greeting too, and answers it in its own way; then `NotOurs` has the connection.

What happens at a relay only means to try elsewhere: after its end, whatever answers there may be anybody. Only that the
session has ended is believed, from a server with the identity that the session is of.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping
from typing import NamedTuple

from rallypoint import net
from rallypoint.deadline import Deadline
from rallypoint.errors import ConnectFailed, RallypointError
from rallypoint.protocol import BadMessage
from rallypoint.protocol.client import Client, Reply
from rallypoint.protocol.native import ACCEPTED, PREFACE, STANDBY, Standby, read_standby
from rallypoint.store.relay_address import RelayAddress
from rallypoint.store.route import Address, Route
from rallypoint.store.search import NOT_OF_SEVERAL, Search, StandsBy, Unwelcome

__all__ = ["Contact", "Dialer", "NotOurs", "answers", "dial"]

LEAST_S = 0.1
"""What a step of the greeting gets, however little time is left."""

Lock = contextlib.AbstractContextManager[object]


class NotOurs(Exception):
    """The server answered the greeting as PyTorch's does; the connection can be used for its protocol."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self.socket = sock


class Contact(NamedTuple):
    """A server that answered: the connection, how long the session may be without one, what came behind the welcome."""

    socket: socket.socket
    away_s: float
    replies: list[Reply]


class Dialer:
    """Tries the addresses of a route, round by round; `lock` is held whenever the protocol core is used.

    Where the core has a session, that is resumed. What is open is not repeated yet.
    """

    def __init__(self, route: Route, core: Client, lock: Lock, deadline: Deadline) -> None:
        self._route, self._core, self._lock = route, core, lock
        self._search = Search(route, deadline, resumes=bool(core.session))

    @property
    def why(self) -> str:
        """What the last round met."""
        return self._search.why

    @property
    def no_quorum(self) -> Mapping[str, str]:
        """What it met at each address, where one of them said that etcd has no quorum; else nothing."""
        return self._search.no_quorum

    def pause_s(self) -> float:
        """Return how long to wait before the next round; raise ConnectFailed or NoQuorum where there is to be none."""
        return self._search.pause_s()

    def try_all(self) -> Contact | None:
        """Try every address once; the route then knows where the one is that answered.

        Raises NotOurs (from a single address), or what ends the session for good.
        """
        for endpoint, turn in self._search.round():
            if isinstance(endpoint, RelayAddress):
                contact = self._call_relay(endpoint, turn)
                if contact is not None:
                    return contact
                continue
            try:
                return self._call(endpoint, turn)
            except NotOurs as answer:
                if not self._route.several:
                    raise
                answer.socket.close()
                self._search.failed(endpoint, NOT_OF_SEVERAL, useless=True)
            except StandsBy as error:
                self._search.stands_by(endpoint, error.answer)
            except ConnectFailed as error:
                self._search.failed(endpoint, error.tried)
            except (BadMessage, ValueError) as error:  # the latter for what is no host name
                if not self._route.several and not isinstance(error, BadMessage):
                    raise
                self._search.failed(endpoint, str(error), useless=True)
            except OSError as error:
                if self._search.ends(endpoint, error):
                    raise
                trouble = self._core.trouble
                self._search.failed(endpoint, trouble or error.strerror or str(error), no_quorum=bool(trouble))
        if self._search.wants_look:
            self._search.look()
        return None

    def _call(self, endpoint: net.Endpoint, turn: Deadline) -> Contact:
        sock = net.connect(*endpoint, turn, once=self._route.several or bool(self._core.session))
        self._core.trouble = ""  # what an earlier one said
        try:
            _accept(sock, turn)
            contact = self._greet(sock, self._route.peer(endpoint), turn)
        except NotOurs:
            raise
        except BaseException:
            sock.close()
            raise
        self._route.arrived(endpoint, self._core)
        return contact

    def _call_relay(self, relay: RelayAddress, turn: Deadline) -> Contact | None:
        """Call the relay; None where it is of no use now, or not a relay of this store."""
        try:
            with self._route.expecting(relay, self._core), contextlib.ExitStack() as undo:
                sock = relay.connect(turn)
                undo.callback(sock.close)
                _accept(sock, turn)
                try:
                    contact = self._greet(sock, self._route.peer(relay), turn)
                except ConnectionError as error:
                    raise error if isinstance(error, RallypointError) else Unwelcome(str(error)) from error
                undo.pop_all()
        except ConnectFailed as error:
            self._search.failed(relay, error.tried)
        except (NotOurs, BadMessage, OSError) as error:
            if self._search.ends(relay, error):
                raise
            trouble, unwelcome = self._core.trouble, isinstance(error, Unwelcome)
            why = trouble or str(error) or "not a relay"
            self._search.failed(relay, why, unwelcome=unwelcome, no_quorum=bool(trouble))
        else:
            self._route.arrived(relay, self._core)
            return contact
        return None

    def _greet(self, sock: socket.socket, peer: str, deadline: Deadline) -> Contact:
        with self._lock:
            hello = self._core.greet()
        sock.sendall(hello)
        replies: list[Reply] = []
        while not replies:
            data = _some(sock, 65536, deadline)
            with self._lock:
                replies = self._core.receive(data)
        with self._lock:
            return Contact(sock, self._core.welcome(replies[0], peer), replies[1:])


def _accept(sock: socket.socket, deadline: Deadline) -> None:
    """Say who calls; raise NotOurs where PyTorch's server answers, StandsBy or BadMessage where none serves."""
    sock.settimeout(max(deadline.remaining(), LEAST_S))
    sock.sendall(PREFACE)
    answer = b""
    while len(answer) < len(ACCEPTED):
        answer += _some(sock, len(ACCEPTED) - len(answer), deadline)
    if answer == PREFACE[-len(ACCEPTED) :]:
        raise NotOurs(sock)
    if answer == STANDBY:
        raise StandsBy(_read_standby(sock, deadline))
    if answer != ACCEPTED:
        raise BadMessage(f"not a store: it answered {answer!r}")


def _read_standby(sock: socket.socket, deadline: Deadline) -> Standby:
    told = STANDBY
    while (answer := read_standby(told)) is None:
        told += _some(sock, 65536, deadline)
    return answer


def dial(route: Route, core: Client, lock: Lock, deadline: Deadline) -> Contact:
    """Connect and open a session, trying again until the deadline.

    Raises ConnectFailed, NoQuorum, NotOurs (from a single address), or what ends the session for good.
    """
    dialer = Dialer(route, core, lock, deadline)
    while (contact := dialer.try_all()) is None:
        time.sleep(dialer.pause_s())
    return contact


def answers(address: Address, deadline: Deadline) -> bool:
    """Say whether a server still answers, or hangs up, in time: on a connection of its own, which waits for nothing.

    A relay answers by itself, also while its server is away.
    """
    try:
        with _connect(address, deadline) as sock:
            sock.sendall(PREFACE)
            return bool(_some(sock, 1, deadline))
    except OSError as error:
        return not isinstance(error, (ConnectFailed, TimeoutError))


def _connect(address: Address, deadline: Deadline) -> socket.socket:
    if isinstance(address, RelayAddress):
        return address.connect(deadline)
    return net.connect(*address, deadline, once=True)


def _some(sock: socket.socket, most: int, deadline: Deadline) -> bytes:
    sock.settimeout(max(deadline.remaining(), LEAST_S))
    if deadline.expired():
        raise TimeoutError(f"the greeting took longer than {deadline.timeout_s:g} s")
    data = sock.recv(most)
    if not data:
        raise ConnectionError("the server closed it")
    return data
