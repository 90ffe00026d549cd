"""The simulation detects bugs: mutants of the machines, each with one bug."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rallypoint.core.calls.contested_refusals import ContestedRefusals
from rallypoint.core.machines.barrier import BarrierArrive, BarrierMachine
from rallypoint.core.machines.exchange import ExchangeMachine
from rallypoint.core.machines.lock import LockMachine
from rallypoint.core.machines.machine import WAIT, Call, Done, Step
from rallypoint.core.machines.membership import MembershipMachine
from rallypoint.core.machines.work_queue import WorkDone, WorkQueueMachine
from rallypoint.testing.simulation.simulator import Violation

from .test_simulation import HOSTS, simulate

SEEDS = 1000
Method = Callable[..., Any]


def opens_without_the_last(apply: Method) -> Method:
    def mutant(self: BarrierMachine, call: Call, command: Any, stamp: int) -> Step:
        step: Step = apply(self, call, command, stamp)
        if isinstance(command, BarrierArrive) and step.outcome is WAIT and len(self.arrived) == command.members - 1:  # type: ignore[operator]
            return self._open(self.calls[call.id])
        return step

    return mutant


def waits_for_the_dead(lost: Method) -> Method:
    return lambda self, session, stamp: Step(Done())


def keeps_what_was_taken_back(gone: Method) -> Method:
    def mutant(self: ExchangeMachine, rank: int, call: str) -> bool:
        del self.calls[call]
        return True

    return mutant


def holds_a_successor_for_ever(settled: Method) -> Method:
    def mutant(self: ExchangeMachine, *arguments: Any) -> Any:
        held, self.held = self.held, {}
        step = settled(self, *arguments)
        self.held = held
        return step

    return mutant


def forgets_a_round_when_the_next_one_breaks(end: Method) -> Method:
    def mutant(self: ExchangeMachine, result: list[bytes], lost: list[str]) -> Any:
        if lost:
            self.ended = {}
        return end(self, result, lost)

    return mutant


def hands_on_its_fence(leave: Method) -> Method:
    def mutant(self: LockMachine, ids: list[str], stamp: int) -> Step:
        return leave(self, ids, self.fence)  # type: ignore[no-any-return]

    return mutant


def counts_its_members(join: Method) -> Method:
    return lambda self, call, command, stamp: join(self, call, command, len(self.members) + 1)


def wakes_nobody(changed: Method) -> Method:
    return lambda self, events, stamp: changed(self, events, stamp)[:0]


def contests_nothing(of: Method) -> Method:
    return lambda self, held, outcome, machine: False


def keeps_what_is_done(settle: Method) -> Method:
    def mutant(self: WorkQueueMachine, call: Call, command: Any) -> Step:
        taken = self.taken.get(f"{call.session}/{command.call}")
        step: Step = settle(self, call, command)
        if taken is not None and isinstance(command, WorkDone):
            self.ready[self.head + len(self.ready)] = taken.item
        return step

    return mutant


def delivers_to_two(deliver: Method) -> Method:
    def mutant(self: WorkQueueMachine, call: Call) -> Any:
        taken = deliver(self, call)
        if not self.ready:
            self.head -= 1
            self.ready[self.head] = taken.item
        return taken

    return mutant


def simulate_all(hosting: str) -> None:
    for seed in range(1, SEEDS):
        simulate(seed, hosting)


@pytest.mark.parametrize(
    ("machine", "method", "mutate", "notices"),
    [
        (BarrierMachine, "apply", opens_without_the_last, "went through the barrier, and . had not arrived"),
        (BarrierMachine, "session_ended", waits_for_the_dead, "wait on"),
        (ExchangeMachine, "_remove_contribution", keeps_what_was_taken_back, "taken back or refused"),
        (ExchangeMachine, "_settled", holds_a_successor_for_ever, "waits at the exchange, for nobody"),
        (
            ExchangeMachine,
            "_end",
            forgets_a_round_when_the_next_one_breaks,
            "taken back or refused|not given in one round",
        ),
        (LockMachine, "_leave", hands_on_its_fence, "fence .* was that of"),
        (LockMachine, "session_ended", waits_for_the_dead, "with the dead|waits for the lock"),
        (MembershipMachine, "_join", counts_its_members, "two views of epoch|its view is"),
        (WorkQueueMachine, "session_ended", waits_for_the_dead, "waits at the work_queue with the dead"),
        (WorkQueueMachine, "_settle", keeps_what_is_done, "which .* had finished|items were put|is still there"),
        (WorkQueueMachine, "_deliver", delivers_to_two, "got item .*, which .* has|finished item .*, and so did"),
        (MembershipMachine, "_changed", wakes_nobody, "which does not know it"),
    ],
)
def test_a_mutant_is_detected(
    machine: type[Any], method: str, mutate: Callable[[Method], Method], notices: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, method, mutate(getattr(machine, method)))
    with pytest.raises(Violation, match=rf"seed \d+: Violation\(.*({notices})"):
        simulate_all("bytes")


def test_a_server_that_refuses_because_of_dead_sessions_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ContestedRefusals, "contests", contests_nothing(ContestedRefusals.contests))
    with pytest.raises(Violation, match=r"was refused: Refused\(error='NameTaken'"):
        simulate_all("server")


def test_a_failure_shows_its_seed_and_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LockMachine, "_leave", hands_on_its_fence(LockMachine._leave))
    for hosting in HOSTS:
        failures = []
        for _ in range(2):
            with pytest.raises(
                Violation, match=rf"SEEDS=1 FIRST_SEED=\d+ pytest tests/simulation -k {hosting}"
            ) as raised:
                simulate_all(hosting)
            failures.append(str(raised.value))
        assert failures[0] == failures[1], "a seed determines the whole trace"
        assert " begin " in failures[0] and " holds " in failures[0]
