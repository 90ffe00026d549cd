"""The log in its file: locks, torn ends, damage, and a process that dies at any step of a compaction.

Two openings of a file are as good as two processes, for locks belong to an opening. A process that dies is one that
raises `Died` out of a system call, of which it may have done a part, and whose locks are then gone. (Not of writing a
header: so few bytes of one page are written by the kernel all or none.)
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.core.log import HEADER_BYTES, MAGIC, Header, frame
from rallypoint.errors import CorruptFile
from rallypoint.store.filelog import LogFile


class Died(BaseException):
    """The process was killed here."""


class Killer:
    """Counts the system calls that change the file, and dies in the one it was told, after a part of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = -1
        self.part = 0.0
        self.calls = 0
        self._pwrite, self._ftruncate = os.pwrite, os.ftruncate
        monkeypatch.setattr(os, "pwrite", self.pwrite)
        monkeypatch.setattr(os, "ftruncate", self.ftruncate)

    def pwrite(self, fd: int, data: memoryview, at: int) -> int:
        if self.is_now():
            done = int(len(data) * self.part) if at else len(data) * round(self.part)
            self._pwrite(fd, data[:done], at)
            raise Died
        return self._pwrite(fd, data, at)

    def ftruncate(self, fd: int, size: int) -> None:
        if self.is_now():
            raise Died
        self._ftruncate(fd, size)

    def is_now(self) -> bool:
        self.calls += 1
        self.left -= 1
        return self.left == 0


@pytest.fixture
def killer(monkeypatch: pytest.MonkeyPatch) -> Killer:
    return Killer(monkeypatch)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "log")


@pytest.fixture
def keeper(path: str) -> Iterator[LogFile]:
    """A member that lives all the time, so that the log is nobody's to start afresh."""
    log = entered(path, 1)
    yield log
    log.close()


def entered(path: str, member: int) -> LogFile:
    log = LogFile(path)
    assert log.try_mutex()
    log.enter(100 + member)
    assert log.claim(member)
    log.adopt(log.read())
    log.free_mutex()
    return log


def written(log: LogFile, *payloads: bytes) -> None:
    assert log.try_mutex()
    log.adopt(log.read())
    for payload in payloads:
        log.end = log.append(payload)
    log.free_mutex()


def everything(path: str) -> list[bytes]:
    """What a process reads that comes now."""
    with contextlib.closing(LogFile(path)) as log:
        assert log.try_mutex(), "the dead still hold the mutex"
        log.enter(99)
        return log.read().payloads


def test_the_mutex_is_one_openings_and_freed_by_its_end(keeper: LogFile, path: str) -> None:
    other = LogFile(path)
    assert keeper.try_mutex() and keeper.try_mutex()
    assert not other.try_mutex()
    keeper.free_mutex()
    assert other.try_mutex() and not keeper.try_mutex()
    other.close()
    assert keeper.try_mutex()


def test_a_member_is_alive_while_its_opening_is(keeper: LogFile, path: str) -> None:
    other = entered(path, 2)
    assert not keeper.is_free(2) and keeper.is_free(3)
    assert not other.is_free(1) and not LogFile(path).is_deserted()
    other.leave(2)
    assert keeper.is_free(2)
    other.claim(2)
    other.close()
    assert keeper.is_free(2)
    keeper.close()
    assert LogFile(path).is_deserted()


def test_a_kernel_without_such_locks_gets_the_older_kind(
    keeper: LogFile, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EINVAL, "what lock?")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    other = LogFile(path)
    assert not other.claim(1), "both kinds see each other"
    assert other.claim(2) and other.try_mutex() and not other.is_deserted()
    monkeypatch.undo()
    assert not keeper.is_free(2) and not keeper.try_mutex()
    other.close()
    assert keeper.is_free(2) and keeper.try_mutex()


def test_a_file_that_cannot_be_locked_is_an_error_that_names_it(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with pytest.raises(OSError, match="no locks available") as caught:
        LogFile(path).try_mutex()
    assert caught.value.filename == path


def test_what_one_appends_the_other_reads_without_a_lock(keeper: LogFile, path: str) -> None:
    other = entered(path, 2)
    written(keeper, b"one", b"two")
    assert keeper.try_mutex()
    tail = other.peek()
    assert tail is not None and tail.payloads == [b"one", b"two"] and not tail.anew
    other.adopt(tail)
    assert other.peek() == (tail.header, False, [], tail.end)


def test_a_dead_runs_log_is_started_afresh_and_a_live_ones_is_not(keeper: LogFile, path: str) -> None:
    written(keeper, b"old")
    assert everything(path) == [b"old"]
    keeper.close()
    assert everything(path) == []


def test_a_dead_log_may_be_damaged_but_must_be_one(path: str) -> None:
    for dead in (b"", MAGIC, MAGIC + b"nonsense" * 50, Header(1).pack() + b"nonsense"):
        Path(path).write_bytes(dead)
        assert everything(path) == []
    for foreign, why in ((b"x", "does not begin"), (MAGIC[:-1], "begin"), (MAGIC[:-1] + b"\x63", "version 99")):
        Path(path).write_bytes(foreign)
        with pytest.raises(CorruptFile, match=why):
            everything(path)
        assert Path(path).read_bytes() == foreign


def test_a_torn_end_is_ignored_by_readers_and_cut_by_the_next_writer_at_every_byte(keeper: LogFile, path: str) -> None:
    written(keeper, b"one", b"two")
    whole, last = Path(path).read_bytes(), frame(b"a longer one", 101)
    for size in range(1, len(last)):
        Path(path).write_bytes(whole + last[:size])
        assert everything(path) == [b"one", b"two"]
        assert Path(path).read_bytes() == whole + last[:size]
        tail = keeper.peek()
        assert tail is not None and tail.payloads == [] and tail.end == len(whole)
        written(entered(path, 2), b"3")
        assert everything(path) == [b"one", b"two", b"3"]
        assert Path(path).read_bytes() == whole + frame(b"3", 101)


def test_any_damage_before_the_last_record_is_an_error_that_says_where(keeper: LogFile, path: str) -> None:
    written(keeper, b"one", b"two", b"three")
    whole = Path(path).read_bytes()
    middle = len(whole) - len(frame(b"two", 0) + frame(b"three", 0))
    for at in range(HEADER_BYTES, len(whole) - len(frame(b"three", 0))):
        Path(path).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(CorruptFile) as caught:
            everything(path)
        assert caught.value.path == path and caught.value.offset == (HEADER_BYTES if at < middle else middle)
    Path(path).write_bytes(whole)
    assert everything(path) == [b"one", b"two", b"three"]


def test_a_header_that_is_damaged_while_in_use_is_an_error(keeper: LogFile, path: str) -> None:
    whole = Path(path).read_bytes()
    Path(path).write_bytes(whole[:10] + b"?" + whole[11:])
    assert keeper.peek() is None
    with pytest.raises(CorruptFile, match="header is damaged at byte 0"):
        keeper.read()


def test_a_log_that_was_cut_short_or_removed_while_in_use_is_an_error(keeper: LogFile, path: str) -> None:
    written(keeper, b"one")
    os.truncate(path, HEADER_BYTES + 3)
    with pytest.raises(CorruptFile, match="cut short"):
        keeper.read()
    os.unlink(path)
    assert keeper.peek() is None and not keeper.in_place()
    with pytest.raises(CorruptFile, match="removed"):
        keeper.read()


def test_only_a_regular_file_will_do() -> None:
    with pytest.raises(CorruptFile, match="not a regular file"):
        LogFile(os.devnull)


def test_a_writer_may_die_at_any_byte_of_an_append(keeper: LogFile, path: str, killer: Killer) -> None:
    written(keeper, b"before")
    for tenths in range(10):
        victim = entered(path, 2)
        killer.left, killer.part = 1, tenths / 10
        with pytest.raises(Died):
            written(victim, b"never seen")
        victim.close()
        assert everything(path) == [b"before"]
    written(keeper, b"after")
    assert everything(path) == [b"before", b"after"]


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9, 1.0])
def test_a_process_may_die_at_any_step_of_a_compaction(path: str, killer: Killer, part: float) -> None:
    steps = 0
    while True:
        steps += 1
        Path(path).unlink(missing_ok=True)
        keeper = entered(path, 1)
        written(keeper, *[b"garbage" * 40] * 9, b"live")
        victim = entered(path, 2)
        assert victim.try_mutex()
        killer.left, killer.part = steps, part
        try:
            victim.compact([b"kept", b"live"])
        except Died:
            victim.close()
        else:
            break
        found = everything(path)
        assert found in ([*[b"garbage" * 40] * 9, b"live"], [b"kept", b"live"]), f"died in step {steps}"
        written(keeper, b"more")
        assert everything(path) == [*found, b"more"]
    assert steps == 7, "append, turn, copy, turn, cut, turn, and the one that was let live"
    victim.free_mutex()
    assert os.path.getsize(path) == HEADER_BYTES + len(frame(b"kept", 0) + frame(b"live", 0))
    assert keeper.peek() is None, "whoever reads on must take the mutex, and read anew"
    assert keeper.read().anew and everything(path) == [b"kept", b"live"]


def test_a_compaction_that_would_not_fit_is_not_done(keeper: LogFile, path: str, killer: Killer) -> None:
    written(keeper, b"small")
    killer.calls = 0
    keeper.try_mutex()
    keeper.compact([b"larger than what there was"])
    assert killer.calls == 0
