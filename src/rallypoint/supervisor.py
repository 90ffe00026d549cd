"""Keep a server child running: start another on the same sockets when it ends without having been told to.

Rules
- A child that ends with 0 was told to (SIGTERM, or nobody was connected for long), and is not started again.
- The pause before a start doubles from 0.05 s to 5 s, which is longer than a session's grace: a child that comes up and
  crashes again and again cannot keep the sessions of dead clients alive for ever. Once a child has lived for 30 s, the
  next pause is short again.
- A child that fails five times in a row before it is ready (a directory that cannot be used, a log that is damaged)
  will fail again: then this gives up, and logs the reason.

The listening sockets stay open here, so the port is never lost: between two children the kernel accepts connections and
queues them, and the next child answers. To a client that is better than to be refused. A port that was let go may be
some other program's a moment later, and then the server never comes back. And a client in the queue is answered the
moment the child listens, while one that was refused tries again up to a second later. What it costs is an attempt that
hangs when a child dies in the middle of it, or is slow to come up: the greeting is given up after 2 s, later after 10 s
(`store/route.py`). So while children crash in a loop, a client comes every 10 s instead of every second, which spares
them, and finds one that stays up at most 10 s late. When this gives up, it closes the sockets: clients are then refused
at once, and their errors say that nothing listens.

Rejected: to close the sockets and let each child bind the port again, for the first of these reasons.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from rallypoint import net
from rallypoint.deadline import Deadline

__all__ = ["STOP_S", "WHY_NOT", "Starter", "Supervisor", "await_ready", "stop"]

log = logging.getLogger("rallypoint.server")

WHY_NOT = "! "
"""What a child writes, and then why it does not come up, instead of its URL."""

STOP_S = 5.0
"""How long a child may take to end before it is killed."""

START_S = 600.0
"""How long a child that is started again may take to be ready: it may have a long log to read."""

PAUSE_S, STEADY_S = (0.05, 5.0), 30.0
"""How long to pause before a start, at first and at most; and how long a child must live to begin at first again."""

TRIES = 5
"""How many children in a row may fail before they are ready."""

Starter = Callable[[], tuple[subprocess.Popen[bytes], int]]
"""Starts a child, and returns it with the descriptor on which it will write its URL, or why not."""


def await_ready(child: subprocess.Popen[bytes], ready: int, deadline: Deadline, hint: str = "") -> tuple[str, str]:
    """Wait until a child is ready; return its URL, or nothing and the reason, when it has been ended.

    Of one that gives no reason, `hint` says where to look.
    """
    why = ""
    with os.fdopen(ready, "rb") as pipe:
        if select.select([pipe], [], [], deadline.remaining())[0]:
            line = pipe.readline().decode().strip()
            if line and not line.startswith(WHY_NOT):
                return line, ""
            why = line.removeprefix(WHY_NOT)
    expired = deadline.expired()
    if not expired:  # it is on its way out, and its own exit code says more than our signal would
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(STOP_S)
    stop(child)
    unready = f"not ready after {deadline.timeout_s:g} s" if expired else f"ended with {child.returncode}{hint}"
    return "", why or unready


def stop(child: subprocess.Popen[bytes]) -> None:
    """End a child, gently first."""
    child.terminate()
    try:
        child.wait(STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


class Supervisor:
    """A child that runs, and those that follow it, until `close`; `run` does the work, in a thread of its owner's."""

    def __init__(self, child: subprocess.Popen[bytes], start: Starter, sockets: Sequence[socket.socket]) -> None:
        self.child = child
        """The child that runs, or ran last."""

        self.restarts = 0
        """How many children have followed the first."""

        self._start = start
        self._sockets = sockets
        address = sockets[0].getsockname()
        self._address = address if isinstance(address, str) else str(net.Endpoint(*address[:2]))
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._over = threading.Event()
        _all.add(self)

    def running(self) -> bool:
        """Return whether there is a child, or will be another."""
        return not self._over.is_set()

    def wait(self, timeout_s: float | None) -> int | None:
        """Wait until no child will follow; return the last one's exit code, or None if the time is over before."""
        return self.child.wait() if self._over.wait(timeout_s) else None

    def run(self) -> int:
        """Supervise until the end; return the last child's exit code."""
        pause_s, began_at = PAUSE_S[0], time.monotonic()
        try:
            while (code := self.child.wait()) and not self._closing.is_set():
                if time.monotonic() - began_at >= STEADY_S:
                    pause_s = PAUSE_S[0]
                who = f"the server at {self._address} (pid {self.child.pid})"
                log.warning("%s ended with %s; starting it again", who, _words(code))
                if not self._follow(pause_s):
                    break
                pause_s, began_at = min(2 * pause_s, PAUSE_S[1]), time.monotonic()
        finally:
            self.let_go()
            self._over.set()
        return self.child.wait()

    def _follow(self, pause_s: float) -> bool:
        """Start a child that becomes ready; return False where that is not to be, or cannot be."""
        for attempt in range(1, TRIES + 1):
            if self._closing.wait(pause_s):
                return False
            why = self._try()
            if not why or self._closing.is_set():
                return not why
            log.warning("the server at %s did not start: %s", self._address, why)
            pause_s = min(2 * pause_s, PAUSE_S[1])
            if attempt == TRIES:
                log.error("the server at %s is given up: %d starts in a row failed: %s", self._address, TRIES, why)
        return False

    def _try(self) -> str:
        """Start a child; return nothing once it is ready, else why it is not."""
        with self._lock:
            if self._closing.is_set():
                return "closed"
            try:
                child, ready = self._start()
            except Exception as error:  # no processes or descriptors to be had
                return str(error)
            self.child = child
            self.restarts += 1
        return await_ready(child, ready, Deadline(START_S))[1]

    def close(self) -> None:
        """End the child, and start no other."""
        with self._lock:
            self._closing.set()
        stop(self.child)
        self.let_go()
        self._over.set()

    def let_go(self, shared: bool = False) -> None:
        """Close the sockets: nobody is accepted any more, unless others have them, too (`shared`)."""
        for sock in self._sockets:
            if not shared:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # a fork of this process may hold it as well
            sock.close()


def _words(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


_all: weakref.WeakSet[Supervisor] = weakref.WeakSet()


def _forked() -> None:
    """In a forked child: the sockets are the parent's, and must not keep its port taken."""
    for supervisor in _all:
        supervisor.let_go(shared=True)


os.register_at_fork(after_in_child=_forked)
