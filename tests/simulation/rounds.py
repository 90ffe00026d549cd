"""What the nodes of a rendezvous were told, and whether that can be true.

It knows nothing of the machine's state; only `expect_everybody_to_know` asks it, at the end, why somebody still waits.

- A round is one: all who are in it were told the same, but for their ranks, of which each is there once.
- It has as many nodes as it may have. Who asked for a rank has it, and who was in the round before keeps its own.
- Scopes are never used again; numbers go on within a run, and each round knows the one before.
- A run that was closed is closed for all, until it is opened; its nodes are in no later one.
- A round is over because somebody went or came who did.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from rallypoint.core.gathering import Limits
from rallypoint.core.machine import Done, Refused
from rallypoint.core.rendezvous import Close, Join, Leave, Open, Rendezvous, Watch

from .ledger import Entry, Ledger
from .world import World, Wrong


class Round(NamedTuple):
    """What a node is told of its round."""

    run: int
    number: int
    scope: int
    rank: int
    size: int
    first: Any
    before: int
    reason: str


class Rounds:
    """All rounds of one world, as they were told."""

    def __init__(self, world: World, limits: Limits) -> None:
        self.world = world
        self.limits = limits
        self.ledger = Ledger(world, 0)
        self.told: dict[int, Round] = {}
        """By scope, what the first one who heard of it was told."""

        self.ranks: dict[int, dict[int, str]] = {}
        """By scope and rank: the name."""

    def formed(self, entry: Entry, answer: list[Any]) -> Round:
        """Check what one was told of its round."""
        told = Round(*answer)
        told = told._replace(first=tuple(told.first))
        name, join = entry.call.member, entry.command
        assert isinstance(join, Join)
        self.world.note("in round", str(entry.process), told)
        if not self.limits.min_nodes <= told.size <= self.limits.max_nodes:
            raise Wrong(f"{name} is in a round of {told.size}: {told}, {self.limits}")
        others = self.told.setdefault(told.scope, told)
        if others._replace(rank=told.rank) != told:
            raise Wrong(f"{name} was told another round: {told}, and others {others}")
        ranks = self.ranks.setdefault(told.scope, {})
        if not 0 <= told.rank < told.size or ranks.setdefault(told.rank, name) != name:
            raise Wrong(f"{name} has a rank that is another's: {told}, {ranks}")
        if list(ranks.values()).count(name) > 1:
            raise Wrong(f"{name} has two ranks: {told}, {ranks}")
        if (told.rank == 0) != (told.first[0] == name):
            raise Wrong(f"{name} is not the first, or is: {told}")
        if 0 <= join.rank < told.size and told.rank != join.rank:
            raise Wrong(f"{name} asked for rank {join.rank}: {told}")
        if join.run >= 0 and told.run != join.run:
            raise Wrong(f"{name} of run {join.run} is in another: {told}")
        return told

    def over(self, entry: Entry, reason: str) -> None:
        """Check why a round is said to be over."""
        self.world.note("over", str(entry.process), reason)
        name, _, what = reason.partition(" ")
        theirs = [one.command for one in self.ledger.entries if one.call.member == name]
        if name == "lost":
            names = what.split(", ")
            sessions = {one.call.session for one in self.ledger.entries if one.call.member in names}
            true = bool(sessions & self.world.doubtful)
        elif what == "left":
            true = any(isinstance(one, Leave) for one in theirs)
        elif what in ("came again", "waits, and there is room for it"):
            true = any(isinstance(one, Join) for one in theirs)
        elif reason.startswith(("the run was closed: done: ", "the last run was closed, ")):
            true = any(isinstance(one.command, Close) for one in self.ledger.entries)
        else:
            assert isinstance(entry.command, Watch)
            true = what.endswith("has been formed") or reason == "no round has been formed yet"  # by who forgot
        if not true:
            raise Wrong(f"{entry.call.id} was told that its round is over: {reason}, which is not true")

    def judge(self, steady: bool, forgot_at: set[int]) -> None:
        """Check all rounds, when all is over.

        `steady` says that nobody asked for a rank, `forgot_at` has the revisions at which the host knew of nobody.
        """
        before = Round(-1, 0, 0, 0, 0, None, 0, "")
        for told in sorted(self.told.values(), key=lambda one: one.scope):
            forgotten = any(revision in forgot_at for revision in range(before.scope, told.scope))
            if told.run < before.run or (told.run == before.run and told.number <= before.number and not forgotten):
                raise Wrong(f"after {before} came {told}")
            if not (0 if forgotten else before.scope) <= told.before < told.scope:
                raise Wrong(f"before {told} was {before}")
            if steady and told.before == before.scope and told.run == before.run:
                self._same_ranks(told)
            before = told
        self._closed_is_closed()

    def _same_ranks(self, told: Round) -> None:
        """Check that who was in the round before has its rank in the next."""
        now = {name: rank for rank, name in self.ranks[told.scope].items()}
        for rank, name in self.ranks[told.before].items():
            if rank < told.size and now.get(name, rank) != rank:
                raise Wrong(f"{name} had rank {rank}, and then {now[name]}: {told}")

    def _closed_is_closed(self) -> None:
        """Check that nobody is in a round who came after a run was closed, and before another was opened."""
        entries = self.ledger.entries
        opens = [one for one in entries if isinstance(one.command, Open)]
        for close in [one for one in entries if isinstance(one.command, Close) and one.outcome == Done(True)]:
            opened_at = min((one.began for one in opens if one.ended > close.began), default=self.world.steps)
            for join in entries:
                if isinstance(join.command, Join) and close.ended < join.began and join.ended < opened_at:
                    refused = isinstance(join.outcome, Refused) and join.outcome.error == "RunClosed"
                    if not refused and isinstance(join.outcome, (Done, Refused)):
                        raise Wrong(f"{join.call.id} came after {close.call.id} had closed, and: {join.outcome}")


def expect_everybody_to_know(world: World, machine: Rendezvous, limits: Limits) -> None:
    """Check that all who live are in the round that stands, or stand by, or wait for more than there are."""
    living = [process for process in world.processes if not process.crashed and not process.done]
    if living and not all(world.alive(session) for session in machine.sessions()):
        dead = [session for session in machine.sessions() if not world.alive(session)]
        raise Wrong(f"{list(map(str, living))} are here with the dead {dead}: {machine}")
    for process in living:
        if process.waits is None:
            raise Wrong(f"{process} neither waits nor is done")
        _, call, command = process.waits
        if machine.closed is not None or not machine.keeps(call.id):
            raise Wrong(f"{process} waits with {command}, and was not told: {machine}")
        why, here = machine.why(call), len(machine.waiting)
        if isinstance(command, Watch):
            mine = machine.nodes.get(process.name)
            true = not machine.over and command.scope == machine.scope and mine and mine.call.session == call.session
        elif not machine.over:
            true = why.stands_by and len(machine.nodes) == limits.max_nodes
        else:
            few = f"{here} of at least {limits.min_nodes} nodes: waiting for {limits.min_nodes - here}; last joined"
            true = here < limits.min_nodes and why.reason.startswith(few) and not why.missing
        if not true:
            raise Wrong(f"{process} waits with {command} in vain: {why}, {machine}")
    if living and machine.alarm is not None:
        raise Wrong(f"an alarm is set, and never rings: {machine}")
