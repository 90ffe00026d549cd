"""How much of a disk the log may take, and when it is to be compacted. Pure; sizes are in bytes.

A compaction writes a new snapshot beside the old one and the log, and that is at most as large as these two. A log that
leaves less free than twice that is `tight`: it is compacted long before it is large, while the server goes on. What is
written faster than that is refused before it takes the room for the snapshot. Otherwise a log could fill a disk with
the history of a single key, and stay there for ever.

A log that is smaller than its snapshot is not held back: compacting it would free little.

Rejected: reserving that room in a file. It would take twice the disk from everybody else, all the time.
"""

from __future__ import annotations

__all__ = ["is_due", "is_tight", "leaves_room"]

WORTH_BYTES = 1 << 20
"""How large a log must be at least to be compacted."""


def is_tight(log: int, snapshot: int, free: int) -> bool:
    """Return whether a log has to be compacted soon, or there will be no room for that."""
    return _is_worth(log, snapshot) and 2 * (snapshot + log) > free


def is_due(closed: int, snapshot: int, *, segment_bytes: int, tight: bool) -> bool:
    """Return whether to compact the closed segments, which have this size."""
    return _is_worth(closed, snapshot) if tight else closed > max(segment_bytes, 2 * snapshot)


def leaves_room(closed: int, snapshot: int, free: int) -> bool:
    """Return whether the closed segments can be compacted into what is free, or are not worth holding others back."""
    return closed <= max(WORTH_BYTES, snapshot) or snapshot + closed <= free


def _is_worth(log: int, snapshot: int) -> bool:
    return log > max(WORTH_BYTES, snapshot // 2)
