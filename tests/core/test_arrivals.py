"""Arrivals that came in one message come to exactly what they would have come to one after the other.

Each seed is a random history (`random_history.py`) whose arrivals come together. Replayed with every such entry taken
apart into its requests, it must make the same state, byte for byte, and tell everybody the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from rallypoint.core import arrivals, barrier, entries, exchange, ops
from rallypoint.core.entries import Arrivals, Detach, End, Open, Request, Start, TimeOut
from rallypoint.core.machine import Done, Machine, Refused, Waiting
from rallypoint.core.records import LATER
from rallypoint.core.snapshot import read, write
from rallypoint.core.state import State

from .random_history import History, small_limits, told
from .state_checks import check_state

SEEDS = int(os.environ.get("STATE_SEEDS", "2000")) // 4
FIRST_SEED = int(os.environ.get("FIRST_SEED", "0"))


@pytest.fixture(autouse=True, scope="module")
def _small_limits() -> Iterator[None]:
    with small_limits():
        yield


def one_by_one(state: State, entry: Arrivals) -> list[Any]:
    """Apply arrivals as requests of their own."""
    return [state.apply(Request(serial, op)) for serial, op in zip(entry.sessions, entry.ops, strict=True)]


def test_together_is_one_after_the_other() -> None:
    taken_in = 0
    for seed in range(FIRST_SEED, FIRST_SEED + SEEDS):
        state = State()
        for at, (record, expected) in enumerate(zip(*_history(seed), strict=True)):
            entry = entries.decode(record)
            answer = one_by_one(state, entry) if isinstance(entry, Arrivals) else state.apply(entry)
            outputs = state.take_outputs()
            if isinstance(entry, Arrivals):
                taken_in += len(entry.ops) > 1 and all(one is LATER for one in answer)
                assert told(answer, outputs) == expected, f"seed {seed}, record {at}: {entry}"
        assert list(write(state)) == _history.last, f"seed {seed}"  # type: ignore[attr-defined]
    assert taken_in > SEEDS // 50, "few histories have arrivals that wait together"


def _history(seed: int) -> tuple[list[bytes], list[bytes]]:
    history = History(seed, 100)
    _history.last = list(write(history.state))  # type: ignore[attr-defined]
    return history.records, history.told


class Crowd:
    """Sessions of a state, each with the numbers of its requests."""

    def __init__(self, size: int) -> None:
        self.state = State()
        self.state.apply(Start(entries.VERSION, b"id", 1 << 40, 1 << 40, 1 << 40, 1 << 20))
        self.serials = [self.state.apply(Open(b"%d" % one, "", 0, [])).serial for one in range(size)]
        self.number = 0

    def entry(self, ranks: range, command: Any) -> Arrivals:
        self.number += 1
        made = [ops.Act(self.number, b"/o", str(rank), self.number, command(rank), 9.0) for rank in ranks]
        return Arrivals([self.serials[rank] for rank in ranks], made)

    def told(self) -> dict[int, Any]:
        """Return who was told what since the last call, by rank."""
        return {self.serials.index(owner.serial): answer for owner, _, answer in self.state.take_outputs()}


ARRIVE = {
    "barrier": lambda rank: barrier.Arrive(16),
    "exchange": lambda rank: exchange.Give(16, rank, b"%d" % rank, "all_gather"),
}


@pytest.fixture(params=list(ARRIVE))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_group_that_waits_is_taken_in_without_a_step_for_each(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = Crowd(16)
    machine: type[Machine] = ARRIVE[kind](0).machine  # type: ignore[no-untyped-call]
    steps: list[str] = []
    apply = machine.apply
    monkeypatch.setattr(
        machine, "apply", lambda self, call, *rest: (steps.append(call.member), apply(self, call, *rest))[1]
    )
    assert crowd.state.apply(crowd.entry(range(8), ARRIVE[kind])) == [LATER] * 8 and steps == []
    check_state(crowd.state)
    answers = crowd.state.apply(crowd.entry(range(8, 16), ARRIVE[kind]))
    assert answers[:7] == [LATER] * 7 and isinstance(answers[7], Done) and "15" in steps and "8" not in steps
    assert sorted(crowd.told()) == list(range(15))
    check_state(crowd.state)
    assert crowd.state.namespaces[0].objects._calls == {}


def test_members_of_a_group_go_their_own_ways(kind: str) -> None:
    crowd = Crowd(16)
    entry = crowd.entry(range(8), ARRIVE[kind])
    crowd.state.apply(entry)
    crowd.state.apply(TimeOut(crowd.serials[1], 1))
    reasons = crowd.told()
    assert list(reasons) == [1] and isinstance(reasons[1], Waiting), "one hears why it waits, alone"
    undo = (barrier.Withdraw if kind == "barrier" else exchange.TakeBack)(1)
    crowd.state.apply(Request(crowd.serials[2], ops.Act(2, b"/o", "2", 2, undo, 0.0)))
    assert crowd.told() == {2: Refused("Undone", {})}
    assert crowd.state.apply(Request(crowd.serials[3], entry.ops[3])) is LATER, "repeated, it waits as before"
    assert crowd.state.apply(entry)[3:] == [LATER] * 5 and crowd.told() == {}
    state = read(write(crowd.state))
    check_state(state)
    for one in (state, crowd.state):
        one.apply(Detach(crowd.serials[0]))
        one.apply(End(crowd.serials[0]))
    lost = crowd.told()
    assert sorted(lost) == [3, 4, 5, 6, 7], "those who wait hear of the one that was lost"
    assert {str(answer) for answer in lost.values()} == {str(Refused("MembersLost", {"lost": ["0"]}))}
    state.outputs.clear()
    assert list(write(state)) == list(write(crowd.state))


def test_those_whose_sessions_have_ended_are_left_out(kind: str) -> None:
    crowd = Crowd(16)
    crowd.state.apply(Detach(crowd.serials[1]))
    crowd.state.apply(End(crowd.serials[1]))
    assert crowd.state.apply(crowd.entry(range(4), ARRIVE[kind])) == [LATER] * 4
    assert [len(one.waiting) for one in crowd.state.sessions.values()] == [1, 1, 1] + [0] * 12
    assert crowd.state.apply(Arrivals([99], [ops.Act(1, b"/o", "0", 1, ARRIVE[kind](0), 9.0)])) == [LATER]  # type: ignore[no-untyped-call]


def test_commands_that_gather_have_machines_that_take_in() -> None:
    for command in arrivals.GATHERS:
        assert command.machine.take_in is not Machine.take_in
