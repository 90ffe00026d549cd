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
from rallypoint.core.machine import Call, Command, Done, Machine, Refused, Step, Undo, Waiting
from rallypoint.core.records import Waiter

__all__ = ["Objects"]

Place = tuple[type[Machine], bytes]


class _Pending(NamedTuple):
    """A call that waits."""

    call: Call
    command: Command
    waiter: Waiter


class Objects:
    """All machines of one server."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._machines: dict[Place, Machine] = {}
        self._pending: dict[tuple[Place, str], _Pending] = {}
        self._held: dict[str, dict[tuple[Place, str], int]] = {}
        self._late: dict[Place, set[str]] = {}

    def act(self, name: bytes, call: Call, command: Command, owner: Any, deadline: float, tag: object) -> Any:
        """Carry out a command on the object of that name; return its outcome, or a waiter if it has to wait."""
        place = (type(command).machine, name)
        machine = self._machines.get(place) or type(command).machine()
        target = f"{call.session}/{command.call}" if isinstance(command, Undo) else call.id
        if isinstance(command, Undo):
            undone = self._pending.pop((place, target), None)
            if undone is not None:
                self._engine.answer_call(undone.waiter, Refused("Undone", {}))
        else:
            self._make_room(place, machine, call, command)
        self._looked(place, target)
        self._machines[place] = machine
        step = machine.apply(call, command, self._engine.revision + 1)
        self._settle(place, machine, call.session, target)
        self._follow_up(place, machine, step)
        if isinstance(step.outcome, (Done, Refused)):
            return step.outcome
        waiter = self._engine.park_call(name, owner, deadline, tag)
        self._pending[place, call.id] = waiter.call = _Pending(call, command, waiter)
        return waiter

    def why(self, waiter: Waiter) -> Waiting:
        """Say what a call waits for, when its waiter has ended by its deadline."""
        call, command, _ = waiter.call
        place = (type(command).machine, waiter.keys[0])
        self._pending.pop((place, call.id), None)
        machine = self._machines.get(place)
        return Waiting("it was taken back") if machine is None else machine.why(call)

    def end(self, session: str) -> None:
        """Tell all machines that a session has ended."""
        held = self._held.pop(session, {})
        for held_call, size in held.items():
            self._engine.charge(b"", -size)
            self._pending.pop(held_call, None)
        places = dict.fromkeys(place for place, _ in held)
        for place in list(self._late):
            for call_id in [late for late in self._late[place] if late.startswith(f"{session}/")]:
                places[place] = None
                self._looked(place, call_id)
        for place in places:
            machine = self._machines.get(place)
            if machine is not None:
                self._follow_up(place, machine, machine.lost(session, self._engine.revision + 1))

    def statistics(self) -> dict[str, int]:
        """Count the machines of each kind."""
        counts: dict[str, int] = {}
        for machine, _ in self._machines:
            counts[machine.kind] = counts.get(machine.kind, 0) + 1
        return counts

    def _follow_up(self, place: Place, machine: Machine, step: Step) -> None:
        """After a step: number the change, answer those who need wait no more, and drop a machine that is idle."""
        if step.changed:
            self._engine.revision += 1
        encoded: dict[int, msgspec.Raw] = {}
        for call in step.woken:
            self._settle(place, machine, call.session, call.id)
            pending = self._pending.get((place, call.id))
            if pending is None:
                self._late.setdefault(place, set()).add(call.id)
                continue
            outcome = machine.apply(call, pending.command, self._engine.revision + 1).outcome
            if isinstance(outcome, (Done, Refused)):
                del self._pending[place, call.id]
                self._engine.answer_call(pending.waiter, _encoded_once(outcome, encoded))
        if machine.idle and place not in self._late:
            self._machines.pop(place, None)

    def _looked(self, place: Place, call_id: str) -> None:
        late = self._late.get(place)
        if late is not None:
            late.discard(call_id)
            if not late:
                del self._late[place]

    def _make_room(self, place: Place, machine: Machine, call: Call, command: Command) -> None:
        """Count what a call will make the machine keep; refuse it, before anything changes, where the store is full."""
        name, parked = place[1], len(place[1]) + ENTRY_BYTES
        size = 0 if machine.keeps(call.id) else parked + len(call.member) + command.weight + ENTRY_BYTES
        self._engine.charge(name, size + parked)  # the latter is needed if it has to wait
        self._engine.charge(name, -parked)
        if size:
            self._held.setdefault(call.session, {})[place, call.id] = size

    def _settle(self, place: Place, machine: Machine, session: str, call_id: str) -> None:
        """Stop counting a call of which the machine keeps nothing."""
        held = self._held.get(session)
        if held is not None and (place, call_id) in held and not machine.keeps(call_id):
            self._engine.charge(b"", -held.pop((place, call_id)))
            if not held:
                del self._held[session]


def _encoded_once(outcome: Done | Refused, encoded: dict[int, msgspec.Raw]) -> Done | Refused:
    """Encode a list that many get only once."""
    if not isinstance(outcome, Done) or not isinstance(outcome.answer, list):
        return outcome
    answer = encoded.get(id(outcome.answer))
    if answer is None:
        answer = encoded[id(outcome.answer)] = msgspec.Raw(_encode(outcome.answer))
    return Done(answer)


_encode = msgspec.msgpack.Encoder().encode
