"""The policy of a launcher: what happens to the workers of a node when one ends, when nodes come and go, on signals.

A `Gang` is what one agent knows of its workers. What happens goes in: an exit, a round that is over, the run's end,
a signal. What to do comes out, always with a reason: wait, restart some workers, come again with all of them, finish.
It sees no clock, no process and no store: the agent tells it how old a worker was, and how many restarts the job as a
whole has used, which only the store knows.

Restarts. `group` is torchrun's way: one worker fails, and all nodes stop their workers and form another round. `node`
starts the workers of this node again, and `worker` only the one that failed: the others must be able to go on without
it, and meet it again. The budget is the job's, not the node's. An exit code may mean that starting again is no use. A
worker that dies young, again and again, is started after a pause that doubles.

A round ends when a node goes. A node whose workers had all succeeded is not missed: the others go on without it. One
whose workers had not takes their part of the result with it: all come again, also those who were done.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from msgspec import Struct, field

__all__ = ["Act", "Decision", "Exit", "Gang", "Rules", "Standing"]

PAUSE_S, MAX_PAUSE_S = 1.0, 30.0
"""How long a gang pauses after its second young death in a row, and at most."""

INTERRUPT, TERMINATE = "SIGINT", "SIGTERM"
FORWARDED = ("SIGUSR1", "SIGUSR2")
SHOWN = 8


class Act:
    """What there is to do."""

    WAIT = "wait"
    """Nothing, for now."""

    RESTART = "restart"
    """Stop those of the ranks that run, and start them again."""

    REJOIN = "rejoin"
    """Stop all workers, and come to the next round."""

    FINISH = "finish"
    """All workers have succeeded: say so to the other nodes, and wait for them."""

    FAIL = "fail"
    """Stop all workers, and end the run for all nodes."""

    LEAVE = "leave"
    """Stop all workers within the grace, and leave: the run may go on without this node."""

    KILL = "kill"
    """Kill all workers at once, and leave."""

    FORWARD = "forward"
    """Pass the signal on to all workers."""

    END = "end"
    """Stop all workers: the run has its result."""


class Decision(NamedTuple):
    """What to do, and why; to which ranks, after how long a pause, and because of which signal."""

    act: str
    reason: str
    ranks: Sequence[int] = ()
    after_s: float = 0.0
    signal: str = ""


class Rules(Struct, frozen=True, kw_only=True):
    """What a job was told about restarts."""

    restart: str = "group"
    budget: int = 0
    """How many restarts the whole job has."""

    min_uptime_s: float = 0.0
    """A worker that dies younger dies young."""

    final_codes: tuple[int, ...] = ()
    """Exit codes after which starting again is no use."""


class Exit(NamedTuple):
    """How a worker ended: its code (negative: the signal), in words, and how old it was."""

    rank: int
    code: int
    words: str
    uptime_s: float


class Standing(NamedTuple):
    """How the nodes of a round stand, by name."""

    members: Collection[str]
    """All who were in the round when it was formed."""

    here: Collection[str]
    """Who lives, and has not come again."""

    waiting: Collection[str] = ()
    """Who waits for another round: members who came again, and newcomers."""

    done: Collection[str] = ()
    """Whose workers have all succeeded."""

    @property
    def living(self) -> set[str]:
        """The members who live, wherever they are."""
        return set(self.members).intersection((*self.here, *self.waiting))

    @property
    def all_done(self) -> bool:
        """Whether all members have succeeded, those who have gone since included."""
        return set(self.members).issubset(self.done)


class Gang(Struct, kw_only=True):
    """The workers of one node, by global rank."""

    rules: Rules
    running: dict[int, None] = field(default_factory=dict)
    done: dict[int, None] = field(default_factory=dict)
    young: dict[int, int] = field(default_factory=dict)
    """How many deaths in a row were young: of a rank where it alone is started again, else of all (under -1)."""

    signals: int = 0
    ending: str = ""
    """Why this node is on its way out; then exits are no failures."""

    def started(self, ranks: Sequence[int]) -> None:
        """Note which workers run now."""
        for rank in ranks:
            self.running[rank] = None
            self.done.pop(rank, None)

    def regrouped(self) -> None:
        """Note that there are no workers: those of another round come."""
        self.running, self.done = {}, {}

    def exited(self, end: Exit, used: int) -> Decision:
        """Decide on the end of a worker; `used` is how many restarts the job has used, with this one if it fails."""
        self.running.pop(end.rank, None)
        if self.ending:
            return Decision(Act.WAIT, f"rank {end.rank}: {end.words}, while ending: {self.ending}")
        if end.code == 0:
            self.done[end.rank] = None
            if self.running:
                return Decision(Act.WAIT, f"rank {end.rank} has succeeded; {_ranks(self.running)} still at work")
            return Decision(Act.FINISH, "all workers of this node have succeeded")
        failed = f"rank {end.rank} failed: {end.words} after {end.uptime_s:.1f} s"
        if end.code in self.rules.final_codes:
            return self._end(Act.FAIL, f"{failed}; this exit code means that starting again is no use")
        if used > self.rules.budget:
            spent = (
                f"the budget of {self.rules.budget} restart{'s' * (self.rules.budget > 1)} is used"
                if self.rules.budget
                else "the job has no restarts"
            )
            return self._end(Act.FAIL, f"{failed}; {spent}")
        return self._restart(end, f"{failed}; restart {used} of {self.rules.budget}")

    def changed(self, reason: str, now: Standing) -> Decision:
        """Decide when the round is over."""
        if self.ending:
            return Decision(Act.WAIT, f"{reason}, while ending: {self.ending}")
        if not self.running and now.all_done:
            return Decision(Act.FINISH, f"{reason}; the workers of all nodes have succeeded")
        gone = set(now.members) - now.living
        if gone and gone.issubset(now.done) and not now.waiting:
            return Decision(Act.WAIT, f"{reason}; its workers had succeeded, so the others go on")
        return Decision(Act.REJOIN, reason)

    def failed_elsewhere(self, failure: str) -> Decision:
        """Decide when a worker of another node has failed, and all are to start again."""
        if self.ending:
            return Decision(Act.WAIT, f"{failure}, while ending: {self.ending}")
        return Decision(Act.REJOIN, f"{failure}; all nodes stop")

    def unstartable(self, words: str) -> Decision:
        """Decide when a worker cannot be started at all."""
        return self._end(Act.FAIL, words)

    def excused(self, lost: str) -> Decision:
        """Decide when it turns out that the failure which was to end the run came of the loss of a node."""
        self.ending = ""
        return Decision(Act.REJOIN, f"it failed because of another node: lost {lost}")

    def closed(self, result: str, reason: str) -> Decision:
        """Decide when the run has its result."""
        return self._end(Act.END, f"the run has {result}: {reason}")

    def signal(self, name: str) -> Decision:
        """Decide on a signal that the agent got."""
        if name in FORWARDED:
            return Decision(Act.FORWARD, f"{name} is for the workers", signal=name)
        self.signals += 1
        if self.signals > 1 and name == INTERRUPT:
            return self._end(Act.KILL, f"{name} again", name)
        hint = "; again to kill them" if name == INTERRUPT else ""
        return self._end(Act.LEAVE, f"{name}: the workers are asked to end{hint}", name)

    def hurried(self, names: Sequence[str]) -> bool:
        """Say whether these signals, which are still to be decided on and may be in any order, mean not to wait."""
        ending = [name for name in names if name not in FORWARDED]
        return INTERRUPT in ending and self.signals + len(ending) > 1

    def _restart(self, end: Exit, reason: str) -> Decision:
        key = end.rank if self.rules.restart == "worker" else -1
        young = self.young[key] = self.young.get(key, 0) + 1 if end.uptime_s < self.rules.min_uptime_s else 0
        after_s = min(PAUSE_S * 2 ** (young - 2), MAX_PAUSE_S) if young > 1 else 0.0
        if after_s:
            reason = f"{reason}, after a pause of {after_s:g} s: {young} in a row died young"
        if self.rules.restart == "group":
            return Decision(Act.REJOIN, reason, (), after_s)
        ranks = [end.rank] if self.rules.restart == "worker" else sorted([end.rank, *self.running, *self.done])
        self.started(ranks)  # as good as: nobody is done before they are
        return Decision(Act.RESTART, reason, ranks, after_s)

    def _end(self, act: str, reason: str, signal: str = "") -> Decision:
        self.ending = self.ending or reason
        return Decision(act, reason, signal=signal)


def _ranks(ranks: dict[int, None]) -> str:
    listed = sorted(ranks)
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return f"rank{'s' * (len(listed) > 1)} {', '.join(map(str, listed[:SHOWN]))}{more}"
