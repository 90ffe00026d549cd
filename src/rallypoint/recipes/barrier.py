"""Barrier: no member continues before all have arrived; a timeout names the missing members.

On our server it leaves no key behind. On any other store it leaves one, `barrier:NAME`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rallypoint.core.machines import barrier
from rallypoint.core.machines.machine import Command, Undo
from rallypoint.deadline import Deadline, Timeout
from rallypoint.recipes.arguments import members_of, name_of
from rallypoint.recipes.hosting.shared_object import Progress, Recipe, SharedObject

__all__ = ["Barrier"]


class Barrier(Recipe):
    """A reusable point that all members must reach before any continues.

    `members` is their number (they are then called 0 to n-1) or a list of their names. It must be the same on all
    members.
    """

    def __init__(self, store: Any, name: str, members: int | Sequence[str], progress: Progress | None = None) -> None:
        self._object = SharedObject("barrier", store, name)
        self._members = members_of(members)
        self._arrival = barrier.BarrierArrive(self._members)
        self._progress = progress

    def wait(self, member: int | str, timeout: Timeout | None = None) -> None:
        """Arrive, and return when all members have arrived.

        Raises MembersMissing at the timeout (and withdraws this member), MembersLost at once when a member that had
        arrived dies, NotAMember for an unknown member, Disagreement if the members differ in `members` or `last`.
        """
        self._perform(member, self._arrival, barrier.BarrierWithdraw, self._object.deadline(timeout))

    def enter(self, member: int | str, timeout: Timeout | None = None) -> None:
        """Start a section together: return when all members have arrived."""
        self.wait(member, timeout)

    def leave(self, member: int | str, timeout: Timeout | None = None, last: int | str | None = None) -> None:
        """End a section together: return when all members have arrived. The member `last` returns after all others.

        Use `last` for the member that hosts a resource of the others; all must give the same one. A member that dies
        or closes its store after arriving counts as having left. Raises the errors of `wait`; in `last`, MembersMissing
        also names the members that have not left.
        """
        deadline = self._object.deadline(timeout)
        arrival = self._arrival if last is None else barrier.BarrierArrive(self._members, name_of(last))
        number = self._perform(member, arrival, barrier.BarrierWithdraw, deadline)
        if last is not None:
            self._perform(member, barrier.BarrierLeave(number), barrier.BarrierUndoLeave, deadline)

    def _perform(self, member: int | str, command: Command, undo: type[Undo], deadline: Deadline) -> int:
        return self._object.perform(name_of(member), command, undo, deadline, self._progress)[0]
