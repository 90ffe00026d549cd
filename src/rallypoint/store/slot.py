"""Where a thread that shares a connection gets its answer while another one reads."""

from __future__ import annotations

import contextlib
import threading
from collections import deque

from rallypoint.core.records import Event
from rallypoint.errors import RallypointError
from rallypoint.protocol.client import Client, Reply

__all__ = ["Slot"]


class Slot:
    """Where one call, or one watch, gets what came for it."""

    __slots__ = ("answers", "bell", "number", "session", "waiting")

    def __init__(self, number: int = 0) -> None:
        self.answers: deque[Reply | Event | RallypointError] = deque()
        self.bell: threading.Lock | None = None
        self.waiting = False
        self.number = number
        """Of the request; 0 before it has one."""

        self.session: Client | None = None
        """Of a watch: the session that it belongs to."""

    def give(self, answer: Reply | Event | RallypointError) -> None:
        self.answers.append(answer)
        self.ring()

    def ring(self) -> None:
        if self.bell is not None and self.bell.locked():
            with contextlib.suppress(RuntimeError):  # two may ring at once
                self.bell.release()

    def wait(self, timeout_s: float) -> None:
        """Sleep until rung; whoever waits has set the bell before it looked for answers."""
        assert self.bell is not None
        self.bell.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX))
