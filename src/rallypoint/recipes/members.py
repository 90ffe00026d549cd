"""Who takes part, checked before anything is sent: a name or a number that no host would take is refused, and said.

The limits are the machines' own (`core/machine.py`), so they are the same wherever an object lives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rallypoint.core.machine import MAX_MEMBERS, MAX_NAME

__all__ = ["count_of", "members_of", "name_of", "names_of"]

SHOWN = 40


def name_of(member: object) -> str:
    """Return what a member goes by; a number is as good as a name."""
    if isinstance(member, bool) or not isinstance(member, (int, str)):
        raise TypeError(f"a member must be a number or a name, not {member!r}")
    name = str(member)
    if len(name) > MAX_NAME:
        shown = f"{name[:SHOWN]!r}..."
        raise ValueError(f"the name of a member may have {MAX_NAME} characters, and {shown} has {len(name):,}")
    return name


def names_of(members: Iterable[str]) -> list[str]:
    """Return a list of names."""
    if isinstance(members, (str, bytes)) or not isinstance(members, Iterable):
        raise TypeError(f"members must be a list of names, not {members!r}")
    names = list(members)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"members must be a list of names, and {name!r} is no name")
    return [name_of(name) for name in names]


def count_of(number: object, what: str) -> int:
    """Return how many there are of something, if there can be so many."""
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"the number of {what} must be a whole number, not {number!r}")
    if not 1 <= number <= MAX_MEMBERS:
        raise ValueError(f"the number of {what} must be 1 to {MAX_MEMBERS:,}, not {number:,}")
    return number


def members_of(members: int | Sequence[str]) -> int | list[str]:
    """Return how many members there are, or all their names, each of which is there once."""
    if isinstance(members, int):
        return count_of(members, "members")
    names = names_of(members)
    count_of(len(names), "members")
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise ValueError(f"every member must be named once, but {twice[0]!r} is named twice")
    return names
