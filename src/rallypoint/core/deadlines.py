"""Deadlines by key, and which is the next: a heap whose entries are dropped when they turn up. Pure: `now` comes in."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable

__all__ = ["NEVER", "Deadlines"]

NEVER = float("inf")
"""The deadline of what is never due."""


class Deadlines:
    """When what is due; each key has one deadline at most."""

    def __init__(self) -> None:
        self.earliest = NEVER
        """When the first is due, or an earlier moment: one that was dropped may still be counted."""

        self._at: dict[Hashable, float] = {}
        self._heap: list[tuple[float, int, Hashable]] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._at

    def set(self, key: Hashable, at: float) -> None:
        """Set a deadline, or move it."""
        self._at[key] = at
        self._arrivals += 1
        heapq.heappush(self._heap, (at, self._arrivals, key))
        self._settle()

    def set_all(self, deadlines: Iterable[tuple[Hashable, float]]) -> None:
        """Set many deadlines."""
        at_of, heap, arrivals = self._at, self._heap, self._arrivals
        for key, at in deadlines:
            at_of[key] = at
            arrivals += 1
            heapq.heappush(heap, (at, arrivals, key))
        self._arrivals = arrivals
        self._settle()

    def _settle(self) -> None:
        """After deadlines were set: forget those that are over where they are the most, and note the first."""
        if len(self._heap) > 2 * len(self._at) + 64:
            self._heap = [entry for entry in self._heap if self._at.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)
        self.earliest = self._heap[0][0] if self._heap else NEVER

    def drop(self, key: Hashable) -> None:
        """Forget a deadline; harmless where there is none."""
        self._at.pop(key, None)

    def due(self, now: float, most: int = 1 << 62) -> list[Hashable]:
        """Take out deadlines that have passed, so many at most, and return their keys, the earliest first."""
        keys: list[Hashable] = []
        heap = self._heap
        while heap and (heap[0][0] <= now or self._at.get(heap[0][2]) != heap[0][0]) and len(keys) < most:
            at, _, key = heapq.heappop(heap)
            if self._at.get(key) == at:
                del self._at[key]
                keys.append(key)
        self.earliest = heap[0][0] if heap else NEVER
        return keys

    def delay(self, by: float) -> None:
        """Move all deadlines, so much later."""
        self._at = {key: at + by for key, at in self._at.items()}
        self._heap = [(at + by, arrival, key) for at, arrival, key in self._heap]
        self.earliest += by
