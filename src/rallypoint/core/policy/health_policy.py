"""Decide whether a node may join a round: whether to check its health first, and what follows a failed check.

A check is due before the first round of a node, and after a failure of one of its workers. A node whose check fails
stays out of the run for a cool-down, and is checked again. The cool-down doubles with each failed check in a row, up to
MAX_COOLDOWN_S; the row ends when a node has been well for that long. So a node that fails again soon after it was taken
back stays out longer each time.

While its check runs, a node keeps its place: the others wait for it, as long as last call allows. It gives the place up
when the check fails, or when a spare is there to take it and the check has not passed quickly.

A command that cannot be run at all is a mistake, not a sick node: the node gives up at its first check. Later, the
command has been seen to run, so its loss is a failed check (a file system that has gone).

Rejected: to leave the round before each check. The others would start without the node, and again when it is back.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct

__all__ = [
    "NOT_EXECUTABLE",
    "NOT_FOUND",
    "CheckResult",
    "CoolDown",
    "GiveUp",
    "HealthRules",
    "HealthSituation",
    "JoinRound",
    "LeaveRound",
    "RunCheck",
    "WaitForCheck",
    "decide",
    "failed_in_row",
]

MAX_COOLDOWN_S = 600.0
"""The longest cool-down, unless a longer one is set; and the time after which failed checks are forgotten."""

QUICK_S = 2.0
"""How long a node that is being checked keeps a place that a spare could take."""

NOT_EXECUTABLE, NOT_FOUND = 126, 127
"""The exit codes of a shell that cannot run a command."""


class HealthRules(Struct, frozen=True, kw_only=True):
    """The health check of a node: a command line for the shell, empty for none."""

    command: str = ""
    timeout_s: float = 60.0
    """A check that takes longer has failed."""

    cooldown_s: float = 60.0
    """Time out of the run after the first of several failed checks."""

    def cooldown_after(self, failed: int) -> float:
        """Return the cool-down after so many failed checks in a row."""
        return min(self.cooldown_s * 2.0 ** min(failed - 1, 60), max(self.cooldown_s, MAX_COOLDOWN_S))


class CheckResult(NamedTuple):
    """How a check ended: its exit code (negative: a signal; None: it took too long), in words, and its last output."""

    code: int | None
    how: str
    output: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the node is well."""
        return self.code == 0

    @property
    def reason(self) -> str:
        """How it ended, and what it printed last, in one line."""
        return ": ".join([self.how, *(["; ".join(self.output)] if self.output else [])])


class HealthSituation(NamedTuple):
    """The facts that a decision depends on."""

    due: str = ""
    """Why a check is due; empty if none is."""

    running_s: float | None = None
    """How long the check has been running; None if none is."""

    result: CheckResult | None = None
    """The result of the last check, until its cool-down is over."""

    failed: int = 0
    """Failed checks in a row, the last one included."""

    has_run: bool = False
    """Whether an earlier check has been run."""

    has_place: bool = False
    """Whether this node still has a place in the last round."""

    others: int = 0
    """Nodes that wait for the next round."""

    max_nodes: int = 1
    left_s: float = 0.0
    """Time until this node gives up."""


class JoinRound(NamedTuple):
    """Join the next round."""

    reason: str


class RunCheck(NamedTuple):
    """Start a check."""

    reason: str


class WaitForCheck(NamedTuple):
    """Wait until the check has ended."""

    reason: str


class LeaveRound(NamedTuple):
    """Give up the place in the round, and wait for the check."""

    reason: str


class CoolDown(NamedTuple):
    """Stay out of the run for a time, and check again."""

    reason: str
    for_s: float


class GiveUp(NamedTuple):
    """End this node with this exit code."""

    reason: str
    exit_code: int = 1


HealthDecision = JoinRound | RunCheck | WaitForCheck | LeaveRound | CoolDown | GiveUp


def decide(rules: HealthRules, now: HealthSituation) -> HealthDecision:
    """Decide what a node that wants to join a round does next."""
    if not rules.command or not now.due:
        return JoinRound("no health check is due")
    if now.running_s is not None:
        if now.has_place and now.running_s >= QUICK_S and now.others >= now.max_nodes:
            return LeaveRound(f"a spare takes its place: its health check has been running for {now.running_s:.1f} s")
        return WaitForCheck(f"checking the health of this node, {now.due}")
    if now.result is None:
        return RunCheck(now.due)
    if now.result.passed:
        return JoinRound("the health check passed")
    if now.result.code in (NOT_EXECUTABLE, NOT_FOUND) and not now.has_run:
        return GiveUp(f"the health check cannot be run: {now.result.reason}", now.result.code)
    failed = f"health check failed{f' {now.failed} times in a row' * (now.failed > 1)}: {now.result.reason}"
    if now.left_s <= 0:
        return GiveUp(failed)
    return CoolDown(failed, min(rules.cooldown_after(now.failed), now.left_s))


def failed_in_row(before: int, well_s: float | None) -> int:
    """Return the failed checks in a row after one more; the node had been well for `well_s`, None: it was not."""
    return 1 if well_s is not None and well_s > MAX_COOLDOWN_S else before + 1
