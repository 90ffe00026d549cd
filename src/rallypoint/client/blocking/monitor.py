"""The connection monitor: one daemon thread per process that looks after its connections while no call reads them.

It starts reconnects, receives pushed events, sends heartbeats for leases that have one, starts probes of servers that
may hang, cuts a connection whose server's host is gone (`liveness.py`), even during calls, and checks how long a server
has been away (`outage.py`).

Calls in progress do not notice it: it polls for data only if pushes are expected and no call reads. Reconnecting may
take long, so each cut has its own thread (`reconnect.py`), and so does a probe. The monitor holds connections weakly,
and ends with the last one.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
import weakref
from typing import Protocol

from rallypoint.liveness import PAUSE_S, VANISHED_S, PauseDetector, silence_s

__all__ = ["LOOK_S", "MonitoredSession", "start"]

LOOK_S = 0.25
"""How often the monitor checks its connections if no socket wakes it."""

_HUNG_UP = getattr(select, "POLLRDHUP", 0)


class MonitoredSession(Protocol):
    """A session as the monitor uses it: see `supervisor.py`."""

    heartbeat_s: float

    def monitor_state(self) -> tuple[socket.socket | None, bool] | None:
        """Return the socket (None while reconnecting) and whether data is expected that no call reads;
        or None if the session is over."""

    def reconnect(self, sock: socket.socket) -> None:
        """Reconnect after a cut of this socket, unless another thread does."""

    def unresponsive_socket(self) -> socket.socket | None:
        """Ping the server; return the socket if there was no reply and there is an alternative server."""

    def check_hang(self, sock: socket.socket) -> None:
        """Probe the server of this socket, and cut the socket if the server hangs."""

    def read_idle(self) -> None:
        """Receive pushed events, if no other thread reads."""

    def send_heartbeat(self) -> bool:
        """Tell the server that this process is running; return whether that was possible now."""


class ConnectionMonitor:
    """The monitored connections of a process, and the monitor thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: dict[int, weakref.ref[MonitoredSession]] = {}
        self._heartbeat_at: dict[int, float] = {}
        self._skipped_until: dict[int, float] = {}
        """Connections whose cut was noticed, and until when to skip them: a call that reads there notices it, too."""

        self._probing: set[int] = set()
        self._runs = False
        self._pauses = PauseDetector()
        self._check_silence_at = 0.0

    def watch(self, monitored: MonitoredSession) -> None:
        """Monitor a connection until its session is over or garbage-collected."""
        with self._lock:
            self._all[id(monitored)] = weakref.ref(monitored)
            self._heartbeat_at[id(monitored)] = time.monotonic()
            if not self._runs:
                threading.Thread(target=self._run, name="rallypoint monitor", daemon=True).start()
                self._runs = True  # not before: the system may refuse to start a thread

    def _run(self) -> None:
        while True:
            poller, watched, judges = select.poll(), {}, self._may_check_silence()
            for number, reference in self._those_left():
                monitored = reference()
                seen = None if monitored is None else monitored.monitor_state()
                if monitored is None or seen is None:
                    with self._lock:
                        if self._all.get(number) is reference:
                            del self._all[number], self._heartbeat_at[number]
                            self._skipped_until.pop(number, None)
                    continue
                sock, listens = seen
                if sock is None or self._is_skipped(number):
                    continue
                self._send_heartbeat(number, monitored)
                self._check_hang(number, monitored)
                if judges:
                    _cut_if_vanished(sock)
                descriptor = sock.fileno()
                try:
                    poller.register(descriptor, _HUNG_UP | (select.POLLIN if listens else 0))
                    watched[descriptor] = (number, reference, sock)
                except ValueError:  # closed by another thread
                    self._reconnect(number, monitored, sock)
            monitored = None  # so that its owner can release it meanwhile
            with self._lock:
                if not self._all:
                    self._runs = False
                    return
            self._pauses.plan(LOOK_S)
            for descriptor, events in poller.poll(LOOK_S * 1000):
                number, reference, sock = watched[descriptor]
                monitored = reference()
                if monitored is not None and events != select.POLLIN:
                    self._reconnect(number, monitored, sock)
                elif monitored is not None:
                    monitored.read_idle()
            monitored = None

    def _may_check_silence(self) -> bool:
        """Return whether to check for vanished hosts now; not right after a pause of this process."""
        now = time.monotonic()
        if self._pauses.paused():
            self._check_silence_at = now + PAUSE_S
        judges = now >= self._check_silence_at
        if judges:
            self._check_silence_at = now + LOOK_S
        return judges

    def _those_left(self) -> list[tuple[int, weakref.ref[MonitoredSession]]]:
        with self._lock:
            return list(self._all.items())

    def _send_heartbeat(self, number: int, monitored: MonitoredSession) -> None:
        now = time.monotonic()
        if now - self._heartbeat_at[number] >= monitored.heartbeat_s and monitored.send_heartbeat():
            self._heartbeat_at[number] = now

    def _check_hang(self, number: int, monitored: MonitoredSession) -> None:
        """Probe a server that does not reply, in a separate thread."""
        doubted = None if number in self._probing else monitored.unresponsive_socket()
        if doubted is None:
            return
        reference, sock = weakref.ref(monitored), doubted

        def probe() -> None:
            try:
                monitored = reference()
                if monitored is not None:
                    monitored.check_hang(sock)
            finally:
                self._probing.discard(number)

        self._probing.add(number)
        try:
            threading.Thread(target=probe, name="rallypoint probe", daemon=True).start()
        except RuntimeError:  # no more threads now: probe later
            self._probing.discard(number)

    def _reconnect(self, number: int, monitored: MonitoredSession, sock: socket.socket) -> None:
        """Start to reconnect, and skip that connection for a moment."""
        self._skipped_until[number] = time.monotonic() + LOOK_S
        monitored.reconnect(sock)

    def _is_skipped(self, number: int) -> bool:
        return time.monotonic() < self._skipped_until.get(number, 0.0)


def _cut_if_vanished(sock: socket.socket) -> None:
    """Cut a connection whose server's host is gone; the thread that reads it, or else the monitor, reconnects."""
    if (silence_s(sock) or 0.0) >= VANISHED_S:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


_monitor = ConnectionMonitor()


def start(monitored: MonitoredSession) -> None:
    """Monitor a connection until its session is over or garbage-collected."""
    _monitor.watch(monitored)


def _forked() -> None:
    """In a forked child: the thread does not exist, and the connections are the parent's."""
    global _monitor
    _monitor = ConnectionMonitor()


os.register_at_fork(after_in_child=_forked)
