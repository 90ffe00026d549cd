"""Ports that a worker holds for servers that are started later, in its own process or in another one of its node.

A port that was merely free a moment ago may be gone: until the server binds it, the kernel may give it to any process,
for a listener or for the local end of a connection. Here a socket stays bound to the port, at all addresses, and never
listens. While it is, the kernel gives the port to nobody who does not ask for it by number, connections to it are
refused, and a server that sets SO_REUSEADDR can bind it and listen, beside the socket.

Rejected: to pass the bound socket to the server. Servers in other languages (gRPC's, as in JAX and Ray; PyTorch's) take
a number.
"""

from __future__ import annotations

import socket
from collections import deque

__all__ = ["HeldPorts"]

MAX_HELD = 256
"""How many ports a process holds; beyond that the oldest is released, which has long been bound by then."""


class HeldPorts:
    """The ports that this process holds; they are released with this object, or with the process."""

    def __init__(self) -> None:
        self._sockets: deque[socket.socket] = deque()
        """Not inherited by programs that this process executes."""

    def reserve(self, hold: bool) -> int:
        """Return a free port, which stays bound if `hold` is true; raise OSError if there is none."""
        sock = _bound()
        port = int(sock.getsockname()[1])
        if not hold:
            sock.close()
            return port
        self._sockets.append(sock)
        if len(self._sockets) > MAX_HELD:
            self._sockets.popleft().close()
        return port


def _bound() -> socket.socket:
    """Return a socket that is bound to a free port at all addresses: of both families, where there is IPv6."""
    try:
        return _bind(socket.AF_INET6, "::")
    except OSError:  # no IPv6 here, or no port that is free in both families
        return _bind(socket.AF_INET, "0.0.0.0")


def _bind(family: int, address: str) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind((address, 0))
    except BaseException:
        sock.close()
        raise
    return sock
