"""Connections with channels: many sessions on one connection, none of which waits for another.

The relay is a fake whose transport the test controls (`fake_relay.py`); the server is real, in memory or on a log.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from tests.server.fake_log import FakeLog, both, in_memory, on_log
from tests.server.fake_relay import FakeRelay
from tests.server.peers import NativePeer, settle, value_of

from rallypoint import net
from rallypoint.core import ops
from rallypoint.core.costs import SESSION_BYTES
from rallypoint.core.machines import exchange
from rallypoint.core.records import DONE, ReplyStatus
from rallypoint.protocol import channels
from rallypoint.protocol.channels import CREDIT, DATA, MAX_CHUNK, SHARED, WINDOW, data_frames, data_head
from rallypoint.protocol.native import frame
from rallypoint.server.connections import multiplexed
from rallypoint.server.connections.native_connection import REPLIES_BYTES
from rallypoint.server.server import StoreServer
from rallypoint.server.settings import Settings

MIB = 1024 * 1024
LONG_S = 1000.0
MANY_CHANNELS = 266
IDS = [bytes([letter]) * 16 for letter in b"abcdef"]


async def relay(server: StoreServer) -> FakeRelay:
    return await FakeRelay(server).opens()


async def put(server: StoreServer, key: bytes, value: bytes) -> None:
    peer = NativePeer(server)
    await peer.greets()
    await peer.asked(ops.Set(1, key, value))


# Sessions and their channels


@both
async def test_two_sessions_on_one_connection(server: StoreServer, log: FakeLog | None) -> None:
    one = await relay(server)
    first, second = await one.greeted(), await one.greeted()
    first.asks(ops.Get(1, b"/k", LONG_S))
    assert await second.asked(ops.Set(1, b"/k", b"v")) is None
    assert await first.reads() == [1, ReplyStatus.OK, [b"v"]]
    assert first.session != second.session
    facts, clients, sessions = server.statistics()
    assert [session["name"] for session in sessions] == ["client 1", "client 2"]
    assert facts["connections"] == 1
    assert [(peer["speaks"], peer["channels"]) for peer in clients] == [("rallypoint channels", 2)]


@in_memory()
async def test_the_statistics_say_what_channels_wait_for(server: StoreServer, log: FakeLog | None) -> None:
    one = await relay(server)
    for key in (b"/a", b"/b"):
        (await one.greeted()).asks(ops.Get(1, key, LONG_S))
    assert next(server.statistics().clients)["waits_for"] == ["/a", "/b"]


@both
async def test_a_greeting_may_come_in_pieces(server: StoreServer, log: FakeLog | None) -> None:
    one = FakeRelay(server)
    client = one.client()
    said = channels.PREFACE + data_frames(1, client.hello()[:9]) + data_frames(1, client.hello()[9:])
    for at in range(len(said)):
        one.says(said[at : at + 1])
    assert await one.hears(4) == channels.ACCEPTED
    assert (await client.reads())[1] == ReplyStatus.OK


@both
async def test_replies_of_one_turn_are_one_write(server: StoreServer, log: FakeLog | None) -> None:
    one, other = await relay(server), await relay(server)
    clients = [await one.greeted() for _ in range(5)]
    before = one.writes
    one.says(b"".join(data_frames(client.number, frame(ops.Get(1, b"/k", LONG_S))) for client in clients))
    await settle()
    assert one.writes == before
    await (await other.greeted()).asked(ops.Set(1, b"/k", b"v"))
    assert [await client.reads() for client in clients] == [[1, ReplyStatus.OK, [b"v"]]] * 5
    assert one.writes == before + 1, "delivered later"
    one.says(b"".join(data_frames(client.number, frame(ops.Peek(2, b"/k"))) for client in clients))
    assert [await client.reads() for client in clients] == [[2, ReplyStatus.OK, b"v"]] * 5
    assert one.writes == before + 2, "answered at once"


@both
async def test_an_answer_to_several_clients_of_a_relay_is_sent_once(server: StoreServer, log: FakeLog | None) -> None:
    one, other = await relay(server), await relay(server)
    clients = [await one.greeted(), await one.greeted(), await other.greeted()]
    for number, given in enumerate((b"d" * 1000, b"d" * MAX_CHUNK), 1):
        one.order.clear()
        for rank, client in enumerate(clients):
            give = exchange.ExchangeGive(3, rank, given if rank else b"first", "all_gather")
            client.asks(ops.Act(number, b"/x", str(rank), number, give, LONG_S))
        expected = [number, ReplyStatus.OK, [DONE, [b"first", given, given]]]
        assert [await client.reads() for client in clients] == [expected] * 3
        shared = [seen for seen in one.order if seen.kind == SHARED]
        assert {seen.channel for seen in shared} == {2}, "the number of channels that share it"
        assert sum(seen.size for seen in shared) < 2 * len(given) + 200, "the reply is in it once"


@both
async def test_a_channel_without_credit_gets_a_shared_reply_later(server: StoreServer, log: FakeLog | None) -> None:
    await put(server, b"/large", b"v" * (2 * WINDOW))
    one = await relay(server)
    mute, other = await one.greeted(), await one.greeted()
    mute.credits = False
    gives = [exchange.ExchangeGive(2, rank, b"data %d" % rank, "all_gather") for rank in range(2)]
    mute.asks(ops.Act(1, b"/x", "0", 1, gives[0], LONG_S), ops.Peek(2, b"/large"))
    while mute.window:
        await one.reads()
    other.asks(ops.Act(1, b"/x", "1", 1, gives[1], LONG_S))
    assert await other.reads() == [1, ReplyStatus.OK, [DONE, [b"data 0", b"data 1"]]]
    mute.credits = True
    mute.grants(WINDOW)
    assert (await mute.reads())[0] == 2
    assert await mute.reads() == [1, ReplyStatus.OK, [DONE, [b"data 0", b"data 1"]]]


# Credit


@both
async def test_a_client_that_never_reads_delays_no_other_client(server: StoreServer, log: FakeLog | None) -> None:
    await put(server, b"/large", b"v" * MIB)
    one = await relay(server)
    mute, other = await one.greeted(), await one.greeted()
    mute.credits = False
    mute.asks(ops.Add(1, b"/n", 1), *(ops.Peek(number, b"/large") for number in range(2, 102)), ops.Add(102, b"/n", 1))
    for number in range(1, 21):
        assert await other.asked(ops.Add(number, b"/m", 1)) == number
    assert mute.window == 0, "the server used the whole window, and no more"
    assert server.statistics().facts["bytes"] - MIB < MIB, "their replies are not made yet, and share one value"
    mute.credits = True
    mute.grants(WINDOW)
    answers = dict([(await mute.reads())[::2] for _ in range(102)])
    assert answers == {1: 1, 102: 2, **dict.fromkeys(range(2, 102), b"v" * MIB)}
    assert server.statistics().facts["bytes"] < 2 * MIB


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
    assert await client.reads() == [1, ReplyStatus.OK, None] and value_of(server, b"/large") == b"v" * (8 * MIB)
    assert await other.asked(ops.Ping(1)) is None
    given = [grant for grant in one.order if grant.kind == CREDIT]
    assert len(given) <= 8 * MIB // (WINDOW // 2) + 1, "credit is granted half a window at a time"
    assert sum(grant.size for grant in given) + WINDOW >= 8 * MIB


@both
async def test_a_backlog_of_one_channel_does_not_delay_another(server: StoreServer, log: FakeLog | None) -> None:
    await put(server, b"/k", b"v" * 16_384)
    one = await relay(server)
    busy, other = await one.greeted(), await one.greeted()
    count = 2000
    busy.asks(*(ops.Peek(number, b"/k") for number in range(1, count + 1)))
    other.asks(ops.Ping(1))
    assert await other.reads() == [1, ReplyStatus.OK, None]
    assert busy.received < count * 16_384 // 10, "before a tenth of the backlog was answered"
    assert [(await busy.reads())[0] for _ in range(count)] == list(range(1, count + 1))
    assert server.statistics().facts["bytes"] < 2 * MIB


@both
async def test_replies_made_one_by_one_stay_within_the_window(server: StoreServer, log: FakeLog | None) -> None:
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
async def test_replies_caused_by_other_clients_are_counted(server: StoreServer, log: FakeLog | None) -> None:
    one = await relay(server)
    mute, other = await one.greeted(), await one.greeted()
    mute.credits = False
    mute.asks(ops.Get(1, b"/large", LONG_S), ops.Get(2, b"/more", LONG_S))
    await put(server, b"/large", b"v" * MIB)
    while mute.window:
        await one.reads()
    await put(server, b"/more", b"v" * MIB)
    memory = server.listener.memory
    assert memory._shared_bytes == 2 * MIB and memory.holders, "counted although the relay has sent nothing since"
    mute.credits = True
    mute.grants(WINDOW)
    assert (await mute.reads())[2] == [b"v" * MIB]
    assert (await mute.reads())[2] == [b"v" * MIB]
    assert await other.asked(ops.Ping(1)) is None
    assert server.statistics().facts["bytes"] < 2 * MIB + MIB // 2


@both
async def test_a_reply_shared_by_many_channels_is_counted_once(server: StoreServer, log: FakeLog | None) -> None:
    one = await relay(server)
    clients = [await one.greeted() for _ in range(8)]
    for rank, client in enumerate(clients):
        client.credits = False
        give = exchange.ExchangeGive(8, rank, b"v" * MIB if not rank else b"", "broadcast")
        await client.streams(frame(ops.Act(1, b"/x", str(rank), 1, give, LONG_S)))
    while any(client.window for client in clients):
        await one.reads()
    assert server.statistics().facts["bytes"] < 3 * MIB
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
    assert client.closed is None, "the channel still has data to send"
    client.credits = True
    client.grants(WINDOW)
    assert (await client.reads())[2] == b"v" * MIB
    assert await client.ends() == "", "and the round is over"


@both
async def test_a_full_inbox_gets_no_credit(server: StoreServer, log: FakeLog | None) -> None:
    """Requests of a client that reads no replies stay within its window, in pieces of any size."""
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
    assert mute.credit == 0 and server.statistics().facts["bytes"] - MIB < 2 * MIB + WINDOW
    mute.credits = True
    mute.grants(WINDOW)
    assert len((await mute.reads())[2]) == MIB
    assert [(await mute.reads())[0] for _ in range(1000)] == list(range(2, 1002))
    while mute.credit < WINDOW // 2:  # the requests run in slices
        await settle()
        one.drain()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (data_frames(0, b"x"), "data for channel 0"),
        (data_head(1, 0)[:7] + b"\6", "unknown kind of frame"),
        (data_head(1, 0)[:7] + b"\3", "a shared frame, which only servers send"),
        (data_head(1, MAX_CHUNK + 1), "the limit is"),
    ],
)
def test_invalid_frames_break_the_connection(said: bytes, why: str, caplog: pytest.LogCaptureFixture) -> None:
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
    assert "channel 1 received 1 bytes more than its window allows" in caplog.text


@both
async def test_all_channels_wait_while_the_relay_does_not_read(server: StoreServer, log: FakeLog | None) -> None:
    await put(server, b"/large", b"v" * (MIB // 8))
    one, other = await relay(server), NativePeer(server)
    clients = [await one.greeted() for _ in range(8)]
    await other.greets()
    asked = [ops.Add(1, b"/n", 1), *(ops.Peek(number, b"/large") for number in range(2, 32))]
    one.says(b"".join(data_frames(client.number, b"".join(map(frame, asked))) for client in clients))
    await settle()
    assert one.stopped and len(one.pending) < 2 * MIB
    assert await other.asked(ops.Peek(1, b"/n")) == b"8", "changes do not wait"
    held = server.statistics().facts["bytes"]
    assert held < 8 * (REPLIES_BYTES + MIB), "their replies are not made yet"
    for client in clients:
        answers = [(await client.reads())[0] for _ in range(31)]
        assert sorted(answers) == list(range(1, 32))
    assert not one.stopped and server.statistics().facts["bytes"] < MIB


# The end of a channel


@both
async def test_a_session_can_be_resumed_after_its_channel_was_closed(server: StoreServer, log: FakeLog | None) -> None:
    one = await relay(server)
    first, second = await one.greeted(), await one.greeted()
    await first.asked(ops.SetLease(1, b"/lease", b"v", 0.0))
    first.closes()
    await settle()
    session = server.state.sessions_by_id[first.session]
    assert session.handler is None and not session.attached
    first.grants(10)
    first.says(frame(ops.Add(2, b"/n", 1)))  # it may have been in flight
    assert await second.asked(ops.Add(1, b"/n", 1)) == 1
    assert first.closed is None, "it is ignored"
    again = one.client()
    assert (await again.greets(first.session))[4] is True, "resumed on another channel of the same connection"
    assert session.handler is not None and session.attached and value_of(server, b"/lease") == b"v"


@both
async def test_bad_input_on_a_channel_closes_only_that_channel(server: StoreServer, log: FakeLog | None) -> None:
    one = await relay(server)
    first, second, third = await one.greeted(), await one.greeted(), one.client()
    first.says(frame((99, 1)))
    assert (await first.reads())[1] == ReplyStatus.ERROR, "as on a connection of its own"
    first.says(frame("nonsense"))
    third.says(frame("nonsense"))
    assert "not a request" in await first.ends()
    assert "malformed hello" in await third.ends()
    assert await second.asked(ops.Ping(1)) is None
    await settle()
    assert server.state.sessions_by_id[first.session].handler is None
    assert next(server.statistics().clients)["channels"] == 1


@both
async def test_a_resumed_session_closes_its_old_channel(server: StoreServer, log: FakeLog | None) -> None:
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
async def test_a_channel_without_a_complete_hello_is_closed(server: StoreServer, log: FakeLog | None) -> None:
    one = await relay(server)
    first, silent = await one.greeted(), one.client()
    silent.says(silent.hello()[:5])
    assert "no complete greeting" in await silent.ends()
    later = one.client()
    later.says(b"\0")
    assert "no complete greeting" in await later.ends()
    assert await first.asked(ops.Ping(1)) is None


def test_the_number_of_channels_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
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
    clients = [await one.greeted() for _ in range(MANY_CHANNELS)]
    assert all(session.attached for session in server.state.sessions.values())
    one.hangs_up()
    while any(session.attached for session in server.state.sessions.values()):
        await settle()
    assert len(server.state.sessions) == len(clients), "in their grace period"
    assert server.statistics().facts["bytes"] < MIB + len(clients) * SESSION_BYTES


# Resuming


@both
async def test_a_session_is_resumed_by_channel_and_by_connection(server: StoreServer, log: FakeLog | None) -> None:
    one = await relay(server)
    client = await one.greeted()
    assert await client.asked(ops.Add(1, b"/n", 1)) == 1
    client.asks(ops.Add(2, b"/n", 1), ops.WatchPrefix(3, b"/w"))  # its reply is lost
    await settle()
    one.hangs_up()
    await settle()
    plain = NativePeer(server)
    assert (await plain.greets(client.session))[4] is True
    assert await plain.asked(ops.Add(2, b"/n", 1)) == 2
    plain.asks(ops.Set(4, b"/w", b"v"))
    await settle()
    plain.hangs_up()
    await settle()
    back = (await relay(server)).client()
    assert (await back.greets(client.session))[4] is True
    assert await back.reads() == [0, 1, [3, 3, b"/w", b"v"]], "the push is repeated"
    assert await back.asked(ops.Add(2, b"/n", 1)) == 2
    assert value_of(server, b"/n") == b"2"


@pytest.mark.parametrize("kept", ["memory", "log"])
def test_a_dialogue_that_is_cut_anywhere_takes_effect_once(kept: str) -> None:
    async def test(server: StoreServer, log: FakeLog | None) -> None:
        cut = 0
        while await dialogue(server, cut):
            cut += 1
        assert cut > 200

    (in_memory() if kept == "memory" else on_log)(test)()


async def dialogue(server: StoreServer, cut: int) -> bool:
    """Let two clients work, cut them off after some bytes, and let them resume; return whether there was a cut."""
    key, ids = b"/%d" % cut, [cut.to_bytes(8, "big") + letter * 8 for letter in (b"a", b"b")]
    asked = [ops.Add(1, key, 1), ops.Push(2, key, b"item"), ops.Add(3, key, 1)]
    one = FakeRelay(server)
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
        assert {status for _, status, _ in answers} == {ReplyStatus.OK}
    assert value_of(server, key) == b"4"
    assert await client.asked(ops.QueueLen(4, key)) == 2
    for again in other.clients.values():
        again.asks(ops.Bye(5))
    await settle()
    other.hangs_up()
    return cut < len(said)


@on_log
async def test_two_channels_continue_after_a_restart(server: StoreServer, log: FakeLog) -> None:
    one = await relay(server)
    first, second = await one.greeted(IDS[0], opens=True), await one.greeted()
    await first.asked(ops.Add(1, b"/n", 1))
    second.asks(ops.Get(1, b"/k", LONG_S), ops.BlockingPop(2, b"/q", LONG_S))
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
    back[1].asks(ops.Get(1, b"/k", LONG_S), ops.BlockingPop(2, b"/q", LONG_S))
    back[0].asks(ops.Add(2, b"/n", 1), ops.Set(3, b"/k", b"v"), ops.Push(4, b"/q", b"item"))
    assert [await back[0].reads() for _ in range(3)] == [[2, 0, 2], [3, 0, None], [4, 0, None]]
    assert [await back[1].reads() for _ in range(2)] == [[1, 0, [b"v"]], [2, 0, b"item"]]
    assert value_of(restarted, b"/n") == b"2"
    other.hangs_up()
    await settle()
    await restarted.close()
    await log.flow()
