"""The store in etcd, in a world without I/O (world.py), under thousands of seeded schedules.

Clients make all operations at once on a few keys. Their requests are lost, carried out though the answer is lost, or
carried out late, in any order; their gateways die or are left behind half-way, and another takes their sessions over
and is asked again; leases end. Whatever comes of it must be what `core/engine.py` could have answered to these calls,
made one after the other: no change twice, none lost that was acknowledged, none after it could not be any more.

A failure names its seed; `make soak` runs others. FIRST_SEED and SEEDS say which, and how many.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from tests.etcd.named_engine import NamedEngine
from tests.etcd.world import LONG_TTL_S, TTL_S, World
from tests.linearizability.checker import FOREVER, Operation, is_linearizable

from rallypoint.core.records import TimedOut
from rallypoint.deadline import Deadline
from rallypoint.errors import NoQuorum, NotAnInteger, SessionLost
from rallypoint.etcd import additions, messages, space, values
from rallypoint.etcd.executor import Executor
from rallypoint.etcd.mark import Mark
from rallypoint.etcd.session import Session
from rallypoint.etcd.space import Space

SEEDS = int(os.environ.get("SEEDS", "100"))
FIRST_SEED = int(os.environ.get("FIRST_SEED", "1"))
SLICE = 50
"""How many seeds one test runs."""

CLIENTS, CALLS = 3, 7
KEYS = (b"/a", b"/b")
COUNT, QUEUE = b"/c", b"/q"
NOT_A_NUMBER = "not a number"

seeds = pytest.mark.parametrize("first", range(FIRST_SEED, FIRST_SEED + SEEDS, SLICE))


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Values of more than four bytes are in parts."""
    for module in (values, space):
        monkeypatch.setattr(module, "PART_BYTES", 4)


class Caller:
    """A client: its session, the gateway that carries it, and what it has seen."""

    def __init__(self, world: World, name: str, patience_s: float, ttl_s: float, moves: float) -> None:
        self.world, self.name, self.moves = world, name, moves
        self._patience_s, self._ttl_s = patience_s, ttl_s
        self.space = self._machine()
        self.session: Session | None = None
        self.number = 0
        self.history: list[Operation] = []
        self.seen: list[bytes | None] = [None, b""]

    def _machine(self) -> Space:
        return self.world.machine(self.name, self._patience_s, self._ttl_s)

    async def run(self, count: int) -> None:
        for _ in range(count):
            await self.world.passes(self.world.dice.expovariate(20))
            await self.call(*self.plan())

    def plan(self) -> tuple[str, tuple[Any, ...]]:
        """Choose an operation of the engine, and its arguments."""
        dice = self.world.dice
        kind = dice.choice(KINDS)
        key, mine = dice.choice(KEYS), f"{self.name}{self.number}".encode()
        if dice.random() < 0.3:
            mine += b"-large"
        if kind == "add":
            return kind, (dice.choice((COUNT, COUNT, COUNT, key)), dice.choice((1, 1, 10, -1)))
        if kind in ("queue_push", "queue_pop", "queue_len"):
            return kind, (QUEUE, mine) if kind == "queue_push" else (QUEUE,)
        if kind in ("compare_set", "swap"):
            expected = dice.choice(self.seen[-4:])
            return kind, (key, expected or (b"" if kind == "compare_set" else expected), mine)
        if kind in ("set", "append"):
            return kind, (dice.choice((key, key, COUNT)) if kind == "append" else key, mine)
        if kind == "multi_set":
            return kind, ([(one, mine + b"%d" % at) for at, one in enumerate(KEYS)],)
        if kind in ("multi_get", "check"):
            return kind, ((*KEYS, COUNT) if kind == "multi_get" else (key, QUEUE),)
        if kind in ("num_keys", "list_keys", "delete_prefix"):
            return kind, (b"/" if kind != "delete_prefix" else dice.choice((b"/a", b"/q", b"/")),)
        return kind, (key,)

    async def call(self, kind: str, arguments: tuple[Any, ...]) -> None:
        called, result, returned = self.world.loop.time(), None, FOREVER
        try:
            result = plain(kind, await self._outcome(lambda space, mark: ask(space, mark, kind, arguments, self.world)))
            returned = self.world.loop.time()
        except (NoQuorum, SessionLost):
            pass  # whether it happened is not known
        except NotAnInteger:
            result, returned = NOT_A_NUMBER, self.world.loop.time()
        if isinstance(result, bytes):
            self.seen.append(result)
        self.history.append(Operation(self.name, kind, "", frozen(arguments), result, called, returned))

    async def _outcome(self, call: Call) -> Any:
        """Make one numbered request, at one gateway after the other if need be; again if it surely did not happen."""
        while True:
            if self.session is None or self.session.lost.is_set():
                self.session = await self.space.open_session(self.name, self._ttl_s)
            self.number += 1
            try:
                outcome = await self._moving(call, self.number)
            except SessionLost:
                if self.session is not None and self.session.mark(self.number).doubtful:
                    self.session = None
                    raise
                self.session = None
                continue
            self.session.confirm([self.number])
            return outcome

    async def _moving(self, call: Call, number: int) -> Any:
        assert self.session is not None
        dice = self.world.dice
        task = asyncio.ensure_future(call(self.space, self.session.mark(number)))
        while dice.random() < self.moves:
            done, _ = await asyncio.wait((task,), timeout=dice.expovariate(2))
            if done:
                break
            if dice.random() < 0.5:
                self.space.ties.client.dead = True
                task.cancel()
            else:
                task.add_done_callback(lambda task: task.cancelled() or task.exception())
            self.space = self._machine()
            session = await self.space.resume_session(self.session.id)
            if session is None:
                self.session.mark(number).doubtful = True
                raise SessionLost(peer="sim", why="it was gone when it moved")
            self.session = session
            task = asyncio.ensure_future(call(self.space, session.mark(number)))
        return await task


Call = Callable[[Space, Mark], Coroutine[Any, Any, Any]]
WAITS = ("get", "queue_pop")
"""What has a deadline of its own, at times."""

READS = ("get", "multi_get", "check", "num_keys", "list_keys", "queue_len")
KINDS = (
    *("set", "append", "append", "add", "add", "add", "add", "compare_set", "swap", "multi_set", "delete"),
    *("delete_prefix", "queue_push", "queue_push", "queue_push", "queue_pop", "queue_pop", "queue_pop"),
    *READS,
    "get",
)


async def ask(space: Space, mark: Mark, kind: str, arguments: tuple[Any, ...], world: World) -> Any:
    """Make a call; some reads and pops are waits that may end by their deadline."""
    waits = world.dice.random() < 0.5
    if kind == "get" and waits:
        found = await space.wait_values(arguments, Deadline(world.dice.uniform(0, 2)))
        return None if isinstance(found, TimedOut) else found[0]
    if kind == "queue_pop" and waits:
        item = await space.wait_item(mark, *arguments, Deadline(world.dice.uniform(0, 2)))
        return None if isinstance(item, TimedOut) else item
    if kind in READS:
        return await getattr(space, kind)(*arguments)
    return await getattr(space, kind)(mark, *arguments)


def frozen(value: Any) -> Any:
    return tuple(map(frozen, value)) if isinstance(value, (list, tuple)) else value


def plain(kind: str, result: Any) -> Any:
    """Return a result as it is compared: the order of keys that were made at one moment is nobody's business."""
    return frozen(sorted(result)) if kind == "list_keys" else frozen(result)


State = tuple[tuple[Any, ...], tuple[Any, ...], tuple[bytes, ...]]
NOTHING: State = ((), (), ())


def engine_step(state: State, operation: Operation) -> tuple[State, Any]:
    """The model: what the engine makes of it; and what was taken for one who gave up may be put back, once."""
    engine, limbo = NamedEngine(), state[2]
    for key, value in state[0]:
        engine.put(key, value)
    for key, items in state[1]:
        for item in items:
            engine.push(key, item)
    result: Any = None
    if operation.kind == "put_back":
        if limbo:
            engine.queue_push(QUEUE, limbo[-1], front=True)
            limbo = limbo[:-1]
    else:
        try:
            result = plain(operation.kind, getattr(engine, operation.kind)(*operation.arguments))
        except NotAnInteger:
            result = NOT_A_NUMBER
        if operation.kind == "queue_pop" and operation.returned == FOREVER and result is not None:
            limbo = (*limbo, result)
    queues = tuple(sorted((key, tuple(items)) for key, items in engine._queues.items()))
    return (tuple(sorted(engine._values.items())), queues, limbo), result


def with_put_backs(history: list[Operation]) -> list[Operation]:
    """Add, for every item that may have been taken for nobody, that it may be put back."""
    lost = [one for one in history if one.kind == "queue_pop" and one.returned == FOREVER]
    return [*history, *(one._replace(kind="put_back") for one in lost)]


def told(history: list[Operation]) -> str:
    return "\n".join(map(str, sorted(history, key=lambda operation: operation.called)))


def a_world(seed: int) -> World:
    return World(seed, 0.3 if seed % 5 else 0.9)


def check_histories(first: int, **options: Any) -> Counter[str]:
    """Run the schedules of some seeds; return what happened in them."""
    happened: Counter[str] = Counter()
    for seed in range(first, first + SLICE):
        world = a_world(seed)
        history = world.run(some_history(world, **options))
        assert is_linearizable(with_put_backs(history), engine_step, NOTHING), f"seed {seed}:\n{told(history)}"
        happened["late"] += world.late
        happened["unknown"] += sum(
            operation.returned == FOREVER and operation.kind not in WAITS for operation in history
        )
        happened["calls"] += len(history)
    return happened


async def some_history(
    world: World, patience_s: float = 1e6, ttl_s: float = LONG_TTL_S, moves: float = 0.0, compacts: bool = False
) -> list[Operation]:
    callers = [Caller(world, f"w{at}.", patience_s, ttl_s, moves) for at in range(CLIENTS)]
    compacting = asyncio.ensure_future(compact_now_and_then(world)) if compacts else None
    await asyncio.gather(*(caller.run(CALLS) for caller in callers))
    if compacting is not None:
        compacting.cancel()
    reader = Caller(world, "end", 1e6, LONG_TTL_S, 0.0)
    world.trouble = 0.0
    for kind, key in (("multi_get", (*KEYS, COUNT)), ("queue_len", QUEUE)):
        await reader.call(kind, (key,))
    return [operation for caller in (*callers, reader) for operation in caller.history]


async def compact_now_and_then(world: World) -> None:
    while True:
        await world.passes(world.dice.expovariate(3))
        world.etcd.compact()


@seeds
def test_all_operations_are_as_if_made_one_after_the_other(first):
    happened = check_histories(first)
    assert happened["unknown"] == 0 and happened["late"] > SLICE


@seeds
def test_so_they_are_when_sessions_move_from_gateway_to_gateway(first):
    assert check_histories(first, moves=0.4)["late"] > SLICE


@seeds
def test_so_they_are_when_leases_end_and_calls_fail_at_their_deadline(first):
    assert check_histories(first, patience_s=4.0, ttl_s=TTL_S, moves=0.1)["unknown"] > 0


@seeds
def test_so_they_are_when_etcd_is_compacted_all_the_time(first):
    check_histories(first, compacts=True)


@seeds
def test_so_they_are_when_many_add_to_one_counter(first, monkeypatch):
    """All go by posted additions."""
    monkeypatch.setattr(additions.Additions, "crowded", lambda self, key: True)
    monkeypatch.setattr(Caller, "plan", lambda self: ("add", (COUNT, self.world.dice.choice((1, 1, 10, -1)))))
    check_histories(first, moves=0.3)


@seeds
def test_items_that_somebody_gave_up_to_wait_for_are_neither_lost_nor_doubled(first):
    check_takers(first)


def check_takers(first: int) -> None:
    for seed in range(first, first + SLICE):
        world = a_world(seed)
        pushed, taken = world.run(some_takers(world))
        assert Counter(taken) == Counter(pushed), f"seed {seed}"


async def some_takers(world: World) -> tuple[list[bytes], list[bytes]]:
    """Push items while takers come and give up; return what was pushed, and what was taken, by them or at last."""
    items = [b"%d" % at + b"-large" * (at % 2) for at in range(8)]
    taken: list[bytes] = []

    async def push(name: str) -> None:
        space = world.machine(name)
        session = await space.open_session(name)
        for item in items[name == "b" :: 2]:
            await world.passes(world.dice.expovariate(1))
            with session.own_mark() as mark:
                await space.queue_push(mark, QUEUE, item)

    async def take(name: str) -> None:
        space = world.machine(name)
        session = await space.open_session(name)
        for _ in range(6):
            with session.own_mark() as mark:
                task = asyncio.ensure_future(space.wait_item(mark, QUEUE, Deadline(3.0)))
                await asyncio.wait((task,), timeout=world.dice.expovariate(1))
                task.cancel()
                for item in await asyncio.gather(task, return_exceptions=True):
                    if isinstance(item, bytes):
                        taken.append(item)
        await space.settle()

    await asyncio.gather(push("a"), push("b"), take("c"), take("d"))
    world.trouble = 0.0
    space = world.machine("last")
    session = await space.open_session("last")
    while True:
        with session.own_mark() as mark:
            item = await space.queue_pop(mark, QUEUE)
        if item is None:
            return items, taken
        taken.append(item)


@seeds
def test_a_barrier_counts_whoever_is_there_and_nobody_who_gave_up_or_died(first):
    for seed in range(first, first + SLICE):
        world = a_world(seed)
        outcomes, count, counts = world.run(some_arrivals(world))
        passed = sum(outcome is None for outcome in outcomes)
        assert (max(counts) >= 3) == bool(passed) or not passed, f"seed {seed}: {outcomes} {counts}"
        assert not passed or count >= passed, f"seed {seed}: {outcomes} {counts}"
        assert max(counts) >= 3 or count == 0, f"seed {seed}: {outcomes} {counts}"


async def some_arrivals(world: World) -> tuple[list[Any], int, list[int]]:
    """Let four come to a barrier of three; return what became of each, the count at last, and all it ever was."""

    async def arrive(name: str) -> Any:
        space = world.machine(name, ttl_s=20.0)
        session = await space.open_session(name)
        executors.append(Executor(space, session))
        await world.passes(world.dice.expovariate(0.5))
        with session.own_mark() as mark:
            task = asyncio.ensure_future(space.barrier(mark, COUNT, 3, Deadline(world.dice.uniform(0, 20))))
            if world.dice.random() < 0.5:
                await asyncio.wait((task,), timeout=world.dice.expovariate(0.5))
                if world.dice.random() < 0.3:
                    space.ties.client.dead = True
                task.cancel()
            return (await asyncio.gather(task, return_exceptions=True))[0]

    executors: list[Executor] = []
    outcomes = await asyncio.gather(*(arrive(f"w{at}") for at in range(4)))
    world.trouble = 0.0
    space = world.machine("last")
    executors.append(Executor(space, await space.open_session("last")))
    await world.passes(100.0)  # leases of the dead end, and their wills are seen to
    name = space.layout.value(COUNT)
    counts = [int(entry.stored.value) for entry in world.etcd.log if entry.key == name and entry.stored]
    left = [entry for entry in world.etcd.now if entry.startswith(space.layout.wills()[0])]
    assert not left, left
    return outcomes, int(await space.get(COUNT) or b"0"), [0, *counts]


@seeds
def test_a_watch_tells_every_change_once_and_in_order(first):
    for seed in range(first, first + SLICE):
        world = a_world(seed)
        told, changed = world.run(some_watch(world))
        assert told == changed, f"seed {seed}"


async def some_watch(world: World) -> tuple[list[Any], list[Any]]:
    """Watch all keys while they change; return what was told, and what has changed."""
    space = world.machine("watch")
    feed = space.feed(b"/")
    start = await space.revision()
    feed.start(start)
    callers = [Caller(world, f"w{at}.", 1e6, LONG_TTL_S, 0.0) for at in range(2)]
    await asyncio.gather(*(caller.run(CALLS) for caller in callers))
    with (await space.open_session("last")).own_mark() as mark:
        await space.set(mark, b"/last", b"1")
    told = []
    while not told or told[-1][0] != b"/last":
        event = await feed.next()
        told.append((event.key, event.value))
    entries = world.etcd.since(start + 1, *space.layout.values(b"/"))
    return told, [(space.layout.key(entry.key), entry.stored and entry.stored.value) for entry in entries]


@seeds
def test_many_pairs_are_written_once_though_it_takes_several_transactions(first, monkeypatch):
    """Each pair is a change of its own then; gateways die in between, and others write the same keys."""
    monkeypatch.setattr(values, "SET_BYTES", 1)
    for seed in range(first, first + SLICE):
        world = a_world(seed)
        history = world.run(some_history(world, moves=0.4))
        assert is_linearizable(list(apart(with_put_backs(history))), engine_step, NOTHING), (
            f"seed {seed}:\n{told(history)}"
        )


def apart(history: list[Operation]) -> Iterator[Operation]:
    """Take every list of pairs for as many changes."""
    for operation in history:
        if operation.kind != "multi_set":
            yield operation
            continue
        for pair in operation.arguments[0]:
            yield operation._replace(kind="set", arguments=pair)


def forgetful_guards(self: Mark) -> list[bytes]:
    return [self.session.ours()]


async def careless(self: Space, mark: Mark, work: Any, undo: Any, recover: Any) -> Any:
    return await work


MUTANTS: dict[str, tuple[Any, str, Any, Callable[[int], Any]]] = {
    "a change that does not look at its lane": (Mark, "guards", forgetful_guards, check_histories),
    "a session that is not fenced off": (
        Session,
        "ours",
        lambda self: messages.exists(self.place),
        lambda first: check_histories(first, moves=0.4),
    ),
    "a take that is interrupted half-way": (Space, "unbroken", careless, check_takers),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_simulation_notices(mutant, monkeypatch):
    where, name, worse, run = MUTANTS[mutant]
    monkeypatch.setattr(where, name, worse)
    with pytest.raises((AssertionError, RuntimeError)):
        run(1)
