"""How much of a disk the log may use, and when to compact it. Pure; sizes are in bytes.

A compaction writes a new snapshot next to the old one and the log, and the new one is at most as large as both. A log
that leaves less free space than twice that is `tight`: it is compacted long before it is large, while the server
continues. Commits that outrun the compaction are refused before they use the space for the snapshot. Otherwise a log
could fill a disk with the history of a single key, and never shrink again.

A log smaller than its snapshot is not limited: compacting it would free little.

Rejected: reserving that space in a file. It would permanently take twice the disk space from other programs.
"""

from __future__ import annotations

__all__ = ["is_due", "is_tight", "leaves_room"]

WORTH_BYTES = 1 << 20
"""Minimum size of a log to be compacted."""


def is_tight(log: int, snapshot: int, free: int) -> bool:
    """Return whether a log must be compacted soon, while there is room for that."""
    return _is_worth(log, snapshot) and 2 * (snapshot + log) > free


def is_due(closed: int, snapshot: int, *, segment_bytes: int, tight: bool) -> bool:
    """Return whether to compact closed segments of this size."""
    return _is_worth(closed, snapshot) if tight else closed > max(segment_bytes, 2 * snapshot)


def leaves_room(closed: int, snapshot: int, free: int) -> bool:
    """Return whether the free space suffices to compact the closed segments, or they are too small to matter."""
    return closed <= max(WORTH_BYTES, snapshot) or snapshot + closed <= free


def _is_worth(log: int, snapshot: int) -> bool:
    return log > max(WORTH_BYTES, snapshot // 2)
