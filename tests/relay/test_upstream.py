"""The relay's connection to its server: channels, credit both ways, fairness, and connections that are made again."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator

import pytest
from tests.outage_log import LogRecorder
from tests.relay.fake_upstream import FakeServer, Owner, connected, in_loop, is_connected

from rallypoint import net
from rallypoint.protocol import channels
from rallypoint.protocol.channels import MAX_CHUNK, PREFACE, WINDOW
from rallypoint.relay.upstream import channel_connection, connection
from rallypoint.relay.upstream.connection import Upstream


@pytest.fixture
def told() -> Iterator[LogRecorder]:
    """Record the log."""
    handler, log = LogRecorder(), logging.getLogger("rallypoint.relay")
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)


# Bytes


@in_loop
async def test_bytes_pass_both_ways_on_channels_of_their_own() -> None:
    async with connected() as (up, server):
        one, other = Owner(up), Owner(up)
        one.channel.write(b"a")
        other.channel.write(b"b")
        one.channel.write(b"c")
        await server.until(lambda: server.link.data == {1: b"ac", 2: b"b"})
        server.link.says(2, b"to the other")
        server.link.says(1, b"to the one")
        await one.until(lambda: one.data == b"to the one")
        assert other.data == b"to the other"
        assert not one.writables, "nothing had to wait"
        assert up.statistics()["channels"] == 2


@in_loop
async def test_writes_of_one_turn_are_one_write() -> None:
    async with connected() as (up, server):
        owners = [Owner(up) for _ in range(500)]
        for owner in owners:
            owner.channel.write(b"hello")
            owner.channel.write(b" you")
        await server.until(lambda: len(server.link.data) == 500)
        assert set(server.link.data.values()) == {b"hello you"}
        assert server.link.order == list(range(1, 501)), "one frame a channel"
        assert server.link.reads == 1


@in_loop
async def test_a_channel_gets_its_number_with_its_first_bytes() -> None:
    """The server accepts numbers in growing order only, and a channel that sent nothing has no number to close."""
    async with connected() as (up, server):
        silent, late, early = Owner(up), Owner(up), Owner(up)
        early.channel.write(b"early")
        await server.until(lambda: server.link.data)
        silent.channel.close()
        late.channel.write(b"late")
        await server.until(lambda: len(server.link.data) == 2)
        assert server.link.data == {1: b"early", 2: b"late"}
        assert not server.link.closes and up.channels == 2


# Credit


@in_loop
async def test_data_beyond_the_credit_is_not_sent() -> None:
    async with connected() as (up, server):
        owner, data = Owner(up), random.Random(1).randbytes(3 * WINDOW)
        owner.channel.write(data)
        assert owner.channel.unsent == 2 * WINDOW
        await server.until(lambda: len(server.link.data.get(1, b"")) == WINDOW)
        assert owner.channel.unsent == 2 * WINDOW
        server.link.grants(1, 10)
        await server.until(lambda: len(server.link.data[1]) > WINDOW)
        assert len(server.link.data[1]) == WINDOW + 10
        server.link.grants(1, WINDOW)
        await server.until(lambda: len(server.link.data[1]) > 2 * WINDOW)
        assert not owner.writables
        server.link.grants(1, WINDOW)
        await server.until(lambda: len(server.link.data[1]) == 3 * WINDOW)
        assert server.link.data[1] == data
        assert (owner.writables, owner.channel.unsent) == (1, 0)


@in_loop
async def test_a_channel_without_credit_delays_no_other() -> None:
    async with connected() as (up, server):
        full, small = Owner(up), Owner(up)
        full.channel.write(bytes(4 * WINDOW))
        small.channel.write(b"first")
        await server.until(lambda: len(server.link.data.get(1, b"")) == WINDOW)
        assert server.link.order.index(2) == 1, "in turn, a chunk each"
        small.channel.write(b" second")
        await server.until(lambda: server.link.data[2] == b"first second")
        assert len(server.link.data[1]) == WINDOW


@in_loop
async def test_chunks_of_busy_channels_alternate() -> None:
    async with connected() as (up, server):
        owners = [Owner(up) for _ in range(3)]
        for owner in owners:
            owner.channel.write(bytes(WINDOW))
        await server.until(lambda: sum(map(len, server.link.data.values())) == 3 * WINDOW)
        assert server.link.order == [1, 2, 3] * (WINDOW // MAX_CHUNK)


@in_loop
async def test_the_server_gets_credit_for_processed_data() -> None:
    async with connected() as (up, server):
        owner = Owner(up, takes=False)
        owner.channel.write(b"hello")
        await server.until(lambda: server.link.data)
        server.link.says(1, bytes(WINDOW))
        await owner.until(lambda: len(owner.data) == WINDOW)
        owner.channel.consumed(WINDOW // 2 - 1)
        owner.channel.write(b"!")
        await server.until(lambda: server.link.data[1] == b"hello!")
        assert not server.link.credit, "half a window at a time"
        owner.channel.consumed(1)
        await server.until(lambda: server.link.credit == {1: WINDOW // 2})
        owner.channel.consumed(WINDOW // 2)
        await server.until(lambda: server.link.credit == {1: WINDOW})


@in_loop
async def test_a_transport_that_is_full_makes_channels_wait() -> None:
    """The buffers of the kernel and the transport are filled; the rest waits where it is counted."""
    async with connected() as (up, server):
        server.link.transport.pause_reading()
        owners = [Owner(up) for _ in range(80)]
        for owner in owners:
            owner.channel.write(bytes(WINDOW))
        while not (sum(owner.channel.unsent for owner in owners) and up._connection and up._connection.paused):
            await asyncio.sleep(0)
        waiting = sum(owner.channel.unsent for owner in owners)
        assert waiting > 40 * WINDOW
        later = Owner(up)
        later.channel.write(b"later")
        assert later.channel.unsent == 5
        server.link.transport.resume_reading()
        await server.until(lambda: sum(map(len, server.link.data.values())) == 80 * WINDOW + 5)
        assert not any(owner.channel.unsent for owner in [*owners, later])
        await later.until(lambda: later.writables == 1)


@in_loop
async def test_credit_beyond_the_window_ends_the_connection() -> None:
    async with connected() as (up, server):
        owner = Owner(up)
        owner.channel.write(b"x")
        await server.until(lambda: server.link.data)
        server.link.grants(1, 2)
        await owner.until(lambda: owner.ends)
        assert owner.ends == [
            f"protocol error by the server: credit for {WINDOW + 1} bytes on channel 1, the window is {WINDOW}"
        ]


@in_loop
async def test_data_beyond_the_window_ends_the_connection() -> None:
    async with connected() as (up, server):
        owner = Owner(up, takes=False)
        owner.channel.write(b"x")
        await server.until(lambda: server.link.data)
        server.link.says(1, bytes(WINDOW + 1))
        await owner.until(lambda: owner.ends)
        assert "the window is" in owner.ends[0] and len(owner.data) == WINDOW


@in_loop
@pytest.mark.parametrize("bad", [channels.data_frames(7, b"x"), channels.data_frames(0, b"x"), b"\1\0\0\0\0\0\0\x09"])
async def test_frames_that_break_the_protocol_end_the_connection(bad: bytes) -> None:
    async with connected() as (up, server):
        owner = Owner(up)
        server.link.transport.write(bad)
        await owner.until(lambda: owner.ends)
        assert owner.ends[0].startswith("protocol error by the server: ")
        await is_connected(up, times=2)


# Ends


@in_loop
async def test_the_server_closes_a_channel() -> None:
    async with connected() as (up, server):
        one, other = Owner(up), Owner(up)
        one.channel.write(b"x")
        other.channel.write(b"y")
        await server.until(lambda: len(server.link.data) == 2)
        server.link.says(1, b"last words")
        server.link.closes_channel(1, "not a greeting: …")
        server.link.grants(1, 1)
        server.link.says(2, b"goes on")
        await other.until(lambda: other.data)
        assert (one.data, one.ends) == (b"last words", ["not a greeting: …"])
        one.channel.write(b"ignored")
        one.channel.consumed(WINDOW)
        one.channel.close()
        other.channel.write(b"!")
        await server.until(lambda: server.link.data[2] == b"y!")
        assert server.link.data[1] == b"x" and not server.link.closes and not server.link.credit
        assert up.channels == 1


@in_loop
async def test_closing_sends_what_was_written_first() -> None:
    async with connected() as (up, server):
        owner = Owner(up, takes=False)
        owner.channel.write(bytes(WINDOW) + b"goodbye")
        owner.channel.close()
        owner.channel.write(b"too late")
        await server.until(lambda: len(server.link.data.get(1, b"")) == WINDOW)
        assert not server.link.closes and up.held_bytes == 7
        server.link.says(1, bytes(WINDOW))
        await server.until(lambda: server.link.credit == {1: WINDOW})  # or the server could not read further
        server.link.grants(1, WINDOW)
        await server.until(lambda: server.link.closes)
        assert server.link.data[1] == bytes(WINDOW) + b"goodbye"
        assert not owner.data and not owner.ends and not owner.writables
        assert up.channels == up.held_bytes == 0


@in_loop
async def test_unsent_data_of_closed_channels_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_connection, "LINGERING_BYTES", 15)
    async with connected() as (up, server):
        owners = [Owner(up) for _ in range(2)]
        for owner in owners:
            owner.channel.write(bytes(WINDOW + 10))
        await server.until(lambda: sum(map(len, server.link.data.values())) == 2 * WINDOW)
        for owner in owners:
            owner.channel.close()
        assert up.held_bytes == 10
        await server.until(lambda: server.link.closes == [2])
        assert up.channels == 1
        server.link.closes_channel(1)
        third = Owner(up)
        third.channel.write(b"x")
        await server.until(lambda: 3 in server.link.data)
        server.link.says(3, b"x")
        await third.until(lambda: third.data)
        assert up.channels == 1 and up.held_bytes == 0


@in_loop
async def test_a_lost_connection_ends_every_channel_once() -> None:
    async with connected() as (up, server):
        owners = [Owner(up) for _ in range(10)]
        for owner in owners[:5]:
            owner.channel.write(bytes(2 * WINDOW))
        owners[0].channel.close()
        await server.until(lambda: len(server.link.data) == 5)
        server.link.hangs_up()
        await owners[9].until(lambda: owners[9].ends)
        await is_connected(up, times=2)
        assert [len(owner.ends) for owner in owners] == [0] + [1] * 9
        again = Owner(up)
        again.channel.write(b"again")
        await server.until(lambda: server.link.data)
        assert len(server.links) == 2 and server.link.data == {1: b"again"}, "numbers begin again"


@in_loop
async def test_a_connection_to_a_vanished_host_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rallypoint.liveness.VANISHED_S", 0.3)
    async with connected() as (up, _):
        owner = Owner(up)
        monkeypatch.setattr("rallypoint.liveness.silence_s", lambda sock: 7.0)
        await owner.until(lambda: owner.ends)
        assert owner.ends == ["nothing was received for 7.0 s; its host is gone, or the network between"]
        await is_connected(up, times=2)


@in_loop
async def test_close_ends_the_connection_and_starts_no_other() -> None:
    async with connected() as (up, server):
        owner = Owner(up)
        owner.channel.write(b"the last")
        await up.close()
        await server.until(lambda: server.link.lost)
        assert server.link.data == {1: b"the last"}
        assert len(owner.ends) == 1 and not up.connected and len(server.links) == 1


@in_loop
@pytest.mark.parametrize("answer", [b"", channels.ACCEPTED])
async def test_close_is_safe_at_every_step_of_connecting(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every turn of an attempt: asyncio may lose the cancellation of one that completes at that moment."""
    monkeypatch.setattr("rallypoint.client.routing.search.backoff_s", lambda times: 0.0)
    server = FakeServer(answer)
    await server.start()
    endpoints = server.endpoints
    if not answer:
        server.stop()
    for turns in range(60):
        up = Upstream(endpoints)
        up.start()
        for _ in range(turns):
            await asyncio.sleep(0)
        await up.close()
    server.stop()


# Connecting


@in_loop
async def test_callbacks_come_at_every_connection() -> None:
    async with connected() as (up, server):
        calls: list[str] = []
        up.on_connected(lambda: calls.append("late"))
        assert not calls, "soon, not at once"
        await asyncio.sleep(0)
        assert calls == ["late"]
        forgotten = asyncio.Event()
        up.on_connected(forgotten.set)
        up.forget(forgotten.set)
        for times in (2, 3):
            server.link.hangs_up()
            await is_connected(up, times)
        assert calls == ["late"] * 3 and not forgotten.is_set()


@in_loop
async def test_an_unavailable_server_is_tried_until_it_is_back(
    told: LogRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "DOWN_S", 0.0)
    async with connected() as (up, server):
        owner = Owner(up)
        server.stop()
        await owner.until(lambda: owner.ends)
        assert not up.connected
        with pytest.raises(ConnectionError, match="not connected to 127"):
            up.open_channel(owner)
        while not told.lines:
            await asyncio.sleep(0)
        assert up.why == "refused, nothing listens there"
        assert told.lines[0].endswith(": refused, nothing listens there")
        await server.start()
        await is_connected(up, times=2)
        assert (up.why, up.connected) == ("", True)
        assert [line.split(" after ")[0] for line in told.lines[1:]] == [
            f"connected to the server at 127.0.0.1:{server.port}"
        ]


@in_loop
@pytest.mark.parametrize(
    ("answer", "why"),
    [(PREFACE[-4:], connection.NO_CHANNELS), (b"HTTP/1.1 400 Bad Request", "not a store: it replied b'HTTP'")],
)
async def test_another_kind_of_server_is_named_and_tried_again(answer: bytes, why: str) -> None:
    server = FakeServer(answer)
    await server.start()
    up = Upstream(server.endpoints)
    up.start()
    await server.until(lambda: len(server.links) >= 3)
    assert up.why == why and not up.connected
    server.answer = channels.ACCEPTED
    await is_connected(up)
    assert up.why == ""
    await up.close()
    server.stop()


@in_loop
async def test_a_silent_server_is_replaced_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rallypoint.client.routing.search.PATIENCE_S", (0.05, 0.1))
    silent, server = FakeServer(b""), FakeServer()
    await silent.start()
    await server.start()
    up = Upstream(net.Endpoints([*silent.endpoints, *server.endpoints]))
    up.start()
    await is_connected(up)
    assert str(up.route.at) == f"127.0.0.1:{server.port}"
    assert up.peer == f"127.0.0.1:{silent.port},127.0.0.1:{server.port}"
    await up.close()
    silent.stop()
    server.stop()


@in_loop
async def test_a_server_that_disconnects_at_once_is_tried_with_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []

    def no_pause(times: int) -> float:
        counted.append(times)
        return 0.0

    monkeypatch.setattr("rallypoint.client.routing.route.backoff_s", no_pause)
    async with connected() as (up, server):
        for times in range(2, 7):
            server.link.hangs_up()
            await is_connected(up, times)
            await server.until(lambda: server.link.accepted and not server.link.lost)
        assert counted == [0, 1, 2, 3]
        owner = Owner(up)
        owner.channel.write(b"x")
        await server.until(lambda: server.link.data)
        server.link.says(1, b"of use")
        await owner.until(lambda: owner.data)
        server.link.hangs_up()
        await is_connected(up, times=7)
        assert counted == [0, 1, 2, 3], "after a useful connection, the server is tried again at once"


@in_loop
async def test_cuts_at_random_end_every_channel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rallypoint.client.routing.route.backoff_s", lambda times: 0.0)
    chance = random.Random(7)
    async with connected() as (up, server):
        for times in range(2, 40):
            owners, link = [Owner(up) for _ in range(5)], server.link
            words = [b"%d " % word for word in range(chance.randrange(200))]
            for word in words:
                for owner in owners:
                    owner.channel.write(word)
                if chance.random() < 0.1:
                    await asyncio.sleep(0)
            link.hangs_up()
            await is_connected(up, times)
            assert all(b"".join(words).startswith(data) for data in link.data.values())
            assert all(len(owner.ends) == 1 for owner in owners)
