"""Processes of another user: they connect, or listen, and hand their sockets to the test.

A socket belongs to the user of the process that made it, whoever holds it later.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.raw_peer import AMPLE_S

from rallypoint.readiness import wait_readable

__all__ = ["NOBODY", "SOMEBODY", "connections_of", "running_as"]

NOBODY, SOMEBODY = 65534, 65533
"""Two users without any rights."""

AT_ONCE = 200
"""Descriptors in one message; the kernel takes 253."""


@contextlib.contextmanager
def running_as(user: int, work: Callable[[], object]) -> Iterator[int]:
    """Run `work` in a process of a user; yield its pid, and kill it in the end."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            work()
        finally:
            os._exit(0)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)
        os.waitpid(pid, 0)


def connections_of(user: int, places: Sequence[tuple[Any, Any]]) -> list[socket.socket]:
    """Return connections that a process of a user has made, each to an address and from one, or from any (None)."""
    ours, theirs = socket.socketpair()

    def connect() -> None:
        made = [_connect(address, source) for address, source in places]
        for start in range(0, len(made), AT_ONCE):
            socket.send_fds(theirs, [b"!"], [sock.fileno() for sock in made[start : start + AT_ONCE]])
            theirs.recv(1)
        os.read(theirs.fileno(), 1)  # until the test is done with this process

    found: list[socket.socket] = []
    with ours, running_as(user, connect):
        theirs.close()
        while len(found) < len(places):
            assert wait_readable(ours, timeout_s=AMPLE_S), "no connections"
            _, descriptors, _, _ = socket.recv_fds(ours, 1, AT_ONCE)
            assert descriptors, f"user {user} could not connect"
            found += [socket.socket(fileno=descriptor) for descriptor in descriptors]
            ours.send(b"!")
    for sock in found:
        sock.settimeout(AMPLE_S)
    return found


def _connect(address: Any, source: Any) -> socket.socket:
    if isinstance(address, str):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address)
        return sock
    return socket.create_connection(address, AMPLE_S, (source, 0) if source else None)
