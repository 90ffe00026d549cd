"""The barrier machine: everybody waits until everybody is there, again and again.

Members are told apart by name, so arriving twice counts once, also from a process that took another's place. A round
ends when all of its members are there, and it opens; or when one that had arrived is lost, and it breaks: every waiter
is told who was lost, for nobody may wait for the dead. One that gives up in time (a time-out, Ctrl-C) has withdrawn:
the others go on waiting, and are told when they ask why. For those who have not looked yet, the calls of the last round
that opened are remembered until the next one opens, which nobody misses; a round may break without some, so those that
broke are remembered by member.

Rejected: to let a broken round open without the lost. Who calls a barrier does so because it needs all the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta, Struct, field

from rallypoint.core.machine import (
    MAX_MEMBERS,
    WAIT,
    Call,
    Command,
    Done,
    Machine,
    Name,
    Refused,
    Step,
    Undo,
    Waiting,
    disagreement,
    listed,
    waiting_for,
)

__all__ = ["Arrive", "Barrier", "Broken", "Members", "Withdraw", "broken_for", "names_of"]

Members = Annotated[int, Meta(ge=1, le=MAX_MEMBERS)] | Annotated[list[Name], Meta(min_length=1, max_length=MAX_MEMBERS)]
"""How many members there are, who are then called 0 to n-1, or their names."""


def names_of(members: int | list[str]) -> list[str]:
    """Return the names of all members, each once."""
    return [str(number) for number in range(members)] if isinstance(members, int) else list(dict.fromkeys(members))


class Arrive(Command, tag="barrier.arrive"):
    """Arrive, and wait for the others; or do not, and be counted also if this member then goes its way."""

    members: Members
    waits: bool = True

    @property
    def weight(self) -> int:
        """The names that it lists."""
        return sum(map(len, self.members)) if isinstance(self.members, list) else 0


class Withdraw(Undo, tag="barrier.withdraw"):
    """Take an arrival back, unless the barrier has opened."""


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


class Barrier(Machine, kw_only=True):
    """Who has arrived in this round, and how those before ended."""

    kind = "barrier"

    members: int | list[str] = 0
    calls: dict[str, Call] = field(default_factory=dict)
    arrived: dict[str, int] = field(default_factory=dict)
    """By how many calls each member is here: one, as a rule."""

    passing: dict[str, None] = field(default_factory=dict)
    """The calls that do not wait."""

    withdrawn: dict[str, None] = field(default_factory=dict)
    opened: dict[str, Call] = field(default_factory=dict)
    """The calls of the last round that opened."""

    broken: dict[str, Broken] = field(default_factory=dict)
    """Of members that came to rounds that broke since, the last of these."""

    def apply(self, call: Call, command: Arrive | Withdraw, stamp: int) -> Step:
        """Arrive, look, or withdraw."""
        if isinstance(command, Withdraw):
            return self._withdraw(call, f"{call.session}/{command.call}")
        call_id = call.id
        if call_id in self.calls:
            return Step(Done() if call_id in self.passing else WAIT)
        over = self._how_it_ended(call, call_id)
        if over is not None:
            return Step(over)
        refusal = self._refuse(call, command.members)
        if refusal is not None:
            return Step(refusal)
        self.members = command.members
        self.calls[call_id] = call
        self.arrived[call.member] = self.arrived.get(call.member, 0) + 1
        self.withdrawn.pop(call.member, None)
        if not command.waits:
            self.passing[call_id] = None
        if len(self.arrived) < (self.members if isinstance(self.members, int) else len(set(self.members))):
            return Step(WAIT if command.waits else Done(), True)
        return Step(Done(), True, [other for other in self._end([]) if other is not call], Done())

    def lost(self, session: str, stamp: int) -> Step:
        """Break the round if a member that had arrived is here no more."""
        theirs = [call for call in self.calls.values() if call.session == session and call.id not in self.passing]
        if not theirs:
            return Step(Done())
        lost = [str(call) for call in theirs if self._gone(call)]
        if not lost:
            return Step(Done(), True)
        return Step(Done(), True, self._end(lost), Refused("MembersLost", {"lost": lost}))

    def keeps(self, call_id: str) -> bool:
        """Say whether a call waits."""
        return call_id in self.calls and call_id not in self.passing

    def sessions(self) -> set[str]:
        """Return the sessions of those who have arrived."""
        return {call.session for call in self.calls.values() if call.id not in self.passing}

    def why(self, call: Call) -> Waiting:
        """Name the missing."""
        names = names_of(self.members)
        missing = [name for name in names if name not in self.arrived]
        return waiting_for(f"{len(self.arrived)} of {len(names)} members are here", missing, self.withdrawn)

    @property
    def idle(self) -> bool:
        """Whether nobody waits."""
        return not self.calls

    def _refuse(self, call: Call, members: int | list[str]) -> Refused | None:
        if self.calls and members != self.members:
            other = next(iter(self.calls.values()))
            return disagreement("members", _told(members), _told(self.members), other)
        if isinstance(members, list):
            known = call.member in members
        else:
            known = call.member.isdecimal() and str(int(call.member)) == call.member and int(call.member) < members
        return None if known else Refused("NotAMember", {"member": call.member, "members": _told(members)})

    def _withdraw(self, call: Call, arrival: str) -> Step:
        there = self.calls.get(arrival)
        if there is not None:
            if self._gone(there):
                self.withdrawn[there.member] = None
            if not self.calls:
                self.withdrawn = {}  # there is nobody to tell
            return Step(Done(), True)
        over = self._how_it_ended(call, arrival)
        return Step(Done([None]) if over == Done() else over or Done())

    def _gone(self, call: Call) -> bool:
        """Take out a call, and say whether its member is here no more."""
        del self.calls[call.id]
        self.passing.pop(call.id, None)
        self.arrived[call.member] -= 1
        if self.arrived[call.member]:
            return False
        del self.arrived[call.member]
        return True

    def _end(self, lost: list[str]) -> list[Call]:
        """End the round; return those who waited for that."""
        waited = list(self.calls.values())
        if self.passing:
            waited = [call for call in waited if call.id not in self.passing]
        if lost:
            self.broken.update(broken_for(self.calls.values(), lost))
        else:
            self.opened, self.broken = self.calls, {}
        self.calls, self.arrived, self.passing, self.withdrawn = {}, {}, {}, {}
        return waited

    def _how_it_ended(self, call: Call, arrival: str) -> Done | Refused | None:
        """Say how the round of an arrival ended, if it has."""
        if arrival in self.opened:
            return Done()
        broken = self.broken.get(call.member)
        return Refused("MembersLost", {"lost": broken.lost}) if broken and arrival in broken.calls else None


Arrive.machine = Withdraw.machine = Barrier


def _told(members: int | list[str]) -> str:
    if isinstance(members, int):
        return f"{members} members, 0 to {members - 1}"
    return f"{len(members)} members: {listed(members)}"
