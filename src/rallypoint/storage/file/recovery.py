"""Recovery of a data directory: which files hold the state, and their contents in order.

The state is the newest snapshot plus the frames after it. The names alone show whether a file is missing: the snapshot
up to frame n is created after log-<n+1>, and a segment after the last frame of its predecessor was synced. So there
must be a segment that begins right after the snapshot (or with frame 1), and each further one begins where its
predecessor ends. Older segments and snapshots were left by a process that died before it removed them, and are not
read.

Rejected: an older snapshot if the newest is damaged. The segments between the two are gone.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple

from rallypoint.storage.errors import StorageDamaged
from rallypoint.storage.file.directory import Listing, segment_path
from rallypoint.storage.file.segment import BATCH, SegmentFrame, SegmentTail, scan

__all__ = ["RecoveryPlan", "plan_recovery", "read_segments"]

_BUFFER_BYTES = 1 << 20


class RecoveryPlan(NamedTuple):
    """The files to read: a snapshot (its number, None: there is none), then segments (their first frames)."""

    snapshot: int | None
    segments: list[int]

    @property
    def sequence(self) -> int:
        """The number of the first frame after the snapshot."""
        return (self.snapshot or 0) + 1


def plan_recovery(directory: str, listing: Listing) -> RecoveryPlan:
    """Choose the files to read; none if the directory is new. Raises StorageDamaged if the first segment is missing."""
    snapshot = listing.snapshots[-1] if listing.snapshots else None
    plan = RecoveryPlan(snapshot, [first for first in listing.segments if first > (snapshot or 0)])
    if (snapshot is not None or plan.segments) and plan.segments[:1] != [plan.sequence]:
        raise StorageDamaged(
            path=segment_path(directory, plan.sequence), offset=0, why="this segment of the log is missing"
        )
    return plan


def read_segments(
    directory: str, segments: Sequence[int], upto: int | None = None
) -> Generator[bytes, None, SegmentTail]:
    """Yield the records of these segments, with one frame in memory at a time; return the tail of the last segment.

    `upto` is the number of their last frame; None: they reach to the end of the log, where a torn frame is not damage.
    """
    tail = SegmentTail(0, segments[0], False)
    for index, first in enumerate(segments):
        path = segment_path(directory, first)
        _require_gapless(directory, tail.sequence, first)
        with open(path, "rb", buffering=_BUFFER_BYTES) as file:
            tail = yield from _records(scan(file, path, first), path)
        if tail.torn and (upto is not None or index < len(segments) - 1):
            raise StorageDamaged(path=path, offset=tail.end, why="incomplete frame, but not the last one of the log")
    if upto is not None:
        _require_gapless(directory, tail.sequence, upto + 1)
    return tail


def _require_gapless(directory: str, sequence: int, first: int) -> None:
    """Raise StorageDamaged unless a segment begins with the expected frame: `first` must equal `sequence`."""
    if first > sequence:
        why = f"frames {sequence} to {first - 1} are missing: this segment, or the end of the one before it"
        raise StorageDamaged(path=segment_path(directory, sequence), offset=0, why=why)
    if first < sequence:
        why = f"begins with frame {first}, which the segment before it contains as well"
        raise StorageDamaged(path=segment_path(directory, first), offset=0, why=why)


def _records(frames: Generator[SegmentFrame, None, SegmentTail], path: str) -> Generator[bytes, None, SegmentTail]:
    while True:
        try:
            kind, records, offset = next(frames)
        except StopIteration as stop:
            tail: SegmentTail = stop.value
            return tail
        if kind != BATCH:
            raise StorageDamaged(path=path, offset=offset, why="this kind of frame does not belong in a log")
        yield from records
