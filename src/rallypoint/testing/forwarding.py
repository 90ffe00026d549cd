"""Parts of a proxy: pieces that arrive, each delayed; both ends of a connection closed; a port that stays reserved."""

from __future__ import annotations

import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from rallypoint.readiness import wait_readable

__all__ = ["check_bytes", "delayed_pieces", "end", "reserve_port"]

PIECE_BYTES = 65536

MOST_DELAYED = 256
"""Pieces that are delayed at a time in one direction of a connection; then the sender waits."""


def delayed_pieces(source: socket.socket, delay_s: Callable[[], float]) -> Iterator[bytes]:
    """Yield what arrives, each piece when its delay is over, until the end; the delay may change meanwhile."""
    delayed: deque[tuple[float, bytes]] = deque()
    ended = False
    while delayed or not ended:
        left_s = max(0.0, delayed[0][0] - time.monotonic()) if delayed else None
        full = ended or len(delayed) >= MOST_DELAYED
        if left_s is not None and (full or not wait_readable(source, timeout_s=left_s)):
            due_at, data = delayed.popleft()
            time.sleep(max(0.0, due_at - time.monotonic()))
            yield data
            continue
        data = source.recv(PIECE_BYTES)
        ended = not data
        if data and (delayed or delay_s()):
            delayed.append((time.monotonic() + delay_s(), data))
        elif data:
            yield data


def end(sockets: Sequence[socket.socket]) -> None:
    """Close both directions of connections, after the bytes that were written to them."""
    for sock in sockets:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
    for sock in sockets:
        sock.close()


def reserve_port() -> socket.socket:
    """Return a socket bound to a free port of loopback; it never listens, so a server can bind the port, too."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    return sock


def check_bytes(name: str, count: int, least: int) -> None:
    """Raise TypeError or ValueError unless an argument is a number of bytes, and not less than the least one."""
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"{name} must be a number of bytes, not {count!r}")
    if count < least:
        raise ValueError(f"{name} must be at least {least} bytes, got {count}")
