"""The policy of a launcher: what happens to a node's workers on a worker exit, a membership change, or a signal.

A `RestartPolicy` holds one agent's view of its workers. Events go in: an exit, the end of a round, the end of the
run, a signal. Decisions come out, always with a reason: wait, restart some workers, rejoin with all of them, finish.
The policy sees no clock, process or store: the agent passes in the worker's uptime and the number of restarts used by
the whole job, which only the store knows.

Restarts. `group` works as in torchrun: one worker fails, all nodes stop their workers and form another round. `node`
restarts the workers of this node, `worker` only the failed one: the others must be able to continue without it and to
reconnect to its successor. The budget belongs to the job, not to the node. Some exit codes are final: no restart.
After repeated early exits, the next start is delayed, and the delay doubles. A limit on restarts without progress ends
a loop of crashes that the budget would allow.

A round ends when a node goes. If all of that node's workers had succeeded, the others continue without it. If not, its
part of the result is lost: all nodes rejoin, including those that were done.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from msgspec import Struct, field

from rallypoint.core.policy.stop_policy import PREEMPTED

__all__ = [
    "FORWARDED",
    "Action",
    "Decision",
    "WorkerExit",
    "RestartPolicy",
    "RestartRules",
    "RoundProgress",
    "describe_result",
]

PAUSE_S, MAX_PAUSE_S = 1.0, 30.0
"""The delay after the second early exit in a row, and the longest delay."""

INTERRUPT, TERMINATE = "SIGINT", "SIGTERM"
FORWARDED = ("SIGUSR1", "SIGUSR2")
"""Signals that are forwarded to the workers, unless they are to end the job."""

SHOWN = 8


class Action:
    """The possible actions."""

    WAIT = "wait"
    """Do nothing for now."""

    RESTART = "restart"
    """Stop the listed ranks that still run, and start all listed ranks again."""

    REJOIN = "rejoin"
    """Stop all workers, and join the next round."""

    FINISH = "finish"
    """All workers have succeeded: announce it to the other nodes, and wait for them."""

    FAIL = "fail"
    """Stop all workers, and end the run for all nodes."""

    LEAVE = "leave"
    """Stop all workers within the grace period, and leave: the run may continue without this node."""

    KILL = "kill"
    """Kill all workers at once, and leave."""

    PREEMPTED = "preempted"
    """All workers have stopped: leave, with the exit code that asks for a new attempt."""

    FORWARD = "forward"
    """Forward the signal to all workers."""

    END = "end"
    """Stop all workers: the run has its result."""


class Decision(NamedTuple):
    """An action and its reason; the ranks it applies to, the delay before it, and the signal behind it."""

    action: str
    reason: str
    ranks: Sequence[int] = ()
    after_s: float = 0.0
    signal: str = ""


class RestartRules(Struct, frozen=True, kw_only=True):
    """The restart options of a job."""

    restart: str = "group"
    budget: int = 0
    """The number of restarts of the whole job."""

    min_uptime_s: float = 0.0
    """A failure after a shorter uptime counts as an early exit."""

    final_codes: tuple[int, ...] = ()
    """Exit codes after which the job fails without a restart."""

    no_progress_limit: int = 0
    """The job fails after this many restarts in a row without a new step of progress; 0: no limit."""


class WorkerExit(NamedTuple):
    """How a worker ended: its exit code (negative: the signal), a description, and its uptime."""

    rank: int
    code: int
    description: str
    uptime_s: float


class RoundProgress(NamedTuple):
    """The state of a round's nodes, by name."""

    members: Collection[str]
    """All nodes of the round when it formed."""

    alive: Collection[str]
    """The live nodes that have not rejoined."""

    waiting: Collection[str] = ()
    """The nodes that wait for another round: rejoined members and newcomers."""

    done: Collection[str] = ()
    """The nodes whose workers have all succeeded."""

    @property
    def living(self) -> set[str]:
        """The live members, rejoined or not."""
        return set(self.members).intersection((*self.alive, *self.waiting))

    @property
    def all_done(self) -> bool:
        """Whether all members have succeeded, including those that have left since."""
        return set(self.members).issubset(self.done)


class RestartPolicy(Struct, kw_only=True):
    """The workers of one node, by global rank."""

    rules: RestartRules
    running: dict[int, None] = field(default_factory=dict)
    done: dict[int, None] = field(default_factory=dict)
    stopped_early: dict[int, None] = field(default_factory=dict)
    """Ranks that stopped before the end of their work, at the step that all ranks agreed on."""

    early_exits: dict[int, int] = field(default_factory=dict)
    """Consecutive early exits: per rank with `worker` restarts, else of all ranks together (under -1)."""

    forwarded: tuple[str, ...] = FORWARDED
    """Signals that are forwarded to the workers, and end nothing."""

    signals: int = 0
    ending: str = ""
    """Why this node is ending; exits are then not failures."""

    def started(self, ranks: Sequence[int]) -> None:
        """Record the workers that run now."""
        for rank in ranks:
            self.running[rank] = None
            self.done.pop(rank, None)

    def reset(self) -> None:
        """Forget all workers, before those of another round start."""
        self.running, self.done, self.stopped_early = {}, {}, {}

    def exited(self, end: WorkerExit, used: int, stalled: int = 0) -> Decision:
        """Decide on the exit of a worker; `used` counts the job's restarts, including this one if it failed.

        `stalled` counts the last restarts of the job in which no worker reached a new step.
        """
        self.running.pop(end.rank, None)
        if self.ending:
            return Decision(Action.WAIT, f"rank {end.rank}: {end.description}, while ending: {self.ending}")
        if end.code == 0:
            self.done[end.rank] = None
            if self.running:
                return Decision(Action.WAIT, f"rank {end.rank} succeeded; {_ranks(self.running)} still running")
            if self.stopped_early:
                return Decision(Action.WAIT, f"rank {end.rank} succeeded; {_ranks(self.stopped_early)} stopped before")
            return Decision(Action.FINISH, "all workers of this node have succeeded")
        failed = f"rank {end.rank} failed: {end.description} after {end.uptime_s:.1f} s"
        if end.code in self.rules.final_codes:
            return self._end(Action.FAIL, f"{failed}; exit code {end.code} is final (--final-codes)")
        if used > self.rules.budget:
            budget = self.rules.budget
            return self._end(Action.FAIL, f"{failed}; restart budget exhausted ({budget} of {budget} used)")
        if 0 < self.rules.no_progress_limit <= stalled:
            last = f"{stalled} restart{'s' * (stalled > 1)} in a row"
            return self._end(Action.FAIL, f"{failed}; no new step of progress in {last} (--no-progress-limit)")
        return self._restart(end, f"{failed}; restart {used} of {self.rules.budget}")

    def stopped(self, rank: int, reason: str) -> Decision:
        """Record that a worker stopped because it was told to: it has neither succeeded nor failed."""
        self.running.pop(rank, None)
        self.stopped_early[rank] = None
        return Decision(Action.WAIT, reason)

    def changed(self, reason: str, progress: RoundProgress) -> Decision:
        """Decide when the round is over."""
        if self.ending:
            return Decision(Action.WAIT, f"{reason}, while ending: {self.ending}")
        if not self.running and progress.all_done:
            return Decision(Action.FINISH, f"{reason}; the workers of all nodes have succeeded")
        gone = set(progress.members) - progress.living
        if gone and gone.issubset(progress.done) and not progress.waiting:
            return Decision(Action.WAIT, f"{reason}; its workers had succeeded, so the others continue")
        return Decision(Action.REJOIN, reason)

    def failed_elsewhere(self, failure: str) -> Decision:
        """Decide when a worker of another node has failed and all nodes are to restart."""
        if self.ending:
            return Decision(Action.WAIT, f"{failure}, while ending: {self.ending}")
        return Decision(Action.REJOIN, f"{failure}; all nodes stop")

    def restart_all(self, reason: str) -> Decision:
        """Restart all workers of this node: an operator asked for it."""
        ranks = sorted([*self.running, *self.done])
        self.started(ranks)
        return Decision(Action.RESTART, reason, ranks)

    def start_failed(self, reason: str) -> Decision:
        """Decide when a worker cannot be started at all."""
        return self._end(Action.FAIL, reason)

    def retract_failure(self, lost: str) -> Decision:
        """Rejoin instead of failing the run: the failure is a consequence of a lost node."""
        self.ending = ""
        return Decision(Action.REJOIN, f"the failure is a consequence of a lost node: {lost}")

    def unhealthy(self, reason: str) -> Decision:
        """Leave the round: the health check of this node failed, which explains the failure of its worker."""
        self.ending = ""
        return Decision(Action.REJOIN, f"{reason}; this node leaves the round")

    def closed(self, result: str, reason: str) -> Decision:
        """Decide when the run has its result."""
        return self._end(Action.END, describe_result(result, reason))

    def signal(self, name: str) -> Decision:
        """Decide on a signal that the agent received."""
        if name in self.forwarded:
            return Decision(Action.FORWARD, f"{name} is forwarded to the workers", signal=name)
        self.signals += 1
        if self.signals > 1 and name == INTERRUPT:
            return self._end(Action.KILL, f"{name} again", name)
        hint = "; repeat to kill them" if name == INTERRUPT else ""
        return self._end(Action.LEAVE, f"{name}: stopping the workers{hint}", name)

    def must_kill(self, names: Sequence[str]) -> bool:
        """Return whether these pending signals, in any order, require killing the workers at once."""
        ending = [name for name in names if name not in self.forwarded]
        return INTERRUPT in ending and self.signals + len(ending) > 1

    def _restart(self, end: WorkerExit, reason: str) -> Decision:
        key = end.rank if self.rules.restart == "worker" else -1
        early = self.early_exits[key] = (
            self.early_exits.get(key, 0) + 1 if end.uptime_s < self.rules.min_uptime_s else 0
        )
        after_s = min(PAUSE_S * 2 ** (early - 2), MAX_PAUSE_S) if early > 1 else 0.0
        if after_s:
            reason = f"{reason}, after a pause of {after_s:g} s: {early} early exits in a row"
        if self.rules.restart == "group":
            return Decision(Action.REJOIN, reason, (), after_s)
        ranks = [end.rank] if self.rules.restart == "worker" else sorted([end.rank, *self.running, *self.done])
        self.started(ranks)  # now, before the delay: the node is not done until these ranks are
        return Decision(Action.RESTART, reason, ranks, after_s)

    def _end(self, act: str, reason: str, signal: str = "") -> Decision:
        self.ending = self.ending or reason
        return Decision(act, reason, signal=signal)


def describe_result(result: str, reason: str) -> str:
    """Return how a run has ended, as a clause."""
    return f"the run {'was' if result.startswith(PREEMPTED) else 'has'} {result}: {reason}"


def _ranks(ranks: dict[int, None]) -> str:
    listed = sorted(ranks)
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return f"rank{'s' * (len(listed) > 1)} {', '.join(map(str, listed[:SHOWN]))}{more}"
