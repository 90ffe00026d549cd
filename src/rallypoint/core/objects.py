"""The shared objects that a server hosts: machines by name, next to the keys, and the calls that wait on them.

A call that must wait is parked in the engine as any other wait is, so its owner's end and a `drop` are the engine's.
Its deadline is not the caller's: it is when the caller wants to hear why it still waits, and it then looks again with
the same call. Machines hear of sessions that have ended. One that is idle is dropped, unless a call that was between
two looks when its wait ended has yet to look. What machines keep counts as the engine's bytes do, and so does what is
kept for such a call: its round, as it was counted before, until it looks or its session ends.

A few idle machines are remembered, for those who come back: so many, and so many bytes, of which no session is charged.
Machines' timers are part of the state, the clock is not: a host reads `timers`, and calls `fire` when one is due by its
own clock. A timer that changed since the host last looked is in `changed_timers`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from rallypoint.core.doubts import Doubts
from rallypoint.core.engine import ENTRY_BYTES, Engine
from rallypoint.core.machine import WAIT, Call, Command, Done, Machine, Outcome, Refused, Step, Undo, Waiting
from rallypoint.core.records import Waiter, show
from rallypoint.core.shared_answer import Encoded, as_shared, encode_once

__all__ = ["Counted", "Objects", "Pending"]

MAX_IDLE = 256
"""How many machines are remembered though they are idle."""

MAX_IDLE_BYTES = 16 * 1024 * 1024
"""How much they may keep: the ranks of one run of as many nodes as there may be."""

Place = tuple[type[Machine], bytes]
Held = tuple[Place, str]
"""A call that a machine may keep something of: where, and the call's id."""


class Pending(NamedTuple):
    """A call that waits."""

    call: Call
    command: Command
    waiter: Waiter


class Counted(NamedTuple):
    """A call that a machine may keep something of: how many bytes are counted for it, and whose call it is."""

    size: int
    member: str


class _Late:
    """The calls at one place that have yet to look how their wait ended, and what is counted for them."""

    __slots__ = ("calls", "round", "size")

    def __init__(self) -> None:
        self.calls: dict[str, None] = {}
        self.round = 0
        """What the largest round that ended since made the machine keep."""

        self.size = 0


class Objects:
    """All machines of one namespace."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._machines: dict[Place, Machine] = {}
        self._pending: dict[Held, Pending] = {}
        self._held: dict[str, dict[Held, Counted]] = {}
        self._late: dict[Place, _Late] = {}
        self._latecomers: dict[str, dict[Held, None]] = {}
        self.timers: dict[Place, tuple[int, float]] = {}
        """The timers that are set: each its number, and for how many seconds."""

        self.changed_timers: list[Place] = []
        self._idle: dict[Place, int] = {}
        self._idle_bytes = 0
        self.doubts = Doubts()

    def act(self, name: bytes, call: Call, command: Command, owner: Any, timeout_s: float, number: int) -> Any:
        """Carry out a command on the object of that name; return its outcome, or a waiter if it has to wait."""
        place = (command.machine, name)
        machine = self._machines.get(place) or command.machine()
        if isinstance(command, Undo):
            held = (place, f"{call.session}/{command.call}")
            self._answer(held, Refused("Undone", {}))
        else:
            held = (place, call.id)
            counted = self._held.get(call.session, {}).get(held)
            if counted is None:
                self._make_room(held, call, command)
            elif counted.member != call.member:
                return _used_by_another(call, counted.member)
        if self._late:
            self._looked(held)
        if self._idle:
            self._idle_bytes -= self._idle.pop(place, 0)
        self._machines[place] = machine
        step = machine.apply(call, command, self._engine.revision + 1)
        if timeout_s <= 0 or isinstance(command, Undo) or not self.doubts.of(held, step.outcome, machine):
            freed = self._settle(held, machine, call.session) if step.outcome is not WAIT else 0
            outcome = self._follow_up(place, machine, step, freed)
            if isinstance(outcome, (Done, Refused)):
                if not machine.keeps(held[1]):
                    self._answer(held, Waiting("the same call was made again, and is over"))
                return outcome
        waiter = self._engine.park_call(name, owner, number)
        earlier = self._pending.get(held)
        self._pending[held] = waiter.call = Pending(call, command, waiter)
        if earlier is not None:
            self._engine.answer_call(earlier.waiter, Waiting("the same call was made again, and waits in its place"))
        return waiter

    def why(self, waiter: Waiter) -> Waiting:
        """Say what a call waits for, when its waiter has ended by its deadline."""
        call, command, _ = waiter.call
        doubt = self.forget(waiter)
        machine = self._machines.get((command.machine, waiter.keys[0]))
        return doubt or (Waiting("it was taken back") if machine is None else machine.why(call))

    def forget(self, waiter: Waiter) -> Waiting | None:
        """Note that the wait of a call was given up; say why it waited, if because of a doubt."""
        call, command, _ = waiter.call
        held = ((command.machine, waiter.keys[0]), call.id)
        return self._unpend(held)[1] if self._pending.get(held) is waiter.call else None

    def back(self, session: str) -> None:
        """Note that a session has a connection again, or has ended: calls that are in doubt look again."""
        self.doubts.over(session)
        for held in self.doubts:
            pending, doubt = self._unpend(held)
            if pending is not None:
                self._engine.answer_call(pending.waiter, doubt)

    def end(self, session: str) -> None:
        """Tell all machines that a session has ended; a bug in one of them is not the others'."""
        held = self._held.pop(session, {})
        for held_call, counted in held.items():
            self._engine.charge(b"", -counted.size)
            self._unpend(held_call)
        places = dict.fromkeys(place for place, _ in held)
        for late in list(self._latecomers.get(session, ())):
            places[late[0]] = None
            self._looked(late)
        for place in places:
            machine = self._machines.get(place)
            if machine is not None:
                try:
                    self._follow_up(place, machine, machine.lost(session, self._engine.revision + 1))
                except Exception as error:
                    self._engine.note_bug(error, f"the end of a session, at {machine.kind} {show(place[1])}")
        self.back(session)

    def statistics(self) -> dict[str, int]:
        """Count the machines of each kind."""
        return dict(Counter(machine.kind for machine, _ in self._machines))

    def fire(self, place: Place, number: int) -> None:
        """Do what is due when a timer has run for its time, unless it was stopped or set anew meanwhile."""
        timer = self.timers.get(place)
        if timer is not None and timer[0] == number:
            del self.timers[place]
            machine = self._machines[place]
            self._follow_up(place, machine, machine.ring(number, self._engine.revision + 1))

    def _follow_up(self, place: Place, machine: Machine, step: Step, freed: int = 0) -> Outcome:
        """After a step: number the change, answer those who need wait no more, and drop a machine that is idle.

        `freed` is what is no longer counted for the caller. Returns the step's outcome, as part of which others get.
        """
        if step.changed:
            self._engine.revision += 1
        for call in step.dropped:
            self._settle((place, call.id), machine, call.session)
            self._answer((place, call.id), Waiting("a later call of the same process has its place"))
        encoded: Encoded = {}
        for call in step.woken:
            held = (place, call.id)
            pending = self._pending.get(held)
            outcome: Outcome = WAIT
            if pending is not None:
                outcome = step.told or machine.apply(call, pending.command, self._engine.revision + 1).outcome
            freed += self._settle(held, machine, call.session)  # after its look, by which it may have come again
            if pending is None:
                self.come_late(held, call.session)
            elif isinstance(outcome, (Done, Refused)):
                self._unpend(held)
                if not self._engine.answer_call(pending.waiter, encode_once(outcome, encoded)):
                    self.come_late(held, call.session)  # its deadline passed a moment ago, and it looks again
        if self._late and place in self._late:
            self._count_late(place, freed)
        elif machine.idle:
            self._put_away(place, machine)
        if machine.alarm != self.timers.get(place):
            self._set_timer(place, machine.alarm)
        return as_shared(step.outcome, encoded) if encoded else step.outcome

    def _answer(self, held: Held, answer: Refused | Waiting) -> None:
        """End the wait of a call, if it waits; on `Waiting` it looks again."""
        pending, _ = self._unpend(held)
        if pending is not None:
            self._engine.answer_call(pending.waiter, answer)

    def _unpend(self, held: Held) -> tuple[Pending | None, Waiting | None]:
        """Let a call wait no more, and be in doubt no more; return its wait, and why it was in doubt."""
        return self._pending.pop(held, None), self.doubts.settle(held)

    def _put_away(self, place: Place, machine: Machine) -> None:
        """Drop an idle machine; of those that should last, drop those that have been idle the longest."""
        if not machine.lasts:
            self._machines.pop(place, None)
            return
        self._idle_bytes -= self._idle.pop(place, 0)
        self._idle[place] = size = machine.put_away(MAX_IDLE_BYTES)
        self._idle_bytes += size
        while len(self._idle) > MAX_IDLE or self._idle_bytes > MAX_IDLE_BYTES:
            oldest = next(iter(self._idle))
            self._idle_bytes -= self._idle.pop(oldest)
            del self._machines[oldest]

    def _set_timer(self, place: Place, timer: tuple[int, float] | None) -> None:
        """Set or stop the timer of a machine."""
        if timer is None:
            del self.timers[place]
        else:
            self.timers[place] = timer
        self.changed_timers.append(place)

    def _count_late(self, place: Place, freed: int) -> None:
        """Go on counting a round, of which nothing waits any more, for those who have yet to look how it ended."""
        late = self._late[place]
        late.round = max(late.round, freed)
        size = late.round + len(late.calls) * (len(place[1]) + ENTRY_BYTES)
        self._engine.size += size - late.size  # it is here, so it is too late to refuse it
        late.size = size

    def restore_late(self, place: Place, round_bytes: int, size: int) -> None:
        """Put back, from a snapshot, what is counted for calls that have yet to look; it is counted already."""
        late = self._late[place] = _Late()
        late.round, late.size = round_bytes, size

    def come_late(self, held: Held, session: str) -> None:
        """Note that a call, which does not wait at this moment, has yet to look how its wait ended."""
        self._late.setdefault(held[0], _Late()).calls[held[1]] = None
        self._latecomers.setdefault(session, {})[held] = None

    def _looked(self, held: Held) -> None:
        """Note that a call, if it was late, is so no more."""
        place, call_id = held
        late = self._late.get(place)
        if late is None or call_id not in late.calls:
            return
        del late.calls[call_id]
        session = call_id.rpartition("/")[0]
        del self._latecomers[session][held]
        if not self._latecomers[session]:
            del self._latecomers[session]
        if not late.calls:
            self._engine.size -= late.size
            del self._late[place]

    def _make_room(self, held: Held, call: Call, command: Command) -> None:
        """Count what a call will make the machine keep; refuse it, before anything changes, where the store is full."""
        name = held[0][1]
        parked = len(name) + ENTRY_BYTES
        size = parked + len(call.member) + command.weight + ENTRY_BYTES
        self._engine.charge(name, size, parked)  # the latter is needed if it has to wait
        self._held.setdefault(call.session, {})[held] = Counted(size, call.member)

    def _settle(self, held: Held, machine: Machine, session: str) -> int:
        """Stop counting a call of which the machine keeps nothing; return how much that was."""
        theirs = self._held.get(session)
        if theirs is None or held not in theirs or machine.keeps(held[1]):
            return 0
        freed = theirs.pop(held).size
        self._engine.charge(b"", -freed)
        if not theirs:
            del self._held[session]
        return freed


def _used_by_another(call: Call, member: str) -> Refused:
    """Refuse a call whose number is that of another member's call, which is not over."""
    other = f"{member}, in the same session"
    return Refused(
        "Disagreement", {"what": f"call {call.number}", "mine": call.member, "theirs": member, "other": other}
    )
