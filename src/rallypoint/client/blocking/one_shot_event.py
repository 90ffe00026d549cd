"""`OneShotEvent`: an event that stays usable when Ctrl-C interrupts `set` or `wait`.

Rejected: `threading.Event`. Ctrl-C right after it has taken its internal lock, in `set` or `wait`, leaves that lock
held, and every other thread that uses the event hangs.
"""

from __future__ import annotations

import contextlib
import threading

__all__ = ["OneShotEvent"]


class OneShotEvent:
    """An event that is set once, for one waiting thread; an interrupted `set` may be repeated."""

    __slots__ = ("_unset",)

    def __init__(self) -> None:
        self._unset = threading.Lock()
        self._unset.acquire()

    def set(self) -> None:
        """Wake the waiting thread."""
        with contextlib.suppress(RuntimeError):  # it is set already
            self._unset.release()

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is set, for at most `timeout_s`; return whether it is set."""
        was_set = self._unset.acquire(timeout=timeout_s)
        if was_set:
            self.set()
        return was_set
