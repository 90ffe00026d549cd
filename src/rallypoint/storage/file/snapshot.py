"""A snapshot file: chunks of bytes in frames (see segment.py), then an end frame.

Chunks of any size are gathered into frames of about 1 MiB. The end frame contains the number of the last log frame that
the snapshot covers, and the number of chunks. A snapshot is written under a temporary name, synced, renamed, and its
name synced: under its final name it is always complete, so any defect is damage. The files that it covers are removed
only after that.

Rejected: one checksum over the whole file. A reader would use the first chunks before it could know that the last are
damaged, and could not say where.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterable, Iterator

from rallypoint.errors import DiskFull
from rallypoint.storage.errors import StorageDamaged, StorageFailed
from rallypoint.storage.file.directory import snapshot_path, sync_directory, temporary_path
from rallypoint.storage.file.segment import CHUNKS, END, encode, frame_bytes, scan
from rallypoint.storage.file.segment_writer import NO_ROOM, write_at

__all__ = ["read_snapshot", "write_snapshot"]

_FRAME_BYTES = 1 << 20
_BUFFER_BYTES = 1 << 20
_END = struct.Struct("<QQ")


def write_snapshot(directory: str, covers: int, chunks: Iterable[bytes], temporary: str | None = None) -> None:
    """Write the snapshot of the state after frame `covers`, and make its name durable.

    Raises DiskFull, or StorageFailed for other disk errors; both leave the log and older snapshots unchanged.
    """
    temporary = temporary or temporary_path(directory, covers)
    with _removed_on_error(temporary):
        _write(temporary, covers, chunks)
        with _disk_errors(temporary):
            os.rename(temporary, snapshot_path(directory, covers))
    with _disk_errors(directory):
        sync_directory(directory)


def read_snapshot(directory: str, covers: int) -> Iterator[bytes]:
    """Yield the chunks of a snapshot, with one frame in memory at a time. Raises StorageDamaged."""
    path = snapshot_path(directory, covers)
    count = 0
    with open(path, "rb", buffering=_BUFFER_BYTES) as file:
        frames = scan(file, path, 1)
        for kind, chunks, offset in frames:
            if kind == CHUNKS:
                count += len(chunks)
                yield from chunks
            elif kind == END and chunks == [_END.pack(covers, count)]:
                if file.read(1):
                    raise StorageDamaged(path=path, offset=file.tell() - 1, why="bytes after the end of the snapshot")
                return
            else:
                raise StorageDamaged(path=path, offset=offset, why="this frame does not belong to the snapshot")
        raise StorageDamaged(path=path, offset=file.tell(), why="the end of the snapshot is missing")


def _write(path: str, covers: int, chunks: Iterable[bytes]) -> None:
    with _disk_errors(path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        end = count = 0
        number = 1
        for batch in _batches(chunks):
            with _disk_errors(path):
                end = _append(fd, end, batch, number, CHUNKS)
            count += len(batch)
            number += 1
        with _disk_errors(path):
            _append(fd, end, [_END.pack(covers, count)], number, END)
            os.fsync(fd)
    finally:
        os.close(fd)


def _append(fd: int, end: int, chunks: list[bytes], number: int, kind: int) -> int:
    for offset, piece in encode(chunks, number, kind):
        write_at(fd, piece, end + offset)
    return end + frame_bytes(chunks)


def _batches(chunks: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Gather chunks into batches of about one frame each."""
    batch: list[bytes] = []
    size = 0
    for chunk in chunks:
        batch.append(chunk)
        size += len(chunk)
        if size >= _FRAME_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@contextlib.contextmanager
def _removed_on_error(path: str) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


@contextlib.contextmanager
def _disk_errors(path: str) -> Iterator[None]:
    """Turn an OSError into DiskFull or StorageFailed."""
    try:
        yield
    except OSError as error:
        number = error.errno or 0
        cls = DiskFull if number in NO_ROOM else StorageFailed
        raise cls(path=path, why=os.strerror(number), number=number) from error
