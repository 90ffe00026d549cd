"""Group commit: changes are queued, committed to the log in batches, and only then applied to the state.

`CommitQueue` holds, in order, all work that must wait until earlier entries are durable: the entries themselves, and
reads of a connection behind its own changes. One commit is in flight at a time; later work joins the next commit,
so one `fdatasync` serves them all. A commit begins when a turn of the event loop adds nothing more to it: with 64 busy
clients it holds an entry from each, not from half of them. After the commit its items run in order: state order is log
order, and no client sees uncommitted data. They run in slices (`turn_budget.py`); the next commit begins when all have
run.

Where another server may have taken over the log, reads go through the queue as well. A commit confirms that this server
still leads; for a batch of reads only, the storage confirms it once for all of them.

A commit that finds the disk full changes nothing: its requests are refused and its reads run, in order. Entries that
must not be refused (a client connects or leaves, a lock is released, a reply is confirmed) are committed into the
storage's reserve, so that a server on a full disk can still be read from. Once the reserve is exhausted, they are
refused too, and their submitter has to retry. Nothing stays in the queue, so nothing waits behind it. Any other storage
failure ends the process: the contents of the disk are then unknown, and a restart reads them.

The queue counts its bytes. While it is crowded, connections submit nothing and wait for room: a slow disk must not
defeat the limits on memory.

Rejected: applying at once and holding back the replies until the commit. Reads would see changes that may never be
committed, held replies would escape the limits for slow readers, and a failed commit would have to undo the state.
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

from rallypoint.core import ops
from rallypoint.core.machines import barrier
from rallypoint.core.machines.machine import Undo
from rallypoint.errors import DiskFull, StoreError
from rallypoint.server.turn_budget import TurnBudget
from rallypoint.storage import Storage

__all__ = ["MAX_QUEUED_BYTES", "QUEUED_BYTES", "CommitQueue", "Submitter", "gives_back"]

_log = logging.getLogger("rallypoint.server")

MAX_ITEMS = 1024
"""Maximum number of items in one commit."""

MAX_BYTES = 16 * 1024 * 1024
"""Maximum size of the entries in one commit, except for a single larger entry."""

GATHER_S = 0.0005
"""How long a commit may be delayed while every turn of the event loop adds to it."""

QUEUED_BYTES = 100
"""Approximate overhead of a queued request in addition to its own bytes."""

MAX_QUEUED_BYTES = 1024 * 1024
"""Bytes of one connection's queued requests at which the server stops reading from it."""

CALM_S = 5.0
"""How long the disk must have had room again before the server logs it: small commits may fit, large ones not."""


_GIVING_BACK = frozenset((ops.Confirm, ops.Drop, ops.ReleaseLease, ops.Bye, ops.Delete))


def gives_back(op: ops.Op) -> bool:
    """Return whether a request frees something, and so may use the reserve of a full disk."""
    return op.__class__ in _GIVING_BACK or (
        isinstance(op, ops.Act) and isinstance(op.command, (Undo, barrier.BarrierLeave))
    )


class Submitter(Protocol):
    """Submits work to the queue, and runs it once it is committed."""

    def committed(self, work: Any, size: int) -> None:
        """Run the work: its record, and all records submitted before it, are durable."""

    def refuse(self, work: Any, size: int, error: StoreError, last: bool) -> bool:
        """Refuse the work because the disk is full; return False to commit it into the reserve instead.

        With `last` the reserve is exhausted: the work leaves the queue, whatever this returns.
        """


Item = tuple[bytes | None, Submitter, Any, int]
"""A record (None for a read, which only waits for earlier items), its submitter, the work, and its size in bytes."""


class CommitQueue:
    """The work that waits to be committed."""

    def __init__(
        self,
        storage: Storage,
        failed: Callable[[BaseException], None],
        max_bytes: int = 1 << 62,
        turns: TurnBudget | None = None,
    ) -> None:
        self._storage = storage
        self.confirms = storage.confirms
        """Whether reads must go through the queue as well."""

        self._failed = failed
        self._max_bytes = max_bytes
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._waiting: deque[Item] = deque()
        self._committing: list[Item] = []
        self._committed: deque[Item] = deque()  # items that are about to run
        self._turns = turns or TurnBudget()
        self._waiting_for_room: deque[Callable[[], None]] = deque()
        self._scheduled = False
        self._gathered = 0  # items that were waiting when the commit was last delayed
        self._begin_by = 0.0
        self._urgent = False
        self._broken = False
        self._told_full = False
        self._full_at = 0.0
        self.disk_full = False
        """Whether the last commit found no room outside the reserve."""

        self.bytes = 0
        """Size of the queued records and their operations."""

    @property
    def crowded(self) -> bool:
        """Whether the queue is over its limit: submit nothing for a client, but `wait_for_room`."""
        return self.bytes > self._max_bytes

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or in flight."""
        return not (self._waiting or self._committing or self._committed)

    def submit(self, record: bytes | None, submitter: Submitter, work: Any, size: int = 0) -> None:
        """Call `submitter.committed` with the work once its record, and all records before it, are durable."""
        self._waiting.append((record, submitter, work, size))
        self.bytes += size if record is None else size + len(record)
        if not self._scheduled:
            self._schedule()

    def confirm(self, do: Callable[[], None]) -> None:
        """Run a read behind all submitted work, once it is confirmed that this server leads."""
        self.submit(None, _Confirmed, do)

    def wait_for_room(self, resume: Callable[[], None]) -> None:
        """Call `resume` once the queue is no longer crowded, in order of the calls."""
        self._waiting_for_room.append(resume)

    def _schedule(self) -> None:
        """Start a commit in the next turn of the event loop, so that it takes all the work of this one."""
        if self._waiting and not (self._committing or self._committed or self._scheduled or self._broken):
            self._scheduled = True
            self._gathered, self._begin_by = 0, time.monotonic() + GATHER_S
            self._loop.call_soon(self._start)

    def _start(self) -> None:
        """Commit the queued work, or run it if it is reads only; delay that while more arrives."""
        waiting = len(self._waiting)
        if self._gathered < waiting < MAX_ITEMS and time.monotonic() < self._begin_by:
            self._gathered = waiting
            self._loop.call_soon(self._start)
            return
        self._scheduled = False
        if not (self._committing or self._committed):
            self._committed.extend(self._begin())
            self._run_committed()

    def _go_on(self) -> None:
        """Resume the connections that wait for room, and begin the next commit."""
        while self._waiting_for_room and not self.crowded:
            try:
                self._waiting_for_room.popleft()()
            except Exception:
                _log.exception("bug: resuming a connection failed")
        self._schedule()

    def _begin(self) -> list[Item]:
        """Begin to commit queued items, as many as fit; if they are reads that need no confirmation, return them."""
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
            pass  # the event loop is closed: the server has ended

    def _finish(self, error: BaseException | None) -> None:
        """After a commit: run its items, then begin the next commit."""
        items, self._committing = self._committing, []
        if error is None:
            self._note_room()
            self._committed.extend(items)
        elif isinstance(error, DiskFull):
            self._no_room(items, error)
        else:
            self._broken = True  # begin no other commit: the contents of the log are unknown
            self._failed(error)
        self._run_committed()

    def _run_committed(self) -> None:
        """Run committed items, as many as this turn of the event loop has time for; then begin the next commit."""
        committed = self._committed
        while committed:
            self._carry_out(committed.popleft())
            if committed and self._turns.spent():
                self._turns.resume(self._run_committed)
                return
        self._go_on()

    def _carry_out(self, item: Item) -> None:
        record, submitter, work, size = item
        self.bytes -= size if record is None else size + len(record)
        try:
            submitter.committed(work, size)
        except Exception:  # a bug, which must not affect the other items
            _log.exception("bug: %.200r failed", work)

    # A full disk

    def _no_room(self, items: list[Item], error: StoreError) -> None:
        """Refuse requests and run reads, in order; commit the entries that must not be refused into the reserve.

        Reads of a client behind such an entry wait for it, and those that this commit was to confirm, for another.
        """
        self._note_full(error)
        last, again, unconfirmed = self._urgent, list[Item](), list[Item]()
        behind: set[Submitter] = set()
        for item in items:
            record, submitter, _, _ = item
            if submitter in behind and record is None:
                again.append(item)
            elif record is None and self.confirms:
                unconfirmed.append(item)
            elif record is None:
                self._carry_out(item)
            elif not self._refuse(item, error, last):
                again.append(item)
                behind.add(submitter)
        self._waiting.extendleft(reversed(unconfirmed))
        if again:
            self._committing = again
            self._commit([record for record, *_ in again if record is not None], urgent=True)

    def _refuse(self, item: Item, error: StoreError, last: bool) -> bool:
        record, submitter, work, size = item
        try:
            refused = submitter.refuse(work, size, error, last) or last
        except Exception:
            _log.exception("bug: refusing %.200r failed", work)
            refused = True
        if refused:
            self.bytes -= size + len(record or b"")
        return refused

    def _note_full(self, error: StoreError) -> None:
        """Log that the disk is full, once until it has had room for a while."""
        if not self._told_full:
            _log.warning("disk full; changes are refused until there is room: %s", error)
        self.disk_full = self._told_full = True
        self._full_at = time.monotonic()

    def _note_room(self) -> None:
        if self._told_full and not self._urgent:
            self.disk_full = False
            if time.monotonic() - self._full_at >= CALM_S:
                self._told_full = False
                _log.warning("disk has room again; changes are accepted")


def _first_bytes(items: list[Item]) -> list[Item]:
    """Return the first items, up to `MAX_BYTES` of records but at least one record."""
    size = 0
    for count, (record, *_) in enumerate(items):
        before, size = size, size + len(record or b"")
        if before and size > MAX_BYTES:
            return items[:count]
    return items


class _Confirmed:
    """Submitter of reads that run once they are confirmed."""

    @staticmethod
    def committed(work: Callable[[], None], size: int) -> None:
        work()

    @staticmethod
    def refuse(work: Callable[[], None], size: int, error: StoreError, last: bool) -> bool:
        return True
