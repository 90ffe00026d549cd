"""Ranks that ask whether to stop do so at one step, whatever the order of things; and none waits for ever."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.simulation.stop_agreement import Job, blocked

from rallypoint.core.policy import stop_policy
from rallypoint.core.policy.stop_policy import NONE, NodeStop, StopPhase, StopState, Unchanged
from rallypoint.launch.preemption import stop_record
from rallypoint.launch.preemption.stop_record import ACCEPTED, COMMITTED, PASSED, PROPOSED, STOPPED, StopRecord

SEEDS = 400
"""How many runs find each mutant."""

decide_stop, answer = stop_policy.decide_stop, stop_record.answer


def simulate(seed: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(time, "sleep", blocked)
        Job(seed).run()


@given(st.integers(0, 2**32))
def test_all_ranks_stop_at_one_step_and_none_waits_for_ever(seed: int) -> None:
    simulate(seed)


def waits_before_the_step(record: StopRecord, step: int) -> bool | None:
    """As in a barrier: whoever sees a proposal waits for the others."""
    if record[COMMITTED] == NONE and record[PROPOSED] != NONE:
        record[ACCEPTED] = record[PROPOSED]
        return None
    return answer(record, step)


def stops_at_once(record: StopRecord, step: int) -> bool | None:
    if record[COMMITTED] != NONE:
        record[STOPPED] = step
        return True
    return answer(record, step)


def goes_on_when_it_has_passed(record: StopRecord, step: int) -> bool | None:
    if record[COMMITTED] == NONE and step >= record[PROPOSED]:
        record[PASSED] = step
        return False
    return answer(record, step)


Reports = Mapping[str, NodeStop]


def commits_without_the_last(state: StopState, nodes: Sequence[str], reports: Reports) -> StopState | Unchanged:
    decided = decide_stop(state, nodes, reports)
    waits = sum(len(report.unaccepted) for report in reports.values())
    if (
        isinstance(decided, Unchanged)
        and state.phase == StopPhase.PROPOSED
        and waits == 1
        and len(reports) == len(nodes)
    ):
        return StopState(phase=StopPhase.COMMITTED, request=state.request, step=state.step)
    return decided


def never_proposes_again(state: StopState, nodes: Sequence[str], reports: Reports) -> StopState | Unchanged:
    decided = decide_stop(state, nodes, reports)
    again = isinstance(decided, StopState) and decided.phase == state.phase
    return Unchanged("once is enough") if again else decided


def signals_too_early(state: StopState, nodes: Sequence[str], reports: Reports) -> StopState | Unchanged:
    if state.phase == StopPhase.COMMITTED and any(report.others for report in reports.values()):
        return StopState(phase=StopPhase.SIGNALLED, request=state.request, step=state.step)
    return decide_stop(state, nodes, reports)


@pytest.mark.parametrize(
    ("module", "name", "mutant"),
    [
        (stop_record, "answer", waits_before_the_step),
        (stop_record, "answer", stops_at_once),
        (stop_record, "answer", goes_on_when_it_has_passed),
        (stop_policy, "decide_stop", commits_without_the_last),
        (stop_policy, "decide_stop", never_proposes_again),
        (stop_policy, "decide_stop", signals_too_early),
    ],
)
def test_a_mutant_is_found(module: Any, name: str, mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, name, mutant)
    for seed in range(SEEDS):
        try:
            simulate(seed)
        except AssertionError as error:
            print(f"seed {seed}: {error}")
            return
    pytest.fail(f"{mutant.__name__} is not found in {SEEDS} runs")
