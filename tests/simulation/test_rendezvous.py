"""The rendezvous under both hostings, seed by seed: nodes that come, go, die, return and freeze, in any order.

SEEDS says how many in all, FIRST_SEED where to begin. Most worlds have a few nodes, some have dozens, a few hundreds.
A failure prints its seed, what was wrong, and every step that led to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rallypoint.core import rendezvous
from rallypoint.core.gathering import Form, Hold
from rallypoint.core.machine import Done, Step
from rallypoint.core.rendezvous import Rendezvous

from .bytes_host import BytesHost
from .nodes import KEY, Nodes
from .rounds import expect_everybody_to_know
from .server_host import ServerHost
from .test_simulation import FIRST_SEED, SEEDS
from .world import STEPS, World, Wrong

CROWD_EVERY = 200
CROWD = (100, 300)
"""How many nodes there are in one of so many worlds."""


class ForgetfulServer(ServerHost):
    """A server that writes down when it knew of nobody, and so had forgotten all rounds."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.forgot_at: set[int] = set()

    def tick(self) -> None:
        super().tick()
        if not self.objects._machines:
            self.forgot_at.add(self.engine.revision)


HOSTS: dict[str, type[BytesHost | ServerHost]] = {"bytes": BytesHost, "server": ForgetfulServer}


def size_of(world: World, seed: int) -> int:
    """Make up how many nodes there are; the more, the less time passes with a step, and the more steps there are."""
    chance = world.chance
    few = chance.random() < 0.6
    size = chance.randrange(1, 9) if few else chance.randrange(10, 40)
    if seed % CROWD_EVERY == 0:
        size = chance.randrange(*CROWD)
    slower = max(1.0, size / 8)
    world.pace_s /= slower
    world.trouble /= slower
    world.calm_after = int(world.calm_after * slower)
    world.steps = int(STEPS * slower)
    return size


def simulate(seed: int, hosting: str) -> World:
    """Run one seed; raise Wrong with its story if anything is."""
    world = World(seed)
    host = world.host = HOSTS[hosting](world)
    size = size_of(world, seed)
    nodes = Nodes(world, host, size)
    world.live_like = nodes.live
    try:
        for number in range(size):
            world.start(f"n{number}")
        world.run()
        machine = host.machine(KEY, Rendezvous)
        assert isinstance(machine, Rendezvous)
        expect_everybody_to_know(world, machine, nodes.limits)
        nodes.rounds.judge(not nodes.asks, getattr(host, "forgot_at", set()))
        host.settle()
    except Exception as error:
        story = "\n".join(" ".join(map(str, line)) for line in world.trace)
        again = f"SEEDS=1 FIRST_SEED={seed} pytest tests/simulation/test_rendezvous.py -k {hosting}"
        raise Wrong(f"seed {seed}: {error!r}\n{story}\nseed {seed}: {error!r}\nagain: {again}") from error
    return world


@pytest.mark.parametrize("hosting", HOSTS)
def test_what_must_never_be_never_is(hosting: str) -> None:
    for seed in range(FIRST_SEED, FIRST_SEED + (SEEDS + 1) // 2):
        simulate(seed, hosting)


def test_a_seed_tells_the_same_story_every_time() -> None:
    for hosting in HOSTS:
        stories = [repr(simulate(7, hosting).trace) for _ in range(2)]
        assert stories[0] == stories[1] and "in round" in stories[0]


# It notices what it is there to notice

Method = Callable[..., Any]


def waits_for_the_dead(lost: Method) -> Method:
    return lambda self, session, stamp: Step(Done())


def tells_nobody(end: Method) -> Method:
    return lambda self, reason: end(self, reason)[:0]


def closes_without_a_word(close: Method) -> Method:
    return lambda self, command: close(self, command)._replace(woken=())


def counts_ranks_as_they_came(tell: Method) -> Method:
    def mutant(self: Rendezvous, name: str) -> Any:
        told = tell(self, name)
        told[3] = list(self.nodes).index(name)
        return told

    return mutant


def uses_a_scope_again(form: Method) -> Method:
    return lambda self, reason, stamp: form(self, reason, self.number + 1)


def never_ends_last_call(ring: Method) -> Method:
    return lambda self, alarm, stamp: Step(Done())


def opens_the_same_run(opened: Method) -> Method:
    def mutant(self: Rendezvous, stamp: int) -> Step:
        run = self.run
        step: Step = opened(self, stamp)
        self.run = run
        return step

    return mutant


def is_content_with_one_less(decided: Method) -> Method:
    def mutant(now: Any) -> Any:
        decision = decided(now)
        few = isinstance(decision, Hold) and now.here == now.limits.min_nodes - 1 and now.newcomer is None
        return Form("that will do") if few and now.here else decision

    return mutant


def simulate_all(hosting: str) -> None:
    for seed in range(1, 1000):
        simulate(seed, hosting)


@pytest.mark.parametrize(
    ("owner", "method", "mutate", "hosting", "notices"),
    [
        (Rendezvous, "lost", waits_for_the_dead, "bytes", "with the dead|no end after"),
        (Rendezvous, "_end", tells_nobody, "bytes", "in vain|was not told"),
        (Rendezvous, "_close", closes_without_a_word, "bytes", "was not told|after .* had closed"),
        (Rendezvous, "_round", counts_ranks_as_they_came, "server", "not the first|had rank|asked for rank"),
        (Rendezvous, "_form", uses_a_scope_again, "bytes", "another round|in vain|came Round|before Round"),
        (Rendezvous, "ring", never_ends_last_call, "bytes", "in vain"),
        (Rendezvous, "_open", opens_the_same_run, "bytes", "came Round|after .* had closed"),
        (rendezvous, "decide", is_content_with_one_less, "server", "is in a round of"),
    ],
)
def test_a_bug_is_found(
    owner: Any,
    method: str,
    mutate: Callable[[Method], Method],
    hosting: str,
    notices: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, method, mutate(getattr(owner, method)))
    with pytest.raises(Wrong, match=rf"SEEDS=1 FIRST_SEED=\d+ pytest .* -k {hosting}") as raised:
        simulate_all(hosting)
    assert raised.match(rf"seed \d+: Wrong\(.*({notices})")
    assert " begin " in str(raised.value)
