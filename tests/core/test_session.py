"""The server's end of our protocol: what a repeated number does, what is kept and forgotten, and when a session ends.

`FakeServer` is a real one without sockets, whose time the tests turn. The last test is a simulation: clients over a
link that is cut at random points, with the tail lost both ways; each failure names its seed.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from rallypoint.core import ops, records, session
from rallypoint.core.records import Status
from rallypoint.core.session import Session
from rallypoint.protocol import BadMessage, native
from rallypoint.protocol.client import Client, Reply
from rallypoint.protocol.native import Frames, Hello, frame
from rallypoint.server import native_connection

from .fakes import Clock, FakeConnection, items_of, new_server, value_of, waiting

GRACE_S = 2.0
SEEDS, FIRST_SEED = 2000, int(os.environ.get("FIRST_SEED", "0"))


class FakeServer:
    """A server without sockets, and the time."""

    def __init__(self, **limits: int) -> None:
        self.clock = Clock()
        self.real = new_server(grace_s=GRACE_S, **limits)
        self.state = self.real.state
        self.engine = self.state.namespaces[0].engine

    @property
    def sessions(self) -> list[Session]:
        return list(self.state.sessions.values())

    @property
    def deadlines(self) -> int:
        """How many deadlines the server keeps in mind."""
        return len(self.real.clock.deadlines)

    def tick(self, now: float) -> None:
        self.clock.advance(now)

    def set(self, key: bytes, value: bytes) -> None:
        """Write a value as somebody else's client might, and deliver what comes of it."""
        with self.clock.running():
            self.engine.put(key, value)
            self.real.settle(self.engine)

    def delete(self, key: bytes) -> None:
        with self.clock.running():
            self.engine.remove(key)
            self.real.settle(self.engine)


class Link:
    """One connection to a server: what it was sent is in `inbox`."""

    def __init__(self, server: FakeServer, hello: bytes | None = None, resume: bytes = b"", seen: int = 0) -> None:
        self.server = server
        self.inbox = b""
        self.connection: Any = FakeConnection(server.clock, self.hear)
        self.handler = self.connection.handler = server.real.native_handler(self.connection)
        self.send(hello or frame(Hello(native.VERSION, "test", resume, seen)))

    def hear(self, data: bytes) -> None:
        self.inbox += data

    def send(self, data: bytes) -> None:
        self.connection.receive(data)

    def ask(self, *requests: ops.Op | list[Any]) -> list[Any]:
        """Send requests, and return all that has come."""
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
def link(server: FakeServer) -> Link:
    return opened(server)


def opened(server: FakeServer) -> Link:
    link = Link(server)
    link.read()
    return link


def back(link: Link, seen: int = 0) -> Link:
    """Come back to a link's session on a new one."""
    assert link.handler.session is not None
    return Link(link.server, resume=link.handler.session.id, seen=seen)


# The greeting


def test_a_new_session_is_welcomed(server: FakeServer) -> None:
    link = Link(server)
    assert link.handler.session is not None
    identity = link.handler.session.id
    assert len(identity) == 16
    assert link.read() == [[0, Status.OK, [native.VERSION, b"server", identity, GRACE_S, False, 0.0, []]]]
    again = back(link)
    assert again.read() == [[0, Status.OK, [native.VERSION, b"server", identity, GRACE_S, True, 0.0, []]]]


def test_an_unknown_version_is_refused_and_told_why(server: FakeServer) -> None:
    ((number, status, (identity, why)),) = Link(server, frame(Hello(99, "test"))).read()
    assert (number, status, identity) == (0, Status.REFUSED, b"server")
    assert "version 99" in why and str(native.VERSION) in why
    assert server.sessions == []


def test_an_unknown_session_is_refused_by_a_server_that_says_who_it_is(server: FakeServer) -> None:
    ((_, status, (identity, why)),) = Link(server, resume=b"of another").read()
    assert (status, identity) == (Status.REFUSED, b"server")
    assert "unknown session" in why


def test_requests_may_come_right_behind_the_greeting(server: FakeServer) -> None:
    greeting = frame(Hello(native.VERSION, "test"))
    link = Link(server, greeting + frame(ops.Add(1, b"/n", 1)) + frame(ops.Add(2, b"/n", 1)))
    welcome, *answers = link.read()
    assert welcome[1] == Status.OK and answers == [[1, Status.OK, 1], [2, Status.OK, 2]]


def test_a_second_connection_takes_over(server: FakeServer, link: Link) -> None:
    link.ask(ops.Lease(1, b"/k", b"v", 0.0), ops.Take(2, b"/q", 60.0))
    second = back(link)
    second.read()
    with pytest.raises(BadMessage, match="another connection"):
        link.ask(ops.Ping(3))
    link.cut()
    server.tick(10 * GRACE_S)
    assert value_of(server.engine, b"/k") == b"v"
    assert second.ask(ops.Push(3, b"/q", b"item")) == [[2, Status.OK, b"item"], [3, Status.OK, None]]


# Exactly once

WRITES = {
    "add": (ops.Add(1, b"/n", 5), 5, b"5"),
    "append": (ops.Append(1, b"/n", b"x"), None, b"x"),
    "swap": (ops.Swap(1, b"/n", None, b"x"), [True, b"x"], b"x"),
    "compare_set": (ops.CompareSet(1, b"/n", b"", b"x"), b"x", b"x"),
    "barrier": (ops.Arrive(1, b"/n", 1, 5.0), None, b"1"),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_repeated_write_has_its_answer_again_and_ran_once(name: str, server: FakeServer, link: Link) -> None:
    request, result, value = WRITES[name]
    answer = [[1, Status.OK, result]]
    assert link.ask(request) == answer
    assert link.ask(request) == answer
    link.cut()
    again = back(link)
    again.read()
    assert again.ask(request) == answer
    assert value_of(server.engine, b"/n") == value


def test_a_repeated_error_is_the_same_error(server: FakeServer, link: Link) -> None:
    server.set(b"/n", b"word")
    first = link.ask(ops.Add(1, b"/n", 1))
    assert first[0][1:] == [Status.ERROR, ["NotAnInteger", {"key": "/n", "value": b"word"}]]
    server.set(b"/n", b"5")
    assert link.ask(ops.Add(1, b"/n", 1)) == first


def test_a_repeated_read_reads_again(server: FakeServer, link: Link) -> None:
    get = ops.Get(1, b"/k", 5.0)
    server.set(b"/k", b"old")
    assert link.ask(get) == [[1, Status.OK, [b"old"]]]
    server.set(b"/k", b"new")
    assert link.ask(get) == [[1, Status.OK, [b"new"]]]


@pytest.mark.parametrize("kind", ["get", "take", "barrier"])
def test_a_repeated_wait_goes_on_waiting_once(kind: str, server: FakeServer, link: Link) -> None:
    wait = {
        "get": ops.Get(1, b"/k", 5.0),
        "take": ops.Take(1, b"/k", 5.0),
        "barrier": ops.Arrive(1, b"/k", 2, 5.0),
    }[kind]
    assert link.ask(wait, wait) == []
    assert waiting(server.engine) == 1
    server.tick(5.0)
    assert link.read() == [[1, Status.TIMED_OUT, [b"/k"]]]


def test_a_wait_of_no_time_leaves_nothing(server: FakeServer, link: Link) -> None:
    assert link.ask(ops.Get(1, b"/k", 0.0)) == [[1, Status.TIMED_OUT, [b"/k"]]]
    assert link.ask(ops.Arrive(2, b"/b", 2, 0.0)) == [[2, Status.TIMED_OUT, [b"/b"]]]
    assert waiting(server.engine) == 0
    assert value_of(server.engine, b"/b") == b"0"


def test_confirming_forgets_what_is_not_open(link: Link) -> None:
    link.ask(ops.Add(1, b"/n", 1), ops.Add(2, b"/n", 1), ops.Add(3, b"/n", 1))
    assert link.ask(ops.Confirm(0, 2, [1], 0)) == []
    assert link.ask(ops.Add(1, b"/n", 1)) == [[1, Status.OK, 1]]
    assert link.ask(ops.Add(3, b"/n", 1)) == [[3, Status.OK, 3]]
    with pytest.raises(BadMessage, match="request 2 came again"):
        link.ask(ops.Add(2, b"/n", 1))


def test_a_client_that_never_confirms_is_dropped(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_KEPT", 10)
    for number in range(1, 12):
        link.ask(ops.Add(number, b"/n", 1))
    with pytest.raises(BadMessage, match=r"11 answers, 0 pushes, .* bytes are unconfirmed"):
        link.ask(ops.Add(12, b"/n", 1))


def test_so_is_one_that_leaves_too_many_bytes() -> None:
    link = opened(FakeServer(max_kept_bytes=1000))
    link.ask(ops.Push(1, b"/q", b"x" * 2000), ops.Take(2, b"/q", 0.0))
    with pytest.raises(BadMessage, match="unconfirmed"):
        link.ask(ops.Ping(3))


def test_it_may_still_confirm(server: FakeServer, link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_KEPT", 10)
    link.ask(ops.Watch(1, b"/"))
    for number in range(20):
        server.set(b"/k", b"%d" % number)
    assert link.ask(ops.Confirm(0, 1, [], 20), ops.Ping(2))[-1] == [2, Status.OK, None]


# Pushes


def test_pushes_are_numbered_and_kept_until_seen(server: FakeServer, link: Link) -> None:
    link.ask(ops.Watch(4, b"/a"))
    for key in (b"/a1", b"/b", b"/a2"):
        server.set(key, b"v")
    server.delete(b"/a1")
    pushes = [[0, 1, [4, 1, b"/a1", b"v"]], [0, 2, [4, 3, b"/a2", b"v"]], [0, 3, [4, 4, b"/a1", None]]]
    assert link.read() == pushes
    link.cut()
    server.set(b"/a3", b"while away")
    later = [0, 4, [4, 5, b"/a3", b"while away"]]
    second = back(link, seen=1)
    assert second.read()[1:] == [*pushes[1:], later]
    second.ask(ops.Confirm(0, 0, [], 3))
    assert back(second).read()[1:] == [later]


# Giving up


def test_a_dropped_wait_stays_unanswered(server: FakeServer, link: Link) -> None:
    assert link.ask(ops.Get(1, b"/k", 5.0), ops.Drop(2, 1)) == [[2, Status.OK, None]]
    assert waiting(server.engine) == 0
    server.set(b"/k", b"v")
    server.tick(10.0)
    assert link.read() == []


def test_a_dropped_arrival_is_taken_back(server: FakeServer, link: Link) -> None:
    link.ask(ops.Arrive(1, b"/b", 2, 5.0))
    assert value_of(server.engine, b"/b") == b"1"
    link.ask(ops.Drop(2, 1))
    assert value_of(server.engine, b"/b") == b"0"


def test_a_dropped_watch_sees_no_more(server: FakeServer, link: Link) -> None:
    link.ask(ops.Watch(1, b"/"), ops.Drop(2, 1))
    server.set(b"/k", b"v")
    assert link.read() == []
    assert server.engine.statistics().watches == 0


@pytest.mark.parametrize("waited", [False, True])
def test_a_dropped_take_that_was_answered_gives_its_item_back_to_the_front(
    waited: bool, server: FakeServer, link: Link
) -> None:
    pushes = [ops.Push(2, b"/q", b"a"), ops.Push(3, b"/q", b"b")]
    take = ops.Take(1 if waited else 4, b"/q", 5.0)
    link.ask(*([take, *pushes] if waited else [*pushes, take]))
    assert len(items_of(server.engine, b"/q")) == 1
    drop = ops.Drop(5, take.number)
    assert link.ask(drop, drop, ops.Drop(6, take.number))[-1] == [6, Status.OK, None]
    assert items_of(server.engine, b"/q") == [b"a", b"b"]


def test_a_confirmed_take_is_not_given_back(server: FakeServer, link: Link) -> None:
    link.ask(ops.Push(1, b"/q", b"a"), ops.Take(2, b"/q", 5.0), ops.Confirm(0, 2, [], 0), ops.Drop(3, 2))
    assert items_of(server.engine, b"/q") == []


def test_a_take_dropped_as_it_is_answered_gives_its_item_back_once(server: FakeServer, link: Link) -> None:
    link.ask(ops.Take(1, b"/q", 5.0))
    answers = link.ask(ops.Push(2, b"/q", b"a"), ops.Drop(3, 1), ops.Drop(4, 1))
    assert [answer[0] for answer in answers] == [1, 2, 3, 4], "each is sent as soon as it is true"
    assert link.ask(ops.Drop(5, 1)) == [[5, Status.OK, None]]
    assert items_of(server.engine, b"/q") == [b"a"]


def test_dropping_what_never_was_is_harmless(link: Link) -> None:
    assert link.ask(ops.Drop(1, 77), ops.Drop(2, 2)) == [[1, Status.OK, None], [2, Status.OK, None]]


# Away, back, and over


def test_while_a_taker_is_away_items_go_to_others(server: FakeServer, link: Link) -> None:
    other = opened(server)
    take = ops.Take(1, b"/q", 60.0)
    link.ask(take)
    link.cut()
    other.ask(ops.Push(1, b"/q", b"first"))
    assert other.ask(ops.Take(2, b"/q", 0.0)) == [[2, Status.OK, b"first"]]
    second = back(link)
    assert second.ask(take)[1:] == []
    other.ask(ops.Push(3, b"/q", b"second"))
    assert second.read() == [[1, Status.OK, b"second"]]


def test_other_waits_go_on_while_away(server: FakeServer, link: Link) -> None:
    arrive = ops.Arrive(1, b"/b", 2, 60.0)
    link.ask(arrive)
    link.cut()
    opened(server).ask(ops.Arrive(1, b"/b", 2, 60.0))
    second = back(link)
    assert second.ask(arrive)[1:] == [[1, Status.OK, None]]
    assert value_of(server.engine, b"/b") == b"2"


def test_the_grace(server: FakeServer, link: Link) -> None:
    link.ask(ops.Lease(1, b"/k", b"v", 0.0), ops.Get(2, b"/late", 60.0), ops.Watch(3, b"/w"))
    server.tick(10.0)
    link.cut()
    server.tick(11.9)
    assert value_of(server.engine, b"/k") == b"v" and len(server.sessions) == 1
    server.tick(12.0)
    assert link.handler.session is not None and link.handler.session.over and server.sessions == []
    held = server.engine.statistics()
    assert (held.keys, held.waiters, held.watches, held.leased_keys) == (0, 0, 0, 0)
    assert back(link).read()[0][1] == Status.REFUSED


def test_coming_back_ends_the_grace(server: FakeServer, link: Link) -> None:
    link.ask(ops.Lease(1, b"/k", b"v", 0.0))
    link.cut()
    back(link)
    assert server.deadlines == 0
    server.tick(1e6)
    assert value_of(server.engine, b"/k") == b"v" and len(server.sessions) == 1


def test_bye_needs_no_grace(server: FakeServer, link: Link) -> None:
    link.ask(ops.Lease(1, b"/k", b"v", 0.0), ops.Take(2, b"/q", 60.0), ops.Bye(3))
    link.cut()
    held = server.engine.statistics()
    assert server.sessions == [] and (held.keys, held.waiters) == (0, 0)


def test_leases_end_when_the_heart_stops(server: FakeServer, link: Link) -> None:
    link.ask(ops.Lease(1, b"/beating", b"v", 3.0), ops.Lease(2, b"/plain", b"v", 0.0))
    server.tick(2.0)
    assert link.ask(ops.Beat(0)) == []
    server.tick(4.9)
    assert server.engine.exists(b"/beating")
    server.tick(5.0)
    assert server.engine.execute(ops.List(0, b"")) == [b"/plain"]
    assert server.deadlines == 0


def test_leases_end_in_time_without_a_heartbeat(server: FakeServer, link: Link) -> None:
    link.ask(ops.Lease(1, b"/beating", b"v", 3.0))
    server.tick(2.9)
    assert server.engine.exists(b"/beating")
    server.tick(3.0)
    assert not server.engine.exists(b"/beating")


def test_a_heart_that_stops_does_not_take_what_another_wrote(server: FakeServer, link: Link) -> None:
    link.ask(ops.Lease(1, b"/k", b"v", 3.0))
    opened(server).ask(ops.Set(1, b"/k", b"taken over"))
    server.tick(100.0)
    assert value_of(server.engine, b"/k") == b"taken over"


def test_a_released_lease_is_gone_and_only_the_holders_to_release(server: FakeServer, link: Link) -> None:
    link.ask(ops.Lease(1, b"/k", b"v", 3.0))
    assert opened(server).ask(ops.Unlease(1, b"/k")) == [[1, Status.OK, False]]
    assert link.ask(ops.Unlease(2, b"/k")) == [[2, Status.OK, True]]
    assert server.engine.statistics().keys == 0
    link.ask(ops.Lease(3, b"/k", b"again", 0.0))
    server.tick(100.0)
    assert value_of(server.engine, b"/k") == b"again", "it has a heartbeat no more"


def test_answers_wait_for_those_before_them_to_be_sent(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_connection, "REPLIES_BYTES", 10)
    requests = [ops.Set(1, b"/k", b"v" * 20), *(ops.Get(number, b"/k", 0.0) for number in range(2, 6))]
    handler = link.handler
    link.inbox += handler.receive(b"".join(map(frame, requests)))
    assert handler.blocked and handler.held
    while handler.blocked:
        link.inbox += handler.receive(b"")
    assert [answer[0] for answer in link.read()] == [1, 2, 3, 4, 5]
    assert handler.held == 0


# What all ranks of an exchange get


def exchanged(server: FakeServer, size: int, how: str = "all_gather") -> list[Link]:
    """Let each of four ranks give so many bytes, each by its own session."""
    links = [opened(server) for _ in range(4)]
    for rank, link in enumerate(links):
        data = bytes([rank]) * size
        link.send(frame([28, 1, b"/big", str(rank), 1, ["exchange.give", 4, rank, data, how, 0], 9.0]))
    return links


@pytest.mark.parametrize("how", ["all_gather", "broadcast"])
@pytest.mark.parametrize("size", [1, 100_000])
def test_what_many_get_is_kept_once_and_counted_once(server: FakeServer, how: str, size: int) -> None:
    links = exchanged(server, size, how)
    gathered: Any = [bytes([rank]) * size for rank in range(4)]
    answer = gathered if how == "all_gather" else gathered[0]
    assert all(link.read() == [[1, Status.OK, [records.DONE, answer]]] for link in links)
    whole, ledger = size * (4 if how == "all_gather" else 1), server.state.budget
    assert whole < ledger.kept < whole + 4 * 90
    again = back(links[0])
    assert again.read()[-1][1] == Status.OK
    repeated = again.ask([28, 1, b"/big", "0", 1, ["exchange.give", 4, 0, b"", how, 0], 9.0])
    assert repeated == [[1, Status.OK, [records.DONE, answer]]]
    for confirmed, link in enumerate([again, *links[1:3]]):
        link.ask(ops.Confirm(0, 1, [], 0))
        assert whole < ledger.kept < whole + (3 - confirmed) * 90
    links[3].cut()
    server.tick(GRACE_S)
    assert ledger.kept == 0
    again.cut()
    server.tick(2 * GRACE_S)
    assert ledger.kept == 0


@pytest.mark.parametrize("how", ["all_gather", "broadcast"])
def test_more_than_one_answer_may_have_is_an_error_for_all_ranks(how: str) -> None:
    server = FakeServer(max_answer_bytes=2000)
    for link in exchanged(server, 3000, how):
        ((_, status, (error, fields)),) = link.read()
        assert (status, error, fields["key"], fields["limit"]) == (Status.ERROR, "LimitExceeded", "/big", 2000)
        assert fields["size"] > (12_000 if how == "all_gather" else 3000)
    assert server.engine.size == 0 and server.state.namespaces[0].objects.statistics() == {}


def test_no_more_is_answered_than_may_be_kept() -> None:
    """Else it would be cut off, come back for the answer, and be cut off again."""
    server = FakeServer(max_kept_bytes=2000)
    for link in exchanged(server, 3000):
        ((_, status, (error, _)),) = link.read()
        assert (status, error) == (Status.ERROR, "LimitExceeded")


# A lossy link


class Member:
    """A client whose link is cut at random points; it keeps the answers it got, each once."""

    def __init__(self, server: FakeServer, chance: random.Random, name: str) -> None:
        self.server, self.chance = server, chance
        self.core = Client(name)
        self.asked: dict[int, tuple[type[ops.Op], tuple[Any, ...]]] = {}
        self.got: dict[int, Reply] = {}
        self.events: list[Any] = []
        self.outgoing = b""
        self.connect()

    def connect(self) -> None:
        self.link = Link(self.server, self.core.greet())
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
        """Send some of what is to be sent and read some of what came; or lose the tail of both."""
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
    """Let members add, push, take and watch over lossy links; then all is as if there had been no cut."""
    chance = random.Random(seed)
    server = FakeServer()
    members = [Member(server, chance, f"member {number}") for number in range(chance.randint(1, 3))]
    watcher = Member(server, chance, "watcher")
    watcher.ask(ops.Watch, b"/n")
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
            chance.choice(members).ask(ops.Take, b"/q", 1e6)
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
    taken = Counter(item for member in members for item in member.results(ops.Take))
    assert taken == Counter(b"%d" % number for number in range(pushes)), "every item taken once"
    assert [event.value for event in watcher.events] == [b"%d" % total for total in range(1, adds + 1)]
    assert items_of(server.engine, b"/q") == [] and waiting(server.engine) == 0


def test_beats_of_keys_that_are_leases_no_more_are_forgotten() -> None:
    server = FakeServer()
    link = Link(server)
    mine = link.handler.session
    assert mine is not None
    for number in range(1, 5001):
        link.send(frame(ops.Lease(2 * number - 1, b"/%d" % number, b"", 1e6)))
        link.send(frame(ops.Delete(2 * number, b"/%d" % number)))
        link.send(frame(ops.Confirm(0, 2 * number, [], 0)))
        assert len(mine.ttls) <= 128, "also when it never beats"
    link.send(frame(ops.Lease(10_001, b"/kept", b"", 10.0)))
    link.send(frame(ops.Lease(10_002, b"/written", b"", 10.0)))
    link.send(frame(ops.Set(10_003, b"/written", b"")))
    link.send(frame(ops.Beat(0)))
    assert list(mine.live_ttls()) == [b"/kept"]
    server.tick(10.0)
    assert server.engine.execute(ops.List(0, b"")) == [b"/written"] and b"/kept" not in mine.ttls
    link.send(frame(ops.Beat(0)))
    assert mine.live_ttls() == {}


def test_the_clock_forgets_what_is_over() -> None:
    """Waits that were dropped or answered, leases that were deleted, and all of a session that has ended."""
    server = FakeServer()
    link = opened(server)
    for number in range(1, 3001, 3):
        link.ask(ops.Get(number, b"/never", 1e8), ops.Drop(number + 1, number), ops.Take(number + 2, b"/q", 1e8))
        server.set(b"/never", b"")
        server.delete(b"/never")
    assert server.deadlines < 1500, "of the waits that were dropped"
    for number in range(3001, 5001, 2):
        link.ask(ops.Lease(number, b"/%d" % number, b"", 1e8), ops.Delete(number + 1, b"/%d" % number))
    assert server.deadlines < 1500, "of the leases that were deleted"
    link.ask(ops.Bye(5001))
    link.cut()
    assert server.deadlines < 200, "of the session that has ended"


def test_many_beating_leases_are_all_kept() -> None:
    server = FakeServer()
    link = Link(server)
    for number in range(1, 301):
        link.send(frame(ops.Lease(number, b"/%d" % number, b"", 10.0)))
    server.tick(5.0)
    link.send(frame(ops.Beat(0)))
    server.tick(12.0)
    assert server.engine.statistics().leased_keys == 300
    server.tick(15.0)
    assert server.engine.statistics().leased_keys == 0


def test_past_the_limit_only_new_sessions_are_refused() -> None:
    server = FakeServer(max_sessions=1)
    first = Link(server)
    assert first.handler.session is not None
    late = Link(server)
    assert late.handler.session is None and b"too many sessions: 1 is the limit" in late.inbox
    again = Link(server, resume=first.handler.session.id)
    assert again.handler.session is first.handler.session and server.real.refused_sessions == 1


def test_nothing_is_lost_or_doubled_by_any_cut() -> None:
    for seed in range(FIRST_SEED, FIRST_SEED + SEEDS):
        try:
            simulate(seed)
        except (AssertionError, BadMessage) as error:
            pytest.fail(f"seed {seed}: {error!r}")
