"""What the threads of one process share of a file: one follower, the lock around it, and the art of waiting.

There is one `Hub` for a file in a process, however many handles it has open: what one thread writes wakes the others at
once, and of the threads that wait, one polls for all. What other processes write is found by polling: after 1 ms at
first, every 50 ms in the end, and each time a few system calls that wait for nobody (see filelog). Rejected: inotify;
it is blind to other machines, and a file that all of them see is what this store is for.

Whoever sleeps, sleeps on `changed` and so gives the lock away: no thread's deadline depends on another's. The file's
mutex is tried again and again, not waited for in the kernel, where neither a deadline nor Ctrl-C would end it. Locks
are held by `with` on the lock itself, or by `try`: a generator as context manager may let a Ctrl-C slip by its end.

A forked child shares its parent's locks on the file, which therefore would outlive the parent: every log is closed in
the child, and a handle that is used there joins as a new member. (C code that forks unknown to Python escapes this.)

A hub whose handles were all dropped unclosed removes the file as the last to close does, if one of them was `tidy`: it
frees its own bytes, takes the mutex and looks whether anybody is left. A newcomer that opened the file before that
finds it out of place when it gets the mutex, and makes another.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from rallypoint.core.replica import Replica
from rallypoint.deadline import Deadline
from rallypoint.errors import StoreClosed, StoreError, StoreTimeout
from rallypoint.store.filelog import LogFile
from rallypoint.store.follower import Follower

__all__ = ["Hub", "join"]

FIRST_POLL_S, LAST_POLL_S = 0.001, 0.05
FIRST_TRY_S, LAST_TRY_S = 0.000_05, 0.002
CLOSE_S = 5.0
"""How long a closing handle tries to say so in the log. If it cannot, others find its byte free."""

DROP_S = 1.0
"""How long a hub that was dropped tries to lock the file. If it cannot, whoever has the lock outlives it."""

_T = TypeVar("_T")


class Hub:
    """One process's part in one file. Its lock is held around every method but `admit`."""

    tidy = False
    """Whether the file goes with the last handle also where that is dropped unclosed."""

    def __init__(self, path: str, deadline: Deadline) -> None:
        self.name = f"file://{path}"
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.line: dict[object, bytes] = {}
        """Who waits for an item, in order, and of which queue."""
        self.dropped: deque[int] = deque()
        """Members whose handles are gone and were never closed; the garbage collector adds them, without the lock."""
        self._poller: object = None
        with self.lock:
            self.follower = self._open(path, deadline)

    def __del__(self) -> None:
        # No handle refers to it, though a thread in `join` may have found it a moment ago: hence the lock.
        if not self.tidy or self.pid != os.getpid() or not self.lock.acquire(blocking=False):
            return
        try:
            if not self.closed and self.follower.members <= set(self.dropped):
                with contextlib.suppress(Exception):  # at the very end of the interpreter, modules are empty
                    self._give_up(self.follower.log)
                self.follower.log.close()
        finally:
            self.lock.release()

    def _give_up(self, log: LogFile) -> None:
        """Free all bytes of this process, and remove the file if nobody else holds one."""
        for member in list(self.follower.members):
            self.follower.dismiss(member)
        deadline = Deadline(DROP_S)
        while not log.try_mutex():
            if deadline.expired():
                return
            time.sleep(LAST_TRY_S)
        if log.owns_locks and log.is_deserted():
            log.remove()

    def _open(self, path: str, deadline: Deadline) -> Follower:
        while True:
            log = LogFile(path)
            try:
                self._take_mutex(log, deadline)
                if log.in_place():  # and was not removed just now by the last of its members
                    follower = Follower(log, self.changed.notify_all)
                    follower.enter()
                    log.free_mutex()
                    return follower
            except BaseException:
                log.close()
                raise
            log.close()

    @property
    def replica(self) -> Replica:
        """The replica as it is now; another one after a compaction."""
        return self.follower.replica

    @property
    def closed(self) -> bool:
        """Whether the last member of this process has left."""
        return self.follower.log.closed

    # Members

    def admit(self, tidy: bool = False) -> int | None:
        """Add a member; None when this hub has closed."""
        with self.lock:
            self.tidy = self.tidy or tidy
            return None if self.closed else self.follower.admit()

    def sweep(self) -> None:
        """Take dropped members off; as their bytes are free then, they are buried like those of other processes."""
        while self.dropped:
            self.follower.dismiss(self.dropped.popleft())

    def dismiss(self, member: int, holder: object) -> None:
        """End a member and the seats of its holder. The last one here closes the log, the last of all removes it."""

        def leave(follower: Follower) -> None:
            follower.end(member)
            if not follower.members and follower.log.is_deserted():
                follower.log.remove()

        self.sweep()
        self.changed.notify_all()  # whoever waits will see that it is closed
        self.follower.rise_all(holder)
        try:
            self.exclusively(leave, Deadline(CLOSE_S))
        except (StoreError, OSError):
            pass  # its byte is freed all the same
        finally:
            self.follower.dismiss(member)
            if not self.follower.members:
                self.follower.log.close()
            self.changed.notify_all()

    # Reading and writing

    def look(self, deadline: Deadline | None = None) -> None:
        """Take in what others did. With a deadline, wait for the mutex where there is no other way to know."""
        fresh = self.follower.look()
        if fresh and not self.follower.dead():
            return
        patience = Deadline(0) if fresh or deadline is None else deadline
        try:
            self.exclusively(_nothing, patience)
        except StoreTimeout:
            if patience is deadline:
                raise

    def exclusively(self, work: Callable[[Follower], _T], deadline: Deadline) -> _T:
        """Do something with the mutex held and all that others did taken in. Raises StoreTimeout, with nothing done."""
        log = self.follower.log
        try:
            self._take_mutex(log, deadline)
            self.follower.sync()
            result = work(self.follower)
            self.follower.compact()
            return result
        finally:
            try:
                log.free_mutex()
            except BaseException:  # Ctrl-C on the way there
                log.free_mutex()
                raise

    def _take_mutex(self, log: LogFile, deadline: Deadline) -> None:
        pause_s = FIRST_TRY_S
        while not log.try_mutex():
            if deadline.expired():
                raise StoreTimeout(
                    operation="locking the file",
                    keys=[log.path],
                    missing=[log.path],
                    timeout_s=deadline.timeout_s,
                    store=self.name,
                    what="another process holds the lock",
                )
            self.changed.wait(min(pause_s, deadline.remaining()))
            pause_s = min(2 * pause_s, LAST_TRY_S)
            if log.closed:
                raise StoreClosed(store=self.name)

    # Waiting

    def is_turn_of(self, who: object) -> bool:
        """Say whether one is the first in line for its queue, and there is an item."""
        key = self.line[who]
        waiting = [one for one, queue in self.line.items() if queue == key]
        return waiting[0] is who and self.replica.has_item(key)

    def rest(self, ready: Callable[[], object], check_open: Callable[[], None], deadline: Deadline) -> bool:
        """Sleep, and poll where no other thread does, until something is ready; False when the time is up."""
        me, pace_s = object(), FIRST_POLL_S
        try:
            while not ready():
                check_open()
                if deadline.expired():
                    return False
                if self._poller is None or pace_s == FIRST_POLL_S:
                    self._poller = me
                sleep_s = pace_s if self._poller is me else threading.TIMEOUT_MAX
                if not self.changed.wait(min(sleep_s, deadline.remaining())) and not self.closed:
                    self.look()
                    pace_s = min(2 * pace_s, LAST_POLL_S)
            return True
        finally:
            if self._poller is me:
                self._poller = None
                self.changed.notify_all()


def _nothing(_: Follower) -> None:
    pass


_hubs: weakref.WeakValueDictionary[tuple[int, int], Hub] = weakref.WeakValueDictionary()
_guard = threading.Lock()


def join(path: str, deadline: Deadline, tidy: bool) -> tuple[Hub, int]:
    """Become a member of the store in a file; return this process's part in it, and the member's number."""
    while True:
        with _guard:
            hub = _hubs.get(_identity(path))
            if hub is None or hub.closed or hub.pid != os.getpid():
                hub = Hub(path, deadline)
                _hubs[hub.follower.log.identity] = hub
        member = hub.admit(tidy)
        if member is not None:
            return hub, member


def _identity(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return (-1, -1)
    return status.st_dev, status.st_ino


def _leave_to_parent() -> None:
    """In a forked child: let go of the parent's files, and of locks that its threads may have held."""
    global _guard
    _guard = threading.Lock()
    for hub in list(_hubs.values()):
        hub.lock = threading.Lock()
        hub.changed = threading.Condition(hub.lock)
        hub.follower.log.close()
    _hubs.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
