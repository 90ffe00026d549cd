"""A full disk: a commit is refused, leaves nothing behind, and works again when there is room.

Each test runs with a limit on the size of files, and, if this process may mount file systems, also on a small tmpfs.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.storage.logs import WAIT_S, commit, files, held, names, opened, outcome
from tests.storage.small_disk import take_all, tmpfs

from rallypoint.errors import DiskFull
from rallypoint.storage.file.segment_writer import SPARE_BYTES
from rallypoint.storage.file.storage import FileStorage

pytestmark = pytest.mark.usefixtures("both_ways")

KIB = 1 << 10
DISK_BYTES = 512 * KIB


class Disk(NamedTuple):
    """A directory in which files have room for less than DISK_BYTES until `make_room`; `number`: the errno."""

    directory: Path
    make_room: Callable[[], None]
    number: int


def limited(tmp_path: Path) -> Iterator[Disk]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (DISK_BYTES, hard))
    try:
        yield Disk(tmp_path / "data", lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard)), errno.EFBIG)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def mounted(tmp_path: Path) -> Iterator[Disk]:
    point = tmp_path / "disk"
    with tmpfs(point, 2 * DISK_BYTES):
        ballast = point / "ballast"
        ballast.write_bytes(bytes(DISK_BYTES))
        yield Disk(point / "data", ballast.unlink, errno.ENOSPC)


needs_tmpfs = pytest.mark.needs("tmpfs")
DISKS = {"limit": limited, "tmpfs": mounted}


@pytest.fixture(params=["limit", pytest.param("tmpfs", marks=needs_tmpfs)])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    yield from DISKS[request.param](tmp_path)


def fill(storage: FileStorage, disk: Disk, size: int) -> list[bytes]:
    """Commit records of a size until one is refused; return the accepted ones."""
    accepted: list[bytes] = []
    while (error := outcome(storage, record := b"%d " % len(accepted) * (size // 3))) is None:
        accepted.append(record)
        assert len(accepted) < 10_000
    assert isinstance(error, DiskFull) and error.number == error.errno == disk.number
    assert error.path.startswith(str(disk.directory / "log-")) and os.strerror(disk.number) in str(error)
    return accepted


@pytest.mark.parametrize("preallocate_bytes", [0, 16 * KIB, 256 * KIB])
@pytest.mark.parametrize("size", [3, 10 * KIB, 100 * KIB])
def test_a_refused_commit_leaves_nothing_and_later_ones_work(
    disk: Disk, unsynced: None, preallocate_bytes: int, size: int
) -> None:
    options = {"preallocate_bytes": preallocate_bytes}
    storage, _ = opened(disk.directory, **options)
    accepted = fill(storage, disk, size)
    assert sum(map(len, accepted)) > (100 * KIB if size > 3 else KIB)
    for _ in range(3):
        assert isinstance(outcome(storage, b"refused" * size), DiskFull)
    reserve = sum(map(len, files(disk.directory).values())) - log_bytes(storage)
    assert reserve <= min(preallocate_bytes // 4, SPARE_BYTES) + 8 * size + 4096, "too much is reserved"
    disk.make_room()
    commit(storage, b"later", b"more")
    ahead = sum(map(len, files(disk.directory).values())) - log_bytes(storage)
    assert ahead <= preallocate_bytes + min(preallocate_bytes // 4, SPARE_BYTES)
    storage.close()
    assert held(disk.directory, **options) == [*accepted, b"later", b"more"]


def test_urgent_commits_have_a_reserve(disk: Disk, unsynced: None) -> None:
    options = {"preallocate_bytes": 64 * KIB}
    storage, _ = opened(disk.directory, **options)
    accepted = fill(storage, disk, 10 * KIB)
    urgent = [b"urgent %d" % number for number in range(20)]
    for record in urgent:
        commit(storage, record, urgent=True)
    assert isinstance(outcome(storage, b"refused" * KIB), DiskFull)
    storage.close()
    storage, found = opened(disk.directory, **options)
    assert found == [*accepted, *urgent]
    commit(storage, b"still urgent", urgent=True)
    disk.make_room()
    commit(storage, b"later")
    storage.close()
    assert held(disk.directory, **options) == [*accepted, *urgent, b"still urgent", b"later"]


def log_bytes(storage: FileStorage) -> float:
    return storage.statistics()["log_bytes"]


def test_a_batch_larger_than_the_disk_does_not_block_smaller_ones(disk: Disk) -> None:
    storage, _ = opened(disk.directory)
    commit(storage, b"one")
    assert isinstance(outcome(storage, bytes(3 << 20), b"refused"), DiskFull)
    assert len(files(disk.directory)[f"log-{1:020d}"]) <= 512 + (1 << 20) + SPARE_BYTES
    commit(storage, b"two" * KIB)
    storage.close()
    assert held(disk.directory) == [b"one", b"two" * KIB]


def test_a_log_on_a_full_disk_can_be_opened(disk: Disk, unsynced: None) -> None:
    """It can be read, and continued when there is room."""
    storage, _ = opened(disk.directory)
    accepted = fill(storage, disk, 10 * KIB)
    storage.close()
    storage, found = opened(disk.directory)
    assert found == accepted
    assert isinstance(outcome(storage, b"refused" * 10 * KIB), DiskFull)
    disk.make_room()
    commit(storage, b"later")
    storage.close()
    assert held(disk.directory) == [*accepted, b"later"]


def test_a_snapshot_that_does_not_fit_changes_nothing(disk: Disk, unsynced: None) -> None:
    storage, _ = opened(disk.directory)
    accepted = [b"%d" % index * 5000 for index in range(40)]
    commit(storage, *accepted)
    with pytest.raises(DiskFull):
        storage.save([*accepted, *accepted])
    assert not names(disk.directory, "snapshot")
    disk.make_room()
    storage.save(accepted)
    commit(storage, b"later")
    storage.close()
    assert names(disk.directory, "snapshot")
    assert held(disk.directory) == [*accepted, b"later"]


@needs_tmpfs
def test_closing_keeps_the_reserve(tmp_path: Path) -> None:
    """However full the disk is, the next server must be able to log its start."""
    point = tmp_path / "disk"
    expected: list[bytes] = []
    with tmpfs(point, 2 * DISK_BYTES):
        for stop in range(5):
            storage, found = opened(point / "data", preallocate_bytes=64 * KIB)
            assert found == expected
            while outcome(storage, record := b"%d" % stop * 2 * KIB) is None:
                expected.append(record)
            take_all(point)
            commit(storage, b"started", urgent=True)
            expected.append(b"started")
            with pytest.raises(DiskFull):
                storage.save(expected)
            storage.close()
            take_all(point)
        assert not names(point / "data", "snapshot") and len(names(point / "data", "log")) == 1


@needs_tmpfs
@pytest.mark.parametrize("size", [100, 4 * KIB, 256 * KIB])
def test_a_log_that_fills_its_disk_is_compacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unsynced: None, size: int
) -> None:
    """One key is set repeatedly, for four times the size of the disk: a refused commit succeeds after a compaction."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    point, refused = tmp_path / "disk", 0
    with tmpfs(point, 8 << 20):
        storage, _ = opened(point / "data", fold="tests.storage.logs:newest")
        for index in range((32 << 20) // max(size, 1500)):
            record = b"%d " % index * (size // len(b"%d " % index))
            batch = [record, b"and more"] if size < KIB else [record]
            if isinstance(outcome(storage, *batch), DiskFull):
                refused += 1
                assert storage.compact_if_due(), "a server checks this once a second"
                assert storage.wait_compaction(WAIT_S)
                commit(storage, *batch)
        assert 2 < refused < 20 and storage.statistics()["failed_compactions"] == 0
        last = batch[-1]
        storage.close()
        assert held(point / "data")[-1] == last


@needs_tmpfs
def test_a_log_is_compacted_before_its_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unsynced: None
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    point = tmp_path / "disk"
    with tmpfs(point, 8 << 20):
        storage, _ = opened(point / "data", fold="tests.storage.logs:newest")
        for index in range(400):
            commit(storage, bytes(100 * KIB), b"%d" % index)
            if storage.compact_if_due():
                assert storage.wait_compaction(WAIT_S)
        assert storage.statistics()["compactions"] > 5 and storage.statistics()["failed_compactions"] == 0
        storage.close()
        assert held(point / "data")[-1] == b"399"


@needs_tmpfs
def test_a_state_that_fills_the_disk_is_refused_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log has no garbage: a compaction gains nothing, and must not lose anything."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    point, now = tmp_path / "disk", [0.0]
    with tmpfs(point, 8 << 20):
        storage, _ = opened(point / "data", clock=lambda: now[0])
        accepted: list[bytes] = []
        refused = 0
        while refused < 5:
            record = b"%d " % len(accepted) * 20 * KIB
            if outcome(storage, record) is None:
                accepted.append(record)
            else:
                refused += 1
            now[0] += 100.0 * refused
            if storage.compact_if_due():
                assert storage.wait_compaction(WAIT_S)
        assert sum(map(len, accepted)) > 4 << 20, "more than half of the disk is used"
        storage.close()
        assert held(point / "data") == accepted
