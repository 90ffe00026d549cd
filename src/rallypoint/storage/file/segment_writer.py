"""The open segment at the end of the log, and how a batch is written to it.

A batch is one frame: its space is reserved, it is written, and synced once. Space is reserved ahead in steps of 1 MiB,
so that most commits change no metadata: a sync into preallocated space takes 100 us, an appending one 145 us.

A batch that finds no room (ENOSPC, EDQUOT, EFBIG) leaves nothing behind, and a later commit may succeed. Some space is
kept in reserve for urgent batches: a server on a full disk must still log clients that connect and leave, and be able
to restart. A new segment gets its reserve before the last one releases its own. Any other error, and every error of a
sync, is final: after a failed fdatasync the kernel may have dropped the pages that it could not write, so a retry
proves nothing.

Rejected: preallocating by writing zeros. It saves the file system some work later, but writes everything twice, and was
no faster here.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence

from rallypoint.errors import DiskFull
from rallypoint.storage.errors import StorageFailed
from rallypoint.storage.file.directory import segment_path
from rallypoint.storage.file.segment import encode, frame_bytes

__all__ = ["NO_ROOM", "SPARE_BYTES", "SegmentWriter", "write_at"]

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The errno values of a file that cannot grow."""

SPARE_BYTES = 64 * 1024
"""The reserve for urgent batches: room for a hundred commits or more."""

SMALL_BYTES = 64 * 1024
"""Size of a batch up to which it is written on the event loop, within some tens of microseconds."""

_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV)


class SegmentWriter:
    """A segment open for writing. `end` is the offset of its next frame; used by one thread at a time."""

    def __init__(self, directory: str, first: int, end: int, *, preallocate_bytes: int, new: bool = False) -> None:
        self.first = first
        self.end = end
        self._directory = directory
        self._path = segment_path(directory, first)
        self._preallocate_bytes = preallocate_bytes
        self._step = preallocate_bytes if hasattr(os, "posix_fallocate") else 0
        self._spare_bytes = min(preallocate_bytes // 4, SPARE_BYTES)
        path = f"{self._path}.0.tmp" if new else self._path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._reserved = os.fstat(self._fd).st_size
        if new:
            self._name(path)

    def settle(self, *, torn: bool) -> None:
        """After recovery: cut off a torn frame, and sync, because the data read may not be on the disk yet."""
        try:
            if torn:
                self._cut()
            os.fsync(self._fd)
        except OSError as error:
            raise self._failed(error) from error

    def append(self, records: Sequence[bytes], sequence: int, urgent: bool = False) -> None:
        """Write one batch and sync it; an urgent one may use the reserve.

        Raises StorageFailed, or DiskFull, which leaves the segment unchanged.
        """
        size = frame_bytes(records)
        try:
            self._reserve(size + (0 if urgent else self._spare_bytes))
        except OSError as error:
            raise self._full_or_failed(error) from error
        try:
            self._write(records, sequence)
        except OSError as error:
            if error.errno in NO_ROOM:
                self._cut_back()
            raise self._full_or_failed(error) from error
        try:
            _sync_data(self._fd)
        except OSError as error:
            raise self._failed(error) from error
        self.end += size

    def growth(self, size: int) -> int:
        """Return how many bytes the segment grows for a frame of this size, including the space reserved ahead."""
        needed = self.end + size + self._spare_bytes - self._reserved
        return needed + self._preallocate_bytes if needed > 0 else 0

    def try_write(self, records: Sequence[bytes], sequence: int) -> int:
        """Write a small batch into reserved space and return its size; 0 if it is too large or there is no such space.

        It is committed once the caller has synced it and added its size to `end`. An error leaves the segment
        unchanged: the next write to the same offset replaces the data.
        """
        size = frame_bytes(records)
        if size > SMALL_BYTES or self.end + size + self._spare_bytes > self._reserved:
            return 0
        self._write(records, sequence)
        return size

    def fileno(self) -> int:
        """Return the descriptor of the file."""
        return self._fd

    def _write(self, records: Sequence[bytes], sequence: int) -> None:
        for offset, piece in encode(records, sequence):
            write_at(self._fd, piece, self.end + offset)

    def follow(self, sequence: int) -> SegmentWriter:
        """Close this segment and return the next one, with a reserve and a durable name.

        OSError: the next one cannot be created, or there is no room for its reserve; this one is still the last.
        StorageFailed is final: the next one may exist, so no frame may be appended to this one.
        """
        directory_fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            following = SegmentWriter(self._directory, sequence, 0, preallocate_bytes=self._preallocate_bytes, new=True)
            try:
                os.fsync(directory_fd)
                self._cut()  # release the unused reservation
            except OSError as error:
                following.close()
                raise following._failed(error) from error
        finally:
            os.close(directory_fd)
        self.close()
        return following

    def close(self) -> None:
        """Close the file; harmless when repeated."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _name(self, temporary: str) -> None:
        """Rename a new segment to its final name once it has its reserve."""
        try:
            self._reserve(self._spare_bytes)
            os.rename(temporary, self._path)
        except BaseException:
            self.close()
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _reserve(self, size: int) -> None:
        """Allocate space for a frame, and a step ahead if the disk has room for it."""
        needed = self.end + size - self._reserved
        if needed <= 0 or not self._step:
            return
        try:
            try:
                os.posix_fallocate(self._fd, self._reserved, needed + self._step)
                self._reserved += needed + self._step
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                os.posix_fallocate(self._fd, self._reserved, needed)
                self._reserved += needed
        except OSError as error:
            if error.errno not in _CANNOT_RESERVE:
                raise
            self._step = 0  # not supported by this file system: append instead

    def _cut_back(self) -> None:
        try:
            self._cut()
        except OSError as error:
            raise self._failed(error) from error

    def _cut(self) -> None:
        os.ftruncate(self._fd, self.end)
        self._reserved = self.end

    def _full_or_failed(self, error: OSError) -> DiskFull | StorageFailed:
        if error.errno not in NO_ROOM:
            return self._failed(error)
        return DiskFull(path=self._path, why=os.strerror(error.errno), number=error.errno)

    def _failed(self, error: OSError) -> StorageFailed:
        return self.failed(error.errno or 0)

    def failed(self, number: int) -> StorageFailed:
        """Return the error of a sync or a write that failed with this errno."""
        return StorageFailed(path=self._path, why=os.strerror(number), number=number)


def _sync_data(fd: int) -> None:
    """Make the contents of a file durable, with the metadata needed to read them."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(fd)
    else:
        os.fsync(fd)


def write_at(fd: int, data: bytes, at: int) -> None:
    """Write all of the data at an offset, in as many calls as needed."""
    written = os.pwrite(fd, data, at)
    while written < len(data):
        more = os.pwrite(fd, memoryview(data)[written:], at + written)
        if not more:
            raise OSError(errno.EIO, "pwrite wrote no bytes")
        written += more
