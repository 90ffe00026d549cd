"""How a proxy reads and closes its sockets: pieces that arrive, each delayed, and both ends of a connection closed."""

from __future__ import annotations

import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from rallypoint.readiness import wait_readable

__all__ = ["delayed_pieces", "end"]

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
