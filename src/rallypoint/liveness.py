"""How a connection finds out that its peer's host has vanished: keep-alive probes, and how long that host was silent.

A host that loses its power or its network says nothing. Its peer's kernel sends a keep-alive probe every second, which
the kernel over there acknowledges even if its process is busy or stopped. The kernel gives up after 6 s in vain, but:
- Data in flight restarts its clock: whoever sends to the vanished host every few seconds waits up to 12 s.
- Where our own interface lost its carrier, probes and retransmissions may fail locally, and then do not count.
So whoever owns a connection also looks at TCP_INFO, which has the time since anything was received from that host, and
drops the connection once that is `VANISHED_S`. A server looks by a `PeerWatch` a connection, a blocking client in its
monitoring thread. Where there is no TCP_INFO (macOS), the kernel's keep-alive remains.

After a pause of ours (a suspended virtual machine, SIGSTOP) the silence includes the pause, and the acknowledgements
are still on their way. So whoever looks late looks again a second later before it judges (`PauseDetector`).

Rejected: pings of our own. PyTorch's protocol has none, and a process that is stopped would not answer.
"""

from __future__ import annotations

import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

__all__ = ["LAST_PROBE_S", "PAUSE_S", "TICK_S", "VANISHED_S", "PauseDetector", "PeerWatch", "keep_alive", "silence_s"]

VANISHED_S = 5.75
"""How long a host may be silent: a little less than the kernel's 6 s, so that it is we who notice, and say so."""

LAST_PROBE_S = 0.25
"""How long before that moment one more probe is sent: whoever is back after a cut of 4 s is heard in time."""

PAUSE_S = 1.0
"""How late we may look and still trust what we see; and how long acknowledgements get to arrive otherwise."""

TICK_S = 0.01
"""The kernel counts in ticks of up to so long: a look waits for one more, or it might come just before the moment."""

_RTO_MAX_MS = 44  # TCP_RTO_MAX_MS of Linux 6.15, which Python has no name for
_RECEIVED = struct.Struct("=52xII")  # in struct tcp_info: milliseconds since data, and since an acknowledgement


def keep_alive(sock: socket.socket, *, idle_s: int = 1, interval_s: int = 1, count: int = 5) -> None:
    """Let the kernel find a peer whose host has vanished, after `idle_s + interval_s * count` seconds.

    On Linux that also gives up a peer that lives but has read nothing for so long while its window was full. Data is
    sent again at least every `interval_s`, where the kernel can: otherwise the next attempt after a cut of 4 s would
    come when the connection has been given up.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle = "TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE"  # the latter on macOS
    limit_ms = (idle_s + interval_s * count) * 1000
    options = {idle: idle_s, "TCP_KEEPINTVL": interval_s, "TCP_KEEPCNT": count, "TCP_USER_TIMEOUT": limit_ms}
    for option, value in options.items():
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    if sys.platform == "linux":
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, _RTO_MAX_MS, interval_s * 1000)


def silence_s(sock: socket.socket) -> float | None:
    """Return for how long the peer's host has sent nothing, no acknowledgement either; None where that is unknown."""
    if sys.platform != "linux":
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.size)
        return float(min(_RECEIVED.unpack(info))) / 1000
    except (OSError, struct.error):  # closed, or not TCP
        return None


class PauseDetector:
    """Tells whether this process, or its machine, was paused since it planned to look."""

    __slots__ = ("_due_at", "_late")

    def __init__(self) -> None:
        self._due_at, self._late = float("inf"), False

    def plan(self, delay_s: float) -> None:
        """Note when the next look is due."""
        self._due_at = time.monotonic() + delay_s

    def paused(self) -> bool:
        """Return whether the look that is due comes too late; not twice in a row, or a slow process never judges."""
        self._late = not self._late and time.monotonic() - self._due_at > PAUSE_S
        return self._late


class PeerWatch:
    """Watches one asyncio transport; calls `vanished` with the silence in seconds, once, when its peer's host is gone.

    Each look says when the next is due, so a connection in use costs one every 5 s.
    """

    __slots__ = ("_loop", "_pauses", "_socket", "_timer", "_vanished")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sock: socket.socket, vanished: Callable[[float], object]
    ) -> None:
        self._loop, self._socket, self._vanished = loop, sock, vanished
        self._pauses = PauseDetector()
        self._timer: asyncio.TimerHandle | None = None
        if silence_s(sock) is not None:
            self._look_in(VANISHED_S - LAST_PROBE_S)

    def stop(self) -> None:
        """Watch no longer; needed when the connection has ended, for its descriptor may be another's soon."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_in(self, delay_s: float) -> None:
        self._pauses.plan(delay_s)
        self._timer = self._loop.call_later(delay_s + TICK_S, self._look)

    def _look(self) -> None:
        silent_s = silence_s(self._socket)
        if silent_s is None:
            return
        if self._pauses.paused():
            self._look_in(PAUSE_S)
            return
        if silent_s >= VANISHED_S:
            self._vanished(silent_s)
        elif silent_s >= VANISHED_S - LAST_PROBE_S:
            self._probe()
            self._look_in(LAST_PROBE_S)
        else:
            self._look_in(VANISHED_S - LAST_PROBE_S - silent_s)

    def _probe(self) -> None:
        """Have the kernel send a keep-alive probe: told an idle time that has passed, it does so at once."""
        with suppress(OSError):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
