"""Hellos of native clients: chosen session ids, attempts, and the namespaces of rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.server.fake_log import FakeLog, both, disk_full, in_memory, on_log
from tests.server.fake_relay import ChannelClient, FakeRelay
from tests.server.peers import NativePeer, settle
from tests.server.test_rounds import closed

from rallypoint import net
from rallypoint.core import entries, ops
from rallypoint.core.records import ReplyStatus
from rallypoint.core.session import Session
from rallypoint.protocol.native import ACCEPTED, PREFACE, VERSION, Frames, Hello, frame
from rallypoint.server import round_namespaces
from rallypoint.server.server import StoreServer
from rallypoint.server.settings import Settings

LONG_S = 1000.0
ID = b"i" * 16
OTHER = b"o" * 16


async def client(server: StoreServer) -> ChannelClient:
    """Return a client on a connection with channels of its own."""
    return (await FakeRelay(server).opens()).client()


async def plain(server: StoreServer, *said: bytes) -> NativePeer:
    """Return a client on a connection without channels that has sent these bytes, and read no reply yet."""
    peer = NativePeer(server)
    peer.frames, peer.inbox = Frames(1 << 30), []
    peer.says(PREFACE)
    assert await peer.hears(4) == ACCEPTED
    if said:
        peer.says(b"".join(said))
    return peer


def hello(session: bytes = b"", **more: Any) -> bytes:
    return frame(Hello(VERSION, "test", session, **more))


def session(server: StoreServer, identity: bytes = ID) -> Session:
    return server.state.sessions_by_id[identity]


def refused(answer: list[Any]) -> str:
    """Return why a hello was refused."""
    assert len(answer) == 2, f"not refused: {answer}"
    return str(answer[1])


def opens(log: FakeLog) -> int:
    """Return how many sessions were opened, or opened again, in the log."""
    return sum(isinstance(entries.decode(record), entries.OpenSession) for record in log.records)


# Ids


@both
async def test_a_client_may_choose_its_id(server: StoreServer, log: FakeLog | None) -> None:
    first = await client(server)
    welcome = await first.greets(ID, opens=True)
    assert first.session == ID and welcome[4] is False
    assert await first.asked(ops.Add(1, b"/n", 1)) == 1
    peer = await plain(server, hello(OTHER, opens=True), frame(ops.Add(1, b"/n", 1)))
    assert (await peer.reads())[2][2] == OTHER, "without channels, too"
    assert await peer.reads() == [1, ReplyStatus.OK, 2], "requests behind the hello are answered"


@both
async def test_an_id_of_another_length_is_refused(server: StoreServer, log: FakeLog | None) -> None:
    for identity in (b"", b"short", b"l" * 17):
        assert "16 bytes" in refused(await (await client(server)).greets(identity, opens=True))
    assert not server.state.sessions


@both
async def test_a_lost_welcome_opens_no_second_session(server: StoreServer, log: FakeLog | None) -> None:
    first = await plain(server, hello(ID, opens=True, attempt=1), frame(ops.Add(1, b"/n", 1)))
    await settle()
    first.hangs_up()
    await settle()
    again = await client(server)
    assert (await again.greets(ID, opens=True, attempt=2))[4] is True
    assert await again.asked(ops.Add(1, b"/n", 1)) == 1
    assert len(server.state.sessions) == 1 and session(server).attached


@on_log
async def test_hellos_for_one_session_are_processed_in_order(server: StoreServer, log: FakeLog) -> None:
    """The first connection ends before its session is committed, and the second must keep the session."""
    log.stalled = True
    peers = [await plain(server, hello(ID, opens=True, attempt=attempt)) for attempt in (1, 2, 3)]
    peers[0].hangs_up()
    await settle()
    await log.flow()
    await settle()
    assert (await peers[2].reads())[2][2] == ID
    assert await peers[2].asked(ops.Add(1, b"/n", 1)) == 1
    assert session(server).attached and session(server).attempt == 3 and not server.openings
    assert len(server.state.sessions) == 1


@on_log
async def test_an_earlier_attempt_that_arrives_later_is_refused(server: StoreServer, log: FakeLog) -> None:
    log.stalled = True
    peers = [await plain(server, hello(ID, opens=True, attempt=attempt)) for attempt in (2, 1)]
    await log.flow()
    await settle()
    assert (await peers[0].reads())[1] == ReplyStatus.OK
    assert (await peers[1].reads())[1] == ReplyStatus.REFUSED
    assert await peers[0].asked(ops.Ping(1)) is None


@on_log
async def test_a_full_disk_refuses_to_open_and_lets_the_next_try(server: StoreServer, log: FakeLog) -> None:
    log.error = disk_full()
    peers = [await plain(server, hello(ID, opens=True, attempt=attempt)) for attempt in (1, 2)]
    assert (await peers[0].reads())[1] == ReplyStatus.REFUSED
    assert (await peers[1].reads())[1] == ReplyStatus.REFUSED
    log.error = None
    again = await client(server)
    assert (await again.greets(ID, opens=True, attempt=3))[2] == ID
    assert not server.openings


@both
async def test_a_session_that_has_ended_is_not_opened_again(server: StoreServer, log: FakeLog | None) -> None:
    first = await client(server)
    await first.greets(ID, opens=True, attempt=1)
    first.asks(ops.Bye(1))
    await settle()
    first.closes()
    await settle()
    assert not server.state.sessions
    late = await plain(server, hello(ID, opens=True, attempt=1), frame(ops.Add(1, b"/n", 1)))
    assert (await late.reads())[1] == ReplyStatus.REFUSED
    assert not server.state.sessions


@on_log
async def test_a_session_that_ends_while_its_hello_is_committed_is_not_opened_again(
    server: StoreServer, log: FakeLog
) -> None:
    first = await client(server)
    await first.greets(ID, opens=True, attempt=1)
    first.closes()
    await settle()
    log.stalled = True
    server.submit(entries.EndSession(session(server).serial))
    again = await plain(server, hello(ID, opens=True, attempt=2))
    await log.flow()
    assert (await again.reads())[1] == ReplyStatus.REFUSED
    await settle()
    assert not server.state.sessions


# Attempts


@both
async def test_a_late_hello_does_not_take_the_session_back(server: StoreServer, log: FakeLog | None) -> None:
    first = await client(server)
    await first.greets(ID, opens=True, attempt=2)
    for late in ({"attempt": 1}, {"attempt": 1, "opens": True}, {}):
        assert "a later connection" in refused(await (await client(server)).greets(ID, **late))
    assert await first.asked(ops.Add(1, b"/n", 1)) == 1
    for attempt in (2, 3):
        newer = await client(server)
        assert (await newer.greets(ID, attempt=attempt))[4] is True
        assert await newer.asked(ops.Ping(attempt)) is None
    assert session(server).attempt == 3


@both
async def test_clients_without_attempt_numbers_take_over(server: StoreServer, log: FakeLog | None) -> None:
    first, second = NativePeer(server), NativePeer(server)
    await first.greets()
    assert (await second.greets(first.session))[4] is True
    assert await second.asked(ops.Ping(1)) is None


# Namespaces


@both
async def test_a_hello_names_the_namespace_of_a_round(server: StoreServer, log: FakeLog | None) -> None:
    everybody, first, second = await client(server), await client(server), await client(server)
    await everybody.greets()
    await first.greets(ID, opens=True, run="job", scope=7, round=3)
    await second.greets(run="job", scope=7)
    assert await everybody.asked(ops.Set(1, b"/k", b"everybody's")) is None
    assert await first.asked(ops.Set(1, b"/k", b"round's")) is None
    assert await second.asked(ops.Peek(1, b"/k")) == b"round's"
    assert await everybody.asked(ops.Peek(2, b"/k")) == b"everybody's"
    found = server.state.namespace_of("job")
    assert found is not None and (found.scope, found.number) == (7, 3)
    assert server.statistics().facts["rounds"] == 1
    peer = await plain(server, hello(run="job", scope=7))
    assert (await peer.reads())[1] == ReplyStatus.OK
    assert await peer.asked(ops.Peek(1, b"/k")) == b"round's", "without channels, too"


@both
async def test_waits_see_the_keys_of_their_own_namespace(server: StoreServer, log: FakeLog | None) -> None:
    everybody, first = await client(server), await client(server)
    await everybody.greets()
    await first.greets(run="job", scope=1)
    many = [b"/k" + b"-" * 8000] * 50  # enough bytes to be looked up in slices
    await everybody.asked(ops.MultiSet(1, [(b"/k", b"v"), (many[0], b"v")]))
    for peer, number, found in ((everybody, 2, True), (first, 1, False)):
        await peer.streams(frame(ops.Check(number, many)))
        assert await peer.reads() == [number, ReplyStatus.OK, found]
    first.asks(ops.WaitOrTurn(2, b"/k", 10))
    await settle()
    assert not first.inbox
    await first.asked(ops.Ping(3))
    first.asks(ops.Set(4, b"/k", b"w"))
    assert sorted([await first.reads(), await first.reads()]) == [[2, ReplyStatus.OK, b"w"], [4, ReplyStatus.OK, None]]


@both
async def test_a_later_round_closes_the_earlier(server: StoreServer, log: FakeLog | None) -> None:
    relay = await FakeRelay(server).opens()
    first, other, everybody = relay.client(), relay.client(), relay.client()
    await first.greets(ID, opens=True, run="job", scope=1)
    await other.greets(run="another", scope=1)
    await everybody.greets()
    peer = await plain(server, hello(run="job", scope=1))
    assert (await peer.reads())[1] == ReplyStatus.OK
    first.asks(ops.Get(1, b"/k", LONG_S))
    later = await client(server)
    await later.greets(run="job", scope=2)
    assert await first.ends() == ""
    await peer.ends()
    assert await other.asked(ops.Ping(1)) is None and await everybody.asked(ops.Ping(1)) is None
    assert "unknown session" in refused(await (await client(server)).greets(ID, run="job", scope=1, attempt=1))
    for session in (OTHER, b""):
        too_late = await (await client(server)).greets(session, opens=bool(session), run="job", scope=1)
        assert "a later round of 'job' has begun" in refused(too_late)
    assert await later.asked(ops.Count(1, b"")) == 0
    assert len(server.state.namespaces) == 3


@both
async def test_resuming_creates_no_namespace(server: StoreServer, log: FakeLog | None) -> None:
    first = await client(server)
    await first.greets(ID, opens=True, run="job", scope=1)
    assert await closed(server, "job")
    assert await first.ends() == ""
    assert "round 1 of 'job' is over" in refused(await (await client(server)).greets(ID, run="job", scope=1))
    assert "unknown session" in refused(await (await client(server)).greets(ID))
    assert server.state.namespace_of("job") is None


@both
async def test_a_session_is_resumed_in_its_own_namespace_only(server: StoreServer, log: FakeLog | None) -> None:
    relay = await FakeRelay(server).opens()
    first = relay.client()
    await first.greets(ID, opens=True, run="job", scope=1)
    await first.asked(ops.Set(1, b"/k", b"v"))
    relay.hangs_up()
    await settle()
    assert "unknown session" in refused(await (await client(server)).greets(ID, attempt=1))
    back = await client(server)
    assert (await back.greets(ID, attempt=1, run="job", scope=1))[4] is True
    assert await back.asked(ops.Peek(2, b"/k")) == b"v"


@on_log
async def test_namespaces_outlive_a_restart(server: StoreServer, log: FakeLog) -> None:
    first = await client(server)
    await first.greets(ID, opens=True, run="job", scope=1, round=3)
    await first.asked(ops.Set(1, b"/k", b"v"))
    await settle()
    restarted = StoreServer(Settings(), FakeLog(log.records))
    await restarted.open(net.listen(["127.0.0.1"], 0))
    expected = {"round": 3, "scope": 1, "sessions": 1, "keys": 1}
    assert restarted.statistics().facts["namespaces"] == {"job": expected}
    back = await client(restarted)
    assert (await back.greets(ID, run="job", scope=1))[4] is True
    assert await back.asked(ops.Peek(2, b"/k")) == b"v"
    back.closes()
    await settle()
    await restarted.close()


def test_the_number_of_namespaces_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_namespaces, "MAX_ROUNDS", 2)

    async def test(server: StoreServer, log: FakeLog | None) -> None:
        clients = {name: await client(server) for name in ("first", "second", "third")}
        await clients["first"].greets(run="first", scope=1)
        await clients["second"].greets(run="second", scope=1)
        assert "too many rounds" in refused(await clients["third"].greets(run="third", scope=1))
        clients["first"].asks(ops.Bye(1))
        await settle()
        clients["first"].closes()
        await settle()
        await clients["third"].greets(run="third", scope=1)
        assert clients["third"].session and server.state.namespace_of("first") is None
        assert await clients["second"].asked(ops.Ping(1)) is None

    runs: tuple[Callable[..., Callable[[], None]], ...] = (in_memory(), on_log)
    for run in runs:
        run(test)()


# Waits that need no entry


async def behind_a_stall(server: StoreServer, log: FakeLog, value: bytes) -> ChannelClient:
    """Return a client that has set a key to this value; no further entry is committed."""
    first = await client(server)
    await first.greets()
    await first.asked(ops.Set(1, b"/k", value))
    log.stalled = True
    return first


@on_log
async def test_a_wait_for_an_existing_key_needs_no_entry(server: StoreServer, log: FakeLog) -> None:
    first = await behind_a_stall(server, log, b"v")
    before = len(log.batches)
    assert await first.asked(ops.WaitOrTurn(2, b"/k", 10)) == b"v"
    assert await first.asked(ops.WaitOrTurn(3, b"/k")) is None
    assert len(log.batches) == before
    await log.flow()


@on_log
async def test_a_wait_behind_changes_of_its_client_waits_for_them(server: StoreServer, log: FakeLog) -> None:
    first = await behind_a_stall(server, log, b"old")
    first.asks(ops.Set(2, b"/k", b"new"), ops.WaitOrTurn(3, b"/k", 10))
    await settle()
    assert not first.inbox
    await log.flow()
    assert [await first.reads(), await first.reads()] == [[2, 0, None], [3, 0, b"new"]]


async def two_clients(server: StoreServer) -> tuple[ChannelClient, ChannelClient]:
    """Return a client whose session has the id ID, and another."""
    first, other = await client(server), await client(server)
    await first.greets(ID, opens=True, attempt=1)
    await other.greets()
    return first, other


@on_log
async def test_a_repeated_wait_is_answered_again(server: StoreServer, log: FakeLog) -> None:
    """First it was a plain read. When it is repeated, the key is gone, and later requests have been executed."""
    first, other = await two_clients(server)
    await other.asked(ops.Set(1, b"/k", b"v"))
    assert await first.asked(ops.WaitOrTurn(1, b"/k", 10)) == b"v"
    assert await first.asked(ops.Add(2, b"/n", 1)) == 1
    first.closes()
    await other.asked(ops.Delete(2, b"/k"))
    again = await client(server)
    await again.greets(ID, attempt=2)
    again.asks(ops.WaitOrTurn(1, b"/k", 10))
    await settle()
    assert not again.inbox, "it waits"
    again.closes()
    await settle()
    third = await client(server)
    await third.greets(ID, attempt=3)
    await other.asked(ops.Set(3, b"/k", b"w"))
    third.asks(ops.WaitOrTurn(1, b"/k", 10))
    assert await third.reads() == [1, ReplyStatus.OK, b"w"], "answered by the logged wait, or by the repetition"


@on_log
async def test_a_repeated_wait_keeps_its_turn(server: StoreServer, log: FakeLog) -> None:
    first, other = await two_clients(server)
    await other.asked(ops.Push(1, b"/q", b"item"))
    turn = await first.asked(ops.WaitOrTurn(1, b"/q"))
    await other.asked(ops.Set(2, b"/q", b"a key of the same name"))
    first.closes()
    again = await client(server)
    await again.greets(ID, attempt=2)
    assert await again.asked(ops.WaitOrTurn(1, b"/q")) == turn
    assert await again.asked(ops.TurnPop(2, b"/q", 1)) == [1, b"item"]
