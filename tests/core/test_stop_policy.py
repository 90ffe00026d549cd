"""The policy for the step at which all ranks stop: what it decides, and the reason in words.

`tests/simulation/test_stop_agreement.py` has its properties.
"""

from __future__ import annotations

import pytest

from rallypoint.core.policy.stop_policy import (
    NONE,
    NodeStop,
    RankStop,
    StopPhase,
    StopRequest,
    StopState,
    Unchanged,
    decide_stop,
    node_stop,
)

REQUEST = StopRequest(node="b", reason="b: SIGUSR1", signal="SIGUSR1")
ENDED = NodeStop(step=8, stopped=True)


def at(phase: str, step: int | None = None) -> StopState:
    return StopState(phase=phase, request=REQUEST, step=step)


def node(
    passed: int | None = None,
    asking: tuple[int, ...] = (),
    unaccepted: tuple[int, ...] = (),
    step: int | None = None,
    others: tuple[int, ...] = (),
) -> NodeStop:
    return NodeStop(step=step, passed=passed, asking=[*asking], unaccepted=[*unaccepted], others=[*others])


CASES = {
    "a node has not reported": (at("asked"), {"a": node(7, (0,))}, "no report yet from b"),
    "the highest step, and one more": (
        at("asked"), {"a": node(7, (0,)), "b": node(5, (1,))}, ("proposed", 8, "all ranks are to stop at step 8"),
    ),
    "nobody asks": (
        at("asked"), {"a": node(others=(0,)), "b": node(others=(1,))},
        ("signalled", None, "SIGUSR1 for ranks 0, 1, which never asked whether to stop"),
    ),
    "a rank had passed it; one that has not reported does not matter": (
        at("proposed", 8), {"a": node(9, (0,), (0,), 8)},
        ("proposed", 10, "all ranks are to stop at step 10; a rank had passed step 8"),
    ),
    "a node has not told its ranks": (
        at("proposed", 8), {"a": node(7, (0,), (), 8), "b": node(5, (1,), (1,))}, "step 8 is not proposed yet on b",
    ),
    "a rank is in a long step": (
        at("proposed", 8), {"a": node(7, (0,), (), 8), "b": node(5, (1,), (1,), 8)},
        "waiting for rank 1 to ask again, and to accept step 8",
    ),
    "all have accepted": (
        at("proposed", 8), {"a": node(7, (0,), (), 8), "b": node(5, (1,), (), 8)},
        ("committed", 8, "all ranks stop at step 8"),
    ),
    "those that ask have finished their work": (
        at("proposed", 8), {"a": node(step=8), "b": node(step=8)}, "all workers have ended by themselves",
    ),
    "some save a checkpoint": (
        at("committed", 8), {"a": node(7, (0,), (), 8), "b": ENDED}, "waiting for rank 0 to end",
    ),
    "one served the others": (
        at("committed", 8), {"a": node(step=8, others=(0,)), "b": ENDED},
        ("signalled", 8, "SIGUSR1 for rank 0, which never asked whether to stop"),
    ),
    "it takes its time": (
        at("signalled", 8), {"a": node(step=8, others=(0,)), "b": ENDED}, "waiting for rank 0 to end after SIGUSR1",
    ),
    "all have stopped": (at("committed", 8), {"a": ENDED, "b": ENDED}, ("over", 8, "all ranks have stopped at step 8")),
    "it is over": (at("over", 8), {}, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_decided(name: str) -> None:
    state, reports, expected = CASES[name]
    decided = decide_stop(state, ["a", "b"], reports)
    if isinstance(expected, str):
        assert decided == Unchanged(expected)
    else:
        assert isinstance(decided, StopState) and decided.order > state.order
        assert (decided.phase, decided.step, decided.reason) == expected


def test_the_report_of_a_node() -> None:
    ranks = [
        RankStop(0, 7, 8, False),
        RankStop(1, 9, NONE, False),
        RankStop(2, 7, 8, True),
        RankStop(3, NONE, NONE, False),
    ]
    assert node_stop(ranks, 8) == NodeStop(step=8, passed=9, asking=[0, 1, 2], unaccepted=[1], others=[3], stopped=True)
    assert node_stop([], None) == NodeStop()


def test_an_unknown_phase_is_before_all_others() -> None:
    assert at("other").order < at(StopPhase.ASKED).order
