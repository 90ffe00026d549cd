"""Random histories of clients at two relays and of direct ones, over lines that are cut: linearizable, exactly once."""

from __future__ import annotations

import os
from typing import Any

import pytest
from tests.linearizability.checker import Operation, check

from rallypoint.core import ops

from .lossy import Programme, World

SEEDS = int(os.environ.get("RALLYPOINT_FUZZ", "150"))
A, B, N, Q = b"/a", b"/b", b"/n", b"/q"


def something(world: World, programme: Programme, serial: int) -> Any:
    """Return something for a client to do."""
    value = b"%d;" % serial
    key = world.chance.choice((A, B))
    makers: list[Any] = [
        lambda: programme.write("set", [(key, value)], ops.Set(0, key, value)),
        lambda: programme.write("append", [(key, value)], ops.Append(0, key, value)),
        lambda: programme.write("set", [(A, value), (B, value)], ops.MultiSet(0, [(A, value), (B, value)])),
        lambda: programme.write("push", [(Q, value)], ops.Push(0, Q, value)),
        lambda: programme.ask("add", N, (serial,), ops.Add(0, N, serial)),
        lambda: programme.ask("add", N, (1,), ops.Add(0, N, 1)),
        lambda: programme.ask("add", N, (-1,), ops.Add(0, N, -1)),
        lambda: programme.ask("get", key, (), ops.Peek(0, key)),
        lambda: programme.ask("delete", key, (), ops.Delete(0, key)),
        lambda: programme.ask("length", Q, (), ops.QueueLen(0, Q)),
        lambda: programme.ask("pop", Q, (), ops.Draw(0, Q)),
        lambda: programme.wait_and("get", key, ops.Peek(0, key)),
        lambda: programme.wait_and("get", N, ops.Peek(0, N)),
        lambda: programme.wait_and("pop", Q, ops.Draw(0, Q)),
        lambda: programme.get_all([A, B]),
        lambda: programme.wait_for([A, B]),
    ]
    return world.chance.choice(makers)()


def act_directly(world: World, serial: int) -> None:
    """Let a client of the server itself do something, which takes no time."""
    value, now = b"%d;" % serial, world.tick()
    key = world.chance.choice((A, B))
    kind, key, arguments, op = world.chance.choice(
        [
            ("set", key, (value,), ops.Set(0, key, value)),
            ("delete", key, (), ops.Delete(0, key)),
            ("get", key, (), ops.Peek(0, key)),
            ("add", N, (1,), ops.Add(0, N, 1)),
            ("push", Q, (value,), ops.Push(0, Q, value)),
        ]
    )
    world.history.append(Operation("direct", kind, key.decode(), arguments, world.direct(op), now, now))


def finish(world: World, programmes: list[Programme]) -> None:
    """Let everybody come to an end: give those who wait what they wait for."""
    world.run_until_quiet()
    for serial in range(1000, 1100):
        if not any(programme.busy for programme in programmes):
            break
        for kind, key, value in (("set", A, b"end"), ("set", B, b"end"), ("push", Q, b"%d;" % serial)):
            now = world.tick()
            world.direct(ops.Set(0, key, value) if kind == "set" else ops.Push(0, key, value))
            world.history.append(Operation("end", kind, key.decode(), (value,), None, now, now))
        now = world.tick()
        result = world.direct(ops.Add(0, N, 0))
        world.history.append(Operation("end", "add", N.decode(), (0,), result, now, now))
        world.run_until_quiet()
    assert not any(programme.busy for programme in programmes), "somebody waits for ever"


def play(world: World, programmes: list[Programme], steps: int, kills: bool) -> None:
    chance = world.chance
    for serial in range(steps):
        programme = chance.choice(programmes)
        if not programme.busy:
            programme.begin(something(world, programme, serial))
        elif programme.client.waits_for and chance.random() < 0.1:
            programme.cancel()
        if chance.random() < 0.1:
            act_directly(world, serial)
        for relay in world.relays:
            if chance.random() < 0.6:
                relay.move(lossy=True)
            if chance.random() < 0.04:
                relay.cut()
        if kills and chance.random() < 0.1:
            victim = chance.choice(programmes)
            victim.relay.kill(victim.client)
            programmes[programmes.index(victim)] = Programme(world, victim.relay, f"heir {serial}")


def check_nothing_is_left(world: World, programmes: list[Programme]) -> None:
    """When its clients are gone, a relay has nothing at the server."""
    for programme in programmes:
        programme.relay.kill(programme.client)
    world.run_until_quiet()
    statistics = world.engine.statistics()
    assert (statistics.waiters, world.engine._turns) == (0, {})


@pytest.mark.parametrize("seed", range(SEEDS))
def test_merging_is_invisible(seed: int) -> None:
    world = World(seed, relays=2)
    programmes = [Programme(world, relay, f"{at}-{each}") for at, relay in enumerate(world.relays) for each in range(3)]
    play(world, programmes, steps=60, kills=False)
    finish(world, programmes)
    wrong = check(world.history)
    assert wrong is None, "\n".join(map(str, wrong))
    check_nothing_is_left(world, programmes)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_clients_that_die_lose_nothing_of_others_and_write_what_they_sent(seed: int) -> None:
    world = World(seed, relays=2)
    programmes = [Programme(world, relay, f"{at}-{each}") for at, relay in enumerate(world.relays) for each in range(4)]
    sent: dict[str, list[Any]] = {"add": [], "append": [], "push": []}
    got: list[bytes] = []
    for serial in range(120):
        programme = world.chance.choice(programmes)
        if not programme.busy:
            programme.begin(one_step(programme, serial, sent, got))
        play_lines(world, programmes, serial)
    world.run_until_quiet()
    check_nothing_is_left(world, programmes)
    assert int(world.direct(ops.Peek(0, N)) or 0) == sum(sent["add"])
    appended = (world.direct(ops.Peek(0, A)) or b"").split(b";")[:-1]
    assert sorted(appended) == sorted(sent["append"])
    left = list(world.engine._queues.get(Q, ()))
    assert sorted(got + left) == sorted(sent["push"])


def one_step(programme: Programme, serial: int, sent: dict[str, list[Any]], got: list[bytes]) -> Any:
    """Do one thing that is counted: what was handed to the relay is done, whoever dies."""
    kind = programme.world.chance.choice(("add", "append", "push", "pop", "pop", "take", "take", "get"))
    token = b"%d" % serial
    if kind == "add":
        sent["add"].append(serial)
        yield [ops.Add(0, N, serial)]
    elif kind == "append":
        sent["append"].append(token)
        yield [ops.Append(0, A, token + b";")]
    elif kind == "push":
        sent["push"].append(token)
        yield [ops.Push(0, Q, token)]
    elif kind == "get":
        yield [ops.Await(0, B)]
    else:
        if kind == "take":
            yield [ops.Await(0, Q)]
        (drawn,) = yield [ops.Draw(0, Q)]
        if drawn.item is not None:
            got.append(drawn.item)


def play_lines(world: World, programmes: list[Programme], serial: int) -> None:
    """Let bytes move, lines be cut and clients die."""
    chance = world.chance
    for relay in world.relays:
        if chance.random() < 0.6:
            relay.move(lossy=True)
        if chance.random() < 0.04:
            relay.cut()
    if chance.random() < 0.1:
        victim = chance.choice(programmes)
        victim.relay.kill(victim.client)
        programmes[programmes.index(victim)] = Programme(world, victim.relay, f"heir {serial}")
