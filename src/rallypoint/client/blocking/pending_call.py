"""`PendingCall`: where a thread that shares a connection gets its reply while another thread reads."""

from __future__ import annotations

import contextlib
import threading
from collections import deque

from rallypoint.core.records import Event
from rallypoint.errors import RallypointError
from rallypoint.protocol.native_client import Reply

__all__ = ["IGNORE_ANSWER", "PendingCall"]

SLICE_S = 1.0
"""The longest single wait of the main thread. Python runs signal handlers there, but a signal that arrives right before
the thread sleeps does not wake it: Ctrl-C would be noticed at the end of the wait."""

IGNORE_ANSWER = 0
"""For a request to be executed even if no caller is left for its reply."""


class PendingCall:
    """The replies to one call, or the events of one watch, and the lock that wakes its thread."""

    __slots__ = ("answers", "number", "waiting", "wakeup")

    def __init__(self, number: int = 0) -> None:
        self.answers: deque[Reply | Event | RallypointError] = deque()
        self.wakeup: threading.Lock | None = None
        self.waiting = False
        self.number = number
        """The number of the request; 0 before it is assigned."""

    def deliver(self, answer: Reply | Event | RallypointError) -> None:
        self.answers.append(answer)
        self.wake()

    def wake(self) -> None:
        if self.wakeup is not None and self.wakeup.locked():
            with contextlib.suppress(RuntimeError):  # two threads may release it at once
                self.wakeup.release()

    def wait(self, timeout_s: float) -> None:
        """Sleep until woken, or for a slice; the waiting thread has created `wakeup` before it checked for answers."""
        assert self.wakeup is not None
        longest_s = SLICE_S if threading.current_thread() is threading.main_thread() else threading.TIMEOUT_MAX
        self.wakeup.acquire(timeout=min(timeout_s, longest_s))
