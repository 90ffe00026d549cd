"""The session of a relay's PyTorch clients: greetings, refusals, outages; the test plays the server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rallypoint import net
from rallypoint.client import outage
from rallypoint.core import ops
from rallypoint.core.records import ReplyStatus
from rallypoint.protocol.native import VERSION, Frames, Hello, Welcome, decode_hello, decode_request, frame
from rallypoint.relay.torch import session as torch_session
from rallypoint.relay.torch.session import MAX_CLOSED, TorchSession
from rallypoint.relay.upstream.connection import Upstream

from .fake_upstream import FakeServer, connected, in_loop

K = b"/k"


class FakeReceiver:
    """A client's connection without a socket."""

    def __init__(self, session: TorchSession) -> None:
        self.answers: list[Any] = []
        self.lost = ""
        self.changed = asyncio.Event()
        self._session = session
        self.client = session.join(self)

    def ask(self, op: ops.Op) -> None:
        self.client.ask(op, 10)
        self._session.flush_soon()

    def deliver(self) -> None:
        while (call := self.client.next_reply()) is not None:
            self.answers.append(call.answer)
        self.changed.set()

    def session_lost(self, why: str) -> None:
        assert not self.lost
        self.lost = why
        self.changed.set()

    def read_on(self) -> None:
        pass

    async def until(self, true: Any) -> None:
        while not true():
            self.changed.clear()
            await self.changed.wait()


class Speaker:
    """The fake server's end of the session."""

    def __init__(self, server: FakeServer) -> None:
        self.server = server
        self.greeted = 0
        self.identity = b"server"

    async def hello(self) -> Hello:
        """Return the next hello, which opens a channel."""
        self.greeted += 1
        server = self.server
        await server.until(lambda: sum(len(link.data) for link in server.links) >= self.greeted)
        self.link = server.link
        self.channel = max(self.link.data)
        self._frames, self._seen = Frames(1 << 20), 0
        await server.until(lambda: self.payloads(peek=True))
        return decode_hello(self.payloads()[0])

    def payloads(self, peek: bool = False) -> list[bytes]:
        data = self.link.data[self.channel]
        if peek:
            return list(Frames(1 << 20).feed(data[self._seen :]))
        new, self._seen = data[self._seen :], len(data)
        return list(self._frames.feed(new))

    async def requests(self) -> list[Any]:
        """Return the next requests."""
        await self.server.until(lambda: self.payloads(peek=True))
        return [decode_request(payload) for payload in self.payloads()]

    def welcome(self, session: bytes, grace_s: float = 60.0, recovery_s: float = 0.0) -> None:
        welcome = Welcome(VERSION, self.identity, session, grace_s, False, recovery_s=recovery_s)
        self.says(frame((0, ReplyStatus.OK, welcome)))

    def answers(self, number: int, result: Any) -> None:
        self.says(frame((number, ReplyStatus.OK, result)))

    def refuses(self, why: str) -> None:
        self.says(frame((0, ReplyStatus.REFUSED, (self.identity, why))))

    def says(self, data: bytes) -> None:
        self.link.says(self.channel, data)

    async def open(self, **more: Any) -> Hello:
        hello = await self.hello()
        self.welcome(hello.session, **more)
        return hello


@contextlib.asynccontextmanager
async def a_session(**more: Any) -> AsyncIterator[tuple[TorchSession, Speaker]]:
    async with connected() as (upstream, server):
        session = TorchSession(upstream, **more)
        yield session, Speaker(server)
        session.close("the test ends")


@contextlib.asynccontextmanager
async def a_client() -> AsyncIterator[tuple[Speaker, FakeReceiver]]:
    """A session with one client."""
    async with a_session() as (session, speaker):
        yield speaker, FakeReceiver(session)


@in_loop
async def test_the_session_begins_with_the_first_client_and_names_its_namespace() -> None:
    async with a_session(run="job", scope=7, round=2) as (session, speaker):
        assert not speaker.server.link.data
        link = FakeReceiver(session)
        hello = await speaker.open()
        assert (hello.run, hello.scope, hello.round, hello.opens, hello.attempt) == ("job", 7, 2, True, 1)
        assert len(hello.session) == 16
        link.ask(ops.Set(0, K, b"v"))
        (request,) = await speaker.requests()
        speaker.answers(request.number, None)
        await link.until(lambda: link.answers == [None])
        assert (session.asked, session.sent, session.clients) == (1, 1, 1)


@in_loop
async def test_a_lost_welcome_opens_no_second_session() -> None:
    async with a_session() as (session, speaker):
        FakeReceiver(session)
        first = await speaker.hello()
        speaker.link.hangs_up()
        again = await speaker.hello()
        assert (again.session, again.opens, again.attempt) == (first.session, True, 2)


@in_loop
async def test_unanswered_requests_are_repeated_with_their_numbers() -> None:
    async with a_client() as (speaker, link):
        first = await speaker.open()
        link.ask(ops.Add(0, K, 1))
        sent = await speaker.requests()
        speaker.link.hangs_up()
        again = await speaker.open()
        assert (again.session, again.opens, again.attempt) == (first.session, False, 2)
        assert await speaker.requests() == sent
        speaker.answers(sent[0].number, 5)
        speaker.answers(sent[0].number, 5)
        await link.until(lambda: link.answers == [5])


@in_loop
async def test_requests_before_the_welcome_are_merged_and_sent_after_it() -> None:
    async with a_session() as (session, speaker):
        links = [FakeReceiver(session) for _ in range(3)]
        await speaker.open()
        links[0].ask(ops.WaitOrTurn(0, b"/other"))
        await speaker.requests()
        speaker.link.hangs_up()
        hello = await speaker.hello()
        for link in links[1:]:
            link.ask(ops.Add(0, K, 2))
        speaker.welcome(hello.session)
        requests = await speaker.requests()
        while len(requests) < 2:
            requests += await speaker.requests()
        assert [type(request).__name__ for request in requests] == ["WaitOrTurn", "Add"]
        assert requests[1].amount == 4


@in_loop
async def test_a_partial_reply_is_counted() -> None:
    async with connected() as (upstream, server):
        session, speaker = TorchSession(upstream), Speaker(server)
        link = FakeReceiver(session)
        await speaker.open()
        link.ask(ops.Peek(0, K))
        (request,) = await speaker.requests()
        answer = frame((request.number, ReplyStatus.OK, b"v" * 100_000))
        speaker.says(answer[:60_000])
        while not upstream.held_bytes:
            await asyncio.sleep(0)
        assert upstream.held_bytes == 60_000
        speaker.says(answer[60_000:])
        await link.until(lambda: link.answers)
        assert upstream.held_bytes == 0
        session.close("the test ends")
        assert not upstream.holders


@pytest.mark.parametrize("identity", [b"server", b"another"])
@in_loop
async def test_clients_of_a_session_that_is_unknown_are_disconnected(identity: bytes) -> None:
    async with a_session() as (session, speaker):
        link = FakeReceiver(session)
        first = await speaker.open()
        link.ask(ops.WaitOrTurn(0, K))
        await speaker.requests()
        speaker.link.hangs_up()
        await speaker.hello()
        speaker.identity = identity
        speaker.refuses("unknown session")
        await link.until(lambda: link.lost)
        assert "unknown session" in link.lost and session.clients == 0
        later = FakeReceiver(session)
        fresh = await speaker.open()
        assert fresh.session != first.session and fresh.opens
        later.ask(ops.Set(0, K, b""))
        assert [request.number for request in await speaker.requests()] == [1]


@in_loop
async def test_clients_whose_session_is_refused_are_disconnected() -> None:
    async with a_client() as (speaker, link):
        await speaker.hello()
        speaker.refuses("a later round of 'job' has begun")
        await link.until(lambda: link.lost)
        assert "a later round of 'job' has begun" in link.lost


@in_loop
async def test_a_server_that_is_away_too_long_loses_the_session(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(outage, "DOWN_S", 0.05)
    monkeypatch.setattr(outage, "BRIEF_S", 0.0)
    monkeypatch.setattr("rallypoint.relay.upstream.outage_timer.DOWN_S", 0.05)
    async with a_client() as (speaker, link):
        await speaker.open(grace_s=0.1, recovery_s=0.4)  # the longer one counts
        link.ask(ops.WaitOrTurn(0, K))
        await speaker.requests()
        speaker.server.stop()
        await link.until(lambda: link.lost)
        assert "no answer from the server" in link.lost and "for 0.4 s" in link.lost
        said = [record.getMessage() for record in caplog.records]
        assert sum("is down for" in line and "waiting until" in line for line in said) == 1
        assert sum("disconnecting all PyTorch clients (1): no answer" in line for line in said) == 1


@in_loop
async def test_an_outage_and_its_end_are_logged_once_each(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "rallypoint.client")
    monkeypatch.setattr(outage, "DOWN_S", 0.05)
    monkeypatch.setattr("rallypoint.relay.upstream.outage_timer.DOWN_S", 0.05)
    said = asyncio.Event()
    caplog.handler.addFilter(lambda record: said.set() or True)  # type: ignore[func-returns-value]
    async with a_client() as (speaker, link):
        await speaker.open(grace_s=60.0)
        speaker.server.stop()
        await said.wait()
        await speaker.server.start()
        await speaker.open()
        link.ask(ops.Set(0, K, b""))
        await speaker.requests()
        lines = [record.getMessage() for record in caplog.records if record.name == "rallypoint.client"]
        assert len(lines) == 2 and "is down for" in lines[0] and "is back after" in lines[1]


@in_loop
async def test_a_server_that_never_answers_ends_the_session_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_session, "OPENING_S", 0.1)
    upstream = Upstream(net.Endpoints([net.Endpoint("127.0.0.1", 1)]))
    session = TorchSession(upstream)
    link = FakeReceiver(session)
    await link.until(lambda: link.lost)
    assert "no answer from the server at 127.0.0.1:1 for 0.1 s" in link.lost


@in_loop
async def test_a_channel_that_is_closed_again_and_again_ends_the_session() -> None:
    async with a_client() as (speaker, link):
        for attempt in range(MAX_CLOSED):
            await speaker.open()
            if not attempt:
                link.ask(ops.Set(0, K, b"poison"))
            await speaker.requests()
            assert not link.lost
            speaker.link.closes_channel(speaker.channel, "a frame of 9 bytes")
        await link.until(lambda: link.lost)
        assert "closed the session's channel: a frame of 9 bytes" in link.lost


@in_loop
async def test_a_channel_that_is_closed_now_and_then_is_opened_again() -> None:
    async with a_client() as (speaker, link):
        for attempt in range(2 * MAX_CLOSED):
            await speaker.open()
            link.ask(ops.Set(0, K, b""))
            (request,) = await speaker.requests()
            speaker.answers(request.number, None)
            await link.until(lambda made=attempt: len(link.answers) > made)
            speaker.link.closes_channel(speaker.channel, "why not")
        assert not link.lost


@in_loop
async def test_a_malformed_reply_closes_the_channel_only() -> None:
    async with a_client() as (speaker, link):
        await speaker.open()
        link.ask(ops.Set(0, K, b""))
        sent = await speaker.requests()
        speaker.says(frame("nonsense"))
        await speaker.open()
        assert await speaker.requests() == sent


@in_loop
async def test_a_closed_session_says_goodbye_and_accepts_no_client() -> None:
    async with a_session() as (session, speaker):
        link = FakeReceiver(session)
        await speaker.open()
        link.ask(ops.WaitOrTurn(0, K))
        await speaker.requests()
        session.close("the round is over")
        assert link.lost == "the round is over"
        assert [type(request).__name__ for request in await speaker.requests()] == ["Drop", "Bye"]
        late = FakeReceiver(session)
        await late.until(lambda: late.lost == "the round is over")
