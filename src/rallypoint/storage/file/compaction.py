"""Compaction: a child process folds a snapshot and the closed segments into a new snapshot.

Folding replays the log, which would stall the server's event loop for seconds; in a child it only takes another CPU.
The child reads only files that no longer change, needs no lock, removes nothing, and may be killed at any moment. The
server removes the files that the new snapshot covers. A thread of the server starts the child, waits for it and removes
files; the event loop only starts that thread. If the child fails, the log grows, the reason is logged, and the
compaction is retried after 10 s, then after twice as long, up to 10 minutes.

The child ends when its parent does: it checks its parent's pid with every record and chunk. A late one is harmless: its
snapshot is valid, under a temporary name that the next server removes.

Rejected: forking the server. A fork of a process with threads may hang, and holds the lock and every connection.
Rejected: PR_SET_PDEATHSIG. It fires when the thread that started the child ends.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from rallypoint.storage.file.directory import list_directory, temporary_path
from rallypoint.storage.file.recovery import read_segments
from rallypoint.storage.file.snapshot import read_snapshot, write_snapshot

__all__ = ["Compactor", "CompactionJob", "main"]

FIRST_RETRY_S, LAST_RETRY_S = 10.0, 600.0
CHILD_S = 3600.0
"""Timeout of a child, after which it is killed: it hangs."""

_NICENESS = 10
_REASON_BYTES = 4000  # fits in a pipe, so that the child can write it and end
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from rallypoint.storage.file.compaction import main; main()"
)

_log = logging.getLogger("rallypoint.storage")
_Item = TypeVar("_Item")


class CompactionJob(NamedTuple):
    """A job of the child: fold the snapshot (None: there is none) and the segments after it, up to frame `covers`.

    `fold` names a function, as "module:function", that takes the chunks of a snapshot, or None, and the records after
    it, and returns the chunks of the new snapshot.
    """

    directory: str
    snapshot: int | None
    covers: int
    fold: str
    temporary: str
    parent_pid: int


class Compactor:
    """Runs at most one child at a time; calls `adopt`, in another thread, with the last frame of its snapshot."""

    def __init__(self, directory: str, fold: str, adopt: Callable[[int], None], clock: Callable[[], float]) -> None:
        self.runs = self.failures = 0
        self._directory, self._fold, self._adopt, self._clock = directory, fold, adopt, clock
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._stopping = False
        self._retry_s, self._retry_at = FIRST_RETRY_S, float("-inf")

    def try_start(self, snapshot: int | None, covers: int) -> bool:
        """Start a child, unless one is running or failed a short time ago; return whether it was started."""
        with self._lock:
            if self._stopping or (self._thread and self._thread.is_alive()) or self._clock() < self._retry_at:
                return False
            temporary = temporary_path(self._directory, covers)
            job = CompactionJob(self._directory, snapshot, covers, self._fold, temporary, os.getpid())
            self._thread = threading.Thread(target=self._run, args=(job,), name="rallypoint compaction", daemon=True)
            self._thread.start()
            return True

    def wait(self, timeout_s: float) -> bool:
        """Wait until no child is running and the last one is processed; return False on timeout."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Kill a running child, and start none within this block."""
        stopped = self._stopping
        self.stop()
        try:
            yield
        finally:
            self._stopping = stopped

    def stop(self) -> None:
        """Kill a running child, and start no other."""
        with self._lock:
            self._stopping = True
            if self._child is not None:
                self._child.kill()
        if self._thread is not None:
            self._thread.join()

    def _run(self, job: CompactionJob) -> None:
        began_at = time.monotonic()
        try:
            why = self._fold_in_child(job)
            if not why:
                self._adopt(job.covers)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        with self._lock:
            self._child = None
            if self._stopping and why:
                return
            self.runs += 1
            self.failures += bool(why)
            retry_s = self._retry_s
            self._retry_s = min(2 * retry_s, LAST_RETRY_S) if why else FIRST_RETRY_S
            self._retry_at = self._clock() + retry_s if why else float("-inf")
        took_s = time.monotonic() - began_at
        if why:
            _log.warning("compaction of %s failed, next attempt in %g s: %s", job.directory, retry_s, why)
        else:
            _log.info("compacted the log of %s up to frame %d in %.1f s", job.directory, job.covers, took_s)

    def _fold_in_child(self, job: CompactionJob) -> str:
        """Run the child to its end; return why it failed, or ""."""
        command = [sys.executable, "-I", "-c", _BOOT, json.dumps(sys.path), json.dumps(job._asdict())]
        with self._lock:
            if self._stopping:
                return "stopped"
            child = self._child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
            )
        why = ""
        try:
            reason = child.communicate(timeout=CHILD_S)[0]
        except subprocess.TimeoutExpired:
            child.kill()
            reason = child.communicate()[0]
            why = f"process {child.pid} did not finish within {CHILD_S:g} s"
        if child.returncode == 0:
            return ""
        with contextlib.suppress(OSError):
            os.unlink(job.temporary)
        return why or reason.decode(errors="replace") or f"process {child.pid} {_ending(child.returncode)}"


def main() -> None:
    """Run in the child: fold as the arguments say, and on failure write the reason to standard output."""
    sys.stdout = sys.stderr  # standard output is for the reason alone, not for what the fold prints
    try:
        os.nice(_NICENESS)
        compact(CompactionJob(**json.loads(sys.argv[2])))
    except Exception as error:
        with contextlib.suppress(BrokenPipeError):  # the server has ended
            os.write(1, f"{type(error).__name__}: {error}".encode(errors="replace")[:_REASON_BYTES])
        sys.exit(1)


def compact(job: CompactionJob) -> None:
    """Write the snapshot of a job. Raises StorageDamaged, DiskFull, StorageFailed, and the errors of the fold."""
    covered = job.snapshot or 0
    segments = [first for first in list_directory(job.directory).segments if covered < first <= job.covers]
    chunks = None if job.snapshot is None else read_snapshot(job.directory, job.snapshot)
    records = _while_wanted(read_segments(job.directory, segments, job.covers), job.parent_pid)
    folded = _while_wanted(_load(job.fold)(chunks, records), job.parent_pid)
    write_snapshot(job.directory, job.covers, _having_read(folded, chunks or (), records), job.temporary)


def _having_read(folded: Iterable[bytes], *sources: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the chunks, then check that the fold has read, and so verified, all that the snapshot covers."""
    yield from folded
    for source in sources:
        for _ in source:
            raise ValueError("the fold did not read all of its input")


def _load(name: str) -> Callable[..., Iterable[bytes]]:
    module, _, function = name.partition(":")
    found: Any = getattr(importlib.import_module(module), function)
    fold: Callable[..., Iterable[bytes]] = found
    return fold


def _while_wanted(items: Iterable[_Item], parent_pid: int) -> Iterator[_Item]:
    """Yield the items as long as the parent lives; check once more after the last."""
    for item in items:
        _require_parent(parent_pid)
        yield item
    _require_parent(parent_pid)


def _require_parent(pid: int) -> None:
    if os.getppid() != pid:
        raise ProcessLookupError(f"the server, process {pid}, has ended")


def _ending(code: int) -> str:
    return f"exited with code {code}" if code >= 0 else f"was killed by signal {-code}"
