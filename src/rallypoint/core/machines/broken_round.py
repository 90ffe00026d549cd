"""The record of a barrier or exchange round that broke because a member was lost.

A call that was between two checks of its wait when the round broke checks once more, and must learn of it. A round may
break before some members arrive, so broken rounds are recorded per member: the last one at which the member arrived.

Rejected: remembering only the last broken round, as for completed rounds. A member that missed two would not learn of
the first, and would wait for the lost member.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from rallypoint.core.machines.machine import Call

__all__ = ["Broken", "broken_for"]


class Broken(Struct, array_like=True):
    """A broken round as one member remembers it: its calls, and the lost members."""

    calls: list[str]
    lost: list[str]


def broken_for(calls: Iterable[Call], lost: list[str]) -> dict[str, Broken]:
    """Return what the members of a broken round remember."""
    broken: dict[str, Broken] = {}
    for call in calls:
        broken.setdefault(call.member, Broken([], lost)).calls.append(call.id)
    return broken
