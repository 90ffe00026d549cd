"""Barrier: nobody goes on before everybody is there, and who is missing is named.

On our server it leaves nothing behind. On another store it keeps one key, `barrier:NAME`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rallypoint.core import barrier
from rallypoint.core.machine import Command, Undo
from rallypoint.deadline import Deadline, Timeout
from rallypoint.recipes.hosting import Object, Progress, Recipe
from rallypoint.recipes.members import members_of, name_of

__all__ = ["Barrier"]


class Barrier(Recipe):
    """A point that all members reach before any goes on, as often as they like.

    `members` is how many there are, called 0 to n-1, or a list of their names. All members must say the same.
    """

    def __init__(self, store: Any, name: str, members: int | Sequence[str], progress: Progress | None = None) -> None:
        self._object = Object("barrier", store, name)
        self._members = members_of(members)
        self._arrival = barrier.Arrive(self._members)
        self._progress = progress

    def wait(self, member: int | str, timeout: Timeout | None = None) -> None:
        """Arrive, and return when all members have.

        Raises MembersMissing when they have not in time (this member has then withdrawn), MembersLost at once when one
        that had arrived dies, NotAMember and Disagreement on what cannot be.
        """
        self._perform(member, self._arrival, barrier.Withdraw, self._object.deadline(timeout))

    def enter(self, member: int | str, timeout: Timeout | None = None) -> None:
        """Begin something together: return when all members have come."""
        self.wait(member, timeout)

    def leave(self, member: int | str, timeout: Timeout | None = None, last: int | str | None = None) -> None:
        """End it together: return when all members have come. The member `last` returns when all others have left.

        All must name the same one: whoever hosts what the others still use. One that dies then, or whose store is
        closed, has left too. Raises what `wait` does; in the last one, MembersMissing also names who has not left.
        """
        deadline = self._object.deadline(timeout)
        arrival = self._arrival if last is None else barrier.Arrive(self._members, name_of(last))
        number = self._perform(member, arrival, barrier.Withdraw, deadline)
        if last is not None:
            self._perform(member, barrier.Leave(number), barrier.Stay, deadline)

    def _perform(self, member: int | str, command: Command, undo: type[Undo], deadline: Deadline) -> int:
        return self._object.perform(name_of(member), command, undo, deadline, self._progress)[0]
