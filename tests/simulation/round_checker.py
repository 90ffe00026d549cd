"""Checks the answers that nodes of a rendezvous get.

It does not use the machine's state; only `check_final_state` asks the machine, at the end, why a node still waits.

- All nodes of a round get the same answer, except for their ranks, which are distinct.
- The size of a round is within the limits. Requested ranks are assigned, and nodes of the previous round keep theirs.
- Scopes are never reused; numbers increase within a run, and each round names the previous one.
- A closed run is closed for all until it is reopened; its nodes are in no later run.
- The reason for the end of a round names a node that did leave, join or die.
"""

from __future__ import annotations

from typing import Any

from tests.core.round_answer import Round

from rallypoint.core.machines import rendezvous
from rallypoint.core.machines.machine import Done, Refused
from rallypoint.core.policy.round_policy import NodeLimits
from rallypoint.testing.simulation.simulator import Simulator, Violation

from .call_checker import CallChecker, CheckedCall


class Rounds:
    """All rounds of one simulation, as the nodes saw them."""

    def __init__(self, simulator: Simulator, limits: NodeLimits) -> None:
        self.simulator = simulator
        self.limits = limits
        self.checker = CallChecker(simulator, 0)
        self.rounds: dict[int, Round] = {}
        """By scope: the first answer about the round."""

        self.ranks: dict[int, dict[int, str]] = {}
        """Names by scope and rank."""

    def formed(self, entry: CheckedCall, answer: list[Any]) -> Round:
        """Check a node's view of its round."""
        seen = Round(*answer)
        seen = seen._replace(first=tuple(seen.first))
        name, join = entry.call.member, entry.command
        assert isinstance(join, rendezvous.RendezvousJoin)
        self.simulator.note("in round", str(entry.process), seen)
        if not self.limits.min_nodes <= seen.size <= self.limits.max_nodes:
            raise Violation(f"{name} is in a round of {seen.size}: {seen}, {self.limits}")
        others = self.rounds.setdefault(seen.scope, seen)
        if others._replace(rank=seen.rank) != seen:
            raise Violation(f"{name} has another round: {seen}, and others {others}")
        ranks = self.ranks.setdefault(seen.scope, {})
        if not 0 <= seen.rank < seen.size or ranks.setdefault(seen.rank, name) != name:
            raise Violation(f"{name} has a rank that is another's: {seen}, {ranks}")
        if list(ranks.values()).count(name) > 1:
            raise Violation(f"{name} has two ranks: {seen}, {ranks}")
        if (seen.rank == 0) != (seen.first[0] == name):
            raise Violation(f"{name} is not the first, or is: {seen}")
        if 0 <= join.rank < seen.size and seen.rank != join.rank:
            raise Violation(f"{name} asked for rank {join.rank}: {seen}")
        if join.run >= 0 and seen.run != join.run:
            raise Violation(f"{name} of run {join.run} is in another: {seen}")
        return seen

    def over(self, entry: CheckedCall, reason: str) -> None:
        """Check the reason given for the end of a round."""
        self.simulator.note("over", str(entry.process), reason)
        name, _, what = reason.partition(" ")
        theirs = [one.command for one in self.checker.entries if one.call.member == name]
        if name == "lost":
            names = what.split(", ")
            sessions = {one.call.session for one in self.checker.entries if one.call.member in names}
            true = bool(sessions & self.simulator.doubtful)
        elif what == "left":
            true = any(isinstance(one, rendezvous.RendezvousLeave) for one in theirs)
        elif what in ("rejoined", "is waiting, and the round has a free place"):
            true = any(isinstance(one, rendezvous.RendezvousJoin) for one in theirs)
        elif reason.startswith(("the run was closed: done: ", "the last run was closed, ")):
            true = any(isinstance(one.command, rendezvous.RendezvousClose) for one in self.checker.entries)
        else:
            assert isinstance(entry.command, rendezvous.RendezvousWatch)
            true = what.endswith("has been formed") or reason == "no round has been formed yet"  # if the host forgot
        if not true:
            raise Violation(f"the round of {entry.call.id} ended for a wrong reason: {reason}")

    def judge(self, steady: bool, forgot_at: set[int]) -> None:
        """Check all rounds at the end.

        `steady`: no node requested a rank; `forgot_at`: revisions at which the host had no machines.
        """
        before = Round(-1, 0, 0, 0, 0, None, 0, "")
        for seen in sorted(self.rounds.values(), key=lambda one: one.scope):
            forgotten = any(revision in forgot_at for revision in range(before.scope, seen.scope))
            if seen.run < before.run or (seen.run == before.run and seen.number <= before.number and not forgotten):
                raise Violation(f"after {before} came {seen}")
            if not (0 if forgotten else before.scope) <= seen.before < seen.scope:
                raise Violation(f"before {seen} was {before}")
            if steady and seen.before == before.scope and seen.run == before.run:
                self._same_ranks(seen)
            before = seen
        self._closed_is_closed()

    def _same_ranks(self, seen: Round) -> None:
        """Check that nodes of the previous round keep their ranks."""
        now = {name: rank for rank, name in self.ranks[seen.scope].items()}
        for rank, name in self.ranks[seen.before].items():
            if rank < seen.size and now.get(name, rank) != rank:
                raise Violation(f"{name} had rank {rank}, and then {now[name]}: {seen}")

    def _closed_is_closed(self) -> None:
        """Check that no node joined between the close of a run and its reopening."""
        entries = self.checker.entries
        opens = [one for one in entries if isinstance(one.command, rendezvous.RendezvousReopen)]
        for close in [
            one for one in entries if isinstance(one.command, rendezvous.RendezvousClose) and one.outcome == Done(True)
        ]:
            opened_at = min((one.began for one in opens if one.ended > close.began), default=self.simulator.steps)
            for join in entries:
                if (
                    isinstance(join.command, rendezvous.RendezvousJoin)
                    and close.ended < join.began
                    and join.ended < opened_at
                ):
                    refused = isinstance(join.outcome, Refused) and join.outcome.error == "RunClosed"
                    if not refused and isinstance(join.outcome, (Done, Refused)):
                        raise Violation(f"{join.call.id} came after {close.call.id} had closed: {join.outcome}")


def check_final_state(simulator: Simulator, machine: rendezvous.RendezvousMachine, limits: NodeLimits) -> None:
    """Check that all living nodes are in the current round, are spares, or wait for more nodes than there are."""
    living = [process for process in simulator.processes if not process.crashed and not process.done]
    if living and not all(simulator.alive(session) for session in machine.sessions()):
        dead = [session for session in machine.sessions() if not simulator.alive(session)]
        raise Violation(f"{list(map(str, living))} are here with the dead {dead}: {machine}")
    for process in living:
        if process.waits is None:
            raise Violation(f"{process} neither waits nor is done")
        _, call, command = process.waits
        if machine.closed is not None or not machine.holds(call.id):
            raise Violation(f"{process} waits with {command}, and was not woken: {machine}")
        why, here = machine.explain(call), len(machine.waiting)
        if isinstance(command, rendezvous.RendezvousWatch):
            mine = machine.nodes.get(process.name)
            true = not machine.over and command.scope == machine.scope and mine and mine.call.session == call.session
        elif not machine.over:
            true = why.is_spare and len(machine.nodes) == limits.max_nodes
        else:
            few = f"{here} of at least {limits.min_nodes} nodes: waiting for {limits.min_nodes - here}; last joined"
            true = here < limits.min_nodes and why.reason.startswith(few) and not why.missing
        if not true:
            raise Violation(f"{process} waits with {command} in vain: {why}, {machine}")
    if living and machine.timer is not None:
        raise Violation(f"a timer is set and never fires: {machine}")
