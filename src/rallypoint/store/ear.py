"""How a client reads its socket: it looks for an answer for a moment before it sleeps until one comes.

To be put to sleep and woken costs more than our server takes to answer, when that runs on another core of the same
machine. So a caller that has just asked looks at the socket for up to `LOOK_S`. Where that never helps (the server is
far away, or shares this core) it soon looks only once in a thousand calls: each look in vain doubles the pause, one
that finds something ends it. What is there at the first look, or came while another process had our core, was not
found by looking: it came because we stood aside.
"""

from __future__ import annotations

import select
import socket
import struct
import time

__all__ = ["SLICE_S", "Ear", "poll"]

SLICE_S = 1.0
"""How long one blocking read lasts at most; a longer wait is several."""

LOOK_S = 50e-6
"""How long a caller looks before it sleeps."""

LAPSE_S = 8e-6
"""A look takes less than one microsecond; one that took this long was interrupted."""

MAX_PAUSE = 10
"""After looks in vain, the next 2 to the power of this many calls do not look, at most."""

ROOM, MORE_ROOM = 8192, 1 << 20
"""How much one read takes, and how much once a read was full. Room for more than 128 KiB costs 15 µs a read, for the
allocator asks the kernel for it each time."""

_SLICE = struct.pack("ll", int(SLICE_S), 0)


class Ear:
    """The reading end of a connected socket, for one thread at a time."""

    __slots__ = ("_in_vain", "_pause", "_poll", "_room", "socket")

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _SLICE)
        poller = select.poll()
        poller.register(sock, select.POLLIN)
        self._poll = poller.poll
        self._room = ROOM
        self._in_vain = self._pause = 0

    def hear_soon(self) -> bytes | None:
        """Return what came, as `hear` does, after looking a moment for what is likely to come at once."""
        if self._pause:
            self._pause -= 1
        else:
            self._look()
        try:
            data = self.socket.recv(ROOM)
        except BlockingIOError:
            return None
        except OSError:
            return b""
        self._room = ROOM if len(data) < ROOM else MORE_ROOM
        return data

    def _look(self) -> None:
        now, looked_at = time.monotonic, 0.0
        until = now() + LOOK_S
        while not self._poll(0):
            looked_at = now()
            if looked_at > until:
                break
        if looked_at < until and now() - looked_at < LAPSE_S:
            self._in_vain = 0
        else:
            self._in_vain = min(self._in_vain + 1, MAX_PAUSE)
            self._pause = 1 << self._in_vain

    def hear(self, within_s: float = SLICE_S) -> bytes | None:
        """Return what came, b"" at the end, None when nothing came in that time, or in a slice of it."""
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
    """Return what happened to a socket; a closed one has hung up."""
    poller = select.poll()
    try:
        poller.register(sock, events)
        happened = poller.poll(timeout_s * 1000)
    except (OSError, ValueError):
        return select.POLLHUP
    return happened[0][1] if happened else 0
