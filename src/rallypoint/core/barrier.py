"""The barrier machine: everybody waits until everybody is there, again and again.

Members are told apart by name, so arriving twice counts once, also from a process that took another's place. A round
ends when all of its members are there, and it opens; or when one that had arrived is lost, and it breaks: every waiter
is told who was lost, for nobody may wait for the dead. One that gives up in time (a time-out, Ctrl-C) has withdrawn:
the others go on waiting, and are told when they ask why. For those who have not looked yet, the calls of the last round
that opened are remembered until the next one opens, which nobody misses; a round may break without some, so those that
broke are remembered by member.

A round may name one who is to be the last out. When it has opened, all others are *inside* until they leave, give up,
or their session ends, for the dead use nothing any more; the last one leaves when nobody is inside. So whoever is
inside hangs on a session, as all others do, and nothing stays when nobody is here, however the last one ended.

Rejected: to let a broken round open without the lost. Who calls a barrier does so because it needs all the others.
Rejected: to count those who have left, at a second barrier, where they do not wait. If the last one never came there,
they would stay, and be taken for those of the next job of that name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from msgspec import Meta, field

from rallypoint.core.broken_round import Broken, broken_for
from rallypoint.core.machine import (
    MAX_MEMBERS,
    WAIT,
    WAITS,
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

__all__ = ["Arrive", "Barrier", "Leave", "Members", "Stay", "Withdraw", "names_of"]

Members = Annotated[int, Meta(ge=1, le=MAX_MEMBERS)] | Annotated[list[Name], Meta(min_length=1, max_length=MAX_MEMBERS)]
"""How many members there are, who are then called 0 to n-1, or their names."""


def names_of(members: int | list[str]) -> list[str]:
    """Return the names of all members, each once."""
    return [str(number) for number in range(members)] if isinstance(members, int) else list(dict.fromkeys(members))


class Arrive(Command, tag="barrier.arrive"):
    """Arrive, and wait for the others; where one is to be the last out, all have to `Leave` after that."""

    members: Members
    last: Name = ""

    @property
    def weight(self) -> int:
        """The names that it lists."""
        return sum(map(len, self.members)) if isinstance(self.members, list) else 0


class Withdraw(Undo, tag="barrier.withdraw"):
    """Take an arrival back, unless the barrier has opened; this member is then not inside."""


class Leave(Command, tag="barrier.leave"):
    """Leave the round of an arrival, given by its number; the last one waits until all others have."""

    arrival: int


class Stay(Undo, tag="barrier.stay"):
    """Take a leave back that waits, unless all others have left."""


class Barrier(Machine, kw_only=True):
    """Who has arrived in this round, and how those before ended."""

    kind = "barrier"

    members: int | list[str] = 0
    size: int = 0
    """How many members that are, each counted once."""

    calls: dict[str, Call] = field(default_factory=dict)
    arrived: dict[str, int] = field(default_factory=dict)
    """By how many calls each member is here: one, as a rule."""

    last: str = ""
    """Who is to be the last out of this round."""

    withdrawn: dict[str, None] = field(default_factory=dict)
    opened: dict[str, Call] = field(default_factory=dict)
    """The calls of the last round that opened."""

    broken: dict[str, Broken] = field(default_factory=dict)
    """Of members that came to rounds that broke since, the last of these."""

    last_out: str = ""
    """Who is the last out of the last round that opened."""

    inside: dict[str, Call] = field(default_factory=dict)
    """Those of its calls for whom the last one waits."""

    leaving: dict[str, Call] = field(default_factory=dict)
    """The last one's calls, while it waits for them."""

    def apply(self, call: Call, command: Arrive | Withdraw | Leave | Stay, stamp: int) -> Step:
        """Arrive, look, withdraw, or leave."""
        if not isinstance(command, Arrive):
            return self._other(call, command)
        call_id = call.id
        if call_id in self.calls:
            return Step(WAIT)
        over = self._how_it_ended(call, call_id)
        if over is not None:
            return Step(over)
        refusal = self._refuse(call, command)
        if refusal is not None:
            return Step(refusal)
        if not self.calls:
            self.members, self.last = command.members, command.last
            self.size = command.members if isinstance(command.members, int) else len(dict.fromkeys(command.members))
        self.calls[call_id] = call
        self.arrived[call.member] = self.arrived.get(call.member, 0) + 1
        self.withdrawn.pop(call.member, None)
        if len(self.arrived) < self.size:
            return WAITS
        return self._open(call)

    def take_in(self, calls: Mapping[str, Call], commands: Sequence[Arrive]) -> bool:
        """Take in arrivals of which none is the last, if they are new and agree with the others."""
        members, last = (self.members, self.last) if self.calls else (commands[0].members, commands[0].last)
        if not isinstance(members, int) or last or self.broken or len(self.arrived) + len(calls) >= members:
            return False
        if any(command.members != members or command.last for command in commands):
            return False
        if not (self.calls.keys().isdisjoint(calls) and self.opened.keys().isdisjoint(calls)):
            return False
        names = [call.member for call in calls.values()]
        if not all(_is_one(name, members) for name in names):
            return False
        self.members, self.last, self.size = members, last, members
        self.calls.update(calls)
        for name in names:
            self.arrived[name] = self.arrived.get(name, 0) + 1
            self.withdrawn.pop(name, None)
        return True

    def lost(self, session: str, stamp: int) -> Step:
        """Break the round if a member that had arrived is here no more; who was inside has left."""
        theirs = [call for call in self.calls.values() if call.session == session]
        leaves = [call_id for call_id, call in self.leaving.items() if call.session == session]
        inside = [call_id for call_id, call in self.inside.items() if call.session == session]
        if not (theirs or leaves or inside):
            return Step(Done())
        for call_id in leaves:
            del self.leaving[call_id]
        left = self._left(inside)
        lost = [str(call) for call in theirs if self._gone(call)]
        if not lost:
            return Step(Done(), True, left, Done())
        waited = self._break(lost)
        return Step(Done(), True, [*left, *waited], None if left else Refused("MembersLost", {"lost": lost}))

    def keeps(self, call_id: str) -> bool:
        """Say whether a call waits, or is inside."""
        return call_id in self.calls or call_id in self.inside or call_id in self.leaving

    def sessions(self) -> set[str]:
        """Return the sessions of those who have arrived, are inside, or leave."""
        return {call.session for calls in (self.calls, self.inside, self.leaving) for call in calls.values()}

    def why(self, call: Call) -> Waiting:
        """Name the missing, or those who are still inside."""
        if call.id in self.leaving:
            inside = list(dict.fromkeys(other.member for other in self.inside.values()))
            return Waiting(f"it is to be the last out; still inside: {listed(inside)}", inside)
        names = names_of(self.members)
        missing = [name for name in names if name not in self.arrived]
        return waiting_for(f"{len(self.arrived)} of {len(names)} members are here", missing, self.withdrawn)

    @property
    def idle(self) -> bool:
        """Whether nobody waits, and nobody is inside."""
        return not self.calls and not self.inside and not self.leaving

    def _refuse(self, call: Call, command: Arrive) -> Refused | None:
        members, last = command.members, command.last
        if self.calls and members != self.members:
            return disagreement("members", _told(members), _told(self.members), next(iter(self.calls.values())))
        if self.calls and last != self.last:
            other = next(iter(self.calls.values()))
            return disagreement("last out", last or "nobody", self.last or "nobody", other)
        for name in (call.member, last) if last else (call.member,):
            if not _is_one(name, members):
                return Refused("NotAMember", {"member": name, "members": _told(members)})
        return None

    def _other(self, call: Call, command: Withdraw | Leave | Stay) -> Step:
        if isinstance(command, Leave):
            return self._leave(call, f"{call.session}/{command.arrival}")
        target = f"{call.session}/{command.call}"
        if isinstance(command, Withdraw):
            return self._withdraw(call, target)
        if self.leaving.pop(target, None) is not None:
            return Step(Done(), True)
        return Step(Done() if self.inside else Done([None]))

    def _leave(self, call: Call, arrival: str) -> Step:
        """Let one leave the round that opened last; those before are over for everybody."""
        there = self.opened.get(arrival)
        if there is None:
            return Step(Done())
        if arrival in self.inside:
            return Step(Done(), True, self._left([arrival]), Done(), [there])
        if there.member != self.last_out or not self.inside:
            return Step(Done())
        changed = call.id not in self.leaving
        self.leaving[call.id] = call
        return Step(WAIT, changed)

    def _left(self, inside: list[str]) -> list[Call]:
        """Note that calls are inside no more; return those who wait for that, if these were all."""
        for call_id in inside:
            del self.inside[call_id]
        if not inside or self.inside:
            return []
        woken, self.leaving = list(self.leaving.values()), {}
        return woken

    def _withdraw(self, call: Call, arrival: str) -> Step:
        there = self.calls.get(arrival)
        if there is not None:
            if self._gone(there):
                self.withdrawn[there.member] = None
            if not self.calls:
                self.withdrawn = {}  # there is nobody to tell
            return Step(Done(), True)
        over = self._how_it_ended(call, arrival)
        outcome = Done([None]) if over == Done() else over or Done()
        return Step(outcome, True, self._left([arrival]), Done()) if arrival in self.inside else Step(outcome)

    def _gone(self, call: Call) -> bool:
        """Take out a call, and say whether its member is here no more."""
        del self.calls[call.id]
        self.arrived[call.member] -= 1
        if self.arrived[call.member]:
            return False
        del self.arrived[call.member]
        return True

    def _open(self, call: Call) -> Step:
        """Let all go on. If some were still inside the last round, they have come again, and are not."""
        woken = [other for other in self.calls.values() if other is not call]
        dropped = list(self.inside.values())
        if self.leaving:
            woken += self.leaving.values()
            self.leaving = {}
        self.opened, self.broken, self.last_out, self.inside = self.calls, {}, self.last, {}
        if self.last:
            self.inside = {call_id: one for call_id, one in self.calls.items() if one.member != self.last}
        self.calls, self.arrived, self.withdrawn = {}, {}, {}
        return Step(Done(), True, woken, Done(), dropped)

    def _break(self, lost: list[str]) -> list[Call]:
        """End the round without some; return those who waited for it to open."""
        waited = list(self.calls.values())
        self.broken.update(broken_for(waited, lost))
        self.calls, self.arrived, self.withdrawn = {}, {}, {}
        return waited

    def _how_it_ended(self, call: Call, arrival: str) -> Done | Refused | None:
        """Say how the round of an arrival ended, if it has."""
        if arrival in self.opened:
            return Done()
        broken = self.broken.get(call.member)
        return Refused("MembersLost", {"lost": broken.lost}) if broken and arrival in broken.calls else None


Arrive.machine = Withdraw.machine = Leave.machine = Stay.machine = Barrier


def _is_one(name: str, members: int | list[str]) -> bool:
    if isinstance(members, list):
        return name in members
    return name.isdecimal() and str(int(name)) == name and int(name) < members


def _told(members: int | list[str]) -> str:
    if isinstance(members, int):
        return f"{members} members, 0 to {members - 1}"
    return f"{len(members)} members: {listed(members)}"
