"""FileStore: the engine replayed from a log in a file that all processes of a job see.

Every process keeps a replica of the store in memory, and the file holds the log of what was done to it: a read costs a
look at the end of the file, a write one appended record. The layers, from the bytes up:

    core/log.py        records as checked frames         core/replica.py    what a record does to an engine
    store/filelog.py   the file and its locks            store/follower.py  a replica that follows a log
    store/filehub.py   what the threads of a process share of it            store/file.py  one handle

A handle is a member: `clone()` is another, and so is a handle that is used in a forked child. Leases and arrivals at
barriers belong to a member, and end when it is closed or its process dies, however it dies.

The first to come to a file whose members are all gone starts it afresh: what a dead run left is not obeyed. The last to
close removes the file. So does, as in PyTorch, the last that is dropped unclosed, also at the end of its process, if it
was given a world size; without one the file stays, as it does after a process that was killed.

Items of a queue go to the threads of one process in the order in which they asked; between processes, to whoever looks
first. Rejected: keeping that order in the log; an item would wait for a taker that hangs.
"""

from __future__ import annotations

import os
from typing import Any, cast

from rallypoint.core import ops
from rallypoint.core import replica as effects
from rallypoint.core.records import Event, Statistics, TimedOut, Waiter
from rallypoint.deadline import Deadline, Timeout, seconds
from rallypoint.errors import ConnectionLost, StoreClosed, Unsupported
from rallypoint.store.base import Backend, Feed, Store
from rallypoint.store.filehub import Hub, join
from rallypoint.store.follower import Seat
from rallypoint.store.view import DEFAULT_TIMEOUT_S

__all__ = ["FileBackend", "FileStore"]

GRACE_S = 1.0  # how long a call tries to lock the file, however short its timeout


class FileBackend(Backend):
    """One member of the store in a file. `timeout_s` bounds how long it tries to lock the file."""

    _closed = True  # until it has joined

    def __init__(self, path: str, timeout_s: float = DEFAULT_TIMEOUT_S, tidy: bool = False) -> None:
        self.path = os.path.abspath(path)
        self.name = f"file://{self.path}"
        self.timeout_s = timeout_s
        self._arrivals = 0
        self._tidy = tidy
        self._hub, self._member = join(self.path, Deadline(timeout_s), tidy)
        self._closed = False

    def __del__(self) -> None:
        if not self._closed:
            self._hub.dropped.append(self._member)

    def execute(self, op: ops.Op) -> Any:
        if not op.changes:
            return self._read(op)
        if isinstance(op, ops.Take):
            return self._take(op)
        if isinstance(op, ops.Arrive):
            return self._arrive(op)
        if isinstance(op, ops.Lease) and op.ttl_s:
            why = "the lock of a process that is only stopped is held by the kernel all the same"
            raise Unsupported(operation="lease with a heartbeat", store=self.name, why=why)
        hub = self._here()
        with hub.lock:
            self._check_open()
            hub.sweep()
            return hub.exclusively(lambda log: log.execute(op, self._member), _patient(Deadline(self.timeout_s)))

    def watch(self, prefix: bytes) -> Feed:
        return _FileFeed(self, prefix)

    def clone(self) -> FileBackend:
        self._check_open()
        member = self._here().admit()
        if member is None:
            raise StoreClosed(store=self.name)
        twin = FileBackend.__new__(FileBackend)
        twin.__dict__.update(self.__dict__, _member=member)
        return twin

    def close(self) -> None:
        with self._hub.lock:
            was_open, self._closed = not self._closed, True
            if was_open and self._hub.pid == os.getpid():  # else it is the parent's, and was never used in this child
                self._hub.dismiss(self._member, self)

    # Inside

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed(store=self.name)

    def _here(self) -> Hub:
        """Return the hub of this process; in a forked child, join first."""
        if self._hub.pid != os.getpid() and not self._closed:
            with self._hub.lock:
                if self._hub.pid != os.getpid():
                    self._hub, self._member = join(self.path, Deadline(self.timeout_s), self._tidy)
        return self._hub

    def _look(self, hub: Hub, deadline: Deadline) -> None:
        self._check_open()
        hub.sweep()
        hub.look(_patient(deadline))
        self._check_open()

    def _read(self, op: ops.Op) -> Any:
        hub, seat = self._here(), Seat(self, op)
        deadline = Deadline(getattr(op, "timeout_s", self.timeout_s))
        with hub.lock:
            self._look(hub, deadline)
            try:
                hub.follower.sit(seat)
                if hub.rest(lambda: seat.answers, self._check_open, deadline):
                    return seat.answers.popleft()
                assert isinstance(seat.held, Waiter)
                return hub.replica.expire(seat.held)
            finally:
                hub.follower.rise(seat)

    def _take(self, op: ops.Take) -> bytes | TimedOut:
        deadline, hub, me = Deadline(op.timeout_s), self._here(), object()
        with hub.lock:
            self._look(hub, deadline)
            try:
                hub.line[me] = op.key
                while hub.rest(lambda: hub.is_turn_of(me), self._check_open, deadline):
                    item = hub.exclusively(lambda log: log.execute(ops.Pop(0, op.key), 0), _patient(deadline))
                    if item is not None:
                        return bytes(item)
                return TimedOut((op.key,))
            finally:
                hub.line.pop(me, None)
                hub.changed.notify_all()

    def _arrive(self, op: ops.Arrive) -> TimedOut | None:
        deadline, hub = Deadline(op.timeout_s), self._here()
        with hub.lock:
            self._check_open()
            self._arrivals += 1
            ticket = (self._member, self._arrivals)
            try:
                hub.exclusively(lambda log: log.arrive(effects.Arrive(op.key, op.size, *ticket)), _patient(deadline))
                hub.rest(lambda: self._closed or ticket not in hub.replica.arrivals, self._check_open, deadline)
            finally:
                waiting = not self._closed and ticket in hub.replica.arrivals
                gave_up = waiting and hub.exclusively(lambda log: log.withdraw(ticket), Deadline(GRACE_S))
            self._check_open()
            if self._member not in hub.replica.owners:
                why = "its lock on the file was lost, and another process took it for dead"
                raise ConnectionLost(peer=self.name, operation="barrier", why=why)
            return TimedOut((op.key,)) if gave_up else None


class _FileFeed(Feed):
    def __init__(self, backend: FileBackend, prefix: bytes) -> None:
        self._backend = backend
        self._closed = False
        self._seat = Seat(backend, ops.Watch(0, prefix))
        hub = backend._here()
        with hub.lock:
            backend._look(hub, Deadline(backend.timeout_s))
            hub.follower.sit(self._seat)

    def next(self, deadline: Deadline) -> Event | TimedOut:
        hub, seat = self._backend._here(), self._seat
        with hub.lock:
            if not seat.answers:
                self._check_open()
                hub.follower.sit(seat)  # in a forked child, this is another hub
                if not hub.rest(lambda: seat.answers, self._check_open, deadline):
                    return TimedOut(())
            return cast(Event, seat.answers.popleft())

    def close(self) -> None:
        with self._backend._hub.lock:
            self._closed = True
            self._backend._hub.follower.rise(self._seat)
            self._backend._hub.changed.notify_all()

    def _check_open(self) -> None:
        self._backend._check_open()
        if self._closed:
            raise StoreClosed(store=f"a watch of {self._backend.name}")


class FileStore(Store):
    """A store in a file that all its processes see, on one machine or on several that share a file system.

    An empty or missing file is a new store. Who is here is known by locks on the file. A `world_size` (0 or more) says
    that the file is to go with the last handle also where that is dropped, not closed. Raises OSError that names the
    path (DiskFull where the file cannot grow), CorruptFile for a file that no FileStore wrote, and StoreTimeout where
    another process keeps the file locked for longer than `timeout`.
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
        """Set how long blocking calls of this handle wait where they are not told, and all of them for the file."""
        super().set_timeout(timeout)
        self._file.timeout_s = self._timeout_s

    def statistics(self) -> Statistics:
        """Count what the store holds now. Arrivals at barriers are everyone's, waits and watches this process's."""
        hub = self._file._here()
        with hub.lock:
            self._file._look(hub, Deadline(self._timeout_s))
            return hub.replica.statistics()

    @property
    def _file(self) -> FileBackend:
        assert isinstance(self._backend, FileBackend)
        return self._backend


def _patient(deadline: Deadline) -> Deadline:
    return deadline if deadline.remaining() >= GRACE_S else Deadline(GRACE_S)
