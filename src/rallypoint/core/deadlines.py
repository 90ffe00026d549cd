"""Deadlines by key: a heap that discards stale entries when they reach the top. Pure: the caller passes `now`.

No call takes long, however many deadlines there are. When most entries of the heap are stale, a new heap is begun; each
later call moves a few entries of the old one to it, from the end, which leaves a heap. A delay of all deadlines only
moves the origin of their times.

Rejected: to rebuild the heap at once. With 500,000 leases of an ended session that took 200 ms.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable

__all__ = ["NEVER", "Deadlines"]

NEVER = float("inf")
"""The deadline of something that is never due."""

MOVED = 8
"""Entries of the old heap examined with each call."""

_Heap = list[tuple[float, int, Hashable]]


class Deadlines:
    """Deadlines by key; each key has at most one."""

    def __init__(self) -> None:
        self.earliest = NEVER
        """When the first deadline is due, or earlier: a dropped deadline may still be counted."""

        self._at: dict[Hashable, float] = {}
        self._heap: _Heap = []
        self._old: _Heap = []
        self._arrivals = 0
        self._delayed = 0.0  # by how much all deadlines were delayed so far; all times in here are without it

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._at

    @property
    def entries(self) -> int:
        """The number of entries in the heaps, stale ones included."""
        return len(self._heap) + len(self._old)

    def set(self, key: Hashable, at: float) -> None:
        """Set a deadline, or move it."""
        at -= self._delayed
        self._at[key] = at
        self._arrivals += 1
        heapq.heappush(self._heap, (at, self._arrivals, key))
        self._settle()

    def set_all(self, deadlines: Iterable[tuple[Hashable, float]]) -> None:
        """Set many deadlines."""
        at_of, heap, arrivals, delayed = self._at, self._heap, self._arrivals, self._delayed
        for key, at in deadlines:
            at_of[key] = at - delayed
            arrivals += 1
            heapq.heappush(heap, (at - delayed, arrivals, key))
        self._arrivals = arrivals
        self._settle()

    def _settle(self) -> None:
        """After a change: discard some stale entries if most are stale, and update `earliest`."""
        if self._old:
            self._discard()
        elif len(self._heap) > 2 * len(self._at) + 64:
            self._heap, self._old = [], self._heap
            self._discard()
        self._update()

    def _discard(self) -> None:
        old, heap, at_of = self._old, self._heap, self._at
        for _ in range(min(MOVED, len(old))):
            entry = old.pop()
            if at_of.get(entry[2]) == entry[0]:
                heapq.heappush(heap, entry)

    def _first(self) -> _Heap:
        """Return the heap with the first entry."""
        heap, old = self._heap, self._old
        return old if old and (not heap or old[0] < heap[0]) else heap

    def _update(self) -> None:
        heap, old = self._heap, self._old
        at = heap[0][0] if heap else NEVER
        if old and old[0][0] < at:
            at = old[0][0]
        self.earliest = at + self._delayed

    def drop(self, key: Hashable) -> None:
        """Drop a deadline; do nothing if there is none."""
        self._at.pop(key, None)

    def due(self, now: float, most: int = 1 << 62) -> list[Hashable]:
        """Remove deadlines that have passed; return their keys, earliest first.

        At most `most` entries are examined, so there may be more while `earliest` has passed.
        """
        keys: list[Hashable] = []
        now -= self._delayed
        for _ in range(most):
            heap = self._first()
            if not heap or (heap[0][0] > now and self._at.get(heap[0][2]) == heap[0][0]):
                break
            at, _, key = heapq.heappop(heap)
            if self._at.get(key) == at:
                del self._at[key]
                keys.append(key)
        self._update()
        return keys

    def delay(self, by: float) -> None:
        """Move all deadlines `by` seconds later."""
        self._delayed += by
        self.earliest += by
