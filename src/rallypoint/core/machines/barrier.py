"""The barrier machine: every member waits until all members have arrived, round after round.

Members are identified by name, so arriving twice counts once, even from a process that replaced another. A round opens
when all of its members have arrived. It breaks when a member that had arrived is lost: every waiter gets the name of
the lost member, because nobody may wait for it. A member that gives up in time (a timeout, Ctrl-C) withdraws: the
others keep waiting, and `explain` tells them. For callers that have yet to poll, the calls of the last opened round are
remembered until the next one opens, which takes all members. A round may break before some members have arrived, so
broken rounds are remembered per member.

A round may name a member to be the last out. Once it has opened, all others are *inside* until they leave, give up, or
their session ends; the last one leaves when nobody is inside. A member is inside only as long as its session lives, so
nothing remains after all members are gone, however the last one ended.

Rejected: opening a broken round without the lost member. A member calls a barrier because it needs all others.
Rejected: counting leavers at a second barrier, where they do not wait. If the last one never arrived there, their
arrivals would remain, and count for the next job of that name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from msgspec import Meta, field

from rallypoint.core.machines.broken_round import Broken, broken_for
from rallypoint.core.machines.machine import (
    MAX_MEMBERS,
    WAIT,
    WAITS_STEP,
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
    explain_missing,
    list_names,
)

__all__ = [
    "BarrierArrive",
    "BarrierMachine",
    "BarrierLeave",
    "Members",
    "BarrierUndoLeave",
    "BarrierWithdraw",
    "names_of",
]

Members = Annotated[int, Meta(ge=1, le=MAX_MEMBERS)] | Annotated[list[Name], Meta(min_length=1, max_length=MAX_MEMBERS)]
"""The number of members, named 0 to n-1, or their names."""


def names_of(members: int | list[str]) -> list[str]:
    """Return the names of all members, each once."""
    return [str(number) for number in range(members)] if isinstance(members, int) else list(dict.fromkeys(members))


class BarrierArrive(Command, tag="barrier.arrive"):
    """Arrive and wait for the others; if the round has a last out, all must `BarrierLeave` afterwards."""

    members: Members
    last: Name = ""

    @property
    def weight(self) -> int:
        """The bytes of the listed names."""
        return sum(map(len, self.members)) if isinstance(self.members, list) else 0


class BarrierWithdraw(Undo, tag="barrier.withdraw"):
    """Take an arrival back, unless the barrier has opened; this member is then not inside."""


class BarrierLeave(Command, tag="barrier.leave"):
    """Leave the round of an arrival, given by its number; the last one waits until all others have left."""

    arrival: int


class BarrierUndoLeave(Undo, tag="barrier.stay"):
    """Take back a waiting leave, unless all others have left."""


class BarrierMachine(Machine, kw_only=True):
    """The arrivals of this round, and how earlier rounds ended."""

    kind = "barrier"

    members: int | list[str] = 0
    size: int = 0
    """The number of distinct members."""

    calls: dict[str, Call] = field(default_factory=dict)
    arrived: dict[str, int] = field(default_factory=dict)
    """The number of calls with which each member has arrived, usually one."""

    last: str = ""
    """The member that is the last out of this round."""

    withdrawn: dict[str, None] = field(default_factory=dict)
    opened: dict[str, Call] = field(default_factory=dict)
    """The calls of the last round that opened."""

    broken: dict[str, Broken] = field(default_factory=dict)
    """For each member of rounds that broke since then, the last of these rounds."""

    last_out: str = ""
    """The member that is the last out of the last opened round."""

    inside: dict[str, Call] = field(default_factory=dict)
    """The calls of that round for which the last one waits."""

    leaving: dict[str, Call] = field(default_factory=dict)
    """The leave calls of the last one, while it waits."""

    def apply(
        self, call: Call, command: BarrierArrive | BarrierWithdraw | BarrierLeave | BarrierUndoLeave, stamp: int
    ) -> Step:
        """Arrive, recheck, withdraw, or leave."""
        if not isinstance(command, BarrierArrive):
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
            return WAITS_STEP
        return self._open(call)

    def admit_all(self, calls: Mapping[str, Call], commands: Sequence[BarrierArrive]) -> bool:
        """Admit arrivals if all are new, agree with the others, and none completes the round."""
        members, last = (self.members, self.last) if self.calls else (commands[0].members, commands[0].last)
        if not isinstance(members, int) or last or self.broken or len(self.arrived) + len(calls) >= members:
            return False
        if any(command.members != members or command.last for command in commands):
            return False
        if not (self.calls.keys().isdisjoint(calls) and self.opened.keys().isdisjoint(calls)):
            return False
        names = [call.member for call in calls.values()]
        if not all(_is_member(name, members) for name in names):
            return False
        self.members, self.last, self.size = members, last, members
        self.calls.update(calls)
        for name in names:
            self.arrived[name] = self.arrived.get(name, 0) + 1
            self.withdrawn.pop(name, None)
        return True

    def session_ended(self, session: str, stamp: int) -> Step:
        """Break the round if a member that had arrived is gone; a member that was inside has left."""
        theirs = [call for call in self.calls.values() if call.session == session]
        leaves = [call_id for call_id, call in self.leaving.items() if call.session == session]
        inside = [call_id for call_id, call in self.inside.items() if call.session == session]
        if not (theirs or leaves or inside):
            return Step(Done())
        for call_id in leaves:
            del self.leaving[call_id]
        left = self._left(inside)
        lost = [str(call) for call in theirs if self._remove_arrival(call)]
        if not lost:
            return Step(Done(), True, left, Done())
        waited = self._break(lost)
        return Step(Done(), True, [*left, *waited], None if left else Refused("MembersLost", {"lost": lost}))

    def holds(self, call_id: str) -> bool:
        """Return whether a call waits to enter or to leave, or is inside."""
        return call_id in self.calls or call_id in self.inside or call_id in self.leaving

    def sessions(self) -> set[str]:
        """Return the sessions of calls that have arrived, are inside, or wait to leave."""
        return {call.session for calls in (self.calls, self.inside, self.leaving) for call in calls.values()}

    def explain(self, call: Call) -> Waiting:
        """Name the missing members, or those still inside."""
        if call.id in self.leaving:
            inside = list(dict.fromkeys(other.member for other in self.inside.values()))
            return Waiting(f"this member is the last out; still inside: {list_names(inside)}", inside)
        names = names_of(self.members)
        missing = [name for name in names if name not in self.arrived]
        return explain_missing(f"{len(self.arrived)} of {len(names)} members are here", missing, self.withdrawn)

    @property
    def idle(self) -> bool:
        """Whether nobody waits, and nobody is inside."""
        return not self.calls and not self.inside and not self.leaving

    def _refuse(self, call: Call, command: BarrierArrive) -> Refused | None:
        members, last = command.members, command.last
        if self.calls and members != self.members:
            other = next(iter(self.calls.values()))
            return disagreement("members", _describe(members), _describe(self.members), other)
        if self.calls and last != self.last:
            other = next(iter(self.calls.values()))
            return disagreement("last out", last or "nobody", self.last or "nobody", other)
        for name in (call.member, last) if last else (call.member,):
            if not _is_member(name, members):
                return Refused("NotAMember", {"member": name, "members": _describe(members)})
        return None

    def _other(self, call: Call, command: BarrierWithdraw | BarrierLeave | BarrierUndoLeave) -> Step:
        if isinstance(command, BarrierLeave):
            return self._leave(call, f"{call.session}/{command.arrival}")
        target = f"{call.session}/{command.call}"
        if isinstance(command, BarrierWithdraw):
            return self._withdraw(call, target)
        if self.leaving.pop(target, None) is not None:
            return Step(Done(), True)
        return Step(Done() if self.inside else Done([None]))

    def _leave(self, call: Call, arrival: str) -> Step:
        """Leave the last opened round; earlier rounds are over for all members."""
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
        """Record that calls are no longer inside; if nobody is, return the leave calls that wait."""
        for call_id in inside:
            del self.inside[call_id]
        if not inside or self.inside:
            return []
        woken, self.leaving = list(self.leaving.values()), {}
        return woken

    def _withdraw(self, call: Call, arrival: str) -> Step:
        there = self.calls.get(arrival)
        if there is not None:
            if self._remove_arrival(there):
                self.withdrawn[there.member] = None
            if not self.calls:
                self.withdrawn = {}  # nobody is left to inform
            return Step(Done(), True)
        over = self._how_it_ended(call, arrival)
        outcome = Done([None]) if over == Done() else over or Done()
        return Step(outcome, True, self._left([arrival]), Done()) if arrival in self.inside else Step(outcome)

    def _remove_arrival(self, call: Call) -> bool:
        """Remove a call; return whether it was the last call of its member."""
        del self.calls[call.id]
        self.arrived[call.member] -= 1
        if self.arrived[call.member]:
            return False
        del self.arrived[call.member]
        return True

    def _open(self, call: Call) -> Step:
        """Open the round. Members still inside the last round have arrived again, so they have left that round."""
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
        """End the round without the lost members; return the calls that waited for it to open."""
        waited = list(self.calls.values())
        self.broken.update(broken_for(waited, lost))
        self.calls, self.arrived, self.withdrawn = {}, {}, {}
        return waited

    def _how_it_ended(self, call: Call, arrival: str) -> Done | Refused | None:
        """Return how the round of an arrival ended, if it has."""
        if arrival in self.opened:
            return Done()
        broken = self.broken.get(call.member)
        return Refused("MembersLost", {"lost": broken.lost}) if broken and arrival in broken.calls else None


BarrierArrive.machine = BarrierWithdraw.machine = BarrierLeave.machine = BarrierUndoLeave.machine = BarrierMachine


def _is_member(name: str, members: int | list[str]) -> bool:
    if isinstance(members, list):
        return name in members
    return name.isdecimal() and str(int(name)) == name and int(name) < members


def _describe(members: int | list[str]) -> str:
    if isinstance(members, int):
        return f"{members} members, 0 to {members - 1}"
    return f"{len(members)} members: {list_names(members)}"
