"""Lock: one holder at a time; it is released when the holder's session ends.

On our server it leaves nothing behind. On any other store it keeps one key, `lock:NAME`.
"""

from __future__ import annotations

from typing import Any

from rallypoint.core.machines import lock
from rallypoint.deadline import Timeout
from rallypoint.errors import RallypointError, ServerRestarted, SessionLost, StoreClosed
from rallypoint.recipes.arguments import name_of
from rallypoint.recipes.hosting.shared_object import Progress, Recipe, SharedObject

__all__ = ["Lock"]


class Lock(Recipe):
    """A fair (first come, first served) lock shared by the processes of a job; a context manager.

    It is tied to the session of its store. Pass `fence`, which grows with every holder, to the resource that the lock
    protects, so that it can reject a holder that lost the lock without knowing: a holder cut off from a recovering
    server may believe that it has the lock for the whole recovery time. A `with` block whose lock was lost meanwhile
    raises SessionLost at its end.
    """

    def __init__(self, store: Any, name: str, member: str = "holder", progress: Progress | None = None) -> None:
        self._object = SharedObject("lock", store, name)
        self._member = name_of(member)
        self._progress = progress
        self._call = 0
        self.fence = 0
        """The fencing token of this holder, larger than all earlier ones; 0 before the first acquire."""

    def acquire(self, timeout: Timeout | None = None) -> int:
        """Acquire the lock, and return its fence. Raises MembersMissing, which names the holder, at the timeout."""
        if self._call:
            raise RuntimeError(f"{self._object.title} is already held by this object; use a separate Lock per user")
        deadline = self._object.deadline(timeout)
        call, fence = self._object.perform(self._member, lock.LockAcquire(), lock.LockRelease, deadline, self._progress)
        self._call, self.fence = call, int(fence)
        return self.fence

    def release(self) -> bool:
        """Release the lock; return whether this object still held it. If that fails, it can be repeated."""
        call, self._call = self._call, 0
        if not call:
            raise RuntimeError(f"{self._object.title} is not held by this object")
        try:
            outcome = self._object.act(self._member, self._object.next_call(), lock.LockRelease(call), 0.0)
        except (SessionLost, ServerRestarted, StoreClosed):
            raise  # the lock was lost with the session
        except BaseException:
            self._call = call  # it may still be held
            raise
        return bool(outcome[0])

    @property
    def lost(self) -> bool:
        """Whether the lock was acquired here and lost since; each access asks the store."""
        if not self._call:
            return False
        try:
            outcome = self._object.act(self._member, self._call, lock.LockQuery(), 0.0)
        except RallypointError:
            return True
        return outcome[0] != self.fence

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Release the lock. Raises SessionLost if it was lost before, unless the block itself raised."""
        try:
            if not self.release():
                why = f"{self._object.title} (fence {self.fence}) was lost before it was released"
                raise SessionLost(peer=self._object.label, why=why)
        except RallypointError:
            if kind is None:
                raise
