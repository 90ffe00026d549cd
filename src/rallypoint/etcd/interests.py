"""What can be watched for: a `Spot`, where some wait for any change, or a `Feed`, which delivers every change."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Protocol

from rallypoint.core.records import Event
from rallypoint.errors import SessionLost, StoreClosed
from rallypoint.etcd.answers import Change, WatchAnswer

__all__ = ["PLACES", "Feed", "Interest", "Spot", "Watches"]

PLACES = 1 << 16
"""The revisions that a feed tells are this many times those of etcd, so that changes of one moment have an order."""


class Watches(Protocol):
    """Where a feed is watched for (`etcd/watcher.py`)."""

    name: str

    def add(self, interest: Any) -> int:
        """Begin to watch; return its number."""

    def remove(self, number: int) -> None:
        """Stop watching."""


class Interest:
    """One watch as we want it: from which revision on, and what is to be done with what comes."""

    def __init__(self, first: bytes, end: bytes, revision: int) -> None:
        self.first, self.end = first, end
        self.revision = revision
        """From which one on changes are still to come."""

    def came(self, answer: WatchAnswer) -> None:
        """Take changes."""
        raise NotImplementedError

    def gap(self, to: int) -> None:
        """Note that changes before a revision can no more be had."""
        raise NotImplementedError


class Spot(Interest):
    """A key or a range of keys where some wait for a change."""

    def __init__(self, first: bytes, end: bytes, revision: int) -> None:
        super().__init__(first, end, revision)
        self.since = revision
        self.changed_at = 0
        self._last: Change | None = None
        self.waiting: dict[asyncio.Future[Change | None], int] = {}
        """Who waits, and for a change after which revision."""

    def came(self, answer: WatchAnswer) -> None:
        self._last = answer.changes[-1]
        self.changed_at = self._last.revision
        self.wake()

    def gap(self, to: int) -> None:
        for future in self.waiting:
            if not future.done():
                future.set_result(None)

    def wake(self) -> None:
        """Tell of the last change, if it is known, whoever waits for one or may have missed one."""
        for future, revision in self.waiting.items():
            if (self.since > revision + 1 or self.changed_at > revision) and not future.done():
                future.set_result(self._last)


class Feed(Interest):
    """Every change of the keys in a range, in order; `strip` bytes of their names are ours."""

    def __init__(self, watcher: Watches, first: bytes, end: bytes, strip: int) -> None:
        super().__init__(first, end, 0)
        self._watcher = watcher
        self._strip = strip
        self._events: deque[Event] = deque()
        self._bell = asyncio.Event()
        self._over: Exception | None = None
        self._number = 0
        self._last = self._place = 0

    def start(self, revision: int) -> None:
        """Begin after a revision."""
        self.revision = revision + 1
        self._number = self._watcher.add(self)

    def came(self, answer: WatchAnswer) -> None:
        for key, value, revision in answer.changes:
            self._place = self._place + 1 if revision == self._last else 0
            self._last = revision
            self._events.append(Event(revision * PLACES + self._place, key[self._strip :], value))
        self._bell.set()

    def gap(self, to: int) -> None:
        why = f"etcd has compacted its history up to revision {to}, and changes before that were not yet delivered"
        self.end_with(SessionLost(peer=self._watcher.name, why=why, advice="begin the watch again"))

    def end_with(self, error: Exception) -> None:
        """Deliver what came, then an error."""
        self._over = self._over or error
        self._bell.set()

    def unread(self, event: Event) -> None:
        """Take a change back that could not be delivered."""
        self._events.appendleft(event)

    async def next(self) -> Event:
        """Return the next change, waiting for it."""
        while not self._events:
            if self._over is not None:
                raise self._over
            self._bell.clear()
            await self._bell.wait()
        return self._events.popleft()

    def close(self) -> None:
        """Stop, and wake who waits."""
        self.end_with(StoreClosed(store=self._watcher.name))
        self._watcher.remove(self._number)
