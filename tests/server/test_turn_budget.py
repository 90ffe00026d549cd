"""Long work shares out the turns of the event loop: how many steps run in one turn, and who is served in between."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise

import pytest
from tests.raw_peer import AMPLE_S
from tests.server.fake_log import FakeLog
from tests.server.fake_relay import FakeRelay
from tests.server.peers import NativePeer, native_peer, torch_peer
from tests.turns import STEPS, AmpleTurns, SteppedTurns, use_turns

from rallypoint.core import ops
from rallypoint.core import state as state_module
from rallypoint.protocol.c10d import Opcode, encode
from rallypoint.protocol.native import frame
from rallypoint.server.connections.native_connection import UNCHECKED
from rallypoint.server.event_loop import LONG_COLLECTION_S, LongCollections
from rallypoint.server.server import StoreServer
from rallypoint.server.settings import Settings

MANY = 100
MOST = 2 * STEPS
"""How many steps run in a turn at most: the queued work's, and the new work's."""

GROUP = UNCHECKED + 1
"""How many pipelined requests are one step."""


def stepped(test: Callable[[StoreServer], Awaitable[None]], log: FakeLog | None = None) -> None:
    """Run a test on a server whose turns are counted in steps."""

    async def run() -> None:
        server = use_turns(StoreServer(Settings(), log), SteppedTurns())
        await server.open([])
        await asyncio.wait_for(test(server), AMPLE_S)
        await server.close()

    asyncio.run(run())


async def per_turn(done: Callable[[], int], count: int) -> list[int]:
    """Return how many steps were done in each turn of the loop, until all are."""
    steps, before = [], done()
    while before < count:
        await asyncio.sleep(0)
        steps.append(done() - before)
        before += steps[-1]
    return steps


def test_work_runs_a_share_at_a_time_in_the_order_in_which_it_was_queued() -> None:
    ran: list[str] = []

    def steps(name: str) -> Iterator[None]:
        for _ in range(MANY):
            ran.append(name)
            yield

    async def run() -> None:
        turns = SteppedTurns()
        turns.run(steps("a"))
        assert len(ran) <= STEPS + 1
        turns.run(steps("b"))
        assert len(ran) <= MOST, "there is one budget for all new work of a turn"
        counts = await per_turn(lambda: len(ran), 2 * MANY)
        assert max(counts) <= MOST
        half = ran[: len(ran) // 2]
        assert {"a", "b"} == set(half) and ran.count("a") == ran.count("b") == MANY

    asyncio.run(run())


def test_work_that_fails_does_not_stop_the_rest() -> None:
    async def run() -> None:
        loop, failures = asyncio.get_running_loop(), list[object]()
        loop.set_exception_handler(lambda _, context: failures.append(context))
        turns, ran = AmpleTurns(), asyncio.Event()
        turns.resume(lambda: 1 // 0)  # type: ignore[arg-type]
        turns.resume(ran.set)
        await ran.wait()
        assert len(failures) == 1

    asyncio.run(asyncio.wait_for(run(), AMPLE_S))


def test_pipelined_requests_of_a_native_client_do_not_delay_another_client() -> None:
    async def test(server: StoreServer) -> None:
        heavy, light = await native_peer(server), await native_peer(server)
        heavy.asks(*(ops.Count(number, b"k") for number in range(1, MANY + 1)))
        each = len(frame((1, 0, 0)))
        assert len(heavy.pending) <= each * GROUP * (STEPS + 1) and heavy.stopped, "the rest waits, and no more is read"
        assert await light.asked(ops.Ping(1)) is None
        assert len(heavy.pending) < each * MANY, "the small request is served before the rest"
        replies = [await heavy.reads() for _ in range(MANY)]
        assert replies == [[number, 0, 0] for number in range(1, MANY + 1)]
        assert await heavy.asked(ops.Ping(MANY + 1)) is None and not heavy.stopped

    stepped(test)


def test_pipelined_requests_of_a_torch_client_run_a_few_per_turn() -> None:
    async def test(server: StoreServer) -> None:
        heavy, light = await torch_peer(server), await torch_peer(server)
        heavy.says(encode(Opcode.ADD, b"/n", 1) * MANY)
        assert len(heavy.pending) <= 8 * GROUP * (STEPS + 1) and heavy.stopped
        await light.pings()
        counts = await per_turn(lambda: len(heavy.pending) // 8, MANY)
        assert max(counts) <= MOST * GROUP
        assert [await heavy.number() for _ in range(MANY)] == list(range(1, MANY + 1))

    stepped(test)


def test_a_long_request_of_a_torch_client_waits_for_its_turn() -> None:
    async def test(server: StoreServer) -> None:
        peers = [await torch_peer(server) for _ in range(MANY)]
        engine = server.state.namespaces[0].engine
        for number, peer in enumerate(peers):
            peer.asks(Opcode.MULTI_SET, 2, b"/a%d" % number, b"", b"/b%d" % number, b"")
        keys = engine.execute(ops.Count(0, b""))
        assert keys <= 2 * (STEPS + 1), "the others wait"
        assert max(await per_turn(lambda: engine.execute(ops.Count(0, b"/")), 2 * MANY)) <= 2 * MOST
        for peer in peers:
            await peer.pings()

    stepped(test)


def test_requests_of_many_channels_run_a_few_per_turn() -> None:
    async def test(server: StoreServer) -> None:
        relay = await FakeRelay(server).opens()
        heavy, light = await relay.greeted(), await relay.greeted()
        heavy.asks(*(ops.Count(number, b"k") for number in range(1, MANY + 1)))
        assert await light.asked(ops.Ping(1)) is None
        assert [(await heavy.reads())[0] for _ in range(MANY)] == list(range(1, MANY + 1))

    stepped(test)


def test_committed_requests_run_a_few_per_turn() -> None:
    log = FakeLog()

    async def test(server: StoreServer) -> None:
        peers = [await native_peer(server) for _ in range(MANY)]
        for peer in peers:
            peer.asks(ops.Set(1, b"/k", b"v"))
        engine = server.state.namespaces[0].engine
        before = engine.revision
        counts = await per_turn(lambda: engine.revision - before, MANY)
        assert max(counts) <= MOST, "the commit is one, its requests run in slices"
        for peer in peers:
            assert (await peer.reads())[0] == 1

    stepped(test, log)


def test_sessions_that_end_at_once_end_a_few_per_turn() -> None:
    async def test(server: StoreServer) -> None:
        peers = [await native_peer(server) for _ in range(MANY)]
        for peer in peers:
            assert await peer.asked(ops.SetLease(1, b"/%d" % id(peer), b"v", 60.0)) is None
            assert await peer.asked(ops.Bye(2)) is None
        for peer in peers:
            peer.hangs_up()
        counts = await per_turn(lambda: MANY - len(server.state.sessions), MANY)
        assert max(counts) <= MOST
        engine = server.state.namespaces[0].engine
        assert not engine.execute(ops.Count(0, b"/")) and not server.clock.deadlines

    stepped(test)


# Waits


def waits(kind: str, number: int) -> ops.Op:
    return {
        "get": ops.Get(number, b"/k", AMPLE_S),
        "wait": ops.Wait(number, [b"/k"], AMPLE_S),
        "two keys": ops.MultiGet(number, [b"/k", b"/here"], AMPLE_S),
        "turn": ops.WaitOrTurn(number, b"/k"),
        "arrive": ops.Arrive(number, b"/k", MANY + 1, AMPLE_S),
    }[kind]


@pytest.mark.parametrize("kind", ["get", "wait", "two keys", "turn", "arrive"])
@pytest.mark.parametrize("kept", ["memory", "log"])
def test_many_waits_that_end_at_once_are_answered_in_slices(
    kept: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_module, "SLICE_KEYS", 4)

    async def run() -> None:
        server = use_turns(StoreServer(Settings(), FakeLog() if kept == "log" else None), AmpleTurns())
        await server.open([])
        heavy, other = await native_peer(server), await native_peer(server)
        await other.asked(ops.Set(1, b"/here", b""))
        heavy.asks(*(waits(kind, number) for number in range(1, MANY + 1)))
        assert await heavy.asked(ops.Ping(MANY + 1)) is None
        last = waits(kind, 2) if kind == "arrive" else ops.Set(2, b"/k", b"v")
        delivered: list[int] = []
        session = server.state.sessions_by_id[heavy.session]
        assert len(session.waiting) == MANY
        other.asks(last)
        while session.waiting:
            delivered.append(len(session.waiting))
            await asyncio.sleep(0)
        slices = [before - after for before, after in zip(delivered, [*delivered[1:], 0], strict=True)]
        assert max(slices) <= 2 * 4 and len(slices) >= MANY // 8
        replies = sorted([await heavy.reads() for _ in range(MANY)])
        value = {"get": [b"v"], "two keys": [b"v", b""]}.get(kind)
        assert replies == [[number, 0, value] for number in range(1, MANY + 1)]
        engine = server.state.namespaces[0].engine
        assert not engine.memory.parked and not engine.read_work and not engine.clearing
        await server.close()

    asyncio.run(asyncio.wait_for(run(), AMPLE_S))


@pytest.mark.parametrize("kind", ["get", "wait", "turn", "arrive"])
def test_waits_that_are_over_stay_so_if_the_key_is_deleted_before_their_answers(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_module, "SLICE_KEYS", 4)

    async def run() -> None:
        server = use_turns(StoreServer(Settings()), AmpleTurns())
        await server.open([])
        heavy, other = await native_peer(server), await native_peer(server)
        heavy.asks(*(waits(kind, number) for number in range(1, MANY + 1)))
        last = waits(kind, 1) if kind == "arrive" else ops.Set(1, b"/k", b"v")
        other.asks(last, ops.Delete(2, b"/k"))
        replies = sorted([await heavy.reads() for _ in range(MANY)])
        assert replies == [[n, 0, [b"v"] if kind == "get" else None] for n in range(1, MANY + 1)]
        await server.close()

    asyncio.run(asyncio.wait_for(run(), AMPLE_S))


@pytest.mark.parametrize("kept", ["memory", "log"])
def test_waits_that_go_on_for_other_keys_do_not_hold_up_those_that_are_over(
    kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slice that the change itself answers has no answer in it: nothing but the rest of the work is left."""
    monkeypatch.setattr(state_module, "SLICE_KEYS", 4)

    async def run() -> None:
        server = use_turns(StoreServer(Settings(), FakeLog() if kept == "log" else None), AmpleTurns())
        await server.open([])
        heavy, other = await native_peer(server), await native_peer(server)
        await other.asked(ops.Set(1, b"/here", b""))
        second = {number: b"/here" if number <= MANY // 2 else b"/missing" for number in range(1, MANY + 1)}
        heavy.asks(*(ops.Wait(number, [b"/k", key], AMPLE_S) for number, key in second.items()))
        assert await heavy.asked(ops.Ping(MANY + 1)) is None
        other.asks(ops.Set(2, b"/k", b"v"))
        replies = sorted([await heavy.reads() for _ in range(MANY // 2)])
        assert replies == [[number, 0, None] for number in range(1, MANY // 2 + 1)]
        await server.close()

    asyncio.run(asyncio.wait_for(run(), AMPLE_S))


def test_a_session_with_many_reads_ends_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "SLICE_KEYS", 4)

    async def run() -> None:
        server = use_turns(StoreServer(Settings()), AmpleTurns())
        await server.open([])
        heavy: NativePeer = await native_peer(server)
        engine = server.state.namespaces[0].engine
        heavy.asks(*(ops.Get(number, b"/k", AMPLE_S) for number in range(1, MANY + 1)))
        each = engine.memory.parked // MANY
        heavy.asks(ops.Bye(MANY + 1))
        heavy.hangs_up()
        left = [engine.memory.parked // each]
        while left[-1]:
            await asyncio.sleep(0)
            left.append(engine.memory.parked // each)
        assert max(before - after for before, after in pairwise(left)) <= 4
        assert not server.state.sessions and not server.clock.deadlines
        assert not engine.read_work and not engine.statistics().waiters
        await server.close()

    asyncio.run(asyncio.wait_for(run(), AMPLE_S))


# Garbage collection


def test_objects_are_frozen_after_a_long_collection_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now, frozen = [0.0], list[float]()
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(now[0]))
    collections = LongCollections(lambda: now[0])
    for took_s in (LONG_COLLECTION_S / 2, LONG_COLLECTION_S * 2, 0.0):
        collections("start", {"generation": 2})
        now[0] += took_s
        collections("stop", {"generation": 2})
    assert frozen == [LONG_COLLECTION_S * 2.5]
