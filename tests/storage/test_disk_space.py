"""When a log is compacted, and how much of a disk it may use."""

from __future__ import annotations

import pytest

from rallypoint.storage.file.disk_space import is_due, is_tight, leaves_room

MIB = 1 << 20
AMPLE = 1 << 40


@pytest.mark.parametrize(
    ("log", "snapshot", "free", "expected"),
    [
        (40, 0, AMPLE, False),
        (40, 0, 81 * MIB, False),
        (40, 0, 79 * MIB, True),
        (40, 20, 119 * MIB, True),
        (1, 0, 0, False),  # not worth it
        (2, 0, 0, True),
        (10, 20, 0, False),
        (11, 20, 0, True),
    ],
)
def test_a_log_is_tight_when_a_snapshot_may_not_fit(log: int, snapshot: int, free: int, expected: bool) -> None:
    assert is_tight(log * MIB, snapshot * MIB, free) is expected


@pytest.mark.parametrize(
    ("closed", "snapshot", "tight", "expected"),
    [
        (64, 0, False, False),
        (65, 0, False, True),
        (65, 33, False, False),
        (67, 33, False, True),
        (1, 0, True, False),
        (2, 0, True, True),
        (16, 33, True, False),
        (17, 33, True, True),
    ],
)
def test_a_tight_log_is_compacted_sooner(closed: int, snapshot: int, tight: bool, expected: bool) -> None:
    assert is_due(closed * MIB, snapshot * MIB, segment_bytes=64 * MIB, tight=tight) is expected


@pytest.mark.parametrize(
    ("closed", "snapshot", "free", "expected"),
    [
        (20, 0, 20 * MIB, True),
        (20, 0, 20 * MIB - 1, False),
        (20, 10, 29 * MIB, False),
        (10, 10, 0, True),  # a compaction would gain little
        (1, 0, 0, True),
        (0, 0, -1, True),  # the disk itself refuses that
    ],
)
def test_room_for_a_snapshot_is_reserved(closed: int, snapshot: int, free: int, expected: bool) -> None:
    assert leaves_room(closed * MIB, snapshot * MIB, free) is expected
