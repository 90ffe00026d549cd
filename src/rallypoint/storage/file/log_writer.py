"""The writer of the log: commits one batch at a time, and starts a new segment when the last one is full.

Once an event loop is attached, `submit` writes small batches itself and the kernel syncs them (kernel_sync.py). Work
that may take long is done in a thread: large batches, reserving space, starting a segment, and every sync that the
kernel cannot do. Rejected: syncing on the server's event loop, which stalls every connection for as long as the disk
takes.

If no new segment can be started, for lack of space or of file descriptors, the last one grows past its size, which
matters only to compaction. Every error except a full disk is final: all later jobs fail with the same error.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from queue import SimpleQueue

from rallypoint.errors import DiskFull, StoreClosed
from rallypoint.storage import CommitCallback
from rallypoint.storage.errors import StorageFailed
from rallypoint.storage.file import disk_space
from rallypoint.storage.file.directory import segment_path
from rallypoint.storage.file.kernel_sync import KernelSync
from rallypoint.storage.file.segment import frame_bytes
from rallypoint.storage.file.segment_writer import NO_ROOM, SegmentWriter

__all__ = ["LogWriter"]

_CANNOT_ROLL_NOW = (*NO_ROOM, errno.EMFILE, errno.ENFILE, errno.ENOMEM)

_log = logging.getLogger("rallypoint.storage")


class LogWriter:
    """Appends to a log; owns its last segment. `sequence` is the number of the last committed frame.

    `closed` maps the first frames of the earlier segments to their sizes.
    """

    def __init__(
        self, directory: str, segment: SegmentWriter, sequence: int, closed: Mapping[int, int], segment_bytes: int
    ) -> None:
        self.sequence = sequence
        self.commits = 0
        self.failure: StorageFailed | None = None
        self._directory, self._segment_bytes = directory, segment_bytes
        self._mutex = threading.Lock()  # guards the next three, which several threads use
        self._segment = segment
        self._closed_bytes = dict(closed)
        self._is_closed = False
        self._snapshot_bytes = 0
        self._tight = self._full = False  # whether a compaction is urgent; whether the last batch found no room
        self._busy = False
        self._warned = False
        self._kernel: KernelSync | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._syncing: tuple[int, CommitCallback] | None = None  # size and callback of the batch that the kernel syncs
        self._jobs: SimpleQueue[tuple[Sequence[bytes] | None, CommitCallback, bool] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rallypoint log", daemon=True)
        self._thread.start()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let the kernel sync small batches, if it can; from now on `submit` must be called on this loop."""
        try:
            self._kernel = KernelSync()
        except OSError as error:
            _log.info("no asynchronous fdatasync in this kernel; syncing in a thread: %s", error)
        else:
            self._loop = loop
            loop.add_reader(self._kernel.fileno(), self._finish_sync)

    def submit(self, records: Sequence[bytes] | None, done: CommitCallback, urgent: bool = False) -> None:
        """Commit a batch, or with None start a new segment; then call `done`. One job at a time.

        Raises StoreClosed.
        """
        with self._mutex:
            if self._is_closed:
                raise StoreClosed(store=f"storage {self._directory}")
            if self._busy:
                raise RuntimeError("a commit is in flight; wait for its end before the next one")
            self._busy = True
        if records is None or not self._start_sync(records, done):
            self._jobs.put((records, done, urgent))

    def compaction_due(self) -> int | None:
        """Return the last frame that a compaction should cover, or None if none is due."""
        with self._mutex:
            closed = sum(self._closed_bytes.values())
            due = disk_space.is_due(closed, self._snapshot_bytes, segment_bytes=self._segment_bytes, tight=self._tight)
            return self._segment.first - 1 if due else None

    def forget(self, covers: int, snapshot_bytes: int) -> None:
        """Stop counting the segments up to this frame: a snapshot of this size covers them."""
        with self._mutex:
            self._closed_bytes = {first: size for first, size in self._closed_bytes.items() if first > covers}
            self._snapshot_bytes = snapshot_bytes

    def statistics(self) -> dict[str, int | float]:
        """Return sizes and counts of the log."""
        with self._mutex:
            return {
                "sequence": self.sequence,
                "segments": len(self._closed_bytes) + 1,
                "log_bytes": sum(self._closed_bytes.values()) + self._segment.end,
                "commits": self.commits,
            }

    def close(self) -> None:
        """Finish the job in flight, and end the thread; harmless when repeated."""
        with self._mutex:
            if self._is_closed:
                return
            self._is_closed = True
        self._close_kernel()
        self._jobs.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    # Syncs by the kernel

    def _start_sync(self, records: Sequence[bytes], done: CommitCallback) -> bool:
        """Write a small batch, and let the kernel sync it; return False if the thread must do it."""
        segment = self._segment
        if self._kernel is None or self.failure is not None or segment.end >= self._segment_bytes:
            return False
        try:
            size = segment.try_write(records, self.sequence + 1)
        except Exception:
            return False  # the thread meets the same error, and reports it
        if size:
            try:
                self._kernel.start(segment.fileno())
            except OSError as error:
                _log.info("no asynchronous fdatasync for this file system; syncing in a thread: %s", error)
                self._close_kernel()
                return False
            self._syncing = size, done
        return size > 0

    def _finish_sync(self, *, wait: bool = False) -> None:
        number = None if self._kernel is None else self._kernel.finish(wait=wait)
        if number is None or self._syncing is None:
            return
        (size, done), self._syncing = self._syncing, None
        if number:
            self.failure = self._segment.failed(number)
        else:
            self._segment.end += size
            self.sequence += 1
            self.commits += 1
        self._report(done, self.failure)

    def _close_kernel(self) -> None:
        if self._kernel is not None and self._loop is not None:
            if self._syncing is not None:
                self._finish_sync(wait=True)
            if not self._loop.is_closed():
                self._loop.remove_reader(self._kernel.fileno())
            self._kernel.close()
            self._kernel = None

    def _report(self, done: CommitCallback, error: Exception | None) -> None:
        self._busy = False
        try:
            done(error)
        except Exception:
            _log.exception("bug: the callback of a commit failed")

    # The thread

    def _run(self) -> None:
        while self._work(self._jobs.get()):
            pass  # keep no reference to the last batch while waiting for the next
        self._segment.close()

    def _work(self, job: tuple[Sequence[bytes] | None, CommitCallback, bool] | None) -> bool:
        if job is None:
            return False
        records, done, urgent = job
        self._report(done, self.failure or self._attempt(records, urgent))
        return True

    def _attempt(self, records: Sequence[bytes] | None, urgent: bool) -> Exception | None:
        """Do a job; return its error, which is final if it is StorageFailed."""
        try:
            if records is None:
                self._roll()
            else:
                self._append(records, urgent)
        except DiskFull as error:
            self._full = True
            return error
        except StorageFailed as error:
            self.failure = error
        except BaseException as error:
            path = segment_path(self._directory, self._segment.first)
            self.failure = StorageFailed(path=path, why=f"{type(error).__name__}: {error}")
        return self.failure

    def _append(self, records: Sequence[bytes], urgent: bool) -> None:
        if self._segment.end >= self._segment_bytes:
            self._try_roll()
        if not urgent:
            self._keep_room(frame_bytes(records))
        self._segment.append(records, self.sequence + 1, urgent)
        self.sequence += 1
        self.commits += 1
        self._full = self._full and urgent

    def _keep_room(self, size: int) -> None:
        """Before the segment grows, keep room for a compaction. Raises DiskFull if the log must be compacted first."""
        growth = self._segment.growth(size)
        if not growth:
            return
        left = _free_bytes(self._directory) - growth
        closed, end, snapshot = sum(self._closed_bytes.values()), self._segment.end, self._snapshot_bytes
        self._tight = disk_space.is_tight(closed + end, snapshot, 0 if self._full else left)
        if self._tight and end > closed:
            self._try_roll()
        if not disk_space.leaves_room(sum(self._closed_bytes.values()), snapshot, left):
            path = segment_path(self._directory, self._segment.first)
            raise DiskFull(path=path, why="the space left is reserved for compacting the log", number=errno.ENOSPC)

    def _try_roll(self) -> None:
        """Start a new segment, or continue the last one if that is not possible now."""
        try:
            self._roll()
            self._warned = False
        except OSError as error:
            if error.errno not in _CANNOT_ROLL_NOW:
                raise
            if not self._warned:
                _log.warning("cannot start a new segment; the last one keeps growing: %s", error)
            self._warned = True

    def _roll(self) -> None:
        """Start a new segment, unless the last one is empty."""
        last = self._segment
        if not last.end:
            return
        try:
            following = last.follow(self.sequence + 1)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            path = segment_path(self._directory, self.sequence + 1)
            raise DiskFull(path=path, why=os.strerror(error.errno), number=error.errno) from error
        with self._mutex:
            self._segment = following
            self._closed_bytes[last.first] = last.end


def _free_bytes(directory: str) -> int:
    found = os.statvfs(directory)
    if not found.f_blocks:  # this file system does not report its size
        return sys.maxsize
    return found.f_frsize * (found.f_bfree if os.geteuid() == 0 else found.f_bavail)
