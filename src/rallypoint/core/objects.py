"""The shared objects that a server hosts: machines by name, next to the keys, and the calls that wait on them.

A call that must wait is its session's as any other wait is, and there is one record of it (`CallWaiter`) for as long as
the machine keeps something of it. Its deadline is not the caller's: it is when the caller wants to hear why it still
waits, and it then looks again with the same call. Machines hear of sessions that have ended. One that is idle is
dropped, unless a call that was between two looks when its wait ended has yet to look (`core/late_calls.py`). What
machines keep counts as the engine's bytes do.

A few idle machines are remembered, for those who come back: so many, and so many bytes, of which no session is charged.
Machines' timers are part of the state, the clock is not: a host reads `timers`, and calls `fire` when one is due by its
own clock. A timer that changed since the host last looked is in `changed_timers`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from rallypoint.core.call_waiter import CallWaiter
from rallypoint.core.doubts import Doubts
from rallypoint.core.engine import ENTRY_BYTES, Engine
from rallypoint.core.late_calls import Held, LateCalls, Place
from rallypoint.core.machine import WAIT, Call, Command, Done, Machine, Outcome, Refused, Step, Undo, Waiting
from rallypoint.core.records import show
from rallypoint.core.shared_answer import Encoded, as_shared, encode_once

__all__ = ["Objects", "call_bytes"]

MAX_IDLE = 256
"""How many machines are remembered though they are idle."""

MAX_IDLE_BYTES = 16 * 1024 * 1024
"""How much they may keep: the ranks of one run of as many nodes as there may be."""

_NONE: Mapping[Held, CallWaiter] = MappingProxyType({})


class Objects:
    """All machines of one namespace."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._machines: dict[Place, Machine] = {}
        self._calls: dict[str, dict[Held, CallWaiter]] = {}
        """The calls that wait, or that machines keep something of, by session."""

        self.late = LateCalls(engine)
        self.timers: dict[Place, tuple[int, float]] = {}
        """The timers that are set: each its number, and for how many seconds."""

        self.changed_timers: list[Place] = []
        self._idle: dict[Place, int] = {}
        self._idle_bytes = 0
        self.doubts = Doubts()

    def act(self, name: bytes, call: Call, command: Command, owner: Any, timeout_s: float, number: int) -> Any:
        """Carry out a command on the object of that name; return its outcome, or a waiter if it has to wait."""
        place = (command.machine, name)
        known: CallWaiter | None = None
        if isinstance(command, Undo):
            held = (place, f"{call.session}/{command.call}")
            known = self._calls.get(call.session, _NONE).get(held)
            if known is not None and known.waits:
                self._wake(known, Refused("Undone", {}))
        else:
            held = (place, call.id)
            known = self._calls.get(call.session, _NONE).get(held)
            if known is None:
                self._make_room(held, CallWaiter(owner, number, call, command, name, 0, False))
            elif known.call.member != call.member:
                return _used_by_another(call, known.call.member)
        if self.late:
            self.late.looked(held)
        machine = self.begin(place)
        step = machine.apply(call, command, self._engine.revision + 1)
        outcome = self.conclude(held, machine, step, call, command, timeout_s)
        return self._wait(held, owner, number, call, command) if outcome is WAIT else outcome

    def begin(self, place: Place) -> Machine:
        """Return the machine of a place, which is about to be changed."""
        if self._idle:
            self._idle_bytes -= self._idle.pop(place, 0)
        machine = self._machines.get(place)
        if machine is None:
            machine = self._machines[place] = place[0]()
        return machine

    def conclude(
        self, held: Held, machine: Machine, step: Step, call: Call, command: Command, timeout_s: float
    ) -> Outcome:
        """After a call's step: do what follows for others, and return what it comes to; `WAIT` if it has to wait."""
        if timeout_s > 0 and not isinstance(command, Undo) and self.doubts.of(held, step.outcome, machine):
            return WAIT
        if step.outcome is WAIT:
            return self._follow_up(held[0], machine, step)
        known = self._calls.get(call.session, _NONE).get(held)
        freed = self._settle(held, machine, call.session)
        outcome = self._follow_up(held[0], machine, step, freed)
        if known is not None and known.waits and not machine.keeps(held[1]):
            self._wake(known, Waiting("the same call was made again, and is over"))
        return outcome

    def _wait(self, held: Held, owner: Any, number: int, call: Call, command: Command) -> CallWaiter:
        """Let a call wait, in the place of an earlier wait of the same call."""
        theirs = self._calls[call.session]
        known = theirs[held]
        theirs[held] = waiter = CallWaiter(owner, number, call, command, held[0][1], known.size)
        if known.waits:
            known.waits = False  # it is no longer in doubt, or the new one is
            self._engine.answer_call(known, Waiting("the same call was made again, and waits in its place"))
        return waiter

    def why(self, waiter: CallWaiter) -> Waiting:
        """Say what a call waits for, when its time is over; it waits no more."""
        doubt = self.forget(waiter)
        machine = self._machines.get((waiter.command.machine, waiter.name))
        return doubt or (Waiting("it was taken back") if machine is None else machine.why(waiter.call))

    def forget(self, waiter: CallWaiter) -> Waiting | None:
        """Note that a call waits no more, for now; say why it waited, if because of a doubt."""
        if not waiter.waits:
            return None
        waiter.waits = False
        return self.doubts.settle(((waiter.command.machine, waiter.name), waiter.call.id)) if self.doubts else None

    def back(self, session: str) -> None:
        """Note that a session has a connection again, or has ended: calls that are in doubt look again."""
        self.doubts.over(session)
        for held in self.doubts:
            waiter = self._calls[held[1].rpartition("/")[0]][held]
            self._engine.answer_call(waiter, self.forget(waiter))

    @property
    def waiting(self) -> int:
        """How many calls wait."""
        return sum(waiter.waits for theirs in self._calls.values() for waiter in theirs.values())

    def end(self, session: str) -> None:
        """Tell all machines that a session has ended; a bug in one of them is not the others'."""
        calls = self._calls.pop(session, {})
        for waiter in calls.values():
            self._engine.charge(b"", -waiter.size)
            self.forget(waiter)
        places = dict.fromkeys(place for place, _ in calls)
        for late in list(self.late.by_session.get(session, ())):
            places[late[0]] = None
            self.late.looked(late)
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
            known = self._calls.get(call.session, _NONE).get((place, call.id))
            self._settle((place, call.id), machine, call.session)
            if known is not None and known.waits:
                self._wake(known, Waiting("a later call of the same process has its place"))
        encoded: Encoded = {}
        if step.told is not None:
            freed += self._tell(place, machine, step, encoded)
        elif step.woken:
            freed += self._let_look(place, machine, step.woken, encoded)
        if self.late and place in self.late:
            self.late.count(place, freed)
        elif machine.idle:
            self._put_away(place, machine)
        if machine.alarm != self.timers.get(place):
            self._set_timer(place, machine.alarm)
        return as_shared(step.outcome, encoded) if encoded else step.outcome

    def _let_look(self, place: Place, machine: Machine, woken: Iterable[Call], encoded: Encoded) -> int:
        """Answer those calls that are over, each by itself; return how much is no longer counted for them."""
        freed = 0
        for call in woken:
            held = (place, call.id)
            known = self._calls.get(call.session, _NONE).get(held)
            outcome: Outcome = WAIT
            if known is not None and known.waits:
                outcome = machine.apply(call, known.command, self._engine.revision + 1).outcome
            freed += self._settle(held, machine, call.session)  # after its look, by which it may have come again
            if known is None or not known.waits:
                self.late.add(held, call.session)
            elif isinstance(outcome, (Done, Refused)):
                self._wake(known, encode_once(outcome, encoded))
        return freed

    def _tell(self, place: Place, machine: Machine, step: Step, encoded: Encoded) -> int:
        """Answer calls that all come to the same; return how much is no longer counted for them."""
        freed, told, waiters, doubts = 0, 0, [], bool(self.doubts)
        table, keeps = self._calls, machine.keeps
        for call in step.woken:
            session = call.session
            call_id = f"{session}/{call.number}"
            held = (place, call_id)
            theirs = table.get(session)
            waiter = None if theirs is None else theirs.get(held)
            if waiter is None or theirs is None or not waiter.waits:  # it is between two looks
                freed += self._settle(held, machine, session)
                self.late.add(held, session)
                continue
            if not keeps(call_id):
                told += waiter.size
                if len(theirs) == 1:
                    del table[session]
                else:
                    del theirs[held]
            if doubts:
                self.doubts.settle(held)
            waiter.waits = False
            waiters.append(waiter)
        self._engine.charge(b"", -told)
        if waiters and step.told is not None:
            self._engine.answer_calls(waiters, encode_once(step.told, encoded))
        return freed + told

    def _wake(self, waiter: CallWaiter, answer: Done | Refused | Waiting) -> None:
        """End the wait of a call; on `Waiting` it looks again."""
        self.forget(waiter)
        self._engine.answer_call(waiter, answer)

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

    def _make_room(self, held: Held, waiter: CallWaiter) -> None:
        """Count what a call will make the machine keep; refuse it, before anything changes, where the store is full."""
        waiter.size = call_bytes(waiter.name, waiter.call.member, waiter.command)
        self._engine.charge(waiter.name, waiter.size)
        self._calls.setdefault(waiter.call.session, {})[held] = waiter

    def _settle(self, held: Held, machine: Machine, session: str) -> int:
        """Stop counting a call of which the machine keeps nothing; return how much that was."""
        theirs = self._calls.get(session)
        if theirs is None or held not in theirs or machine.keeps(held[1]):
            return 0
        freed = theirs.pop(held).size
        self._engine.charge(b"", -freed)
        if not theirs:
            del self._calls[session]
        return freed


def call_bytes(name: bytes, member: str, command: Command) -> int:
    """Return what a call costs: its wait, and what the machine keeps of it."""
    return 2 * len(name) + 3 * ENTRY_BYTES + len(member) + command.weight


def _used_by_another(call: Call, member: str) -> Refused:
    """Refuse a call whose number is that of another member's call, which is not over."""
    other = f"{member}, in the same session"
    return Refused(
        "Disagreement", {"what": f"call {call.number}", "mine": call.member, "theirs": member, "other": other}
    )
