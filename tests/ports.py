"""Ports for servers that a test starts later, or that must stay closed: no other process gets them meanwhile.

`net.free_port` returns a port that was free a moment ago. Until the server binds it, the kernel may give it to any
process, for a listener or for the local end of a connection. With several test processes that happens now and then,
and a job then meets in another test's server. Here a socket stays bound to the port and never listens: the kernel
gives the port to nobody, connections to it are refused, and a server that sets SO_REUSEADDR can still bind it.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque

__all__ = ["reserve_port"]

_KEPT = 40
"""How many reservations a process keeps; the oldest is released first, long after its test."""

_reservations: deque[contextlib.ExitStack] = deque()


def reserve_port() -> int:
    """Return a port of loopback that only a process that asks for it by number gets."""
    with contextlib.ExitStack() as bound:
        port = 0
        for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            sock = bound.enter_context(socket.socket(family, socket.SOCK_STREAM))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):  # no IPv6 here, or another process has that port there
                sock.bind((address, port))
                port = sock.getsockname()[1]
        _reservations.append(bound.pop_all())
    if len(_reservations) > _KEPT:
        _reservations.popleft().close()
    return port
