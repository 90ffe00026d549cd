"""The thread that writes the log: it commits batches in the order they come, and begins a new segment when one is full.

Jobs go through a SimpleQueue: 15 us there and back, as with a bare lock; a Condition takes 17. Rejected: syncing on the
server's event loop. It saves those 15 us, and stalls every connection for as long as the disk takes.

A segment that cannot be followed by a new one now, for lack of space or of file descriptors, simply grows: where a
segment ends matters only to compaction. Every error but a full disk is final, and all later jobs fail with it.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from queue import SimpleQueue

from rallypoint.errors import DiskFull, StoreClosed
from rallypoint.storage import Done
from rallypoint.storage.directory import segment_path
from rallypoint.storage.errors import StorageFailed
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
        self._warned = False
        self._jobs: SimpleQueue[tuple[Sequence[bytes] | None, Done, bool] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rallypoint log", daemon=True)
        self._thread.start()

    def submit(self, records: Sequence[bytes] | None, done: Done, urgent: bool = False) -> None:
        """Have a batch committed, or with None a new segment begun, and then `done` called. Raises StoreClosed."""
        with self._mutex:
            if self._is_closed:
                raise StoreClosed(store=f"storage {self._directory}")
            self._jobs.put((records, done, urgent))

    def closed(self) -> tuple[int, int]:
        """Return the number of the last frame in a closed segment, and the size of all closed segments."""
        with self._mutex:
            return self._segment.first - 1, sum(self._closed_bytes.values())

    def forget(self, covers: int) -> None:
        """Count the segments up to this frame no longer: a snapshot covers them."""
        with self._mutex:
            self._closed_bytes = {first: size for first, size in self._closed_bytes.items() if first > covers}

    def statistics(self) -> dict[str, int | float]:
        """Return sizes and counts of the log."""
        with self._mutex:
            return {
                "sequence": self.sequence,
                "segments": len(self._closed_bytes) + 1,
                "log_bytes": sum(self._closed_bytes.values()) + self._segment.end,
                "commits": self.commits,
                "last_sync_s": self._segment.sync_s,
            }

    def close(self) -> None:
        """Wait until all jobs are done, and end the thread; harmless when it is closed already."""
        with self._mutex:
            if self._is_closed:
                return
            self._is_closed = True
            self._jobs.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    # The thread

    def _run(self) -> None:
        while self._work(self._jobs.get()):
            pass  # nothing here refers to the last batch while the next is awaited
        self._segment.close()

    def _work(self, job: tuple[Sequence[bytes] | None, Done, bool] | None) -> bool:
        if job is None:
            return False
        records, done, urgent = job
        error = self.failure or self._attempt(records, urgent)
        try:
            done(error)
        except Exception:
            _log.exception("the callback of a commit raised an error")
        return True

    def _attempt(self, records: Sequence[bytes] | None, urgent: bool) -> Exception | None:
        """Do a job; return the error, which is final if it is StorageFailed."""
        try:
            if records is None:
                self._roll()
            else:
                self._roll_if_full()
                self._segment.append(records, self.sequence + 1, urgent)
                self.sequence += 1
                self.commits += 1
        except DiskFull as error:
            return error
        except StorageFailed as error:
            self.failure = error
        except BaseException as error:
            path = segment_path(self._directory, self._segment.first)
            self.failure = StorageFailed(path=path, why=f"{type(error).__name__}: {error}")
        return self.failure

    def _roll_if_full(self) -> None:
        if self._segment.end < self._segment_bytes:
            return
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
