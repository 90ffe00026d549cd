"""`FileStorage`: the log of a server in a directory of its own, which survives the death of the server and its machine.

    directory.py         names and the lock: one process writes
    segment.py           the bytes of a file, what a crash may leave behind, and what is damage; pure
    segment_writer.py    the last segment: a batch is one frame and one sync
    log_writer.py        who writes and syncs a batch, the event loop and the kernel or a thread; new segments
    kernel_sync.py       syncs that no thread waits for
    room.py              how much of a disk the log may take, and when it is to be compacted; pure
    snapshot.py          a snapshot in its file
    recovery.py          which files to read, and reading them
    compaction.py        a child process that folds snapshot and closed segments into a new snapshot

Rules: nothing is acknowledged before it is synced; nothing that was read is built on before it is synced (its writer
may have died before that); nothing is removed before the snapshot that covers it, and its name, are synced.

Rejected: an embedded database (SQLite, LMDB). A log of opaque records needs none of its index, and a commit would sync
at least twice.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from queue import SimpleQueue

from rallypoint.storage import Done
from rallypoint.storage.compaction import Compactor
from rallypoint.storage.directory import (
    DirectoryLock,
    list_directory,
    make_directory,
    remove_covered,
    remove_temporaries,
    segment_path,
    snapshot_path,
    sync_directory,
)
from rallypoint.storage.log_writer import LogWriter
from rallypoint.storage.recovery import Plan, plan_recovery, read_segments
from rallypoint.storage.segment import SECTOR_BYTES, Tail
from rallypoint.storage.segment_writer import SegmentWriter
from rallypoint.storage.snapshot import read_snapshot, write_snapshot

__all__ = ["FileStorage"]

SEGMENT_BYTES = 64 << 20
PREALLOCATE_BYTES = 1 << 20

_log = logging.getLogger("rallypoint.storage")


class FileStorage:
    """A storage in a directory, which is created where it is missing. See `rallypoint.storage.Storage`.

    `segment_bytes` is the size at which a segment of the log is closed, and the least that is compacted while the disk
    has ample room; `preallocate_bytes` the space reserved ahead (0: none). `fold` names the function that a compaction
    runs in its child ("module:function", see compaction.Job), `clock` tells when to try again after one failed.
    Raises DirectoryInUse, StorageDamaged where a file is missing, and OSError where the directory cannot be used.
    """

    confirms = False
    """One process has the directory: what is committed was committed here."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        segment_bytes: int = SEGMENT_BYTES,
        preallocate_bytes: int = PREALLOCATE_BYTES,
        fold: str = "rallypoint.core.snapshot:fold",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if segment_bytes < SECTOR_BYTES or preallocate_bytes < 0:
            raise ValueError(
                f"segment_bytes must be at least {SECTOR_BYTES} and preallocate_bytes at least 0, "
                f"got {segment_bytes} and {preallocate_bytes}"
            )
        self.directory = os.path.abspath(directory)
        self._segment_bytes, self._preallocate_bytes = segment_bytes, preallocate_bytes
        make_directory(self.directory)
        self._lock = DirectoryLock(self.directory)
        try:
            remove_temporaries(self.directory)
            self._plan = plan_recovery(self.directory, list_directory(self.directory))
        except BaseException:
            self._lock.release()
            raise
        self._compactor = Compactor(self.directory, fold, self._adopt, clock)
        self._writer: LogWriter | None = None
        self._snapshot = self._plan.snapshot
        self._snapshot_bytes = 0
        self._recovering = self._snapshot_read = False

    def recover(self) -> tuple[Iterator[bytes] | None, Iterator[bytes]]:
        """Return the chunks of the newest snapshot (None: there is none), and the records committed after it.

        Read both to their ends, in this order; commits are possible then. A torn frame at the end of the log is cut
        off. Raises StorageDamaged while they are read; all that can be done then is to close the storage.
        """
        if self._recovering:
            raise RuntimeError("recover can be called only once")
        self._recovering = True
        return None if self._plan.snapshot is None else self._read_snapshot(self._plan.snapshot), self._read_log()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Learn of syncs by an event loop from now on, where the kernel offers that. After recovery, and once."""
        self._recovered().attach(loop)

    def commit(self, records: Sequence[bytes], done: Done, urgent: bool = False) -> None:
        """Write the batch as one frame, sync it, and call `done`, in any thread; return at once. One at a time.

        `done` receives None, DiskFull (nothing was kept, a later commit may succeed), or StorageFailed (final, and
        the same for every later commit). What is urgent may use the space that is kept in reserve for it. Raises
        StoreClosed after `close`.
        """
        if not records:
            raise ValueError("a commit needs at least one record")
        self._recovered().submit(records, done, urgent)

    def confirm(self, done: Done) -> None:
        """Call `done`: nobody else can have committed anything."""
        done(None)

    def compact_if_due(self) -> bool:
        """Start a compaction if the log has grown enough (see room.py); return whether it was started.

        Call it about once a second. It never blocks; while a compaction runs, or shortly after one failed, it does
        nothing.
        """
        if self._writer is None or self._writer.failure is not None:
            return False
        covers = self._writer.due()
        return covers is not None and self._compactor.try_start(self._snapshot, covers)

    def wait_compaction(self, timeout_s: float) -> bool:
        """Wait until no compaction runs; return whether that is so."""
        return self._compactor.wait(timeout_s)

    def save(self, chunks: Iterable[bytes]) -> None:
        """Write a snapshot of the state after all commits so far, and remove the log that it covers.

        Blocks until it is durable; no commit may be under way. Raises DiskFull or StorageFailed: the log is kept then.
        """
        writer = self._recovered()
        rolled: SimpleQueue[BaseException | None] = SimpleQueue()
        with self._compactor.paused():
            writer.submit(None, rolled.put)
            error = rolled.get()
            if error is not None:
                raise error
            covers = writer.sequence
            write_snapshot(self.directory, covers, chunks)
            self._adopt(covers)

    def statistics(self) -> dict[str, int | float]:
        """Return sizes and counts: what is on disk, and what this process has done."""
        return {
            **({} if self._writer is None else self._writer.statistics()),
            "snapshot_sequence": self._snapshot or 0,
            "snapshot_bytes": self._snapshot_bytes,
            "compactions": self._compactor.runs,
            "failed_compactions": self._compactor.failures,
        }

    def close(self) -> None:
        """Wait for the commit that is under way, kill a compaction, and free the directory; harmless when repeated."""
        self._compactor.stop()
        if self._writer is not None:
            self._writer.close()
        self._lock.release()

    def _recovered(self) -> LogWriter:
        if self._writer is None:
            raise RuntimeError("recover, and read what it returns to the end, before anything is committed or saved")
        return self._writer

    def _read_snapshot(self, covers: int) -> Iterator[bytes]:
        yield from read_snapshot(self.directory, covers)
        self._snapshot_read = True

    def _read_log(self) -> Iterator[bytes]:
        if self._plan.snapshot is not None and not self._snapshot_read:
            raise RuntimeError("read the snapshot to its end before the log")
        tail = Tail(0, self._plan.sequence, False)
        if self._plan.segments:
            tail = yield from read_segments(self.directory, self._plan.segments)
        self._open(self._plan, tail)

    def _open(self, plan: Plan, tail: Tail) -> None:
        """Sync what was read, and open the log for commits."""
        *closed, last = plan.segments or [plan.sequence]
        segment = SegmentWriter(self.directory, last, tail.end, preallocate_bytes=self._preallocate_bytes)
        if tail.torn:
            path = segment_path(self.directory, last)
            _log.warning("cutting off an interrupted commit, never acknowledged, at byte %d of %s", tail.end, path)
        segment.settle(torn=tail.torn)
        sync_directory(self.directory)
        sizes = {first: os.stat(segment_path(self.directory, first)).st_size for first in closed}
        self._writer = LogWriter(self.directory, segment, tail.sequence - 1, sizes, self._segment_bytes)
        if plan.snapshot is not None:
            self._adopt(plan.snapshot)

    def _adopt(self, covers: int) -> None:
        """Build on this snapshot, which is durable, and remove what it covers. Called in any thread."""
        self._snapshot_bytes = os.stat(snapshot_path(self.directory, covers)).st_size
        self._snapshot = covers
        self._recovered().forget(covers, self._snapshot_bytes)
        try:
            remove_covered(self.directory, covers)
        except OSError as error:  # harmless: after the next snapshot, or at the next start, it is tried again
            _log.warning("cannot remove what snapshot %d covers in %s: %s", covers, self.directory, error)
