"""Hosting on a store that only has bytes: read, apply, write if nobody was faster. The rules of `recipes/storehost.py`.

The state has the version, the number of the bell, and the sessions that were declared dead: these three make it safe.
A version never comes twice, so a write that was late can only land on the state that it was made from. A session that
is declared dead is so for ever, and in the same write that takes it out of the machine. A member whose write was not
answered does not know whether it will still land, and may give up there and take its call back; until the version has
moved on, it therefore writes also what changes nothing. Half of the seeds look again now and then, as the real members
do; the others only when the bell rings, which shows that the machines wake everybody whom they should.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rallypoint.core.machine import WAIT, Call, Command, Machine, Step, Undo

from .ledger import check_loss
from .world import NEVER, Life, Process, SessionLost, World

SLICE_S = 1.0
TIMED_OUT = "timed out"


class State(msgspec.Struct, array_like=True):
    """What is stored under one key."""

    version: int = 0
    ended: list[str] = []
    machine: bytes = b""


class Write(msgspec.Struct):
    """A write that is under way."""

    key: str
    before: int
    state: bytes
    woken: list[Call]


class BytesHost:
    """A plain dict, and what may happen to messages on the way to it."""

    waits_for_the_dead = False

    def __init__(self, world: World) -> None:
        self.world = world
        self.blobs: dict[str, bytes] = {}
        self.flying: list[Write] = []
        self.rung: set[str] = set()
        self.patient = world.chance.random() < 0.5
        self.loss = world.chance.choice((0, 0.05, 0.2))
        self.alarms: dict[tuple[str, str], tuple[int, float]] = {}
        """By session and key: the alarm that it has seen, and since when."""

    def call(self, process: Process, key: str, call: Call, command: Command, deadline: float) -> Life:
        """Carry a call through; return its outcome, or that its time was over."""
        process.waits = (key, call, command)
        while True:
            outcome: Any = yield from self._apply(process, key, call, command)
            if outcome is not WAIT:
                process.waits = None
                return outcome
            while call.id not in self.rung:
                if self.world.now >= deadline:
                    process.waits = None
                    return TIMED_OUT
                yield min(deadline, self.world.now + SLICE_S)
                yield from self.bury(process, key, type(command).machine)
                yield from self._let_ring(process, key, type(command).machine)
                if not self.patient:
                    break
            self.rung.discard(call.id)

    def machine(self, key: str, kind: type[Machine]) -> Machine:
        """Return the machine as it is now."""
        return self._read(key, kind)[1]

    def settle(self) -> None:
        """Nothing is to be cleared away here."""

    def deliver(self) -> bool:
        """Let a late write arrive."""
        if not self.flying:
            return False
        self._land(self.flying.pop(self.world.chance.randrange(len(self.flying))))
        return True

    def tick(self) -> None:
        """There is nobody here who has a clock."""

    def due(self) -> float:
        """Return never: whoever waits looks again, and lets alarms ring."""
        return NEVER

    def crashed(self, process: Process) -> None:
        """There is nobody here who would notice."""

    def _apply(self, process: Process, key: str, call: Call, command: Command) -> Life:
        while True:
            yield None
            state, machine = self._read(key, type(command).machine)
            if call.session in state.ended:
                raise SessionLost
            step = machine.apply(call, command, state.version + 1)
            if not step.changed and process.unsure.get(key) != state.version:
                return step.outcome
            answered = yield from self._write(key, state, machine, step)
            if answered:
                return step.outcome
            if answered is None:
                process.unsure[key] = state.version
                process.repeated = True
                if not isinstance(command, Undo) and self.world.chance.random() < 0.3:
                    return TIMED_OUT

    def _let_ring(self, process: Process, key: str, kind: type[Machine]) -> Life:
        """Let the machine's alarm ring, if this process has seen it for its time; others may do the same."""
        if kind.alarm is Machine.alarm:
            return  # that kind has none
        state, machine = self._read(key, kind)
        if machine.alarm is None:
            return
        number, after_s = machine.alarm
        seen, since = self.alarms.get((process.session, key), (0, 0.0))
        if seen != number:
            self.alarms[process.session, key] = number, self.world.now
        elif self.world.now >= since + after_s:
            yield None
            state, machine = self._read(key, kind)
            step = machine.ring(number, state.version + 1)
            if step.changed and (yield from self._write(key, state, machine, step)):
                self.world.note("rang", str(process), number)

    def bury(self, process: Process, key: str, kind: type[Machine]) -> Life:
        """Take sessions out that have stood still for the grace."""
        world = self.world
        state, machine = self._read(key, kind)
        if process.session in state.ended:
            raise SessionLost
        for session in sorted(machine.sessions()):
            other = world.by_session[session]
            if other is process or (other.session == session and not other.still(world.now)):
                continue
            while True:
                yield None
                state, machine = self._read(key, kind)
                if session in state.ended:
                    break
                state.ended.append(session)
                before = self._read(key, kind)[1]
                step = machine.lost(session, state.version + 1)
                check_loss(before, machine, session)
                if (yield from self._write(key, state, machine, step)):
                    world.note("buried", session, key)
                    break

    def _read(self, key: str, kind: type[Machine]) -> tuple[State, Machine]:
        blob = self.blobs.get(key)
        state = State() if blob is None else msgspec.msgpack.decode(blob, type=State)
        return state, msgspec.msgpack.decode(state.machine, type=kind) if state.machine else kind()

    def _write(self, key: str, state: State, machine: Machine, step: Step) -> Life:
        """Send a write; return whether it won, or None: nobody knows."""
        chance = self.world.chance
        after = State(state.version + 1, state.ended, b"" if _forgotten(machine) else msgspec.msgpack.encode(machine))
        write = Write(key, state.version, msgspec.msgpack.encode(after), list(step.woken))
        yield None
        if chance.random() >= self.loss:
            return self._land(write)
        fate = chance.choice(("lost", "answer lost", "late", "twice"))
        self.world.note("write", fate, key, write.before)
        if fate in ("answer lost", "twice"):
            self._land(write)
        if fate in ("late", "twice"):
            self.flying.append(write)
        yield None
        return None

    def _land(self, write: Write) -> bool:
        blob = self.blobs.get(write.key)
        if write.before != (0 if blob is None else msgspec.msgpack.decode(blob, type=State).version):
            return False
        self.blobs[write.key] = write.state
        self.world.note("version", write.key, write.before + 1)
        for call in write.woken:
            self.rung.add(call.id)
            self.world.by_session[call.session].woken = True
        return True


def _forgotten(machine: Machine) -> Any:
    """Say whether a machine may be dropped here: its kind needs no memory of those who have not looked yet."""
    return machine.idle and machine.kind in ("lock", "roster")
