"""The part of a FileStore that the threads of one process share: one follower, its lock, and how threads wait.

A process has one `SharedFile` per file, however many handles it opens: a write by one thread wakes the others at once,
and of the waiting threads, one polls for all. Writes of other processes are found by polling: after 1 ms, then less and
less often, at last every 50 ms, each time with a few non-blocking system calls (see `log_file.py`). Rejected: inotify;
it does not see writes of other machines, and sharing a file between machines is the purpose of this store.

A thread sleeps on `changed`, which releases the lock: no thread's deadline depends on another's. The file's mutex is
polled, not waited for in the kernel, where neither a deadline nor Ctrl-C would end the wait. Locks are held by `with`
on the lock itself, or by `try`: Ctrl-C may skip the end of a context manager that is a generator.

A forked child shares its parent's locks on the file, so they would outlive the parent. Therefore every log is closed in
the child, and a handle that is used there joins as a new member. (This misses a fork by C code, unknown to Python.)

If all handles were dropped without `close`, and one of them was `tidy`, the `SharedFile` removes the file as the last
`close` would: it unlocks its own members' bytes, takes the mutex and checks for other members. A process that opened
the file before that finds it removed when it gets the mutex, and creates another.
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

from rallypoint.deadline import Deadline
from rallypoint.errors import StoreClosed, StoreError, StoreTimeout
from rallypoint.filestore.follower import ReplicaFollower
from rallypoint.filestore.log_file import LogFile
from rallypoint.filestore.replica import Replica

__all__ = ["SharedFile", "open_shared"]

FIRST_POLL_S, LAST_POLL_S = 0.001, 0.05
FIRST_TRY_S, LAST_TRY_S = 0.000_05, 0.002
CLOSE_S = 5.0
"""How long `close` tries to commit the end of a member. If it cannot, others find the member's byte unlocked."""

DROP_S = 1.0
"""How long a dropped `SharedFile` tries to lock the file. If it cannot, it leaves the file to the lock's holder."""

_T = TypeVar("_T")


class SharedFile:
    """One process's share of one file. Its lock is held around every method except `add_member`."""

    tidy = False
    """Whether to remove the file with the last handle even if that is dropped without `close`."""

    def __init__(self, path: str, deadline: Deadline) -> None:
        self.name = f"file://{path}"
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.line: dict[object, bytes] = {}
        """The callers that wait for an item, in FIFO order, and their queues."""
        self.dropped: deque[int] = deque()
        """Members whose handles were dropped without `close`; the garbage collector adds them, without the lock."""
        self._poller: object = None
        with self.lock:
            self.follower = self._open(path, deadline)

    def __del__(self) -> None:
        # No handle refers to it, but a thread in `open_shared` may have just found it: hence the lock.
        if not self.tidy or self.pid != os.getpid() or not self.lock.acquire(blocking=False):
            return
        try:
            if not self.closed and self.follower.members <= set(self.dropped):
                with contextlib.suppress(Exception):  # at the very end of the interpreter, modules are empty
                    self._abandon(self.follower.log)
                self.follower.log.close()
        finally:
            self.lock.release()

    def _abandon(self, log: LogFile) -> None:
        """Unlock the bytes of all members of this process, and remove the file if no other process has a member."""
        for member in list(self.follower.members):
            self.follower.remove_member(member)
        deadline = Deadline(DROP_S)
        while not log.try_mutex():
            if deadline.expired():
                return
            time.sleep(LAST_TRY_S)
        if log.owns_locks and log.has_no_members():
            log.remove()

    def _open(self, path: str, deadline: Deadline) -> ReplicaFollower:
        while True:
            log = LogFile(path)
            try:
                self._take_mutex(log, deadline)
                if log.in_place():  # otherwise its last member has just removed it
                    follower = ReplicaFollower(log, self.changed.notify_all)
                    follower.enter()
                    log.free_mutex()
                    return follower
            except BaseException:
                log.close()
                raise
            log.close()

    @property
    def replica(self) -> Replica:
        """The current replica; a compaction replaces it."""
        return self.follower.replica

    @property
    def closed(self) -> bool:
        """Whether the last member of this process has left."""
        return self.follower.log.closed

    # Members

    def add_member(self, tidy: bool = False) -> int | None:
        """Add a member and return its number; None if this SharedFile is closed."""
        with self.lock:
            self.tidy = self.tidy or tidy
            return None if self.closed else self.follower.add_member()

    def sweep(self) -> None:
        """Remove dropped members; this unlocks their bytes, so they are ended like dead members of other processes."""
        while self.dropped:
            self.follower.remove_member(self.dropped.popleft())

    def remove_member(self, member: int, holder: object) -> None:
        """End a member and its holder's waiters. The last member here closes the log, the last of all removes it."""

        def leave(follower: ReplicaFollower) -> None:
            follower.end(member)
            if not follower.members and follower.log.has_no_members():
                follower.log.remove()

        self.sweep()
        self.changed.notify_all()  # waiting threads will see that it is closed
        self.follower.remove_waiters_of(holder)
        try:
            self.exclusively(leave, Deadline(CLOSE_S))
        except (StoreError, OSError):
            pass  # its byte is unlocked anyway
        finally:
            self.follower.remove_member(member)
            if not self.follower.members:
                self.follower.log.close()
            self.changed.notify_all()

    # Reading and writing

    def look(self, deadline: Deadline | None = None) -> None:
        """Apply the records of others. With a deadline, wait for the mutex if it is needed."""
        fresh = self.follower.look()
        if fresh and not self.follower.dead():
            return
        patience = Deadline(0) if fresh or deadline is None else deadline
        try:
            self.exclusively(_nothing, patience)
        except StoreTimeout:
            if patience is deadline:
                raise

    def exclusively(self, work: Callable[[ReplicaFollower], _T], deadline: Deadline) -> _T:
        """Call `work` with the mutex held and all records of others applied. Raises StoreTimeout without calling it."""
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
            except BaseException:  # Ctrl-C before it was released
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
        """Return whether a caller is the first in line for its queue, and the queue has an item."""
        key = self.line[who]
        waiting = [one for one, queue in self.line.items() if queue == key]
        return waiting[0] is who and self.replica.has_item(key)

    def wait_for(self, ready: Callable[[], object], check_open: Callable[[], None], deadline: Deadline) -> bool:
        """Sleep, and poll if no other thread does, until `ready()`; return False at the deadline."""
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


def _nothing(_: ReplicaFollower) -> None:
    pass


_shared_files: weakref.WeakValueDictionary[tuple[int, int], SharedFile] = weakref.WeakValueDictionary()
_files_lock = threading.Lock()


def open_shared(path: str, deadline: Deadline, tidy: bool) -> tuple[SharedFile, int]:
    """Become a member of the store in a file; return this process's share of it, and the member's number."""
    while True:
        with _files_lock:
            shared = _shared_files.get(_identity(path))
            if shared is None or shared.closed or shared.pid != os.getpid():
                shared = SharedFile(path, deadline)
                _shared_files[shared.follower.log.identity] = shared
        member = shared.add_member(tidy)
        if member is not None:
            return shared, member


def _identity(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return (-1, -1)
    return status.st_dev, status.st_ino


def _leave_to_parent() -> None:
    """In a forked child: close the parent's files, and replace locks that its threads may have held."""
    global _files_lock
    _files_lock = threading.Lock()
    for shared in list(_shared_files.values()):
        shared.lock = threading.Lock()
        shared.changed = threading.Condition(shared.lock)
        shared.follower.log.close()
    _shared_files.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
