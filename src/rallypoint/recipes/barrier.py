"""Barrier: nobody goes on before everybody is there, and who is missing is named.

On our server it leaves nothing behind. On another store it keeps one key, `barrier:NAME`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rallypoint.core import barrier
from rallypoint.deadline import Deadline, Timeout
from rallypoint.recipes.hosting import Object, Progress

__all__ = ["Barrier"]


class Barrier:
    """A point that all members reach before any goes on, as often as they like.

    `members` is how many there are, called 0 to n-1, or a list of their names. All members must say the same.
    """

    def __init__(self, store: Any, name: str, members: int | Sequence[str], progress: Progress | None = None) -> None:
        self._object = Object("barrier", store, name)
        self._last = Object("barrier", store, f"{name}/out")
        self._members = _checked(members)
        self._progress = progress

    def __repr__(self) -> str:
        return repr(self._object)

    def wait(self, member: int | str, timeout: Timeout | None = None) -> None:
        """Arrive, and return when all members have.

        Raises MembersMissing when they have not in time (this member has then withdrawn), MembersLost at once when one
        that had arrived dies, NotAMember and Disagreement on what cannot be.
        """
        self._arrive(self._object, member, self._object.deadline(timeout))

    def enter(self, member: int | str, timeout: Timeout | None = None) -> None:
        """Begin something together: return when all members have come."""
        self.wait(member, timeout)

    def leave(self, member: int | str, timeout: Timeout | None = None, last: int | str | None = None) -> None:
        """End it together: return when all members have come. The member `last` returns when all others have returned.

        All must name the same one: whoever hosts what the others still use.
        """
        deadline = self._object.deadline(timeout)
        self._arrive(self._object, member, deadline)
        if last is None:
            return
        if str(member) == str(last):
            self._arrive(self._last, member, deadline)
        else:
            command = barrier.Arrive(self._members, waits=False)
            self._last.act(str(member), self._last.next_call(), command, 0.0)

    def _arrive(self, where: Object, member: int | str, deadline: Deadline) -> None:
        where.perform(_name(member), barrier.Arrive(self._members), barrier.Withdraw, deadline, self._progress)


def _checked(members: int | Sequence[str]) -> int | list[str]:
    if isinstance(members, (bool, str, bytes)):
        raise TypeError(f"members must be their number or a list of names, not {members!r}")
    if isinstance(members, int):
        if members < 1:
            raise ValueError(f"a barrier needs at least one member, not {members}")
        return members
    names = list(members)
    if not names:
        raise ValueError("a barrier needs at least one member, and the list of names is empty")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"members must be their number or a list of names, and {name!r} is no name")
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise ValueError(f"every member must be named once, but {twice[0]!r} is named twice")
    return names


def _name(member: int | str) -> str:
    if isinstance(member, bool) or not isinstance(member, (int, str)):
        raise TypeError(f"a member must be a number or a name, not {member!r}")
    return str(member)
