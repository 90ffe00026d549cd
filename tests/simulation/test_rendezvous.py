"""The rendezvous on both hosts, seed by seed: nodes that join, leave, crash, return and freeze, in any order.

SEEDS is the number of seeds, FIRST_SEED the first one. Most simulations have a few nodes, some dozens, a few hundreds.
A failure prints its seed, the violation, and every step that led to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rallypoint.core.machines import rendezvous
from rallypoint.core.machines.machine import Done, Step
from rallypoint.core.machines.rendezvous import RendezvousMachine
from rallypoint.core.policy.round_policy import Form, Hold
from rallypoint.testing.simulation.simulator import STEPS, Simulator, Violation

from .bytes_host import BytesHost
from .rendezvous_nodes import KEY, Nodes
from .round_checker import check_final_state
from .server_host import ServerHost
from .test_simulation import FIRST_SEED, SEEDS

CROWD_EVERY = 200
CROWD = (100, 300)
"""The range of the number of nodes in every CROWD_EVERY-th simulation."""


class ForgetfulServer(ServerHost):
    """A server that records when it had no machines, and so had forgotten all rounds."""

    def __init__(self, simulator: Simulator) -> None:
        super().__init__(simulator)
        self.forgot_at: set[int] = set()

    def tick(self) -> None:
        super().tick()
        if not self.objects.machines:
            self.forgot_at.add(self.engine.revision)


HOSTS: dict[str, type[BytesHost | ServerHost]] = {"bytes": BytesHost, "server": ForgetfulServer}


def size_of(simulator: Simulator, seed: int) -> int:
    """Choose a number of nodes; with more nodes, steps are shorter and more numerous."""
    chance = simulator.chance
    few = chance.random() < 0.6
    size = chance.randrange(1, 9) if few else chance.randrange(10, 40)
    if seed % CROWD_EVERY == 0:
        size = chance.randrange(*CROWD)
    slower = max(1.0, size / 8)
    simulator.pace_s /= slower
    simulator.trouble /= slower
    simulator.calm_after = int(simulator.calm_after * slower)
    simulator.steps = int(STEPS * slower)
    return size


def simulate(seed: int, hosting: str) -> Simulator:
    """Run one seed; raise Violation with its trace if a check fails."""
    simulator = Simulator(seed)
    host = simulator.host = HOSTS[hosting](simulator)
    size = size_of(simulator, seed)
    nodes = Nodes(simulator, host, size)
    simulator.live_like = nodes.live
    with simulator.explained(f"SEEDS=1 FIRST_SEED={seed} pytest tests/simulation/test_rendezvous.py -k {hosting}"):
        for number in range(size):
            simulator.start(f"n{number}")
        simulator.run()
        machine = host.machine(KEY, RendezvousMachine)
        assert isinstance(machine, RendezvousMachine)
        check_final_state(simulator, machine, nodes.limits)
        nodes.rounds.judge(not nodes.asks, getattr(host, "forgot_at", set()))
        host.settle()
    return simulator


@pytest.mark.parametrize("hosting", HOSTS)
def test_no_seed_violates_an_invariant(hosting: str) -> None:
    for seed in range(FIRST_SEED, FIRST_SEED + (SEEDS + 3) // 4):
        simulate(seed, hosting)


def test_a_seed_always_gives_the_same_trace() -> None:
    for hosting in HOSTS:
        traces = [repr(simulate(7, hosting).trace) for _ in range(2)]
        assert traces[0] == traces[1] and "in round" in traces[0]


# Mutants

Method = Callable[..., Any]


def waits_for_the_dead(lost: Method) -> Method:
    return lambda self, session, stamp: Step(Done())


def wakes_no_watcher(end: Method) -> Method:
    return lambda self, reason: end(self, reason)[:0]


def closes_without_waking(close: Method) -> Method:
    return lambda self, command: close(self, command)._replace(woken=())


def ranks_in_order_of_arrival(tell: Method) -> Method:
    def mutant(self: RendezvousMachine, name: str) -> Any:
        answer = tell(self, name)
        answer[3] = list(self.nodes).index(name)
        return answer

    return mutant


def uses_a_scope_again(form: Method) -> Method:
    return lambda self, reason, stamp: form(self, reason, self.number + 1)


def never_ends_last_call(ring: Method) -> Method:
    return lambda self, timer, stamp: Step(Done())


def opens_the_same_run(opened: Method) -> Method:
    def mutant(self: RendezvousMachine, stamp: int) -> Step:
        run = self.run
        step: Step = opened(self, stamp)
        self.run = run
        return step

    return mutant


def forms_with_one_node_too_few(decided: Method) -> Method:
    def mutant(now: Any) -> Any:
        decision = decided(now)
        few = isinstance(decision, Hold) and now.joined == now.limits.min_nodes - 1 and now.newcomer is None
        return Form("enough") if few and now.joined else decision

    return mutant


def simulate_all(hosting: str) -> None:
    for seed in range(1, 1000):
        simulate(seed, hosting)


@pytest.mark.parametrize(
    ("owner", "method", "mutate", "hosting", "notices"),
    [
        (RendezvousMachine, "session_ended", waits_for_the_dead, "bytes", "with the dead|no end after"),
        (RendezvousMachine, "_end", wakes_no_watcher, "bytes", "in vain|was not woken"),
        (RendezvousMachine, "_close", closes_without_waking, "bytes", "was not woken|after .* had closed"),
        (RendezvousMachine, "_round", ranks_in_order_of_arrival, "server", "not the first|had rank|asked for rank"),
        (RendezvousMachine, "_form", uses_a_scope_again, "bytes", "another round|in vain|came Round|before Round"),
        (RendezvousMachine, "on_timer", never_ends_last_call, "bytes", "in vain"),
        (RendezvousMachine, "_open", opens_the_same_run, "bytes", "came Round|after .* had closed"),
        (rendezvous, "decide", forms_with_one_node_too_few, "server", "is in a round of"),
    ],
)
def test_a_mutant_is_detected(
    owner: Any,
    method: str,
    mutate: Callable[[Method], Method],
    hosting: str,
    notices: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, method, mutate(getattr(owner, method)))
    with pytest.raises(Violation, match=rf"SEEDS=1 FIRST_SEED=\d+ pytest .* -k {hosting}") as raised:
        simulate_all(hosting)
    assert raised.match(rf"seed \d+: Violation\(.*({notices})")
    assert " begin " in str(raised.value)
