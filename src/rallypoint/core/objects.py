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

import msgspec

from rallypoint.core.doubts import Doubts
from rallypoint.core.engine import ENTRY_BYTES, Engine
from rallypoint.core.machine import WAIT, Call, Command, Done, Machine, Outcome, Refused, Step, Undo, Waiting
from rallypoint.core.records import Shared, Waiter

__all__ = ["Objects", "Pending"]

MAX_IDLE = 256
"""How many machines are remembered though they are idle."""

MAX_IDLE_BYTES = 16 * 1024 * 1024
"""How much they may keep: the ranks of one run of as many nodes as there may be."""

SHARED_BYTES = 1024
"""From what size on an answer that many get is kept once for all; what is shorter costs more that way."""

Place = tuple[type[Machine], bytes]
Held = tuple[Place, str]
"""A call that a machine may keep something of: where, and the call's id."""


class Pending(NamedTuple):
    """A call that waits."""

    call: Call
    command: Command
    waiter: Waiter


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
        self._held: dict[str, dict[Held, int]] = {}
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
        if timeout_s <= 0 or isinstance(command, Undo) or not self.doubts.of(held, step.outcome, machine):
            freed = self._settle(held, machine, call.session) if step.outcome is not WAIT else 0
            outcome = self._follow_up(place, machine, step, freed)
            if isinstance(outcome, (Done, Refused)):
                if held in self._pending and not machine.keeps(held[1]):
                    self.doubts.settle(held)
                    self._look_again(held, "the same call was made again, and is over")
                return outcome
        waiter = self._engine.park_call(name, owner, number)
        self._look_again(held, "the same call was made again, and waits in its place")
        self._pending[held] = waiter.call = Pending(call, command, waiter)
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
        if self._pending.get(held) is not waiter.call:
            return None
        del self._pending[held]
        return self.doubts.settle(held)

    def back(self, session: str) -> None:
        """Note that a session has a connection again, or has ended: calls that are in doubt look again."""
        self.doubts.over(session)
        for held in self.doubts:
            self._engine.answer_call(self._pending.pop(held).waiter, self.doubts.settle(held))

    def end(self, session: str) -> None:
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
                self._follow_up(place, machine, machine.lost(session, self._engine.revision + 1))
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
            self._look_again((place, call.id), "a later call of the same process has its place")
        encoded: _Encoded = {}
        for call in step.woken:
            held = (place, call.id)
            pending = self._pending.get(held)
            outcome: Outcome = WAIT
            if pending is not None:
                outcome = step.told or machine.apply(call, pending.command, self._engine.revision + 1).outcome
            freed += self._settle(held, machine, call.session)  # after its look, by which it may have come again
            if pending is None:
                self._comes_late(held, call.session)
            elif isinstance(outcome, (Done, Refused)):
                del self._pending[held]
                if not self._engine.answer_call(pending.waiter, _encoded_once(outcome, encoded)):
                    self._comes_late(held, call.session)  # its deadline passed a moment ago, and it looks again
        if self._late and place in self._late:
            self._count_late(place, freed)
        elif machine.idle:
            self._put_away(place, machine)
        if machine.alarm != self.timers.get(place):
            self._set_timer(place, machine.alarm)
        return _shared(step.outcome, encoded) if encoded else step.outcome

    def _look_again(self, held: Held, why: str) -> None:
        """Let a call that waits hear that it has no place any more, if there is one: it may look again."""
        pending = self._pending.pop(held, None)
        if pending is not None:
            self._engine.answer_call(pending.waiter, Waiting(why))

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

    def restore_late(self, place: Place, calls: list[str], round_bytes: int, size: int) -> None:
        """Put back, from a snapshot, the calls that have yet to look; what is counted for them is counted already."""
        late = self._late[place] = _Late()
        late.calls, late.round, late.size = dict.fromkeys(calls), round_bytes, size

    def _comes_late(self, held: Held, session: str) -> None:
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

    def _make_room(self, held: Held, machine: Machine, call: Call, command: Command) -> None:
        """Count what a call will make the machine keep; refuse it, before anything changes, where the store is full."""
        (_, name), call_id = held
        parked = len(name) + ENTRY_BYTES
        counted = machine.keeps(call_id) or held in self._held.get(call.session, ())
        size = 0 if counted else parked + len(call.member) + command.weight + ENTRY_BYTES
        self._engine.charge(name, size, parked)  # the latter is needed if it has to wait
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
