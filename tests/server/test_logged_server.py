"""A server whose changes go through a log: no reply is sent before its change is durable, whatever clients do.

The log is a fake whose commits end when the test says so. After each test it is replayed (`fake_log.py`), and must
produce the state of the server.
"""

from __future__ import annotations

import asyncio
import os
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.event_loop import in_loop
from tests.raw_peer import AMPLE_S, RawPeer, read_line, script
from tests.server.fake_log import FakeLog, on_log, replayed
from tests.server.peers import (
    NativePeer,
    TorchPeer,
    engine_of,
    native_peer,
    next_replies,
    session_of,
    settle,
    torch_peer,
    value_of,
)

from rallypoint import net
from rallypoint.core import entries, ops
from rallypoint.core.records import ReplyStatus
from rallypoint.core.snapshot import write
from rallypoint.protocol import native
from rallypoint.protocol.c10d import WAITED, Opcode, encode
from rallypoint.protocol.native import ACCEPTED, PREFACE, Frames, Hello, frame
from rallypoint.server import server as server_module
from rallypoint.server.commit import MAX_QUEUED_BYTES
from rallypoint.server.connections.sliced import (
    NO_SOURCE,
    SLICE_BYTES,
    SLICE_ITEMS,
    ListEncoder,
    encode_in_slices,
)
from rallypoint.server.server import StoreServer
from rallypoint.server.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
LONG_S = 1000.0
MIB = 1024 * 1024


def greets(server: StoreServer, session: bytes = b"", *behind: ops.Op) -> NativePeer:
    """Return a peer that has sent a hello and requests behind it, and has read the accepted preface only."""
    peer = NativePeer(server)
    peer.frames, peer.inbox, peer.session = Frames(1 << 30), [], session
    peer.says(PREFACE)
    assert peer.pending == ACCEPTED
    peer.pending = b""
    peer.says(frame(Hello(native.VERSION, "test", session)) + b"".join(map(frame, behind)))
    return peer


# Requests


@on_log
async def test_a_change_is_seen_and_answered_when_it_is_durable(server: StoreServer, log: FakeLog) -> None:
    writer, reader, other = await native_peer(server), await native_peer(server), await torch_peer(server)
    log.stalled = True
    writer.asks(ops.Set(1, b"/k", b"v"))
    reader.asks(ops.Get(1, b"/k", LONG_S), ops.WatchPrefix(2, b"/k"))
    other.asks(Opcode.WAIT, 1, b"/k")
    await settle()
    assert not writer.pending and not reader.pending and not other.pending and value_of(server, b"/k") is None
    await log.flow()
    assert await writer.reads() == [1, ReplyStatus.OK, None]
    assert await reader.reads() == [1, ReplyStatus.OK, [b"v"]]
    assert await other.hears(1) == WAITED


@on_log
async def test_reads_of_others_run_at_once(server: StoreServer, log: FakeLog) -> None:
    writer, reader, other = await native_peer(server), await native_peer(server), await torch_peer(server)
    await writer.asked(ops.Set(1, b"/k", b"old"))
    log.stalled = True
    writer.asks(ops.Set(2, b"/k", b"new"))
    assert await reader.asked(ops.Get(1, b"/k", 0.0)) == [b"old"]
    assert await other.gets(b"/k") == b"old"
    assert not writer.pending


@on_log
async def test_requests_of_a_client_are_executed_in_order(server: StoreServer, log: FakeLog) -> None:
    peer, other = await native_peer(server), await torch_peer(server)
    log.stalled = True
    peer.asks(ops.Add(1, b"/n", 1), ops.Get(2, b"/n", 0.0), ops.Add(3, b"/n", 1), ops.Get(4, b"/n", 0.0), ops.Ping(5))
    other.says(
        encode(Opcode.SET, b"/t", b"1")
        + encode(Opcode.GET, b"/t")
        + encode(Opcode.APPEND, b"/t", b"2")
        + encode(Opcode.GET, b"/t")
        + encode(Opcode.PING, 9)
    )
    await settle()
    assert not peer.pending and not other.pending
    await log.flow()
    assert [result for _, _, result in await next_replies(peer, 5)] == [1, [b"1"], 2, [b"2"], None]
    assert [await other.string(), await other.string()] == [b"1", b"12"]
    assert await other.hears(4) == b"\x09\0\0\0"


@on_log
async def test_many_clients_share_a_commit(server: StoreServer, log: FakeLog) -> None:
    peers = [await native_peer(server) for _ in range(50)]
    log.stalled = True
    before = len(log.batches)
    for peer in peers:
        peer.asks(ops.Add(1, b"/n", 1))
    await settle()
    assert len(log.batches) == before + 1 and len(log.batches[-1]) == 50
    await log.flow()
    assert sorted([(await peer.reads())[2] for peer in peers]) == list(range(1, 51))


@on_log
async def test_a_request_of_a_disconnected_client_is_executed_and_answered_on_resumption(
    server: StoreServer, log: FakeLog
) -> None:
    peer, other = await native_peer(server), await torch_peer(server)
    log.stalled = True
    peer.asks(ops.Add(1, b"/n", 1), ops.Push(2, b"/q", b"item"), ops.Pop(3, b"/q"))
    other.asks(Opcode.SET, b"/t", b"v")
    await settle()
    peer.hangs_up()
    other.hangs_up()
    await log.flow()
    assert value_of(server, b"/n") == b"1" and value_of(server, b"/t") == b"v"
    again = await native_peer(server, peer.session)
    assert await again.asked(ops.Add(1, b"/n", 1)) == 1
    assert await again.asked(ops.Pop(3, b"/q")) == b"item"
    assert value_of(server, b"/n") == b"1"


@on_log
async def test_a_request_repeated_before_its_commit_is_executed_once(server: StoreServer, log: FakeLog) -> None:
    peer = await native_peer(server)
    log.stalled = True
    peer.asks(ops.Add(1, b"/n", 1))
    await settle()
    peer.hangs_up()
    again = greets(server, peer.session, ops.Add(1, b"/n", 1), ops.Add(2, b"/n", 1))
    await log.flow()
    assert [(await again.reads())[2] for _ in range(3)][1:] == [1, 2]
    assert value_of(server, b"/n") == b"2"


# What a connection leaves behind


@on_log
async def test_a_wait_of_a_disconnected_client_is_not_started(server: StoreServer, log: FakeLog) -> None:
    peer = await torch_peer(server)
    log.stalled = True
    peer.says(encode(Opcode.SET, b"/k", b"v") + encode(Opcode.WAIT, 2, b"/never", b"/nor this"))
    await settle()
    peer.hangs_up()
    await log.flow()
    assert engine_of(server).statistics().waiters == 0 and engine_of(server).memory.parked == 0


@on_log
async def test_a_place_in_line_is_given_up_with_the_connection(server: StoreServer, log: FakeLog) -> None:
    first, second, pusher = await torch_peer(server), await torch_peer(server), await native_peer(server)
    log.stalled = True
    first.asks(Opcode.WAIT, 1, b"/q")
    await settle()
    first.hangs_up()
    await log.flow()
    second.asks(Opcode.WAIT, 1, b"/q")
    await settle()
    await pusher.asked(ops.Push(1, b"/q", b"item"))
    assert await second.hears(1) == WAITED
    second.asks(Opcode.QUEUE_POP, b"/q")
    assert (await second.number(), await second.string()) == (1, b"item")
    assert not server.state.connection_owners


@on_log
async def test_an_arrival_is_taken_back_with_the_connection(server: StoreServer, log: FakeLog) -> None:
    peer = await torch_peer(server)
    log.stalled = True
    peer.asks(Opcode.BARRIER, b"/b", 2)
    await settle()
    peer.hangs_up()
    await log.flow()
    assert value_of(server, b"/b") == b"0" and not server.state.connection_owners


@on_log
async def test_a_turn_assigned_before_a_commit_ends_in_the_log(server: StoreServer, log: FakeLog) -> None:
    """A client that sends a request while it waits gets its turn before that request is committed."""
    waiter, taker, pusher = await torch_peer(server), await native_peer(server), await native_peer(server)
    waiter.asks(Opcode.WAIT, 1, b"/q")
    await settle()
    taker.asks(ops.BlockingPop(1, b"/q", LONG_S))
    await settle()
    log.stalled = True
    waiter.asks(Opcode.SET, b"/k", b"v")
    await settle()
    pusher.asks(ops.Push(1, b"/q", b"item"))
    waiter.asks(Opcode.GET, b"/k")
    await log.flow()
    assert await waiter.hears(1) == WAITED and await waiter.string() == b"v"
    assert await taker.reads() == [1, ReplyStatus.OK, b"item"], "the first client has given up its turn"


# The greeting


@on_log
async def test_requests_behind_a_greeting_wait_for_its_commit(server: StoreServer, log: FakeLog) -> None:
    log.stalled = True
    peer, other = greets(server, b"", ops.Add(1, b"/n", 1)), greets(server)
    peer.asks(ops.Add(2, b"/n", 1))
    peer.asks(ops.Add(3, b"/n", 1), ops.Get(4, b"/n", 0.0))
    other.asks(ops.Add(1, b"/m", 1))  # a single frame, the usual case
    other.asks(ops.Get(2, b"/m", 0.0))
    await settle()
    assert not peer.pending and not peer.closing and not other.pending and not other.closing
    await log.flow()
    assert [result for _, _, result in (await next_replies(peer, 5))[1:]] == [1, 2, 3, [b"3"]]
    assert [result for _, _, result in (await next_replies(other, 3))[1:]] == [1, [b"1"]]


async def expires(peer: NativePeer, server: StoreServer, log: FakeLog) -> None:
    """End the connection of the only session; return when the session has ended, and its lease with it."""
    peer.hangs_up()
    await settle()
    await log.flow()
    while server.state.sessions:
        await asyncio.sleep(0)
    assert value_of(server, b"/leased") is None


@on_log(grace_s=0.0)
async def test_a_client_that_disconnects_before_its_hello_is_committed_leaves_no_session(
    server: StoreServer, log: FakeLog
) -> None:
    log.stalled = True
    peer = greets(server, b"", ops.SetLease(1, b"/leased", b"v", 0.0))
    await settle()
    await expires(peer, server, log)


@on_log
async def test_a_client_that_disconnects_before_its_refusal_affects_nobody(server: StoreServer, log: FakeLog) -> None:
    other = await native_peer(server)
    log.stalled = True
    peer = greets(server, b"no such session")
    await settle()
    peer.hangs_up()
    other.asks(ops.Set(1, b"/k", b"v"))
    await log.flow()
    assert await other.reads() == [1, ReplyStatus.OK, None]


async def ends_while_another_resumes(server: StoreServer, log: FakeLog, earlier: NativePeer, later: NativePeer) -> None:
    """End a connection of a session before a later one has resumed it; the session stays with the later one."""
    earlier.hangs_up()
    await settle()
    await log.flow()
    assert (await later.reads())[1] == ReplyStatus.OK
    assert [one.attached for one in server.state.sessions.values() if one.handler is later.connection.handler] == [True]


@on_log
async def test_a_resumption_outlives_the_end_of_the_connection_before(server: StoreServer, log: FakeLog) -> None:
    """The old connection ends after the hello on the new one, and before that is committed."""
    peer = await native_peer(server)
    log.stalled = True
    again = greets(server, peer.session)
    await settle()
    await ends_while_another_resumes(server, log, peer, again)
    again.hangs_up()
    await log.flow()
    assert not session_of(server, peer).attached


@on_log
async def test_a_resumed_client_gets_its_welcome_first(server: StoreServer, log: FakeLog) -> None:
    peer, writer = await native_peer(server), await native_peer(server)
    await peer.asked(ops.WatchPrefix(1, b"/w/"))
    peer.asks(ops.Get(2, b"/k", LONG_S), ops.BlockingPop(3, b"/q", LONG_S))
    await settle()
    log.stalled = True
    writer.asks(ops.Set(1, b"/w/1", b"v"), ops.Set(2, b"/k", b"v"), ops.Push(3, b"/q", b"item"))
    again = greets(server, peer.session)
    await log.flow()
    assert (await again.reads())[:2] == [0, ReplyStatus.OK]
    again.asks(ops.Get(2, b"/k", LONG_S), ops.BlockingPop(3, b"/q", LONG_S))
    seen = sorted(await next_replies(again, 3), key=lambda answer: int(answer[0]))
    assert seen[0][:2] == [0, 1] and seen[0][2][2] == b"/w/1"
    assert seen[1:] == [[2, ReplyStatus.OK, [b"v"]], [3, ReplyStatus.OK, b"item"]]


@on_log(grace_s=0.0)
async def test_a_session_resumed_and_disconnected_before_the_commit_expires(server: StoreServer, log: FakeLog) -> None:
    peer = await native_peer(server)
    await peer.asked(ops.SetLease(1, b"/leased", b"v", 0.0))
    log.stalled = True
    again = greets(server, peer.session)
    await settle()
    again.hangs_up()
    await expires(peer, server, log)


@on_log(max_sessions=1)
async def test_of_two_uncommitted_hellos_the_one_over_the_limit_is_refused(server: StoreServer, log: FakeLog) -> None:
    log.stalled = True
    first, second = greets(server), greets(server)
    await settle()
    await log.flow()
    assert (await first.reads())[1] == ReplyStatus.OK
    assert (await second.reads())[1] == ReplyStatus.REFUSED
    assert server.statistics().facts["refused_sessions"] == 1


@on_log
async def test_the_later_of_two_resumptions_has_the_session(server: StoreServer, log: FakeLog) -> None:
    """The earlier connection ends, because its client has abandoned it; the later one is not affected."""
    peer = await native_peer(server)
    peer.asks(ops.BlockingPop(1, b"/q", LONG_S))
    await settle()
    peer.hangs_up()
    await settle()
    log.stalled = True
    earlier = greets(server, peer.session)
    await settle()
    later = greets(server, peer.session, ops.BlockingPop(1, b"/q", LONG_S))
    log.end()
    await settle()
    await ends_while_another_resumes(server, log, earlier, later)
    later.hangs_up()
    await settle()
    other = await native_peer(server)
    await other.asked(ops.Push(1, b"/q", b"item"))
    assert await other.asked(ops.BlockingPop(2, b"/q", 0.0)) == b"item", (
        "the item does not go to the abandoned connection"
    )


# Back-pressure


@on_log
async def test_the_server_stops_reading_from_a_client_while_the_log_stalls(server: StoreServer, log: FakeLog) -> None:
    peer = await native_peer(server)
    log.stalled = True
    number = 0
    while not peer.stopped:
        number += 1
        peer.asks(ops.Append(number, b"/k", b"v" * 10_000))
        assert number <= MAX_QUEUED_BYTES // 10_000 + 1, "the server never stops reading"
        await asyncio.sleep(0)
    assert number * 10_000 > MAX_QUEUED_BYTES // 2
    assert server.statistics().facts["bytes"] > MAX_QUEUED_BYTES // 2, "the bytes are counted"
    await log.flow()
    assert not peer.stopped and len(await next_replies(peer, number)) == number
    assert len(value_of(server, b"/k") or b"") == number * 10_000
    await peer.asked(ops.Delete(number + 1, b"/k"))
    assert server.statistics().facts["bytes"] < 100_000


@on_log
async def test_the_server_stops_reading_from_a_torch_client_while_the_log_stalls(
    server: StoreServer, log: FakeLog
) -> None:
    peer = await torch_peer(server)
    log.stalled = True
    sent = 0
    while not peer.stopped:
        sent += 1
        peer.says(encode(Opcode.APPEND, b"/k", b"v" * 10_000) + encode(Opcode.PING, sent))
        assert sent <= MAX_QUEUED_BYTES // 10_000 + 1, "the server never stops reading"
        await asyncio.sleep(0)
    await log.flow()
    assert not peer.stopped
    assert struct.unpack(f"<{sent}I", await peer.hears(4 * sent)) == tuple(range(1, sent + 1))
    assert len(await peer.gets(b"/k")) == sent * 10_000


@on_log
async def test_small_requests_are_bounded_too(server: StoreServer, log: FakeLog) -> None:
    peer, other = await native_peer(server), await torch_peer(server)
    log.stalled = True
    number = sent = 0
    while not peer.stopped:
        peer.asks(*(ops.Delete(number + step, b"") for step in range(1, 1001)))
        number += 1000
        assert number < MAX_QUEUED_BYTES // 50, "each costs more than its few bytes"
    while not other.stopped:
        other.says(encode(Opcode.DELETE_KEY, b"") * 1000)
        sent += 1000
        assert sent < MAX_QUEUED_BYTES // 50
    await log.flow()
    while not server.log or not server.log.idle:
        await asyncio.sleep(0)
    await settle()
    assert len(await next_replies(peer, number)) == number and [await other.number() for _ in range(sent)] == [0] * sent


@on_log
async def test_the_server_stops_reading_behind_an_uncommitted_hello(server: StoreServer, log: FakeLog) -> None:
    log.stalled = True
    peer = greets(server)
    number = 0
    while not peer.stopped:
        number += 1
        peer.asks(ops.Set(number, b"/k", b"v" * 10_000))
        assert number <= MAX_QUEUED_BYTES // 10_000 + 1, "the server never stops reading"
    await log.flow()
    assert not peer.stopped and len(await next_replies(peer, number + 1)) == number + 1


# A clean stop


def stopped(test: Callable[[StoreServer, FakeLog], Awaitable[None]]) -> Callable[[], None]:
    """Run a test with a server that listens on loopback, and is closed by the test."""

    async def run() -> None:
        log = FakeLog()
        server = StoreServer(Settings(), log)
        await server.open(net.listen(["127.0.0.1"], 0))
        await test(server, log)
        assert log.closed and log.saved and list(write(replayed(log))) == log.saved

    return in_loop(run)


@stopped
async def test_a_clean_stop_answers_requests_being_committed(server: StoreServer, log: FakeLog) -> None:
    port = server.listener.sockets[0].getsockname()[1]
    native, other = await NativePeer.dial(port), await (await TorchPeer.dial(port)).greets()
    await native.greets()
    await native.asked(ops.SetLease(1, b"/leased", b"v", 0.0))
    web, out = await asyncio.open_connection("127.0.0.1", port)
    server.rounds.create("run", 1, None, lambda _: None)
    await settle()
    log.stalled = True
    native.asks(ops.Add(2, b"/n", 1))
    other.asks(Opcode.ADD, b"/n", 1)
    out.write(b"DELETE /rounds/run/1 HTTP/1.1\r\nHost: x\r\n\r\n")
    while not log.committing or server.log is None or len(log.batches[-1]) + len(server.log._waiting) < 3:
        await asyncio.sleep(0)
    closing = asyncio.ensure_future(server.close())
    await settle()
    assert not closing.done()
    await log.flow()
    assert sorted([(await native.reads())[2], await other.number()]) == [1, 2]
    assert (await web.readline()).startswith(b"HTTP/1.1 200")
    await asyncio.gather(native.ends(), other.ends(), closing)
    out.close()
    assert not replayed(log).sessions_by_id[native.session].attached, "the ends of connections are logged"


@stopped
async def test_a_server_that_is_stopping_reads_no_more(server: StoreServer, log: FakeLog) -> None:
    peer = await native_peer(server)
    log.stalled = True
    peer.asks(*(ops.Append(number, b"/k", b"v" * 100_000) for number in range(1, 20)))
    await settle()
    closing = asyncio.ensure_future(server.close())
    await settle()
    assert peer.stopped
    log.stalled = False
    log.end()
    while not closing.done():
        assert peer.stopped or peer.closing, "not even when there is room again"
        await asyncio.sleep(0)


def test_a_clean_stop_does_not_wait_for_a_disk_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "CLOSE_S", 0.01)

    async def main() -> None:
        log = FakeLog()
        server = StoreServer(Settings(), log)
        await server.open([])
        peer = await native_peer(server)
        log.stalled = True
        peer.asks(ops.Add(1, b"/n", 1))
        await settle()
        await asyncio.wait_for(server.close(), AMPLE_S)
        assert log.closed and not log.saved, "a snapshot needs a log that is idle"

    asyncio.run(main())


# Bugs


@pytest.mark.parametrize("kind", [NativePeer, TorchPeer])
def test_a_bug_leaves_no_client_waiting(kind: type[NativePeer | TorchPeer], monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*_: Any) -> None:
        raise KeyError("bug")

    async def main() -> None:
        log = FakeLog()
        server = StoreServer(Settings(), log)
        await server.open([])
        peer: Any = kind(server)
        await peer.greets()
        handler = peer.connection.handler
        with monkeypatch.context() as broken:
            broken.setattr(type(handler), "_run", bug)
            broken.setattr(type(handler), "_park", bug)
            peer.says(frame(ops.Add(1, b"/n", 1)) if kind is NativePeer else encode(Opcode.ADD, b"/n", 1))
            await settle()
        assert handler._pending == handler._queued == 0
        assert server.log is not None and server.log.bytes == 0
        if kind is NativePeer:
            assert await peer.asked(ops.Add(2, b"/n", 1)) == 1
        else:
            peer.asks(Opcode.ADD, b"/n", 1)
            assert await peer.number() == 1
        await server.close()

    asyncio.run(main())


# A storage that fails


@on_log
async def test_nobody_is_answered_when_the_storage_fails(server: StoreServer, log: FakeLog) -> None:
    told = asyncio.Event()
    server.on_failure = told.set
    peer, other = await native_peer(server), await torch_peer(server)
    log.error = OSError(5, "Input/output error")
    peer.asks(ops.Set(1, b"/k", b"v"))
    other.asks(Opcode.SET, b"/k", b"v")
    other.asks(Opcode.PING, 9)
    await asyncio.wait_for(told.wait(), AMPLE_S)
    await settle()
    assert not peer.pending and not other.pending and server.failed is log.error
    await server.close()
    assert log.closed and not log.saved, "a snapshot would differ from the disk"


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), MemoryError()])
def test_a_server_whose_storage_fails_at_the_start_does_not_start(error: BaseException) -> None:
    async def main() -> None:
        log = FakeLog()
        log.error = error
        with pytest.raises(type(error)):
            await asyncio.wait_for(StoreServer(Settings(), log).open([]), AMPLE_S)

    asyncio.run(main())


FAILING = """
import sys
from tests.server.fake_log import FakeLog
from rallypoint.server import process
from rallypoint.server.settings import Settings
from rallypoint.storage.errors import StorageFailed

class Failing(FakeLog):
    def commit(self, records, done, urgent=False):
        if b"poison" in b"".join(records):
            self.error = StorageFailed(path="/data/log", why="Input/output error", number=5)
        super().commit(records, done, urgent)

process._storage = lambda directory: Failing()
try:
    process.serve(Settings(port=0, data_dir="none"), ready=lambda url: print(url, flush=True))
except StorageFailed as error:
    sys.exit(f"ended: {error}")
"""


def test_the_process_ends_when_its_storage_fails() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    with script(FAILING, env=environment, stderr=subprocess.PIPE) as child:
        host, port = read_line(child).removeprefix("tcp://").split(":")
        with RawPeer((host, int(port))) as peer:
            peer.set(b"/k", b"v")
            peer.send(encode(Opcode.SET, b"/k", b"poison") + encode(Opcode.PING, 7))
            assert peer.rest() == b"", "nothing is answered that is not durable"
        assert child.wait(AMPLE_S) == 1
        assert child.stderr is not None
        said = child.stderr.read().decode()
        assert "ended: writing /data/log failed: Input/output error" in said and "Traceback" not in said


# Long lists


def fill(server: StoreServer, count: int) -> list[bytes]:
    keys = [b"/key/%06d" % number for number in range(count)]
    server.submit(entries.ConnectionRequest(-1, 0, ops.MultiSet(0, [(key, b"") for key in keys])))
    return keys


@on_log
async def test_a_long_list_keeps_its_place_among_the_replies(server: StoreServer, log: FakeLog) -> None:
    keys = fill(server, 3 * SLICE_ITEMS)
    peer = await torch_peer(server)
    log.stalled = True
    peer.says(
        encode(Opcode.SET, b"/t", b"1")
        + b"".join(encode(Opcode.LIST_KEYS) + encode(Opcode.PING, number) for number in range(3))
    )
    await log.flow()
    for number in range(3):
        assert [await peer.string() for _ in range(await peer.number())] == [*keys, b"/t"]
        assert await peer.hears(4) == struct.pack("<I", number)


@on_log
async def test_many_long_lists_at_once_are_made_a_few_at_a_time(server: StoreServer, log: FakeLog) -> None:
    keys = fill(server, 3 * SLICE_ITEMS)
    peer = await native_peer(server)
    peer.asks(*(ops.List(number, b"/key/") for number in range(1, 101)))
    made = len(peer.pending)
    await settle()
    assert len(peer.pending) < 20 * len(keys) * 12, "all hundred lists are held for a peer that does not read"
    assert made == 0
    assert [(await peer.reads())[0] for _ in range(100)] == list(range(1, 101))
    assert await peer.asked(ops.Count(101, b"/key/")) == len(keys)


@on_log(max_connection_memory=32 * MIB)
async def test_a_list_that_is_too_long_is_not_made_first(server: StoreServer, log: FakeLog) -> None:
    peer, other = await native_peer(server), await torch_peer(server)
    await peer.asked(ops.Set(1, b"/k", b"v" * (8 * MIB)))
    keys = [b"/k"] * (SLICE_ITEMS + 1)
    tracemalloc.start()
    try:
        peer.asks(ops.MultiPeek(2, keys))
        number, status, (name, fields) = await peer.reads()
        assert (number, status, name) == (2, ReplyStatus.ERROR, "LimitExceeded") and fields["limit"] == 32 * MIB
        other.asks(Opcode.MULTI_GET, len(keys), *keys)
        await other.ends()
        assert tracemalloc.get_traced_memory()[1] < 100 * MIB
    finally:
        tracemalloc.stop()


@on_log
async def test_a_list_of_large_values_is_made_a_slice_of_bytes_at_a_time(server: StoreServer, log: FakeLog) -> None:
    peer = await native_peer(server)
    await peer.asked(ops.Set(1, b"/k", b"v" * 10_000))
    keys = [b"/k"] * 1000 + [b"/none"] * SLICE_ITEMS
    slices: list[int] = []

    def encode_some(items: Sequence[Any]) -> bytes:
        slices.append(sum(map(len, filter(None, items))))
        return native.encode_items(items)

    values = [b"v" * 10_000] * 1000 + [None] * SLICE_ITEMS
    done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    encoder = ListEncoder(encode_some, native.encode_item_head, 5)
    encode_in_slices(values, encoder, NO_SOURCE, 1 << 30, lambda _: True, lambda _, size, owned: done.set_result(size))
    assert await done == len(native.encode_items(values)) and max(slices) <= SLICE_BYTES and len(slices) > 9
    assert await peer.asked(ops.MultiPeek(2, keys)) == values
