"""Arrivals in one message have exactly the results that they would have one after the other.

Each seed is a random history (`random_history.py`) with entries of several arrivals. Replayed with these entries split
into single requests, it must produce the same state, byte for byte, and the same answers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rallypoint.core import arrivals, entries, ops
from rallypoint.core.entries import (
    Arrivals,
    DetachOwner,
    EndSession,
    OpenSession,
    SessionRequest,
    StartServer,
    TimeOutRequest,
)
from rallypoint.core.machines import barrier, exchange
from rallypoint.core.machines.machine import Call, Done, Machine, Refused, Step, Waiting
from rallypoint.core.records import LATER
from rallypoint.core.snapshot import read, write
from rallypoint.core.state import State

from .random_history import History, encode_results, small_limits
from .state_checks import check_state

SEEDS = int(os.environ.get("STATE_SEEDS", "1000")) // 2
FIRST_SEED = int(os.environ.get("FIRST_SEED", "0"))


@pytest.fixture(autouse=True, scope="module")
def _small_limits() -> Iterator[None]:
    with small_limits():
        yield


def one_by_one(state: State, entry: Arrivals) -> list[Any]:
    """Apply arrivals as single requests."""
    return [state.apply(SessionRequest(serial, op)) for serial, op in zip(entry.sessions, entry.ops, strict=True)]


def test_arrivals_together_equal_arrivals_one_by_one() -> None:
    waited_together = 0
    for seed in range(FIRST_SEED, FIRST_SEED + SEEDS):
        state, history = State(), History(seed, 100)
        for at, (record, expected) in enumerate(zip(history.records, history.results, strict=True)):
            entry = entries.decode(record)
            answer = one_by_one(state, entry) if isinstance(entry, Arrivals) else state.apply(entry)
            outputs = state.take_outputs()
            if isinstance(entry, Arrivals):
                waited_together += len(entry.ops) > 1 and all(one is LATER for one in answer)
                assert encode_results(answer, outputs) == expected, f"seed {seed}, record {at}: {entry}"
        assert list(write(state)) == list(write(history.state)), f"seed {seed}"
    assert waited_together > SEEDS // 50, "few histories have arrivals that wait together"


class Sessions:
    """Sessions of one state, one for each rank."""

    def __init__(self, size: int) -> None:
        self.state = State()
        self.state.apply(StartServer(entries.VERSION, b"id", 1 << 40, 1 << 40, 1 << 40, 1 << 20))
        self.serials = [self.state.apply(OpenSession(b"%d" % one, "", 0, [])).serial for one in range(size)]
        self.number = 0

    def entry(self, ranks: range, command: Any) -> Arrivals:
        self.number += 1
        made = [ops.Act(self.number, b"/o", str(rank), self.number, command(rank), 9.0) for rank in ranks]
        return Arrivals([self.serials[rank] for rank in ranks], made)

    def take_outputs(self) -> dict[int, Any]:
        """Return the answers since the last call, by rank."""
        return {self.serials.index(owner.serial): answer for owner, _, answer in self.state.take_outputs()}


ARRIVE: dict[str, Callable[[int], Any]] = {
    "barrier": lambda rank: barrier.BarrierArrive(16),
    "exchange": lambda rank: exchange.ExchangeGive(16, rank, b"%d" % rank, "all_gather"),
}


@pytest.fixture(params=list(ARRIVE))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_waiting_group_is_admitted_in_one_step(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = Sessions(16)
    machine: type[Machine] = ARRIVE[kind](0).machine
    steps: list[str] = []
    apply = machine.apply

    def recorded(self: Machine, call: Call, command: Any, stamp: int) -> Step:
        steps.append(call.member)
        return apply(self, call, command, stamp)

    monkeypatch.setattr(machine, "apply", recorded)
    assert sessions.state.apply(sessions.entry(range(8), ARRIVE[kind])) == [LATER] * 8 and steps == []
    check_state(sessions.state)
    answers = sessions.state.apply(sessions.entry(range(8, 16), ARRIVE[kind]))
    assert answers[:7] == [LATER] * 7 and isinstance(answers[7], Done) and "15" in steps and "8" not in steps
    assert sorted(sessions.take_outputs()) == list(range(15))
    check_state(sessions.state)
    assert sessions.state.namespaces[0].objects._calls == {}


def test_members_of_a_group_end_independently(kind: str) -> None:
    sessions = Sessions(16)
    entry = sessions.entry(range(8), ARRIVE[kind])
    sessions.state.apply(entry)
    sessions.state.apply(TimeOutRequest(sessions.serials[1], 1))
    reasons = sessions.take_outputs()
    assert list(reasons) == [1] and isinstance(reasons[1], Waiting), "only the one that timed out gets the reason"
    undo = (barrier.BarrierWithdraw if kind == "barrier" else exchange.ExchangeWithdraw)(1)
    sessions.state.apply(SessionRequest(sessions.serials[2], ops.Act(2, b"/o", "2", 2, undo, 0.0)))
    assert sessions.take_outputs() == {2: Refused("Undone", {})}
    assert sessions.state.apply(SessionRequest(sessions.serials[3], entry.ops[3])) is LATER, (
        "repeated, it goes on waiting"
    )
    assert sessions.state.apply(entry)[3:] == [LATER] * 5 and sessions.take_outputs() == {}
    state = read(write(sessions.state))
    check_state(state)
    for one in (state, sessions.state):
        one.apply(DetachOwner(sessions.serials[0]))
        one.apply(EndSession(sessions.serials[0]))
    lost = sessions.take_outputs()
    assert sorted(lost) == [3, 4, 5, 6, 7], "all waiting members get the loss"
    assert {str(answer) for answer in lost.values()} == {str(Refused("MembersLost", {"lost": ["0"]}))}
    state.outputs.clear()
    assert list(write(state)) == list(write(sessions.state))


def test_arrivals_of_ended_sessions_are_skipped(kind: str) -> None:
    sessions = Sessions(16)
    sessions.state.apply(DetachOwner(sessions.serials[1]))
    sessions.state.apply(EndSession(sessions.serials[1]))
    assert sessions.state.apply(sessions.entry(range(4), ARRIVE[kind])) == [LATER] * 4
    assert [len(one.waiting) for one in sessions.state.sessions.values()] == [1, 1, 1] + [0] * 12
    assert sessions.state.apply(Arrivals([99], [ops.Act(1, b"/o", "0", 1, ARRIVE[kind](0), 9.0)])) == [LATER]


def test_machines_of_arrivals_implement_admit_all() -> None:
    commands: frozenset[Any] = arrivals.GATHERS
    for command in commands:
        assert command.machine.admit_all is not Machine.admit_all
