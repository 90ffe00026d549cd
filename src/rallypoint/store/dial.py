"""Call a server, or the first of several that answers: find out whose it is, and open or resume a session there.

PyTorch's server understands the greeting too, and answers it in its own way; then `NotOurs` has the connection.
"""

from __future__ import annotations

import socket
import time

from rallypoint import net
from rallypoint.core.c10d import BadMessage
from rallypoint.core.client import Client, Reply
from rallypoint.core.native import ACCEPTED, PREFACE
from rallypoint.deadline import Deadline
from rallypoint.errors import ConnectFailed, RallypointError
from rallypoint.store.route import NO_GATEWAY, Route, Search

__all__ = ["NotOurs", "answers", "dial"]

LEAST_S = 0.1
"""What a step of the greeting gets, however little time is left."""


class NotOurs(Exception):
    """The server answered the greeting as PyTorch's does; the connection can be used for its protocol."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self.socket = sock


def dial(route: Route, core: Client, deadline: Deadline) -> tuple[socket.socket, float, list[Reply]]:
    """Connect, say hello, and repeat what a cut left open; try again until the deadline if that is cut, too.

    Returns the socket, the session's grace, and what came behind the welcome; `route` knows then where that is. Raises
    ConnectFailed, NotOurs (from a single address), or what ends the session for good.
    """
    search = Search(route, deadline)
    while True:
        for endpoint, turn in search.round():
            try:
                return _call(endpoint, route, core, turn, deadline)
            except NotOurs as answer:
                if not route.several:
                    raise
                answer.socket.close()
                search.failed(endpoint, NO_GATEWAY, useless=True)
            except ConnectFailed as error:
                search.failed(endpoint, error.tried)
            except (BadMessage, ValueError) as error:  # the latter for what is no host name
                if not route.several and not isinstance(error, BadMessage):
                    raise
                search.failed(endpoint, str(error), useless=True)
            except OSError as error:
                if isinstance(error, RallypointError):
                    raise
                search.failed(endpoint, error.strerror or str(error))
        time.sleep(search.pause_s())


def answers(endpoint: net.Endpoint, deadline: Deadline) -> bool:
    """Say whether a server still answers, or hangs up, in time: on a connection of its own, which waits for nothing."""
    try:
        with net.connect(*endpoint, deadline, once=True) as sock:
            sock.sendall(PREFACE)
            return bool(_some(sock, 1, deadline))
    except OSError as error:
        return not isinstance(error, (ConnectFailed, TimeoutError))


def _call(
    endpoint: net.Endpoint, route: Route, core: Client, turn: Deadline, deadline: Deadline
) -> tuple[socket.socket, float, list[Reply]]:
    """Try one address: it must have answered in its turn, and then what is repeated has until the deadline."""
    sock = net.connect(*endpoint, turn, once=route.several)
    try:
        grace_s, replies = _introduce(sock, core, route.peer(endpoint), turn)
        sock.settimeout(max(deadline.remaining(), LEAST_S))
        sock.sendall(core.repeat())
    except NotOurs:
        raise
    except BaseException:
        sock.close()
        raise
    route.arrived(endpoint, core.server)
    return sock, grace_s, replies


def _introduce(sock: socket.socket, core: Client, peer: str, deadline: Deadline) -> tuple[float, list[Reply]]:
    sock.settimeout(max(deadline.remaining(), LEAST_S))
    sock.sendall(PREFACE)
    answer = b""
    while len(answer) < len(ACCEPTED):
        answer += _some(sock, len(ACCEPTED) - len(answer), deadline)
    if answer == PREFACE[-len(ACCEPTED) :]:
        raise NotOurs(sock)
    if answer != ACCEPTED:
        raise BadMessage(f"not a store: it answered {answer!r}")
    sock.sendall(core.greet())
    replies: list[Reply] = []
    while not replies:
        replies = core.receive(_some(sock, 65536, deadline))
    return core.welcome(replies[0], peer), replies[1:]


def _some(sock: socket.socket, most: int, deadline: Deadline) -> bytes:
    sock.settimeout(max(deadline.remaining(), LEAST_S))
    if deadline.expired():
        raise TimeoutError(f"the greeting took longer than {deadline.timeout_s:g} s")
    data = sock.recv(most)
    if not data:
        raise ConnectionError("the server closed it")
    return data
