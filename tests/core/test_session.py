"""The server's end of the native protocol: repeated numbers, kept answers, and the end of a session.

`FakeServer` is a real server without sockets, with a fake clock. The last test is a simulation: clients whose
connections are cut at random points and lose bytes both ways; each failure names its seed.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from rallypoint.core import ops, records, session
from rallypoint.core.costs import KEPT_BYTES
from rallypoint.core.records import ReplyStatus
from rallypoint.core.session import Session
from rallypoint.protocol import BadMessage, native
from rallypoint.protocol.native import Frames, Hello, frame
from rallypoint.protocol.native_client import ClientProtocol, Reply
from rallypoint.server.connections import native_connection

from .fake_server import Clock, FakeConnection, items_of, new_server, value_of, waiting

GRACE_S = 2.0
SEEDS, FIRST_SEED = 2000, int(os.environ.get("FIRST_SEED", "0"))


class FakeServer:
    """A server without sockets, and its clock."""

    def __init__(self, **limits: int) -> None:
        self.clock = Clock()
        self.real = new_server(grace_s=GRACE_S, clock=self.clock, **limits)
        self.state = self.real.state
        self.engine = self.state.namespaces[0].engine

    @property
    def sessions(self) -> list[Session]:
        return list(self.state.sessions.values())

    @property
    def deadlines(self) -> int:
        """The number of deadlines that the server's clock holds."""
        return len(self.real.clock.deadlines)

    def tick(self, now: float) -> None:
        self.clock.advance(now)

    def set(self, key: bytes, value: bytes) -> None:
        """Write a value as another client would, and deliver the results."""
        with self.clock.running():
            self.engine.put(key, value)
            self.real.settle(self.engine)

    def delete(self, key: bytes) -> None:
        with self.clock.running():
            self.engine.remove(key)
            self.real.settle(self.engine)


class SessionLink:
    """One connection to a server; received bytes are in `inbox`."""

    def __init__(self, server: FakeServer, hello: bytes | None = None, resume: bytes = b"", seen: int = 0) -> None:
        self.server = server
        self.inbox = b""
        connection: Any = FakeConnection(server.clock, self._deliver)
        self.connection = connection
        self.handler = connection.handler = server.real.native_handler(connection)
        self.send(hello or frame(Hello(native.VERSION, "test", resume, seen)))

    def _deliver(self, data: bytes) -> None:
        self.inbox += data

    def send(self, data: bytes) -> None:
        self.connection.receive(data)

    def ask(self, *requests: ops.Op | list[Any]) -> list[Any]:
        """Send requests, and return all replies received."""
        self.send(b"".join(map(frame, requests)))
        return self.read()

    def read(self) -> list[Any]:
        data, self.inbox = self.inbox, b""
        return [msgspec.msgpack.decode(payload) for payload in Frames(1 << 20).feed(data)]

    def cut(self) -> None:
        self.connection.end()


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def link(server: FakeServer) -> SessionLink:
    return opened(server)


def opened(server: FakeServer) -> SessionLink:
    link = SessionLink(server)
    link.read()
    return link


def resumed(link: SessionLink, seen: int = 0) -> SessionLink:
    """Resume a link's session on a new link."""
    assert link.handler.session is not None
    return SessionLink(link.server, resume=link.handler.session.id, seen=seen)


# The greeting


def test_a_new_session_is_welcomed(server: FakeServer) -> None:
    link = SessionLink(server)
    assert link.handler.session is not None
    identity = link.handler.session.id
    assert len(identity) == 16
    assert link.read() == [[0, ReplyStatus.OK, [native.VERSION, b"server", identity, GRACE_S, False, 0.0, []]]]
    again = resumed(link)
    assert again.read() == [[0, ReplyStatus.OK, [native.VERSION, b"server", identity, GRACE_S, True, 0.0, []]]]


def test_an_unknown_version_is_refused_with_the_reason(server: FakeServer) -> None:
    ((number, status, (identity, why)),) = SessionLink(server, frame(Hello(99, "test"))).read()
    assert (number, status, identity) == (0, ReplyStatus.REFUSED, b"server")
    assert "version 99" in why and str(native.VERSION) in why
    assert server.sessions == []


def test_an_unknown_session_is_refused_with_the_server_s_identity(server: FakeServer) -> None:
    ((_, status, (identity, why)),) = SessionLink(server, resume=b"of another").read()
    assert (status, identity) == (ReplyStatus.REFUSED, b"server")
    assert "unknown session" in why


def test_requests_may_follow_the_hello_at_once(server: FakeServer) -> None:
    greeting = frame(Hello(native.VERSION, "test"))
    link = SessionLink(server, greeting + frame(ops.Add(1, b"/n", 1)) + frame(ops.Add(2, b"/n", 1)))
    welcome, *answers = link.read()
    assert welcome[1] == ReplyStatus.OK and answers == [[1, ReplyStatus.OK, 1], [2, ReplyStatus.OK, 2]]


def test_a_second_connection_takes_over(server: FakeServer, link: SessionLink) -> None:
    link.ask(ops.SetLease(1, b"/k", b"v", 0.0), ops.BlockingPop(2, b"/q", 60.0))
    second = resumed(link)
    second.read()
    with pytest.raises(BadMessage, match="another connection"):
        link.ask(ops.Ping(3))
    link.cut()
    server.tick(10 * GRACE_S)
    assert value_of(server.engine, b"/k") == b"v"
    assert second.ask(ops.Push(3, b"/q", b"item")) == [[2, ReplyStatus.OK, b"item"], [3, ReplyStatus.OK, None]]


# Exactly once

WRITES = {
    "add": (ops.Add(1, b"/n", 5), 5, b"5"),
    "append": (ops.Append(1, b"/n", b"x"), None, b"x"),
    "swap": (ops.CompareSwap(1, b"/n", None, b"x"), [True, b"x"], b"x"),
    "compare_set": (ops.CompareSet(1, b"/n", b"", b"x"), b"x", b"x"),
    "barrier": (ops.Arrive(1, b"/n", 1, 5.0), None, b"1"),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_repeated_write_runs_once_and_gets_the_same_answer(name: str, server: FakeServer, link: SessionLink) -> None:
    request, result, value = WRITES[name]
    answer = [[1, ReplyStatus.OK, result]]
    assert link.ask(request) == answer
    assert link.ask(request) == answer
    link.cut()
    again = resumed(link)
    again.read()
    assert again.ask(request) == answer
    assert value_of(server.engine, b"/n") == value


def test_a_repeated_error_is_the_same_error(server: FakeServer, link: SessionLink) -> None:
    server.set(b"/n", b"word")
    first = link.ask(ops.Add(1, b"/n", 1))
    assert first[0][1:] == [ReplyStatus.ERROR, ["NotAnInteger", {"key": "/n", "value": b"word"}]]
    server.set(b"/n", b"5")
    assert link.ask(ops.Add(1, b"/n", 1)) == first


def test_a_repeated_read_reads_again(server: FakeServer, link: SessionLink) -> None:
    get = ops.Get(1, b"/k", 5.0)
    server.set(b"/k", b"old")
    assert link.ask(get) == [[1, ReplyStatus.OK, [b"old"]]]
    server.set(b"/k", b"new")
    assert link.ask(get) == [[1, ReplyStatus.OK, [b"new"]]]


@pytest.mark.parametrize("kind", ["get", "take", "barrier"])
def test_a_repeated_wait_goes_on_waiting_once(kind: str, server: FakeServer, link: SessionLink) -> None:
    wait = {
        "get": ops.Get(1, b"/k", 5.0),
        "take": ops.BlockingPop(1, b"/k", 5.0),
        "barrier": ops.Arrive(1, b"/k", 2, 5.0),
    }[kind]
    assert link.ask(wait, wait) == []
    assert waiting(server.engine) == 1
    server.tick(5.0)
    assert link.read() == [[1, ReplyStatus.TIMED_OUT, [b"/k"]]]


def test_a_wait_with_timeout_zero_leaves_nothing(server: FakeServer, link: SessionLink) -> None:
    assert link.ask(ops.Get(1, b"/k", 0.0)) == [[1, ReplyStatus.TIMED_OUT, [b"/k"]]]
    assert link.ask(ops.Arrive(2, b"/b", 2, 0.0)) == [[2, ReplyStatus.TIMED_OUT, [b"/b"]]]
    assert waiting(server.engine) == 0
    assert value_of(server.engine, b"/b") == b"0"


def test_a_confirm_drops_answers_of_requests_that_are_not_open(link: SessionLink) -> None:
    link.ask(ops.Add(1, b"/n", 1), ops.Add(2, b"/n", 1), ops.Add(3, b"/n", 1))
    assert link.ask(ops.Confirm(0, 2, [1], 0)) == []
    assert link.ask(ops.Add(1, b"/n", 1)) == [[1, ReplyStatus.OK, 1]]
    assert link.ask(ops.Add(3, b"/n", 1)) == [[3, ReplyStatus.OK, 3]]
    with pytest.raises(BadMessage, match="request 2 was repeated"):
        link.ask(ops.Add(2, b"/n", 1))


def test_a_client_that_never_confirms_is_dropped(link: SessionLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_KEPT", 10)
    for number in range(1, 12):
        link.ask(ops.Add(number, b"/n", 1))
    with pytest.raises(BadMessage, match=r"11 answers, 0 pushes, .* bytes are unconfirmed"):
        link.ask(ops.Add(12, b"/n", 1))


def test_a_client_with_too_many_unconfirmed_bytes_is_dropped() -> None:
    link = opened(FakeServer(max_kept_bytes=1000))
    link.ask(ops.Push(1, b"/q", b"x" * 2000), ops.BlockingPop(2, b"/q", 0.0))
    with pytest.raises(BadMessage, match="unconfirmed"):
        link.ask(ops.Ping(3))


def test_a_client_over_the_limit_may_still_confirm(
    server: FakeServer, link: SessionLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "MAX_KEPT", 10)
    link.ask(ops.WatchPrefix(1, b"/"))
    for number in range(20):
        server.set(b"/k", b"%d" % number)
    assert link.ask(ops.Confirm(0, 1, [], 20), ops.Ping(2))[-1] == [2, ReplyStatus.OK, None]


# Pushes


def test_pushes_are_numbered_and_kept_until_seen(server: FakeServer, link: SessionLink) -> None:
    link.ask(ops.WatchPrefix(4, b"/a"))
    for key in (b"/a1", b"/b", b"/a2"):
        server.set(key, b"v")
    server.delete(b"/a1")
    pushes = [[0, 1, [4, 1, b"/a1", b"v"]], [0, 2, [4, 3, b"/a2", b"v"]], [0, 3, [4, 4, b"/a1", None]]]
    assert link.read() == pushes
    link.cut()
    server.set(b"/a3", b"while away")
    later = [0, 4, [4, 5, b"/a3", b"while away"]]
    second = resumed(link, seen=1)
    assert second.read()[1:] == [*pushes[1:], later]
    second.ask(ops.Confirm(0, 0, [], 3))
    assert resumed(second).read()[1:] == [later]


# Dropped requests


def test_a_dropped_wait_stays_unanswered(server: FakeServer, link: SessionLink) -> None:
    assert link.ask(ops.Get(1, b"/k", 5.0), ops.Drop(2, 1)) == [[2, ReplyStatus.OK, None]]
    assert waiting(server.engine) == 0
    server.set(b"/k", b"v")
    server.tick(10.0)
    assert link.read() == []


def test_a_dropped_arrival_is_withdrawn(server: FakeServer, link: SessionLink) -> None:
    link.ask(ops.Arrive(1, b"/b", 2, 5.0))
    assert value_of(server.engine, b"/b") == b"1"
    link.ask(ops.Drop(2, 1))
    assert value_of(server.engine, b"/b") == b"0"


def test_a_dropped_watch_gets_no_more_events(server: FakeServer, link: SessionLink) -> None:
    link.ask(ops.WatchPrefix(1, b"/"), ops.Drop(2, 1))
    server.set(b"/k", b"v")
    assert link.read() == []
    assert server.engine.statistics().watches == 0


@pytest.mark.parametrize("waited", [False, True])
def test_dropping_an_answered_take_returns_its_item_to_the_front(
    waited: bool, server: FakeServer, link: SessionLink
) -> None:
    pushes = [ops.Push(2, b"/q", b"a"), ops.Push(3, b"/q", b"b")]
    take = ops.BlockingPop(1 if waited else 4, b"/q", 5.0)
    link.ask(*([take, *pushes] if waited else [*pushes, take]))
    assert len(items_of(server.engine, b"/q")) == 1
    drop = ops.Drop(5, take.number)
    assert link.ask(drop, drop, ops.Drop(6, take.number))[-1] == [6, ReplyStatus.OK, None]
    assert items_of(server.engine, b"/q") == [b"a", b"b"]


def test_dropping_a_confirmed_take_returns_nothing(server: FakeServer, link: SessionLink) -> None:
    link.ask(ops.Push(1, b"/q", b"a"), ops.BlockingPop(2, b"/q", 5.0), ops.Confirm(0, 2, [], 0), ops.Drop(3, 2))
    assert items_of(server.engine, b"/q") == []


def test_a_take_dropped_twice_returns_its_item_once(server: FakeServer, link: SessionLink) -> None:
    link.ask(ops.BlockingPop(1, b"/q", 5.0))
    answers = link.ask(ops.Push(2, b"/q", b"a"), ops.Drop(3, 1), ops.Drop(4, 1))
    assert [answer[0] for answer in answers] == [1, 2, 3, 4], "every answer is sent at once"
    assert link.ask(ops.Drop(5, 1)) == [[5, ReplyStatus.OK, None]]
    assert items_of(server.engine, b"/q") == [b"a"]


def test_dropping_an_unknown_request_is_harmless(link: SessionLink) -> None:
    assert link.ask(ops.Drop(1, 77), ops.Drop(2, 2)) == [[1, ReplyStatus.OK, None], [2, ReplyStatus.OK, None]]


# Disconnected, resumed, ended


def test_items_go_to_others_while_a_taker_is_disconnected(server: FakeServer, link: SessionLink) -> None:
    other = opened(server)
    take = ops.BlockingPop(1, b"/q", 60.0)
    link.ask(take)
    link.cut()
    other.ask(ops.Push(1, b"/q", b"first"))
    assert other.ask(ops.BlockingPop(2, b"/q", 0.0)) == [[2, ReplyStatus.OK, b"first"]]
    second = resumed(link)
    assert second.ask(take)[1:] == []
    other.ask(ops.Push(3, b"/q", b"second"))
    assert second.read() == [[1, ReplyStatus.OK, b"second"]]


def test_a_barrier_wait_continues_while_disconnected(server: FakeServer, link: SessionLink) -> None:
    arrive = ops.Arrive(1, b"/b", 2, 60.0)
    link.ask(arrive)
    link.cut()
    opened(server).ask(ops.Arrive(1, b"/b", 2, 60.0))
    second = resumed(link)
    assert second.ask(arrive)[1:] == [[1, ReplyStatus.OK, None]]
    assert value_of(server.engine, b"/b") == b"2"


def test_a_session_ends_after_its_grace_period(server: FakeServer, link: SessionLink) -> None:
    link.ask(ops.SetLease(1, b"/k", b"v", 0.0), ops.Get(2, b"/late", 60.0), ops.WatchPrefix(3, b"/w"))
    server.tick(10.0)
    link.cut()
    server.tick(11.9)
    assert value_of(server.engine, b"/k") == b"v" and len(server.sessions) == 1
    server.tick(12.0)
    assert link.handler.session is not None and link.handler.session.over and server.sessions == []
    held = server.engine.statistics()
    assert (held.keys, held.waiters, held.watches, held.leased_keys) == (0, 0, 0, 0)
    assert resumed(link).read()[0][1] == ReplyStatus.REFUSED


def test_resuming_ends_the_grace_period(server: FakeServer, link: SessionLink) -> None:
    link.ask(ops.SetLease(1, b"/k", b"v", 0.0))
    link.cut()
    resumed(link)
    assert server.deadlines == 0
    server.tick(1e6)
    assert value_of(server.engine, b"/k") == b"v" and len(server.sessions) == 1


def test_bye_ends_the_session_without_grace(server: FakeServer, link: SessionLink) -> None:
    link.ask(ops.SetLease(1, b"/k", b"v", 0.0), ops.BlockingPop(2, b"/q", 60.0), ops.Bye(3))
    link.cut()
    held = server.engine.statistics()
    assert server.sessions == [] and (held.keys, held.waiters) == (0, 0)


def test_a_lease_ends_when_heartbeats_stop(server: FakeServer, link: SessionLink) -> None:
    link.ask(ops.SetLease(1, b"/beating", b"v", 3.0), ops.SetLease(2, b"/plain", b"v", 0.0))
    server.tick(2.0)
    assert link.ask(ops.SessionHeartbeat(0)) == []
    server.tick(4.9)
    assert server.engine.exists(b"/beating")
    server.tick(5.0)
    assert server.engine.execute(ops.List(0, b"")) == [b"/plain"]
    assert server.deadlines == 0


def test_a_lease_without_any_heartbeat_ends_in_time(server: FakeServer, link: SessionLink) -> None:
    link.ask(ops.SetLease(1, b"/beating", b"v", 3.0))
    server.tick(2.9)
    assert server.engine.exists(b"/beating")
    server.tick(3.0)
    assert not server.engine.exists(b"/beating")


def test_an_expired_lease_does_not_remove_another_client_s_value(server: FakeServer, link: SessionLink) -> None:
    link.ask(ops.SetLease(1, b"/k", b"v", 3.0))
    opened(server).ask(ops.Set(1, b"/k", b"taken over"))
    server.tick(100.0)
    assert value_of(server.engine, b"/k") == b"taken over"


def test_only_the_holder_can_release_a_lease(server: FakeServer, link: SessionLink) -> None:
    link.ask(ops.SetLease(1, b"/k", b"v", 3.0))
    assert opened(server).ask(ops.ReleaseLease(1, b"/k")) == [[1, ReplyStatus.OK, False]]
    assert link.ask(ops.ReleaseLease(2, b"/k")) == [[2, ReplyStatus.OK, True]]
    assert server.engine.statistics().keys == 0
    link.ask(ops.SetLease(3, b"/k", b"again", 0.0))
    server.tick(100.0)
    assert value_of(server.engine, b"/k") == b"again", "the new lease has no heartbeat"


def test_answers_wait_until_earlier_ones_are_sent(link: SessionLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_connection, "REPLIES_BYTES", 10)
    requests = [ops.Set(1, b"/k", b"v" * 20), *(ops.Get(number, b"/k", 0.0) for number in range(2, 6))]
    handler = link.handler
    link.inbox += handler.receive(b"".join(map(frame, requests)))
    assert handler.blocked and handler.held
    while handler.blocked:
        link.inbox += handler.receive(b"")
    assert [answer[0] for answer in link.read()] == [1, 2, 3, 4, 5]
    assert handler.held == 0


# The shared answer of an exchange


def exchanged(server: FakeServer, size: int, how: str = "all_gather") -> list[SessionLink]:
    """Let four ranks contribute `size` bytes each, each by its own session."""
    links = [opened(server) for _ in range(4)]
    for rank, link in enumerate(links):
        data = bytes([rank]) * size
        link.send(frame([28, 1, b"/big", str(rank), 1, ["exchange.give", 4, rank, data, how, 0], 9.0]))
    return links


@pytest.mark.parametrize("how", ["all_gather", "broadcast"])
@pytest.mark.parametrize("size", [1, 100_000])
def test_a_shared_answer_is_kept_and_counted_once(server: FakeServer, how: str, size: int) -> None:
    links = exchanged(server, size, how)
    gathered: Any = [bytes([rank]) * size for rank in range(4)]
    answer = gathered if how == "all_gather" else gathered[0]
    assert all(link.read() == [[1, ReplyStatus.OK, [records.DONE, answer]]] for link in links)
    whole, expected_items = size * (4 if how == "all_gather" else 1), server.state.memory
    assert whole < expected_items.kept < whole + 4 * (KEPT_BYTES + 90)
    again = resumed(links[0])
    assert again.read()[-1][1] == ReplyStatus.OK
    repeated = again.ask([28, 1, b"/big", "0", 1, ["exchange.give", 4, 0, b"", how, 0], 9.0])
    assert repeated == [[1, ReplyStatus.OK, [records.DONE, answer]]]
    for confirmed, link in enumerate([again, *links[1:3]]):
        link.ask(ops.Confirm(0, 1, [], 0))
        assert whole < expected_items.kept < whole + (3 - confirmed) * (KEPT_BYTES + 90)
    links[3].cut()
    server.tick(GRACE_S)
    assert expected_items.kept == 0
    again.cut()
    server.tick(2 * GRACE_S)
    assert expected_items.kept == 0


@pytest.mark.parametrize("how", ["all_gather", "broadcast"])
def test_a_shared_answer_over_the_limit_is_an_error_for_all_ranks(how: str) -> None:
    server = FakeServer(max_answer_bytes=2000)
    for link in exchanged(server, 3000, how):
        ((_, status, (error, fields)),) = link.read()
        assert (status, error, fields["key"], fields["limit"]) == (ReplyStatus.ERROR, "LimitExceeded", "/big", 2000)
        assert fields["size"] > (12_000 if how == "all_gather" else 3000)
    assert server.engine.size == 0 and server.state.namespaces[0].objects.statistics() == {}


def test_an_answer_too_large_to_keep_is_an_error() -> None:
    """Otherwise the client would be dropped, resume for the answer, and be dropped again."""
    server = FakeServer(max_kept_bytes=2000)
    for link in exchanged(server, 3000):
        ((_, status, (error, _)),) = link.read()
        assert (status, error) == (ReplyStatus.ERROR, "LimitExceeded")


# Lossy connections


class SimulatedClient:
    """A client whose connection is cut at random points; it records each answer once."""

    def __init__(self, server: FakeServer, chance: random.Random, name: str) -> None:
        self.server, self.chance = server, chance
        self.core = ClientProtocol(name)
        self.asked: dict[int, tuple[type[ops.Op], tuple[Any, ...]]] = {}
        self.got: dict[int, Reply] = {}
        self.events: list[Any] = []
        self.outgoing = b""
        self.connect()

    def connect(self) -> None:
        self.link = SessionLink(self.server, self.core.greet())
        welcome, *pushes = self.core.receive(self.take_inbox())
        self.core.welcome(welcome, "server")
        for reply in pushes:
            self.deliver(reply)
        self.outgoing = self.core.repeat(0.0)

    def take_inbox(self) -> bytes:
        data, self.link.inbox = self.link.inbox, b""
        return data

    def ask(self, kind: type[ops.Op], *arguments: Any) -> None:
        number, data = self.core.number, self.core.ask(kind(0, *arguments))
        self.asked[number] = (kind, arguments)
        self.outgoing += data

    def step(self, lossy: bool) -> None:
        """Send a part of the outgoing bytes and read a part of the incoming ones; on a cut, the rest is lost."""
        cut = lossy and self.chance.random() < 0.25
        size = self.chance.randint(0, len(self.outgoing)) if lossy else len(self.outgoing)
        self.link.send(self.outgoing[:size])
        self.outgoing = self.outgoing[size:]
        data = self.take_inbox()
        size = self.chance.randint(0, len(data)) if lossy else len(data)
        for reply in self.core.receive(data[:size]):
            self.deliver(reply)
        if cut:
            self.link.cut()
            self.connect()
        else:
            self.link.inbox = data[size:] + self.link.inbox

    def deliver(self, reply: Reply) -> None:
        if not self.core.expects(reply):
            return
        if reply.number:
            assert reply.number not in self.got
            self.got[reply.number] = reply
        else:
            self.events.append(reply.event()[1])
        self.core.settle(reply)

    def results(self, kind: type[ops.Op]) -> list[Any]:
        return [self.got[number].result for number, (asked, _) in self.asked.items() if asked is kind]


def simulate(seed: int) -> None:
    """Let members add, push, take and watch over lossy connections; the result must be as without cuts."""
    chance = random.Random(seed)
    server = FakeServer()
    members = [SimulatedClient(server, chance, f"member {number}") for number in range(chance.randint(1, 3))]
    watcher = SimulatedClient(server, chance, "watcher")
    watcher.ask(ops.WatchPrefix, b"/n")
    while not watcher.got:
        watcher.step(lossy=True)
    adds = pushes = 0
    for _ in range(chance.randint(5, 30)):
        member = chance.choice(members)
        if chance.random() < 0.6:
            member.ask(ops.Add, b"/n", 1)
            adds += 1
        else:
            member.ask(ops.Push, b"/q", b"%d" % pushes)
            chance.choice(members).ask(ops.BlockingPop, b"/q", 1e6)
            pushes += 1
        chance.choice([*members, watcher]).step(lossy=True)
    for _ in range(4):
        for member in [*members, watcher]:
            member.step(lossy=False)
    for member in members:
        assert len(member.got) == len(member.asked)
        assert member.results(ops.Add) == sorted(member.results(ops.Add)), "its own adds ran in order"
    added = [total for member in members for total in member.results(ops.Add)]
    assert sorted(added) == list(range(1, adds + 1)), "every add counted once"
    taken = Counter(item for member in members for item in member.results(ops.BlockingPop))
    assert taken == Counter(b"%d" % number for number in range(pushes)), "every item taken once"
    assert [event.value for event in watcher.events] == [b"%d" % total for total in range(1, adds + 1)]
    assert items_of(server.engine, b"/q") == [] and waiting(server.engine) == 0


def test_heartbeats_of_former_leases_are_forgotten() -> None:
    server = FakeServer()
    link = SessionLink(server)
    mine = link.handler.session
    assert mine is not None
    for number in range(1, 5001):
        link.send(frame(ops.SetLease(2 * number - 1, b"/%d" % number, b"", 1e6)))
        link.send(frame(ops.Delete(2 * number, b"/%d" % number)))
        link.send(frame(ops.Confirm(0, 2 * number, [], 0)))
        assert len(mine.ttls) <= 128, "even without heartbeats"
    link.send(frame(ops.SetLease(10_001, b"/kept", b"", 10.0)))
    link.send(frame(ops.SetLease(10_002, b"/written", b"", 10.0)))
    link.send(frame(ops.Set(10_003, b"/written", b"")))
    link.send(frame(ops.SessionHeartbeat(0)))
    assert list(mine.live_ttls()) == [b"/kept"]
    server.tick(10.0)
    assert server.engine.execute(ops.List(0, b"")) == [b"/written"] and b"/kept" not in mine.ttls
    link.send(frame(ops.SessionHeartbeat(0)))
    assert mine.live_ttls() == {}


def test_the_clock_drops_obsolete_deadlines() -> None:
    """Deadlines of dropped and answered waits, of deleted leases, and of ended sessions."""
    server = FakeServer()
    link = opened(server)
    for number in range(1, 3001, 3):
        link.ask(ops.Get(number, b"/never", 1e8), ops.Drop(number + 1, number), ops.BlockingPop(number + 2, b"/q", 1e8))
        server.set(b"/never", b"")
        server.delete(b"/never")
    assert server.deadlines < 1500, "deadlines of dropped waits are kept"
    for number in range(3001, 5001, 2):
        link.ask(ops.SetLease(number, b"/%d" % number, b"", 1e8), ops.Delete(number + 1, b"/%d" % number))
    assert server.deadlines < 1500, "deadlines of deleted leases are kept"
    link.ask(ops.Bye(5001))
    link.cut()
    assert server.deadlines < 200, "deadlines of the ended session are kept"


def test_a_heartbeat_extends_all_leases() -> None:
    server = FakeServer()
    link = SessionLink(server)
    for number in range(1, 301):
        link.send(frame(ops.SetLease(number, b"/%d" % number, b"", 10.0)))
    server.tick(5.0)
    link.send(frame(ops.SessionHeartbeat(0)))
    server.tick(12.0)
    assert server.engine.statistics().leased_keys == 300
    server.tick(15.0)
    assert server.engine.statistics().leased_keys == 0


def test_over_the_limit_only_new_sessions_are_refused() -> None:
    server = FakeServer(max_sessions=1)
    first = SessionLink(server)
    assert first.handler.session is not None
    late = SessionLink(server)
    assert late.handler.session is None and b"too many sessions: 1 is the limit" in late.inbox
    again = SessionLink(server, resume=first.handler.session.id)
    assert again.handler.session is first.handler.session and server.real.refused_sessions == 1


def test_no_request_is_lost_or_repeated_by_cuts() -> None:
    for seed in range(FIRST_SEED, FIRST_SEED + SEEDS):
        try:
            simulate(seed)
        except (AssertionError, BadMessage) as error:
            pytest.fail(f"seed {seed}: {error!r}")
