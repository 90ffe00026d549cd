"""How a client reads its socket: it spins for a moment before it blocks.

Sleeping and waking cost more than a reply of our server takes, if that runs on another core of the same machine. So a
caller that has just sent a request polls the socket for up to `SPIN_S`. If that never helps (the server is remote, or
shares this core), it soon spins only once in a thousand calls: each failed spin doubles the number of calls that do
not, a successful one resets it. Data that is there at the first poll, or arrived while another process had our core,
is not a success: it arrived because we yielded the core.
"""

from __future__ import annotations

import select
import socket
import struct
import time

__all__ = ["SLICE_S", "SocketReader", "poll"]

SLICE_S = 1.0
"""The longest single blocking read; a longer wait takes several."""

SPIN_S = 50e-6
"""How long a caller spins before it blocks."""

PREEMPTED_S = 8e-6
"""A poll takes less than one microsecond; one that took this long was preempted."""

MAX_SPIN_SKIP = 10
"""After failed spins, at most the next 2 to the power of this many calls do not spin."""

ROOM, MORE_ROOM = 8192, 1 << 20
"""The buffer size of a read, and of the next after a full read. A buffer of more than 128 KiB costs 15 µs a read,
because the allocator maps it from the kernel each time."""

_SLICE = struct.pack("ll", int(SLICE_S), 0)


class SocketReader:
    """The reading end of a connected socket, for one thread at a time."""

    __slots__ = ("_failed_spins", "_poll", "_room", "_skip", "socket")

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _SLICE)
        poller = select.poll()
        poller.register(sock, select.POLLIN)
        self._poll = poller.poll
        self._room = ROOM
        self._failed_spins = self._skip = 0

    def read_soon(self) -> bytes | None:
        """Return received data, as `read` does, after spinning for a reply that is likely to arrive at once."""
        if self._skip:
            self._skip -= 1
        else:
            self._spin()
        try:
            data = self.socket.recv(ROOM)
        except BlockingIOError:
            return None
        except OSError:
            return b""
        self._room = ROOM if len(data) < ROOM else MORE_ROOM
        return data

    def _spin(self) -> None:
        now, polled_at = time.monotonic, 0.0
        until = now() + SPIN_S
        while not self._poll(0):
            polled_at = now()
            if polled_at > until:
                break
        if polled_at < until and now() - polled_at < PREEMPTED_S:
            self._failed_spins = 0
        else:
            self._failed_spins = min(self._failed_spins + 1, MAX_SPIN_SKIP)
            self._skip = 1 << self._failed_spins

    def read(self, within_s: float = SLICE_S) -> bytes | None:
        """Return received data, b"" at the end, None if nothing arrived within `within_s`, or within one slice."""
        try:
            if within_s < SLICE_S and not poll(self.socket, select.POLLIN, within_s):
                return None
            data = self.socket.recv(self._room)
        except BlockingIOError:
            return None
        except OSError:
            return b""
        self._room = ROOM if len(data) < self._room else MORE_ROOM
        return data


def poll(sock: socket.socket, events: int, timeout_s: float) -> int:
    """Return the poll events of a socket; POLLHUP if it is closed."""
    poller = select.poll()
    try:
        poller.register(sock, events)
        happened = poller.poll(timeout_s * 1000)
    except (OSError, ValueError):
        return select.POLLHUP
    return happened[0][1] if happened else 0
