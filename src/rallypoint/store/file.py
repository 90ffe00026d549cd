"""FileStore: the engine replayed from a log in a file that all processes of a job share.

Every process keeps a replica of the store in memory, and the file holds the log of changes: a read checks the end of
the file for new records, a write appends one record. The layers, from the bytes up:

    filestore/log_format.py    records in checksummed frames
    filestore/log_file.py      the file and its locks
    filestore/replica.py       the effect of a record on an engine
    filestore/follower.py      a replica that follows a log
    filestore/shared_file.py   the part that the threads of a process share
    store/file.py              one handle

A handle is a member: `clone()` creates another, and so does the first use of a handle in a forked child. Leases and
arrivals at barriers belong to a member, and end when it is closed or its process dies in any way.

The first member to open a file whose members are all gone resets it: the state of a dead run is discarded. The last
member to close removes the file. As in PyTorch, so does the last handle that is dropped without `close`, also at the
end of its process, if it has a world size; without one the file stays, as it does after a process was killed.

Queue items go to the threads of one process in FIFO order; between processes, to the first that polls. Rejected:
keeping that order in the log; an item would wait for a consumer that hangs.
"""

from __future__ import annotations

import os
from typing import Any, cast

from rallypoint.core import ops
from rallypoint.core.records import Event, Statistics, TimedOut, Waiter
from rallypoint.deadline import Deadline, Timeout, seconds
from rallypoint.errors import ConnectionLost, StoreClosed, Unsupported
from rallypoint.filestore import replica as effects
from rallypoint.filestore.follower import ReplicaWaiter
from rallypoint.filestore.shared_file import SharedFile, open_shared
from rallypoint.store.base import Backend, Feed, Store
from rallypoint.store.view import DEFAULT_TIMEOUT_S

__all__ = ["FileBackend", "FileStore"]

GRACE_S = 1.0  # minimum time to try to lock the file, however short the call's timeout


class FileBackend(Backend):
    """One member of the store in a file. `timeout_s` limits how long it tries to lock the file."""

    _closed = True  # until it is a member

    def __init__(self, path: str, timeout_s: float = DEFAULT_TIMEOUT_S, tidy: bool = False) -> None:
        self.path = os.path.abspath(path)
        self.name = f"file://{self.path}"
        self.timeout_s = timeout_s
        self._arrivals = 0
        self._tidy = tidy
        self._shared, self._member = open_shared(self.path, Deadline(timeout_s), tidy)
        self._closed = False

    def __del__(self) -> None:
        if not self._closed:
            self._shared.dropped.append(self._member)

    def execute(self, op: ops.Op) -> Any:
        if not op.changes:
            return self._read(op)
        if isinstance(op, ops.BlockingPop):
            return self._take(op)
        if isinstance(op, ops.Arrive):
            return self._arrive(op)
        if isinstance(op, ops.SetLease) and op.ttl_s:
            why = "a stopped process keeps its lock on the file, so it cannot be detected"
            raise Unsupported(operation="lease with a heartbeat", store=self.name, why=why)
        shared = self._here()
        with shared.lock:
            self._check_open()
            shared.sweep()
            return shared.exclusively(lambda log: log.execute(op, self._member), _patient(Deadline(self.timeout_s)))

    def watch(self, prefix: bytes) -> Feed:
        return _FileFeed(self, prefix)

    def clone(self) -> FileBackend:
        self._check_open()
        member = self._here().add_member()
        if member is None:
            raise StoreClosed(store=self.name)
        handle = FileBackend.__new__(FileBackend)
        handle.__dict__.update(self.__dict__, _member=member)
        return handle

    def close(self) -> None:
        with self._shared.lock:
            was_open, self._closed = not self._closed, True
            if was_open and self._shared.pid == os.getpid():  # else it is the parent's, unused in this child
                self._shared.remove_member(self._member, self)

    # Inside

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed(store=self.name)

    def _here(self) -> SharedFile:
        """Return the shared file of this process; in a forked child, join it first."""
        if self._shared.pid != os.getpid() and not self._closed:
            with self._shared.lock:
                if self._shared.pid != os.getpid():
                    self._shared, self._member = open_shared(self.path, Deadline(self.timeout_s), self._tidy)
        return self._shared

    def _look(self, shared: SharedFile, deadline: Deadline) -> None:
        self._check_open()
        shared.sweep()
        shared.look(_patient(deadline))
        self._check_open()

    def _read(self, op: ops.Op) -> Any:
        shared, waiter = self._here(), ReplicaWaiter(self, op)
        deadline = Deadline(getattr(op, "timeout_s", self.timeout_s))
        with shared.lock:
            self._look(shared, deadline)
            try:
                shared.follower.add_waiter(waiter)
                if shared.wait_for(lambda: waiter.answers, self._check_open, deadline):
                    return waiter.answers.popleft()
                assert isinstance(waiter.handle, Waiter)
                return shared.replica.expire(waiter.handle)
            finally:
                shared.follower.remove_waiter(waiter)

    def _take(self, op: ops.BlockingPop) -> bytes | TimedOut:
        deadline, shared, me = Deadline(op.timeout_s), self._here(), object()
        with shared.lock:
            self._look(shared, deadline)
            try:
                shared.line[me] = op.key
                while shared.wait_for(lambda: shared.is_turn_of(me), self._check_open, deadline):
                    item = shared.exclusively(lambda log: log.execute(ops.Pop(0, op.key), 0), _patient(deadline))
                    if item is not None:
                        return bytes(item)
                return TimedOut((op.key,))
            finally:
                shared.line.pop(me, None)
                shared.changed.notify_all()

    def _arrive(self, op: ops.Arrive) -> TimedOut | None:
        deadline, shared = Deadline(op.timeout_s), self._here()
        with shared.lock:
            self._check_open()
            self._arrivals += 1
            ticket = (self._member, self._arrivals)
            try:
                shared.exclusively(
                    lambda log: log.arrive(effects.ArriveEffect(op.key, op.size, *ticket)), _patient(deadline)
                )
                shared.wait_for(
                    lambda: self._closed or ticket not in shared.replica.arrivals, self._check_open, deadline
                )
            finally:
                waiting = not self._closed and ticket in shared.replica.arrivals
                gave_up = waiting and shared.exclusively(lambda log: log.withdraw(ticket), Deadline(GRACE_S))
            self._check_open()
            if self._member not in shared.replica.owners:
                why = "its lock on the file was lost, and another process considered it dead"
                raise ConnectionLost(peer=self.name, operation="barrier", why=why)
            return TimedOut((op.key,)) if gave_up else None


class _FileFeed(Feed):
    def __init__(self, backend: FileBackend, prefix: bytes) -> None:
        self._backend = backend
        self._closed = False
        self._waiter = ReplicaWaiter(backend, ops.WatchPrefix(0, prefix))
        shared = backend._here()
        with shared.lock:
            backend._look(shared, Deadline(backend.timeout_s))
            shared.follower.add_waiter(self._waiter)

    def next(self, deadline: Deadline) -> Event | TimedOut:
        shared, waiter = self._backend._here(), self._waiter
        with shared.lock:
            if not waiter.answers:
                self._check_open()
                shared.follower.add_waiter(waiter)  # in a forked child, this is another SharedFile
                if not shared.wait_for(lambda: waiter.answers, self._check_open, deadline):
                    return TimedOut(())
            return cast(Event, waiter.answers.popleft())

    def close(self) -> None:
        with self._backend._shared.lock:
            self._closed = True
            self._backend._shared.follower.remove_waiter(self._waiter)
            self._backend._shared.changed.notify_all()

    def _check_open(self) -> None:
        self._backend._check_open()
        if self._closed:
            raise StoreClosed(store=f"a watch of {self._backend.name}")


class FileStore(Store):
    """A store in a file shared by its processes, on one machine or on several that share a file system.

    An empty or missing file is a new store. Locks on the file show which members are alive. With a `world_size` (0 or
    more), the file is removed with the last handle even if that is dropped, not closed. Raises OSError, which names the
    path (DiskFull if the file cannot grow), CorruptFile for a file that no FileStore wrote, and StoreTimeout if another
    process keeps the file locked for longer than `timeout`.
    """

    def __init__(
        self, path: str | os.PathLike[str], world_size: int = -1, timeout: Timeout = DEFAULT_TIMEOUT_S
    ) -> None:
        self._path = os.fspath(path)
        self.world_size = world_size
        super().__init__(FileBackend(self._path, seconds(timeout), world_size >= 0), b"", timeout)

    @property
    def path(self) -> str:
        """The path as it was given."""
        return self._path

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the default timeout of this handle's blocking calls, and the timeout of every call for the file lock."""
        super().set_timeout(timeout)
        self._file.timeout_s = self._timeout_s

    def statistics(self) -> Statistics:
        """Count what the store holds now. Barrier arrivals are those of all processes, waits and watches only ours."""
        shared = self._file._here()
        with shared.lock:
            self._file._look(shared, Deadline(self._timeout_s))
            return shared.replica.statistics()

    @property
    def _file(self) -> FileBackend:
        assert isinstance(self._backend, FileBackend)
        return self._backend


def _patient(deadline: Deadline) -> Deadline:
    return deadline if deadline.remaining() >= GRACE_S else Deadline(GRACE_S)
