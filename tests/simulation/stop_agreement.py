"""A simulation of the agreement on a step to stop at: ranks, agents and a store, in any order that chance finds.

Ranks run `Worker.should_stop` itself, and agents the functions of `core/policy/stop_policy.py`. Any access of a rank to
its record may be interrupted by actions of others. What agents know of the store is as old as chance wants. With
collectives, a rank leaves a step only when all others have entered it: then a wrong wait is a deadlock, and a rank that
stops alone, too.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from rallypoint.core.policy import stop_policy
from rallypoint.core.policy.stop_policy import NONE, NodeStop, RankStop, StopPhase, StopRequest, StopState, node_stop
from rallypoint.launch.preemption.stop_record import ACCEPTED, COMMITTED, PASSED, PROPOSED, STOPPED
from rallypoint.launch.worker_context import Worker

__all__ = ["Blocked", "Job", "blocked"]

DEPTH = 4
FAIR_TURNS = 400
"""How often each rank and each agent gets its turn before a run that has not ended counts as stuck."""


class Blocked(Exception):
    """A rank waits in `should_stop`."""


def blocked(_: float) -> None:
    """Take the place of the pauses of a rank that waits."""
    raise Blocked


class Record(list[int]):
    """The record of a rank; others may act at any access by the rank."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        super().__init__([0] * 8 + [NONE] * 8)
        self.meanwhile = meanwhile

    def __getitem__(self, index: Any) -> Any:
        self.meanwhile()
        return super().__getitem__(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.meanwhile()
        super().__setitem__(index, value)


class Rank:
    """One rank: it asks at each step of `steps`, and enters a collective after each."""

    def __init__(self, job: Job, number: int, steps: range, asks: bool) -> None:
        self.job, self.number, self.steps, self.asks = job, number, steps, asks
        self.record = Record(job.meanwhile)
        self.at = 0
        """How many steps it has begun: with collectives, none of the others is more than one ahead."""

        self.in_step = False
        self.stopped_at: int | None = None
        self.ended = False

    def act(self) -> bool:
        """Ask, or leave the step; return whether something has changed."""
        if self.in_step:
            others = [one for one in self.job.ranks if one.asks]
            if self.asks and self.job.collectives and any(one.at < self.at for one in others):
                return False
            self.in_step = False
            return True
        if self.at == len(self.steps):
            self.ended = True
            return True
        try:
            stops = self.asks and Worker.should_stop(SimpleNamespace(_record=self.record), self.steps[self.at])  # type: ignore[arg-type]
        except Blocked:
            return False
        if stops:
            self.stopped_at, self.ended = self.steps[self.at], True
            return True
        self.at, self.in_step = self.at + 1, True
        return True

    def seen(self) -> RankStop:
        """Return what its agent reads, at one moment or another."""
        passed, accepted, stopped = (list.__getitem__(self.record, at) for at in (PASSED, ACCEPTED, STOPPED))
        return RankStop(self.number, passed, accepted, stopped != NONE)


class Agent:
    """One agent, and how much of the store it has seen."""

    def __init__(self, job: Job, name: str, ranks: list[Rank]) -> None:
        self.job, self.name, self.ranks = job, name, ranks
        self.state_at = -1
        self.reports_at: dict[str, int] = {}
        self.any_stopped = False

    def act(self, fair: bool = False) -> bool:
        """Look at the store and at the ranks, report, and decide if it is the first agent."""
        states, chance = self.job.states, self.job.chance
        if not states:
            return False
        self.state_at = len(states) - 1 if fair else chance.randint(max(0, self.state_at), len(states) - 1)
        state = states[self.state_at]
        for rank in self.ranks:
            if state.step is not None:
                list.__setitem__(rank.record, PROPOSED, state.step)
                if state.phase not in (StopPhase.ASKED, StopPhase.PROPOSED):
                    list.__setitem__(rank.record, COMMITTED, state.step)
        if state.phase == StopPhase.SIGNALLED:
            for rank in self.ranks:
                early = state.step is None or not rank.at  # no rank had asked when that was decided
                assert rank.ended or not rank.asks or early, f"rank {rank.number} asks, and gets the signal"
                rank.ended = self.any_stopped = True
        self.any_stopped = self.any_stopped or any(rank.stopped_at is not None for rank in self.ranks)
        running = [rank.seen() for rank in self.ranks if not rank.ended]
        report = node_stop(running, state.step, self.any_stopped)
        written = self.job.reports[self.name]
        changed = not written or written[-1] != report
        if changed:
            written.append(report)
        return (self.name == self.job.agents[0].name and self.decide(state, fair)) or changed

    def decide(self, state: StopState, fair: bool) -> bool:
        reports: dict[str, NodeStop] = {}
        for name, written in self.job.reports.items():
            if written:
                oldest = max(0, self.reports_at.get(name, 0))
                newest = len(written) - 1
                self.reports_at[name] = newest if fair or name == self.name else self.job.chance.randint(oldest, newest)
                reports[name] = written[self.reports_at[name]]
        decided = stop_policy.decide_stop(state, [agent.name for agent in self.job.agents], reports)
        if not isinstance(decided, StopState) or self.state_at != len(self.job.states) - 1:
            return False
        assert decided.order > state.order
        self.job.states.append(decided)
        return True


class Job:
    """One run of the simulation."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.collectives = chance.random() < 0.7
        self.depth = 0
        stride, length = chance.choice([1, 1, 3, 10]), chance.choice([4, 40, 400])
        steps = range(chance.randrange(5), 10_000, stride)[:length]
        asking = chance.random() > 0.2
        self.ranks: list[Rank] = []
        self.agents: list[Agent] = []
        for node in range(chance.randint(1, 4)):
            ranks = [
                Rank(self, len(self.ranks) + one, steps, asking or chance.random() < 0.5)
                for one in range(chance.randint(1, 3))
            ]
            self.ranks += ranks
            self.agents.append(Agent(self, f"n{node}", ranks))
        self.states: list[StopState] = []
        self.reports: dict[str, list[NodeStop]] = {agent.name: [] for agent in self.agents}
        self.begins_after = chance.randrange(200)
        self.busy: list[Rank] = []

    def meanwhile(self) -> None:
        """Let others act, now and then."""
        if self.depth < DEPTH and self.chance.random() < 0.2:
            self.turn()

    def turn(self) -> None:
        """Let one rank or agent act."""
        self.depth += 1
        idle = [rank for rank in self.ranks if not rank.ended and rank not in self.busy]
        if idle and self.chance.random() < 0.6:
            self.let(self.chance.choice(idle))
        elif not self.busy or self.chance.random() < 0.5:
            self.chance.choice(self.agents).act()
        self.depth -= 1

    def let(self, rank: Rank) -> bool:
        self.busy.append(rank)
        try:
            return rank.act()
        finally:
            self.busy.remove(rank)

    def run(self) -> None:
        """Run by chance, then fairly to the end; check that all ranks stop at one step, and none waits for ever."""
        for number in range(600):
            if number == self.begins_after:
                request = StopRequest(node="n0", reason="preempted")
                self.states.append(StopState(phase=StopPhase.ASKED, request=request))
            self.turn()
        for _ in range(FAIR_TURNS * 3):
            moved = [self.let(rank) for rank in self.ranks if not rank.ended]
            moved += [agent.act(fair=True) for agent in self.agents]
            if not any(moved):
                break
        self.check()

    def check(self) -> None:
        """Check the end."""
        stuck = [rank.number for rank in self.ranks if not rank.ended]
        assert not stuck, f"ranks {stuck} wait for ever: {self.states[-1]}"
        stopped = {
            rank.stopped_at for rank in self.ranks if rank.asks and (rank.stopped_at is not None or self.collectives)
        }
        assert len(stopped) <= 1, f"ranks stop at {stopped}"
        if stopped - {None}:
            assert self.states[-1].phase == StopPhase.OVER
        proposals = sum(state.phase == StopPhase.PROPOSED for state in self.states)
        assert proposals <= 1 + 2 * len(self.ranks), f"{proposals} proposals"
