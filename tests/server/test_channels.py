"""Connections with channels: many sessions on one connection, none of which waits for another.

The relay is a fake whose transport is in the test's hands (`relays.py`), the server real, in memory or on a log.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from tests.server.fake_log import FakeLog, on_log
from tests.server.peers import Ours, settle
from tests.server.relays import Relay
from tests.server.test_rounds import both, in_memory

from rallypoint import net
from rallypoint.core import exchange, ops
from rallypoint.core.records import DONE, Status
from rallypoint.protocol import channels
from rallypoint.protocol.channels import CREDIT, DATA, MAX_CHUNK, SHARED, WINDOW, data_frames, data_head
from rallypoint.protocol.native import frame
from rallypoint.server import multiplexed
from rallypoint.server.channel import ENDS
from rallypoint.server.native_connection import REPLIES_BYTES
from rallypoint.server.server import StoreServer
from rallypoint.server.settings import Settings

MIB = 1024 * 1024
LONG_S = 1000.0
IDS = [bytes([letter]) * 16 for letter in b"abcdef"]


async def relay(server: StoreServer) -> Relay:
    return await Relay(server).opens()


async def put(server: StoreServer, key: bytes, value: bytes) -> None:
    peer = Ours(server)
    await peer.greets()
    await peer.asked(ops.Set(1, key, value))


def value(server: StoreServer, key: bytes) -> bytes | None:
    found: bytes | None = server.state.namespaces[0].engine.execute(ops.Peek(0, key))
    return found


# Sessions and their channels


@both
async def test_two_sessions_on_one_connection(server: StoreServer, log: FakeLog | None) -> None:
    one = await relay(server)
    first, second = await one.greeted(), await one.greeted()
    first.asks(ops.Get(1, b"/k", LONG_S))
    assert await second.asked(ops.Set(1, b"/k", b"v")) is None
    assert await first.reads() == [1, Status.OK, [b"v"]]
    assert first.session != second.session
    facts = server.statistics()
    assert [session["name"] for session in facts["sessions"]] == ["client 1", "client 2"]
    assert facts["connections"] == 1
    assert [(peer["speaks"], peer["channels"]) for peer in facts["clients"]] == [("rallypoint channels", 2)]


@in_memory()
async def test_the_statistics_say_what_channels_wait_for(server: StoreServer, log: FakeLog | None) -> None:
    one = await relay(server)
    for key in (b"/a", b"/b"):
        (await one.greeted()).asks(ops.Get(1, key, LONG_S))
    assert server.statistics()["clients"][0]["waits_for"] == ["/a", "/b"]


@both
async def test_a_greeting_may_come_in_pieces(server: StoreServer, log: FakeLog | None) -> None:
    one = Relay(server)
    client = one.client()
    said = channels.PREFACE + data_frames(1, client.hello()[:9]) + data_frames(1, client.hello()[9:])
    for at in range(len(said)):
        one.says(said[at : at + 1])
    assert await one.hears(4) == channels.ACCEPTED
    assert (await client.reads())[1] == Status.OK


@both
async def test_what_one_turn_brings_goes_out_as_one_write(server: StoreServer, log: FakeLog | None) -> None:
    one, other = await relay(server), await relay(server)
    clients = [await one.greeted() for _ in range(5)]
    before = one.writes
    one.says(b"".join(data_frames(client.number, frame(ops.Get(1, b"/k", LONG_S))) for client in clients))
    await settle()
    assert one.writes == before
    await (await other.greeted()).asked(ops.Set(1, b"/k", b"v"))
    assert [await client.reads() for client in clients] == [[1, Status.OK, [b"v"]]] * 5
    assert one.writes == before + 1, "delivered later"
    one.says(b"".join(data_frames(client.number, frame(ops.Peek(2, b"/k"))) for client in clients))
    assert [await client.reads() for client in clients] == [[2, Status.OK, b"v"]] * 5
    assert one.writes == before + 2, "answered at once"


@both
async def test_an_answer_to_several_clients_of_a_relay_is_sent_once(server: StoreServer, log: FakeLog | None) -> None:
    one, other = await relay(server), await relay(server)
    clients = [await one.greeted(), await one.greeted(), await other.greeted()]
    for number, given in enumerate((b"d" * 1000, b"d" * MAX_CHUNK), 1):
        one.order.clear()
        for rank, client in enumerate(clients):
            give = exchange.Give(3, rank, given if rank else b"first", "all_gather")
            client.asks(ops.Act(number, b"/x", str(rank), number, give, LONG_S))
        expected = [number, Status.OK, [DONE, [b"first", given, given]]]
        assert [await client.reads() for client in clients] == [expected] * 3
        shared = [seen for seen in one.order if seen.kind == SHARED]
        assert {seen.channel for seen in shared} == {2}, "as many as share it"
        assert sum(seen.size for seen in shared) < 2 * len(given) + 200, "and not for each of them"


@both
async def test_one_that_has_no_credit_gets_a_shared_answer_later(server: StoreServer, log: FakeLog | None) -> None:
    await put(server, b"/large", b"v" * (2 * WINDOW))
    one = await relay(server)
    mute, other = await one.greeted(), await one.greeted()
    mute.credits = False
    gives = [exchange.Give(2, rank, b"data %d" % rank, "all_gather") for rank in range(2)]
    mute.asks(ops.Act(1, b"/x", "0", 1, gives[0], LONG_S), ops.Peek(2, b"/large"))
    while mute.window:
        await one.reads()
    other.asks(ops.Act(1, b"/x", "1", 1, gives[1], LONG_S))
    assert await other.reads() == [1, Status.OK, [DONE, [b"data 0", b"data 1"]]]
    mute.credits = True
    mute.grants(WINDOW)
    assert (await mute.reads())[0] == 2
    assert await mute.reads() == [1, Status.OK, [DONE, [b"data 0", b"data 1"]]]


# Credit


@both
async def test_a_client_that_reads_nothing_holds_up_nobody(server: StoreServer, log: FakeLog | None) -> None:
    await put(server, b"/large", b"v" * MIB)
    one = await relay(server)
    mute, other = await one.greeted(), await one.greeted()
    mute.credits = False
    mute.asks(ops.Add(1, b"/n", 1), *(ops.Peek(number, b"/large") for number in range(2, 102)), ops.Add(102, b"/n", 1))
    for number in range(1, 21):
        assert await other.asked(ops.Add(number, b"/m", 1)) == number
    assert mute.window == 0, "all that it may be sent, and no more"
    held = server.statistics()["bytes"] - MIB
    assert MIB // 2 < held < 3 * MIB + REPLIES_BYTES, "what waits is counted, and is not a hundred answers"
    mute.credits = True
    mute.grants(WINDOW)
    answers = dict([(await mute.reads())[::2] for _ in range(102)])
    assert answers == {1: 1, 102: 2, **dict.fromkeys(range(2, 102), b"v" * MIB)}
    assert server.statistics()["bytes"] < 2 * MIB


@both
async def test_small_answers_pass_between_the_pieces_of_a_large_one(server: StoreServer, log: FakeLog | None) -> None:
    large = b"v" * (8 * MIB)
    await put(server, b"/large", large)
    one = await relay(server)
    slow, quick = await one.greeted(), await one.greeted()
    slow.asks(ops.Peek(1, b"/large"))
    number = 0
    while slow.received < 8 * MIB:
        number += 1
        assert await quick.asked(ops.Peek(number, b"/none")) is None
    assert (await slow.reads())[2] == large
    pieces = [piece.channel for piece in one.order if piece.kind == DATA]
    pieces = pieces[pieces.index(slow.number, pieces.index(quick.number)) :]
    switches = sum(before != after for before, after in pairwise(pieces))
    assert switches > 16, f"{switches} in {len(pieces)} frames"
    assert max(piece.size for piece in one.order if piece.kind == DATA) <= MAX_CHUNK


@both
async def test_large_answers_are_sent_in_turns(server: StoreServer, log: FakeLog | None) -> None:
    await put(server, b"/large", b"v" * MIB)
    one = await relay(server)
    clients = [await one.greeted(), await one.greeted()]
    one.order.clear()
    one.says(b"".join(data_frames(client.number, frame(ops.Peek(1, b"/large"))) for client in clients))
    assert [(await client.reads())[0] for client in clients] == [1, 1]
    first = [piece.channel for piece in one.order if piece.kind == DATA][:8]
    assert first == [1, 2] * 4, "a frame of each"


@both
async def test_a_large_value_is_sent_in_windows(server: StoreServer, log: FakeLog | None) -> None:
    one = await relay(server)
    client, other = await one.greeted(), await one.greeted()
    await client.streams(frame(ops.Set(1, b"/large", b"v" * (8 * MIB))))
    assert await client.reads() == [1, Status.OK, None] and value(server, b"/large") == b"v" * (8 * MIB)
    assert await other.asked(ops.Ping(1)) is None
    given = [grant for grant in one.order if grant.kind == CREDIT]
    assert len(given) <= 8 * MIB // (WINDOW // 2) + 1, "given when there is something to give"
    assert sum(grant.size for grant in given) + WINDOW >= 8 * MIB


@both
async def test_a_backlog_is_carried_out_in_turns(server: StoreServer, log: FakeLog | None) -> None:
    await put(server, b"/k", b"v" * 16_384)
    one = await relay(server)
    busy, other = await one.greeted(), await one.greeted()
    count = 2000
    busy.asks(*(ops.Peek(number, b"/k") for number in range(1, count + 1)))
    other.asks(ops.Ping(1))
    assert await other.reads() == [1, Status.OK, None]
    assert busy.received < count * 16_384 // 10, "before a tenth of the backlog was answered"
    assert [(await busy.reads())[0] for _ in range(count)] == list(range(1, count + 1))
    assert server.statistics()["bytes"] < 2 * MIB


@both
async def test_answers_that_came_one_by_one_stay_within_the_window(server: StoreServer, log: FakeLog | None) -> None:
    await put(server, b"/k", b"v" * 50_000)
    one = await relay(server)
    mute = await one.greeted()
    mute.credits = False
    for number in range(1, 11):
        mute.asks(ops.Peek(number, b"/k"))
        await settle()
        one.drain()
    assert mute.window == 0 and len(mute.inbox) == WINDOW // 50_000
    mute.grants(WINDOW)
    numbers = [(await mute.reads())[0] for _ in range(10)]
    assert numbers == list(range(1, 11))


@both
async def test_what_others_make_a_channel_hold_counts(server: StoreServer, log: FakeLog | None) -> None:
    one = await relay(server)
    mute, other = await one.greeted(), await one.greeted()
    mute.credits = False
    mute.asks(ops.Get(1, b"/large", LONG_S), ops.Get(2, b"/more", LONG_S))
    await put(server, b"/large", b"v" * MIB)
    while mute.window:
        await one.reads()
    await put(server, b"/more", b"v" * MIB)
    held = server.statistics()["bytes"] - 2 * MIB
    assert 2 * MIB - WINDOW < held < 3 * MIB, "nothing has come from the relay since"
    mute.credits = True
    mute.grants(WINDOW)
    assert (await mute.reads())[2] == [b"v" * MIB]
    assert (await mute.reads())[2] == [b"v" * MIB]
    assert await other.asked(ops.Ping(1)) is None
    assert server.statistics()["bytes"] < 2 * MIB + MIB // 2


@both
async def test_what_many_channels_are_to_get_counts_once(server: StoreServer, log: FakeLog | None) -> None:
    one = await relay(server)
    clients = [await one.greeted() for _ in range(8)]
    for rank, client in enumerate(clients):
        client.credits = False
        give = exchange.Give(8, rank, b"v" * MIB if not rank else b"", "broadcast")
        await client.streams(frame(ops.Act(1, b"/x", str(rank), 1, give, LONG_S)))
    while any(client.window for client in clients):
        await one.reads()
    assert server.statistics()["bytes"] < 3 * MIB
    for client in clients:
        client.credits = True
        client.grants(WINDOW)
    assert [len((await client.reads())[2][1]) >= MIB for client in clients] == [True] * 8


@both
async def test_a_channel_is_closed_behind_what_was_written(server: StoreServer, log: FakeLog | None) -> None:
    one, other = await relay(server), await relay(server)
    client = one.client()
    await client.greets(run="job", scope=1)
    await client.streams(frame(ops.Set(1, b"/large", b"v" * MIB)))
    await client.reads()
    client.credits = False
    client.asks(ops.Peek(2, b"/large"))
    await settle()
    await other.client().greets(run="job", scope=2)
    one.drain()
    assert client.closed is None, "there is more to come"
    client.credits = True
    client.grants(WINDOW)
    assert (await client.reads())[2] == b"v" * MIB
    assert await client.ends() == "", "and the round is over"


@both
async def test_a_full_inbox_gets_no_credit(server: StoreServer, log: FakeLog | None) -> None:
    """What comes for a client that takes no answers stays within its window, however it is cut."""
    await put(server, b"/large", b"v" * MIB)
    one = await relay(server)
    mute = await one.greeted()
    mute.credits = False
    mute.asks(ops.Peek(1, b"/large"))
    pings = b"".join(frame(ops.Ping(number)) for number in range(2, 100_000))[: mute.credit]
    for at in range(0, len(pings), 997):
        mute.says(pings[at : at + 997])
    await settle()
    one.drain()
    assert mute.credit == 0 and server.statistics()["bytes"] - MIB < 2 * MIB + WINDOW
    mute.credits = True
    mute.grants(WINDOW)
    assert len((await mute.reads())[2]) == MIB
    assert [(await mute.reads())[0] for _ in range(1000)] == list(range(2, 1002))
    await settle()
    one.drain()
    assert mute.credit >= WINDOW // 2


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (data_frames(0, b"x"), "data for channel 0"),
        (data_head(1, 0)[:7] + b"\6", "unknown kind of frame"),
        (data_head(1, 0)[:7] + b"\3", "a shared frame, which only a server sends"),
        (data_head(1, MAX_CHUNK + 1), "the limit is"),
    ],
)
def test_what_breaks_the_connection(said: bytes, why: str, caplog: pytest.LogCaptureFixture) -> None:
    @in_memory()
    async def test(server: StoreServer, log: FakeLog | None) -> None:
        one = await relay(server)
        one.says(said)
        await one.ends()

    test()
    assert why in caplog.text


def test_a_window_that_is_overrun_breaks_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    @in_memory()
    async def test(server: StoreServer, log: FakeLog | None) -> None:
        await put(server, b"/large", b"v" * MIB)
        one = await relay(server)
        mute, other = await one.greeted(), await one.greeted()
        mute.credits = False
        mute.asks(ops.Peek(1, b"/large"))
        await other.asked(ops.Ping(1))
        one.says(data_frames(mute.number, b"x" * (mute.credit)))
        assert await other.asked(ops.Ping(2)) is None
        one.says(data_frames(mute.number, b"x"))
        await one.ends()

    test()
    assert "channel 1 was sent 1 bytes more than its window allows" in caplog.text


@both
async def test_while_the_relay_does_not_read_all_channels_wait(server: StoreServer, log: FakeLog | None) -> None:
    await put(server, b"/large", b"v" * (MIB // 8))
    one, other = await relay(server), Ours(server)
    clients = [await one.greeted() for _ in range(8)]
    await other.greets()
    asked = [ops.Add(1, b"/n", 1), *(ops.Peek(number, b"/large") for number in range(2, 32))]
    one.says(b"".join(data_frames(client.number, b"".join(map(frame, asked))) for client in clients))
    await settle()
    assert one.stopped and len(one.pending) < 2 * MIB
    assert await other.asked(ops.Peek(1, b"/n")) == b"8", "changes do not wait"
    held = server.statistics()["bytes"]
    assert held < 8 * (REPLIES_BYTES + MIB), "and not thirty answers each"
    for client in clients:
        answers = [(await client.reads())[0] for _ in range(31)]
        assert sorted(answers) == list(range(1, 32))
    assert not one.stopped and server.statistics()["bytes"] < MIB


# The end of a channel


@both
async def test_a_channel_that_its_client_closes_gives_its_session_back(
    server: StoreServer, log: FakeLog | None
) -> None:
    one = await relay(server)
    first, second = await one.greeted(), await one.greeted()
    await first.asked(ops.Lease(1, b"/lease", b"v", 0.0))
    first.closes()
    await settle()
    session = server.state.sessions_by_id[first.session]
    assert session.link is None and not session.attached
    first.grants(10)
    first.says(frame(ops.Add(2, b"/n", 1)))  # it may have been on its way
    assert await second.asked(ops.Add(1, b"/n", 1)) == 1
    assert first.closed is None, "it is ignored"
    again = one.client()
    assert (await again.greets(first.session))[4] is True, "resumed on another channel of the same connection"
    assert session.link is not None and session.attached and value(server, b"/lease") == b"v"


@both
async def test_nonsense_on_one_channel_closes_that_channel(server: StoreServer, log: FakeLog | None) -> None:
    one = await relay(server)
    first, second, third = await one.greeted(), await one.greeted(), one.client()
    first.says(frame((99, 1)))
    assert (await first.reads())[1] == Status.ERROR, "as on a connection of its own"
    first.says(frame("nonsense"))
    third.says(frame("nonsense"))
    assert "not a request" in await first.ends()
    assert "not a greeting" in await third.ends()
    assert await second.asked(ops.Ping(1)) is None
    await settle()
    assert server.state.sessions_by_id[first.session].link is None
    assert server.statistics()["clients"][0]["channels"] == 1


@both
async def test_a_session_that_moves_leaves_its_channel(server: StoreServer, log: FakeLog | None) -> None:
    one, other = await relay(server), await relay(server)
    first = await one.greeted()
    await first.asked(ops.Add(1, b"/n", 1))
    moved = other.client()
    assert (await moved.greets(first.session))[4] is True
    first.asks(ops.Add(2, b"/n", 1))
    assert "another connection" in await first.ends()
    assert await moved.asked(ops.Add(2, b"/n", 1)) == 2
    await settle()
    assert server.state.sessions_by_id[first.session].attached


@in_memory(greeting_s=0.05)
async def test_a_channel_must_say_who_calls_in_time(server: StoreServer, log: FakeLog | None) -> None:
    one = await relay(server)
    first, silent = await one.greeted(), one.client()
    silent.says(silent.hello()[:5])
    assert "did not say who calls" in await silent.ends()
    later = one.client()
    later.says(b"\0")
    assert "did not say who calls" in await later.ends()
    assert await first.asked(ops.Ping(1)) is None


def test_there_are_only_so_many_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiplexed, "MAX_CHANNELS", 3)

    @in_memory()
    async def test(server: StoreServer, log: FakeLog | None) -> None:
        one = await relay(server)
        clients = [await one.greeted() for _ in range(3)]
        refused = one.client()
        refused.says(refused.hello())
        assert "too many channels: 3" in await refused.ends()
        clients[0].closes()
        assert (await one.greeted()).session
        assert await clients[1].asked(ops.Ping(1)) is None

    test()


@both
async def test_the_end_of_a_connection_ends_all_channels(server: StoreServer, log: FakeLog | None) -> None:
    one = await relay(server)
    clients = [await one.greeted() for _ in range(ENDS + 10)]
    assert all(session.attached for session in server.state.sessions.values())
    one.hangs_up()
    while any(session.attached for session in server.state.sessions.values()):
        await settle()
    assert len(server.state.sessions) == len(clients), "in their grace"
    assert server.statistics()["bytes"] < MIB


# Resuming


@both
async def test_a_session_is_resumed_by_channel_and_by_connection(server: StoreServer, log: FakeLog | None) -> None:
    one = await relay(server)
    client = await one.greeted()
    assert await client.asked(ops.Add(1, b"/n", 1)) == 1
    client.asks(ops.Add(2, b"/n", 1), ops.Watch(3, b"/w"))  # not answered as far as it knows
    await settle()
    one.hangs_up()
    await settle()
    plain = Ours(server)
    assert (await plain.greets(client.session))[4] is True
    assert await plain.asked(ops.Add(2, b"/n", 1)) == 2
    plain.asks(ops.Set(4, b"/w", b"v"))
    await settle()
    plain.hangs_up()
    await settle()
    back = (await relay(server)).client()
    assert (await back.greets(client.session))[4] is True
    assert await back.reads() == [0, 1, [3, 3, b"/w", b"v"]], "the push again"
    assert await back.asked(ops.Add(2, b"/n", 1)) == 2
    assert value(server, b"/n") == b"2"


@pytest.mark.parametrize("kept", ["memory", "log"])
def test_a_dialogue_that_is_cut_anywhere_takes_effect_once(kept: str) -> None:
    async def test(server: StoreServer, log: FakeLog | None) -> None:
        cut = 0
        while await dialogue(server, cut):
            cut += 1
        assert cut > 200

    (in_memory() if kept == "memory" else on_log)(test)()


async def dialogue(server: StoreServer, cut: int) -> bool:
    """Have two clients do something, be cut off after so many bytes, and come back; return whether there was a cut."""
    key, ids = b"/%d" % cut, [cut.to_bytes(8, "big") + letter * 8 for letter in (b"a", b"b")]
    asked = [ops.Add(1, key, 1), ops.Push(2, key, b"item"), ops.Add(3, key, 1)]
    one = Relay(server)
    clients = [one.client(), one.client()]
    greetings = [client.hello(ids[at], opens=True, attempt=1) for at, client in enumerate(clients)]
    said = channels.PREFACE + b"".join(
        data_frames(client.number, greeting + frame(asked[0]))
        for client, greeting in zip(clients, greetings, strict=True)
    )
    said += b"".join(data_frames(client.number, frame(op)) for op in asked[1:] for client in clients)
    one.says(said[:cut])
    await settle()
    one.hangs_up()
    other = await relay(server)
    for identity in ids:
        client = other.client()
        await client.greets(identity, opens=True, attempt=2)
        assert client.session == identity
        client.asks(*asked)
        answers = [await client.reads() for _ in asked]
        assert [number for number, *_ in sorted(answers)] == [1, 2, 3]
        assert {status for _, status, _ in answers} == {Status.OK}
    assert value(server, key) == b"4"
    assert await client.asked(ops.QueueLen(4, key)) == 2
    for again in other.clients.values():
        again.asks(ops.Bye(5))
    await settle()
    other.hangs_up()
    return cut < len(said)


@on_log
async def test_two_channels_go_on_after_a_restart(server: StoreServer, log: FakeLog) -> None:
    one = await relay(server)
    first, second = await one.greeted(IDS[0], opens=True), await one.greeted()
    await first.asked(ops.Add(1, b"/n", 1))
    second.asks(ops.Get(1, b"/k", LONG_S), ops.Take(2, b"/q", LONG_S))
    await settle()
    log.stalled = True
    first.asks(ops.Add(2, b"/n", 1))  # not committed when the server dies
    await settle()
    restarted = StoreServer(Settings(), FakeLog(log.records))
    await restarted.open(net.listen(["127.0.0.1"], 0))
    other = await relay(restarted)
    back = [other.client(), other.client()]
    assert (await back[0].greets(first.session, attempt=1))[4] is True
    assert (await back[1].greets(second.session))[4] is True
    back[1].asks(ops.Get(1, b"/k", LONG_S), ops.Take(2, b"/q", LONG_S))
    back[0].asks(ops.Add(2, b"/n", 1), ops.Set(3, b"/k", b"v"), ops.Push(4, b"/q", b"item"))
    assert [await back[0].reads() for _ in range(3)] == [[2, 0, 2], [3, 0, None], [4, 0, None]]
    assert [await back[1].reads() for _ in range(2)] == [[1, 0, [b"v"]], [2, 0, b"item"]]
    assert value(restarted, b"/n") == b"2"
    other.hangs_up()
    await settle()
    await restarted.close()
    await log.flow()
