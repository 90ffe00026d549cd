"""Functions to open, fill and damage logs. The state of a log here is the list of all records committed to it.

`fold` and its variants are run by compactions, by name ("tests.storage.logs:fold"). A snapshot has one chunk for each
record that it covers, so chunks and records together are always the whole list.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rallypoint.storage.file.segment import SegmentFrame, SegmentTail, encode
from rallypoint.storage.file.storage import FileStorage

FOLD = "tests.storage.logs:fold"
WAIT_S = 60.0
"""How long a test waits for an event before it fails."""

LOOP: asyncio.AbstractEventLoop | None = None
"""The loop that opened storages are attached to, if any. `outcome` runs it."""


def opened(directory: Path, **options: Any) -> tuple[FileStorage, list[bytes]]:
    """Open a storage, and return it with all of its records; close it if that fails."""
    storage = FileStorage(directory, **{"fold": FOLD, **options})
    try:
        records = recovered(storage)
        if LOOP is not None and not LOOP.is_closed():
            storage.attach(LOOP)
    except BaseException:
        storage.close()
        raise
    return storage, records


def recovered(storage: FileStorage) -> list[bytes]:
    chunks, records = storage.recover()
    return [*(chunks or ()), *records]


def held(directory: Path, **options: Any) -> list[bytes]:
    """Return all records that a directory holds."""
    storage, records = opened(directory, **options)
    storage.close()
    return records


def commit(storage: FileStorage, *records: bytes, urgent: bool = False) -> None:
    """Commit one batch and wait for it; raise its error."""
    error = outcome(storage, *records, urgent=urgent)
    if error is not None:
        raise error


def outcome(storage: FileStorage, *records: bytes, urgent: bool = False) -> BaseException | None:
    """Commit one batch, and return its error, or None."""
    if LOOP is not None:
        return LOOP.run_until_complete(_outcome(LOOP, storage, records, urgent))
    done: SimpleQueue[BaseException | None] = SimpleQueue()
    storage.commit(records, done.put, urgent)
    return done.get(timeout=WAIT_S)


async def _outcome(
    loop: asyncio.AbstractEventLoop, storage: FileStorage, records: Sequence[bytes], urgent: bool
) -> BaseException | None:
    ended: asyncio.Future[BaseException | None] = loop.create_future()

    def done(error: BaseException | None) -> None:
        loop.call_soon_threadsafe(ended.set_result, error)

    storage.commit(records, done, urgent)
    return await asyncio.wait_for(ended, WAIT_S)


def files(directory: Path) -> dict[str, bytes]:
    """Return the contents of all files except the lock."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.name != "lock"}


def names(directory: Path, kind: str) -> list[str]:
    """Return the names of the segments ("log") or snapshots of a directory."""
    return [name for name in files(directory) if name.startswith(kind)]


def lay_out(directory: Path, contents: dict[str, bytes]) -> None:
    """Create a directory with exactly these files."""
    directory.mkdir(exist_ok=True)
    for path in directory.iterdir():
        path.unlink()
    for name, data in contents.items():
        (directory / name).write_bytes(data)


def frame(sequence: int, *records: bytes, kind: int = 1) -> bytes:
    """Return one frame as bytes."""
    return b"".join(piece for _, piece in sorted(encode(records, sequence, kind)))


def scanned(frames: Generator[SegmentFrame, None, SegmentTail]) -> tuple[list[list[bytes]], SegmentTail]:
    """Read a file to its end; return the records of each frame, and the tail."""
    found = []
    while True:
        try:
            found.append(next(frames).records)
        except StopIteration as stop:
            return found, stop.value


def fold(chunks: Iterable[bytes] | None, records: Iterable[bytes]) -> Iterator[bytes]:
    return itertools.chain(chunks or (), records)


def newest(chunks: Iterable[bytes] | None, records: Iterable[bytes]) -> Iterator[bytes]:
    """Keep only the last record, as of a key that is set repeatedly."""
    yield [*(chunks or ()), *records][-1]


def fail(chunks: Iterable[bytes] | None, records: Iterable[bytes]) -> Iterator[bytes]:
    raise ValueError("the fold cannot")


def forget(chunks: Iterable[bytes] | None, records: Iterable[bytes]) -> Iterator[bytes]:
    """Read only one record, which is an error of a fold."""
    return itertools.islice(records, 1)


def wait_and_fold(chunks: Iterable[bytes] | None, records: Iterable[bytes]) -> Iterator[bytes]:
    """Send the process id to the test that listens at FOLD_PORT, and fold when it answers.

    The temporary file exists by then. The connection stays open, so that the test detects the end of this process.
    """
    test = socket.create_connection(("127.0.0.1", int(os.environ["FOLD_PORT"])), WAIT_S)
    test.sendall(b"%d" % os.getpid())
    if test.recv(1) != b"!":
        raise ConnectionError("the test has ended")
    test.detach()
    yield from fold(chunks, records)
