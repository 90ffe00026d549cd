"""Where a search goes when servers stand by for another, and what it learns from them."""

from __future__ import annotations

import time
from collections.abc import Mapping

import pytest

from rallypoint.deadline import Deadline
from rallypoint.errors import NoQuorum, ServerRestarted, SessionLost
from rallypoint.net import Endpoint, Endpoints
from rallypoint.protocol.client import Client
from rallypoint.protocol.native import Standby
from rallypoint.store.route import MAX_ADDRESSES, PAUSE_S, Route
from rallypoint.store.search import PATIENCE_S, STANDBY_PAUSE_S, Search

A, B, C, D = (Endpoint(name, 1) for name in "abcd")
RESTARTED = ServerRestarted(peer="b:1", why="another")


def url(endpoint: Endpoint | None) -> str:
    return f"tcp://{endpoint}" if endpoint is not None else ""


def route(*endpoints: Endpoint) -> Route:
    return Route(Endpoints(endpoints))


def says(leader: Endpoint | None, *servers: Endpoint, no_quorum: bool = False) -> Standby:
    return Standby(url(leader), [url(each) for each in servers], "words", no_quorum)


def tried(search: Search, standbys: Mapping[Endpoint, Standby]) -> list[object]:
    """Meet standbys at some addresses and refusals at all others; return what was tried in a round."""
    found: list[object] = []
    for address, _ in search.round():
        found.append(address)
        assert len(found) < 100, "it spins"
        assert isinstance(address, Endpoint)
        if address in standbys:
            search.stands_by(address, standbys[address])
        else:
            search.failed(address, "refused")
    return found


@pytest.mark.parametrize("resumes", [False, True])
def test_the_leader_that_a_standby_names_is_next_also_where_it_was_not_given(resumes: bool) -> None:
    search = Search(route(A), Deadline(60), resumes)
    assert tried(search, {A: says(C, A, B, C)}) == [A, C, B]
    assert search.pause_s() <= PAUSE_S[0]
    search = Search(route(A, B, C), Deadline(60), resumes)
    assert tried(search, {A: says(C, A, B, C), B: says(C)}) == [A, C, B]


def test_a_leader_that_is_silent_is_not_tried_before_the_others_again() -> None:
    three = route(A, B, C)
    search = Search(three, Deadline(60), resumes=True)
    for address, turn in search.round():
        if address is A:
            turn.at = time.monotonic()  # it took all of its turn
            search.failed(A, "no answer")
        else:
            search.stands_by(address, says(A))
    search.pause_s()
    assert tried(search, {B: says(A), C: says(A)}) == [B, C, A]
    search.pause_s()
    assert tried(search, {B: says(A), C: says(A)}) == [A, B, C], "it refused, which takes no time"


@pytest.mark.parametrize(
    "standbys",
    [
        {A: says(A)},
        {A: says(B), B: says(A)},
        {A: says(B), B: says(C), C: says(A)},
        {A: says(None, A, B), B: says(None, A, B)},
        {A: says(D), B: says(D), C: says(D)},
    ],
    ids=["itself", "each other", "a circle", "nobody", "a dead one"],
)
def test_standbys_of_no_use_cost_a_pause_a_round(standbys: dict[Endpoint, Standby]) -> None:
    search, pauses_s = Search(route(A, B, C), Deadline(1e6), resumes=True), []
    for _ in range(20):
        found = tried(search, standbys)
        assert len(set(found)) == len(found), "none twice in a round"
        pauses_s.append(search.pause_s())
    assert min(pauses_s[-5:]) >= STANDBY_PAUSE_S / 2, "they grow"
    assert max(pauses_s) <= STANDBY_PAUSE_S, "but not so far as if nobody were there"


def test_pauses_begin_again_when_a_standby_says_something_new() -> None:
    search = Search(route(A, B), Deadline(1e6), resumes=True)
    for _ in range(20):
        tried(search, {B: says(A)})
        search.pause_s()
    tried(search, {B: says(None)})
    assert search.pause_s() <= PAUSE_S[0]
    tried(search, {B: says(None)})
    assert search.pause_s() > PAUSE_S[0] / 2
    assert [search.pause_s() for _ in range(20) if tried(search, {B: says(None)})][-1] >= STANDBY_PAUSE_S / 2


def test_a_patience_with_a_silent_leader_grows_slowly_while_others_answer() -> None:
    search, moments = Search(route(A, B), Deadline(1e6), resumes=True), []
    for _ in range(4):
        for address, turn in search.round():
            if address is A:
                moments.append(turn.timeout_s)
                search.failed(A, "no answer")
            else:
                search.stands_by(B, says(A))
        search.pause_s()
    assert moments == [PATIENCE_S[0] * 1.5**n for n in range(4)]


# Without a quorum


def test_a_search_that_ends_without_a_quorum_says_so() -> None:
    search = Search(route(A, B), Deadline(0))
    tried(search, {B: says(None, no_quorum=True)})
    with pytest.raises(NoQuorum) as caught:
        search.pause_s()
    assert (caught.value.store, caught.value.timeout_s) == ("tcp://a:1,b:1", 0.0)
    assert caught.value.tried == search.no_quorum == {"a:1": "refused", "b:1": "it stands by: words"}


def test_no_session_ends_for_want_of_a_quorum_and_its_time_begins_again_with_one() -> None:
    deadline = Deadline(60.0)
    search = Search(route(A, B), deadline, resumes=True)
    deadline.at = time.monotonic() - 1.0
    tried(search, {B: says(None, no_quorum=True)})
    search.pause_s()
    assert deadline.remaining() > 50.0
    tried(search, {})
    search.pause_s()
    deadline.at = time.monotonic() - 1.0
    tried(search, {})
    assert search.no_quorum == {}
    with pytest.raises(TimeoutError):
        search.pause_s()


# Addresses that were not given


def test_the_addresses_that_were_given_stay_and_the_others_are_those_said_last() -> None:
    one = route(A)
    one.learn([url(B), url(A), url(C)])
    assert one.addresses == (A, B, C) and one.several and one.doubted
    one.learn([url(D)])
    assert one.addresses == (A, D)
    one.learn([f"tcp://host{n}:1" for n in range(100)])
    assert len(one.addresses) == MAX_ADDRESSES and one.addresses[0] == A
    one.learn(["", "tcp://b", "nonsense://", "tcp://b:99999", "unix:///tmp/x"])
    assert one.addresses == (A,) and not one.several and one.doubted, "others may come"


def test_more_than_so_many_may_be_given() -> None:
    many = route(*(Endpoint(f"host{n}", 1) for n in range(2 * MAX_ADDRESSES)))
    many.learn([url(A)])
    assert len(many.addresses) == 2 * MAX_ADDRESSES


def test_where_the_session_is_stays_the_first_though_it_is_no_server_any_more() -> None:
    one = route(A)
    one.learn([url(B)])
    one.arrived(B, Client("test", b"id"))
    one.learn([url(C)])
    assert one.order() == [B, A, C] and one.identity == b"id"
    assert one.copy().order() == [B, A, C]
    one.leave()
    assert one.order() == [A, C]


def test_a_server_on_loopback_is_that_of_another_host_unless_we_are_on_it() -> None:
    far, near = route(A), route(Endpoint("127.0.0.1", 5))
    for each in (far, near):
        each.learn(["tcp://127.0.0.1:7", "tcp://localhost:8", url(B)])
    assert far.addresses == (A, B)
    assert near.addresses == (near.at, Endpoint("127.0.0.1", 7), Endpoint("localhost", 8), B)
    search = Search(route(A), Deadline(60))
    assert tried(search, {A: says(Endpoint("127.0.0.1", 7), A)}) == [A], "nobody is called who may be another's"


def test_another_store_at_an_address_that_was_learned_ends_nothing() -> None:
    one = route(A)
    one.learn([url(B)])
    search = Search(one, Deadline(60), resumes=True)
    assert search.ends(A, RESTARTED) and not search.ends(B, RESTARTED)
    assert search.ends(B, SessionLost(peer="b:1", why="it is over"))
