"""What a durable server holds for peers that do not read their replies, and for disks slower than the peers."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
from tests.server.fake_log import FakeLog, in_memory, on_log
from tests.server.peers import FakeTransport, NativePeer, TorchPeer, settle

from rallypoint.core import ops
from rallypoint.core.records import ReplyStatus
from rallypoint.protocol.c10d import WAITED, Opcode, encode
from rallypoint.protocol.native import Frames, frame
from rallypoint.server.connections import native_connection
from rallypoint.server.connections.limits import RESERVE_BYTES
from rallypoint.server.connections.native_connection import REPLIES_BYTES
from rallypoint.server.connections.sliced import SLICE_ITEMS
from rallypoint.server.server import StoreServer

MIB = 1024 * 1024
LARGE = b"v" * MIB
"""A few of these values exceed the buffer of a transport."""

MOST = REPLIES_BYTES + 3 * MIB
"""The most bytes written for a peer that does not read: the limit on replies, and the last reply."""


class _Mute(FakeTransport):
    """A peer that reads nothing at first; it records the largest amount written and not read."""

    most = 0

    def write(self, data: Any) -> None:
        super().write(data)
        self.most = max(self.most, len(self.pending))


class MuteOurs(_Mute, NativePeer):
    """One that speaks our protocol."""


class MuteTorch(_Mute, TorchPeer):
    """One that speaks PyTorch's."""


Mute = TypeVar("Mute", bound=_Mute)


async def ours(server: StoreServer, session: bytes = b"") -> MuteOurs:
    peer = MuteOurs(server)
    await peer.greets(session)
    return peer


async def torch(server: StoreServer) -> MuteTorch:
    return await MuteTorch(server).greets()


async def store_large(server: StoreServer) -> NativePeer:
    writer = NativePeer(server)
    await writer.greets()
    await writer.asked(ops.Set(1, b"/large", LARGE))
    return writer


async def stalled(server: StoreServer, log: FakeLog, connect: Callable[[StoreServer], Awaitable[Mute]]) -> Mute:
    """Return a peer of a server that has a large value, and commits nothing until the log flows."""
    await store_large(server)
    peer = await connect(server)
    log.stalled = True
    return peer


@on_log
async def test_reads_behind_a_change_wait_for_a_native_peer_to_read(server: StoreServer, log: FakeLog) -> None:
    peer = await stalled(server, log, ours)
    peer.asks(
        ops.Add(1, b"/n", 1), *(ops.Get(number, b"/large", 0.0) for number in range(2, 302)), ops.Add(302, b"/n", 1)
    )
    await log.flow()
    assert peer.most < MOST and peer.stopped and not peer.closing
    assert server.state.namespaces[0].engine.execute(ops.Peek(0, b"/n")) == b"2", "changes do not wait"
    held = server.statistics().facts["bytes"] - MIB
    assert 300 * 100 < held < MOST + MIB, "waiting requests are counted; their replies are not made yet"
    replies = dict([(await peer.reads())[::2] for _ in range(302)])
    assert replies == {1: 1, 302: 2, **{number: [LARGE] for number in range(2, 302)}}
    assert peer.most < MOST and not peer.stopped
    assert await peer.asked(ops.Ping(303)) is None
    assert server.statistics().facts["bytes"] < 2 * MIB


@on_log
async def test_reads_behind_a_change_wait_for_a_torch_peer_to_read(server: StoreServer, log: FakeLog) -> None:
    peer = await stalled(server, log, torch)
    peer.says(
        (encode(Opcode.ADD, b"/n", 1) + encode(Opcode.GET, b"/large") + encode(Opcode.PING, 7)) * 100
        + encode(Opcode.MULTI_GET, 2, b"/large", b"/n")
    )
    await log.flow()
    assert peer.most < MOST and peer.stopped and not peer.closing
    assert server.state.namespaces[0].engine.execute(ops.Peek(0, b"/n")) == b"100", "changes do not wait"
    for number in range(1, 101):
        assert await peer.number() == number and await peer.string() == LARGE
        assert await peer.hears(4) == struct.pack("<I", 7), "in their order"
    assert (await peer.string(), await peer.string()) == (LARGE, b"100")
    assert peer.most < MOST and not peer.stopped
    await peer.pings()


@on_log
async def test_large_replies_to_changes_wait_for_their_peer_to_read(server: StoreServer, log: FakeLog) -> None:
    await store_large(server)
    native, other = await ours(server), await torch(server)
    log.stalled = True
    native.asks(*(ops.CompareSwap(number, b"/large", b"wrong", b"w") for number in range(1, 101)))
    other.says(encode(Opcode.COMPARE_SET, b"/large", b"wrong", b"w") * 100)
    await log.flow()
    assert native.most < MOST and other.most < MOST
    assert [await other.string() for _ in range(100)] == [LARGE] * 100
    assert sorted([await native.reads() for _ in range(100)]) == [
        [number, ReplyStatus.OK, [False, LARGE]] for number in range(1, 101)
    ]


@on_log
async def test_replies_behind_a_long_list_wait_for_their_peer_to_read(server: StoreServer, log: FakeLog) -> None:
    """Nothing is sent until the list is encoded, so the peer does not look slow yet."""
    peer = await stalled(server, log, torch)
    many = [b"/large", *[b"/none"] * SLICE_ITEMS]
    peer.says(
        encode(Opcode.SET, b"/k", b"")
        + encode(Opcode.MULTI_GET, len(many), *many)
        + encode(Opcode.GET, b"/large") * 100
        + encode(Opcode.PING, 7)
    )
    await log.flow()
    assert peer.most < MOST + MIB
    assert [await peer.string() for _ in many] == [LARGE, *[b""] * SLICE_ITEMS]
    assert [await peer.string() for _ in range(100)] == [LARGE] * 100
    assert await peer.hears(4) == struct.pack("<I", 7)


@on_log
async def test_lists_behind_a_change_are_made_a_few_at_a_time(server: StoreServer, log: FakeLog) -> None:
    writer, peer = await store_large(server), await ours(server)
    many = [b"/large", *[b"/none"] * SLICE_ITEMS]
    log.stalled = True
    peer.asks(ops.Add(1, b"/n", 1), *(ops.MultiPeek(number, many) for number in range(2, 102)), ops.Ping(102))
    await log.flow()
    assert peer.most < (native_connection.MAX_LISTS + 2) * MIB
    assert await writer.asked(ops.Ping(2)) is None
    assert sorted([(await peer.reads())[0] for _ in range(102)]) == list(range(1, 103))


@on_log
async def test_a_read_that_waits_for_its_peer_ends_its_turn_at_once(server: StoreServer, log: FakeLog) -> None:
    """Any request of a torch client ends its turn, in the log too, even if its reply is made later."""
    writer, peer, next_one = await store_large(server), await torch(server), await torch(server)
    peer.asks(Opcode.WAIT, 1, b"/q")
    await settle()
    next_one.asks(Opcode.WAIT, 1, b"/q")
    await settle()
    log.stalled = True
    peer.says(encode(Opcode.SET, b"/k", b"v") + encode(Opcode.GET, b"/large") * 5)
    await settle()
    writer.asks(ops.Push(2, b"/q", b"item"))
    peer.says(encode(Opcode.GET, b"/large") * 5)
    await log.flow()
    assert next_one.pending == WAITED, "at once, and not when a sweep takes the turn back"
    assert await next_one.hears(1) == WAITED
    next_one.asks(Opcode.QUEUE_POP, b"/q")
    assert (await next_one.number(), await next_one.string()) == (1, b"item")
    assert [await peer.string() for _ in range(5)] == [LARGE] * 5
    assert await peer.hears(1) == WAITED and [await peer.string() for _ in range(5)] == [LARGE] * 5


@on_log
async def test_a_peer_that_hangs_up_leaves_nothing_to_be_sent(server: StoreServer, log: FakeLog) -> None:
    await store_large(server)
    native, other = await ours(server), await torch(server)
    log.stalled = True
    native.asks(
        ops.Add(1, b"/n", 1), *(ops.Get(number, b"/large", 0.0) for number in range(2, 102)), ops.Add(102, b"/n", 1)
    )
    other.says((encode(Opcode.ADD, b"/n", 1) + encode(Opcode.GET, b"/large")) * 50)
    await log.flow()
    native.hangs_up()
    other.hangs_up()
    await settle()
    assert server.statistics().facts["bytes"] < 2 * MIB
    again = await ours(server, native.session)
    assert await again.asked(ops.Add(1, b"/n", 1)) == 1, "its answers are kept"
    assert await again.asked(ops.Add(102, b"/n", 1)) > 1


# Pushes


@on_log
async def test_repeated_pushes_wait_for_the_client_to_read(server: StoreServer, log: FakeLog) -> None:
    writer, peer = await store_large(server), await ours(server)
    await peer.asked(ops.WatchPrefix(1, b"/w/"))
    peer.hangs_up()
    await settle()
    for number in range(20):
        await writer.asked(ops.Set(2 + number, b"/w/%d" % number, LARGE))
    again = MuteOurs(server)
    again.frames, again.inbox = Frames(1 << 30), []
    welcomed = asyncio.ensure_future(again.greets(peer.session))
    await settle()
    assert again.most < MOST
    await writer.asked(ops.Set(22, b"/w/20", b"new"))
    await welcomed
    pushes = [await again.reads() for _ in range(21)]
    assert [push[1] for push in pushes] == list(range(1, 22)), "each once, and in their order"
    assert again.most < MOST
    await writer.asked(ops.Set(23, b"/w/21", b"newer"))
    assert (await again.reads())[1] == 22


@in_memory()
async def test_a_push_caused_by_a_request_follows_the_pushes_before_it(server: StoreServer, log: None) -> None:
    """A client that reads again gets the pushes that waited, and its waiting requests are executed."""
    writer, peer = await store_large(server), await ours(server)
    await peer.asked(ops.WatchPrefix(1, b"/w/"))
    peer.asks(ops.Get(2, b"/large", 0.0))  # unread: from here on, pushes and requests wait
    peer.connection.data_received(b"".join(frame(ops.Set(3 + number, b"/w/own", b"v")) for number in range(10)))
    for number in range(10):
        await writer.asked(ops.Set(2 + number, b"/w/%d" % number, b"theirs"))
    received = [await peer.reads() for _ in range(1 + 10 + 20)]
    assert [push for number, push, _ in received if not number] == list(range(1, 21))


# A slow disk


@on_log(max_memory=64 * MIB)
async def test_requests_of_disconnected_clients_that_wait_for_the_disk_are_bounded(
    server: StoreServer, log: FakeLog
) -> None:
    value = b"v" * (4 * MIB)
    log.stalled = True
    for number in range(40):
        peer = await TorchPeer(server).greets()
        peer.says(encode(Opcode.SET, b"/k%d" % (number % 2), value))
        peer.hangs_up()
        await settle()
    held = server.statistics().facts["bytes"]
    assert RESERVE_BYTES < held < RESERVE_BYTES + 3 * len(value)
    assert server.log is not None and server.log.crowded
    await log.flow()
    assert server.statistics().facts["bytes"] < 3 * len(value)


@pytest.mark.parametrize("kind", [NativePeer, TorchPeer])
def test_clients_of_a_full_log_queue_wait_and_lose_nothing(kind: type[NativePeer | TorchPeer]) -> None:
    @on_log(max_memory=64 * MIB)
    async def check(server: StoreServer, log: FakeLog) -> None:
        peers = [kind(server) for _ in range(20)]
        for peer in peers:
            await peer.greets()
        log.stalled = True
        for number, peer in enumerate(peers):
            if isinstance(peer, NativePeer):
                grow = [ops.Append(1, b"/own%d" % number, b"v" * (2 * MIB)), ops.Delete(2, b"/own%d" % number)]
                peer.says(b"".join(map(frame, [*grow, ops.Add(3, b"/n", 1), ops.Ping(4)])))
            else:
                peer.says(encode(Opcode.DELETE_KEY, b"v" * 8000) * 250 + encode(Opcode.ADD, b"/n", 1))
        await settle()
        assert server.log is not None and server.log.crowded
        assert server.log.bytes < 2 * RESERVE_BYTES and all(peer.stopped for peer in peers[-5:])
        log.stalled = False
        log.end()
        counts = set()
        for peer in peers:
            if isinstance(peer, NativePeer):
                replies = [await peer.reads() for _ in range(4)]
                counts.add(replies[2][2])
            else:
                assert [await peer.number() for _ in range(250)] == [0] * 250
                counts.add(await peer.number())
        assert counts == set(range(1, 21)), "each was carried out once"
        await settle()
        assert not any(peer.stopped for peer in peers) and server.log.bytes == 0

    check()
