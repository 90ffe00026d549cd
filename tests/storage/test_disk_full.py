"""A full disk, for real: a commit is refused, leaves nothing behind, and works again when there is room.

Each test runs under a limit of the size of files, which every process may set for itself, and where this process may
mount file systems also on one of 256 KiB.
"""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.storage.logs import commit, files, held, names, opened, outcome

from rallypoint.errors import DiskFull
from rallypoint.storage.file import FileStorage
from rallypoint.storage.segment_writer import SPARE_BYTES

KIB = 1 << 10
DISK_BYTES = 512 * KIB


class Disk(NamedTuple):
    """A directory in which a file has room for less than 256 KiB, and more after `make_room`; `number`: the errno."""

    directory: Path
    make_room: Callable[[], None]
    number: int


def mounts() -> bool:
    """Say whether this process may mount a file system, by doing so where nobody sees it."""
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/tmp"]
    try:
        return os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def limited(tmp_path: Path) -> Iterator[Disk]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (DISK_BYTES, hard))
    try:
        yield Disk(tmp_path / "data", lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard)), errno.EFBIG)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def mounted(tmp_path: Path) -> Iterator[Disk]:
    point = tmp_path / "disk"
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={2 * DISK_BYTES}", "none", point], check=True)
    try:
        ballast = point / "ballast"
        ballast.write_bytes(bytes(DISK_BYTES))
        yield Disk(point / "data", ballast.unlink, errno.ENOSPC)
    finally:
        subprocess.run(["umount", "--lazy", point], check=True)


DISKS = {"limit": limited, **({"tmpfs": mounted} if mounts() else {})}


@pytest.fixture(params=DISKS)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    yield from DISKS[request.param](tmp_path)


def fill(storage: FileStorage, disk: Disk, size: int) -> list[bytes]:
    """Commit records of a size until one is refused; return those that were not."""
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
    assert reserve <= min(preallocate_bytes // 4, SPARE_BYTES) + 8 * size + 4096, "more is reserved"
    disk.make_room()
    commit(storage, b"later", b"more")
    ahead = sum(map(len, files(disk.directory).values())) - log_bytes(storage)
    assert ahead <= preallocate_bytes + min(preallocate_bytes // 4, SPARE_BYTES)
    storage.close()
    assert held(disk.directory, **options) == [*accepted, b"later", b"more"]


def test_what_is_urgent_has_a_reserve(disk: Disk, unsynced: None) -> None:
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
    """To read it, to cut a torn frame off, and to go on when there is room."""
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


def test_a_snapshot_for_which_there_is_no_room(disk: Disk, unsynced: None) -> None:
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
