"""The shared objects that a server hosts: machines by name, next to the keys, and the calls that wait on them.

A call that must wait is parked in the engine as any other wait is, so its deadline, its owner's end and a `drop` are
the engine's. Its deadline is not the caller's: it is when the caller wants to hear why it still waits, and it then
looks again with the same call. Machines hear of sessions that have ended. One that is idle is dropped, unless a call
that was between two looks when its wait ended has yet to look. What machines keep counts as the engine's bytes do, and
so does what is kept for such a call: its round, as it was counted before, until it looks or its session ends.

A few idle machines are remembered, for those who come back: so many, and so many bytes, of which no session is charged.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import msgspec

from rallypoint.core.doubts import Doubts
from rallypoint.core.engine import ENTRY_BYTES, Engine
from rallypoint.core.machine import WAIT, Call, Command, Done, Machine, Outcome, Refused, Step, Undo, Waiting
from rallypoint.core.records import Shared, Waiter, Watch

__all__ = ["Objects"]

MAX_IDLE = 256
"""How many machines are remembered though they are idle."""

MAX_IDLE_BYTES = 16 * 1024 * 1024
"""How much they may keep: the ranks of one run of as many nodes as there may be."""

SHARED_BYTES = 1024
"""From what size on an answer that many get is kept once for all; what is shorter costs more that way."""

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


class _Late:
    """The calls at one place that have yet to look how their wait ended, and what is counted for them."""

    __slots__ = ("calls", "round", "size")

    def __init__(self) -> None:
        self.calls: set[str] = set()
        self.round = 0
        """What the largest round that ended since made the machine keep."""

        self.size = 0


class Objects:
    """All machines of one server."""

    link = None
    """Alarms come to us from the engine as answers come to sessions; there is nowhere to send them on."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._machines: dict[Place, Machine] = {}
        self._pending: dict[Held, _Pending] = {}
        self._held: dict[str, dict[Held, int]] = {}
        self._late: dict[Place, _Late] = {}
        self._latecomers: dict[str, dict[Held, None]] = {}
        self._alarms: dict[Place, _Alarm] = {}
        self._idle: dict[Place, int] = {}
        self._idle_bytes = 0
        self.doubts = Doubts()

    def act(
        self, name: bytes, call: Call, command: Command, owner: Any, now: float, timeout_s: float, tag: object
    ) -> Any:
        """Carry out a command on the object of that name; return its outcome, or a waiter if it has to wait."""
        place = (command.machine, name)
        machine = self._machines.get(place) or command.machine()
        if isinstance(command, Undo):
            held = (place, f"{call.session}/{command.call}")
            self.doubts.settle(held)
            undone = self._pending.pop(held, None)
            if undone is not None:
                self._engine.answer_call(undone.waiter, Refused("Undone", {}))
        else:
            held = (place, call.id)
            self._make_room(held, machine, call, command)
        if self._late:
            self._looked(held)
        if self._idle:
            self._idle_bytes -= self._idle.pop(place, 0)
        self._machines[place] = machine
        step = machine.apply(call, command, self._engine.revision + 1)
        if timeout_s <= 0 or not self.doubts.of(held, step.outcome, machine):
            freed = self._settle(held, machine, call.session) if step.outcome is not WAIT else 0
            outcome = self._follow_up(place, machine, step, now, freed)
            if isinstance(outcome, (Done, Refused)):
                return outcome
        waiter = self._engine.park_call(name, owner, now + timeout_s, tag)
        self._pending[held] = waiter.call = _Pending(call, command, waiter)
        return waiter

    def why(self, waiter: Waiter) -> Waiting:
        """Say what a call waits for, when its waiter has ended by its deadline."""
        call, command, _ = waiter.call
        place = (command.machine, waiter.keys[0])
        self._pending.pop((place, call.id), None)
        machine = self._machines.get(place)
        taken_back = Waiting("it was taken back")
        return self.doubts.settle((place, call.id)) or (taken_back if machine is None else machine.why(call))

    def back(self, session: str) -> None:
        """Note that a session has a connection again, or has ended: calls that are in doubt look again."""
        self.doubts.over(session)
        for held in self.doubts:
            self._engine.answer_call(self._pending.pop(held).waiter, self.doubts.settle(held))

    def end(self, session: str, now: float) -> None:
        """Tell all machines that a session has ended."""
        held = self._held.pop(session, {})
        for held_call, size in held.items():
            self._engine.charge(b"", -size)
            self._pending.pop(held_call, None)
            self.doubts.settle(held_call)
        places = dict.fromkeys(place for place, _ in held)
        for late in list(self._latecomers.get(session, ())):
            places[late[0]] = None
            self._looked(late)
        for place in places:
            machine = self._machines.get(place)
            if machine is not None:
                self._follow_up(place, machine, machine.lost(session, self._engine.revision + 1), now)
        self.back(session)

    def statistics(self) -> dict[str, int]:
        """Count the machines of each kind."""
        return dict(Counter(machine.kind for machine, _ in self._machines))

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

    def _follow_up(self, place: Place, machine: Machine, step: Step, now: float, freed: int = 0) -> Outcome:
        """After a step: number the change, answer those who need wait no more, and drop a machine that is idle.

        `freed` is what is no longer counted for the caller. Returns the step's outcome, as part of which others get.
        """
        if step.changed:
            self._engine.revision += 1
        for call in step.dropped:
            self._settle((place, call.id), machine, call.session)
        encoded: _Encoded = {}
        for call in step.woken:
            held = (place, call.id)
            freed += self._settle(held, machine, call.session)
            pending = self._pending.get(held)
            if pending is None:
                self._comes_late(held, call.session)
                continue
            outcome = step.told or machine.apply(call, pending.command, self._engine.revision + 1).outcome
            if isinstance(outcome, (Done, Refused)):
                del self._pending[held]
                if not self._engine.answer_call(pending.waiter, _encoded_once(outcome, encoded)):
                    self._comes_late(held, call.session)  # its deadline passed a moment ago, and it looks again
        if self._late and place in self._late:
            self._count_late(place, freed)
        elif machine.idle:
            self._put_away(place, machine)
        if machine.alarm is not None or place in self._alarms:
            self._set_alarm(place, machine, now)
        return _shared(step.outcome, encoded) if encoded else step.outcome

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

    def _count_late(self, place: Place, freed: int) -> None:
        """Go on counting a round, of which nothing waits any more, for those who have yet to look how it ended."""
        late = self._late[place]
        late.round = max(late.round, freed)
        size = late.round + len(late.calls) * (len(place[1]) + ENTRY_BYTES)
        self._engine.size += size - late.size  # it is here, so it is too late to refuse it
        late.size = size

    def _comes_late(self, held: Held, session: str) -> None:
        """Note that a call, which does not wait at this moment, has yet to look how its wait ended."""
        self._late.setdefault(held[0], _Late()).calls.add(held[1])
        self._latecomers.setdefault(session, {})[held] = None

    def _looked(self, held: Held) -> None:
        """Note that a call, if it was late, is so no more."""
        place, call_id = held
        late = self._late.get(place)
        if late is None or call_id not in late.calls:
            return
        late.calls.remove(call_id)
        session = call_id.rpartition("/")[0]
        del self._latecomers[session][held]
        if not self._latecomers[session]:
            del self._latecomers[session]
        if not late.calls:
            self._engine.size -= late.size
            del self._late[place]

    def _make_room(self, held: Held, machine: Machine, call: Call, command: Command) -> None:
        """Count what a call will make the machine keep; refuse it, before anything changes, where the store is full."""
        (_, name), call_id = held
        parked = len(name) + ENTRY_BYTES
        counted = machine.keeps(call_id) or held in self._held.get(call.session, ())
        size = 0 if counted else parked + len(call.member) + command.weight + ENTRY_BYTES
        self._engine.charge(name, size, 2 * parked)  # the latter is needed if it has to wait, and for an alarm
        if size:
            self._held.setdefault(call.session, {})[held] = size

    def _settle(self, held: Held, machine: Machine, session: str) -> int:
        """Stop counting a call of which the machine keeps nothing; return how much that was."""
        theirs = self._held.get(session)
        if theirs is None or held not in theirs or machine.keeps(held[1]):
            return 0
        freed = theirs.pop(held)
        self._engine.charge(b"", -freed)
        if not theirs:
            del self._held[session]
        return freed


_Encoded = dict[int, tuple[Any, msgspec.Raw | Shared]]
"""Answers by their id, and what they are encoded: the answer is kept, so that its id is no other's."""


def _encoded_once(outcome: Done | Refused, encoded: _Encoded) -> Done | Refused:
    """Encode what many get only once."""
    if not isinstance(outcome, Done) or not isinstance(outcome.answer, (list, bytes)):
        return outcome
    if id(outcome.answer) not in encoded:
        data = _encode(outcome.answer)
        encoded[id(outcome.answer)] = outcome.answer, Shared(data) if len(data) >= SHARED_BYTES else msgspec.Raw(data)
    return Done(encoded[id(outcome.answer)][1])


def _shared(outcome: Outcome, encoded: _Encoded) -> Outcome:
    """Return an outcome as others get it too, if they do and it is large."""
    if not isinstance(outcome, Done) or id(outcome.answer) not in encoded:
        return outcome
    answer = encoded[id(outcome.answer)][1]
    return Done(answer) if isinstance(answer, Shared) else outcome


_encode = msgspec.msgpack.Encoder().encode
