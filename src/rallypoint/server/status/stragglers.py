"""Stragglers: who came last to each barrier and exchange, how often, and how late.

Some member is always the last; what counts is how long the others had to wait for it. So a member is charged with the
time between its arrival and the median arrival of its round. Members that come together, as those behind one relay do,
share the blame only if they are more than half.

The tables are bounded. When one is full, the object that was used least recently goes, or the member that cost least.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["MAX_MEETINGS", "MAX_STRAGGLERS", "MeetingKey", "Straggler", "StragglerTable"]

MAX_MEETINGS = 256
"""Barriers and exchanges whose stragglers are remembered."""

MAX_STRAGGLERS = 32
"""Members remembered for each of them."""


class MeetingKey(NamedTuple):
    """A barrier or an exchange: its namespace, its kind, and its name."""

    namespace: int
    kind: str
    name: bytes


class Straggler:
    """How often a member was the last, and how late."""

    __slots__ = ("late_s", "times", "worst_s")

    def __init__(self) -> None:
        self.times = 0
        self.late_s = self.worst_s = 0.0


class StragglerTable:
    """The stragglers of all barriers and exchanges of one server."""

    def __init__(self) -> None:
        self._meetings: dict[MeetingKey, tuple[list[int], dict[str, Straggler]]] = {}

    def add(self, key: MeetingKey, member: str, late_s: float) -> None:
        """Record that a round is complete, and which member came last, how late."""
        found = self._meetings.pop(key, None)
        if found is None:
            found = ([0], {})
            if len(self._meetings) >= MAX_MEETINGS:
                del self._meetings[next(iter(self._meetings))]
        self._meetings[key] = found  # last in the order of use
        count, members = found
        count[0] += 1
        straggler = members.get(member)
        if straggler is None:
            if len(members) >= MAX_STRAGGLERS:
                del members[min(members, key=lambda name: members[name].late_s)]
            straggler = members[member] = Straggler()
        straggler.times += 1
        straggler.late_s += late_s
        straggler.worst_s = max(straggler.worst_s, late_s)

    def __iter__(self) -> Iterator[tuple[MeetingKey, int, str, Straggler]]:
        """Yield each object, its number of rounds, and a member that was last."""
        for key, (count, members) in self._meetings.items():
            for member, straggler in members.items():
                yield key, count[0], member, straggler

    def forget(self, namespace: int) -> None:
        """Drop what belongs to a namespace that is gone."""
        for key in [key for key in self._meetings if key.namespace == namespace]:
            del self._meetings[key]
