"""Random histories of clients at two relays and of direct clients, over lines that are cut, are linearizable."""

from __future__ import annotations

import os
from typing import Any

import pytest
from tests.linearizability.checker import Operation, check

from rallypoint.core import ops

from .lossy_relays import LossyClient, LossySimulation

SEEDS = int(os.environ.get("RALLYPOINT_FUZZ", "150"))
A, B, N, Q = b"/a", b"/b", b"/n", b"/q"


def something(world: LossySimulation, lossy_client: LossyClient, serial: int) -> Any:
    """Return a random task for a client."""
    value = b"%d;" % serial
    key = world.chance.choice((A, B))
    makers: list[Any] = [
        lambda: lossy_client.write("set", [(key, value)], ops.Set(0, key, value)),
        lambda: lossy_client.write("append", [(key, value)], ops.Append(0, key, value)),
        lambda: lossy_client.write("set", [(A, value), (B, value)], ops.MultiSet(0, [(A, value), (B, value)])),
        lambda: lossy_client.write("push", [(Q, value)], ops.Push(0, Q, value)),
        lambda: lossy_client.ask("add", N, (serial,), ops.Add(0, N, serial)),
        lambda: lossy_client.ask("add", N, (1,), ops.Add(0, N, 1)),
        lambda: lossy_client.ask("add", N, (-1,), ops.Add(0, N, -1)),
        lambda: lossy_client.ask("get", key, (), ops.Peek(0, key)),
        lambda: lossy_client.ask("delete", key, (), ops.Delete(0, key)),
        lambda: lossy_client.ask("length", Q, (), ops.QueueLen(0, Q)),
        lambda: lossy_client.ask("pop", Q, (), ops.TurnPop(0, Q)),
        lambda: lossy_client.wait_and("get", key, ops.Peek(0, key)),
        lambda: lossy_client.wait_and("get", N, ops.Peek(0, N)),
        lambda: lossy_client.wait_and("pop", Q, ops.TurnPop(0, Q)),
        lambda: lossy_client.get_all([A, B]),
        lambda: lossy_client.wait_for([A, B]),
    ]
    return world.chance.choice(makers)()


def act_directly(world: LossySimulation, serial: int) -> None:
    """Execute a random operation directly at the server, which takes no time."""
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


def finish(world: LossySimulation, lossy_clients: list[LossyClient]) -> None:
    """Let all clients finish: provide the keys and items that they wait for."""
    world.run_until_quiet()
    for serial in range(1000, 1100):
        if not any(lossy_client.busy for lossy_client in lossy_clients):
            break
        for kind, key, value in (("set", A, b"end"), ("set", B, b"end"), ("push", Q, b"%d;" % serial)):
            now = world.tick()
            world.direct(ops.Set(0, key, value) if kind == "set" else ops.Push(0, key, value))
            world.history.append(Operation("end", kind, key.decode(), (value,), None, now, now))
        now = world.tick()
        result = world.direct(ops.Add(0, N, 0))
        world.history.append(Operation("end", "add", N.decode(), (0,), result, now, now))
        world.run_until_quiet()
    assert not any(lossy_client.busy for lossy_client in lossy_clients), "a client waits for ever"


def play(world: LossySimulation, lossy_clients: list[LossyClient], steps: int, kills: bool) -> None:
    chance = world.chance
    for serial in range(steps):
        lossy_client = chance.choice(lossy_clients)
        if not lossy_client.busy:
            lossy_client.begin(something(world, lossy_client, serial))
        elif lossy_client.client.waits_for and chance.random() < 0.1:
            lossy_client.cancel()
        if chance.random() < 0.1:
            act_directly(world, serial)
        for relay in world.relays:
            if chance.random() < 0.6:
                relay.move(lossy=True)
            if chance.random() < 0.04:
                relay.cut()
        if kills and chance.random() < 0.1:
            victim = chance.choice(lossy_clients)
            victim.relay.kill(victim.client)
            lossy_clients[lossy_clients.index(victim)] = LossyClient(world, victim.relay, f"heir {serial}")


def check_nothing_is_left(world: LossySimulation, lossy_clients: list[LossyClient]) -> None:
    """Check that relays without clients leave nothing at the server."""
    for lossy_client in lossy_clients:
        lossy_client.relay.kill(lossy_client.client)
    world.run_until_quiet()
    statistics = world.engine.statistics()
    assert (statistics.waiters, world.engine._turns) == (0, {})


@pytest.mark.parametrize("seed", range(SEEDS))
def test_merging_is_invisible(seed: int) -> None:
    world = LossySimulation(seed, relays=2)
    lossy_clients = [
        LossyClient(world, relay, f"{at}-{each}") for at, relay in enumerate(world.relays) for each in range(3)
    ]
    play(world, lossy_clients, steps=60, kills=False)
    finish(world, lossy_clients)
    wrong = check(world.history)
    assert wrong is None, "\n".join(map(str, wrong))
    check_nothing_is_left(world, lossy_clients)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_dying_clients_lose_nothing_of_others_and_their_writes_are_executed(seed: int) -> None:
    world = LossySimulation(seed, relays=2)
    lossy_clients = [
        LossyClient(world, relay, f"{at}-{each}") for at, relay in enumerate(world.relays) for each in range(4)
    ]
    sent: dict[str, list[Any]] = {"add": [], "append": [], "push": []}
    got: list[bytes] = []
    for serial in range(120):
        lossy_client = world.chance.choice(lossy_clients)
        if not lossy_client.busy:
            lossy_client.begin(one_step(lossy_client, serial, sent, got))
        play_lines(world, lossy_clients, serial)
    world.run_until_quiet()
    check_nothing_is_left(world, lossy_clients)
    assert int(world.direct(ops.Peek(0, N)) or 0) == sum(sent["add"])
    appended = (world.direct(ops.Peek(0, A)) or b"").split(b";")[:-1]
    assert sorted(appended) == sorted(sent["append"])
    left = list(world.engine._queues.get(Q, ()))
    assert sorted(got + left) == sorted(sent["push"])


def one_step(lossy_client: LossyClient, serial: int, sent: dict[str, list[Any]], got: list[bytes]) -> Any:
    """Perform one counted task: what the relay has received is executed, even if the client dies."""
    kind = lossy_client.world.chance.choice(("add", "append", "push", "pop", "pop", "take", "take", "get"))
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
        yield [ops.WaitOrTurn(0, B)]
    else:
        if kind == "take":
            yield [ops.WaitOrTurn(0, Q)]
        (drawn,) = yield [ops.TurnPop(0, Q)]
        if drawn.item is not None:
            got.append(drawn.item)


def play_lines(world: LossySimulation, lossy_clients: list[LossyClient], serial: int) -> None:
    """Let bytes move, lines be cut and clients die."""
    chance = world.chance
    for relay in world.relays:
        if chance.random() < 0.6:
            relay.move(lossy=True)
        if chance.random() < 0.04:
            relay.cut()
    if chance.random() < 0.1:
        victim = chance.choice(lossy_clients)
        victim.relay.kill(victim.client)
        lossy_clients[lossy_clients.index(victim)] = LossyClient(world, victim.relay, f"heir {serial}")
