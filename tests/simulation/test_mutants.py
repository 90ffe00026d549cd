"""The simulation notices what it is there to notice: machines with a bug each, and how soon it is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rallypoint.core.barrier import Arrive, Barrier
from rallypoint.core.doubts import Doubts
from rallypoint.core.exchange import Exchange
from rallypoint.core.lock import Lock
from rallypoint.core.machine import WAIT, Call, Done, Step
from rallypoint.core.roster import Roster

from .test_simulation import HOSTS, simulate
from .world import Wrong

SEEDS = 1000
Method = Callable[..., Any]


def opens_without_the_last(apply: Method) -> Method:
    def mutant(self: Barrier, call: Call, command: Any, stamp: int) -> Step:
        step: Step = apply(self, call, command, stamp)
        if isinstance(command, Arrive) and step.outcome is WAIT and len(self.arrived) == command.members - 1:  # type: ignore[operator]
            return self._open(self.calls[call.id])
        return step

    return mutant


def waits_for_the_dead(lost: Method) -> Method:
    return lambda self, session, stamp: Step(Done())


def keeps_what_was_taken_back(gone: Method) -> Method:
    def mutant(self: Exchange, rank: int, call: str) -> bool:
        del self.calls[call]
        return True

    return mutant


def holds_a_successor_for_ever(settled: Method) -> Method:
    def mutant(self: Exchange, *arguments: Any) -> Any:
        held, self.held = self.held, {}
        step = settled(self, *arguments)
        self.held = held
        return step

    return mutant


def forgets_a_round_when_the_next_one_breaks(end: Method) -> Method:
    def mutant(self: Exchange, result: list[bytes], lost: list[str]) -> Any:
        if lost:
            self.ended = {}
        return end(self, result, lost)

    return mutant


def hands_on_its_fence(leave: Method) -> Method:
    def mutant(self: Lock, ids: list[str], stamp: int) -> Step:
        return leave(self, ids, self.fence)  # type: ignore[no-any-return]

    return mutant


def counts_its_members(join: Method) -> Method:
    return lambda self, call, command, stamp: join(self, call, command, len(self.members) + 1)


def wakes_nobody(changed: Method) -> Method:
    return lambda self, events, stamp: changed(self, events, stamp)[:0]


def doubts_nothing(of: Method) -> Method:
    return lambda self, held, outcome, machine: False


def simulate_all(hosting: str) -> None:
    for seed in range(1, SEEDS):
        simulate(seed, hosting)


@pytest.mark.parametrize(
    ("machine", "method", "mutate", "notices"),
    [
        (Barrier, "apply", opens_without_the_last, "went through the barrier, and . had not arrived"),
        (Barrier, "lost", waits_for_the_dead, "wait on"),
        (Exchange, "_gone", keeps_what_was_taken_back, "taken back or refused"),
        (Exchange, "_settled", holds_a_successor_for_ever, "waits at the exchange, for nobody"),
        (Exchange, "_end", forgets_a_round_when_the_next_one_breaks, "taken back or refused|not given in one round"),
        (Lock, "_leave", hands_on_its_fence, "fence .* was that of"),
        (Lock, "lost", waits_for_the_dead, "with the dead|waits for the lock"),
        (Roster, "_join", counts_its_members, "two views of epoch|its view is"),
        (Roster, "_changed", wakes_nobody, "which does not know it"),
    ],
)
def test_a_bug_is_found(
    machine: type[Any], method: str, mutate: Callable[[Method], Method], notices: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, method, mutate(getattr(machine, method)))
    with pytest.raises(Wrong, match=rf"seed \d+: Wrong\(.*({notices})"):
        simulate_all("bytes")


def test_a_server_that_refuses_for_the_sake_of_the_dead_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Doubts, "of", doubts_nothing(Doubts.of))
    with pytest.raises(Wrong, match=r"was refused: Refused\(error='NameTaken'"):
        simulate_all("server")


def test_a_failure_tells_its_seed_and_its_story(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lock, "_leave", hands_on_its_fence(Lock._leave))
    for hosting in HOSTS:
        told = []
        for _ in range(2):
            with pytest.raises(Wrong, match=rf"SEEDS=1 FIRST_SEED=\d+ pytest tests/simulation -k {hosting}") as raised:
                simulate_all(hosting)
            told.append(str(raised.value))
        assert told[0] == told[1], "a seed is a whole story"
        assert " begin " in told[0] and " holds " in told[0]
