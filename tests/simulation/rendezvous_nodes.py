"""The simulated nodes of a rendezvous: they join, stay until their round is over, and rejoin.

Each makes a few random choices, by which it gives up waiting, rejoins unasked, leaves, leaves and returns, or closes
the run, which another node may reopen. Without choices left it follows the rounds. In some simulations nodes request
ranks, some of them twice or too high; in some one node has other settings than the rest.
"""

from __future__ import annotations

from typing import Any

from tests.core.round_answer import Round

from rallypoint.core.machines import rendezvous
from rallypoint.core.machines.machine import Call, Command, Done, Refused, Undo
from rallypoint.core.policy.round_policy import NodeLimits
from rallypoint.errors import SessionLost
from rallypoint.testing.simulation.simulator import NEVER, ScheduledProcess, Simulator, Steps, Violation

from .call_checker import CheckedCall
from .members import GAVE_UP
from .round_checker import Rounds

KEY = "run"
PAUSE_S = 0.5


class Nodes:
    """The behaviour of all nodes of one simulation."""

    def __init__(self, simulator: Simulator, host: Any, size: int) -> None:
        self.simulator = simulator
        self.host = host
        chance = simulator.chance
        most = chance.randrange(1, size + 2)
        least = chance.randrange(1, most + 1) if chance.random() < 0.7 else most
        self.limits = NodeLimits(least, most, chance.choice((0.0, 0.5, 2.0, 5.0)))
        self.rounds = Rounds(simulator, self.limits)
        self.choices = chance.randrange(6)
        self.closes = chance.random() < 0.3
        self.asks = chance.random() < 0.3
        self.odd = f"n{chance.randrange(size)}" if chance.random() < 0.1 else ""

    def live(self, process: ScheduledProcess) -> Steps:
        """Run a node; one that gives up rejoining leaves, since it may still be in its last round."""
        run, last = -1, None
        while True:
            try:
                joined, run = yield from self._join(process, run)
                if joined is None:
                    if last is not None:
                        yield from self._undo(process, rendezvous.RendezvousLeave, last)
                    return
                last = joined
                if not (yield from self._stay(process, joined, Round(*joined.outcome.answer))):
                    return
            except SessionLost:
                self.rounds.checker.session_lost(process)
                process.renew()
                last = None

    def _join(self, process: ScheduledProcess, run: int) -> Steps:
        """Join, repeatedly, until in a round; return the call, or None if it gave up, and the run."""
        rank = self._wish(process)
        settings = {"batch": "8" if process.name == self.odd else "16"}
        while True:
            join = rendezvous.RendezvousJoin(self.limits, settings, rank, f"h{process.name}", run=run)
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
                yield from self.host.evict(process, KEY, rendezvous.RendezvousMachine)
                yield self.simulator.now + PAUSE_S
            elif error == "Disagreement" and self.odd:
                return None, run
            elif error:
                raise Violation(f"{entry.call.id} was refused: {outcome}")
            elif process.at == self.choices and self.simulator.chance.random() < 0.3:
                return None, run

    def _stay(self, process: ScheduledProcess, joined: CheckedCall, current: Round) -> Steps:
        """Stay in a round until it is over; return whether to rejoin."""
        while True:
            choice = self._next_choice(process)
            if choice in ("leave", "return"):
                yield from self._undo(process, rendezvous.RendezvousLeave, joined)
                return choice == "return"
            if choice == "again":
                return True
            if choice == "close":
                yield from self._ask(process, rendezvous.RendezvousClose("done", f"{process.name} says so"), NEVER)
            watch, outcome = yield from self._ask(
                process, rendezvous.RendezvousWatch(current.scope), self._patience_s(process)
            )
            if isinstance(outcome, Done) and isinstance(outcome.answer, str):
                self.rounds.over(watch, outcome.answer)
                return True
            if isinstance(outcome, Refused):
                raise Violation(f"{watch.call.id} watched, and was refused: {outcome}")

    def _open(self, process: ScheduledProcess) -> Steps:
        """Perhaps reopen the run; return whether that was tried."""
        if self._next_choice(process) != "close":
            return False
        yield from self._ask(process, rendezvous.RendezvousReopen(self.simulator.chance.random() < 0.5), NEVER)
        return True

    def _ask(self, process: ScheduledProcess, command: Command, patience_s: float) -> Steps:
        """Make a call, and withdraw it at its timeout; return it and its outcome."""
        checker = self.rounds.checker
        call = Call(process.name, process.session, next(process.numbers))
        entry = checker.begin(process, KEY, call, command)
        outcome = yield from self.host.call(process, KEY, call, command, self.simulator.now + patience_s)
        if outcome in GAVE_UP and isinstance(command, (rendezvous.RendezvousJoin, rendezvous.RendezvousWatch)):
            undone = yield from self._undo(process, rendezvous.RendezvousWithdraw, entry)
            if isinstance(undone, Done) and isinstance(undone.answer, list):
                outcome = Done(undone.answer[0])
            elif isinstance(undone, Refused) and isinstance(command, rendezvous.RendezvousJoin):
                outcome = undone
        checker.end(entry, outcome)
        return entry, outcome

    def _undo(self, process: ScheduledProcess, undo: type[Undo], entry: CheckedCall) -> Steps:
        checker = self.rounds.checker
        call = Call(process.name, entry.call.session, next(process.numbers))
        taken_back = checker.begin(process, KEY, call, undo(entry.call.number))
        outcome = yield from self.host.call(process, KEY, call, taken_back.command, NEVER)
        checker.end(taken_back, outcome)
        return outcome

    def _next_choice(self, process: ScheduledProcess) -> str:
        """Return the next random choice of a node; mostly none."""
        if process.at >= self.choices or self.simulator.chance.random() < 0.6:
            return ""
        process.at += 1
        what: str = self.simulator.chance.choice(
            ("leave", "return", "again", "again", "close" if self.closes else "again")
        )
        return what

    def _patience_s(self, process: ScheduledProcess) -> float:
        return self.simulator.chance.choice((1.0, 3.0)) if self._next_choice(process) else NEVER

    def _wish(self, process: ScheduledProcess) -> int:
        """Return a rank to request: its own number, a random one, or none."""
        if not self.asks or self.simulator.chance.random() < 0.4:
            return -1
        own = int(process.name[1:])
        return self.simulator.chance.choice((own, own, self.simulator.chance.randrange(self.limits.max_nodes + 1)))
