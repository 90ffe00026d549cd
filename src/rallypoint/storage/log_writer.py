"""What writes the log: it commits one batch at a time, and begins a new segment when one is full.

Small batches are written by whoever submits them and synced by the kernel (kernel_sync.py), once an event loop is there
to learn of it; all that may take long is done in a thread: large batches, reserving space, beginning a segment, and
every sync where the kernel cannot. Rejected: syncing on the server's event loop, which stalls every connection for as
long as the disk takes.

A segment that cannot be followed by a new one now, for lack of space or of file descriptors, simply grows: where a
segment ends matters only to compaction. Every error but a full disk is final, and all later jobs fail with it.
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
from rallypoint.storage import Done, room
from rallypoint.storage.directory import segment_path
from rallypoint.storage.errors import StorageFailed
from rallypoint.storage.kernel_sync import KernelSync
from rallypoint.storage.segment import frame_bytes
from rallypoint.storage.segment_writer import NO_ROOM, SegmentWriter

__all__ = ["LogWriter"]

_CANNOT_ROLL_NOW = (*NO_ROOM, errno.EMFILE, errno.ENFILE, errno.ENOMEM)

_log = logging.getLogger("rallypoint.storage")


class LogWriter:
    """The end of a log, from its last segment on, which it owns. `sequence` is the number of the last committed frame.

    `closed` gives the sizes of the segments before the last one, by the numbers of their first frames.
    """

    def __init__(
        self, directory: str, segment: SegmentWriter, sequence: int, closed: Mapping[int, int], segment_bytes: int
    ) -> None:
        self.sequence = sequence
        self.commits = 0
        self.failure: StorageFailed | None = None
        self._directory, self._segment_bytes = directory, segment_bytes
        self._mutex = threading.Lock()  # guards the next three, which other threads read and change
        self._segment = segment
        self._closed_bytes = dict(closed)
        self._is_closed = False
        self._snapshot_bytes = 0
        self._tight = self._full = False  # whether a compaction is pressing; whether the last batch found no room
        self._busy = False
        self._warned = False
        self._kernel: KernelSync | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._syncing: tuple[int, Done] | None = None  # what the kernel syncs: its size, and what to call then
        self._jobs: SimpleQueue[tuple[Sequence[bytes] | None, Done, bool] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rallypoint log", daemon=True)
        self._thread.start()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let the kernel sync small batches from now on, where it can; `submit` and `done` are then this loop's."""
        try:
            self._kernel = KernelSync()
        except OSError as error:
            _log.info("the kernel cannot sync by itself here, so a thread does: %s", error)
        else:
            self._loop = loop
            loop.add_reader(self._kernel.fileno(), self._finish_sync)

    def submit(self, records: Sequence[bytes] | None, done: Done, urgent: bool = False) -> None:
        """Have a batch committed, or with None a new segment begun, and then `done` called; one at a time.

        Raises StoreClosed.
        """
        with self._mutex:
            if self._is_closed:
                raise StoreClosed(store=f"storage {self._directory}")
            if self._busy:
                raise RuntimeError("a commit is under way; the next one has to wait for its end")
            self._busy = True
        if records is None or not self._start_sync(records, done):
            self._jobs.put((records, done, urgent))

    def due(self) -> int | None:
        """Return up to which frame the log is to be compacted, None if that is not worth while yet."""
        with self._mutex:
            closed = sum(self._closed_bytes.values())
            due = room.is_due(closed, self._snapshot_bytes, segment_bytes=self._segment_bytes, tight=self._tight)
            return self._segment.first - 1 if due else None

    def forget(self, covers: int, snapshot_bytes: int) -> None:
        """Count the segments up to this frame no longer: a snapshot of this size covers them."""
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
        """Wait until all jobs are done, and end the thread; harmless when it is closed already."""
        with self._mutex:
            if self._is_closed:
                return
            self._is_closed = True
        self._close_kernel()
        self._jobs.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    # The kernel

    def _start_sync(self, records: Sequence[bytes], done: Done) -> bool:
        """Write a small batch, and have the kernel sync it; False: this is for the thread."""
        segment = self._segment
        if self._kernel is None or self.failure is not None or segment.end >= self._segment_bytes:
            return False
        try:
            size = segment.try_write(records, self.sequence + 1)
        except Exception:
            return False  # it meets the thread, too, and there it is reported
        if size:
            try:
                self._kernel.start(segment.fileno())
            except OSError as error:
                _log.info("the kernel cannot sync this log by itself, so a thread does: %s", error)
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

    def _report(self, done: Done, error: Exception | None) -> None:
        self._busy = False
        try:
            done(error)
        except Exception:
            _log.exception("the callback of a commit raised an error")

    # The thread

    def _run(self) -> None:
        while self._work(self._jobs.get()):
            pass  # nothing here refers to the last batch while the next is awaited
        self._segment.close()

    def _work(self, job: tuple[Sequence[bytes] | None, Done, bool] | None) -> bool:
        if job is None:
            return False
        records, done, urgent = job
        self._report(done, self.failure or self._attempt(records, urgent))
        return True

    def _attempt(self, records: Sequence[bytes] | None, urgent: bool) -> Exception | None:
        """Do a job; return the error, which is final if it is StorageFailed."""
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
        """Before the segment grows: see to it that the log can be compacted; DiskFull where it must be first."""
        growth = self._segment.growth(size)
        if not growth:
            return
        left = _free_bytes(self._directory) - growth
        closed, end, snapshot = sum(self._closed_bytes.values()), self._segment.end, self._snapshot_bytes
        self._tight = room.is_tight(closed + end, snapshot, 0 if self._full else left)
        if self._tight and end > closed:
            self._try_roll()
        if not room.leaves_room(sum(self._closed_bytes.values()), snapshot, left):
            path = segment_path(self._directory, self._segment.first)
            raise DiskFull(path=path, why="the space left is kept for compacting the log", number=errno.ENOSPC)

    def _try_roll(self) -> None:
        """Begin a new segment, or go on with the last one where that cannot be now."""
        try:
            self._roll()
            self._warned = False
        except OSError as error:
            if error.errno not in _CANNOT_ROLL_NOW:
                raise
            if not self._warned:
                _log.warning("cannot begin a new segment now, so the last one grows on: %s", error)
            self._warned = True

    def _roll(self) -> None:
        """Begin a new segment, unless the last one is empty."""
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
    if not found.f_blocks:  # this file system does not say
        return sys.maxsize
    return found.f_frsize * (found.f_bfree if os.geteuid() == 0 else found.f_bavail)
