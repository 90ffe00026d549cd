"""The machines under both hostings, seed by seed. SEEDS says how many, FIRST_SEED where to begin.

A failure prints its seed, what was wrong, and every step that led to it; `SEEDS=1 FIRST_SEED=...` runs it again.
"""

from __future__ import annotations

import os

import pytest

from .bytes_host import BytesHost
from .lives import KINDS, Lives
from .server_host import ServerHost
from .world import World, Wrong

SEEDS = int(os.environ.get("SEEDS", "2000"))
FIRST_SEED = int(os.environ.get("FIRST_SEED", "1"))
HOSTS = {"bytes": BytesHost, "server": ServerHost}


def simulate(seed: int, hosting: str) -> World:
    """Run one seed; raise Wrong with its story if anything is."""
    world = World(seed)
    host = world.host = HOSTS[hosting](world)
    lives = Lives(world, host, world.chance.randrange(2, 6))
    world.live_like = lives.live
    try:
        for rank in range(lives.size):
            world.start(str(rank))
        world.run()
        lives.ledger.judge()
        nobody_waits_in_vain(world, host, lives)
        host.settle()
    except Exception as error:
        story = "\n".join(" ".join(map(str, line)) for line in world.trace)
        again = f"SEEDS=1 FIRST_SEED={seed} pytest tests/simulation -k {hosting}"
        raise Wrong(f"seed {seed}: {error!r}\n{story}\nseed {seed}: {error!r}\nagain: {again}") from error
    return world


def nobody_waits_in_vain(world: World, host: BytesHost | ServerHost, lives: Lives) -> None:
    """Check that who still waits waits for one who has not come, and that the group is who is in it."""
    waiting = [process for process in world.processes if process.waits is not None and not process.crashed]
    for process in waiting:
        assert process.waits is not None
        key, call, _ = process.waits
        machine = host.machine(key, KINDS[key])
        reason = machine.why(call)
        here = {other.name for other in waiting if other.waits is not None and other.waits[0] == key}
        if not machine.keeps(call.id):
            raise Wrong(f"{process} waits at the {key}, which does not know it")
        if not reason.reason or any(world.by_session[one].crashed for one in machine.sessions()):
            raise Wrong(f"{process} waits at the {key} with the dead: {reason}, {machine.sessions()}")
        if key in ("barrier", "exchange") and (not reason.missing or here & set(reason.missing)):
            raise Wrong(f"{process} waits at the {key}, for nobody: {reason}, {sorted(here)}")
        if key == "lock":
            raise Wrong(f"{process} waits for the lock, and all others are done: {reason}")
        if key == "roster" and machine.epoch != lives.ledger.epoch_of(process):  # type: ignore[attr-defined]
            raise Wrong(f"{process} was not told of epoch {machine.epoch}")  # type: ignore[attr-defined]
    the_group_is_who_joined(world, host, lives)


def the_group_is_who_joined(world: World, host: BytesHost | ServerHost, lives: Lives) -> None:
    """Check that those are in the group who were told so and have not left, except for who may have been lost."""
    members = host.machine("roster", KINDS["roster"]).members.values()  # type: ignore[attr-defined]
    here = {one.call.id for one in members if one.call.session not in world.doubtful}
    joined = {call for call, entry in lives.ledger.members.items() if entry.call.session not in world.doubtful}
    if here != joined:
        raise Wrong(f"members are {sorted(here)}, and these joined: {sorted(joined)}")


@pytest.mark.parametrize("hosting", HOSTS)
def test_what_must_never_be_never_is(hosting: str) -> None:
    for seed in range(FIRST_SEED, FIRST_SEED + SEEDS):
        simulate(seed, hosting)


def test_a_seed_tells_the_same_story_every_time() -> None:
    for hosting in HOSTS:
        stories = [repr(simulate(7, hosting).trace) for _ in range(2)]
        assert stories[0] == stories[1]
