"""A log in a file that many processes append to: the file, its locks, and where this process is in it.

One file does everything. Locks are on bytes far past its end: one is the *mutex*, under which all writing is done; each
other belongs to a *member*, who holds it for life. The kernel frees the locks of a process that dies, however it dies,
so a member is alive as long as its byte cannot be locked. They are Linux's open-file-description locks, which belong to
one opening of the file: no thread, child or library that opens it too can lose them for us. Where there are none, they
are POSIX locks, which a process loses as soon as it closes any descriptor of the file. Both work over NFS.

Reading takes no lock. Appended bytes never change and a half-written record does not check; only a compaction rewrites,
and it changes the header first. So: read the new bytes, then the header; if that is the old one, the bytes were good.
NFS keeps what it has read until a lock is taken, any lock; `renew` takes one that nobody else wants.

A compaction happens in place, so that the locks stay with the file and no stale directory entry can split the members:
(1) append a copy of the live state, framed as a record to be skipped; (2) turn the header to it; (3) write the same at
the beginning, over what is garbage now; (4) turn the header back; (5) cut off the rest. A process killed in between
leaves a log that says the same at every step; killed before (5), the header says where to cut. (It cannot be killed
halfway through a header: the kernel copies so few bytes into one page in one go.)

Nothing is forced to the disk: what a machine's crash would lose is a run whose members died with it. Over NFS, giving
the mutex back sends what was written to the server. Rejected: a new file renamed over the old one, with the locks in a
second file. Over NFS a member may see the old name for a minute and write into the void.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import sys
from collections.abc import Iterable
from typing import NamedTuple

from rallypoint.core.log import HEADER_BYTES, MAGIC, PADDING, Header, frame, scan
from rallypoint.errors import CorruptFile, DiskFull

__all__ = ["LogFile", "Tail"]

MUTEX = 1 << 62
FIRST_MEMBER = MUTEX + 1
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system says where a file cannot grow."""

_CHUNK_BYTES, _LARGE_CHUNK_BYTES = 1 << 14, 1 << 20
_FLOCK = struct.Struct("@hhqqi4x")  # 64-bit Linux: type, whence, start, length, pid
_HAS_OFD = sys.platform == "linux" and sys.maxsize > 2**32 and hasattr(fcntl, "F_OFD_SETLK")


class Tail(NamedTuple):
    """What was read: the records since last time, or all of them when the log is `anew`, and where they end."""

    header: bytes
    anew: bool
    payloads: list[bytes]
    end: int


class LogFile:
    """One opening of a log. Not safe for threads: whoever uses it sees to that.

    Every OSError that it raises names the file. `owns_locks` is False where locks belong to the whole process.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.end = 0
        self._generation = 0
        self._header = b""
        self._torn = False
        self.owns_locks = _HAS_OFD
        self._file = open(path, "r+b", buffering=0, opener=_open_or_create)  # noqa: SIM115 - it stays open
        self._fd = self._file.fileno()
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            self.close()
            raise self._corrupt(0, "it is not a regular file")

    # Locks

    def try_mutex(self) -> bool:
        """Take the mutex if nobody has it; taking it twice is taking it once."""
        return self._lock(MUTEX)

    def free_mutex(self) -> None:
        """Give the mutex back, if it is held."""
        if not self.closed:
            self._unlock(MUTEX)

    def claim(self, member: int) -> bool:
        """Take the byte of a member, and say whether it was free."""
        return self._lock(FIRST_MEMBER + member)

    def leave(self, member: int) -> None:
        """Give the byte of a member back."""
        self._unlock(FIRST_MEMBER + member)

    def is_free(self, member: int) -> bool:
        """Say whether nobody holds the byte of a member, which must not be one of ours."""
        if not self._lock(FIRST_MEMBER + member):
            return False
        self._unlock(FIRST_MEMBER + member)
        return True

    def is_deserted(self) -> bool:
        """Say whether no member is alive. This opening of the file must have none."""
        if not self._lock(FIRST_MEMBER, 0):
            return False
        self._unlock(FIRST_MEMBER, 0)
        return True

    def renew(self, member: int) -> None:
        """Take a lock that is held once more, so that NFS asks its server again; elsewhere it is next to nothing."""
        self._lock(FIRST_MEMBER + member)

    # The file

    @property
    def closed(self) -> bool:
        """Whether `close` was called, by this process or by its fork."""
        return self._file.closed

    @property
    def identity(self) -> tuple[int, int]:
        """The device and number of the file."""
        status = os.fstat(self._fd)
        return status.st_dev, status.st_ino

    def in_place(self) -> bool:
        """Say whether the path still names this very file."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def remove(self) -> None:
        """Unlink the file, unless the path names another by now."""
        if self.in_place():
            os.unlink(self.path)

    def close(self) -> None:
        """Let go of the file, and so of every lock."""
        self._file.close()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self.close()

    # The log. All but `peek` need the mutex.

    def enter(self, generation: int) -> None:
        """Begin a log where there is none, or only that of a dead run; refuse what no FileStore wrote."""
        first = self._read(len(MAGIC), 0)
        if first and first != MAGIC:
            ours = first[:-1] == MAGIC[:-1]
            why = f"it is of version {first[-1]}, not {MAGIC[-1]}" if ours else "it does not begin like one"
            raise self._corrupt(0, why)
        if not first or self.is_deserted():
            self._cut(0)
            try:
                self._write(Header(generation).pack(), 0)
            except OSError:
                self._cut(0)  # a part of a header would be no store, and an empty file is a new one
                raise

    def peek(self) -> Tail | None:
        """Read what was added; None when that takes the mutex, for the log was rewritten or looks wrong."""
        data = self._read_from(self.end)
        if self._read(HEADER_BYTES, 0) != self._header or os.fstat(self._fd).st_nlink == 0:
            return None
        found = scan(data, self._generation)
        return None if found.flaw else Tail(self._header, False, found.payloads, self.end + found.used)

    def read(self) -> Tail:
        """Read what was added, or everything when the log was rewritten; raises CorruptFile."""
        status, raw = os.fstat(self._fd), self._read(HEADER_BYTES, 0)
        header = Header.unpack(raw)
        if status.st_nlink == 0 and not self.in_place():
            raise self._corrupt(0, "it was removed or replaced while it was in use")
        if header is None:
            raise self._corrupt(0, "its header is damaged")
        if header.cut:
            raw = self._finish(header)
        anew = raw != self._header
        start = header.start if anew else self.end
        if status.st_size < start:
            raise self._corrupt(status.st_size, "it was cut short")
        data = self._read_from(start)
        found = scan(data, header.generation)
        if found.flaw:
            raise self._corrupt(start + found.used, found.flaw)
        self._torn = found.used < len(data)
        return Tail(raw, anew, found.payloads, start + found.used)

    def adopt(self, tail: Tail) -> None:
        """Stand at the end of what was read."""
        header = Header.unpack(tail.header)
        assert header is not None
        self._header, self._generation, self.end = tail.header, header.generation, tail.end

    def forget(self) -> None:
        """Lose the place in the log, so that it is read anew."""
        self._header = b""

    def append(self, payload: bytes) -> int:
        """Add a record after a `read`, and return where it ends. When that fails, the log is as it was."""
        data = frame(payload, self._generation)
        try:
            if self._torn:
                self._cut(self.end)
            self._torn = True
            self._write(data, self.end)
        except OSError:
            self._cut(self.end)
            raise
        self._torn = False
        return self.end + len(data)

    def compact(self, payloads: Iterable[bytes]) -> None:
        """Replace all records by these, which say the same; everybody, this process too, then reads it anew."""
        generation = self._generation + 1
        body = b"".join(frame(payload, generation) for payload in payloads)
        if HEADER_BYTES + len(body) > self.end:
            return
        end = self.append(PADDING + body)
        self._write(Header(generation, end - len(body)).pack(), 0)
        self._write(body, HEADER_BYTES)
        header = Header(generation, HEADER_BYTES, HEADER_BYTES + len(body))
        self._write(header.pack(), 0)
        self._finish(header)

    # Inside

    def _finish(self, header: Header) -> bytes:
        """Cut off what a compaction left behind."""
        self._cut(header.cut)
        raw = header._replace(cut=0).pack()
        self._write(raw, 0)
        return raw

    def _read(self, size: int, at: int) -> bytes:
        try:
            return os.pread(self._fd, size, at)
        except OSError as error:
            raise self._named(error) from None

    def _read_from(self, at: int) -> bytes:
        """Read to the end of the file."""
        data = self._read(_CHUNK_BYTES, at)
        if len(data) < _CHUNK_BYTES:
            return data
        chunks = [data]
        while data:
            at += len(data)
            data = self._read(_LARGE_CHUNK_BYTES, at)
            chunks.append(data)
        return b"".join(chunks)

    def _write(self, data: bytes, at: int) -> None:
        view = memoryview(data)
        try:
            while view:
                written = os.pwrite(self._fd, view, at)
                view, at = view[written:], at + written
        except OSError as error:
            if error.errno in NO_ROOM:
                raise DiskFull(path=self.path, why=os.strerror(error.errno), number=error.errno) from None
            raise self._named(error) from None

    def _cut(self, size: int) -> None:
        try:
            os.ftruncate(self._fd, size)
        except OSError as error:
            raise self._named(error) from None

    def _lock(self, start: int, length: int = 1) -> bool:
        try:
            self._set_lock(fcntl.LOCK_EX | fcntl.LOCK_NB, start, length)
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: another has it
            return False
        return True

    def _unlock(self, start: int, length: int = 1) -> None:
        self._set_lock(fcntl.LOCK_UN, start, length)

    def _set_lock(self, kind: int, start: int, length: int) -> None:
        try:
            if self.owns_locks:
                ofd_kind = fcntl.F_UNLCK if kind == fcntl.LOCK_UN else fcntl.F_WRLCK
                fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(ofd_kind, os.SEEK_SET, start, length, 0))
            else:
                fcntl.lockf(self._fd, kind, length, start)
        except OSError as error:
            if not self.owns_locks or error.errno != errno.EINVAL:
                raise self._named(error) from None
            self.owns_locks = False  # a kernel that only resembles Linux
            self._set_lock(kind, start, length)

    def _named(self, error: OSError) -> OSError:
        error.filename = self.path
        return error

    def _corrupt(self, offset: int, why: str) -> CorruptFile:
        return CorruptFile(path=self.path, offset=offset, why=why)


def _open_or_create(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT, 0o666)
