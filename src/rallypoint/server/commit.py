"""The way of a change through the log: submitted, committed with whatever else waits, and only then applied.

`CommitQueue` holds, in order, everything that must not be carried out before what was submitted earlier is durable: the
entries themselves, and reads of a connection behind its own changes. One commit is under way at a time; what comes
meanwhile goes with the next, so one `fdatasync` serves them all. A commit begins when a turn of the event loop has
brought nothing more for it: with 64 busy clients it has an entry of each, where it had half of them before. When it is
done, the items of that commit run in their order: state order is log order, and nobody sees what is not committed.

A commit that finds the disk full changes nothing: requests in it are refused, and reads in it run. What cannot be
refused (a client comes or goes, a grace is over, an answer is confirmed) is committed into the storage's reserve, so
that a server without room can still be read from. Any other failure of the storage ends the process: what is on disk
is then unknown, and a restart finds out.

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
from typing import Any, Protocol

from rallypoint.errors import DiskFull, StoreError

__all__ = ["CommitQueue", "Log", "Submitter"]

_log = logging.getLogger("rallypoint.server")

MAX_ITEMS = 1024
"""How many items one commit may have: applying them must not hold up the event loop for long."""

MAX_BYTES = 16 * 1024 * 1024
"""How many bytes of entries one commit may have, beside a single larger one."""

GATHER_S = 0.0005
"""How long a commit may be put off while every turn of the event loop brings more for it."""

RETRY_S = 0.5
"""How long to wait after the disk was full, before entries are tried again that must not be refused."""


class Log(Protocol):
    """Where entries become durable."""

    def commit(self, records: list[bytes], done: Callable[[BaseException | None], None], urgent: bool = False) -> None:
        """Write records, and call `done`, after this returns and in any thread, once they are durable or failed.

        What is urgent may use the space that is kept in reserve.
        """


class Submitter(Protocol):
    """Whoever submits work to the queue, and carries it out when its turn has come."""

    def committed(self, work: Any, size: int) -> None:
        """Carry out what was submitted: it is durable, and so is all that was submitted before it."""

    def refuse(self, work: Any, size: int, error: StoreError) -> bool:
        """Refuse what was submitted, for the disk is full; False: it cannot be refused, and is to be tried again."""


Item = tuple[bytes | None, Submitter, Any, int]
"""A record (None for a read, which only waits for what is before it), whose it is, the work, and its size in bytes."""


class CommitQueue:
    """What waits to be committed, and what to do then."""

    def __init__(self, log: Log, failed: Callable[[BaseException], None], ran: Callable[[], None]) -> None:
        self._log = log
        self._failed = failed
        self._ran = ran
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._waiting: deque[Item] = deque()
        self._committing: list[Item] = []
        self._scheduled = False
        self._gathered = 0  # how many were waiting when it was last put off
        self._begin_by = 0.0
        self._urgent = False
        self._full = False
        self._retrying = False
        self._broken = False
        self.commits = 0

    @property
    def out_of_room(self) -> bool:
        """Whether entries wait for the disk to have room again: clients that have gone, graces that are over."""
        return self._retrying

    @property
    def idle(self) -> bool:
        """Whether nothing waits or is under way."""
        return not self._waiting and not self._committing

    def submit(self, record: bytes | None, submitter: Submitter, work: Any, size: int = 0) -> None:
        """Have work carried out by `submitter.committed` once its record, and everything before it, is durable."""
        self._waiting.append((record, submitter, work, size))
        self._schedule()

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
        self._scheduled = self._retrying = False
        if not self._committing:
            self._carry_out(self._begin())
            self._schedule()

    def _begin(self) -> list[Item]:
        """Begin to commit what waits, as much as one commit may have; where that is reads alone, return them."""
        items: list[Item] = []
        records: list[bytes] = []
        size, waiting = 0, self._waiting
        while waiting and len(items) < MAX_ITEMS:
            record = waiting[0][0]
            if record is not None:
                size += len(record)
                if records and size > MAX_BYTES:
                    break
                records.append(record)
            items.append(waiting.popleft())
        if not records:
            return items
        self._committing = items
        self._commit(records)
        return []

    def _commit(self, records: list[bytes], urgent: bool = False) -> None:
        self.commits += 1
        self._urgent = urgent
        self._log.commit(records, self._done, urgent)

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
            self._note_room(None)
            self._carry_out(items)
        elif isinstance(error, DiskFull):
            self._no_room(items, error)
        else:
            self._broken = True  # nothing more is begun: what it would build on is unknown
            self._failed(error)
        self._schedule()

    def _carry_out(self, items: list[Item]) -> None:
        for _, submitter, work, size in items:
            try:
                submitter.committed(work, size)
            except Exception:  # a bug, and one that must not take the others along
                _log.exception("a bug: %.200r failed", work)
        if items:
            self._ran()

    def _note_room(self, error: StoreError | None) -> None:
        """Log that the disk is full, and that it has room again; each once."""
        if error is not None and not self._full:
            _log.warning("the disk is full, and changes are refused until there is room: %s", error)
        elif error is None and self._full and not self._urgent:
            _log.warning("the disk has room again")
        self._full = error is not None or (self._full and self._urgent)

    def _refuse(self, item: Item, error: StoreError) -> bool:
        _, submitter, work, size = item
        try:
            return submitter.refuse(work, size, error)
        except Exception:
            _log.exception("a bug: refusing %.200r failed", work)
            return True

    def _no_room(self, items: list[Item], error: StoreError) -> None:
        """Refuse what can be refused; for the rest there is a reserve, and else it waits."""
        self._note_room(error)
        self._carry_out([item for item in items if item[0] is None])
        again = [item for item in items if item[0] is not None and not self._refuse(item, error)]
        if again and not self._urgent:
            self._committing = again
            self._commit([record for record, *_ in again if record is not None], urgent=True)
        elif again:
            self._waiting.extendleft(reversed(again))
            self._scheduled = self._retrying = True
            self._loop.call_later(RETRY_S, self._start)
