"""`FileStorage`: the log of a server in a directory of its own, which survives a crash of the server or its machine.

    directory.py         file names, and the lock: one process writes
    segment.py           the file format: what a crash may leave behind, and what is damage; pure
    segment_writer.py    the last segment: a batch is one frame and one sync
    log_writer.py        commits batches, on the event loop or in a thread; starts new segments
    kernel_sync.py       asynchronous syncs by the kernel
    disk_space.py        how much of a disk the log may use, and when to compact it; pure
    snapshot.py          a snapshot file
    recovery.py          which files to read, and reading them
    compaction.py        a child process that folds snapshot and closed segments into a new snapshot

Rules: nothing is acknowledged before it is synced; recovered data is synced before anything builds on it (its writer
may have died before its sync); no file is removed before the snapshot that covers it, and its name, are synced.

Rejected: an embedded database (SQLite, LMDB). A log of opaque records needs no index, and a commit would sync at least
twice.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from queue import SimpleQueue

from rallypoint.storage import CommitCallback
from rallypoint.storage.file.compaction import Compactor
from rallypoint.storage.file.directory import (
    DirectoryLock,
    list_directory,
    make_directory,
    remove_covered,
    remove_temporaries,
    segment_path,
    snapshot_path,
    sync_directory,
)
from rallypoint.storage.file.log_writer import LogWriter
from rallypoint.storage.file.recovery import RecoveryPlan, plan_recovery, read_segments
from rallypoint.storage.file.segment import SECTOR_BYTES, SegmentTail
from rallypoint.storage.file.segment_writer import SegmentWriter
from rallypoint.storage.file.snapshot import read_snapshot, write_snapshot

__all__ = ["FileStorage"]

SEGMENT_BYTES = 64 << 20
PREALLOCATE_BYTES = 1 << 20

_log = logging.getLogger("rallypoint.storage")


class FileStorage:
    """A storage in a directory, which is created if missing. See `rallypoint.storage.Storage`.

    `segment_bytes` is the size at which a segment of the log is closed, and the minimum that is compacted while the
    disk has ample room; `preallocate_bytes` is the space reserved ahead (0: none). `fold` names the function that the
    child of a compaction runs ("module:function", see `CompactionJob`); `clock` times the retry of a failed compaction.
    Raises DirectoryInUse, StorageDamaged if a file is missing, and OSError if the directory cannot be used.
    """

    confirms = False
    """Only one process can write to the directory, so reads need no confirmation."""

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

        Read both to their ends, in this order, before the first commit. A torn frame at the end of the log is cut off.
        Both may raise StorageDamaged; the storage can then only be closed.
        """
        if self._recovering:
            raise RuntimeError("recover can be called only once")
        self._recovering = True
        return None if self._plan.snapshot is None else self._read_snapshot(self._plan.snapshot), self._read_log()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Complete syncs on an event loop, if the kernel supports that. Call it once, after recovery."""
        self._recovered().attach(loop)

    def commit(self, records: Sequence[bytes], done: CommitCallback, urgent: bool = False) -> None:
        """Start to write the batch as one frame and sync it; then call `done`, in any thread. One commit at a time.

        `done` receives None, DiskFull (nothing was kept, a later commit may succeed), or StorageFailed (final, and
        the same for every later commit). An urgent batch may use the reserve. Raises StoreClosed after `close`.
        """
        if not records:
            raise ValueError("a commit needs at least one record")
        self._recovered().submit(records, done, urgent)

    def confirm(self, done: CommitCallback) -> None:
        """Call `done`: no other process can have committed anything."""
        done(None)

    def compact_if_due(self) -> bool:
        """Start a compaction if the log has grown enough (see disk_space.py); return whether it was started.

        Call it about once a second. It never blocks, and does nothing while a compaction runs or shortly after one
        failed.
        """
        if self._writer is None or self._writer.failure is not None:
            return False
        covers = self._writer.compaction_due()
        return covers is not None and self._compactor.try_start(self._snapshot, covers)

    def wait_compaction(self, timeout_s: float) -> bool:
        """Wait until no compaction runs; return False on timeout."""
        return self._compactor.wait(timeout_s)

    def save(self, chunks: Iterable[bytes]) -> None:
        """Write a snapshot of the state after all commits so far, and remove the log that it covers.

        Blocks until it is durable; no commit may be in flight. Raises DiskFull or StorageFailed, and then keeps the
        log.
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
        """Return sizes and counts: of the files on disk, and of the work of this process."""
        return {
            **({} if self._writer is None else self._writer.statistics()),
            "snapshot_sequence": self._snapshot or 0,
            "snapshot_bytes": self._snapshot_bytes,
            "compactions": self._compactor.runs,
            "failed_compactions": self._compactor.failures,
        }

    def close(self) -> None:
        """Wait for the commit in flight, kill a compaction, and release the directory; harmless when repeated."""
        self._compactor.stop()
        if self._writer is not None:
            self._writer.close()
        self._lock.release()

    def _recovered(self) -> LogWriter:
        if self._writer is None:
            raise RuntimeError("call recover, and read its results to their ends, before a commit or save")
        return self._writer

    def _read_snapshot(self, covers: int) -> Iterator[bytes]:
        yield from read_snapshot(self.directory, covers)
        self._snapshot_read = True

    def _read_log(self) -> Iterator[bytes]:
        if self._plan.snapshot is not None and not self._snapshot_read:
            raise RuntimeError("read the snapshot to its end before the log")
        tail = SegmentTail(0, self._plan.sequence, False)
        if self._plan.segments:
            tail = yield from read_segments(self.directory, self._plan.segments)
        self._open(self._plan, tail)

    def _open(self, plan: RecoveryPlan, tail: SegmentTail) -> None:
        """Sync what was read, and open the log for commits."""
        *closed, last = plan.segments or [plan.sequence]
        segment = SegmentWriter(self.directory, last, tail.end, preallocate_bytes=self._preallocate_bytes)
        if tail.torn:
            path = segment_path(self.directory, last)
            _log.warning("removing an interrupted, unacknowledged commit at byte %d of %s", tail.end, path)
        segment.settle(torn=tail.torn)
        sync_directory(self.directory)
        sizes = {first: os.stat(segment_path(self.directory, first)).st_size for first in closed}
        self._writer = LogWriter(self.directory, segment, tail.sequence - 1, sizes, self._segment_bytes)
        if plan.snapshot is not None:
            self._adopt(plan.snapshot)

    def _adopt(self, covers: int) -> None:
        """Use this durable snapshot from now on, and remove the files that it covers. Called in any thread."""
        self._snapshot_bytes = os.stat(snapshot_path(self.directory, covers)).st_size
        self._snapshot = covers
        self._recovered().forget(covers, self._snapshot_bytes)
        try:
            remove_covered(self.directory, covers)
        except OSError as error:  # harmless: retried after the next snapshot, or at the next start
            _log.warning("cannot remove files covered by snapshot %d in %s: %s", covers, self.directory, error)
