"""What wakes an agent: a bell that threads and signals ring, and that a `select` can wait for.

While the agent waits in a call of the store, a signal that means its end interrupts that call by an exception.
Everywhere else a signal is noted, and dealt with in its turn.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator
from typing import Any

__all__ = ["Bell", "Signalled"]

ENDING = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
HANDLED = (*ENDING, "SIGUSR1", "SIGUSR2")


class Signalled(BaseException):
    """A signal came while the agent waited for other nodes."""

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
        numbers = [getattr(signal, name) for name in HANDLED]
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # as nohup asks for
            numbers.remove(signal.SIGHUP)
        before = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """Let a signal that means the end raise Signalled in this block, also one that came just before."""
        self._interrupts = True  # first: a signal that comes now is either raised or found
        try:
            for name in self.signals:
                if name in ENDING:
                    raise Signalled(name)
            yield
        finally:
            self._interrupts = False

    def _handle(self, number: int, _: Any) -> None:
        name = signal.Signals(number).name
        if self._interrupts and name in ENDING:
            self._interrupts = False
            raise Signalled(name)
        self.signals.append(name)
        self.ring()
