"""Who hangs, and who only waits for those: a table of jobs, and what is decided about them."""

from __future__ import annotations

from typing import Any

import pytest

from rallypoint.core.policy.hang_policy import HungRanks, find_hung, is_overdue
from rallypoint.core.stacks import RankStack

IN = 'Current thread 0x1 (most recent call first):\n{lib}  File "/job/train.py", line {line} in {function}\n'
TORCH = '  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 9 in {function}\n'
ALL_REDUCE = IN.format(lib=TORCH.format(function="all_reduce"), line=41, function="step")
BROADCAST = IN.format(lib=TORCH.format(function="broadcast"), line=50, function="step")
SLEEP = IN.format(lib="", line=12, function="asleep")
OWN_WAIT = IN.format(lib="", line=30, function="wait_for_peers")


def running(rank: int, text: str = SLEEP, age_s: float | None = 11.0, step: int | None = 3) -> RankStack:
    return RankStack(rank=rank, node="n0", text=text, age_s=age_s, step=None if age_s is None else step)


def stopped(rank: int, stopped_s: float = 11.0, **more: Any) -> RankStack:
    return RankStack(rank=rank, node="n0", note="stopped (SIGSTOP)", state="stopped", stopped_s=stopped_s, **more)


SLEEPS = "rank 1 on n0 hangs: no progress for 11.0 s since step 3, in asleep (train.py:12)"
WAITS = "waiting: ranks 2, 3 in all_reduce (train.py:41)"

CASES: list[tuple[str, list[RankStack], list[int], str]] = [
    ("one sleeps, the others go on", [running(0, age_s=0.1), running(1), running(2, age_s=0.2)], [1], SLEEPS),
    (
        "one sleeps, one is stopped, the others wait for both",
        [stopped(0), running(1), running(2, ALL_REDUCE), running(3, ALL_REDUCE)],
        [0, 1],
        f"rank 0 on n0 hangs: stopped (SIGSTOP) for 11.0 s; {SLEEPS}; {WAITS}",
    ),
    (
        "stopped, and no rank calls progress",
        [stopped(0), running(1, age_s=None)],
        [0],
        "rank 0 on n0 hangs: stopped (SIGSTOP) for 11.0 s",
    ),
    (
        "stopped, and the others wait in a collective",
        [stopped(0, step=3, age_s=11.0), running(2, ALL_REDUCE), running(3, ALL_REDUCE)],
        [0],
        f"rank 0 on n0 hangs: stopped (SIGSTOP) for 11.0 s; {WAITS}",
    ),
    (
        "stopped, and the others wait by means of their own",
        [stopped(0), running(2, OWN_WAIT), running(3, OWN_WAIT)],
        [0],
        "waiting: ranks 2, 3 in wait_for_peers (train.py:30)",
    ),
    (
        "those that wait were overdue first",
        [running(1, age_s=6.0), running(2, ALL_REDUCE), running(3, ALL_REDUCE)],
        [1],
        WAITS,
    ),
    (
        "the one that hangs never called progress",
        [running(1, age_s=None), running(2, ALL_REDUCE), running(3, ALL_REDUCE)],
        [1],
        "rank 1 on n0 hangs: it never called progress(), in asleep (train.py:12)",
    ),
    (
        "only rank 0 calls progress, and it hangs",
        [running(0), running(1, OWN_WAIT, None), running(2, SLEEP, None)],
        [0],
        "rank 0 on n0 hangs: no progress",
    ),
    (
        "waits of the job's own, and one is elsewhere",
        [running(1), running(2, OWN_WAIT), running(3, OWN_WAIT)],
        [1],
        SLEEPS,
    ),
    ("waits of the job's own, and one is behind", [running(1, OWN_WAIT, step=2), running(2, OWN_WAIT)], [1], "step 2"),
    (
        "all in collectives, and one in another",
        [running(1, BROADCAST), running(2, ALL_REDUCE), running(3, ALL_REDUCE)],
        [1],
        f"in broadcast (train.py:50); {WAITS}",
    ),
    (
        "all in the same collective",
        [running(rank, ALL_REDUCE) for rank in range(4)],
        [0, 1, 2, 3],
        "4 ranks (0-3) hang: 4 ranks (0-3) in all_reduce (train.py:41)",
    ),
    ("no stacks at all: the one behind", [running(0, ""), running(1, "", step=2), running(2, "")], [1], "unknown"),
    ("all wait for one that works", [running(0, age_s=3.0), running(2, ALL_REDUCE)], [], "rank 0 made progress"),
    ("nobody is late", [running(0, age_s=9.9), running(1, age_s=0.1)], [], "all ranks make progress"),
    ("stopped a moment ago", [stopped(0, 1.0), running(1, age_s=1.0)], [], "all ranks make progress"),
    ("nobody calls progress", [running(0, age_s=None), running(1, age_s=None)], [], "all ranks make progress"),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "blamed", "says"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_who_hangs(ranks: list[RankStack], blamed: list[int], says: str) -> None:
    found = find_hung(ranks, 10.0)
    assert (found.ranks if isinstance(found, HungRanks) else []) == blamed, found.reason
    assert says in found.reason


@pytest.mark.parametrize(
    ("one", "overdue"),
    [
        (running(0), True),
        (running(0, age_s=9.9), False),
        (running(0, age_s=None), False),
        (stopped(0), True),
        (stopped(0, 9.9), False),
    ],
)
def test_what_gives_cause_to_look(one: RankStack, overdue: bool) -> None:
    assert is_overdue(one, 10.0) is overdue


def test_a_node_that_does_not_answer_may_be_what_the_others_wait_for() -> None:
    waiting = [running(rank, ALL_REDUCE) for rank in range(2)]
    assert find_hung(waiting, 10.0, ["n1"]).reason == "ranks 0, 1 in all_reduce (train.py:41); no answer from n1"
    found = find_hung([*waiting, running(2)], 10.0, ["n1"])
    assert isinstance(found, HungRanks) and found.ranks == [2]
