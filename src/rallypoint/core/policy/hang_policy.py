"""Decide which ranks of a job hang: the ranks to name and restart, not the ranks that wait for them.

A rank is overdue if its last call of `progress` is older than the hang timeout, or if its process has been stopped for
that long. Then `find_hung` examines the stacks of all ranks:

1. Stopped processes hang.
2. A rank that made progress within half of the timeout does not hang. The others are silent; so is a rank that has
   never called `progress`, once another one is overdue.
3. A silent rank in a library call that waits for other ranks (a collective, a barrier) waits; a silent rank elsewhere
   hangs. If some of the ranks elsewhere have called `progress`, those that never have are not blamed.
4. If no silent rank is known to wait, or all do, the ranks that are behind the others in steps hang; else the ranks in
   another place than most. If no rank stands out, all of them are named.
5. If all silent ranks wait, and others still make progress or are unknown, nobody hangs yet: a node that does not
   answer is either back soon, or lost.

Rejected: blaming the rank whose progress is the oldest. A fast rank reaches a collective first, and waits there for
the slow one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rallypoint.core.stacks import RankStack, describe_groups, fold, rank_list

__all__ = ["HungRanks", "NotHung", "find_hung", "is_overdue", "reason_of"]

RECENT = 0.5
"""The fraction of the timeout within which progress counts as recent."""

NAMED = 3
"""How many ranks are described one by one."""


class HungRanks(NamedTuple):
    """These ranks hang."""

    ranks: list[int]
    reason: str


class NotHung(NamedTuple):
    """No rank hangs, or not yet."""

    reason: str


def is_overdue(one: RankStack, timeout_s: float) -> bool:
    """Return whether a rank is overdue, so that all stacks must be examined."""
    return max(one.stopped_s if one.state == "stopped" else 0.0, one.age_s or 0.0) >= timeout_s


def find_hung(ranks: Sequence[RankStack], timeout_s: float, unknown: Sequence[str] = ()) -> HungRanks | NotHung:
    """Decide which ranks hang; `ranks` are the running ranks of the round, except those on `unknown` nodes."""
    stopped = [one for one in ranks if one.state == "stopped" and one.stopped_s >= RECENT * timeout_s]
    late = any(is_overdue(one, timeout_s) for one in ranks)
    silent = [one for one in ranks if one not in stopped and late and _is_silent(one, timeout_s, ranks)]
    waiting = [one for one in silent if one.waits]
    elsewhere = [one for one in silent if not one.waits]
    blamed = [one for one in elsewhere if one.age_s is not None] or elsewhere
    recent = [one for one in ranks if one not in stopped and one not in silent]
    if not blamed and not stopped:
        if waiting and recent:
            return NotHung(f"{_places(waiting)}; {rank_list([one.rank for one in recent])} made progress recently")
        if waiting and unknown:
            return NotHung(f"{_places(waiting)}; no answer from {', '.join(unknown)}")
        if not waiting:
            return NotHung("all ranks make progress")
    if not waiting or (not blamed and not stopped):
        blamed = _standing_out(blamed or waiting, bool(stopped))
    named = sorted([*stopped, *blamed], key=lambda one: one.rank)
    others = [one for one in silent if one not in blamed]
    return HungRanks([one.rank for one in named], _reason(named, others))


def _is_silent(one: RankStack, timeout_s: float, ranks: Sequence[RankStack]) -> bool:
    if one.age_s is None:
        return any(other.age_s is not None for other in ranks)
    return one.age_s >= RECENT * timeout_s


def _standing_out(ranks: list[RankStack], excused: bool) -> list[RankStack]:
    """Return the ranks that are behind in steps, else elsewhere than most, else all; equal ones may be excused."""
    furthest = max((one.step for one in ranks if one.step is not None), default=0)
    behind = [one for one in ranks if one.step is None or one.step < furthest]
    if behind and len(behind) < len(ranks):
        return behind
    groups = fold(ranks)
    if len(groups) > 1 and len(groups[-2].ranks) < len(groups[-1].ranks):
        return [one for one in ranks if one.rank not in groups[-1].ranks]
    return [] if excused and len(groups) == 1 and len(ranks) > 1 else ranks


def _reason(named: list[RankStack], others: list[RankStack]) -> str:
    shown = [f"rank {one.rank} on {one.node} hangs: {reason_of(one)}" for one in named[:NAMED]]
    if len(named) > NAMED:
        shown = [f"{rank_list([one.rank for one in named])} hang: {_places(named)}"]
    return "; ".join([*shown, *([f"waiting: {_places(others)}"] if others else [])])


def reason_of(one: RankStack) -> str:
    """Return the reason for reporting a rank as hung."""
    if one.state == "stopped":
        return f"{one.note or 'stopped'} for {one.stopped_s:.1f} s"
    since = "it never called progress()" if one.age_s is None else f"no progress for {one.age_s:.1f} s"
    step = "" if one.step is None else f" since step {one.step}"
    return f"{since}{step}, {'in ' * bool(one.stack)}{one.place}"


def _places(ranks: list[RankStack]) -> str:
    return describe_groups(fold(ranks))
