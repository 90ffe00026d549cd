"""The shared objects that a server hosts: machines by name, next to the keys, and the calls that wait on them.

A call that must wait is parked in the engine as any other wait is, so its deadline, its owner's end and a `drop` are
the engine's. Its deadline is not the caller's: it is when the caller wants to hear why it still waits, and it then
looks again with the same call. Machines hear of sessions that have ended. One that is idle is dropped, unless a call
that was between two looks when its wait ended has yet to look. What machines keep counts as the engine's bytes do.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from rallypoint.core.engine import ENTRY_BYTES, Engine
from rallypoint.core.machine import WAIT, Call, Command, Done, Machine, Refused, Step, Undo, Waiting
from rallypoint.core.records import Waiter, Watch

__all__ = ["Objects"]

MAX_IDLE = 1024
"""How many machines are remembered though they are idle."""

Place = tuple[type[Machine], bytes]
Held = tuple[Place, str]
"""A call that a machine may keep something of: where, and the call's id."""


class _Pending(NamedTuple):
    """A call that waits."""

    call: Call
    command: Command
    waiter: Waiter


class _Alarm(NamedTuple):
    """An alarm that is set."""

    alarm: tuple[int, float]
    waiter: Waiter
    due: float


class Objects:
    """All machines of one server."""

    link = None
    """Alarms come to us from the engine as answers come to sessions; there is nowhere to send them on."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._machines: dict[Place, Machine] = {}
        self._pending: dict[Held, _Pending] = {}
        self._held: dict[str, dict[Held, int]] = {}
        self._late: dict[Place, set[str]] = {}
        self._alarms: dict[Place, _Alarm] = {}
        self._idle: dict[Place, None] = {}

    def act(
        self, name: bytes, call: Call, command: Command, owner: Any, now: float, timeout_s: float, tag: object
    ) -> Any:
        """Carry out a command on the object of that name; return its outcome, or a waiter if it has to wait."""
        place = (command.machine, name)
        machine = self._machines.get(place) or command.machine()
        if isinstance(command, Undo):
            held = (place, f"{call.session}/{command.call}")
            undone = self._pending.pop(held, None)
            if undone is not None:
                self._engine.answer_call(undone.waiter, Refused("Undone", {}))
        else:
            held = (place, call.id)
            self._make_room(held, machine, call, command)
        if self._late:
            self._looked(held)
        if self._idle:
            self._idle.pop(place, None)
        self._machines[place] = machine
        step = machine.apply(call, command, self._engine.revision + 1)
        if step.outcome is not WAIT:
            self._settle(held, machine, call.session)
        self._follow_up(place, machine, step, now)
        if isinstance(step.outcome, (Done, Refused)):
            return step.outcome
        waiter = self._engine.park_call(name, owner, now + timeout_s, tag)
        self._pending[held] = waiter.call = _Pending(call, command, waiter)
        return waiter

    def why(self, waiter: Waiter) -> Waiting:
        """Say what a call waits for, when its waiter has ended by its deadline."""
        call, command, _ = waiter.call
        place = (command.machine, waiter.keys[0])
        self._pending.pop((place, call.id), None)
        machine = self._machines.get(place)
        return Waiting("it was taken back") if machine is None else machine.why(call)

    def end(self, session: str, now: float) -> None:
        """Tell all machines that a session has ended."""
        held = self._held.pop(session, {})
        for held_call, size in held.items():
            self._engine.charge(b"", -size)
            self._pending.pop(held_call, None)
        places = dict.fromkeys(place for place, _ in held)
        for place in list(self._late):
            for call_id in [late for late in self._late[place] if late.startswith(f"{session}/")]:
                places[place] = None
                self._looked((place, call_id))
        for place in places:
            machine = self._machines.get(place)
            if machine is not None:
                self._follow_up(place, machine, machine.lost(session, self._engine.revision + 1), now)

    def statistics(self) -> dict[str, int]:
        """Count the machines of each kind."""
        counts: dict[str, int] = {}
        for machine, _ in self._machines:
            counts[machine.kind] = counts.get(machine.kind, 0) + 1
        return counts

    def answer(self, handle: Waiter | Watch, answer: Any) -> bytes:
        """Let an alarm ring, which the engine delivers to us as its owner; unless it was stopped at the last moment."""
        place: Any = handle.tag
        set_now = self._alarms.get(place)
        if set_now is not None and set_now.waiter is handle:
            del self._alarms[place]
            machine = self._machines[place]
            step = machine.ring(set_now.alarm[0], self._engine.revision + 1)
            self._follow_up(place, machine, step, set_now.due)
        return b""

    def _follow_up(self, place: Place, machine: Machine, step: Step, now: float) -> None:
        """After a step: number the change, answer those who need wait no more, and drop a machine that is idle."""
        if step.changed:
            self._engine.revision += 1
        for call in step.dropped:
            self._settle((place, call.id), machine, call.session)
        encoded: dict[int, tuple[Any, msgspec.Raw]] = {}
        for call in step.woken:
            held = (place, call.id)
            self._settle(held, machine, call.session)
            pending = self._pending.get(held)
            if pending is None:
                self._late.setdefault(place, set()).add(held[1])
                continue
            outcome = step.told or machine.apply(call, pending.command, self._engine.revision + 1).outcome
            if isinstance(outcome, (Done, Refused)):
                del self._pending[held]
                self._engine.answer_call(pending.waiter, _encoded_once(outcome, encoded))
        if machine.idle and place not in self._late:
            self._put_away(place, machine)
        if machine.alarm is not None or place in self._alarms:
            self._set_alarm(place, machine, now)

    def _put_away(self, place: Place, machine: Machine) -> None:
        """Drop an idle machine; of those that should last, drop the one that has been idle the longest."""
        if not machine.lasts:
            self._machines.pop(place, None)
            return
        self._idle[place] = None
        if len(self._idle) > MAX_IDLE:
            oldest = next(iter(self._idle))
            del self._idle[oldest], self._machines[oldest]

    def _set_alarm(self, place: Place, machine: Machine, now: float) -> None:
        """Have the engine tell us when the machine's alarm is due, as it tells any wait that its time is over."""
        before = self._alarms.get(place)
        if before is not None and before.alarm == machine.alarm:
            return
        if before is not None:
            del self._alarms[place]
            self._engine.drop(before.waiter)
        if machine.alarm is not None:
            due = now + machine.alarm[1]
            self._alarms[place] = _Alarm(machine.alarm, self._engine.park_call(place[1], self, due, place), due)

    def _looked(self, held: Held) -> None:
        place, call_id = held
        late = self._late.get(place)
        if late is not None:
            late.discard(call_id)
            if not late:
                del self._late[place]

    def _make_room(self, held: Held, machine: Machine, call: Call, command: Command) -> None:
        """Count what a call will make the machine keep; refuse it, before anything changes, where the store is full."""
        (_, name), call_id = held
        parked = len(name) + ENTRY_BYTES
        size = 0 if machine.keeps(call_id) else parked + len(call.member) + command.weight + ENTRY_BYTES
        self._engine.charge(name, size, 2 * parked)  # the latter is needed if it has to wait, and for an alarm
        if size:
            self._held.setdefault(call.session, {})[held] = size

    def _settle(self, held: Held, machine: Machine, session: str) -> None:
        """Stop counting a call of which the machine keeps nothing."""
        theirs = self._held.get(session)
        if theirs is not None and held in theirs and not machine.keeps(held[1]):
            self._engine.charge(b"", -theirs.pop(held))
            if not theirs:
                del self._held[session]


def _encoded_once(outcome: Done | Refused, encoded: dict[int, tuple[Any, msgspec.Raw]]) -> Done | Refused:
    """Encode a list that many get only once."""
    if not isinstance(outcome, Done) or not isinstance(outcome.answer, list):
        return outcome
    same, answer = encoded.get(id(outcome.answer), (None, msgspec.Raw()))
    if same is not outcome.answer:
        answer = msgspec.Raw(_encode(outcome.answer))
        encoded[id(outcome.answer)] = (outcome.answer, answer)  # which keeps it, so that its id is no other's
    return Done(answer)


_encode = msgspec.msgpack.Encoder().encode
