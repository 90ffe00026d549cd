"""Compaction in a real child process, which folds, fails, is killed or loses its server; no record is ever lost.

A fold that waits (see logs.wait_and_fold) lets a test act at a known moment. The clock is fake.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.storage.logs import WAIT_S, commit, files, held, names, opened

from rallypoint.errors import RallypointError, StoreClosed
from rallypoint.storage.file import compaction
from rallypoint.storage.file.compaction import FIRST_RETRY_S, LAST_RETRY_S, CompactionJob, compact
from rallypoint.storage.file.directory import temporary_path
from rallypoint.storage.file.storage import FileStorage

RECORDS = [b"%d" % index * 100 for index in range(9)]
SMALL: dict[str, Any] = {"segment_bytes": 1024, "preallocate_bytes": 0}
WAITING = "tests.storage.logs:wait_and_fold"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let children import these tests, wherever pytest was started."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))


class Child:
    """A child whose fold waits: `pid` waits until it does, `go` lets it continue, `gone` waits for its end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(WAIT_S)
        self._connection: socket.socket | None = None
        monkeypatch.setenv("FOLD_PORT", str(self._listener.getsockname()[1]))

    def pid(self) -> int:
        if self._connection is not None:
            self._connection.close()
        self._connection, _ = self._listener.accept()
        self._connection.settimeout(WAIT_S)
        return int(self._connection.recv(100))

    def go(self) -> None:
        assert self._connection is not None
        self._connection.sendall(b"!")

    def gone(self) -> bool:
        assert self._connection is not None
        return self._connection.recv(100) == b""

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._listener.close()


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Iterator[Child]:
    found = Child(monkeypatch)
    yield found
    found.close()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "data"


def filled(directory: Path, **options: Any) -> FileStorage:
    """Open a new storage and commit all records: four segments, and a part of a fifth."""
    storage, _ = opened(directory, **{**SMALL, **options})
    for record in RECORDS:
        commit(storage, record)
    return storage


def compacted(storage: FileStorage) -> None:
    assert storage.compact_if_due()
    assert storage.wait_compaction(WAIT_S)


def test_closed_segments_become_a_snapshot(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rallypoint.storage")
    storage = filled(directory)
    compacted(storage)
    assert list(files(directory)) == [f"log-{9:020d}", f"snapshot-{8:020d}"]
    statistics = storage.statistics()
    assert statistics["segments"] == 1 and statistics["snapshot_sequence"] == 8 and statistics["compactions"] == 1
    assert statistics["snapshot_bytes"] == len(files(directory)[f"snapshot-{8:020d}"])
    assert "up to frame 8" in caplog.text
    assert not storage.compact_if_due(), "nothing is left to compact"
    more = [b"more %d" % index for index in range(8)]
    for record in more:
        commit(storage, record)
    compacted(storage)
    commit(storage, b"after")
    storage.close()
    assert names(directory, "snapshot") == [f"snapshot-{16:020d}"]
    assert held(directory) == [*RECORDS, *more, b"after"]


def test_a_compaction_is_due_when_the_log_outweighs_the_snapshot(directory: Path) -> None:
    storage, _ = opened(directory, **SMALL)
    assert not storage.compact_if_due()
    storage.save([bytes(3000)])
    assert storage.statistics()["snapshot_bytes"] == 7 * 512
    for index in range(17):  # a segment has two sectors, and is closed by the commit after its last
        commit(storage, b"%d" % index)
        assert storage.compact_if_due() == (index == 16), index
    assert storage.wait_compaction(WAIT_S)
    assert names(directory, "snapshot") == [f"snapshot-{16:020d}"]
    storage.close()


def test_a_compaction_is_due_after_a_restart(directory: Path) -> None:
    filled(directory).close()
    storage, _ = opened(directory, **SMALL)
    compacted(storage)
    storage.close()
    assert held(directory) == RECORDS


def test_commits_continue_during_a_compaction(directory: Path, child: Child) -> None:
    storage = filled(directory, fold=WAITING)
    assert storage.compact_if_due()
    pid = child.pid()
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    assert not storage.compact_if_due(), "only one compaction at a time"
    for index in range(5):
        commit(storage, b"%d" % index)
    child.go()
    assert storage.wait_compaction(WAIT_S)
    assert names(directory, "snapshot") == [f"snapshot-{8:020d}"]
    assert names(directory, "log") == [f"log-{first:020d}" for first in (9, 11, 13)]
    storage.close()
    assert held(directory) == [*RECORDS, *(b"%d" % index for index in range(5))]


def test_a_killed_child_is_reported_and_replaced_later(
    directory: Path, child: Child, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1000.0]
    storage = filled(directory, fold=WAITING, clock=lambda: now[0])
    before = files(directory)
    assert storage.compact_if_due()
    pid = child.pid()
    os.kill(pid, signal.SIGKILL)
    assert storage.wait_compaction(WAIT_S)
    assert f"process {pid} was killed by signal 9" in caplog.text and f"in {FIRST_RETRY_S:g} s" in caplog.text
    assert files(directory) == before
    commit(storage, b"later")
    now[0] += FIRST_RETRY_S - 1
    assert not storage.compact_if_due()
    now[0] += 1
    assert storage.compact_if_due()
    child.pid()
    child.go()
    assert storage.wait_compaction(WAIT_S)
    assert storage.statistics()["failed_compactions"] == 1 and storage.statistics()["compactions"] == 2
    storage.close()
    assert names(directory, "snapshot") and held(directory) == [*RECORDS, b"later"]


@pytest.mark.parametrize(
    ("fold", "reason"),
    [
        ("tests.storage.logs:fail", "ValueError: the fold cannot"),
        ("tests.storage.logs:forget", "did not read all"),
        ("tests.storage.logs:absent", "absent"),
        ("no_such_module:fold", "no_such_module"),
    ],
)
def test_a_fold_that_fails_changes_nothing(
    directory: Path, caplog: pytest.LogCaptureFixture, fold: str, reason: str
) -> None:
    storage = filled(directory, fold=fold)
    before = files(directory)
    compacted(storage)
    assert reason in caplog.text and str(directory) in caplog.text
    assert files(directory) == before
    storage.close()
    assert held(directory) == RECORDS


def test_failed_compactions_are_retried_with_growing_pauses(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    storage = filled(directory, clock=lambda: now[0])
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    waits = []
    for _ in range(9):
        compacted(storage)
        assert "/no/such/python" in caplog.text
        waits.append(float(caplog.text.split("next attempt in ")[1].split(" s")[0]))
        caplog.clear()
        now[0] += waits[-1] - 0.1
        assert not storage.compact_if_due()
        now[0] += 0.2
    assert waits == [min(FIRST_RETRY_S * 2**count, LAST_RETRY_S) for count in range(9)]
    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    compacted(storage)
    assert names(directory, "snapshot")
    storage.close()


def test_damaged_segments_are_not_compacted(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Segments that were damaged after their recovery are kept."""
    storage = filled(directory)
    damages: list[Callable[[bytes], bytes]] = [
        lambda data: data[:-1],
        lambda data: data[:512],
        lambda data: data[:600] + b"x" + data[601:],
    ]
    for damage in damages:
        for name in (f"log-{3:020d}", f"log-{7:020d}"):
            whole = (directory / name).read_bytes()
            (directory / name).write_bytes(damage(whole))
            with pytest.raises(RallypointError, match=r"missing|incomplete|checksum"):
                fold_here(directory)
            (directory / name).write_bytes(whole)
    (directory / f"log-{7:020d}").write_bytes(b"")
    compacted(storage)
    assert "StorageDamaged" in caplog.text and f"log-{7:020d}" in caplog.text
    assert not names(directory, "snapshot") and len(names(directory, "log")) == 5
    storage.close()


def fold_here(directory: Path) -> None:
    """Run a compaction in this process."""
    path = str(directory)
    compact(CompactionJob(path, None, 8, "tests.storage.logs:fold", temporary_path(path, 8), os.getppid()))


def test_a_child_that_hangs_is_killed(
    directory: Path, child: Child, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compaction, "CHILD_S", 0.0)
    storage = filled(directory, fold=WAITING)
    compacted(storage)
    assert "did not finish within 0 s" in caplog.text
    storage.close()
    assert held(directory) == RECORDS


def test_a_closed_storage_compacts_nothing(directory: Path) -> None:
    storage = filled(directory)
    storage.close()
    with pytest.raises(StoreClosed):
        storage.save(RECORDS)
    assert not storage.compact_if_due()


def test_closing_ends_the_child(directory: Path, child: Child, caplog: pytest.LogCaptureFixture) -> None:
    storage = filled(directory, fold=WAITING)
    assert storage.compact_if_due()
    pid = child.pid()
    storage.close()
    assert child.gone()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not caplog.text
    assert held(directory) == RECORDS


def test_saving_ends_the_child(directory: Path, child: Child) -> None:
    storage = filled(directory, fold=WAITING)
    assert storage.compact_if_due()
    child.pid()
    storage.save(RECORDS)
    assert child.gone()
    assert list(files(directory)) == [f"log-{10:020d}", f"snapshot-{9:020d}"]
    for record in RECORDS * 4:
        commit(storage, record)
    assert storage.compact_if_due(), "compactions continue after a save"
    child.pid()
    child.go()
    assert storage.wait_compaction(WAIT_S)
    storage.close()
    assert held(directory) == RECORDS * 5


SERVER = """
import sys
from tests.storage.test_compaction import WAITING, Path, filled
storage = filled(Path(sys.argv[1]), fold=WAITING)
storage.compact_if_due()
sys.stdin.read()
"""


def test_a_child_ends_when_its_server_is_killed(directory: Path, child: Child) -> None:
    """It holds no lock, and leaves no snapshot behind."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", SERVER, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as server:
        child.pid()
        server.kill()
        server.wait(WAIT_S)
        assert held(directory) == RECORDS, "the next server need not wait for the child"
        child.go()
        assert child.gone()
        assert server.stderr is not None and server.stderr.read() == b"", "an orphaned child prints errors"
    assert not names(directory, "snapshot")
    assert held(directory) == RECORDS


def test_a_compaction_on_a_full_disk_is_retried(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    storage = filled(directory, clock=lambda: now[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        compacted(storage)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "DiskFull" in caplog.text
    assert not names(directory, "snapshot")
    now[0] += FIRST_RETRY_S
    compacted(storage)
    storage.close()
    assert names(directory, "snapshot") and held(directory) == RECORDS
