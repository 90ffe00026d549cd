"""A durable server whose disk is full: what it refuses and how, what it serves, and that it recovers.

A `FakeLog` with `error` has no room; with a `reserve`, it has room for urgent commits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from tests.raw_peer import AMPLE_S
from tests.server.fake_log import FakeLog, disk_full, on_log
from tests.server.peers import NativePeer, native_peer, next_replies, session_of, settle, torch_peer, value_of

from rallypoint.core import entries, ops
from rallypoint.core.machines import barrier, lock
from rallypoint.core.records import ReplyStatus
from rallypoint.core.state import OtherVersion
from rallypoint.errors import StoreError
from rallypoint.protocol.c10d import Opcode, encode
from rallypoint.server import retries
from rallypoint.server.server import StoreServer
from rallypoint.server.settings import Settings

LONG_S = 1000.0


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry without a pause."""
    monkeypatch.setattr(retries, "RETRY_S", 0.0)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


@on_log
async def test_a_full_disk_refuses_changes_and_affects_nothing_else(server: StoreServer, log: FakeLog) -> None:
    peer, other = await native_peer(server), await torch_peer(server)
    await peer.asked(ops.Set(1, b"/k", b"v"))
    log.error = disk_full()
    peer.asks(ops.Set(2, b"/k", b"w"), ops.Get(3, b"/k", 0.0))
    replies = sorted(await next_replies(peer, 2))
    assert replies[0][:2] == [2, ReplyStatus.ERROR] and replies[0][2][0] == "DiskFull"
    assert replies[1] == [3, ReplyStatus.OK, [b"v"]]
    other.asks(Opcode.SET, b"/k", b"w")
    await other.ends()  # its protocol has no errors
    log.error = None
    assert await peer.asked(ops.Set(4, b"/k", b"x")) is None
    assert await peer.asked(ops.Set(2, b"/k", b"w")) is None, "a refused request may be repeated"
    assert value_of(server, b"/k") == b"w"


@on_log
async def test_a_request_refused_by_a_full_disk_may_be_repeated_after_a_cut(server: StoreServer, log: FakeLog) -> None:
    peer = await native_peer(server)
    log.error = disk_full()
    peer.asks(ops.Add(1, b"/n", 1))
    await settle()
    log.error = None
    assert (await peer.reads())[1] == ReplyStatus.ERROR
    await peer.asked(ops.Add(2, b"/n", 1))
    peer.hangs_up()
    await settle()
    again = await native_peer(server, peer.session)
    assert await again.asked(ops.Add(1, b"/n", 1)) == 2, "its reply was lost"


@on_log
async def test_a_confirmation_on_a_full_disk_uses_the_reserve_and_gets_no_reply(
    server: StoreServer, log: FakeLog
) -> None:
    peer = await native_peer(server)
    await peer.asked(ops.Set(1, b"/k", b"v"))
    log.error, log.reserve = disk_full(), True
    peer.asks(ops.Confirm(0, 1, [], 0))
    await settle()
    assert not peer.pending and not peer.closing and not session_of(server, peer).kept


@on_log
async def test_clients_connect_and_leave_while_the_disk_is_full(server: StoreServer, log: FakeLog) -> None:
    peer = await native_peer(server)
    log.error, log.reserve = disk_full(), True
    peer.hangs_up()
    await settle()
    assert not session_of(server, peer).attached
    again, new = await native_peer(server, peer.session), await native_peer(server)
    assert session_of(server, again).attached and session_of(server, new).attached


@pytest.mark.parametrize("reserve", [True, False])
def test_a_server_with_a_full_disk_can_be_closed(reserve: bool) -> None:
    async def main() -> None:
        log = FakeLog()
        server = StoreServer(Settings(), log)
        await server.open([])
        await native_peer(server)
        log.error, log.reserve = disk_full(), reserve
        await asyncio.wait_for(server.close(), AMPLE_S)
        assert log.closed

    asyncio.run(main())


# The order of replies


@on_log
async def test_a_torch_client_gets_no_reply_after_a_refused_request(server: StoreServer, log: FakeLog) -> None:
    """A reply to its next request would mean that the first was executed."""
    writer = await native_peer(server)
    await writer.asked(ops.Set(1, b"/k", b"v"))
    for refused in (encode(Opcode.SET, b"/t", b"v"), encode(Opcode.ADD, b"/n", 1)):
        peer = await torch_peer(server)
        log.error = disk_full()
        heard = b""
        peer.says(refused + encode(Opcode.PING, 7) + encode(Opcode.GET, b"/k"))
        while not peer.closing:
            heard += peer.pending
            await asyncio.sleep(0)
        assert heard == b""
        log.error = None
    assert value_of(server, b"/t") is None and value_of(server, b"/n") is None


@on_log
async def test_releases_and_deletes_may_use_the_reserve(server: StoreServer, log: FakeLog) -> None:
    peer, other = await native_peer(server), await torch_peer(server)
    acquire = ops.Act(1, b"/lock", "me", 1, lock.LockAcquire(), LONG_S)
    arrive = ops.Act(2, b"/bar", "me", 2, barrier.BarrierArrive(1, "me"), LONG_S)
    peer.asks(acquire, arrive, ops.Set(3, b"/k", b"v"), ops.Set(4, b"/l", b"v"), ops.SetLease(5, b"/leased", b"v", 0.0))
    assert [reply[1] for reply in await next_replies(peer, 5)] == [ReplyStatus.OK] * 5
    log.error, log.reserve = disk_full(), True
    peer.asks(
        ops.Act(6, b"/lock", "me", 6, lock.LockRelease(1), 0.0),
        ops.Act(7, b"/bar", "me", 7, barrier.BarrierLeave(2), 0.0),
        ops.Delete(8, b"/k"),
        ops.Check(9, [b"/k"]),
        ops.ReleaseLease(10, b"/leased"),
        ops.Set(11, b"/k", b"w"),
    )
    replies = {number: (status, result) for number, status, result in await next_replies(peer, 6)}
    assert replies.pop(11)[0] == ReplyStatus.ERROR
    assert {status for status, _ in replies.values()} == {ReplyStatus.OK} and replies[9] == (ReplyStatus.OK, False)
    other.says(encode(Opcode.DELETE_KEY, b"/l") + encode(Opcode.CHECK, 1, b"/l"))
    assert await other.number() == 1 and await other.hears(1) == b"\1", "it sees its own change"
    assert not other.closing


@on_log
async def test_without_a_reserve_every_change_is_refused(server: StoreServer, log: FakeLog) -> None:
    peer = await native_peer(server)
    await peer.asked(ops.Set(1, b"/k", b"v"))
    log.error = disk_full()
    peer.asks(ops.Delete(2, b"/k"), ops.Drop(3, 1), ops.Bye(4), ops.Get(5, b"/k", 0.0))
    replies = sorted(await next_replies(peer, 4))
    assert [reply[:2] for reply in replies] == [[number, ReplyStatus.ERROR] for number in (2, 3, 4)] + [
        [5, ReplyStatus.OK]
    ]


# Clients that connect and leave, without a reserve


@on_log(grace_s=0.0)
async def test_new_sessions_are_refused_with_the_reason(server: StoreServer, log: FakeLog) -> None:
    here = await native_peer(server)
    await here.asked(ops.Set(1, b"/k", b"v"))
    log.error = disk_full()
    for _ in range(50):
        peer = NativePeer(server)
        refused = await peer.greets()
        assert not peer.session and "No space left on device" in refused[1]
        peer.hangs_up()
    assert await here.asked(ops.Get(2, b"/k", 0.0)) == [b"v"], "nothing waits behind them"
    here.asks(ops.Set(3, b"/k", b"w"))
    assert (await here.reads())[1] == ReplyStatus.ERROR
    assert server.statistics().facts["refused_sessions"] == 0, "that is the limit on sessions"
    log.error = None
    assert (await native_peer(server)).session


@on_log
async def test_a_resuming_client_is_disconnected_and_keeps_its_session(server: StoreServer, log: FakeLog) -> None:
    peer = await native_peer(server)
    await peer.asked(ops.SetLease(1, b"/leased", b"v", 0.0))
    log.error = disk_full()
    peer.hangs_up()
    await settle()
    for _ in range(50):
        again = NativePeer(server)
        with pytest.raises(AssertionError, match="disconnected"):
            await again.greets(peer.session)
        assert len(server.retries) <= 2, "repeated attempts leave no more behind than one"
    log.error = None
    again = await native_peer(server, peer.session)
    await until(lambda: not server.retries)
    await settle()
    assert session_of(server, again).attached and value_of(server, b"/leased") == b"v"
    assert await again.asked(ops.Ping(2)) is None


@on_log(grace_s=0.0)
async def test_a_session_whose_resumption_failed_expires(server: StoreServer, log: FakeLog) -> None:
    """The old connection ended after the new one had taken over, so its end was not recorded."""
    peer = await native_peer(server)
    log.error = disk_full()
    log.stalled = True
    again = NativePeer(server)
    coming = asyncio.ensure_future(again.greets(peer.session))
    await settle()
    peer.hangs_up()
    await settle()
    log.stalled = False
    log.end(disk_full())
    with pytest.raises(AssertionError, match="disconnected"):
        await coming
    await settle()
    assert server.state.sessions
    log.error = None
    await until(lambda: not server.state.sessions)


@on_log(grace_s=0.0)
async def test_sessions_of_gone_clients_end_once_there_is_room(server: StoreServer, log: FakeLog) -> None:
    peer, waiter = await native_peer(server), await torch_peer(server)
    await peer.asked(ops.SetLease(1, b"/leased", b"v", 0.0))
    waiter.asks(Opcode.BARRIER, b"/bar", 2)
    await settle()
    log.error = disk_full()
    peer.hangs_up()
    waiter.hangs_up()
    for _ in range(20):
        await settle()
    assert value_of(server, b"/leased") == b"v" and value_of(server, b"/bar") == b"1"
    log.error = None
    await until(lambda: not server.state.sessions and not server.state.connection_owners)
    await until(lambda: value_of(server, b"/leased") is None)
    assert value_of(server, b"/bar") == b"0"


@on_log
async def test_the_last_confirmation_is_kept_until_there_is_room(server: StoreServer, log: FakeLog) -> None:
    peer, pusher = await native_peer(server), await native_peer(server)
    for number in range(1, 11):
        await pusher.asked(ops.Push(number, b"/q", b"%d" % number))
        await peer.asked(ops.Pop(number, b"/q"))
    log.error = disk_full()
    for number in range(1, 11):
        peer.asks(ops.Confirm(0, number, [], 0), ops.QueueLen(20 + number, b"/q"))
        assert (await peer.reads())[2] == 0, "reads do not wait for them"
        await settle()
        assert len(server.retries) <= 1
    assert session_of(server, peer).taken
    log.error = None
    await until(lambda: not session_of(server, peer).taken)
    assert not session_of(server, peer).kept


@on_log(greeting_s=0.0)
async def test_a_client_whose_hello_is_being_committed_is_not_dropped_as_silent(
    server: StoreServer, log: FakeLog
) -> None:
    log.stalled = True
    peer = NativePeer(server)
    coming = asyncio.ensure_future(peer.greets())
    await settle()
    server.listener.sweep()
    await settle()
    assert not peer.closing
    await log.flow()
    await coming


# What is reported


@on_log
async def test_statistics_and_health_say_that_the_disk_is_full(server: StoreServer, log: FakeLog) -> None:
    peer = await native_peer(server)
    assert server.health() == "ok" and server.statistics().facts["storage"]["disk_full"] is False
    log.error = disk_full()
    peer.asks(ops.Set(1, b"/k", b"v"))
    await peer.reads()
    assert server.health() == "ok, but the disk is full: changes are refused"
    assert server.statistics().facts["storage"]["disk_full"] is True
    log.error = None
    await peer.asked(ops.Set(2, b"/k", b"v"))
    assert server.health() == "ok" and server.statistics().facts["storage"]["disk_full"] is False


@pytest.mark.parametrize("reserve", [True, False])
def test_a_server_starts_on_a_full_disk_if_there_is_a_reserve(reserve: bool) -> None:
    async def main() -> None:
        log = FakeLog()
        log.error, log.reserve = disk_full(), reserve
        server = StoreServer(Settings(), log)
        if reserve:
            await asyncio.wait_for(server.open([]), AMPLE_S)
            await server.close()
        else:
            with pytest.raises(StoreError, match="cannot start: /data/log cannot grow: No space left on device"):
                await asyncio.wait_for(server.open([]), AMPLE_S)

    asyncio.run(main())


def test_a_data_directory_of_another_version_is_named_in_the_error() -> None:
    start = entries.StartServer(entries.VERSION + 1, b"", 1, 1, 1, 1)

    async def main() -> None:
        server = StoreServer(Settings(data_dir="/data"), FakeLog([entries.encode(start)]))
        with pytest.raises(OtherVersion, match=r"cannot start: /data was written by another version .* --data-dir"):
            await server.open([])

    asyncio.run(main())
