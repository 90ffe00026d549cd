"""The way of a change through the log: submitted, committed with whatever else waits, and only then applied.

`CommitQueue` holds, in order, everything that must not be carried out before what was submitted earlier is durable: the
entries themselves, and reads of a connection behind its own changes. One commit is under way at a time; what comes
meanwhile goes with the next, so one `fdatasync` serves them all. A commit begins when a turn of the event loop has
brought nothing more for it: with 64 busy clients it has an entry of each, where it had half of them before. When it is
done, the items of that commit run in their order: state order is log order, and nobody sees what is not committed.

Where another server may have taken over the log, reads too go through the queue. A commit confirms that this one still
leads; where there are only reads, the storage is asked to confirm it, once for all of them.

A commit that finds the disk full changes nothing: requests in it are refused and reads in it run, in their order. What
must not be refused (a client comes or goes, a lock is released, an answer is confirmed) is committed into the storage's
reserve, so that a server without room can still be read from. Once the reserve is used up, that is refused, too: it is
its submitter's to try again. Nothing stays in the queue, so nobody waits behind it. Any other failure of the storage
ends the process: what is on disk is then unknown, and a restart finds out.

The queue counts its bytes. While it is crowded, connections submit nothing and wait for room: the log of a slow disk
must not become a way around the limits on memory.

Rejected: to apply at once and hold back the replies until the commit. Reads would see what may never be, held replies
escape the limits on what a slow reader may make us hold, and a failed commit would have to undo the state.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any, Protocol

from rallypoint.core import barrier, ops
from rallypoint.core.machine import Undo
from rallypoint.errors import DiskFull, StoreError
from rallypoint.storage import Storage

__all__ = ["MAX_QUEUED_BYTES", "QUEUED_BYTES", "CommitQueue", "Submitter", "gives_back"]

_log = logging.getLogger("rallypoint.server")

MAX_ITEMS = 1024
"""How many items one commit may have: applying them must not hold up the event loop for long."""

MAX_BYTES = 16 * 1024 * 1024
"""How many bytes of entries one commit may have, beside a single larger one."""

GATHER_S = 0.0005
"""How long a commit may be put off while every turn of the event loop brings more for it."""

QUEUED_BYTES = 100
"""What a request that waits to be committed costs beside its own bytes; near enough for a limit."""

MAX_QUEUED_BYTES = 1024 * 1024
"""How many bytes of requests of one connection may wait to be committed before no more is read from it."""

CALM_S = 5.0
"""How long a full disk must have had room before the log says so: small commits may fit while large ones do not."""


_GIVING_BACK = frozenset((ops.Confirm, ops.Drop, ops.Unlease, ops.Bye, ops.Delete))


def gives_back(op: ops.Op) -> bool:
    """Return whether a request frees something, and so may use the reserve of a full disk."""
    return op.__class__ in _GIVING_BACK or (isinstance(op, ops.Act) and isinstance(op.command, (Undo, barrier.Leave)))


class Submitter(Protocol):
    """Whoever submits work to the queue, and carries it out when its turn has come."""

    def committed(self, work: Any, size: int) -> None:
        """Carry out what was submitted: it is durable, and so is all that was submitted before it."""

    def refuse(self, work: Any, size: int, error: StoreError, last: bool) -> bool:
        """Refuse what was submitted, for the disk is full; return False to have it use the reserve instead.

        With `last` there is no reserve left: it is out of the queue, whatever this returns.
        """


Item = tuple[bytes | None, Submitter, Any, int]
"""A record (None for a read, which only waits for what is before it), whose it is, the work, and its size in bytes."""


class CommitQueue:
    """What waits to be committed, and what to do then."""

    def __init__(self, storage: Storage, failed: Callable[[BaseException], None], max_bytes: int = 1 << 62) -> None:
        self._storage = storage
        self.confirms = storage.confirms
        """Whether reads, too, must go through the queue."""

        self._failed = failed
        self._max_bytes = max_bytes
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._waiting: deque[Item] = deque()
        self._committing: list[Item] = []
        self._turned_away: deque[Callable[[], None]] = deque()
        self._scheduled = False
        self._gathered = 0  # how many were waiting when it was last put off
        self._begin_by = 0.0
        self._urgent = False
        self._broken = False
        self._told_full = False
        self._full_at = 0.0
        self.disk_full = False
        """Whether the last commit found no room, but for the reserve."""

        self.bytes = 0
        """What the queue holds: records, and the operations in them."""

    @property
    def crowded(self) -> bool:
        """Whether the queue holds as much as it may: submit nothing for a client, and `wait_for_room`."""
        return self.bytes > self._max_bytes

    @property
    def idle(self) -> bool:
        """Whether nothing waits or is under way."""
        return not self._waiting and not self._committing

    def submit(self, record: bytes | None, submitter: Submitter, work: Any, size: int = 0) -> None:
        """Have work carried out by `submitter.committed` once its record, and everything before it, is durable."""
        self._waiting.append((record, submitter, work, size))
        self.bytes += size if record is None else size + len(record)
        if not self._scheduled:
            self._schedule()

    def confirm(self, do: Callable[[], None]) -> None:
        """Do something that only reads, behind all that was submitted, once it is known that this server leads."""
        self.submit(None, _Confirmed, do)

    def wait_for_room(self, resume: Callable[[], None]) -> None:
        """Have `resume` called once the queue is not crowded any more; the first who waits is the first to go on."""
        self._turned_away.append(resume)

    def _schedule(self) -> None:
        """Go on in the next turn of the loop, so that all that comes in this one goes together."""
        if self._waiting and not self._committing and not self._scheduled and not self._broken:
            self._scheduled = True
            self._gathered, self._begin_by = 0, time.monotonic() + GATHER_S
            self._loop.call_soon(self._start)

    def _start(self) -> None:
        """Commit what waits, or carry it out where it is only reads; put that off while more comes."""
        waiting = len(self._waiting)
        if self._gathered < waiting < MAX_ITEMS and time.monotonic() < self._begin_by:
            self._gathered = waiting
            self._loop.call_soon(self._start)
            return
        self._scheduled = False
        if not self._committing:
            self._carry_out(self._begin())
            self._go_on()

    def _go_on(self) -> None:
        """Let those in who wait for room, and begin with what is next."""
        while self._turned_away and not self.crowded:
            try:
                self._turned_away.popleft()()
            except Exception:
                _log.exception("a bug: a connection cannot go on")
        self._schedule()

    def _begin(self) -> list[Item]:
        """Begin to commit what waits, as much as one commit may have; where that is reads alone, return them."""
        waiting = self._waiting
        items = list(islice(waiting, MAX_ITEMS))
        records = [item[0] for item in items if item[0] is not None]
        if len(records) > 1 and sum(map(len, records)) > MAX_BYTES:
            items = _first_bytes(items)
            records = [item[0] for item in items if item[0] is not None]
        if len(items) == len(waiting):
            waiting.clear()
        else:
            for _ in items:
                waiting.popleft()
        if not records and not self.confirms:
            return items
        self._committing = items
        if records:
            self._commit(records)
        else:
            self._storage.confirm(self._done)
        return []

    def _commit(self, records: list[bytes], urgent: bool = False) -> None:
        self._urgent = urgent
        self._storage.commit(records, self._done, urgent)

    def _done(self, error: BaseException | None) -> None:
        if threading.get_ident() == self._thread:
            self._finish(error)
            return
        try:
            self._loop.call_soon_threadsafe(self._finish, error)
        except RuntimeError:
            pass  # the loop is closed: the server has ended

    def _finish(self, error: BaseException | None) -> None:
        """After a commit: carry out what was committed, then begin the next one."""
        items, self._committing = self._committing, []
        if error is None:
            self._note_room()
            self._carry_out(items)
        elif isinstance(error, DiskFull):
            self._no_room(items, error)
        else:
            self._broken = True  # nothing more is begun: what it would build on is unknown
            self._failed(error)
        self._go_on()

    def _carry_out(self, items: list[Item]) -> None:
        for record, submitter, work, size in items:
            self.bytes -= size if record is None else size + len(record)
            try:
                submitter.committed(work, size)
            except Exception:  # a bug, and one that must not take the others along
                _log.exception("a bug: %.200r failed", work)

    # A full disk

    def _no_room(self, items: list[Item], error: StoreError) -> None:
        """Refuse what can be refused and carry out reads, in order; commit the rest into the reserve.

        What a client asked behind something that goes there waits for that.
        """
        self._note_full(error)
        last, again = self._urgent, list[Item]()
        behind: set[Submitter] = set()
        for item in items:
            record, submitter, _, _ = item
            if submitter in behind and record is None:
                again.append(item)
            elif record is None:
                self._carry_out([item])
            elif not self._refuse(item, error, last):
                again.append(item)
                behind.add(submitter)
        if again:
            self._committing = again
            self._commit([record for record, *_ in again if record is not None], urgent=True)

    def _refuse(self, item: Item, error: StoreError, last: bool) -> bool:
        record, submitter, work, size = item
        try:
            refused = submitter.refuse(work, size, error, last) or last
        except Exception:
            _log.exception("a bug: refusing %.200r failed", work)
            refused = True
        if refused:
            self.bytes -= size + len(record or b"")
        return refused

    def _note_full(self, error: StoreError) -> None:
        """Log that the disk is full, once until it has had room for a while."""
        if not self._told_full:
            _log.warning("the disk is full, and changes are refused until there is room: %s", error)
        self.disk_full = self._told_full = True
        self._full_at = time.monotonic()

    def _note_room(self) -> None:
        if self._told_full and not self._urgent:
            self.disk_full = False
            if time.monotonic() - self._full_at >= CALM_S:
                self._told_full = False
                _log.warning("the disk has room again")


def _first_bytes(items: list[Item]) -> list[Item]:
    """Return the first items, as many as one commit may have of bytes, and one with a record at least."""
    size = 0
    for count, (record, *_) in enumerate(items):
        before, size = size, size + len(record or b"")
        if before and size > MAX_BYTES:
            return items[:count]
    return items


class _Confirmed:
    """Does what was submitted to be done once it is confirmed."""

    @staticmethod
    def committed(work: Callable[[], None], size: int) -> None:
        work()

    @staticmethod
    def refuse(work: Callable[[], None], size: int, error: StoreError, last: bool) -> bool:
        return True
