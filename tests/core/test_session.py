"""The server's end of our protocol: what a repeated number does, what is kept and forgotten, and when a session ends.

`House` here is what a host does around the core, without sockets and clocks. The last test is a simulation: clients
over a link that is cut at random points, with the tail lost both ways; each failure names its seed.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from rallypoint.core import caller, native, session
from rallypoint.core.c10d import BadMessage
from rallypoint.core.caller import Caller, Sessions
from rallypoint.core.client import Client, Reply
from rallypoint.core.engine import Engine
from rallypoint.core.native import Frames, Hello, Request, Status, frame

GRACE_S = 2.0
SEEDS, FIRST_SEED = 2000, int(os.environ.get("FIRST_SEED", "0"))


class House:
    """A server without sockets: an engine, its sessions, and the time."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.sessions = Sessions(self.engine, b"server", GRACE_S)
        self.now = 0.0
        self.links = 0

    def tick(self, now: float) -> None:
        self.now = now
        self.engine.tick(now)
        self.sessions.expire(now)
        self.deliver()

    def deliver(self) -> None:
        while out := self.engine.take():
            for handle, answer in out:
                data = handle.owner.answer(handle, answer)
                if handle.owner.link is not None:
                    handle.owner.link.inbox += bytes(data)


class Link:
    """One connection to a house: what it was sent is in `inbox`."""

    def __init__(self, house: House, hello: bytes | None = None, resume: bytes = b"", seen: int = 0) -> None:
        house.links += 1
        self.house = house
        self.inbox = b""
        self.caller = Caller(house.sessions, self, 1 << 20, b"session %d" % house.links)
        self.send(hello or frame(Hello(native.VERSION, "test", resume, seen)))

    def send(self, data: bytes) -> None:
        self.inbox += self.caller.receive(data, self.house.now)
        self.house.deliver()

    def ask(self, *requests: Request | list[Any]) -> list[Any]:
        """Send requests, and return all that has come."""
        self.send(b"".join(map(frame, requests)))
        return self.read()

    def read(self) -> list[Any]:
        data, self.inbox = self.inbox, b""
        return [msgspec.msgpack.decode(payload) for payload in Frames(1 << 20).feed(data)]

    def cut(self) -> None:
        self.caller.end(self.house.now)
        self.house.deliver()


@pytest.fixture
def house() -> House:
    return House()


@pytest.fixture
def link(house: House) -> Link:
    return opened(house)


def opened(house: House) -> Link:
    link = Link(house)
    link.read()
    return link


def back(link: Link, seen: int = 0) -> Link:
    """Come back to a link's session on a new one."""
    assert link.caller.session is not None
    return Link(link.house, resume=link.caller.session.id, seen=seen)


# The greeting


def test_a_new_session_is_welcomed(house: House) -> None:
    link = Link(house)
    assert link.read() == [[0, Status.OK, [native.VERSION, b"server", b"session 1", GRACE_S, False, True, True]]]
    again = back(link)
    assert again.read() == [[0, Status.OK, [native.VERSION, b"server", b"session 1", GRACE_S, True, True, True]]]


def test_an_unknown_version_is_refused_and_told_why(house: House) -> None:
    ((number, status, (identity, why)),) = Link(house, frame(Hello(99, "test"))).read()
    assert (number, status, identity) == (0, Status.REFUSED, b"server")
    assert "version 99" in why and str(native.VERSION) in why
    assert list(house.sessions) == []


def test_an_unknown_session_is_refused_by_a_server_that_says_who_it_is(house: House) -> None:
    ((_, status, (identity, why)),) = Link(house, resume=b"of another").read()
    assert (status, identity) == (Status.REFUSED, b"server")
    assert "no such session" in why


def test_a_second_connection_takes_over(house: House, link: Link) -> None:
    link.ask(native.Lease(1, b"/k", b"v", 0.0), native.Take(2, b"/q", 60.0))
    second = back(link)
    second.read()
    with pytest.raises(BadMessage, match="another connection"):
        link.ask(native.Ping(3))
    link.cut()
    house.tick(10 * GRACE_S)
    assert house.engine.get(b"/k") == b"v"
    assert second.ask(native.Push(3, b"/q", b"item")) == [[3, Status.OK, None], [2, Status.OK, b"item"]]


# Exactly once

WRITES = {
    "add": (native.Add(1, b"/n", 5), 5, b"5"),
    "append": (native.Append(1, b"/n", b"x"), None, b"x"),
    "swap": (native.Swap(1, b"/n", None, b"x"), [True, b"x"], b"x"),
    "compare_set": (native.CompareSet(1, b"/n", b"", b"x"), b"x", b"x"),
    "barrier": (native.Arrive(1, b"/n", 1, 5.0), None, b"1"),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_repeated_write_has_its_answer_again_and_ran_once(name: str, house: House, link: Link) -> None:
    request, result, value = WRITES[name]
    answer = [[1, Status.OK, result]]
    assert link.ask(request) == answer
    assert link.ask(request) == answer
    link.cut()
    again = back(link)
    again.read()
    assert again.ask(request) == answer
    assert house.engine.get(b"/n") == value


def test_a_repeated_error_is_the_same_error(house: House, link: Link) -> None:
    house.engine.set(b"/n", b"word")
    first = link.ask(native.Add(1, b"/n", 1))
    assert first[0][1:] == [Status.ERROR, ["NotAnInteger", {"key": "/n", "value": b"word"}]]
    house.engine.set(b"/n", b"5")
    assert link.ask(native.Add(1, b"/n", 1)) == first


def test_a_repeated_read_reads_again(house: House, link: Link) -> None:
    get = native.Get(1, b"/k", 5.0)
    house.engine.set(b"/k", b"old")
    assert link.ask(get) == [[1, Status.OK, [b"old"]]]
    house.engine.set(b"/k", b"new")
    assert link.ask(get) == [[1, Status.OK, [b"new"]]]


@pytest.mark.parametrize("kind", ["get", "take", "barrier"])
def test_a_repeated_wait_goes_on_waiting_once(kind: str, house: House, link: Link) -> None:
    wait = {
        "get": native.Get(1, b"/k", 5.0),
        "take": native.Take(1, b"/k", 5.0),
        "barrier": native.Arrive(1, b"/k", 2, 5.0),
    }[kind]
    assert link.ask(wait, wait) == []
    assert house.engine.statistics().waiters == 1
    house.tick(5.0)
    assert link.read() == [[1, Status.TIMED_OUT, [b"/k"]]]


def test_a_wait_of_no_time_leaves_nothing(house: House, link: Link) -> None:
    assert link.ask(native.Get(1, b"/k", 0.0)) == [[1, Status.TIMED_OUT, [b"/k"]]]
    assert link.ask(native.Arrive(2, b"/b", 2, 0.0)) == [[2, Status.TIMED_OUT, [b"/b"]]]
    assert house.engine.statistics().waiters == 0
    assert house.engine.get(b"/b") == b"0"


def test_confirming_forgets_what_is_not_open(link: Link) -> None:
    link.ask(native.Add(1, b"/n", 1), native.Add(2, b"/n", 1), native.Add(3, b"/n", 1))
    assert link.ask(native.Confirm(0, 2, [1], 0)) == []
    assert link.ask(native.Add(1, b"/n", 1)) == [[1, Status.OK, 1]]
    assert link.ask(native.Add(3, b"/n", 1)) == [[3, Status.OK, 3]]
    with pytest.raises(BadMessage, match="request 2 came again"):
        link.ask(native.Add(2, b"/n", 1))


def test_a_client_that_never_confirms_is_dropped(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_KEPT", 10)
    for number in range(1, 12):
        link.ask(native.Add(number, b"/n", 1))
    with pytest.raises(BadMessage, match=r"11 answers, 0 pushes, .* bytes are unconfirmed"):
        link.ask(native.Add(12, b"/n", 1))


def test_so_is_one_that_leaves_too_many_bytes(house: House, link: Link) -> None:
    house.sessions.ledger.limit = 1000
    link.ask(native.Push(1, b"/q", b"x" * 2000), native.Take(2, b"/q", 0.0))
    with pytest.raises(BadMessage, match="unconfirmed"):
        link.ask(native.Ping(3))


def test_it_may_still_confirm(house: House, link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_KEPT", 10)
    link.ask(native.Watch(1, b"/"))
    for number in range(20):
        house.engine.set(b"/k", b"%d" % number)
    house.deliver()
    assert link.ask(native.Confirm(0, 1, [], 20), native.Ping(2))[-1] == [2, Status.OK, None]


# Pushes


def test_pushes_are_numbered_and_kept_until_seen(house: House, link: Link) -> None:
    link.ask(native.Watch(4, b"/a"))
    for key in (b"/a1", b"/b", b"/a2"):
        house.engine.set(key, b"v")
    house.engine.delete(b"/a1")
    house.deliver()
    pushes = [[0, 1, [4, 1, b"/a1", b"v"]], [0, 2, [4, 3, b"/a2", b"v"]], [0, 3, [4, 4, b"/a1", None]]]
    assert link.read() == pushes
    link.cut()
    house.engine.set(b"/a3", b"while away")
    house.deliver()
    later = [0, 4, [4, 5, b"/a3", b"while away"]]
    second = back(link, seen=1)
    assert second.read()[1:] == [*pushes[1:], later]
    second.ask(native.Confirm(0, 0, [], 3))
    assert back(second).read()[1:] == [later]


# Giving up


def test_a_dropped_wait_stays_unanswered(house: House, link: Link) -> None:
    assert link.ask(native.Get(1, b"/k", 5.0), native.Drop(2, 1)) == [[2, Status.OK, None]]
    assert house.engine.statistics().waiters == 0
    house.engine.set(b"/k", b"v")
    house.tick(10.0)
    assert link.read() == []


def test_a_dropped_arrival_is_taken_back(house: House, link: Link) -> None:
    link.ask(native.Arrive(1, b"/b", 2, 5.0))
    assert house.engine.get(b"/b") == b"1"
    link.ask(native.Drop(2, 1))
    assert house.engine.get(b"/b") == b"0"


def test_a_dropped_watch_sees_no_more(house: House, link: Link) -> None:
    link.ask(native.Watch(1, b"/"), native.Drop(2, 1))
    house.engine.set(b"/k", b"v")
    house.deliver()
    assert link.read() == []
    assert house.engine.statistics().watches == 0


@pytest.mark.parametrize("waited", [False, True])
def test_a_dropped_take_that_was_answered_gives_its_item_back_to_the_front(
    waited: bool, house: House, link: Link
) -> None:
    pushes = [native.Push(2, b"/q", b"a"), native.Push(3, b"/q", b"b")]
    take = native.Take(1 if waited else 4, b"/q", 5.0)
    link.ask(*([take, *pushes] if waited else [*pushes, take]))
    assert house.engine.queue_len(b"/q") == 1
    drop = native.Drop(5, take.number)
    assert link.ask(drop, drop, native.Drop(6, take.number))[-1] == [6, Status.OK, None]
    assert [house.engine.queue_pop(b"/q") for _ in range(3)] == [b"a", b"b", None]


def test_a_confirmed_take_is_not_given_back(house: House, link: Link) -> None:
    link.ask(native.Push(1, b"/q", b"a"), native.Take(2, b"/q", 5.0), native.Confirm(0, 2, [], 0), native.Drop(3, 2))
    assert house.engine.queue_len(b"/q") == 0


def test_a_take_dropped_before_its_answer_went_out_gives_its_item_back_once(house: House, link: Link) -> None:
    link.ask(native.Take(1, b"/q", 5.0))
    answers = link.ask(native.Push(2, b"/q", b"a"), native.Drop(3, 1), native.Drop(4, 1))
    assert [answer[0] for answer in answers] == [2, 3, 4]
    assert link.ask(native.Drop(5, 1)) == [[5, Status.OK, None]]
    assert [house.engine.queue_pop(b"/q") for _ in range(2)] == [b"a", None]


def test_dropping_what_never_was_is_harmless(link: Link) -> None:
    assert link.ask(native.Drop(1, 77), native.Drop(2, 2)) == [[1, Status.OK, None], [2, Status.OK, None]]


# Away, back, and over


def test_while_a_taker_is_away_items_go_to_others(house: House, link: Link) -> None:
    other = opened(house)
    take = native.Take(1, b"/q", 60.0)
    link.ask(take)
    link.cut()
    other.ask(native.Push(1, b"/q", b"first"))
    assert other.ask(native.Take(2, b"/q", 0.0)) == [[2, Status.OK, b"first"]]
    second = back(link)
    assert second.ask(take)[1:] == []
    other.ask(native.Push(3, b"/q", b"second"))
    assert second.read() == [[1, Status.OK, b"second"]]


def test_other_waits_go_on_while_away(house: House, link: Link) -> None:
    arrive = native.Arrive(1, b"/b", 2, 60.0)
    link.ask(arrive)
    link.cut()
    opened(house).ask(native.Arrive(1, b"/b", 2, 60.0))
    second = back(link)
    assert second.ask(arrive)[1:] == [[1, Status.OK, None]]
    assert house.engine.get(b"/b") == b"2"


def test_the_grace(house: House, link: Link) -> None:
    link.ask(native.Lease(1, b"/k", b"v", 0.0), native.Get(2, b"/late", 60.0), native.Watch(3, b"/w"))
    assert house.sessions.next_end() == float("inf")
    house.now = 10.0
    link.cut()
    assert house.sessions.next_end() == 10.0 + GRACE_S
    assert house.sessions.expire(11.9) == []
    assert house.engine.get(b"/k") == b"v"
    (gone,) = house.sessions.expire(12.0)
    assert gone.over and list(house.sessions) == []
    held = house.engine.statistics()
    assert (held.keys, held.waiters, held.watches, held.leased_keys) == (0, 0, 0, 0)
    assert back(link).read()[0][1] == Status.REFUSED
    assert house.sessions.next_end() == float("inf")


def test_coming_back_ends_the_grace(house: House, link: Link) -> None:
    link.ask(native.Lease(1, b"/k", b"v", 0.0))
    link.cut()
    back(link)
    assert house.sessions.next_end() == float("inf")
    assert house.sessions.expire(1e6) == []
    assert house.engine.get(b"/k") == b"v"


def test_bye_needs_no_grace(house: House, link: Link) -> None:
    link.ask(native.Lease(1, b"/k", b"v", 0.0), native.Take(2, b"/q", 60.0), native.Bye(3))
    link.cut()
    assert list(house.sessions) == [] and house.engine.num_keys() == 0 and house.engine.statistics().waiters == 0


def test_leases_end_when_the_heart_stops(house: House, link: Link) -> None:
    link.ask(native.Lease(1, b"/beating", b"v", 3.0), native.Lease(2, b"/plain", b"v", 0.0))
    assert house.sessions.next_end() == 3.0
    house.tick(2.0)
    assert link.ask(native.Beat(0)) == []
    assert house.sessions.next_end() == 5.0
    house.tick(4.9)
    assert house.engine.check([b"/beating"])
    house.tick(5.0)
    assert house.engine.list_keys() == [b"/plain"]
    assert house.sessions.next_end() == float("inf")


def test_a_heart_that_stops_does_not_take_what_another_wrote(house: House, link: Link) -> None:
    link.ask(native.Lease(1, b"/k", b"v", 3.0))
    opened(house).ask(native.Set(1, b"/k", b"taken over"))
    house.tick(100.0)
    assert house.engine.get(b"/k") == b"taken over"


def test_a_released_lease_is_gone_and_only_the_holders_to_release(house: House, link: Link) -> None:
    link.ask(native.Lease(1, b"/k", b"v", 3.0))
    assert opened(house).ask(native.Unlease(1, b"/k")) == [[1, Status.OK, False]]
    assert link.ask(native.Unlease(2, b"/k")) == [[2, Status.OK, True]]
    assert house.engine.num_keys() == 0 and house.sessions.next_end() == float("inf")


def test_answers_wait_for_those_before_them_to_be_sent(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caller, "REPLIES_BYTES", 10)
    requests = [native.Set(1, b"/k", b"v" * 20), *(native.Get(number, b"/k", 0.0) for number in range(2, 6))]
    link.send(b"".join(map(frame, requests)))
    assert link.caller.blocked and link.caller.held
    while link.caller.blocked:
        link.send(b"")
    assert [answer[0] for answer in link.read()] == [1, 2, 3, 4, 5]
    assert link.caller.held == 0


# What all ranks of an exchange get


def exchanged(house: House, size: int, how: str = "all_gather") -> list[Link]:
    """Let each of four ranks give so many bytes, each by its own session."""
    links = [opened(house) for _ in range(4)]
    for rank, link in enumerate(links):
        data = bytes([rank]) * size
        link.send(frame([28, 1, b"/big", str(rank), 1, ["exchange.give", 4, rank, data, how, 0], 9.0]))
    return links


@pytest.mark.parametrize("how", ["all_gather", "broadcast"])
@pytest.mark.parametrize("size", [1, 100_000])
def test_what_many_get_is_kept_once_and_counted_once(house: House, how: str, size: int) -> None:
    links = exchanged(house, size, how)
    gathered: Any = [bytes([rank]) * size for rank in range(4)]
    answer = gathered if how == "all_gather" else gathered[0]
    assert all(link.read() == [[1, Status.OK, [native.DONE, answer]]] for link in links)
    whole, ledger = size * (4 if how == "all_gather" else 1), house.sessions.ledger
    assert whole < ledger.kept < whole + 4 * 50
    again = back(links[0])
    assert again.read()[-1][1] == Status.OK
    repeated = again.ask([28, 1, b"/big", "0", 1, ["exchange.give", 4, 0, b"", how, 0], 9.0])
    assert repeated == [[1, Status.OK, [native.DONE, answer]]]
    for confirmed, link in enumerate([again, *links[1:3]]):
        link.ask(native.Confirm(0, 1, [], 0))
        assert whole < ledger.kept < whole + (3 - confirmed) * 50
    links[3].cut()
    house.tick(GRACE_S)
    assert ledger.kept == 0
    again.cut()
    house.tick(2 * GRACE_S)
    assert ledger.kept == 0


@pytest.mark.parametrize("how", ["all_gather", "broadcast"])
def test_more_than_one_answer_may_have_is_an_error_for_all_ranks(house: House, how: str) -> None:
    house.sessions.ledger.answer_limit = 2000
    for link in exchanged(house, 3000, how):
        ((_, status, (error, fields)),) = link.read()
        assert (status, error, fields["key"], fields["limit"]) == (Status.ERROR, "LimitExceeded", "/big", 2000)
        assert fields["size"] > (12_000 if how == "all_gather" else 3000)
    assert house.engine.size == 0 and house.sessions.objects.statistics() == {}


def test_no_more_is_answered_than_may_be_kept(house: House) -> None:
    """Else it would be cut off, come back for the answer, and be cut off again."""
    house.sessions.ledger.limit = 2000
    for link in exchanged(house, 3000):
        ((_, status, (error, _)),) = link.read()
        assert (status, error) == (Status.ERROR, "LimitExceeded")


# A lossy link


class Member:
    """A client whose link is cut at random points; it keeps the answers it got, each once."""

    def __init__(self, house: House, chance: random.Random, name: str) -> None:
        self.house, self.chance = house, chance
        self.core = Client(name)
        self.asked: dict[int, tuple[type[Request], tuple[Any, ...]]] = {}
        self.got: dict[int, Reply] = {}
        self.events: list[Any] = []
        self.outgoing = b""
        self.connect()

    def connect(self) -> None:
        self.link = Link(self.house, self.core.greet())
        welcome, *pushes = self.core.receive(self.take_inbox())
        self.core.welcome(welcome, "house")
        for reply in pushes:
            self.deliver(reply)
        self.outgoing = self.core.repeat()

    def take_inbox(self) -> bytes:
        data, self.link.inbox = self.link.inbox, b""
        return data

    def ask(self, kind: type[Request], *arguments: Any) -> None:
        number, data = self.core.number, self.core.ask(kind, *arguments)
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

    def results(self, kind: type[Request]) -> list[Any]:
        return [self.got[number].result for number, (asked, _) in self.asked.items() if asked is kind]


def simulate(seed: int) -> None:
    """Let members add, push, take and watch over lossy links; then all is as if there had been no cut."""
    chance = random.Random(seed)
    house = House()
    members = [Member(house, chance, f"member {number}") for number in range(chance.randint(1, 3))]
    watcher = Member(house, chance, "watcher")
    watcher.ask(native.Watch, b"/n")
    while not watcher.got:
        watcher.step(lossy=True)
    adds = pushes = 0
    for _ in range(chance.randint(5, 30)):
        member = chance.choice(members)
        if chance.random() < 0.6:
            member.ask(native.Add, b"/n", 1)
            adds += 1
        else:
            member.ask(native.Push, b"/q", b"%d" % pushes)
            chance.choice(members).ask(native.Take, b"/q", 1e6)
            pushes += 1
        chance.choice([*members, watcher]).step(lossy=True)
    for _ in range(4):
        for member in [*members, watcher]:
            member.step(lossy=False)
    for member in members:
        assert len(member.got) == len(member.asked)
        assert member.results(native.Add) == sorted(member.results(native.Add)), "its own adds ran in order"
    added = [total for member in members for total in member.results(native.Add)]
    assert sorted(added) == list(range(1, adds + 1)), "every add counted once"
    taken = Counter(item for member in members for item in member.results(native.Take))
    assert taken == Counter(b"%d" % number for number in range(pushes)), "every item taken once"
    assert [event.value for event in watcher.events] == [b"%d" % total for total in range(1, adds + 1)]
    assert house.engine.queue_len(b"/q") == 0 and house.engine.statistics().waiters == 0


def test_beats_of_keys_that_are_leases_no_more_are_forgotten() -> None:
    house = House()
    link = Link(house)
    mine = link.caller.session
    assert mine is not None
    for number in range(1, 5001):
        link.send(frame(native.Lease(2 * number - 1, b"/%d" % number, b"", 1e6)))
        link.send(frame(native.Delete(2 * number, b"/%d" % number)))
        link.send(frame(native.Confirm(0, 2 * number, [], 0)))
        assert len(mine._beats) <= 128, "also when it never beats"
    link.send(frame(native.Lease(10_001, b"/kept", b"", 10.0)))
    link.send(frame(native.Lease(10_002, b"/written", b"", 10.0)))
    link.send(frame(native.Set(10_003, b"/written", b"")))
    link.send(frame(native.Beat(0)))
    assert list(mine._beats) == [b"/kept"] and house.sessions.next_end() == 10.0
    link.send(frame(native.Delete(10_004, b"/kept")))
    link.send(frame(native.Beat(0)))
    assert mine._beats == {} and house.sessions.next_end() == float("inf")


def test_many_beating_leases_are_all_kept() -> None:
    house = House()
    link = Link(house)
    for number in range(1, 301):
        link.send(frame(native.Lease(number, b"/%d" % number, b"", 10.0)))
    house.now = 5.0
    link.send(frame(native.Beat(0)))
    house.tick(12.0)
    assert house.engine.statistics().leased_keys == 300
    house.tick(15.0)
    assert house.engine.statistics().leased_keys == 0


def test_past_the_limit_only_new_sessions_are_refused() -> None:
    house = House()
    house.sessions.limit = 1
    first = Link(house)
    assert first.caller.session is not None
    late = Link(house)
    assert late.caller.session is None and b"no more are allowed" in late.inbox
    again = Link(house, resume=first.caller.session.id)
    assert again.caller.session is first.caller.session and house.sessions.refused == 1


def test_nothing_is_lost_or_doubled_by_any_cut() -> None:
    for seed in range(FIRST_SEED, FIRST_SEED + SEEDS):
        try:
            simulate(seed)
        except (AssertionError, BadMessage) as error:
            pytest.fail(f"seed {seed}: {error!r}")
