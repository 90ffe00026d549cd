"""`PendingCall`: where a thread that shares a connection gets its reply while another thread reads."""

from __future__ import annotations

import contextlib
import threading
from collections import deque

from rallypoint.core.records import Event
from rallypoint.errors import RallypointError
from rallypoint.protocol.native_client import Reply

__all__ = ["IGNORE_ANSWER", "PendingCall"]

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
        """Sleep until woken; the waiting thread has created `wakeup` before it checked for answers."""
        assert self.wakeup is not None
        self.wakeup.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX))
