"""A server whose changes go through a log: nothing leaves before it is durable, and no client can break that.

The log is a fake whose commits end when the test says so. After each test it is replayed (`fake_log.py`): the server
must have the state that its log makes.
"""

from __future__ import annotations

import asyncio
import os
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.server.fake_log import FakeLog, on_log, replayed
from tests.server.peers import Ours, Torch, settle
from tests.wire import AMPLE_S, Peer, read_line, script

from rallypoint import net
from rallypoint.core import entries, ops
from rallypoint.core.engine import Engine
from rallypoint.core.records import Status
from rallypoint.core.session import Session
from rallypoint.core.snapshot import write
from rallypoint.protocol import native
from rallypoint.protocol.c10d import WAITED, Opcode, encode
from rallypoint.protocol.native import ACCEPTED, PREFACE, Frames, Hello, frame
from rallypoint.server import server as server_module
from rallypoint.server.commit import MAX_QUEUED_BYTES
from rallypoint.server.server import StoreServer
from rallypoint.server.settings import Settings
from rallypoint.server.sliced import SLICE_BYTES, SLICE_ITEMS, encode_in_slices

ROOT = Path(__file__).resolve().parents[2]
LONG_S = 1000.0
MIB = 1024 * 1024


def engine(server: StoreServer, namespace: int = 0) -> Engine:
    return server.state.namespaces[namespace].engine


def value(server: StoreServer, key: bytes) -> bytes | None:
    found: bytes | None = engine(server).execute(ops.Peek(0, key))
    return found


def session_of(server: StoreServer, peer: Ours) -> Session:
    return server.state.sessions_by_id[peer.session]


async def ours(server: StoreServer, session: bytes = b"") -> Ours:
    peer = Ours(server)
    await peer.greets(session)
    assert peer.session
    return peer


async def torch(server: StoreServer) -> Torch:
    return await Torch(server).greets()


def greets(server: StoreServer, session: bytes = b"", *behind: ops.Op) -> Ours:
    """Return a peer that has said hello, and more, all at once, and heard nothing yet but what it speaks to."""
    peer = Ours(server)
    peer.frames, peer.inbox, peer.session = Frames(1 << 30), [], session
    peer.says(PREFACE)
    assert peer.pending == ACCEPTED
    peer.pending = b""
    peer.says(frame(Hello(native.VERSION, "test", session)) + b"".join(map(frame, behind)))
    return peer


async def answers(peer: Ours, count: int) -> list[Any]:
    """Return so many frames."""
    return [await peer.reads() for _ in range(count)]


# Requests


@on_log
async def test_a_change_is_seen_and_answered_when_it_is_durable(server: StoreServer, log: FakeLog) -> None:
    writer, reader, other = await ours(server), await ours(server), await torch(server)
    log.stalled = True
    writer.asks(ops.Set(1, b"/k", b"v"))
    reader.asks(ops.Get(1, b"/k", LONG_S), ops.Watch(2, b"/k"))
    other.asks(Opcode.WAIT, 1, b"/k")
    await settle()
    assert not writer.pending and not reader.pending and not other.pending and value(server, b"/k") is None
    await log.flow()
    assert await writer.reads() == [1, Status.OK, None]
    assert await reader.reads() == [1, Status.OK, [b"v"]]
    assert await other.hears(1) == WAITED


@on_log
async def test_reads_of_others_run_at_once(server: StoreServer, log: FakeLog) -> None:
    writer, reader, other = await ours(server), await ours(server), await torch(server)
    await writer.asked(ops.Set(1, b"/k", b"old"))
    log.stalled = True
    writer.asks(ops.Set(2, b"/k", b"new"))
    assert await reader.asked(ops.Get(1, b"/k", 0.0)) == [b"old"]
    assert await other.gets(b"/k") == b"old"
    assert not writer.pending


@on_log
async def test_a_client_sees_its_requests_carried_out_in_order(server: StoreServer, log: FakeLog) -> None:
    peer, other = await ours(server), await torch(server)
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
    assert [result for _, _, result in await answers(peer, 5)] == [1, [b"1"], 2, [b"2"], None]
    assert [await other.string(), await other.string()] == [b"1", b"12"]
    assert await other.hears(4) == b"\x09\0\0\0"


@on_log
async def test_many_clients_share_a_commit(server: StoreServer, log: FakeLog) -> None:
    peers = [await ours(server) for _ in range(50)]
    log.stalled = True
    before = len(log.batches)
    for peer in peers:
        peer.asks(ops.Add(1, b"/n", 1))
    await settle()
    assert len(log.batches) == before + 1 and len(log.batches[-1]) == 50
    await log.flow()
    assert sorted([(await peer.reads())[2] for peer in peers]) == list(range(1, 51))


@on_log
async def test_a_request_whose_client_is_gone_is_carried_out_and_answered_when_it_comes_back(
    server: StoreServer, log: FakeLog
) -> None:
    peer, other = await ours(server), await torch(server)
    log.stalled = True
    peer.asks(ops.Add(1, b"/n", 1), ops.Push(2, b"/q", b"item"), ops.Pop(3, b"/q"))
    other.asks(Opcode.SET, b"/t", b"v")
    await settle()
    peer.hangs_up()
    other.hangs_up()
    await log.flow()
    assert value(server, b"/n") == b"1" and value(server, b"/t") == b"v"
    again = await ours(server, peer.session)
    assert await again.asked(ops.Add(1, b"/n", 1)) == 1
    assert await again.asked(ops.Pop(3, b"/q")) == b"item"
    assert value(server, b"/n") == b"1"


@on_log
async def test_a_repetition_that_comes_before_the_commit_is_not_carried_out_twice(
    server: StoreServer, log: FakeLog
) -> None:
    peer = await ours(server)
    log.stalled = True
    peer.asks(ops.Add(1, b"/n", 1))
    await settle()
    peer.hangs_up()
    again = greets(server, peer.session, ops.Add(1, b"/n", 1), ops.Add(2, b"/n", 1))
    await log.flow()
    assert [(await again.reads())[2] for _ in range(3)][1:] == [1, 2]
    assert value(server, b"/n") == b"2"


# What a connection leaves behind


@on_log
async def test_a_wait_that_nobody_hears_of_is_not_begun(server: StoreServer, log: FakeLog) -> None:
    peer = await torch(server)
    log.stalled = True
    peer.says(encode(Opcode.SET, b"/k", b"v") + encode(Opcode.WAIT, 2, b"/never", b"/nor this"))
    await settle()
    peer.hangs_up()
    await log.flow()
    assert engine(server).statistics().waiters == 0 and engine(server).parked == 0


@on_log
async def test_a_place_in_line_is_given_up_with_the_connection(server: StoreServer, log: FakeLog) -> None:
    first, second, pusher = await torch(server), await torch(server), await ours(server)
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
    assert not server.state.visitors


@on_log
async def test_an_arrival_is_taken_back_with_the_connection(server: StoreServer, log: FakeLog) -> None:
    peer = await torch(server)
    log.stalled = True
    peer.asks(Opcode.BARRIER, b"/b", 2)
    await settle()
    peer.hangs_up()
    await log.flow()
    assert value(server, b"/b") == b"0" and not server.state.visitors


@on_log
async def test_a_turn_that_is_given_meanwhile_ends_in_the_log_too(server: StoreServer, log: FakeLog) -> None:
    """A client that asks on while it waits gets its turn between its request and the commit of it."""
    waiter, taker, pusher = await torch(server), await ours(server), await ours(server)
    waiter.asks(Opcode.WAIT, 1, b"/q")
    await settle()
    taker.asks(ops.Take(1, b"/q", LONG_S))
    await settle()
    log.stalled = True
    waiter.asks(Opcode.SET, b"/k", b"v")
    await settle()
    pusher.asks(ops.Push(1, b"/q", b"item"))
    waiter.asks(Opcode.GET, b"/k")
    await log.flow()
    assert await waiter.hears(1) == WAITED and await waiter.string() == b"v"
    assert await taker.reads() == [1, Status.OK, b"item"], "the other has moved on"


# The greeting


@on_log
async def test_requests_behind_a_greeting_wait_for_its_commit(server: StoreServer, log: FakeLog) -> None:
    log.stalled = True
    peer, other = greets(server, b"", ops.Add(1, b"/n", 1)), greets(server)
    peer.asks(ops.Add(2, b"/n", 1))
    peer.asks(ops.Add(3, b"/n", 1), ops.Get(4, b"/n", 0.0))
    other.asks(ops.Add(1, b"/m", 1))  # one frame alone, as most come
    other.asks(ops.Get(2, b"/m", 0.0))
    await settle()
    assert not peer.pending and not peer.closing and not other.pending and not other.closing
    await log.flow()
    assert [result for _, _, result in (await answers(peer, 5))[1:]] == [1, 2, 3, [b"3"]]
    assert [result for _, _, result in (await answers(other, 3))[1:]] == [1, [b"1"]]


@on_log(grace_s=0.0)
async def test_who_hangs_up_before_its_greeting_is_committed_leaves_no_session(
    server: StoreServer, log: FakeLog
) -> None:
    log.stalled = True
    peer = greets(server, b"", ops.Lease(1, b"/leased", b"v", 0.0))
    await settle()
    peer.hangs_up()
    await settle()
    await log.flow()
    while server.state.sessions:
        await asyncio.sleep(0)
    assert value(server, b"/leased") is None


@on_log
async def test_who_hangs_up_before_it_is_refused_disturbs_nobody(server: StoreServer, log: FakeLog) -> None:
    other = await ours(server)
    log.stalled = True
    peer = greets(server, b"no such session")
    await settle()
    peer.hangs_up()
    other.asks(ops.Set(1, b"/k", b"v"))
    await log.flow()
    assert await other.reads() == [1, Status.OK, None]


@on_log
async def test_a_resumption_outlives_the_end_of_the_connection_before(server: StoreServer, log: FakeLog) -> None:
    """The old connection ends after the greeting on the new one, and before its commit."""
    peer = await ours(server)
    log.stalled = True
    again = greets(server, peer.session)
    await settle()
    peer.hangs_up()
    await settle()
    await log.flow()
    assert (await again.reads())[1] == Status.OK
    assert session_of(server, peer).attached and session_of(server, peer).link is again.connection.handler
    again.hangs_up()
    await log.flow()
    assert not session_of(server, peer).attached


@on_log
async def test_nothing_is_said_to_a_resumed_client_before_its_welcome(server: StoreServer, log: FakeLog) -> None:
    peer, writer = await ours(server), await ours(server)
    await peer.asked(ops.Watch(1, b"/w/"))
    peer.asks(ops.Get(2, b"/k", LONG_S), ops.Take(3, b"/q", LONG_S))
    await settle()
    log.stalled = True
    writer.asks(ops.Set(1, b"/w/1", b"v"), ops.Set(2, b"/k", b"v"), ops.Push(3, b"/q", b"item"))
    again = greets(server, peer.session)
    await log.flow()
    assert (await again.reads())[:2] == [0, Status.OK]
    again.asks(ops.Get(2, b"/k", LONG_S), ops.Take(3, b"/q", LONG_S))
    seen = sorted(await answers(again, 3), key=lambda answer: int(answer[0]))
    assert seen[0][:2] == [0, 1] and seen[0][2][2] == b"/w/1"
    assert seen[1:] == [[2, Status.OK, [b"v"]], [3, Status.OK, b"item"]]


@on_log(grace_s=0.0)
async def test_who_resumes_and_hangs_up_before_the_commit_is_away(server: StoreServer, log: FakeLog) -> None:
    peer = await ours(server)
    await peer.asked(ops.Lease(1, b"/leased", b"v", 0.0))
    log.stalled = True
    again = greets(server, peer.session)
    await settle()
    again.hangs_up()
    peer.hangs_up()
    await settle()
    await log.flow()
    while server.state.sessions:
        await asyncio.sleep(0)
    assert value(server, b"/leased") is None


@on_log(max_sessions=1)
async def test_one_session_too_many_is_refused_when_that_is_known(server: StoreServer, log: FakeLog) -> None:
    log.stalled = True
    first, second = greets(server), greets(server)
    await settle()
    await log.flow()
    assert (await first.reads())[1] == Status.OK
    assert (await second.reads())[1] == Status.REFUSED
    assert server.statistics()["refused_sessions"] == 1


@on_log
async def test_of_two_resumptions_the_later_carries_the_session(server: StoreServer, log: FakeLog) -> None:
    """The earlier one hangs up, as its client has given it up; that is not the end of the other."""
    peer = await ours(server)
    peer.asks(ops.Take(1, b"/q", LONG_S))
    await settle()
    peer.hangs_up()
    await settle()
    log.stalled = True
    earlier = greets(server, peer.session)
    await settle()
    later = greets(server, peer.session, ops.Take(1, b"/q", LONG_S))
    log.end()
    await settle()
    earlier.hangs_up()
    await settle()
    await log.flow()
    assert (await later.reads())[1] == Status.OK
    assert session_of(server, peer).attached and session_of(server, peer).link is later.connection.handler
    later.hangs_up()
    await settle()
    other = await ours(server)
    await other.asked(ops.Push(1, b"/q", b"item"))
    assert await other.asked(ops.Take(2, b"/q", 0.0)) == b"item", "it does not go to one who is gone"


# Back-pressure


@on_log
async def test_a_client_that_sends_without_end_while_the_log_stalls_is_not_read_from(
    server: StoreServer, log: FakeLog
) -> None:
    peer = await ours(server)
    log.stalled = True
    number = 0
    while not peer.stopped:
        number += 1
        peer.asks(ops.Append(number, b"/k", b"v" * 10_000))
        assert number <= MAX_QUEUED_BYTES // 10_000 + 1, "it is read from without end"
        await asyncio.sleep(0)
    assert number * 10_000 > MAX_QUEUED_BYTES // 2
    assert server.statistics()["bytes"] > MAX_QUEUED_BYTES // 2, "it is counted"
    await log.flow()
    assert not peer.stopped and len(await answers(peer, number)) == number
    assert len(value(server, b"/k") or b"") == number * 10_000
    await peer.asked(ops.Delete(number + 1, b"/k"))
    assert server.statistics()["bytes"] < 100_000


@on_log
async def test_so_is_a_torch_client(server: StoreServer, log: FakeLog) -> None:
    peer = await torch(server)
    log.stalled = True
    sent = 0
    while not peer.stopped:
        sent += 1
        peer.says(encode(Opcode.APPEND, b"/k", b"v" * 10_000) + encode(Opcode.PING, sent))
        assert sent <= MAX_QUEUED_BYTES // 10_000 + 1, "it is read from without end"
        await asyncio.sleep(0)
    await log.flow()
    assert not peer.stopped
    assert struct.unpack(f"<{sent}I", await peer.hears(4 * sent)) == tuple(range(1, sent + 1))
    assert len(await peer.gets(b"/k")) == sent * 10_000


@on_log
async def test_small_requests_are_bounded_too(server: StoreServer, log: FakeLog) -> None:
    peer, other = await ours(server), await torch(server)
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
    assert len(await answers(peer, number)) == number and [await other.number() for _ in range(sent)] == [0] * sent


@on_log
async def test_so_is_who_greets_and_sends_without_end(server: StoreServer, log: FakeLog) -> None:
    log.stalled = True
    peer = greets(server)
    number = 0
    while not peer.stopped:
        number += 1
        peer.asks(ops.Set(number, b"/k", b"v" * 10_000))
        assert number <= MAX_QUEUED_BYTES // 10_000 + 1, "it is read from without end"
    await log.flow()
    assert not peer.stopped and len(await answers(peer, number + 1)) == number + 1


# A clean stop


def stopped(test: Callable[[StoreServer, FakeLog], Awaitable[None]]) -> Callable[[], None]:
    """Run a test with a server that listens on loopback, and is closed by the test."""

    async def run() -> None:
        log = FakeLog()
        server = StoreServer(Settings(), log)
        await server.open(net.listen(["127.0.0.1"], 0))
        await asyncio.wait_for(test(server, log), AMPLE_S)
        assert log.closed and log.saved and list(write(replayed(log))) == log.saved

    def call() -> None:
        asyncio.run(run())

    call.__name__, call.__doc__ = test.__name__, test.__doc__
    return call


@stopped
async def test_a_clean_stop_answers_what_is_being_committed(server: StoreServer, log: FakeLog) -> None:
    port = server.sockets[0].getsockname()[1]
    native, other = await Ours.dial(port), await (await Torch.dial(port)).greets()
    await native.greets()
    await native.asked(ops.Lease(1, b"/leased", b"v", 0.0))
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
    assert not replayed(log).sessions_by_id[native.session].attached, "the log has the ends of connections"


@stopped
async def test_a_server_that_is_stopping_reads_no_more(server: StoreServer, log: FakeLog) -> None:
    peer = await ours(server)
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
        peer = await ours(server)
        log.stalled = True
        peer.asks(ops.Add(1, b"/n", 1))
        await settle()
        await asyncio.wait_for(server.close(), AMPLE_S)
        assert log.closed and not log.saved, "a snapshot needs a log that is idle"

    asyncio.run(main())


# Bugs


@pytest.mark.parametrize("kind", [Ours, Torch])
def test_a_bug_leaves_nobody_waiting(kind: type[Ours | Torch], monkeypatch: pytest.MonkeyPatch) -> None:
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
            peer.says(frame(ops.Add(1, b"/n", 1)) if kind is Ours else encode(Opcode.ADD, b"/n", 1))
            await settle()
        assert handler._pending == handler._queued == 0
        assert server.log is not None and server.log.bytes == 0
        if kind is Ours:
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
    peer, other = await ours(server), await torch(server)
    log.error = OSError(5, "Input/output error")
    peer.asks(ops.Set(1, b"/k", b"v"))
    other.asks(Opcode.SET, b"/k", b"v")
    other.asks(Opcode.PING, 9)
    await asyncio.wait_for(told.wait(), AMPLE_S)
    await settle()
    assert not peer.pending and not other.pending and server.failed is log.error
    await server.close()
    assert log.closed and not log.saved, "what it would save is not what is on disk"


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
        with Peer((host, int(port))) as peer:
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
    server.submit(entries.Visit(-1, 0, ops.MultiSet(0, [(key, b"") for key in keys])))
    return keys


@on_log
async def test_a_long_list_keeps_its_place_among_the_replies(server: StoreServer, log: FakeLog) -> None:
    keys = fill(server, 3 * SLICE_ITEMS)
    peer = await torch(server)
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
    peer = await ours(server)
    peer.asks(*(ops.List(number, b"/key/") for number in range(1, 101)))
    made = len(peer.pending)
    await settle()
    assert len(peer.pending) < 20 * len(keys) * 12, "all hundred are held for one that reads none"
    assert made == 0
    assert [(await peer.reads())[0] for _ in range(100)] == list(range(1, 101))
    assert await peer.asked(ops.Count(101, b"/key/")) == len(keys)


@on_log(max_connection_memory=32 * MIB)
async def test_a_list_that_is_too_long_is_not_made_first(server: StoreServer, log: FakeLog) -> None:
    peer, other = await ours(server), await torch(server)
    await peer.asked(ops.Set(1, b"/k", b"v" * (8 * MIB)))
    keys = [b"/k"] * (SLICE_ITEMS + 1)
    tracemalloc.start()
    try:
        peer.asks(ops.MultiPeek(2, keys))
        number, status, (name, fields) = await peer.reads()
        assert (number, status, name) == (2, Status.ERROR, "LimitExceeded") and fields["limit"] == 32 * MIB
        other.asks(Opcode.MULTI_GET, len(keys), *keys)
        await other.ends()
        assert tracemalloc.get_traced_memory()[1] < 100 * MIB
    finally:
        tracemalloc.stop()


@on_log
async def test_a_list_of_large_values_is_made_a_slice_of_bytes_at_a_time(server: StoreServer, log: FakeLog) -> None:
    peer = await ours(server)
    await peer.asked(ops.Set(1, b"/k", b"v" * 100_000))
    keys = [b"/k"] * 100 + [b"/none"] * SLICE_ITEMS
    slices: list[int] = []

    def encode_some(items: list[Any]) -> bytes:
        slices.append(sum(map(len, filter(None, items))))
        return native.encode_items(items)

    values = [b"v" * 100_000] * 100 + [None] * SLICE_ITEMS
    done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    encode_in_slices(values, encode_some, 1 << 30, lambda parts, size: done.set_result(size))
    assert await done == len(native.encode_items(values)) and max(slices) <= SLICE_BYTES and len(slices) > 9
    assert await peer.asked(ops.MultiPeek(2, keys)) == values
