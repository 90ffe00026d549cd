"""The simulated members: each runs the script that all members of a simulation share, and reports to the checker.

Every line is one use of an object: pass the barrier, exchange, hold the lock for a while, join or leave the group,
watch it, query it, put an item into the work queue or work on one. Most waits have a timeout, after which the call is
withdrawn; some have none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from rallypoint.core.machines import membership
from rallypoint.core.machines.barrier import BarrierArrive, BarrierMachine, BarrierWithdraw
from rallypoint.core.machines.exchange import ExchangeGive, ExchangeMachine, ExchangeWithdraw
from rallypoint.core.machines.lock import LockAcquire, LockMachine, LockRelease
from rallypoint.core.machines.machine import Call, Command, Done, Machine, Refused, Undo
from rallypoint.core.machines.work_queue import (
    WorkAbandon,
    WorkDone,
    WorkPut,
    WorkQueueMachine,
    WorkRelease,
    WorkTake,
    WorkWithdraw,
)
from rallypoint.errors import SessionLost
from rallypoint.testing.simulation.simulator import INTERRUPTED, NEVER, ScheduledProcess, Simulator, Steps

from .bytes_host import TIMED_OUT
from .call_checker import CallChecker, CheckedCall

KINDS: dict[str, type[Machine]] = {
    "barrier": BarrierMachine,
    "exchange": ExchangeMachine,
    "lock": LockMachine,
    "roster": membership.MembershipMachine,
    "work_queue": WorkQueueMachine,
}
WORK_SEEDS = 5
"""Every so many seeds, the script is mostly about the work queue."""

GAVE_UP = (TIMED_OUT, INTERRUPTED)


class ScriptLine(Struct):
    """One line of a script."""

    what: str
    timeout_s: float
    how: Any = "all_gather"
    root: int = 0


def script_of(simulator: Simulator, size: int) -> list[ScriptLine]:
    """Make a random script, with all objects or mostly one."""
    chance = simulator.chance
    every = ["barrier", "exchange", "lock", "join", "leave", "watch", "look"]
    group = ["join", "join", "leave", "watch", "watch", "look"]
    favourite = chance.choice((every, ["barrier"], ["exchange"], ["lock"], group))
    if simulator.seed % WORK_SEEDS == 0:
        favourite = ["put", "work", "work"]
    lines = []
    for _ in range(chance.randrange(2, 8)):
        what = chance.choice(favourite if chance.random() < 0.8 else every)
        timeout_s = chance.choice((2.0, 5.0, 5.0, NEVER))
        lines.append(
            ScriptLine(what, timeout_s, chance.choice(("all_gather", "gather", "broadcast")), chance.randrange(size))
        )
    return lines


class Members:
    """The behaviour of all processes of one simulation, and the checker of their calls."""

    def __init__(self, simulator: Simulator, host: Any, size: int) -> None:
        self.simulator = simulator
        self.host = host
        self.size = size
        self.script = script_of(simulator, size)
        self.checker = CallChecker(simulator, size)

    def live(self, process: ScheduledProcess) -> Steps:
        """Run the script of a process."""
        joined: CheckedCall | None = None
        while process.at < len(self.script):
            line = self.script[process.at]
            process.at += 1
            try:
                if line.what == "join":
                    if joined is None:
                        joined = yield from self._join(process, line)
                elif line.what == "leave":
                    if joined is not None:
                        yield from self._leave(process, joined)
                    joined = None
                else:
                    yield from getattr(self, f"_{line.what}")(process, line)
            except SessionLost:
                self.checker.session_lost(process)
                joined = None
                process.renew()
                process.at -= self.simulator.chance.randrange(2)

    def _barrier(self, process: ScheduledProcess, line: ScriptLine) -> Steps:
        yield from self._meet(process, "barrier", line, BarrierArrive(self.size), BarrierWithdraw)

    def _exchange(self, process: ScheduledProcess, line: ScriptLine) -> Steps:
        rank = int(process.name)
        give = ExchangeGive(self.size, rank, b"", line.how, line.root)
        yield from self._meet(process, "exchange", line, give, ExchangeWithdraw)

    def _meet(self, process: ScheduledProcess, key: str, line: ScriptLine, command: Command, undo: type[Undo]) -> Steps:
        """Make a call that is withdrawn at its timeout; it may have completed nevertheless."""
        entry = self._begin(process, key, command)
        if isinstance(command, ExchangeGive):
            command.data = entry.call.id.encode()
        outcome = yield from self.host.call(process, key, entry.call, command, self.simulator.now + line.timeout_s)
        if outcome in GAVE_UP:
            how, outcome = outcome, (yield from self._undo(process, key, undo, entry))
            if isinstance(outcome, Done) and not outcome.answer:
                outcome = how
            elif isinstance(outcome, Done):
                outcome = Done(outcome.answer[0])
        self.checker.end(entry, outcome)

    def _lock(self, process: ScheduledProcess, line: ScriptLine) -> Steps:
        entry = self._begin(process, "lock", LockAcquire())
        outcome = yield from self.host.call(
            process, "lock", entry.call, LockAcquire(), self.simulator.now + line.timeout_s
        )
        if outcome not in GAVE_UP:
            self.checker.holds(entry, outcome.answer)
            for _ in range(self.simulator.chance.randrange(4)):
                yield None
        self.checker.lets_go(entry)
        released = yield from self._undo(process, "lock", LockRelease, entry)
        self.checker.released(entry, released, process.repeated)

    def _put(self, process: ScheduledProcess, line: ScriptLine) -> Steps:
        entry = self._begin(process, "work_queue", WorkPut([b"x", b"y"], 3))
        self.checker.end(entry, (yield from self.host.call(process, "work_queue", entry.call, entry.command, NEVER)))

    def _work(self, process: ScheduledProcess, line: ScriptLine) -> Steps:
        """Take an item, and finish it or give it back; an interrupted take abandons it."""
        chance, key = self.simulator.chance, "work_queue"
        entry = self._begin(process, key, WorkTake())
        outcome = yield from self.host.call(
            process, key, entry.call, entry.command, self.simulator.now + line.timeout_s
        )
        if outcome in GAVE_UP:
            undone = yield from self._undo(process, key, WorkWithdraw if outcome is TIMED_OUT else WorkAbandon, entry)
            if not undone.answer:
                self.checker.end(entry, outcome)
                return
            outcome = Done(undone.answer[0])
        item = outcome.answer[0]
        self.checker.works_on(entry, item)
        for _ in range(chance.randrange(4)):
            yield None
        done = chance.random() < 0.7
        self.checker.lets_item_go(entry, item)
        outcome = yield from self._undo(
            process, key, lambda call: WorkDone(call, item) if done else WorkRelease(call, item), entry
        )
        self.checker.settled(entry, item, outcome, process.repeated, done)

    def _join(self, process: ScheduledProcess, line: ScriptLine) -> Steps:
        """Join; if the name is still taken, wait and retry a few times."""
        for _ in range(3):
            entry = self._begin(process, "roster", self._join_command(process))
            outcome = yield from self.host.call(process, "roster", entry.call, entry.command, NEVER)
            if outcome in GAVE_UP:
                yield from self._undo(process, "roster", membership.MembershipLeave, entry)
            self.checker.end(entry, outcome)
            if outcome in GAVE_UP:
                continue
            if isinstance(outcome, Done):
                self.checker.saw(process, outcome.answer, entry)
                return entry
            if outcome.error != "NameTaken":
                break
            yield from self._watch(process, line)
        return None

    def _join_command(self, process: ScheduledProcess) -> membership.MembershipJoin:
        """Make random devices and maps, some of them invalid."""
        chance, own = self.simulator.chance, f"d{process.name}"
        devices = [f"{own}.{number}" for number in range(chance.choice((0, 1, 2, 2, 2, 2)))]
        maps: dict[str, dict[str, str]] = {}
        for peer in range(self.size):
            if devices and chance.random() < 0.3:
                theirs = chance.choice((["0", "1"], ["1", "0"], ["0", "1"], ["1", "1"], ["2"]))
                maps[str(peer)] = {mine: f"d{peer}.{number}" for mine, number in zip(devices, theirs, strict=False)}
        return membership.MembershipJoin(b"", devices, maps)

    def _leave(self, process: ScheduledProcess, joined: CheckedCall) -> Steps:
        self.checker.leaves(joined)
        outcome = yield from self._undo(process, "roster", membership.MembershipLeave, joined)
        self.checker.left(joined, outcome, process.repeated)

    def _look(self, process: ScheduledProcess, line: ScriptLine) -> Steps:
        entry = self._begin(process, "roster", membership.MembershipQuery())
        outcome = yield from self.host.call(process, "roster", entry.call, entry.command, NEVER)
        self.checker.end(entry, outcome)
        self.checker.saw(process, outcome.answer)

    def _watch(self, process: ScheduledProcess, line: ScriptLine) -> Steps:
        entry = self._begin(process, "roster", membership.MembershipWatch(self.checker.epoch_of(process)))
        outcome = yield from self.host.call(
            process, "roster", entry.call, entry.command, self.simulator.now + line.timeout_s
        )
        if outcome in GAVE_UP:
            outcome = yield from self._undo(process, "roster", membership.MembershipLeave, entry)
        elif isinstance(outcome, Done):
            self.checker.watched(process, entry, outcome.answer)
        self.checker.end(entry, outcome)

    def _begin(self, process: ScheduledProcess, key: str, command: Command) -> CheckedCall:
        call = Call(process.name, process.session, next(process.numbers), former=process.former)
        return self.checker.begin(process, key, call, command)

    def _undo(self, process: ScheduledProcess, key: str, undo: Callable[[int], Undo], entry: CheckedCall) -> Steps:
        """Withdraw a call. If that was applied twice, the second time finds no call, so any answer is valid."""
        call = Call(process.name, entry.call.session, next(process.numbers))
        process.repeated = False
        outcome: Done | Refused = yield from self.host.call(process, key, call, undo(entry.call.number), NEVER)
        return outcome
