"""The machines on both hosts, seed by seed. SEEDS is the number of seeds, FIRST_SEED the first one.

A failure prints its seed, the violation, and every step that led to it; `SEEDS=1 FIRST_SEED=...` repeats it.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from rallypoint.testing.simulation.simulator import Simulator, Violation

from .bytes_host import BytesHost
from .members import KINDS, Members
from .server_host import ServerHost

SEEDS = int(os.environ.get("SEEDS", "2000"))
FIRST_SEED = int(os.environ.get("FIRST_SEED", "1"))
HOSTS: dict[str, type[BytesHost | ServerHost]] = {"bytes": BytesHost, "server": ServerHost}


def simulate(seed: int, hosting: str) -> Simulator:
    """Run one seed; raise Violation with its trace if a check fails."""
    simulator = Simulator(seed)
    host = simulator.host = HOSTS[hosting](simulator)
    members = Members(simulator, host, simulator.chance.randrange(2, 6))
    simulator.live_like = members.live
    with simulator.explained(f"SEEDS=1 FIRST_SEED={seed} pytest tests/simulation -k {hosting}"):
        for rank in range(members.size):
            simulator.start(str(rank))
        simulator.run()
        members.checker.judge()
        check_waiting(simulator, host, members)
        host.settle()
    return simulator


def check_waiting(simulator: Simulator, host: BytesHost | ServerHost, members: Members) -> None:
    """Check that every waiting process waits for a missing member, and that the group has the right members."""
    waiting = [process for process in simulator.processes if process.waits is not None and not process.crashed]
    for process in waiting:
        assert process.waits is not None
        key, call, _ = process.waits
        machine = host.machine(key, KINDS[key])
        reason = machine.explain(call)
        here = {other.name for other in waiting if other.waits is not None and other.waits[0] == key}
        if not machine.holds(call.id):
            raise Violation(f"{process} waits at the {key}, which does not know it")
        if not reason.reason or any(simulator.by_session[one].crashed for one in machine.sessions()):
            raise Violation(f"{process} waits at the {key} with the dead: {reason}, {machine.sessions()}")
        if key in ("barrier", "exchange") and (not reason.missing or here & set(reason.missing)):
            raise Violation(f"{process} waits at the {key}, for nobody: {reason}, {sorted(here)}")
        if key == "work_queue" and machine.ready:  # type: ignore[attr-defined]
            raise Violation(f"{process} waits for an item, and there are some: {reason}")
        if key == "lock":
            raise Violation(f"{process} waits for the lock, and all others are done: {reason}")
        if key == "roster" and machine.epoch != members.checker.epoch_of(process):  # type: ignore[attr-defined]
            raise Violation(f"{process} did not get epoch {machine.epoch}")  # type: ignore[attr-defined]
    check_group(simulator, host, members)
    check_items(simulator, host, members)


def check_items(simulator: Simulator, host: BytesHost | ServerHost, members: Members) -> None:
    """Check that no item is lost: all that were put are ready, taken, dead, or done."""
    machine: Any = host.machine("work_queue", KINDS["work_queue"])
    left = [*machine.ready.values(), *machine.dead.values(), *(taken.item for taken in machine.taken.values())]
    if len(left) + machine.done != machine.made:
        raise Violation(f"{machine.made} items were put, {machine.done} done, and there are {len(left)}")
    if any(item.id in members.checker.finished for item in left):
        raise Violation(f"a finished item is still there: {left}")


def check_group(simulator: Simulator, host: BytesHost | ServerHost, members: Members) -> None:
    """Check that the group has exactly the members that joined and have not left, except for doubtful sessions."""
    actual = host.machine("roster", KINDS["roster"]).members.values()  # type: ignore[attr-defined]
    present = {one.call.id for one in actual if one.call.session not in simulator.doubtful}
    joined = {call for call, entry in members.checker.members.items() if entry.call.session not in simulator.doubtful}
    if present != joined:
        raise Violation(f"members are {sorted(present)}, and these joined: {sorted(joined)}")


@pytest.mark.parametrize("hosting", HOSTS)
def test_no_seed_violates_an_invariant(hosting: str) -> None:
    for seed in range(FIRST_SEED, FIRST_SEED + SEEDS):
        simulate(seed, hosting)


def test_a_seed_always_gives_the_same_trace() -> None:
    for hosting in HOSTS:
        traces = [repr(simulate(7, hosting).trace) for _ in range(2)]
        assert traces[0] == traces[1]
