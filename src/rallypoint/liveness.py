"""Detection of a vanished peer host, by TCP keep-alive and by the time since the host was last heard from.

A host that loses power or its network sends nothing. Our kernel sends it a keep-alive probe every second, which the
peer's kernel acknowledges even if the process is busy or stopped. Our kernel gives up after 6 s without a reply, but:
- Data in flight restarts its clock: a connection that sends every few seconds may last up to 12 s.
- If our own interface loses its carrier, probes and retransmissions may fail locally and then do not count.
So the owner of a connection also reads TCP_INFO, which has the time since anything was received from the host, and
drops the connection after `VANISHED_S`. A server has a `PeerWatch` per connection; a blocking client checks in its
monitor thread. Without TCP_INFO (macOS), only the kernel's keep-alive is left.

After a pause of this process (a suspended virtual machine, SIGSTOP) the silence includes the pause, and the
acknowledgements are still on their way. So a check that runs late is repeated a second later (`PauseDetector`).

Rejected: application-level pings. PyTorch's protocol has none, and a stopped process would not reply.
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
"""How long a host may be silent: a little less than the kernel's 6 s, so that we notice first and report it."""

LAST_PROBE_S = 0.25
"""How long before `VANISHED_S` to send one more probe: a host that is back after 4 s is heard in time."""

PAUSE_S = 1.0
"""How late a check may run and still be trusted; and how long acknowledgements have to arrive after a late one."""

TICK_S = 0.01
"""The longest tick of the kernel's clock: a check waits one tick more, or it might run just too early."""

_RTO_MAX_MS = 44  # TCP_RTO_MAX_MS of Linux 6.15; Python has no name for it
_RECEIVED = struct.Struct("=52xII")  # in struct tcp_info: milliseconds since data, and since an acknowledgement


def keep_alive(sock: socket.socket, *, idle_s: int = 1, interval_s: int = 1, count: int = 5) -> None:
    """Let the kernel detect a vanished peer host, after `idle_s + interval_s * count` seconds.

    On Linux this also drops a live peer that has read nothing for that long while its window was full. Data is
    retransmitted at least every `interval_s`, if the kernel supports it: otherwise the next retransmission after a cut
    of 4 s would come after the connection was dropped.
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
    """Return the time since the peer's host last sent data or an acknowledgement; None if unknown."""
    if sys.platform != "linux":
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.size)
        return float(min(_RECEIVED.unpack(info))) / 1000
    except (OSError, struct.error):  # closed, or not TCP
        return None


class PauseDetector:
    """Detects whether this process, or its machine, was paused before a planned check."""

    __slots__ = ("_due_at", "_late")

    def __init__(self) -> None:
        self._due_at, self._late = float("inf"), False

    def plan(self, delay_s: float) -> None:
        """Note when the next check is due."""
        self._due_at = time.monotonic() + delay_s

    def paused(self) -> bool:
        """Return whether the planned check runs too late; never twice in a row, or a slow process would never judge."""
        self._late = not self._late and time.monotonic() - self._due_at > PAUSE_S
        return self._late


class PeerWatch:
    """Watches one asyncio transport; calls `vanished` once, with the silence in seconds, when the peer's host is gone.

    Each check computes when the next is due, so a connection in use costs one check every 5 s.
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
        """Stop watching; required when the connection ends, because its descriptor may be reused."""
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
        """Make the kernel send a keep-alive probe: given an idle time already past, it probes at once."""
        with suppress(OSError):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
