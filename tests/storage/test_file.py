"""A storage in its directory: committed records are read back, and damage of any file is named.

The expected state is the list of all committed records (see logs.py).
"""

from __future__ import annotations

import copy
import errno
import os
import pickle
import random
import threading
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from tests.storage.logs import WAIT_S, commit, files, frame, held, lay_out, names, opened, outcome
from tests.storage.power_loss import Disk

from rallypoint.errors import DiskFull, RallypointError, StoreClosed, StoreError
from rallypoint.storage.errors import DirectoryInUse, StorageDamaged, StorageFailed
from rallypoint.storage.file.segment import SECTOR_BYTES
from rallypoint.storage.file.segment_writer import SPARE_BYTES
from rallypoint.storage.file.storage import FileStorage

SMALL: dict[str, Any] = {"segment_bytes": 2048, "preallocate_bytes": 0}
"""Options with which a segment has room for a few commits."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def contents(directory: Path, unsynced: None) -> dict[str, bytes]:
    """A snapshot, a closed segment and an open one, with frames of one and of three sectors."""
    storage, _ = opened(directory, **SMALL)
    commit(storage, b"in the snapshot")
    storage.save([b"in the snapshot"])
    commit(storage, b"alpha", b"beta")
    commit(storage, bytes(1200))
    commit(storage, b"opens")
    commit(storage, b"last " * 200)
    storage.close()
    found = files(directory)
    assert {name: len(data) // SECTOR_BYTES for name, data in found.items()} == {CLOSED: 4, LAST: 4, SNAPSHOT: 2}
    return found


RECORDS = [b"in the snapshot", b"alpha", b"beta", bytes(1200), b"opens", b"last " * 200]
LAST = f"log-{4:020d}"
CLOSED = f"log-{2:020d}"
SNAPSHOT = f"snapshot-{1:020d}"


# Round trips


@pytest.mark.usefixtures("both_ways")
def test_records_are_read_back_from_a_new_directory(tmp_path: Path) -> None:
    directory = tmp_path / "not" / "there" / "yet"
    with closing(FileStorage(directory)) as storage:
        chunks, records = storage.recover()
        assert chunks is None and list(records) == []
        commit(storage, b"one")
        commit(storage, b"", b"two", bytes(5000))
    assert held(directory) == [b"one", b"", b"two", bytes(5000)]
    assert {path.stat().st_mode & 0o077 for path in (directory, *directory.iterdir())} == {0}, (
        "readable only by this user"
    )


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.usefixtures("both_ways")
def test_random_histories_of_a_log_lose_nothing(seed: int, directory: Path, unsynced: None) -> None:
    """Commit, save, close and open in random order, with random sizes of segments: all records are always there."""
    chance = random.Random(seed)
    options = {
        "segment_bytes": chance.choice([512, 3000, 20_000, 64 << 20]),
        "preallocate_bytes": chance.choice([0, 4096]),
    }
    expected: list[bytes] = []
    storage, _ = opened(directory, **options)
    for _ in range(60):
        step = chance.random()
        if step < 0.8:
            sizes = [int(chance.paretovariate(0.6)) for _ in range(chance.randint(1, 8))]
            batch = [chance.randbytes(min(size, 100_000)) for size in sizes]
            commit(storage, *batch)
            expected += batch
        elif step < 0.9:
            storage.save(expected)
        else:
            storage.close()
            storage, found = opened(directory, **options)
            assert found == expected
    storage.close()
    assert held(directory, **options) == expected


@pytest.mark.usefixtures("both_ways")
def test_a_large_batch_survives_short_writes(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:300_001], at))
    batch = [random.Random(size).randbytes(size) for size in (9 << 20, 1, 5 << 20)]
    storage, _ = opened(directory)
    commit(storage, *batch)
    commit(storage, b"next")
    storage.close()
    assert held(directory) == [*batch, b"next"]


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL])
@pytest.mark.usefixtures("both_ways")
def test_a_file_system_without_preallocation_works(
    directory: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(fd: int, at: int, size: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    storage, _ = opened(directory)
    commit(storage, b"one")
    commit(storage, b"two")
    storage.close()
    assert len(files(directory)[f"log-{1:020d}"]) == 2 * SECTOR_BYTES
    assert held(directory) == [b"one", b"two"]


@pytest.mark.usefixtures("both_ways")
def test_space_is_reserved_ahead_and_released(directory: Path) -> None:
    options = {"segment_bytes": 1024, "preallocate_bytes": 1 << 20}
    storage, _ = opened(directory, **options)
    for text in (b"one", b"two", b"three"):
        commit(storage, text)
    storage.close()
    assert [len(data) for data in files(directory).values()] == [1024, (1 << 20) + SPARE_BYTES]
    assert held(directory, **options) == [b"one", b"two", b"three"]


@pytest.mark.usefixtures("both_ways")
def test_recovery_reads_many_segments(directory: Path, unsynced: None) -> None:
    expected = [b"%d" % index * 30 for index in range(300)]
    storage, _ = opened(directory, segment_bytes=SECTOR_BYTES)
    for record in expected:
        commit(storage, record)
    statistics = storage.statistics()
    storage.close()
    assert len(names(directory, "log")) == 300
    assert statistics["segments"] == 300 and statistics["commits"] == statistics["sequence"] == 300
    assert statistics["log_bytes"] == 300 * SECTOR_BYTES
    storage, found = opened(directory, segment_bytes=SECTOR_BYTES)
    assert found == expected
    assert storage.statistics()["segments"] == 300
    storage.save(found)
    assert storage.statistics()["segments"] == 1
    storage.close()
    assert list(files(directory)) == [f"log-{301:020d}", f"snapshot-{300:020d}"]


def test_records_are_read_one_frame_at_a_time(directory: Path, unsynced: None) -> None:
    storage, _ = opened(directory, **SMALL)
    for index in range(40):
        commit(storage, b"%d" % index)
    storage.close()
    storage = FileStorage(directory)
    chunks, records = storage.recover()
    assert chunks is None and next(records) == b"0"
    last = directory / f"log-{37:020d}"
    last.write_bytes(last.read_bytes() + frame(41, b"40"))
    assert list(records)[-1] == b"40", "the last segment was read too early"
    storage.close()


# Torn tails


def test_a_cut_through_the_last_frame_loses_only_that_frame(directory: Path, unsynced: None) -> None:
    name, earlier = f"log-{1:020d}", frame(1, b"one") + frame(2, b"two" * 300)
    whole = earlier + frame(3, b"last " * 150)
    assert len(whole) - len(earlier) == 2 * SECTOR_BYTES
    for size in range(len(earlier), len(whole)):
        lay_out(directory, {name: whole[:size]})
        storage, found = opened(directory, **SMALL)
        assert found == [b"one", b"two" * 300], size
        commit(storage, b"goes on")
        storage.close()
        assert held(directory, **SMALL) == [*found, b"goes on"], size


@pytest.mark.parametrize("ahead", [0, 10_000])
def test_missing_sectors_of_the_last_frame_lose_only_that_frame(
    directory: Path, contents: dict[str, bytes], ahead: int, caplog: pytest.LogCaptureFixture
) -> None:
    whole = contents[LAST]
    for missing in range(1, 8):
        torn = bytearray(whole) + bytes(ahead)
        for sector in (1, 2, 3):
            if missing & 1 << sector - 1:
                torn[sector * SECTOR_BYTES : (sector + 1) * SECTOR_BYTES] = bytes(SECTOR_BYTES)
        lay_out(directory, {**contents, LAST: bytes(torn)})
        caplog.clear()
        storage, found = opened(directory, **SMALL)
        assert found == RECORDS[:-1]
        assert (f"at byte {SECTOR_BYTES} of {directory / LAST}" in caplog.text) == (missing < 7)
        commit(storage, b"x")
        storage.close()
        assert held(directory, **SMALL) == [*RECORDS[:-1], b"x"]


def test_a_segment_without_any_frame_is_reused(directory: Path, contents: dict[str, bytes]) -> None:
    """An unwritten segment may have any size; the one before it must be complete."""
    created = f"log-{6:020d}"
    for empty in (b"", bytes(100), bytes(1 << 20)):
        lay_out(directory, {**contents, created: empty})
        storage, found = opened(directory, **SMALL)
        assert found == RECORDS
        commit(storage, b"next")
        storage.close()
        assert held(directory, **SMALL) == [*RECORDS, b"next"]
    torn = contents[LAST][:-1]
    lay_out(directory, {**contents, LAST: torn, created: b""})
    assert damage(directory) == (LAST, SECTOR_BYTES)


def test_a_cut_off_tail_stays_cut_off_when_the_segment_was_full(directory: Path, contents: dict[str, bytes]) -> None:
    full = contents[LAST] + frame(6, b"torn" * 1000)[:-SECTOR_BYTES]
    lay_out(directory, {**contents, LAST: full})
    storage, found = opened(directory, **SMALL)
    assert found == RECORDS
    commit(storage, b"in the next segment")
    storage.close()
    assert files(directory)[LAST] == contents[LAST]
    assert held(directory, **SMALL) == [*RECORDS, b"in the next segment"]


# Damage


def damage(directory: Path) -> tuple[str, int]:
    """Open a storage, which must report damage and change nothing; return the name of the file and the offset."""
    before = files(directory)
    with pytest.raises(StorageDamaged) as caught:
        held(directory)
    error = caught.value
    assert os.path.dirname(error.path) == str(directory)
    assert error.path in str(error) and f"byte {error.offset}:" in str(error) and error.why in str(error)
    assert files(directory) == before
    return os.path.basename(error.path), error.offset


def test_a_flipped_bit_in_any_byte_of_any_file_is_found(directory: Path, contents: dict[str, bytes]) -> None:
    lay_out(directory, contents)
    assert held(directory) == RECORDS
    starts = {CLOSED: [0, 512], LAST: [0, 512], SNAPSHOT: [0, 512]}
    for name, data in contents.items():
        with (directory / name).open("r+b", buffering=0) as file:
            for at in range(len(data)):
                os.pwrite(file.fileno(), bytes([data[at] ^ 1 << at % 8]), at)
                found, offset = damage(directory)
                frame_start = max(start for start in starts[name] if start <= at)
                assert found == name and offset in (frame_start, at - at % SECTOR_BYTES), (name, at, offset)
                os.pwrite(file.fileno(), data[at : at + 1], at)


def test_missing_files_are_found(directory: Path, contents: dict[str, bytes]) -> None:
    without = {name: {other: data for other, data in contents.items() if other != name} for name in contents}
    lay_out(directory, without[CLOSED])
    assert damage(directory) == (CLOSED, 0)
    lay_out(directory, without[SNAPSHOT])
    assert damage(directory) == (f"log-{1:020d}", 0)
    lay_out(directory, {SNAPSHOT: contents[SNAPSHOT]})
    assert damage(directory) == (CLOSED, 0)
    lay_out(directory, {**contents, f"log-{6:020d}": frame(6, b"six"), f"log-{8:020d}": b""})
    assert damage(directory) == (f"log-{7:020d}", 0)
    lay_out(directory, {**without[LAST], f"log-{6:020d}": b""})
    assert damage(directory) == (LAST, 0)


def test_a_closed_segment_cut_short_is_found(directory: Path, contents: dict[str, bytes]) -> None:
    for size in range(0, 2048, 64):
        lay_out(directory, {**contents, CLOSED: contents[CLOSED][:size]})
        name, offset = damage(directory)
        expected = {0: (CLOSED, 0), 512: (f"log-{3:020d}", 0)}
        assert (name, offset) == expected.get(size, (CLOSED, 0 if size < 512 else 512))


def test_two_segments_with_the_same_frames_are_damage(directory: Path, contents: dict[str, bytes]) -> None:
    lay_out(directory, {**contents, f"log-{5:020d}": contents[LAST][SECTOR_BYTES:]})
    assert damage(directory) == (f"log-{5:020d}", 0)


def test_a_snapshot_under_the_name_of_a_segment_is_damage(directory: Path, contents: dict[str, bytes]) -> None:
    lay_out(directory, {f"log-{1:020d}": contents[SNAPSHOT]})
    assert damage(directory) == (f"log-{1:020d}", 0)


def test_foreign_files_are_not_touched(directory: Path, contents: dict[str, bytes]) -> None:
    others = {
        "notes.txt": b"mine",
        "log-1": b"mine",
        "snapshot-backup": b"mine",
        "log-00000000000000000009.old": b"mine",
    }
    lay_out(directory, {**contents, **others})
    storage, found = opened(directory)
    storage.save(found)
    storage.close()
    assert others.items() <= files(directory).items()


# Commits


def test_callbacks_run_in_order_on_the_writer_s_thread_after_the_sync(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, _ = opened(directory)
    events: SimpleQueue[tuple[str, int]] = SimpleQueue()
    real = os.fdatasync

    def sync(fd: int) -> None:
        real(fd)
        events.put(("synced", threading.get_ident()))

    monkeypatch.setattr(os, "fdatasync", sync)
    for index in range(3):

        def done(error: BaseException | None, index: int = index) -> None:
            events.put((f"{index} {error}", threading.get_ident()))

        storage.commit([b"x"], done)
        found = [events.get(timeout=WAIT_S) for _ in range(2)]
        assert [event for event, _ in found] == ["synced", f"{index} None"]
        assert len({ident for _, ident in found}) == 1 and found[0][1] != threading.get_ident()
    storage.close()


def test_close_waits_for_the_commit_in_flight(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set(threading.enumerate())
    storage, _ = opened(directory)
    syncing, go = threading.Event(), threading.Event()
    order: list[str] = []
    real = os.fdatasync

    def sync(fd: int) -> None:
        syncing.set()
        assert go.wait(WAIT_S)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", sync)
    storage.commit([b"one"], lambda error: order.append(f"committed {error}"))
    assert syncing.wait(WAIT_S)

    def close() -> None:
        storage.close()
        order.append("closed")

    closer = threading.Thread(target=close)
    closer.start()
    go.set()
    closer.join(WAIT_S)
    assert order == ["committed None", "closed"]
    assert set(threading.enumerate()) == threads
    with pytest.raises(StoreClosed):
        storage.commit([b"two"], print)
    storage.close()
    assert held(directory) == [b"one"]


def test_a_commit_callback_may_close_the_storage(directory: Path) -> None:
    storage, _ = opened(directory)
    closed = threading.Event()

    def close(error: BaseException | None) -> None:
        storage.close()
        closed.set()

    storage.commit([b"one"], close)
    assert closed.wait(WAIT_S)
    assert held(directory) == [b"one"]


def test_a_commit_callback_that_raises_is_logged(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    called = threading.Event()

    def bad(error: BaseException | None) -> None:
        called.set()
        raise ValueError("the loop is closed")

    storage, _ = opened(directory)
    storage.commit([b"one"], bad)
    assert called.wait(WAIT_S)
    commit(storage, b"two")
    storage.close()
    assert "the loop is closed" in caplog.text
    assert held(directory) == [b"one", b"two"]


def test_misuse_of_a_storage_is_refused(directory: Path, contents: dict[str, bytes]) -> None:
    with closing(FileStorage(directory)) as storage:
        with pytest.raises(RuntimeError, match="recover"):
            storage.commit([b"x"], print)
        with pytest.raises(RuntimeError, match="recover"):
            storage.save([])
        assert not storage.compact_if_due()
        _, records = storage.recover()
        with pytest.raises(RuntimeError, match="snapshot"):
            next(records)
        with pytest.raises(RuntimeError, match="once"):
            storage.recover()
    storage, _ = opened(directory)
    with closing(storage), pytest.raises(ValueError, match="at least one record"):
        storage.commit([], print)
    with pytest.raises(ValueError, match="at least"):
        FileStorage(directory, segment_bytes=511)
    with pytest.raises(ValueError, match="at least"):
        FileStorage(directory, preallocate_bytes=-1)


# Failures


def failing(number: int) -> Any:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.usefixtures("both_ways_faked")
def test_a_failed_sync_is_final(directory: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    storage, _ = opened(directory, segment_bytes=1024)
    commit(storage, b"one")
    calls: list[int] = []

    def fail(fd: int) -> None:
        calls.append(fd)
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        error = outcome(storage, b"two")
    assert isinstance(error, StorageFailed) and error.number == number
    assert error.path == str(directory / f"log-{1:020d}") and os.strerror(number) in str(error)
    for _ in range(3):
        assert outcome(storage, b"three") is error
    with pytest.raises(StorageFailed):
        storage.save([b"one"])
    assert not storage.compact_if_due()
    storage.close()
    assert len(calls) == 1
    assert held(directory) in ([b"one"], [b"one", b"two"])


@pytest.mark.parametrize(
    ("call", "number"),
    [("pwrite", errno.EIO), ("posix_fallocate", errno.EIO), ("pwrite", errno.EROFS)],
)
@pytest.mark.usefixtures("both_ways")
def test_any_other_error_of_a_write_is_final(
    directory: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    storage, _ = opened(directory)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(number))
        error = outcome(storage, b"one")
    assert isinstance(error, StorageFailed) and error.number == number
    assert outcome(storage, b"two") is error
    storage.close()
    assert held(directory) == []


@pytest.mark.usefixtures("both_ways")
def test_a_record_of_the_wrong_type_is_final(directory: Path) -> None:
    storage, _ = opened(directory)
    commit(storage, b"one")
    wrong: Any = ["text"]
    assert isinstance(outcome(storage, *wrong), StorageFailed)
    assert isinstance(outcome(storage, b"two"), StorageFailed)
    storage.close()
    assert held(directory) == [b"one"]


@pytest.mark.usefixtures("both_ways")
def test_a_failed_sync_of_a_new_segments_name_is_final(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, _ = opened(directory, segment_bytes=512)
    commit(storage, b"one")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(errno.EIO))
        error = outcome(storage, b"two")
    assert isinstance(error, StorageFailed) and error.path == str(directory / f"log-{2:020d}")
    assert outcome(storage, b"three") is error
    storage.close()
    assert held(directory) == [b"one"]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOSPC])
@pytest.mark.usefixtures("both_ways")
def test_a_segment_grows_when_no_new_one_can_be_created(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    storage, _ = opened(directory, segment_bytes=512)
    commit(storage, b"one")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", failing(number))
        commit(storage, b"two")
        commit(storage, b"three")
    assert caplog.text.count(os.strerror(number)) == 1
    commit(storage, b"four")
    storage.close()
    assert names(directory, "log") == [f"log-{1:020d}", f"log-{4:020d}"]
    assert held(directory) == [b"one", b"two", b"three", b"four"]


@pytest.mark.parametrize("failures", range(1, 12))
@pytest.mark.usefixtures("both_ways")
def test_a_batch_that_does_not_fit_leaves_nothing(
    directory: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """Whichever write fails: what was written before is cut off, and the next commit takes its place."""
    storage, _ = opened(directory, preallocate_bytes=0)
    commit(storage, b"one")
    real, left = os.pwrite, [failures]

    def fill(fd: int, data: Any, at: int) -> int:
        left[0] -= 1
        return real(fd, data[:300_000], at) if left[0] else failing(errno.ENOSPC)()

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fill)
        error = outcome(storage, b"refused" * 400_000)
    assert isinstance(error, DiskFull) and error.errno == errno.ENOSPC
    assert len((directory / f"log-{1:020d}").read_bytes()) == SECTOR_BYTES
    commit(storage, b"two")
    storage.close()
    assert held(directory) == [b"one", b"two"]


@pytest.mark.usefixtures("both_ways")
def test_a_failure_to_cut_a_segment_back_is_final(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, _ = opened(directory, preallocate_bytes=0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing(errno.ENOSPC))
        patch.setattr(os, "ftruncate", failing(errno.EIO))
        assert isinstance(outcome(storage, b"one"), StorageFailed)
    assert isinstance(outcome(storage, b"two"), StorageFailed)
    storage.close()


# Loss of power


@pytest.mark.usefixtures("both_ways_faked")
def test_a_power_loss_at_any_moment_loses_no_acknowledged_record(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything acknowledged by then is on each of the possible disks (see power_loss.py)."""
    directory.mkdir()
    expected = [b"%d" % index for index in range(12)]
    with monkeypatch.context() as patch:
        disk = Disk(directory, patch)
        for upto in (4, 8, 12):
            storage, found = opened(directory, segment_bytes=1024)
            assert found == expected[: disk.acknowledged]
            while disk.acknowledged < upto:
                commit(storage, expected[disk.acknowledged])
                disk.acknowledged += 1
            if upto != 8:
                storage.save(expected[:upto])
            storage.close()
    calls = " ".join(moment.call for moment in disk.moments)
    assert calls.count("create log") == 7 and calls.count("unlink") > 4
    assert calls.count("rename") == 2 + 6, "snapshots, and all segments but the first"
    for moment in disk.moments:
        for contents in moment.disks:
            lay_out(tmp_path / "after", contents)
            found = held(tmp_path / "after", segment_bytes=1024)
            assert found in (expected[: moment.acknowledged], expected[: moment.acknowledged + 1]), moment


def test_records_not_synced_by_a_killed_process_are_synced_on_recovery(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recovered records may be visible in answers, so they must survive a later loss of power."""
    directory.mkdir()
    lay_out(directory, {f"log-{1:020d}": frame(1, b"one")})
    with monkeypatch.context() as patch:
        disk = Disk(directory, patch, synced=False)
        assert held(directory) == [b"one"]
    for contents in disk.moments[-1].disks:
        lay_out(tmp_path / "after", contents)
        assert held(tmp_path / "after") == [b"one"]


# Errors


@pytest.mark.parametrize(
    "error",
    [
        DirectoryInUse(directory="/data", pid=77, host="node-a"),
        DirectoryInUse(directory="/data", pid=None, host=""),
        StorageDamaged(path="/data/log-1", offset=512, why="a frame does not match its checksum"),
        StorageFailed(path="/data/log-1", why="Input/output error", number=5),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_have_fields_and_survive_pickling(error: RallypointError) -> None:
    assert isinstance(error, StoreError)
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is type(error) and str(other) == str(error) and vars(other) == vars(error)
    for name, value in vars(error).items():
        if name != "number" and value:
            assert str(value) in str(error)
