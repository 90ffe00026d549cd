"""The wakeup pipe of an agent: threads and signal handlers write to it, and the agent's `select` waits for it.

A signal is queued, and the agent's loop handles it as its next event. It interrupts nothing that the agent does, with
one exception: while the agent waits for a reply, a terminating signal raises `Signalled`. Requests that are made after
that signal, to inform the other nodes, get LAST_CALLS_S each.

A preemption, by its signal or by an operator, is not queued. It is noted once, and interrupts only the long waits, for
a server and for a round, in which no worker runs.

The window in which a signal interrupts is one request. The agent's store opens it (`stores/interruptible_store.py`); so
do node_run.py and `stores/store_search.py`, for the relay and for two long waits: for a server, and for a round.

Rejected: to interrupt everywhere except in protected sections. Where one is forgotten, a worker is lost; where a window
is forgotten, one request takes its time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from rallypoint.core.policy.restart_policy import FORWARDED
from rallypoint.launch.signal_names import ENDING_SIGNALS
from rallypoint.readiness import wait_readable

__all__ = ["Preempted", "Signalled", "WakeupPipe"]

LAST_CALLS_S = 2.0
Reply = TypeVar("Reply")

SHUT, OPEN, SUSPENDED = "shut", "open", "suspended"
"""States of the window for interruptions. An interruption of a suspended window waits until it is open again."""


class Preempted(NamedTuple):
    """Why this node leaves the run, or all nodes do (`whole`); `signal` is for workers that do not ask."""

    reason: str
    signal: str = "SIGTERM"
    whole: bool = False


class Signalled(BaseException):
    """A terminating signal arrived while the agent waited for a reply; the signal is queued, too.

    Without a name: this node is preempted.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class WakeupPipe:
    """The wakeup pipe of one agent, and its queue of signals; those in `ending` terminate the agent.

    The first of those in `preempting` preempts this node. Another one has no effect, except for SIGINT.
    """

    def __init__(self, ending: Sequence[str] = ENDING_SIGNALS, preempting: Sequence[str] = ()) -> None:
        self._ending = tuple(name for name in ending if name not in preempting)
        self._preempting = tuple(preempting)
        self.preempted: Preempted | None = None
        """Why this node leaves the run, if it is preempted."""

        self._is_long = False
        """Whether the open window is that of a long wait."""

        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        os.set_blocking(self._read_end, False)
        # Closed when nobody can write any more: a thread may wake the agent late, and the number may be another file's.
        weakref.finalize(self, _close, self._read_end, self._write_end).atexit = False
        self._window = SHUT
        self._missed = False
        """Whether a signal would have interrupted the agent while the window was suspended."""

        self.signals: list[str] = []

    def fileno(self) -> int:
        """Return the descriptor that becomes readable on a wakeup."""
        return self._read_end

    def wake(self, *_: Any) -> None:
        """Wake the agent; callable from any thread."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._write_end, b".")

    def wait(self, timeout_s: float) -> None:
        """Wait for a wakeup, or until the timeout, and clear the wakeup."""
        wait_readable(self._read_end, timeout_s=timeout_s)
        self.drain()

    def drain(self) -> None:
        """Clear pending wakeups."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read_end, 4096):
                pass

    def preempt(self, why: Preempted) -> None:
        """Preempt this node, unless it is already; callable from any thread."""
        if self.preempted is None or (why.whole and not self.preempted.whole):
            self.preempted = why
            self.wake()
            if signal.getsignal(signal.SIGALRM) == self._handle:
                os.kill(os.getpid(), signal.SIGALRM)  # interrupts a long wait

    def is_ending(self) -> bool:
        """Return whether a terminating signal is queued."""
        return any(name in self._ending for name in self.signals)

    def forget_forwarded(self) -> None:
        """Drop queued signals that were meant for workers of an earlier round."""
        for name in [name for name in self.signals if name not in self._ending]:
            self.signals.remove(name)  # in place: a handler may append meanwhile

    @contextlib.contextmanager
    def handling_signals(self, exits: bool = False) -> Iterator[None]:
        """Queue signals and wake the agent, in the main thread, until the end of this block.

        If the process then `exits`, preempting signals stay ignored: a late one would change the exit code.
        """
        names = dict.fromkeys((*self._ending, *self._preempting, *FORWARDED, "SIGALRM"))
        numbers = [getattr(signal, name) for name in names]
        if signal.SIGHUP in numbers and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # set by nohup
            numbers.remove(signal.SIGHUP)
        # The kernel's handler writes, too: a signal right before `select` sleeps would not wake it otherwise, and the
        # Python handler would run only when something else does.
        former = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        before = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            yield
        finally:
            signal.set_wakeup_fd(former)
            for number, handler in before.items():
                is_late = exits and signal.Signals(number).name in self._preempting
                signal.signal(number, signal.SIG_IGN if is_late else handler)

    # Interruptions

    def interruptible(self, request: Callable[[], Reply], patience_s: float = LAST_CALLS_S) -> Reply:
        """Make a request. A terminating signal interrupts it: at once, or after `patience_s` if it is queued already.

        In another thread, and as a part of another such request, it is just made.
        """
        if self._window != SHUT or not _in_main_thread():
            return request()
        self._is_long = not patience_s
        self._window = OPEN  # first: a signal that arrives now is either raised or found in the queue
        try:
            if self.is_ending() and patience_s:
                signal.setitimer(signal.ITIMER_REAL, patience_s)
            elif self.is_ending() or (self._is_long and self.preempted is not None):
                self._interrupt()
            return request()
        finally:
            self._shut()

    @contextlib.contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Complete this block; a signal that would interrupt it does so at its end."""
        if self._window == SUSPENDED or not _in_main_thread():
            yield
            return
        self._missed = False
        before, self._window = self._window, SUSPENDED
        try:
            yield
        finally:
            self._window = before
            if before == OPEN and self._missed:
                self._interrupt()

    def _handle(self, number: int, _: Any) -> None:
        """Handle a signal; Python runs handlers in the main thread, which is the agent's."""
        name = signal.Signals(number).name
        if name in self._preempting and (self.preempted is None or number != signal.SIGINT):
            self.preempted = self.preempted or Preempted(name, name)
            self.wake()
        elif number != signal.SIGALRM:
            self.signals.append(name)
            self.wake()
        if not self._interrupts(name):
            return
        if self._window == SUSPENDED:
            self._missed = True
        elif self._window == OPEN:
            self._interrupt()

    def _interrupts(self, name: str) -> bool:
        """Return whether a signal interrupts the request in the open window."""
        if name in self._ending or (name == "SIGALRM" and self.is_ending()):
            return True
        return self._is_long and self.preempted is not None

    def _interrupt(self) -> None:
        self._shut()  # first: what undoes the interrupted request is not interrupted at once
        raise Signalled(next((name for name in self.signals if name in self._ending), ""))

    def _shut(self) -> None:
        self._window = SHUT
        if self.is_ending():  # there may be a timer
            signal.setitimer(signal.ITIMER_REAL, 0.0)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
