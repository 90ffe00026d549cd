"""What wakes an agent: a bell that threads and signals ring, and that a `select` can wait for.

While the agent waits in a call of the store, a signal that means its end interrupts that call by an exception; a call
that is made after one, to tell the others, has a moment. Everywhere else a signal is noted, and dealt with in its turn.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

__all__ = ["Bell", "Signalled"]

ENDING = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
MOMENT_S = 2.0
Answer = TypeVar("Answer")
HANDLED = (*ENDING, "SIGUSR1", "SIGUSR2")


class Signalled(BaseException):
    """A signal that means the end came while the agent waited for an answer; it is also noted."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class Bell:
    """The bell of one agent, and the signals that came."""

    def __init__(self) -> None:
        self._mouth, self._rope = os.pipe()
        os.set_blocking(self._rope, False)
        os.set_blocking(self._mouth, False)
        self._interrupts = False
        self.signals: list[str] = []

    def fileno(self) -> int:
        """Return what becomes readable when it rings."""
        return self._mouth

    def ring(self, *_: Any) -> None:
        """Ring it; from any thread."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._rope, b".")

    def wait(self, timeout_s: float) -> None:
        """Wait until it rings, or the time is over; it is then silent."""
        select.select([self._mouth], [], [], timeout_s)
        self.silence()

    def silence(self) -> None:
        """Take note that it rang."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._mouth, 4096):
                pass

    def ends(self) -> bool:
        """Say whether a signal that means the end is still to be dealt with."""
        return any(name in ENDING for name in self.signals)

    def forget_forwarded(self) -> None:
        """Forget the signals that were for workers which are not there any more."""
        self.signals = [name for name in self.signals if name in ENDING]

    @contextlib.contextmanager
    def rung_by_signals(self) -> Iterator[None]:
        """Let signals ring it, in the main thread, until the end of this block."""
        numbers = [getattr(signal, name) for name in (*HANDLED, "SIGALRM")]
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # as nohup asks for
            numbers.remove(signal.SIGHUP)
        before = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def interrupting(self, patience_s: float = 0.0) -> Iterator[None]:
        """Let a signal that means the end raise Signalled in this block; one that came before does, after so long."""
        self._interrupts = True  # first: a signal that comes now is either raised or found
        try:
            if self.ends() and patience_s:
                signal.setitimer(signal.ITIMER_REAL, patience_s)
            elif self.ends():
                self._interrupt()
            yield
        finally:
            self._interrupts = False
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def ask(self, question: Callable[[], Answer]) -> Answer:
        """Ask the store; a signal that means the end does not wait for the answer, and after one there is a moment."""
        with self.interrupting(MOMENT_S):
            return question()

    def _handle(self, number: int, _: Any) -> None:
        if number != signal.SIGALRM:
            self.signals.append(signal.Signals(number).name)
            self.ring()
        if self._interrupts and (number == signal.SIGALRM or self.signals[-1] in ENDING):
            self._interrupt()

    def _interrupt(self) -> None:
        self._interrupts = False
        raise Signalled(next(name for name in self.signals if name in ENDING))
