"""Reading a data directory: which files hold the state, and their contents in order.

The state is the newest snapshot, then the frames after it. Names alone tell whether a file is missing: a snapshot that
covers n is created after log-<n+1>, and a segment after the last frame of the one before it was synced. So there must
be a segment that begins right after the snapshot (or with frame 1), and each further one begins where the one before it
ends. Segments and snapshots that the newest snapshot covers are left over from a process that died before it removed
them. They are not read.

Rejected: an older snapshot where the newest is damaged. The segments between the two are gone.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple

from rallypoint.storage.directory import Listing, segment_path
from rallypoint.storage.errors import StorageDamaged
from rallypoint.storage.segment import BATCH, Frame, Tail, scan

__all__ = ["Plan", "plan_recovery", "read_segments"]

_BUFFER_BYTES = 1 << 20


class Plan(NamedTuple):
    """What to read: a snapshot (its number, None: there is none), then segments (the numbers of their first frames)."""

    snapshot: int | None
    segments: list[int]

    @property
    def sequence(self) -> int:
        """The number of the first frame after the snapshot."""
        return (self.snapshot or 0) + 1


def plan_recovery(directory: str, listing: Listing) -> Plan:
    """Choose what to read. A directory without a segment or snapshot is a new one: the plan is then empty."""
    snapshot = listing.snapshots[-1] if listing.snapshots else None
    plan = Plan(snapshot, [first for first in listing.segments if first > (snapshot or 0)])
    if (snapshot is not None or plan.segments) and plan.segments[:1] != [plan.sequence]:
        raise StorageDamaged(
            path=segment_path(directory, plan.sequence), offset=0, why="this segment of the log is missing"
        )
    return plan


def read_segments(directory: str, segments: Sequence[int], upto: int | None = None) -> Generator[bytes, None, Tail]:
    """Yield the records of these segments, one frame in memory at a time; return how the last one ends.

    `upto` is the number of their last frame; None means that they reach to the end of the log, where a torn frame is
    no damage.
    """
    tail = Tail(0, segments[0], False)
    for index, first in enumerate(segments):
        path = segment_path(directory, first)
        _require_gapless(directory, tail.sequence, first)
        with open(path, "rb", buffering=_BUFFER_BYTES) as file:
            tail = yield from _records(scan(file, path, first), path)
        if tail.torn and (upto is not None or index < len(segments) - 1):
            raise StorageDamaged(path=path, offset=tail.end, why="an incomplete frame, and it is not the last one")
    if upto is not None:
        _require_gapless(directory, tail.sequence, upto + 1)
    return tail


def _require_gapless(directory: str, sequence: int, first: int) -> None:
    """Raise StorageDamaged unless a segment that begins with frame `first` follows where frame `sequence` is next."""
    if first > sequence:
        why = f"frames {sequence} to {first - 1} are missing: this segment, or the end of the one before it"
        raise StorageDamaged(path=segment_path(directory, sequence), offset=0, why=why)
    if first < sequence:
        why = f"it begins with frame {first}, and so does a part of the segment before it"
        raise StorageDamaged(path=segment_path(directory, first), offset=0, why=why)


def _records(frames: Generator[Frame, None, Tail], path: str) -> Generator[bytes, None, Tail]:
    while True:
        try:
            kind, records, offset = next(frames)
        except StopIteration as stop:
            tail: Tail = stop.value
            return tail
        if kind != BATCH:
            raise StorageDamaged(path=path, offset=offset, why="a frame that does not belong to a log")
        yield from records
