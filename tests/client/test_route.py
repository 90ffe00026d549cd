"""In which order addresses are tried, for how long each, and when a search gives up."""

from __future__ import annotations

import pytest

from rallypoint.client.routing import search as search_module
from rallypoint.client.routing.relay_address import RelayAddress
from rallypoint.client.routing.route import GROWTH, MAX_CUTS, PAUSE_S, Address, CutCounter, Route
from rallypoint.client.routing.search import LEAST_S, PATIENCE_S, RESUMING_S, Search
from rallypoint.deadline import Deadline
from rallypoint.errors import ConnectFailed, ConnectionLost
from rallypoint.net import Endpoint, Endpoints
from rallypoint.protocol.native_client import ClientProtocol
from rallypoint.server.clock import RETURN_S

A, B, C = (Endpoint(name, 1) for name in "abc")


def route(*endpoints: Endpoint) -> Route:
    return Route(Endpoints(endpoints))


def tried(search: Search, useless: tuple[Endpoint, ...] = ()) -> list[Address]:
    """Fail at every address of a round, and return the addresses."""
    found = []
    for endpoint, _ in search.round():
        search.failed(endpoint, "refused", endpoint in useless)
        found.append(endpoint)
    return found


def test_the_current_address_is_tried_first() -> None:
    three = route(A, B, C)
    assert three.order() == [A, B, C]
    three.arrived(B, ClientProtocol("test", b"id"))
    assert tried(Search(three, Deadline(60))) == [B, C, A]
    three.leave()
    assert three.order() == [C, A, B]
    three.leave()
    assert three.order() == [A, B, C]


def test_a_single_server_may_return_with_another_identity() -> None:
    one = route(A)
    one.arrived(A, ClientProtocol("test", b"id"))
    one.leave()
    assert (one.order(), one.identity, one.peer(A)) == ([A], b"", "a:1")


def test_a_copy_of_a_route_starts_at_the_current_address_and_is_independent() -> None:
    two = route(A, B)
    two.arrived(B, ClientProtocol("test", b"id"))
    copy = two.copy()
    two.leave()
    assert (copy.at, copy.identity, copy.peer(A)) == (B, b"id", "a:1 (one of a:1,b:1)")


def test_an_invalid_port_is_refused_at_any_position() -> None:
    with pytest.raises(ValueError, match="1 to 65535, not 0"):
        route(A, Endpoint("b", 0))


def test_a_single_address_gets_the_whole_timeout() -> None:
    deadline = Deadline(60)
    assert list(Search(route(A), deadline).round()) == [(A, deadline)]


def test_the_time_for_each_of_several_addresses_doubles_per_round() -> None:
    search = Search(route(A, B), Deadline(1e6))
    moments = []
    for _ in range(8):
        moments += [turn.timeout_s for _, turn in search.round()]
        search.pause_s()
    assert moments == [moment for doubled in (1, 2, 4, 8, 16, 30, 30, 30) for moment in (doubled, doubled)]
    assert moments[0] == PATIENCE_S[0]


def pauses(route: Route, resumes: bool = False) -> list[float]:
    """Return the pauses of a search after each of many failed rounds."""
    search = Search(route, Deadline(1e6), resumes)
    return [search.pause_s() for _ in range(40) if tried(search)]


def test_pauses_grow_to_a_second_and_jitter_spreads_the_clients() -> None:
    for pauses_s in (pauses(route(A, B)), pauses(route(A), resumes=True)):
        for pause_s, most_s in zip(pauses_s, (PAUSE_S[0] * GROWTH**n for n in range(40)), strict=True):
            assert min(most_s, PAUSE_S[1]) / 2 <= pause_s <= min(most_s, PAUSE_S[1])
    assert PAUSE_S == (0.01, 1.0)
    clients = [pauses(route(A), resumes=True) for _ in range(100)]
    returns = sorted(sum(pauses_s) for pauses_s in clients)
    assert returns[-1] - returns[0] > PAUSE_S[1], "the clients return over more than a second"
    assert len(set(returns)) == len(returns)


def test_the_pause_before_reconnecting_grows_with_cuts_in_a_row() -> None:
    cuts = CutCounter(route(A))
    pauses_s = [cuts.count(recovers=True) for _ in range(3000)]
    assert pauses_s[0] == 0.0
    for pause_s, most_s in zip(pauses_s[1:40], (PAUSE_S[0] * GROWTH**n for n in range(39)), strict=True):
        assert min(most_s, PAUSE_S[1]) / 2 <= pause_s <= min(most_s, PAUSE_S[1])
    assert pauses_s[-1] >= PAUSE_S[1] / 2
    cuts.in_a_row = 0
    assert cuts.count(recovers=True) == 0.0, "a reply resets the count"
    cuts.uncount()
    assert cuts.count(recovers=True) == 0.0, "a cut of our own does not count"


def test_cuts_in_a_row_cause_a_failover_and_end_in_an_error_without_recovery() -> None:
    two = route(A, B)
    cuts = CutCounter(two)
    for _ in range(2):
        cuts.count(recovers=False)
    assert two.at == B
    for _ in range(MAX_CUTS - 2):
        cuts.count(recovers=False)
    with pytest.raises(ConnectionLost, match=f"cut {MAX_CUTS} times in a row"):
        cuts.count(recovers=False)


def test_a_single_address_is_retried_to_resume_a_session() -> None:
    search, moments = Search(route(A), Deadline(1e6), resumes=True), []
    for _ in range(5):
        moments += [turn.timeout_s for _, turn in search.round()]
        search.pause_s()
    assert moments == [1, 2, 3, 3, 3]


def test_a_client_that_retries_reaches_a_restarted_server_within_its_grace_period() -> None:
    """The worst case: an unanswered attempt, a pause, and then the attempt that is answered."""
    assert RESUMING_S[1] + PAUSE_S[1] + LEAST_S < RETURN_S


def test_a_foreign_server_does_not_end_the_search_for_a_session() -> None:
    search = Search(route(A), Deadline(60), resumes=True)
    for _ in range(3):
        assert tried(search, useless=(A,)) == [A]
        search.pause_s()
    assert search.explain_failure == "refused"


def test_a_short_timeout_is_divided_among_the_addresses() -> None:
    shares = [turn.timeout_s for _, turn in Search(route(A, B, C), Deadline(0.9)).round()]
    assert shares[0] <= 0.3
    assert [turn.timeout_s for _, turn in Search(route(A, B), Deadline(0)).round()] == [LEAST_S] * 2


def test_an_expired_deadline_allows_one_attempt_at_each_address() -> None:
    search = Search(route(A, B), Deadline(0))
    assert tried(search) == [A, B]
    assert tried(search) == []
    with pytest.raises(ConnectFailed) as caught:
        search.pause_s()
    assert (caught.value.peer, caught.value.tried) == ("a:1,b:1", {"a:1": "refused", "b:1": "refused"})


def test_a_search_fails_after_a_round_of_useless_addresses_only() -> None:
    search = Search(route(A, B), Deadline(60))
    for _ in range(3):
        assert tried(search, useless=(A,)) == [A, B]
        search.pause_s()
    tried(search, useless=(A, B))
    with pytest.raises(ConnectFailed):
        search.pause_s()


def test_the_error_has_the_last_failure_of_each_address() -> None:
    search = Search(route(A, B), Deadline(0))
    search.failed(A, {"a": "the name cannot be resolved"})
    search.failed(B, "no answer")
    search.failed(A, {"10.0.0.1:1": "refused", "10.0.0.2:1": "no answer"})
    with pytest.raises(ConnectFailed) as caught:
        search.pause_s()
    assert caught.value.tried == {"10.0.0.1:1": "refused", "10.0.0.2:1": "no answer", "b:1": "no answer"}


# Through a relay

RELAY = RelayAddress("tcp://r:1", Endpoints([A]))


def test_a_relay_is_tried_first_until_the_session_has_left_it() -> None:
    by_relay = Route(Endpoints([A, B]), RELAY)
    assert by_relay.relayed and (by_relay.at, by_relay.current_address) == (A, RELAY) and by_relay.has_alternative
    assert [address for address, _ in Search(by_relay, Deadline(60)).round()] == [RELAY, A, B]
    by_relay.arrived(RELAY, ClientProtocol("test", b"id"))
    assert (by_relay.relayed, by_relay.at, by_relay.identity) == (True, A, b"id")
    by_relay.arrived(B, ClientProtocol("test", b"id"))
    assert (by_relay.relayed, by_relay.at, by_relay.current_address, by_relay.has_alternative) == (False, B, B, True)
    assert [address for address, _ in Search(by_relay, Deadline(60), resumes=True).round()] == [B, A]
    assert by_relay.copy().relayed, "another session begins at the relay"
    assert by_relay.begin() == b"id" and by_relay.relayed
    by_relay.leave()
    assert (by_relay.relayed, by_relay.at) == (False, B), "a relay that hangs up is left for the last direct address"


@pytest.mark.parametrize("resumes", [False, True])
def test_no_other_address_is_tried_while_a_relay_waits_for_its_server(
    resumes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(search: Search, unwelcome: bool) -> list[object]:
        found: list[object] = []
        for address, _ in search.round():
            search.failed(address, "hung up", unwelcome=unwelcome and address is RELAY)
            found.append(address)
        return found

    search = Search(Route(Endpoints([A]), RELAY), Deadline(60), resumes)
    assert [fail(search, unwelcome) for unwelcome in (True, True, False, True)] == [
        [RELAY],
        [RELAY],
        [RELAY, A],
        [RELAY],
    ]
    assert search.pause_s() > 0
    monkeypatch.setattr(search_module, "RELAY_S", 0.0)
    assert fail(Search(Route(Endpoints([A]), RELAY), Deadline(60), resumes), True) == [RELAY, A]
    assert fail(Search(Route(Endpoints([A]), RELAY), Deadline(0), resumes), True) == [RELAY, A]


def test_a_relay_gets_at_most_half_of_the_timeout() -> None:
    for resumes, limit_s in ((False, search_module.RELAY_S), (True, RESUMING_S[0])):
        for within_s in (0.0, 1.0, 60.0):
            search = Search(Route(Endpoints([A]), RELAY), Deadline(within_s), resumes)
            _, turn = next(search.round())
            assert turn.timeout_s <= max(min(limit_s, within_s / 2), LEAST_S)


def test_a_useless_relay_does_not_end_the_search() -> None:
    search = Search(Route(Endpoints([A]), RELAY), Deadline(60))
    for address, _ in search.round():
        search.failed(address, "not a store", useless=address is RELAY)
    assert search.pause_s() > 0
    for address, _ in search.round():
        search.failed(address, "not a store", useless=True)
    with pytest.raises(ConnectFailed) as caught:
        search.pause_s()
    assert caught.value.tried == {"tcp://r:1": "not a store", "a:1": "not a store"}
