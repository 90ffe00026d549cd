"""The machines hosted on a store of bytes, by compare-and-set, with the rules of `recipes/hosting/cas_host.py`.

The stored state has a version and the sessions that were declared dead: these two make it safe. No version is used
twice, so a late write can only replace the state that it was made from. A session is declared dead forever, in the
same write that removes it from the machine. A member whose write was not answered does not know whether it will still
be applied, and may give up and withdraw its call; until the version has changed, it therefore writes even without a
change. In half of the seeds waiting members recheck periodically, as real ones do; in the others only when they are
woken, which shows that the machines wake every call that they should.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rallypoint.core.machines.machine import WAIT, Call, Command, Machine, Step, Undo
from rallypoint.errors import SessionLost
from rallypoint.testing.simulation.simulator import NEVER, ScheduledProcess, Simulator, Steps

from .call_checker import check_loss

SLICE_S = 1.0
TIMED_OUT = "timed out"


class State(msgspec.Struct, array_like=True):
    """The value of one key."""

    version: int = 0
    ended: list[str] = []
    machine: bytes = b""


class Write(msgspec.Struct):
    """A write in flight."""

    key: str
    before: int
    state: bytes
    woken: list[Call]


class BytesHost:
    """A plain dict, and the faults of messages to it."""

    waits_for_the_dead = False

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator
        self.blobs: dict[str, bytes] = {}
        self.flying: list[Write] = []
        self.woken: set[str] = set()
        self.patient = simulator.chance.random() < 0.5
        self.loss = simulator.chance.choice((0, 0.05, 0.2))
        self.timers: dict[tuple[str, str], tuple[int, float]] = {}
        """By session and key: the timer that it has seen, and since when."""

    def call(self, process: ScheduledProcess, key: str, call: Call, command: Command, deadline: float) -> Steps:
        """Make a call; return its outcome or TIMED_OUT."""
        process.waits = (key, call, command)
        while True:
            outcome: Any = yield from self._apply(process, key, call, command)
            if outcome is not WAIT:
                process.waits = None
                return outcome
            while call.id not in self.woken:
                if self.simulator.now >= deadline:
                    process.waits = None
                    return TIMED_OUT
                yield min(deadline, self.simulator.now + SLICE_S)
                yield from self.evict(process, key, type(command).machine)
                yield from self._fire_timer(process, key, type(command).machine)
                if not self.patient:
                    break
            self.woken.discard(call.id)

    def machine(self, key: str, kind: type[Machine]) -> Machine:
        """Return the current machine."""
        return self._read(key, kind)[1]

    def settle(self) -> None:
        """Do nothing: a store of bytes keeps its keys."""

    def deliver(self) -> bool:
        """Apply a late write."""
        if not self.flying:
            return False
        self._land(self.flying.pop(self.simulator.chance.randrange(len(self.flying))))
        return True

    def tick(self) -> None:
        """Do nothing: the store has no clock."""

    def due(self) -> float:
        """Return never: waiting members fire the timers."""
        return NEVER

    def crashed(self, process: ScheduledProcess) -> None:
        """Do nothing: the store does not know its clients."""

    def _apply(self, process: ScheduledProcess, key: str, call: Call, command: Command) -> Steps:
        while True:
            yield None
            state, machine = self._read(key, type(command).machine)
            if call.session in state.ended:
                raise SessionLost(peer="the members", why="it was evicted")
            step = machine.apply(call, command, state.version + 1)
            if not step.changed and process.unsure.get(key) != state.version:
                return step.outcome
            answered = yield from self._write(key, state, machine, step)
            if answered:
                return step.outcome
            if answered is None:
                process.unsure[key] = state.version
                process.repeated = True
                if not isinstance(command, Undo) and self.simulator.chance.random() < 0.3:
                    return TIMED_OUT

    def _fire_timer(self, process: ScheduledProcess, key: str, kind: type[Machine]) -> Steps:
        """Fire the machine's timer if this process has seen it for its duration; others may do the same."""
        if kind.timer is Machine.timer:
            return  # this kind has no timer
        state, machine = self._read(key, kind)
        if machine.timer is None:
            return
        number, after_s = machine.timer
        seen, since = self.timers.get((process.session, key), (0, 0.0))
        if seen != number:
            self.timers[process.session, key] = number, self.simulator.now
        elif self.simulator.now >= since + after_s:
            yield None
            state, machine = self._read(key, kind)
            step = machine.on_timer(number, state.version + 1)
            if step.changed and (yield from self._write(key, state, machine, step)):
                self.simulator.note("fired", str(process), number)

    def evict(self, process: ScheduledProcess, key: str, kind: type[Machine]) -> Steps:
        """Remove sessions that have been frozen for the grace."""
        simulator = self.simulator
        state, machine = self._read(key, kind)
        if process.session in state.ended:
            raise SessionLost(peer="the members", why="it was evicted")
        for session in sorted(machine.sessions()):
            other = simulator.by_session[session]
            if other is process or (other.session == session and not other.still(simulator.now)):
                continue
            while True:
                yield None
                state, machine = self._read(key, kind)
                if session in state.ended:
                    break
                state.ended.append(session)
                before = self._read(key, kind)[1]
                step = machine.session_ended(session, state.version + 1)
                check_loss(before, machine, session)
                if (yield from self._write(key, state, machine, step)):
                    simulator.note("evicted", session, key)
                    break

    def _read(self, key: str, kind: type[Machine]) -> tuple[State, Machine]:
        blob = self.blobs.get(key)
        state = State() if blob is None else msgspec.msgpack.decode(blob, type=State)
        return state, msgspec.msgpack.decode(state.machine, type=kind) if state.machine else kind()

    def _write(self, key: str, state: State, machine: Machine, step: Step) -> Steps:
        """Send a write; return whether it won, or None if that is unknown."""
        chance = self.simulator.chance
        after = State(state.version + 1, state.ended, b"" if _forgotten(machine) else msgspec.msgpack.encode(machine))
        write = Write(key, state.version, msgspec.msgpack.encode(after), list(step.woken))
        yield None
        if chance.random() >= self.loss:
            return self._land(write)
        fate = chance.choice(("lost", "answer lost", "late", "twice"))
        self.simulator.note("write", fate, key, write.before)
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
        self.simulator.note("version", write.key, write.before + 1)
        for call in write.woken:
            self.woken.add(call.id)
            self.simulator.by_session[call.session].woken = True
        return True


def _forgotten(machine: Machine) -> Any:
    """Return whether a machine may be dropped: no late call of its kind needs it."""
    return machine.idle and machine.kind in ("lock", "roster")
