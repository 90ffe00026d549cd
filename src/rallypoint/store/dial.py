"""Call a server: connect, find out whose it is, and open or resume a session there.

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

__all__ = ["NotOurs", "dial"]

LEAST_S = 0.1
"""What a step of the greeting gets, however little time is left."""


class NotOurs(Exception):
    """The server answered the greeting as PyTorch's does; the connection can be used for its protocol."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self.socket = sock


def dial(endpoint: net.Endpoint, core: Client, deadline: Deadline) -> tuple[socket.socket, float, list[Reply]]:
    """Connect, say hello, and repeat what a cut left open; try again until the deadline if that is cut, too.

    Returns the socket, the session's grace, and what came behind the welcome. Raises ConnectFailed, NotOurs, or what
    ends the session for good.
    """
    pause_s = 0.01
    while True:
        sock = net.connect(*endpoint, deadline)
        try:
            return sock, *_introduce(sock, core, endpoint, deadline)
        except NotOurs:
            raise
        except BadMessage as error:
            sock.close()
            raise _unreached(endpoint, str(error), deadline) from None
        except BaseException as error:
            sock.close()
            if not isinstance(error, OSError) or isinstance(error, RallypointError):
                raise
            if deadline.expired():
                raise _unreached(endpoint, error.strerror or str(error), deadline) from None
        time.sleep(min(pause_s, deadline.remaining()))
        pause_s = min(2 * pause_s, 0.5)


def _introduce(
    sock: socket.socket, core: Client, endpoint: net.Endpoint, deadline: Deadline
) -> tuple[float, list[Reply]]:
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
    grace_s = core.welcome(replies[0], str(endpoint))
    sock.sendall(core.repeat())
    return grace_s, replies[1:]


def _some(sock: socket.socket, most: int, deadline: Deadline) -> bytes:
    sock.settimeout(max(deadline.remaining(), LEAST_S))
    if deadline.expired():
        raise TimeoutError(f"the greeting took longer than {deadline.timeout_s:g} s")
    data = sock.recv(most)
    if not data:
        raise ConnectionError("the server closed it")
    return data


def _unreached(endpoint: net.Endpoint, why: str, deadline: Deadline) -> ConnectFailed:
    peer = str(endpoint)
    return ConnectFailed(peer=peer, timeout_s=deadline.timeout_s, tried={peer: why})
