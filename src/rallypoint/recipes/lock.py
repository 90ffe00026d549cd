"""Lock: one holder at a time, who loses it with its life.

On our server it leaves nothing behind. On another store it keeps one key, `lock:NAME`.
"""

from __future__ import annotations

from typing import Any

from rallypoint.core import lock
from rallypoint.deadline import Timeout
from rallypoint.errors import RallypointError, SessionLost
from rallypoint.recipes.hosting import Object, Progress, Recipe
from rallypoint.recipes.members import name_of

__all__ = ["Lock"]


class Lock(Recipe):
    """A lock that the processes of a job share: a context manager, first come, first served.

    It hangs on the session of the store that it was made with. Give `fence`, which grows with every holder, along with
    whatever the lock protects, so that the work of one that lost it without knowing can be refused: one that is cut off
    from a server that recovers believes in it for as long as that may be away. A `with` block whose lock was lost
    meanwhile ends with SessionLost.
    """

    def __init__(self, store: Any, name: str, member: str = "holder", progress: Progress | None = None) -> None:
        self._object = Object("lock", store, name)
        self._member = name_of(member)
        self._progress = progress
        self._call = 0
        self.fence = 0
        """The number of this holder, larger than those of all before it; 0 when it was never held."""

    def acquire(self, timeout: Timeout | None = None) -> int:
        """Wait for the lock, and return its fence. Raises MembersMissing, which names the holder, at the timeout."""
        if self._call:
            raise RuntimeError(f"{self._object.thing} is held by this object already; make one for each user")
        deadline = self._object.deadline(timeout)
        call, fence = self._object.perform(self._member, lock.Acquire(), lock.Release, deadline, self._progress)
        self._call, self.fence = call, int(fence)
        return self.fence

    def release(self) -> bool:
        """Give it up, and say whether it was still ours."""
        call, self._call = self._call, 0
        if not call:
            raise RuntimeError(f"{self._object.thing} is not held by this object")
        outcome = self._object.act(self._member, self._object.next_call(), lock.Release(call), 0.0)
        return bool(outcome[0])

    @property
    def lost(self) -> bool:
        """Whether it was acquired here, and has gone since: asks the store."""
        if not self._call:
            return False
        try:
            outcome = self._object.act(self._member, self._call, lock.Look(), 0.0)
        except RallypointError:
            return True
        return outcome[0] != self.fence

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Release it. Raises SessionLost if it was lost before, unless the block itself has failed."""
        try:
            if not self.release():
                why = f"{self._object.thing} (fence {self.fence}) went to others before it was released"
                raise SessionLost(peer=self._object.label, why=why)
        except RallypointError:
            if kind is None:
                raise
