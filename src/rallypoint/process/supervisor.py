"""Keep a server child running: when it dies, restart it on the same sockets.

Rules
- Exit code 0 means a requested end (SIGTERM, or idle for too long): no restart.
- The pause before a restart doubles from 0.05 s to 5 s. That is longer than a session's grace period, so a child that
  crashes in a loop cannot keep the sessions of dead clients alive for ever. A child that lives for 30 s resets it.
- After five starts in a row that fail before the child is ready (unusable directory, damaged log), the next would fail
  too: give up and log the reason.

The listening sockets stay open here, so the port is never lost: between two children the kernel queues connections,
and the next child answers them. For a client that is better than a refused connection. Another program could take a
released port, and the server would never come back. A queued client is answered as soon as the child listens; a refused
one retries up to a second later. The cost: an attempt hangs if the child dies during it or starts slowly, until the
client's handshake times out after 2 s, later after 10 s (`client/routing/route.py`). During a crash loop a client thus
retries every 10 s instead of every second, which spares the children, and reaches a stable child at most 10 s late. On
giving up, the supervisor closes the sockets: clients are refused at once, and their errors say that nothing listens.

Rejected: close the sockets and let each child bind the port again; another program could take it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from rallypoint import net
from rallypoint.deadline import Deadline
from rallypoint.readiness import wait_readable

__all__ = ["STOP_S", "WHY_NOT", "Starter", "Supervisor", "await_ready", "stop"]

log = logging.getLogger("rallypoint.server")

WHY_NOT = "! "
"""Prefix of the line with the reason, which a child that cannot start writes instead of its URL."""

STOP_S = 5.0
"""How long a child may take to exit before it is killed."""

START_S = 600.0
"""How long a restarted child may take to be ready: it may have a long log to replay."""

PAUSE_S, STEADY_S = (0.05, 5.0), 30.0
"""The first and the longest pause before a restart; how long a child must live to reset the pause."""

TRIES = 5
"""How many starts in a row may fail before the supervisor gives up."""

Starter = Callable[[], tuple[subprocess.Popen[bytes], int]]
"""Starts a child; returns it with the descriptor from which to read its URL, or why it cannot start."""


def await_ready(child: subprocess.Popen[bytes], ready: int, deadline: Deadline, hint: str = "") -> tuple[str, str]:
    """Wait until a child is ready; return its URL and "". If it fails, end it and return "" and the reason.

    `hint` says where to look for the reason of a child that gave none.
    """
    why = ""
    with os.fdopen(ready, "rb") as pipe:
        if wait_readable(pipe, timeout_s=deadline.remaining()):
            line = pipe.readline().decode().strip()
            if line and not line.startswith(WHY_NOT):
                return line, ""
            why = line.removeprefix(WHY_NOT)
    expired = deadline.expired()
    if not expired:  # the child is exiting; its own exit code says more than our signal would
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(STOP_S)
    stop(child)
    unready = f"not ready after {deadline.timeout_s:g} s" if expired else f"ended with {child.returncode}{hint}"
    return "", why or unready


def stop(child: subprocess.Popen[Any], within_s: float = STOP_S) -> None:
    """Terminate a child; kill it if it does not exit in time."""
    child.terminate()
    try:
        child.wait(within_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


class Supervisor:
    """One running child and its successors, until `close`. The owner calls `run` in a thread."""

    def __init__(self, child: subprocess.Popen[bytes], start: Starter, sockets: Sequence[socket.socket]) -> None:
        self.child = child
        """The current child, or the last one."""

        self.restarts = 0
        """How many times the child was restarted."""

        self._start = start
        self._sockets = sockets
        address = sockets[0].getsockname()
        self._address = address if isinstance(address, str) else str(net.Endpoint(*address[:2]))
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._over = threading.Event()
        _all.add(self)

    def running(self) -> bool:
        """Return whether a child runs or will be restarted."""
        return not self._over.is_set()

    def wait(self, timeout_s: float | None) -> int | None:
        """Wait for the final exit; return the last child's exit code, or None at the timeout."""
        return self.child.wait() if self._over.wait(timeout_s) else None

    def run(self) -> int:
        """Restart the child until it ends for good; return the last child's exit code."""
        pause_s, began_at = PAUSE_S[0], time.monotonic()
        try:
            while (code := self.child.wait()) and not self._closing.is_set():
                if time.monotonic() - began_at >= STEADY_S:
                    pause_s = PAUSE_S[0]
                who = f"the server at {self._address} (pid {self.child.pid})"
                log.warning("%s ended with %s; restarting it", who, _exit_reason(code))
                if not self._restart(pause_s):
                    break
                pause_s, began_at = min(2 * pause_s, PAUSE_S[1]), time.monotonic()
        finally:
            self.close_sockets()
            self._over.set()
        return self.child.wait()

    def _restart(self, pause_s: float) -> bool:
        """Restart the child; return False if the supervisor is closing, or all attempts failed."""
        for attempt in range(1, TRIES + 1):
            if self._closing.wait(pause_s):
                return False
            why = self._try()
            if not why or self._closing.is_set():
                return not why
            log.warning("the server at %s did not start: %s", self._address, why)
            pause_s = min(2 * pause_s, PAUSE_S[1])
            if attempt == TRIES:
                log.error("giving up on the server at %s: %d starts in a row failed: %s", self._address, TRIES, why)
        return False

    def _try(self) -> str:
        """Start a child; return "" once it is ready, or why it is not."""
        with self._lock:
            if self._closing.is_set():
                return "closed"
            try:
                child, ready = self._start()
            except Exception as error:  # for example, out of processes or descriptors
                return str(error)
            self.child = child
            self.restarts += 1
        return await_ready(child, ready, Deadline(START_S))[1]

    def close(self) -> None:
        """Stop the child for good."""
        with self._lock:
            self._closing.set()
        stop(self.child)
        self.close_sockets()
        self._over.set()

    def close_sockets(self, shared: bool = False) -> None:
        """Close the sockets. Connections are then refused, unless another process keeps them open (`shared`)."""
        for sock in self._sockets:
            if not shared:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # a fork of this process may hold it too
            sock.close()


def _exit_reason(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


_all: weakref.WeakSet[Supervisor] = weakref.WeakSet()


def _close_in_fork() -> None:
    """In a forked child, close the parent's sockets: they would keep its port in use."""
    for supervisor in _all:
        supervisor.close_sockets(shared=True)


os.register_at_fork(after_in_child=_close_in_fork)
