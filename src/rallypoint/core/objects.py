"""The shared objects that a server hosts: machines by name, next to the keys, and the calls that wait on them.

A waiting call belongs to its session like any other wait, and has one record (`CallWaiter`) for as long as the machine
keeps anything of it. Its deadline is not the caller's: at that time the caller receives the reason why it still waits,
and polls again with the same call. Machines learn of ended sessions. An idle machine is dropped, unless a call whose
wait ended between two polls has yet to poll (`core/calls/late_calls.py`). Machines, their calls and the data that they
keep while idle are charged to the engine.

A few idle machines are remembered for returning members, limited in number and bytes.
The timers of machines are part of the state, the clock is not: a host reads `timers`, and calls `fire` when one is due
by its own clock. `changed_timers` lists the timers that changed since the host last read it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from rallypoint.core.calls.call_waiter import CallWaiter, call_bytes, object_bytes
from rallypoint.core.calls.contested_refusals import ContestedRefusals
from rallypoint.core.calls.late_calls import CallKey, LateCalls, ObjectKey
from rallypoint.core.calls.shared_answer import Encoded, as_shared, encode_once
from rallypoint.core.engine import Engine
from rallypoint.core.machines.machine import WAIT, Call, Command, Done, Machine, Outcome, Refused, Step, Undo, Waiting
from rallypoint.core.records import show

__all__ = ["Objects"]

MAX_IDLE = 256
"""How many idle machines are remembered."""

MAX_IDLE_BYTES = 16 * 1024 * 1024
"""How many bytes idle machines may keep in all: enough for the ranks of one run with the maximum number of nodes."""

_NONE: Mapping[CallKey, CallWaiter] = MappingProxyType({})


class Objects:
    """All machines of one namespace."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.machines: dict[ObjectKey, Machine] = {}
        self._calls: dict[str, dict[CallKey, CallWaiter]] = {}
        """By session: the calls that wait, and those for which a machine keeps data."""

        self.late = LateCalls(engine)
        self.timers: dict[ObjectKey, tuple[int, float]] = {}
        """The timers that are set: number and duration in seconds."""

        self.changed_timers: list[ObjectKey] = []
        self._idle: dict[ObjectKey, int] = {}
        self._idle_bytes = 0
        self.contested = ContestedRefusals()

    def act(self, name: bytes, call: Call, command: Command, owner: Any, timeout_s: float, number: int) -> Any:
        """Apply a command to the object of that name; return its outcome, or a waiter if it has to wait."""
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

    def begin(self, place: ObjectKey) -> Machine:
        """Return the machine of that key, which is about to change."""
        if place in self._idle:
            self._forget_idle(place)
        machine = self.machines.get(place)
        if machine is None:
            machine = self.machines[place] = place[0]()
            self._engine.charge_held(object_bytes(place[1]))  # `_make_room` has found room for it
        return machine

    def conclude(
        self, held: CallKey, machine: Machine, step: Step, call: Call, command: Command, timeout_s: float
    ) -> Outcome:
        """Handle the effects of a call's step on other calls; return its outcome, `WAIT` if it has to wait."""
        if timeout_s > 0 and not isinstance(command, Undo) and self.contested.contests(held, step.outcome, machine):
            return WAIT
        if step.outcome is WAIT:
            return self._follow_up(held[0], machine, step)
        known = self._calls.get(call.session, _NONE).get(held)
        freed = self._settle(held, machine, call.session)
        outcome = self._follow_up(held[0], machine, step, freed)
        if known is not None and known.waits and not machine.holds(held[1]):
            self._wake(known, Waiting("the same call was repeated and is over"))
        return outcome

    def _wait(self, held: CallKey, owner: Any, number: int, call: Call, command: Command) -> CallWaiter:
        """Make a call wait, replacing an earlier wait of the same call."""
        theirs = self._calls[call.session]
        known = theirs[held]
        theirs[held] = waiter = CallWaiter(owner, number, call, command, held[0][1], known.size)
        if known.waits:
            known.waits = False  # it is no longer contested, or the new one is
            self._engine.answer_call(known, Waiting("the same call was repeated and waits in its place"))
        return waiter

    def explain(self, waiter: CallWaiter) -> Waiting:
        """End a call's wait at its deadline; return what it waited for."""
        contested = self.forget(waiter)
        machine = self.machines.get((waiter.command.machine, waiter.name))
        return contested or (Waiting("it was taken back") if machine is None else machine.explain(waiter.call))

    def forget(self, waiter: CallWaiter) -> Waiting | None:
        """Record that a call does not wait now; return why it waited if its refusal was contested."""
        if not waiter.waits:
            return None
        waiter.waits = False
        return (
            self.contested.resolve(((waiter.command.machine, waiter.name), waiter.call.id)) if self.contested else None
        )

    def suspend(self, waiter: CallWaiter) -> bool:
        """Take a waiting call back if others may go first while its client is away; return whether it was."""
        undo, call = waiter.command.suspended_by, waiter.call
        if undo is None:
            return False
        place = (waiter.command.machine, waiter.name)
        self.forget(waiter)
        machine = self.machines[place]
        step = machine.apply(call, undo(call.number), self._engine.revision + 1)
        self._follow_up(place, machine, step, self._settle((place, call.id), machine, call.session))
        return True

    def session_settled(self, session: str) -> None:
        """Record that a session has reconnected or ended: contested calls poll again."""
        self.contested.session_settled(session)
        for held in self.contested:
            waiter = self._calls[held[1].rpartition("/")[0]][held]
            self._engine.answer_call(waiter, self.forget(waiter))

    @property
    def waiting(self) -> int:
        """The number of waiting calls."""
        return sum(waiter.waits for theirs in self._calls.values() for waiter in theirs.values())

    def end(self, session: str) -> None:
        """Tell all machines that a session has ended; a bug in one of them does not affect the others."""
        calls = self._calls.pop(session, {})
        for waiter in calls.values():
            self._engine.charge(b"", -waiter.size)
            self.forget(waiter)
        places = dict.fromkeys(place for place, _ in calls)
        for late in list(self.late.by_session.get(session, ())):
            places[late[0]] = None
            self.late.looked(late)
        for place in places:
            machine = self.machines.get(place)
            if machine is not None:
                try:
                    self._follow_up(place, machine, machine.session_ended(session, self._engine.revision + 1))
                except Exception as error:
                    self._engine.note_bug(error, f"the end of a session, at {machine.kind} {show(place[1])}")
        self.session_settled(session)

    def statistics(self) -> dict[str, int]:
        """Count the machines of each kind."""
        return dict(Counter(machine.kind for machine, _ in self.machines))

    def fire(self, place: ObjectKey, number: int) -> None:
        """Fire a timer that is due, unless it was stopped or reset meanwhile."""
        timer = self.timers.get(place)
        if timer is not None and timer[0] == number:
            del self.timers[place]
            machine = self.machines[place]
            self._follow_up(place, machine, machine.on_timer(number, self._engine.revision + 1))

    def _follow_up(self, place: ObjectKey, machine: Machine, step: Step, freed: int = 0) -> Outcome:
        """After a step: number the change, answer the calls that are over, and drop an idle machine.

        `freed` is the number of bytes no longer charged for the caller. Returns the step's outcome, sharing the answer
        that others get.
        """
        if step.changed:
            self._engine.revision += 1
            self._engine.charge_held(step.grown)
        for call in step.dropped:
            known = self._calls.get(call.session, _NONE).get((place, call.id))
            self._settle((place, call.id), machine, call.session)
            if known is not None and known.waits:
                self._wake(known, Waiting("a later call of the same process replaced it"))
        encoded: Encoded = {}
        if step.shared_outcome is not None:
            freed += self._answer_all(place, machine, step, encoded)
        elif step.woken:
            freed += self._recheck(place, machine, step.woken, encoded)
        if self.late and place in self.late:
            self.late.count(place, freed)
        elif machine.idle:
            self._park_idle(place, machine)
        if machine.timer != self.timers.get(place):
            self._set_timer(place, machine.timer)
        return as_shared(step.outcome, encoded) if encoded else step.outcome

    def _recheck(self, place: ObjectKey, machine: Machine, woken: Iterable[Call], encoded: Encoded) -> int:
        """Answer each woken call that is over; return the number of bytes no longer charged for them."""
        freed = 0
        for call in woken:
            held = (place, call.id)
            known = self._calls.get(call.session, _NONE).get(held)
            outcome: Outcome = WAIT
            if known is not None and known.waits:
                outcome = machine.apply(call, known.command, self._engine.revision + 1).outcome
            freed += self._settle(held, machine, call.session)  # after `apply`, in which it may have rejoined
            if known is None or not known.waits:
                self.late.add(held, call.session)
            elif isinstance(outcome, (Done, Refused)):
                self._wake(known, encode_once(outcome, encoded))
        return freed

    def _answer_all(self, place: ObjectKey, machine: Machine, step: Step, encoded: Encoded) -> int:
        """Answer calls that share one outcome; return the number of bytes no longer charged for them."""
        freed, told, waiters, contested = 0, 0, [], bool(self.contested)
        table, holds = self._calls, machine.holds
        for call in step.woken:
            session = call.session
            call_id = f"{session}/{call.number}"
            held = (place, call_id)
            theirs = table.get(session)
            waiter = None if theirs is None else theirs.get(held)
            if waiter is None or theirs is None or not waiter.waits:  # it is between two polls
                freed += self._settle(held, machine, session)
                self.late.add(held, session)
                continue
            if not holds(call_id):
                told += waiter.size
                if len(theirs) == 1:
                    del table[session]
                else:
                    del theirs[held]
            if contested:
                self.contested.resolve(held)
            waiter.waits = False
            waiters.append(waiter)
        self._engine.charge(b"", -told)
        if waiters and step.shared_outcome is not None:
            self._engine.answer_calls(waiters, encode_once(step.shared_outcome, encoded))
        return freed + told

    def _wake(self, waiter: CallWaiter, answer: Done | Refused | Waiting) -> None:
        """End the wait of a call; on `Waiting` the caller polls again."""
        self.forget(waiter)
        self._engine.answer_call(waiter, answer)

    def _park_idle(self, place: ObjectKey, machine: Machine) -> None:
        """Drop an idle machine; if it persists, keep it, and drop the machines idle longest while over the limits."""
        if not machine.persists_idle:
            self._drop_machine(place)
            return
        if place in self._idle:
            self._forget_idle(place)
        self._idle[place] = size = machine.trim(MAX_IDLE_BYTES)
        self._idle_bytes += size
        self._engine.charge_held(size)
        while len(self._idle) > MAX_IDLE or self._idle_bytes > MAX_IDLE_BYTES:
            oldest = next(iter(self._idle))
            self._forget_idle(oldest)
            self._drop_machine(oldest)

    def _forget_idle(self, place: ObjectKey) -> None:
        size = self._idle.pop(place)
        self._idle_bytes -= size
        self._engine.charge_held(-size)

    def _drop_machine(self, place: ObjectKey) -> None:
        if self.machines.pop(place, None) is not None:
            self._engine.charge_held(-object_bytes(place[1]))

    def _set_timer(self, place: ObjectKey, timer: tuple[int, float] | None) -> None:
        """Set or stop the timer of a machine."""
        if timer is None:
            del self.timers[place]
        else:
            self.timers[place] = timer
        self.changed_timers.append(place)

    def _make_room(self, held: CallKey, waiter: CallWaiter) -> None:
        """Charge a new call for the bytes that the machine will keep; raise before any change if the store is full."""
        waiter.size = size = call_bytes(waiter.name, waiter.call.member, waiter.command)
        new = 0 if held[0] in self.machines else object_bytes(waiter.name)
        self._engine.charge(waiter.name, size + new)
        self._engine.charge_held(-new)  # `begin` charges for the machine
        self._calls.setdefault(waiter.call.session, {})[held] = waiter

    def _settle(self, held: CallKey, machine: Machine, session: str) -> int:
        """Stop charging a call for which the machine keeps nothing; return the number of bytes freed."""
        theirs = self._calls.get(session)
        if theirs is None or held not in theirs or machine.holds(held[1]):
            return 0
        freed = theirs.pop(held).size
        self._engine.charge(b"", -freed)
        if not theirs:
            del self._calls[session]
        return freed


def _used_by_another(call: Call, member: str) -> Refused:
    """Refuse a call whose number another member's unfinished call uses."""
    other = f"{member}, in the same session"
    return Refused(
        "Disagreement", {"what": f"call {call.number}", "mine": call.member, "theirs": member, "other": other}
    )
