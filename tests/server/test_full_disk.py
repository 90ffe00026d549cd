"""A durable server whose disk is full: who is refused and how, what is served, and that it goes on when there is room.

A `FakeLog` with `error` has no room, but for what is urgent where it has a `reserve`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.server.fake_log import FakeLog, disk_full, on_log
from tests.server.peers import Ours, Torch, settle
from tests.wire import AMPLE_S

from rallypoint.core import barrier, entries, lock, ops
from rallypoint.core.records import Status
from rallypoint.core.session import Session
from rallypoint.core.state import OtherVersion
from rallypoint.errors import StoreError
from rallypoint.protocol.c10d import Opcode, encode
from rallypoint.server import retries
from rallypoint.server.server import StoreServer
from rallypoint.server.settings import Settings

LONG_S = 1000.0


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again at once."""
    monkeypatch.setattr(retries, "RETRY_S", 0.0)


def value(server: StoreServer, key: bytes) -> bytes | None:
    found: bytes | None = server.state.namespaces[0].engine.execute(ops.Peek(0, key))
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


async def answers(peer: Ours, count: int) -> list[Any]:
    """Return so many frames."""
    return [await peer.reads() for _ in range(count)]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


@on_log
async def test_a_full_disk_is_told_and_harms_nobody(server: StoreServer, log: FakeLog) -> None:
    peer, other = await ours(server), await torch(server)
    await peer.asked(ops.Set(1, b"/k", b"v"))
    log.error = disk_full()
    peer.asks(ops.Set(2, b"/k", b"w"), ops.Get(3, b"/k", 0.0))
    replies = sorted(await answers(peer, 2))
    assert replies[0][:2] == [2, Status.ERROR] and replies[0][2][0] == "DiskFull"
    assert replies[1] == [3, Status.OK, [b"v"]]
    other.asks(Opcode.SET, b"/k", b"w")
    await other.ends()  # its protocol has no errors
    log.error = None
    assert await peer.asked(ops.Set(4, b"/k", b"x")) is None
    assert await peer.asked(ops.Set(2, b"/k", b"w")) is None, "it may be asked again"
    assert value(server, b"/k") == b"w"


@on_log
async def test_what_the_full_disk_refused_may_be_repeated_after_a_cut(server: StoreServer, log: FakeLog) -> None:
    peer = await ours(server)
    log.error = disk_full()
    peer.asks(ops.Add(1, b"/n", 1))
    await settle()
    log.error = None
    assert (await peer.reads())[1] == Status.ERROR
    await peer.asked(ops.Add(2, b"/n", 1))
    peer.hangs_up()
    await settle()
    again = await ours(server, peer.session)
    assert await again.asked(ops.Add(1, b"/n", 1)) == 2, "its answer was lost on the way"


@on_log
async def test_a_confirmation_that_found_the_disk_full_is_not_answered(server: StoreServer, log: FakeLog) -> None:
    peer = await ours(server)
    await peer.asked(ops.Set(1, b"/k", b"v"))
    log.error, log.reserve = disk_full(), True
    peer.asks(ops.Confirm(0, 1, [], 0))
    await settle()
    assert not peer.pending and not peer.closing and not session_of(server, peer).kept


@on_log
async def test_clients_come_and_go_while_the_disk_is_full(server: StoreServer, log: FakeLog) -> None:
    peer = await ours(server)
    log.error, log.reserve = disk_full(), True
    peer.hangs_up()
    await settle()
    assert not session_of(server, peer).attached
    again, new = await ours(server, peer.session), await ours(server)
    assert session_of(server, again).attached and session_of(server, new).attached


@pytest.mark.parametrize("reserve", [True, False])
def test_a_server_without_room_can_be_closed(reserve: bool) -> None:
    async def main() -> None:
        log = FakeLog()
        server = StoreServer(Settings(), log)
        await server.open([])
        await ours(server)
        log.error, log.reserve = disk_full(), reserve
        await asyncio.wait_for(server.close(), AMPLE_S)
        assert log.closed

    asyncio.run(main())


# The order of replies


@on_log
async def test_a_torch_client_hears_nothing_behind_what_was_refused(server: StoreServer, log: FakeLog) -> None:
    """A reply to its next request would say that the first was carried out."""
    writer = await ours(server)
    await writer.asked(ops.Set(1, b"/k", b"v"))
    for refused in (encode(Opcode.SET, b"/t", b"v"), encode(Opcode.ADD, b"/n", 1)):
        peer = await torch(server)
        log.error = disk_full()
        heard = b""
        peer.says(refused + encode(Opcode.PING, 7) + encode(Opcode.GET, b"/k"))
        while not peer.closing:
            heard += peer.pending
            await asyncio.sleep(0)
        assert heard == b""
        log.error = None
    assert value(server, b"/t") is None and value(server, b"/n") is None


@on_log
async def test_what_is_given_back_may_use_the_reserve(server: StoreServer, log: FakeLog) -> None:
    peer, other = await ours(server), await torch(server)
    acquire = ops.Act(1, b"/lock", "me", 1, lock.Acquire(), LONG_S)
    arrive = ops.Act(2, b"/bar", "me", 2, barrier.Arrive(1, "me"), LONG_S)
    peer.asks(acquire, arrive, ops.Set(3, b"/k", b"v"), ops.Set(4, b"/l", b"v"), ops.Lease(5, b"/leased", b"v", 0.0))
    assert [reply[1] for reply in await answers(peer, 5)] == [Status.OK] * 5
    log.error, log.reserve = disk_full(), True
    peer.asks(
        ops.Act(6, b"/lock", "me", 6, lock.Release(1), 0.0),
        ops.Act(7, b"/bar", "me", 7, barrier.Leave(2), 0.0),
        ops.Delete(8, b"/k"),
        ops.Check(9, [b"/k"]),
        ops.Unlease(10, b"/leased"),
        ops.Set(11, b"/k", b"w"),
    )
    replies = {number: (status, result) for number, status, result in await answers(peer, 6)}
    assert replies.pop(11)[0] == Status.ERROR
    assert {status for status, _ in replies.values()} == {Status.OK} and replies[9] == (Status.OK, False)
    other.says(encode(Opcode.DELETE_KEY, b"/l") + encode(Opcode.CHECK, 1, b"/l"))
    assert await other.number() == 1 and await other.hears(1) == b"\1", "and it sees what it has done"
    assert not other.closing


@on_log
async def test_where_even_the_reserve_is_used_up_all_changes_are_refused(server: StoreServer, log: FakeLog) -> None:
    peer = await ours(server)
    await peer.asked(ops.Set(1, b"/k", b"v"))
    log.error = disk_full()
    peer.asks(ops.Delete(2, b"/k"), ops.Drop(3, 1), ops.Bye(4), ops.Get(5, b"/k", 0.0))
    replies = sorted(await answers(peer, 4))
    assert [reply[:2] for reply in replies] == [[number, Status.ERROR] for number in (2, 3, 4)] + [[5, Status.OK]]


# Clients that come and go, without a reserve


@on_log(grace_s=0.0)
async def test_who_comes_is_told_why_it_cannot(server: StoreServer, log: FakeLog) -> None:
    here = await ours(server)
    await here.asked(ops.Set(1, b"/k", b"v"))
    log.error = disk_full()
    for _ in range(50):
        peer = Ours(server)
        refused = await peer.greets()
        assert not peer.session and "No space left on device" in refused[1]
        peer.hangs_up()
    assert await here.asked(ops.Get(2, b"/k", 0.0)) == [b"v"], "and nobody waits behind them"
    here.asks(ops.Set(3, b"/k", b"w"))
    assert (await here.reads())[1] == Status.ERROR
    assert server.statistics()["refused_sessions"] == 0, "that is the limit on sessions"
    log.error = None
    assert (await ours(server)).session


@on_log
async def test_who_comes_back_is_hung_up_on_and_keeps_its_session(server: StoreServer, log: FakeLog) -> None:
    peer = await ours(server)
    await peer.asked(ops.Lease(1, b"/leased", b"v", 0.0))
    log.error = disk_full()
    peer.hangs_up()
    await settle()
    for _ in range(50):
        again = Ours(server)
        with pytest.raises(AssertionError, match="hung up on"):
            await again.greets(peer.session)
        assert len(server.retries) <= 2, "one that comes again and again leaves no more behind than once"
    log.error = None
    again = await ours(server, peer.session)
    await until(lambda: not server.retries)
    await settle()
    assert session_of(server, again).attached and value(server, b"/leased") == b"v"
    assert await again.asked(ops.Ping(2)) is None


@on_log(grace_s=0.0)
async def test_who_comes_back_in_vain_and_stays_away_ends(server: StoreServer, log: FakeLog) -> None:
    """The connection before ended after the new one had taken over, so its end was not noted."""
    peer = await ours(server)
    log.error = disk_full()
    log.stalled = True
    again = Ours(server)
    coming = asyncio.ensure_future(again.greets(peer.session))
    await settle()
    peer.hangs_up()
    await settle()
    log.stalled = False
    log.end(disk_full())
    with pytest.raises(AssertionError, match="hung up on"):
        await coming
    await settle()
    assert server.state.sessions
    log.error = None
    await until(lambda: not server.state.sessions)


@on_log(grace_s=0.0)
async def test_who_is_gone_ends_as_soon_as_there_is_room(server: StoreServer, log: FakeLog) -> None:
    peer, waiter = await ours(server), await torch(server)
    await peer.asked(ops.Lease(1, b"/leased", b"v", 0.0))
    waiter.asks(Opcode.BARRIER, b"/bar", 2)
    await settle()
    log.error = disk_full()
    peer.hangs_up()
    waiter.hangs_up()
    for _ in range(20):
        await settle()
    assert value(server, b"/leased") == b"v" and value(server, b"/bar") == b"1"
    log.error = None
    await until(lambda: not server.state.sessions and not server.state.visitors)
    await until(lambda: value(server, b"/leased") is None)
    assert value(server, b"/bar") == b"0"


@on_log
async def test_confirmations_are_kept_until_there_is_room_the_last_for_all(server: StoreServer, log: FakeLog) -> None:
    peer, pusher = await ours(server), await ours(server)
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
async def test_who_waits_for_its_greeting_to_be_committed_has_greeted(server: StoreServer, log: FakeLog) -> None:
    log.stalled = True
    peer = Ours(server)
    coming = asyncio.ensure_future(peer.greets())
    await settle()
    server._sweep()
    await settle()
    assert not peer.closing
    await log.flow()
    await coming


# What is told


@on_log
async def test_statistics_and_health_say_that_the_disk_is_full(server: StoreServer, log: FakeLog) -> None:
    peer = await ours(server)
    assert server.health() == "ok" and server.statistics()["storage"]["disk_full"] is False
    log.error = disk_full()
    peer.asks(ops.Set(1, b"/k", b"v"))
    await peer.reads()
    assert server.health() == "ok, but the disk is full: changes are refused"
    assert server.statistics()["storage"]["disk_full"] is True
    log.error = None
    await peer.asked(ops.Set(2, b"/k", b"v"))
    assert server.health() == "ok" and server.statistics()["storage"]["disk_full"] is False


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


def test_a_directory_of_another_version_is_named() -> None:
    start = entries.Start(entries.VERSION + 1, b"", 1, 1, 1, 1)

    async def main() -> None:
        server = StoreServer(Settings(data_dir="/data"), FakeLog([entries.encode(start)]))
        with pytest.raises(OtherVersion, match=r"cannot start: /data was written by another version .* --data-dir"):
            await server.open([])

    asyncio.run(main())
