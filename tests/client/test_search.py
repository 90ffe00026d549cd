"""How a search for the leader uses the replies of standbys, and which addresses it learns from them."""

from __future__ import annotations

import time
from collections.abc import Mapping

import pytest

from rallypoint.client.routing.relay_address import RelayAddress
from rallypoint.client.routing.route import MAX_ADDRESSES, PAUSE_S, Address, Route
from rallypoint.client.routing.search import PATIENCE_S, STANDBY_PAUSE_S, Search
from rallypoint.client.routing.server_replies import NOT_OF_SEVERAL, IsStandby, accepts
from rallypoint.deadline import Deadline
from rallypoint.errors import NoQuorum, ServerRestarted, SessionLost
from rallypoint.net import Endpoint, Endpoints
from rallypoint.protocol import BadMessage
from rallypoint.protocol.native import ACCEPTED, PREFACE, Standby
from rallypoint.protocol.native_client import ClientProtocol

A, B, C, D = (Endpoint(name, 1) for name in "abcd")
RESTARTED = ServerRestarted(peer="b:1", why="another")


def url(endpoint: Endpoint | None) -> str:
    return f"tcp://{endpoint}" if endpoint is not None else ""


def route(*endpoints: Endpoint) -> Route:
    return Route(Endpoints(endpoints))


def says(leader: Endpoint | None, *servers: Endpoint, no_quorum: bool = False) -> Standby:
    return Standby(url(leader), [url(each) for each in servers], "words", no_quorum)


def tried(search: Search, standbys: Mapping[Endpoint, Standby]) -> list[object]:
    """Run a round with standbys at some addresses and refusals at all others; return the addresses tried."""
    found: list[object] = []
    for address, _ in search.round():
        found.append(address)
        assert len(found) < 100, "the round does not end"
        assert isinstance(address, Endpoint)
        if address in standbys:
            search.stands_by(address, standbys[address])
        else:
            search.failed(address, "refused")
    return found


@pytest.mark.parametrize("resumes", [False, True])
def test_the_leader_named_by_a_standby_is_tried_next_even_if_its_address_was_not_given(resumes: bool) -> None:
    search = Search(route(A), Deadline(60), resumes)
    assert tried(search, {A: says(C, A, B, C)}) == [A, C, B]
    assert search.pause_s() <= PAUSE_S[0]
    search = Search(route(A, B, C), Deadline(60), resumes)
    assert tried(search, {A: says(C, A, B, C), B: says(C)}) == [A, C, B]


def silent_leader(search: Search) -> None:
    """Make a round in which A does not answer, and the others name it as their leader."""
    for address, turn in search.round():
        if address is A:
            turn.at = time.monotonic()  # it took all of its turn
            search.failed(A, "no answer")
        else:
            search.stands_by(address, says(A))


def test_a_silent_leader_is_tried_last_in_the_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rallypoint.client.routing.search.AGAIN", 0.0)
    three = route(A, B, C)
    search = Search(three, Deadline(60), resumes=True)
    silent_leader(search)
    search.pause_s()
    assert tried(search, {B: says(A), C: says(A)}) == [B, C, A]
    search.pause_s()
    assert tried(search, {B: says(A), C: says(A)}) == [A, B, C], "it refused, which costs no time"


def test_a_silent_leader_is_skipped_while_others_are_standbys() -> None:
    """Otherwise every round would last as long as a silent server may take."""
    search = Search(route(A, B, C), Deadline(1e6), resumes=True)
    silent_leader(search)
    for _ in range(3):
        search.pause_s()
        assert tried(search, {B: says(A), C: says(A)}) == [B, C]
    search.pause_s()
    found = {address: turn.timeout_s for address, turn in search.round()}
    assert list(found) == [B, C, A], "nobody is a standby any more"
    assert found[A] == PATIENCE_S[0] * 1.5, "its time does not grow in rounds that skip it"


def test_a_server_left_because_it_hangs_is_skipped_by_the_next_search() -> None:
    three = route(A, B, C)
    three.leave(hangs=True)
    assert tried(Search(three, Deadline(60), resumes=True), {B: says(A), C: says(A)}) == [B, C]
    assert tried(Search(three, Deadline(60), resumes=True), {B: says(A)}) == [B, A, C], "later searches do not skip it"
    three.leave()
    assert tried(Search(three, Deadline(60), resumes=True), {C: says(A)}) == [C, A, B]


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
def test_standbys_without_a_reachable_leader_cause_a_pause_per_round(standbys: dict[Endpoint, Standby]) -> None:
    search, pauses_s = Search(route(A, B, C), Deadline(1e6), resumes=True), []
    for _ in range(20):
        found = tried(search, standbys)
        assert len(set(found)) == len(found), "no address is tried twice in a round"
        pauses_s.append(search.pause_s())
    assert min(pauses_s[-5:]) >= STANDBY_PAUSE_S / 2, "pauses grow"
    assert max(pauses_s) <= STANDBY_PAUSE_S, "but stay shorter than without standbys"


def test_pauses_start_over_when_a_standby_reports_a_change() -> None:
    search = Search(route(A, B), Deadline(1e6), resumes=True)
    for _ in range(20):
        tried(search, {B: says(A)})
        search.pause_s()
    tried(search, {B: says(None)})
    assert search.pause_s() <= PAUSE_S[0]
    tried(search, {B: says(None)})
    assert search.pause_s() > PAUSE_S[0] / 2
    assert [search.pause_s() for _ in range(20) if tried(search, {B: says(None)})][-1] >= STANDBY_PAUSE_S / 2


@pytest.mark.parametrize(
    ("longest_s", "expected"),
    [(None, [PATIENCE_S[0] * 1.5**n for n in range(4)]), (2.0, [1.0, 1.5, 2.0, 2.0])],
    ids=["no limit", "limit"],
)
def test_the_time_for_a_silent_leader_grows_slowly_while_others_reply(
    longest_s: float | None, expected: list[float]
) -> None:
    search, moments = Search(route(A, B), Deadline(1e6), resumes=True, longest_s=longest_s), []
    for _ in range(4):
        for address, turn in search.round():
            if address is A:
                moments.append(turn.timeout_s)
                search.failed(A, "no answer")
            else:
                search.stands_by(B, says(A))
        search.pause_s()
    assert moments == expected


# Without a quorum


def test_a_search_without_a_quorum_raises_no_quorum() -> None:
    search = Search(route(A, B), Deadline(0))
    tried(search, {B: says(None, no_quorum=True)})
    with pytest.raises(NoQuorum) as caught:
        search.pause_s()
    assert (caught.value.store, caught.value.timeout_s) == ("tcp://a:1,b:1", 0.0)
    assert caught.value.tried == search.no_quorum == {"a:1": "refused", "b:1": "standby: words"}


def test_a_session_survives_the_loss_of_quorum_and_its_deadline_restarts_afterwards() -> None:
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


# Learned addresses


def test_given_addresses_stay_and_learned_ones_are_those_reported_last() -> None:
    one = route(A)
    one.update_servers([url(B), url(A), url(C)])
    assert list(one.addresses) == [A, B, C] and one.several and one.has_alternative
    one.update_servers([url(D)])
    assert list(one.addresses) == [A, D]
    one.update_servers([f"tcp://host{n}:1" for n in range(100)])
    assert len(one.addresses) == MAX_ADDRESSES and one.addresses[0] == A
    one.update_servers(["", "tcp://b", "nonsense://", "tcp://b:99999", "unix:///tmp/x"])
    assert list(one.addresses) == [A] and not one.several and one.has_alternative, "others may be learned later"


def test_given_addresses_are_not_limited() -> None:
    many = route(*(Endpoint(f"host{n}", 1) for n in range(2 * MAX_ADDRESSES)))
    many.update_servers([url(A)])
    assert len(many.addresses) == 2 * MAX_ADDRESSES


def test_the_current_address_is_tried_first_even_if_no_longer_reported() -> None:
    one = route(A)
    one.update_servers([url(B)])
    one.arrived(B, ClientProtocol("test", b"id"))
    one.update_servers([url(C)])
    assert one.order() == [B, A, C] and one.identity == b"id"
    assert one.copy().order() == [B, A, C]
    one.leave()
    assert one.order() == [A, C]


def test_reported_loopback_addresses_are_used_only_by_clients_on_that_host() -> None:
    far, near = route(A), route(Endpoint("127.0.0.1", 5))
    for each in (far, near):
        each.update_servers(["tcp://127.0.0.1:7", "tcp://localhost:8", url(B)])
    assert far.addresses == (A, B)
    assert near.addresses == (near.at, Endpoint("127.0.0.1", 7), Endpoint("localhost", 8), B)
    search = Search(route(A), Deadline(60))
    assert tried(search, {A: says(Endpoint("127.0.0.1", 7), A)}) == [A], "loopback there is another host's"


def test_another_store_at_a_learned_address_does_not_end_the_session() -> None:
    one = route(A)
    one.update_servers([url(B)])
    search = Search(one, Deadline(60), resumes=True)
    assert search.ends(A, RESTARTED) and not search.ends(B, RESTARTED)
    assert search.ends(B, SessionLost(peer="b:1", why="it is over"))


def test_a_standby_at_the_address_of_a_relay_is_ignored() -> None:
    """The relay has ended, and a server of another store has its port."""
    relay = RelayAddress("tcp://127.0.0.1:1", Endpoints([A]), b"")
    relayed = Route(Endpoints([A]), relay)
    search = Search(relayed, Deadline(60))
    for address, believed in ((relay, False), (A, True)):
        search.attempt_failed(address, IsStandby(says(C, C, D)), "a standby", "")
        assert relayed.addresses == ((A, C, D) if believed else (A,))
    assert "a standby" in search.explain_failure


PYTORCHS = PREFACE[-len(ACCEPTED) :]


@pytest.mark.parametrize(
    ("answer", "of", "address", "told"),
    [
        (ACCEPTED, route(A), A, True),
        (PYTORCHS, route(A), A, False),
        (PYTORCHS, route(A, B), A, NOT_OF_SEVERAL),
        (PYTORCHS, route(A), RelayAddress("tcp://127.0.0.1:1", Endpoints([A]), b""), "a PyTorch server, not a relay"),
        (b"HTTP", route(A), A, "not a store: it replied b'HTTP'"),
    ],
)
def test_what_a_reply_to_the_preface_means(answer: bytes, of: Route, address: Address, told: bool | str) -> None:
    if isinstance(told, bool):
        assert accepts(answer, of, address) is told
    else:
        with pytest.raises(BadMessage) as caught:
            accepts(answer, of, address)
        assert str(caught.value) == told
