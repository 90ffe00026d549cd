"""A log in a file that many processes append to: the file, its locks, and this process's position in it.

There is only one file. Locks are on bytes far past its end: one byte is the *mutex*, required for all writes; each
other byte belongs to a *member*, which holds it for life. The kernel frees the locks of a process that dies in any way,
so a member is alive as long as its byte cannot be locked. On Linux they are open-file-description locks, which belong
to one opening of the file: no thread, child or library that opens it as well can release them. Elsewhere they are POSIX
locks, which a process loses as soon as it closes any descriptor of the file. Both work over NFS.

Reading takes no lock. Appended bytes never change, and a half-written record fails its checksum; only a compaction
rewrites, and it changes the header first. So: read the new bytes, then the header; if the header is unchanged, the
bytes are valid. NFS caches reads until a lock is taken, any lock; `renew` takes one that no other process wants.

A compaction happens in place, so that the locks stay with the file and no stale directory entry can split the members:
(1) append a copy of the live state, framed as a record to be skipped; (2) point the header to it; (3) write the same
copy at the beginning, over the garbage; (4) point the header back; (5) truncate the rest. If the process is killed, the
log has the same content after every step; before (5), the header says where to truncate. (A kill cannot leave a partial
header: the kernel copies so few bytes into one page at once.)

Nothing is forced to the disk: a machine's crash loses only a run whose members died with it. Over NFS, releasing the
mutex flushes the writes to the server. Rejected: a new file renamed over the old one, with the locks in a second file.
Over NFS a member may see the old name for a minute, and its writes would be lost.
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

from rallypoint.errors import CorruptFile, DiskFull
from rallypoint.filestore.log_format import HEADER_BYTES, MAGIC, PADDING, Header, frame, scan

__all__ = ["LogFile", "LogTail"]

MUTEX = 1 << 62
FIRST_MEMBER = MUTEX + 1
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The errors of a file that cannot grow."""

_CHUNK_BYTES, _LARGE_CHUNK_BYTES = 1 << 14, 1 << 20
_FLOCK = struct.Struct("@hhqqi4x")  # 64-bit Linux: type, whence, start, length, pid
_HAS_OFD = sys.platform == "linux" and sys.maxsize > 2**32 and hasattr(fcntl, "F_OFD_SETLK")


class LogTail(NamedTuple):
    """The records read: those since the last read, or all of them if the log was rewritten (`anew`); and their end."""

    header: bytes
    anew: bool
    payloads: list[bytes]
    end: int


class LogFile:
    """One opening of a log. Not thread-safe.

    Every OSError that it raises names the file. `owns_locks` is False if locks belong to the whole process.
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
        """Take the mutex if it is free or already held here; return whether it is held now."""
        return self._lock(MUTEX)

    def free_mutex(self) -> None:
        """Release the mutex, if it is held."""
        if not self.closed:
            self._unlock(MUTEX)

    def claim(self, member: int) -> bool:
        """Lock the byte of a member; return whether it was free."""
        return self._lock(FIRST_MEMBER + member)

    def leave(self, member: int) -> None:
        """Unlock the byte of a member."""
        self._unlock(FIRST_MEMBER + member)

    def is_free(self, member: int) -> bool:
        """Return whether the byte of a member, which must not be one of ours, is unlocked."""
        if not self._lock(FIRST_MEMBER + member):
            return False
        self._unlock(FIRST_MEMBER + member)
        return True

    def has_no_members(self) -> bool:
        """Return whether no member is alive. This opening of the file must not have one."""
        if not self._lock(FIRST_MEMBER, 0):
            return False
        self._unlock(FIRST_MEMBER, 0)
        return True

    def renew(self, member: int) -> None:
        """Take a held lock again, so that NFS drops its cache; on other file systems this costs almost nothing."""
        self._lock(FIRST_MEMBER + member)

    # The file

    @property
    def closed(self) -> bool:
        """Whether `close` was called, by this process or by its fork."""
        return self._file.closed

    @property
    def identity(self) -> tuple[int, int]:
        """The device and inode of the file."""
        status = os.fstat(self._fd)
        return status.st_dev, status.st_ino

    def in_place(self) -> bool:
        """Return whether the path still names this file."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def remove(self) -> None:
        """Unlink the file, unless the path now names another."""
        if self.in_place():
            os.unlink(self.path)

    def close(self) -> None:
        """Close the file, which releases every lock."""
        self._file.close()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self.close()

    # The log. All but `peek` need the mutex.

    def enter(self, generation: int) -> None:
        """Start a new log if there is none, or only that of a dead run; refuse a file that no FileStore wrote."""
        first = self._read(len(MAGIC), 0)
        if first and first != MAGIC:
            ours = first[:-1] == MAGIC[:-1]
            why = f"format version {first[-1]}, not {MAGIC[-1]}," if ours else "unrecognized first bytes"
            raise self._corrupt(0, why)
        if not first or self.has_no_members():
            self._cut(0)
            try:
                self._write(Header(generation).pack(), 0)
            except OSError:
                self._cut(0)  # a partial header would be corrupt; an empty file is a new store
                raise

    def peek(self) -> LogTail | None:
        """Read the new records; None if that needs the mutex, because the log was rewritten or looks corrupt."""
        data = self._read_from(self.end)
        if self._read(HEADER_BYTES, 0) != self._header or os.fstat(self._fd).st_nlink == 0:
            return None
        found = scan(data, self._generation)
        return None if found.flaw else LogTail(self._header, False, found.payloads, self.end + found.used)

    def read(self) -> LogTail:
        """Read the new records, or all if the log was rewritten; raise CorruptFile."""
        status, raw = os.fstat(self._fd), self._read(HEADER_BYTES, 0)
        header = Header.unpack(raw)
        if status.st_nlink == 0 and not self.in_place():
            raise self._corrupt(0, "it was removed or replaced while in use")
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
        return LogTail(raw, anew, found.payloads, start + found.used)

    def adopt(self, tail: LogTail) -> None:
        """Move to the end of the records read."""
        header = Header.unpack(tail.header)
        assert header is not None
        self._header, self._generation, self.end = tail.header, header.generation, tail.end

    def forget(self) -> None:
        """Reset the position in the log, so that all of it is read again."""
        self._header = b""

    def append(self, payload: bytes) -> int:
        """Append a record after a `read`, and return where it ends. On failure, the log is unchanged."""
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
        """Replace all records by these, with the same content; every process, also this one, then reads all again."""
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
        """Truncate the rest that a compaction left."""
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
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: held by another
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
            self.owns_locks = False  # a kernel that only emulates Linux
            self._set_lock(kind, start, length)

    def _named(self, error: OSError) -> OSError:
        error.filename = self.path
        return error

    def _corrupt(self, offset: int, why: str) -> CorruptFile:
        return CorruptFile(path=self.path, offset=offset, why=why)


def _open_or_create(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT, 0o666)
