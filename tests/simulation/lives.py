"""What the members do, line by line of a script that all of one world share, and what they write down of it.

Every line is one use of an object: meet at the barrier, exchange, hold the lock for a while, join or leave the group,
watch it, look at it. Most waits have a time-out, after which the call is taken back; some have none.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from rallypoint.core import roster
from rallypoint.core.barrier import Arrive, Barrier, Withdraw
from rallypoint.core.exchange import Exchange, Give, TakeBack
from rallypoint.core.lock import Acquire, Lock, Release
from rallypoint.core.machine import Call, Command, Done, Machine, Refused, Undo

from .bytes_host import TIMED_OUT
from .ledger import INTERRUPTED, Entry, Ledger
from .world import NEVER, Life, Process, SessionLost, World

KINDS: dict[str, type[Machine]] = {"barrier": Barrier, "exchange": Exchange, "lock": Lock, "roster": roster.Roster}
GAVE_UP = (TIMED_OUT, INTERRUPTED)


class Line(Struct):
    """One line of a script."""

    what: str
    timeout_s: float
    how: Any = "all_gather"
    root: int = 0


def script_of(world: World, size: int) -> list[Line]:
    """Make up a script; of all objects, or mostly of one."""
    chance = world.chance
    every = ["barrier", "exchange", "lock", "join", "leave", "watch", "look"]
    group = ["join", "join", "leave", "watch", "watch", "look"]
    favourite = chance.choice((every, ["barrier"], ["exchange"], ["lock"], group))
    lines = []
    for _ in range(chance.randrange(2, 8)):
        what = chance.choice(favourite if chance.random() < 0.8 else every)
        timeout_s = chance.choice((2.0, 5.0, 5.0, NEVER))
        lines.append(
            Line(what, timeout_s, chance.choice(("all_gather", "gather", "broadcast")), chance.randrange(size))
        )
    return lines


class Lives:
    """The lives of all processes of one world, and the ledger of what they did."""

    def __init__(self, world: World, host: Any, size: int) -> None:
        self.world = world
        self.host = host
        self.size = size
        self.script = script_of(world, size)
        self.ledger = Ledger(world, size)

    def live(self, process: Process) -> Life:
        """Live a process' life."""
        joined: Entry | None = None
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
                self.ledger.session_lost(process)
                joined = None
                process.renew()
                process.at -= self.world.chance.randrange(2)

    def _barrier(self, process: Process, line: Line) -> Life:
        yield from self._meet(process, "barrier", line, Arrive(self.size), Withdraw)

    def _exchange(self, process: Process, line: Line) -> Life:
        rank = int(process.name)
        give = Give(self.size, rank, b"", line.how, line.root)
        yield from self._meet(process, "exchange", line, give, TakeBack)

    def _meet(self, process: Process, key: str, line: Line, command: Command, undo: type[Undo]) -> Life:
        """Make a call that is taken back at its time-out; it may then have come true nevertheless."""
        entry = self._begin(process, key, command)
        if isinstance(command, Give):
            command.data = entry.call.id.encode()
        outcome = yield from self.host.call(process, key, entry.call, command, self.world.now + line.timeout_s)
        if outcome in GAVE_UP:
            how, outcome = outcome, (yield from self._undo(process, key, undo, entry))
            if isinstance(outcome, Done) and not outcome.answer:
                outcome = how
            elif isinstance(outcome, Done):
                outcome = Done(outcome.answer[0])
        self.ledger.end(entry, outcome)

    def _lock(self, process: Process, line: Line) -> Life:
        entry = self._begin(process, "lock", Acquire())
        outcome = yield from self.host.call(process, "lock", entry.call, Acquire(), self.world.now + line.timeout_s)
        if outcome not in GAVE_UP:
            self.ledger.holds(entry, outcome.answer)
            for _ in range(self.world.chance.randrange(4)):
                yield None
        self.ledger.lets_go(entry)
        released = yield from self._undo(process, "lock", Release, entry)
        self.ledger.released(entry, released, process.repeated)

    def _join(self, process: Process, line: Line) -> Life:
        """Join; a name that is still taken is waited for, a few times."""
        for _ in range(3):
            entry = self._begin(process, "roster", self._card(process))
            outcome = yield from self.host.call(process, "roster", entry.call, entry.command, NEVER)
            if outcome in GAVE_UP:
                yield from self._undo(process, "roster", roster.Leave, entry)
            self.ledger.end(entry, outcome)
            if outcome in GAVE_UP:
                continue
            if isinstance(outcome, Done):
                self.ledger.saw(process, outcome.answer, entry)
                return entry
            if outcome.error != "NameTaken":
                break
            yield from self._watch(process, line)
        return None

    def _card(self, process: Process) -> roster.Join:
        """Make up devices and maps, some of them wrong."""
        chance, own = self.world.chance, f"d{process.name}"
        devices = [f"{own}.{number}" for number in range(chance.choice((0, 1, 2, 2, 2, 2)))]
        maps: dict[str, dict[str, str]] = {}
        for peer in range(self.size):
            if devices and chance.random() < 0.3:
                theirs = chance.choice((["0", "1"], ["1", "0"], ["0", "1"], ["1", "1"], ["2"]))
                maps[str(peer)] = {mine: f"d{peer}.{number}" for mine, number in zip(devices, theirs, strict=False)}
        return roster.Join(b"", devices, maps)

    def _leave(self, process: Process, joined: Entry) -> Life:
        self.ledger.leaves(joined)
        outcome = yield from self._undo(process, "roster", roster.Leave, joined)
        self.ledger.left(joined, outcome, process.repeated)

    def _look(self, process: Process, line: Line) -> Life:
        entry = self._begin(process, "roster", roster.Look())
        outcome = yield from self.host.call(process, "roster", entry.call, entry.command, NEVER)
        self.ledger.end(entry, outcome)
        self.ledger.saw(process, outcome.answer)

    def _watch(self, process: Process, line: Line) -> Life:
        entry = self._begin(process, "roster", roster.Watch(self.ledger.epoch_of(process)))
        outcome = yield from self.host.call(
            process, "roster", entry.call, entry.command, self.world.now + line.timeout_s
        )
        if outcome in GAVE_UP:
            outcome = yield from self._undo(process, "roster", roster.Leave, entry)
        elif isinstance(outcome, Done):
            self.ledger.watched(process, entry, outcome.answer)
        self.ledger.end(entry, outcome)

    def _begin(self, process: Process, key: str, command: Command) -> Entry:
        call = Call(process.name, process.session, next(process.numbers), former=process.former)
        return self.ledger.begin(process, key, call, command)

    def _undo(self, process: Process, key: str, undo: type[Undo], entry: Entry) -> Life:
        """Take a call back. Where that was repeated, what it took back is there no more: then any answer is true."""
        call = Call(process.name, entry.call.session, next(process.numbers))
        process.repeated = False
        outcome: Done | Refused = yield from self.host.call(process, key, call, undo(entry.call.number), NEVER)
        return outcome
