"""What is remembered of a round of a barrier or an exchange that broke, for a member of it was lost.

A call that was between two looks when its round broke looks once more, and has to be told. Rounds may break without
some of the members, so those that broke are remembered by member: of each, the last that it came to.

Rejected: to remember the last round that broke, as is done of those that ended well. A member that missed two would be
told nothing of the first, and wait for the lost.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from rallypoint.core.machine import Call

__all__ = ["Broken", "broken_for"]


class Broken(Struct, array_like=True):
    """A round that broke, as one member remembers it: its calls, and who was lost."""

    calls: list[str]
    lost: list[str]


def broken_for(calls: Iterable[Call], lost: list[str]) -> dict[str, Broken]:
    """Return what the members of a round that broke have to remember."""
    broken: dict[str, Broken] = {}
    for call in calls:
        broken.setdefault(call.member, Broken([], lost)).calls.append(call.id)
    return broken
