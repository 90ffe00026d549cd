"""An ordered set of keys beside the engine's dict: the cost of a prefix query grows with its result, not the store.

Sorted buckets hold the keys. `bounds[i]` separates bucket i from bucket i - 1: each key of bucket i is at least
`bounds[i]`, each earlier key is less. A bound need not be a key, so adding and removing keys leaves it alone;
`bounds[0]` is b"". New keys go to `pending`, an unordered buffer, and move to the buckets in sorted batches: when there
are `batch_size` of them, after a long key, or before a query.

Rules
- An `add` merges at most one batch, and then splits at most `MAX_SPLITS` buckets. Ranks that write in step fill all
  buckets at the same rate; without the limit one `add` would split a thousand of them.
- A bucket that a merge leaves above `bucket_size` is split, by a later merge if this one is at its limit. A
  bucket below a quarter of `bucket_size` is joined with a neighbor that has room. So one of any two neighbors is at
  least a quarter full, and only an empty index has an empty bucket.
- The number of keys before a bucket is counted once, until an earlier bucket changes: repeated counts of a prefix cost
  only a search each.
- The order depends on the keys alone: no code here iterates over a set, and PYTHONHASHSEED has no effect.
- A full garbage collection visits each key of each bucket (30 ms at 1,000,000 keys); a host can exempt them: gc.freeze.

Rejected: sortedcontainers.SortedList, the same buckets without the buffer. It searches on each `add`, 1 to 3 us; here
neighboring keys share a search, and a key deleted while pending needs none.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from itertools import accumulate

__all__ = ["KeyIndex"]

BUCKET_SIZE = 1024
BATCH_SIZE = 256
MAX_SPLITS = 8
LONG_KEY_BYTES = 512
"""A longer key is merged at once: comparing a whole batch of keys of 8 KiB would block the loop for 10 ms."""

SORT_SHARE = 32
"""Above 1/32 of a bucket's length, new keys are sorted in together; below, inserting them one by one is faster."""


class KeyIndex:
    """An ordered set of bytes, queried by prefix; the empty prefix means all keys."""

    def __init__(
        self, keys: Iterable[bytes] = (), *, bucket_size: int = BUCKET_SIZE, batch_size: int = BATCH_SIZE
    ) -> None:
        """Build the index of distinct keys, for example those of a snapshot, faster than by `add`."""
        if not 1 <= batch_size <= bucket_size:
            raise ValueError(f"batch_size must be between 1 and bucket_size ({bucket_size}): {batch_size}")
        self.bucket_size = bucket_size
        self.batch_size = batch_size
        ordered = sorted(keys)
        step = (bucket_size + 1) // 2
        self.pending: dict[bytes, None] = {}
        self.buckets = [ordered[at : at + step] for at in range(0, len(ordered), step)] or [[]]
        self.bounds = [b"", *(bucket[0] for bucket in self.buckets[1:])]
        self._merged = len(ordered)
        self._before = [0]
        """The number of keys before each of the first buckets, up to one that has changed since the count."""

    def __len__(self) -> int:
        """Count all keys."""
        return self._merged + len(self.pending)

    def add(self, key: bytes) -> None:
        """Add a key, which must be new: a second `add` of the same key is not detected."""
        pending = self.pending
        pending[key] = None
        if len(pending) >= self.batch_size or len(key) > LONG_KEY_BYTES:
            self._merge()

    def add_all(self, keys: list[bytes]) -> None:
        """Add new, distinct keys; a large number is merged as one batch, at less than half the cost."""
        if len(keys) < self.batch_size:
            for key in keys:
                self.add(key)
        else:
            self._merge()
            self._insert(sorted(keys), len(keys))

    def discard(self, key: bytes) -> None:
        """Remove a key; raise `KeyError` if it is missing, because then the index differs from its dict."""
        if key in self.pending:
            del self.pending[key]
            return
        at, offset = self._find(key)
        bucket = self.buckets[at]
        if offset == len(bucket) or bucket[offset] != key:
            raise KeyError(key)
        del bucket[offset]
        del self._before[at + 1 :]
        self._merged -= 1
        if len(bucket) * 4 < self.bucket_size:
            self._join(at)

    def count(self, prefix: bytes) -> int:
        """Count the keys that start with a prefix."""
        if not prefix:
            return len(self)
        start, offset, stop, end = self._range(prefix)
        if start == stop:
            return end - offset
        before = self._before
        if stop >= len(before):
            at = len(before) - 1
            before[at:] = accumulate(map(len, self.buckets[at:stop]), initial=before[at])
        return before[stop] - before[start] - offset + end

    def keys(self, prefix: bytes) -> list[bytes]:
        """Return the keys that start with a prefix, in byte order."""
        return self.first(prefix, len(self))

    def first(self, prefix: bytes, limit: int) -> list[bytes]:
        """Return the first `limit` keys that start with a prefix, or all if they are fewer, in byte order."""
        if limit < 0:
            raise ValueError(f"limit must not be negative: {limit}")
        start, offset, stop, end = self._range(prefix)
        if start == stop:
            return self.buckets[start][offset : min(end, offset + limit)]
        found = self.buckets[start][offset : offset + limit]
        for at in range(start + 1, stop):
            if len(found) >= limit:
                break
            found += self.buckets[at]
        else:
            found += self.buckets[stop][:end]
        del found[limit:]
        return found

    def _range(self, prefix: bytes) -> tuple[int, int, int, int]:
        """Merge, then locate the keys that start with a prefix: first bucket and offset, last bucket and end offset."""
        self._merge()
        stem = prefix.rstrip(b"\xff")  # after b"a\xff" comes b"b"; nothing comes after b"\xff"
        if not stem:
            return *self._find(prefix), len(self.buckets) - 1, len(self.buckets[-1])
        return *self._find(prefix), *self._find(stem[:-1] + bytes((stem[-1] + 1,)))

    def _find(self, key: bytes) -> tuple[int, int]:
        """Return the bucket and the offset of a key, or those at which it would be inserted."""
        at = bisect_right(self.bounds, key) - 1
        return at, bisect_left(self.buckets[at], key)

    def _merge(self) -> None:
        """Move the pending keys to the buckets."""
        if self.pending:
            new = sorted(self.pending)
            self.pending.clear()
            self._insert(new, MAX_SPLITS)

    def _insert(self, new: list[bytes], max_splits: int) -> None:
        """Put sorted keys into the buckets, one search for all keys of a bucket."""
        self._merged += len(new)
        bounds, start, at, splits = self.bounds, 0, 0, 0
        while start < len(new):
            at = bisect_right(bounds, new[start], at) - 1
            stop = bisect_left(new, bounds[at + 1], start) if at + 1 < len(bounds) else len(new)
            bucket = self.buckets[at]
            del self._before[at + 1 :]
            if (stop - start) * SORT_SHARE > len(bucket):
                there = len(bucket)
                bucket += new[start:stop]
                if there:
                    bucket.sort()
            else:
                for key in new[start:stop]:
                    insort(bucket, key)
            if len(bucket) > self.bucket_size and splits < max_splits:
                splits += 1
                self._split(at)
            start = stop

    def _split(self, at: int) -> None:
        """Split a bucket in halves, or, if a large batch was merged into it, in pieces of half of `bucket_size`."""
        bucket = self.buckets[at]
        size, parts = len(bucket), len(bucket) // ((self.bucket_size + 1) // 2)
        pieces = [bucket[size * part // parts : size * (part + 1) // parts] for part in range(parts)]
        self.buckets[at : at + 1] = pieces
        self.bounds[at + 1 : at + 1] = [piece[0] for piece in pieces[1:]]

    def _join(self, at: int) -> None:
        """Join a small bucket with a neighbor if both fit in one; an empty bucket joins any neighbor."""
        size = len(self.buckets[at])
        for left, other in ((at - 1, at - 1), (at, at + 1)):
            if 0 <= other < len(self.buckets) and (not size or size + len(self.buckets[other]) <= self.bucket_size):
                del self._before[left + 1 :]
                self.buckets[left] += self.buckets.pop(left + 1)
                del self.bounds[left + 1]
                return
