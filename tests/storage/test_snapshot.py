"""Snapshots: round trips, detection of damage, and recovery after a kill at any step."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.storage.killed import OPTIONS, RECORDS
from tests.storage.logs import WAIT_S, commit, files, frame, held, lay_out, names, opened

from rallypoint.errors import DiskFull
from rallypoint.storage.errors import StorageDamaged, StorageFailed
from rallypoint.storage.file.segment import SECTOR_BYTES
from rallypoint.storage.file.snapshot import read_snapshot, write_snapshot
from rallypoint.storage.file.storage import FileStorage


def chunks_of(seed: int) -> list[bytes]:
    """Return chunks that fill several frames."""
    chance = random.Random(seed)
    return [chance.randbytes(int(chance.paretovariate(0.4)) % 700_000) for _ in range(40)] + [b"", b"\0" * 5000]


@pytest.mark.parametrize("chunks", [[], [b""], [b"one"], chunks_of(1), [random.Random(2).randbytes(3 << 20)]])
def test_chunks_survive_a_round_trip(tmp_path: Path, chunks: list[bytes]) -> None:
    write_snapshot(str(tmp_path), 7, iter(chunks))
    assert list(files(tmp_path)) == [f"snapshot-{7:020d}"]
    assert list(read_snapshot(str(tmp_path), 7)) == chunks


def test_small_chunks_share_frames(tmp_path: Path) -> None:
    write_snapshot(str(tmp_path), 7, [b"x" * 46] * 20_000)
    assert len(files(tmp_path)[f"snapshot-{7:020d}"]) < 1_050_000


def test_a_snapshot_is_written_and_read_incrementally(tmp_path: Path) -> None:
    """And read in the same way: memory holds only a frame or two."""
    sizes: list[int] = []

    def slowly() -> Iterator[bytes]:
        for _ in range(8):
            yield bytes(1 << 20)
            (path,) = tmp_path.iterdir()
            sizes.append(path.stat().st_size)

    write_snapshot(str(tmp_path), 1, slowly())
    assert sizes == sorted(set(sizes)) and sizes[-1] > 7 << 20
    chunks = read_snapshot(str(tmp_path), 1)
    next(chunks)
    (path,) = tmp_path.iterdir()
    with path.open("r+b") as file:
        file.truncate(4 << 20)  # not read yet
    with pytest.raises(StorageDamaged):
        list(chunks)


def test_any_flipped_bit_is_found_and_the_file_named(tmp_path: Path) -> None:
    write_snapshot(str(tmp_path), 7, [b"a" * 1000, bytes(700)])
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    assert len(whole) == 5 * SECTOR_BYTES
    with path.open("r+b", buffering=0) as file:
        for bit in range(len(whole) * 8):
            at = bit // 8
            os.pwrite(file.fileno(), bytes([whole[at] ^ 1 << bit % 8]), at)
            with pytest.raises(StorageDamaged) as caught:
                list(read_snapshot(str(tmp_path), 7))
            assert caught.value.path == str(path)
            assert caught.value.offset in (at - at % SECTOR_BYTES, 0 if at < 4 * SECTOR_BYTES else 4 * SECTOR_BYTES)
            os.pwrite(file.fileno(), whole[at : at + 1], at)


def test_truncations_and_additions_are_found(tmp_path: Path) -> None:
    write_snapshot(str(tmp_path), 7, [b"a" * 1000])
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    end = frame(2, b"x" * 16, kind=3)
    wrong = [*(whole[:size] for size in range(len(whole))), whole + b"\0", whole + b"x", whole + end, whole + whole]
    for number, data in enumerate([*wrong, whole[: -len(end)] + end, frame(1, b"a log")]):
        path.unlink()
        path.write_bytes(data)
        with pytest.raises(StorageDamaged) as caught:
            list(read_snapshot(str(tmp_path), 7))
        assert caught.value.path == str(path), number


def test_a_snapshot_under_the_name_of_another_is_found(tmp_path: Path) -> None:
    write_snapshot(str(tmp_path), 7, [b"x"])
    (path,) = tmp_path.iterdir()
    path.rename(tmp_path / f"snapshot-{8:020d}")
    with pytest.raises(StorageDamaged, match="does not belong"):
        list(read_snapshot(str(tmp_path), 8))


def test_a_damaged_snapshot_removes_nothing(tmp_path: Path) -> None:
    """Not even the files that it covers, if its writer died before it removed them."""
    storage, _ = opened(tmp_path)
    commit(storage, b"one")
    storage.close()
    covered = files(tmp_path)
    storage, found = opened(tmp_path)
    storage.save(found)
    storage.close()
    contents = {**covered, **files(tmp_path)}
    contents[f"snapshot-{1:020d}"] = contents[f"snapshot-{1:020d}"][:-1]
    lay_out(tmp_path, contents)
    with pytest.raises(StorageDamaged, match=f"snapshot-{1:020d}"):
        held(tmp_path)
    assert files(tmp_path) == contents


def test_leftovers_are_removed(tmp_path: Path) -> None:
    storage, _ = opened(tmp_path)
    commit(storage, b"one")
    storage.save([b"one"])
    commit(storage, b"two")
    storage.close()
    contents = {name: data.rstrip(b"\0").ljust(1024, b"\0") for name, data in files(tmp_path).items()}
    leftovers = {
        f"log-{1:020d}": frame(1, b"one"),
        f"snapshot-{0:020d}": b"older",
        f"snapshot-{1:020d}.0123456789abcdef.tmp": b"interrupted",
    }
    lay_out(tmp_path, {**files(tmp_path), **leftovers})
    assert held(tmp_path) == [b"one", b"two"]
    assert list(files(tmp_path)) == list(contents)


@pytest.mark.parametrize(("number", "expected"), [(errno.ENOSPC, DiskFull), (errno.EIO, StorageFailed)])
@pytest.mark.parametrize("call", ["pwrite", "fsync", "rename"])
def test_a_snapshot_that_cannot_be_written_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, expected: type[Exception], call: str
) -> None:
    storage, _ = opened(tmp_path)
    commit(storage, b"one")
    storage.save([b"one"])
    commit(storage, b"two")

    def chunks() -> Iterator[bytes]:
        yield b"one"
        monkeypatch.setattr(os, call, fail)  # after the log has been rolled
        yield b"two"

    def fail(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    with pytest.raises(expected):
        storage.save(chunks())
    monkeypatch.undo()
    assert names(tmp_path, "snapshot") == [f"snapshot-{1:020d}"]
    commit(storage, b"three")
    storage.save([b"one", b"two", b"three"])
    storage.close()
    assert held(tmp_path) == [b"one", b"two", b"three"]


def test_a_save_whose_chunks_fail_changes_nothing(tmp_path: Path) -> None:
    storage, _ = opened(tmp_path)
    commit(storage, b"one")
    with pytest.raises(ZeroDivisionError):
        storage.save(b"%d" % (1 // (2 - index)) for index in range(3))
    commit(storage, b"two")
    storage.close()
    assert not names(tmp_path, "snapshot")
    assert held(tmp_path) == [b"one", b"two"]


def test_saving_again_replaces_the_snapshot(tmp_path: Path) -> None:
    storage, _ = opened(tmp_path)
    storage.save([b"nothing yet"])
    storage.save([b"nothing", b"yet"])
    assert storage.statistics()["segments"] == 1
    commit(storage, b"one")
    storage.close()
    assert held(tmp_path) == [b"nothing", b"yet", b"one"]
    with closing(FileStorage(tmp_path)) as storage:
        assert storage.statistics()["snapshot_sequence"] == 0
    assert list(files(tmp_path)) == [f"log-{1:020d}", f"snapshot-{0:020d}"]


@pytest.mark.parametrize("scenario", ["save", "save_attached", "fold"])
@pytest.mark.parametrize("snapshot", [False, True])
def test_a_kill_at_any_step_loses_no_acknowledged_record(
    tmp_path: Path, unsynced: None, scenario: str, snapshot: bool
) -> None:
    """All acknowledged records are recovered, at most one more, and the log can be continued."""
    template, work = tmp_path / "template", tmp_path / "work"
    work.mkdir()
    before = RECORDS[: 10 if scenario == "fold" else 5]
    storage, _ = opened(template, **OPTIONS)
    for index, record in enumerate(before):
        if snapshot and index == 3:
            storage.save(before[:3])
        commit(storage, record)
    storage.close()
    command = [sys.executable, "-m", "tests.storage.killed", scenario, str(template), str(len(before)), str(work)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), *sys.path]))}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in done.stdout.splitlines()]
    calls = [call for call, _ in steps]
    assert {"open", "pwrite", "fsync", "rename", "survived"} <= set(calls), calls
    assert len(steps) > (6 if scenario == "fold" else 30)
    for number, (call, acknowledged) in enumerate(steps, 1):
        directory = work / str(number)
        storage, found = opened(directory, **OPTIONS)
        assert found in (RECORDS[:acknowledged], RECORDS[: acknowledged + 1]), (number, call)
        assert not [name for name in files(directory) if name.endswith("tmp")]
        commit(storage, b"goes on")
        storage.close()
        assert held(directory, **OPTIONS) == [*found, b"goes on"]
