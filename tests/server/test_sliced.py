"""Long lists processed in slices: changes between two slices count, and nothing is kept afterwards."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
from tests.raw_peer import AMPLE_S
from tests.server.peers import NativePeer

from rallypoint.core import ops
from rallypoint.core.engine import Engine
from rallypoint.server.connections.sliced import NO_SOURCE, SLICE_ITEMS, ListEncoder, encode_in_slices, look_in_slices
from rallypoint.server.server import StoreServer
from rallypoint.server.settings import Settings

KEYS = [b"/%d" % number for number in range(3 * SLICE_ITEMS)]


def filled() -> Engine:
    engine = Engine()
    engine.put_all([(key, b"v") for key in KEYS])
    return engine


async def look(engine: Engine, between: list[ops.Op]) -> bool:
    """Look for all keys, with these operations after the first slice."""
    found: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    look_in_slices(engine, KEYS, found.set_result)
    await asyncio.sleep(0)
    assert not found.done()
    for op in between:
        engine.execute(op)
    return await found


@pytest.mark.parametrize(
    ("between", "here"),
    [
        pytest.param([], True, id="nothing"),
        pytest.param([ops.Set(0, KEYS[0], b"w"), ops.Push(0, b"q", b"v")], True, id="writes"),
        pytest.param([ops.Delete(0, KEYS[0])], False, id="deleted"),
        pytest.param([ops.Delete(0, KEYS[0]), ops.Set(0, KEYS[0], b"w")], False, id="deleted-and-back"),
        pytest.param([ops.Delete(0, KEYS[-1])], False, id="deleted-ahead"),
        pytest.param([ops.Push(0, b"q", b"v"), ops.Pop(0, b"q")], False, id="a-queue-ended"),
    ],
)
def test_keys_exist_if_none_was_deleted_between_slices(between: list[ops.Op], here: bool) -> None:
    assert asyncio.run(look(filled(), between)) is here


def test_a_key_that_is_missing_is_seen_in_its_slice() -> None:
    engine = filled()
    engine.remove(KEYS[-1])
    assert asyncio.run(look(engine, [])) is False


class Items(list[bytes]):
    """A list that can be weakly referred to."""


@pytest.mark.parametrize("work", ["look", "encode"])
def test_a_list_is_freed_at_once(work: str) -> None:
    async def run() -> weakref.ref[Items]:
        items = Items(KEYS)
        done: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        if work == "look":
            look_in_slices(filled(), items, done.set_result)
        else:
            encoder = ListEncoder(b"".join, bytes, 0)
            encode_in_slices(items, encoder, NO_SOURCE, 1 << 30, bool, lambda _, size, owned: done.set_result(size))
        await done
        return weakref.ref(items)

    gc.disable()
    try:
        assert asyncio.run(run())() is None, "a reference cycle keeps the list"
    finally:
        gc.enable()


MANY = [b"/a key of some length/%d" % number for number in range(16_384)]
"""Enough keys to be looked up in slices."""


async def peer_of_many(missing: int) -> tuple[StoreServer, NativePeer]:
    """Connect to a server that has all of the keys but one."""
    server = StoreServer(Settings())
    await server.open([])
    server.state.namespaces[0].engine.put_all([(key, b"v") for key in MANY if key is not MANY[missing]])
    peer = NativePeer(server)
    await peer.greets()
    return server, peer


@pytest.mark.parametrize("missing", [0, -1])
def test_a_wait_for_many_keys_ends_when_the_last_is_there(missing: int) -> None:
    async def run() -> None:
        server, peer = await peer_of_many(missing)
        peer.asks(ops.Wait(1, MANY, AMPLE_S))
        assert await peer.asked(ops.Check(2, MANY)) is False, "later requests come in their turn"
        other = NativePeer(server)
        await other.greets()
        assert await other.asked(ops.Set(1, MANY[missing], b"v")) is None
        assert (await peer.reads())[0] == 1
        assert await peer.asked(ops.Check(3, MANY)) is True
        await server.close()

    asyncio.run(asyncio.wait_for(run(), AMPLE_S))


def test_a_wait_cancelled_during_its_lookup_leaves_nothing() -> None:
    async def run() -> None:
        server, peer = await peer_of_many(-1)
        peer.asks(ops.Wait(1, MANY, AMPLE_S), ops.Drop(2, 1))
        assert (await peer.reads())[0] == 2
        assert await peer.asked(ops.Check(3, MANY)) is False, "by now the first look is over, too"
        assert not server.state.sessions_by_id[peer.session].waiting
        await server.close()

    asyncio.run(asyncio.wait_for(run(), AMPLE_S))
