"""What the nodes of a rendezvous do: come, stay while their round stands, and come again when it is over.

Each has a few whims, by which it gives up waiting, comes again unasked, leaves for good or to return, or closes the
run, which some other may open again. Whoever has no whims left does what it is told to. In some worlds nodes ask for
ranks, of which some are asked for twice or are too high; in some one has other settings, and does not fit to the rest.
"""

from __future__ import annotations

from typing import Any

from rallypoint.core.gathering import Limits
from rallypoint.core.machine import Call, Command, Done, Refused, Undo
from rallypoint.core.rendezvous import Close, Join, Leave, Open, Rendezvous, Watch, Withdraw

from .ledger import Entry
from .lives import GAVE_UP
from .rounds import Round, Rounds
from .world import NEVER, Life, Process, SessionLost, World, Wrong

KEY = "run"
PAUSE_S = 0.5


class Nodes:
    """The lives of all nodes of one world."""

    def __init__(self, world: World, host: Any, size: int) -> None:
        self.world = world
        self.host = host
        chance = world.chance
        most = chance.randrange(1, size + 2)
        least = chance.randrange(1, most + 1) if chance.random() < 0.7 else most
        self.limits = Limits(least, most, chance.choice((0.0, 0.5, 2.0, 5.0)))
        self.rounds = Rounds(world, self.limits)
        self.whims = chance.randrange(6)
        self.closes = chance.random() < 0.3
        self.asks = chance.random() < 0.3
        self.odd = f"n{chance.randrange(size)}" if chance.random() < 0.1 else ""

    def live(self, process: Process) -> Life:
        """Live a node's life; whoever gives up leaves, for it may not have come again."""
        run, last = -1, None
        while True:
            try:
                joined, run = yield from self._join(process, run)
                if joined is None:
                    if last is not None:
                        yield from self._undo(process, Leave, last)
                    return
                last = joined
                if not (yield from self._stay(process, joined, Round(*joined.outcome.answer))):
                    return
            except SessionLost:
                self.rounds.ledger.session_lost(process)
                process.renew()
                last = None

    def _join(self, process: Process, run: int) -> Life:
        """Come, again and again, until in a round; return by which call, and the run. None: it is not to be."""
        rank = self._wish(process)
        settings = {"batch": "8" if process.name == self.odd else "16"}
        while True:
            join = Join(self.limits, settings, rank, f"h{process.name}", run=run)
            entry, outcome = yield from self._ask(process, join, self._patience_s(process))
            if isinstance(outcome, Done):
                return entry, self.rounds.formed(entry, outcome.answer).run
            error = outcome.error if isinstance(outcome, Refused) else ""
            if error == "RunClosed":
                if not (yield from self._open(process)):
                    return None, run
                run = -1
            elif error in ("RankTaken", "NotAMember"):
                rank = -1
            elif error == "NameTaken":
                yield from self.host.bury(process, KEY, Rendezvous)
                yield self.world.now + PAUSE_S
            elif error == "Disagreement" and self.odd:
                return None, run
            elif error:
                raise Wrong(f"{entry.call.id} was refused: {outcome}")
            elif process.at == self.whims and self.world.chance.random() < 0.3:
                return None, run

    def _stay(self, process: Process, joined: Entry, told: Round) -> Life:
        """Stay in a round until it is over; say whether to come again."""
        while True:
            whim = self._whim(process)
            if whim in ("leave", "return"):
                yield from self._undo(process, Leave, joined)
                return whim == "return"
            if whim == "again":
                return True
            if whim == "close":
                yield from self._ask(process, Close("done", f"{process.name} says so"), NEVER)
            watch, outcome = yield from self._ask(process, Watch(told.scope), self._patience_s(process))
            if isinstance(outcome, Done) and isinstance(outcome.answer, str):
                self.rounds.over(watch, outcome.answer)
                return True
            if isinstance(outcome, Refused):
                raise Wrong(f"{watch.call.id} watched, and was refused: {outcome}")

    def _open(self, process: Process) -> Life:
        """Open the run again, perhaps; say whether that was tried."""
        if self._whim(process) != "close":
            return False
        yield from self._ask(process, Open(), NEVER)
        return True

    def _ask(self, process: Process, command: Command, patience_s: float) -> Life:
        """Make a call, and take it back when its time is over; return it, and what came of it."""
        ledger = self.rounds.ledger
        call = Call(process.name, process.session, next(process.numbers))
        entry = ledger.begin(process, KEY, call, command)
        outcome = yield from self.host.call(process, KEY, call, command, self.world.now + patience_s)
        if outcome in GAVE_UP and isinstance(command, (Join, Watch)):
            undone = yield from self._undo(process, Withdraw, entry)
            if isinstance(undone, Done) and isinstance(undone.answer, list):
                outcome = Done(undone.answer[0])
            elif isinstance(undone, Refused) and isinstance(command, Join):
                outcome = undone
        ledger.end(entry, outcome)
        return entry, outcome

    def _undo(self, process: Process, undo: type[Undo], entry: Entry) -> Life:
        ledger = self.rounds.ledger
        call = Call(process.name, entry.call.session, next(process.numbers))
        taken_back = ledger.begin(process, KEY, call, undo(entry.call.number))
        outcome = yield from self.host.call(process, KEY, call, taken_back.command, NEVER)
        ledger.end(taken_back, outcome)
        return outcome

    def _whim(self, process: Process) -> str:
        """Return what a node takes into its head; mostly nothing."""
        if process.at >= self.whims or self.world.chance.random() < 0.6:
            return ""
        process.at += 1
        what: str = self.world.chance.choice(("leave", "return", "again", "again", "close" if self.closes else "again"))
        return what

    def _patience_s(self, process: Process) -> float:
        return self.world.chance.choice((1.0, 3.0)) if self._whim(process) else NEVER

    def _wish(self, process: Process) -> int:
        """Return a rank to ask for: its own number, or any, or none."""
        if not self.asks or self.world.chance.random() < 0.4:
            return -1
        own = int(process.name[1:])
        return self.world.chance.choice((own, own, self.world.chance.randrange(self.limits.max_nodes + 1)))
