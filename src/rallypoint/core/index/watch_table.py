"""Watches by prefix: a changed key finds its watches with one lookup per distinct prefix length.

The number of lengths is limited, the number of watches is not. Rejected: a trie. It takes a step per byte of a key, in
Python, while the usual table has one to five lengths.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter

from rallypoint.core.records import WatchHandle, show
from rallypoint.errors import LimitExceeded

__all__ = ["MAX_LENGTHS", "WatchTable"]

MAX_LENGTHS = 256
"""How many distinct lengths the prefixes of one engine's watches may have: each costs every write a lookup."""


class WatchTable(dict[bytes, dict[WatchHandle, None]]):
    """The watches of each prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.lengths: list[int] = []
        """The distinct prefix lengths, in order."""

        self._of_length: Counter[int] = Counter()

    def check_room(self, prefix: bytes) -> None:
        """Raise LimitExceeded if there is no room for another prefix length."""
        if len(prefix) not in self._of_length and len(self.lengths) >= MAX_LENGTHS:
            what, size = "watches of prefixes of different lengths", len(self.lengths) + 1
            raise LimitExceeded(what=what, key=show(prefix), size=size, limit=MAX_LENGTHS)

    def add(self, watch: WatchHandle) -> None:
        """Add a watch."""
        prefix = watch.prefix
        if prefix not in self:
            self[prefix] = {}
            if len(prefix) not in self._of_length:
                insort(self.lengths, len(prefix))
            self._of_length[len(prefix)] += 1
        self[prefix][watch] = None
        self.count += 1

    def discard(self, watch: WatchHandle) -> None:
        """Remove a watch, which must exist."""
        prefix = watch.prefix
        self.count -= 1
        del self[prefix][watch]
        if not self[prefix]:
            del self[prefix]
            self._of_length[len(prefix)] -= 1
            if not self._of_length[len(prefix)]:
                del self._of_length[len(prefix)]
                self.lengths.remove(len(prefix))

    def of(self, key: bytes) -> list[WatchHandle]:
        """Return the watches that match a key, shortest prefix first."""
        found: list[WatchHandle] = []
        for length in self.lengths:
            if length > len(key):
                break
            found += self.get(key[:length], ())
        return found
