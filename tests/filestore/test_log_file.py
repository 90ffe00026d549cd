"""The log in its file: locks, torn ends, damage, and a process that dies at any step of a compaction.

A file opened twice acts as two processes, since locks belong to an open file description. A process dies by raising
`Died` in a system call, which may have been executed in part; then its locks are released. (A header is written
completely or not at all: the kernel writes so few bytes of one page at once.)
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.errors import CorruptFile
from rallypoint.filestore.log_file import LogFile
from rallypoint.filestore.log_format import HEADER_BYTES, MAGIC, Header, frame


class Died(BaseException):
    """The process was killed here."""


class Killer:
    """Counts the system calls that change the file, and dies in the chosen one, after a part of it."""

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
def holder(path: str) -> Iterator[LogFile]:
    """A member that lives during the whole test, so that no other starts the log afresh."""
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
    """Return what a new process reads."""
    with contextlib.closing(LogFile(path)) as log:
        assert log.try_mutex(), "a dead process still holds the mutex"
        log.enter(99)
        return log.read().payloads


def test_the_mutex_excludes_other_openings_and_is_released_on_close(holder: LogFile, path: str) -> None:
    other = LogFile(path)
    assert holder.try_mutex() and holder.try_mutex()
    assert not other.try_mutex()
    holder.free_mutex()
    assert other.try_mutex() and not holder.try_mutex()
    other.close()
    assert holder.try_mutex()


def test_a_member_is_alive_until_its_file_is_closed(holder: LogFile, path: str) -> None:
    other = entered(path, 2)
    assert not holder.is_free(2) and holder.is_free(3)
    assert not other.is_free(1) and not LogFile(path).has_no_members()
    other.leave(2)
    assert holder.is_free(2)
    other.claim(2)
    other.close()
    assert holder.is_free(2)
    holder.close()
    assert LogFile(path).has_no_members()


def test_a_kernel_without_ofd_locks_uses_posix_locks(
    holder: LogFile, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EINVAL, "unknown kind of lock")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    other = LogFile(path)
    assert not other.claim(1), "the two kinds of lock conflict"
    assert other.claim(2) and other.try_mutex() and not other.has_no_members()
    monkeypatch.undo()
    assert not holder.is_free(2) and not holder.try_mutex()
    other.close()
    assert holder.is_free(2) and holder.try_mutex()


def test_an_error_of_a_lock_names_the_file(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with pytest.raises(OSError, match="no locks available") as caught:
        LogFile(path).try_mutex()
    assert caught.value.filename == path


def test_appended_records_are_read_without_the_mutex(holder: LogFile, path: str) -> None:
    other = entered(path, 2)
    written(holder, b"one", b"two")
    assert holder.try_mutex()
    tail = other.peek()
    assert tail is not None and tail.payloads == [b"one", b"two"] and not tail.anew
    other.adopt(tail)
    assert other.peek() == (tail.header, False, [], tail.end)


def test_only_the_log_of_a_dead_run_is_discarded(holder: LogFile, path: str) -> None:
    written(holder, b"old")
    assert everything(path) == [b"old"]
    holder.close()
    assert everything(path) == []


def test_a_dead_log_may_be_damaged_but_not_a_foreign_file(path: str) -> None:
    for dead in (b"", MAGIC, MAGIC + b"nonsense" * 50, Header(1).pack() + b"nonsense"):
        Path(path).write_bytes(dead)
        assert everything(path) == []
    for foreign, why in ((b"x", "first bytes"), (MAGIC[:-1], "first bytes"), (MAGIC[:-1] + b"\x63", "version 99")):
        Path(path).write_bytes(foreign)
        with pytest.raises(CorruptFile, match=why):
            everything(path)
        assert Path(path).read_bytes() == foreign


def test_a_torn_end_is_ignored_by_readers_and_cut_off_by_the_next_writer(holder: LogFile, path: str) -> None:
    written(holder, b"one", b"two")
    whole, last = Path(path).read_bytes(), frame(b"a longer one", 101)
    for size in range(1, len(last)):
        Path(path).write_bytes(whole + last[:size])
        assert everything(path) == [b"one", b"two"]
        assert Path(path).read_bytes() == whole + last[:size]
        tail = holder.peek()
        assert tail is not None and tail.payloads == [] and tail.end == len(whole)
        written(entered(path, 2), b"3")
        assert everything(path) == [b"one", b"two", b"3"]
        assert Path(path).read_bytes() == whole + frame(b"3", 101)


def test_damage_before_the_last_record_is_an_error_with_its_offset(holder: LogFile, path: str) -> None:
    written(holder, b"one", b"two", b"three")
    whole = Path(path).read_bytes()
    middle = len(whole) - len(frame(b"two", 0) + frame(b"three", 0))
    for at in range(HEADER_BYTES, len(whole) - len(frame(b"three", 0))):
        Path(path).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(CorruptFile) as caught:
            everything(path)
        assert caught.value.path == path and caught.value.offset == (HEADER_BYTES if at < middle else middle)
    Path(path).write_bytes(whole)
    assert everything(path) == [b"one", b"two", b"three"]


def test_a_header_damaged_while_in_use_is_an_error(holder: LogFile, path: str) -> None:
    whole = Path(path).read_bytes()
    Path(path).write_bytes(whole[:10] + b"?" + whole[11:])
    assert holder.peek() is None
    with pytest.raises(CorruptFile, match="header is damaged at byte 0"):
        holder.read()


def test_a_log_truncated_or_removed_while_in_use_is_an_error(holder: LogFile, path: str) -> None:
    written(holder, b"one")
    os.truncate(path, HEADER_BYTES + 3)
    with pytest.raises(CorruptFile, match="cut short"):
        holder.read()
    os.unlink(path)
    assert holder.peek() is None and not holder.in_place()
    with pytest.raises(CorruptFile, match="removed"):
        holder.read()


def test_a_file_that_is_not_regular_is_refused() -> None:
    with pytest.raises(CorruptFile, match="not a regular file"):
        LogFile(os.devnull)


def test_a_death_at_any_byte_of_an_append_leaves_no_record(holder: LogFile, path: str, killer: Killer) -> None:
    written(holder, b"before")
    for tenths in range(10):
        victim = entered(path, 2)
        killer.left, killer.part = 1, tenths / 10
        with pytest.raises(Died):
            written(victim, b"never seen")
        victim.close()
        assert everything(path) == [b"before"]
    written(holder, b"after")
    assert everything(path) == [b"before", b"after"]


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9, 1.0])
def test_a_death_at_any_step_of_a_compaction_loses_nothing(path: str, killer: Killer, part: float) -> None:
    steps = 0
    while True:
        steps += 1
        Path(path).unlink(missing_ok=True)
        holder = entered(path, 1)
        written(holder, *[b"garbage" * 40] * 9, b"live")
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
        written(holder, b"more")
        assert everything(path) == [*found, b"more"]
    assert steps == 7, "append, header, copy, header, cut, header, and one that survived"
    victim.free_mutex()
    assert os.path.getsize(path) == HEADER_BYTES + len(frame(b"kept", 0) + frame(b"live", 0))
    assert holder.peek() is None, "readers must take the mutex and read from the start"
    assert holder.read().anew and everything(path) == [b"kept", b"live"]


def test_a_compaction_that_would_grow_the_log_is_skipped(holder: LogFile, path: str, killer: Killer) -> None:
    written(holder, b"small")
    killer.calls = 0
    holder.try_mutex()
    holder.compact([b"larger than what there was"])
    assert killer.calls == 0
