"""In which order several addresses are tried, for how long each, and when there is no further round."""

from __future__ import annotations

import pytest

from rallypoint.deadline import Deadline
from rallypoint.errors import ConnectFailed, ConnectionLost
from rallypoint.net import Endpoint, Endpoints
from rallypoint.protocol.client import Client
from rallypoint.server.clock import RETURN_S
from rallypoint.store import search as search_module
from rallypoint.store.relay_address import RelayAddress
from rallypoint.store.route import GROWTH, MENDS, PAUSE_S, Cuts, Route
from rallypoint.store.search import LEAST_S, PATIENCE_S, RESUMING_S, Search

A, B, C = (Endpoint(name, 1) for name in "abc")


def route(*endpoints: Endpoint) -> Route:
    return Route(Endpoints(endpoints))


def tried(search: Search, useless: tuple[Endpoint, ...] = ()) -> list[Endpoint]:
    """Fail at every address of a round, and return them."""
    found = []
    for endpoint, _ in search.round():
        search.failed(endpoint, "refused", endpoint in useless)
        found.append(endpoint)
    return found


def test_the_one_where_we_were_is_first() -> None:
    three = route(A, B, C)
    assert three.order() == [A, B, C]
    three.arrived(B, Client("test", b"id"))
    assert tried(Search(three, Deadline(60))) == [B, C, A]
    three.leave()
    assert three.order() == [C, A, B]
    three.leave()
    assert three.order() == [A, B, C]


def test_one_has_nowhere_else_to_go_and_may_come_back_as_another() -> None:
    one = route(A)
    one.arrived(A, Client("test", b"id"))
    one.leave()
    assert (one.order(), one.identity, one.peer(A)) == ([A], b"", "a:1")


def test_a_copy_begins_where_we_are_and_goes_its_own_way() -> None:
    two = route(A, B)
    two.arrived(B, Client("test", b"id"))
    copy = two.copy()
    two.leave()
    assert (copy.at, copy.identity, copy.peer(A)) == (B, b"id", "a:1 (one of a:1,b:1)")


def test_a_port_that_nobody_can_have_is_refused_wherever_it_stands() -> None:
    with pytest.raises(ValueError, match="1 to 65535, not 0"):
        route(A, Endpoint("b", 0))


def test_one_address_has_all_the_time() -> None:
    deadline = Deadline(60)
    assert list(Search(route(A), deadline).round()) == [(A, deadline)]


def test_each_of_several_has_a_moment_that_doubles() -> None:
    search = Search(route(A, B), Deadline(1e6))
    moments = []
    for _ in range(8):
        moments += [turn.timeout_s for _, turn in search.round()]
        search.pause_s()
    assert moments == [moment for doubled in (1, 2, 4, 8, 16, 30, 30, 30) for moment in (doubled, doubled)]
    assert moments[0] == PATIENCE_S[0]


def pauses(route: Route, resumes: bool = False) -> list[float]:
    """How long a search along a route pauses, again and again."""
    search = Search(route, Deadline(1e6), resumes)
    return [search.pause_s() for _ in range(40) if tried(search)]


def test_pauses_grow_from_a_moment_to_a_second_and_no_two_clients_keep_step() -> None:
    for pauses_s in (pauses(route(A, B)), pauses(route(A), resumes=True)):
        for pause_s, most_s in zip(pauses_s, (PAUSE_S[0] * GROWTH**n for n in range(40)), strict=True):
            assert min(most_s, PAUSE_S[1]) / 2 <= pause_s <= min(most_s, PAUSE_S[1])
    assert PAUSE_S == (0.01, 1.0)
    clients = [pauses(route(A), resumes=True) for _ in range(100)]
    returns = sorted(sum(pauses_s) for pauses_s in clients)
    assert returns[-1] - returns[0] > PAUSE_S[1], "they come back over more than a second"
    assert len(set(returns)) == len(returns)


def test_cuts_in_a_row_are_mended_after_longer_and_longer_pauses() -> None:
    cuts = Cuts(route(A))
    pauses_s = [cuts.count(recovers=True) for _ in range(3000)]
    assert pauses_s[0] == 0.0
    for pause_s, most_s in zip(pauses_s[1:40], (PAUSE_S[0] * GROWTH**n for n in range(39)), strict=True):
        assert min(most_s, PAUSE_S[1]) / 2 <= pause_s <= min(most_s, PAUSE_S[1])
    assert pauses_s[-1] >= PAUSE_S[1] / 2
    cuts.in_a_row = 0
    assert cuts.count(recovers=True) == 0.0, "an answer came"
    cuts.forgive()
    assert cuts.count(recovers=True) == 0.0, "it was our own"


def test_cuts_in_a_row_leave_one_of_several_and_end_where_none_recovers() -> None:
    two = route(A, B)
    cuts = Cuts(two)
    for _ in range(2):
        cuts.count(recovers=False)
    assert two.at == B
    for _ in range(MENDS - 2):
        cuts.count(recovers=False)
    with pytest.raises(ConnectionLost, match=f"cut {MENDS} times in a row"):
        cuts.count(recovers=False)


def test_a_single_address_is_tried_again_where_a_session_is_resumed() -> None:
    search, moments = Search(route(A), Deadline(1e6), resumes=True), []
    for _ in range(5):
        moments += [turn.timeout_s for _, turn in search.round()]
        search.pause_s()
    assert moments == [1, 2, 3, 3, 3]


def test_whoever_was_trying_when_the_server_came_back_is_in_time() -> None:
    """An attempt that nobody answers, then a pause; what is left is for the attempt that is answered."""
    assert RESUMING_S[1] + PAUSE_S[1] + LEAST_S < RETURN_S


def test_no_answer_of_a_stranger_ends_the_search_for_a_session() -> None:
    search = Search(route(A), Deadline(60), resumes=True)
    for _ in range(3):
        assert tried(search, useless=(A,)) == [A]
        search.pause_s()
    assert search.why == "refused"


def test_a_short_time_is_shared() -> None:
    shares = [turn.timeout_s for _, turn in Search(route(A, B, C), Deadline(0.9)).round()]
    assert shares[0] <= 0.3
    assert [turn.timeout_s for _, turn in Search(route(A, B), Deadline(0)).round()] == [LEAST_S] * 2


def test_when_time_is_up_each_was_tried_once() -> None:
    search = Search(route(A, B), Deadline(0))
    assert tried(search) == [A, B]
    assert tried(search) == []
    with pytest.raises(ConnectFailed) as caught:
        search.pause_s()
    assert (caught.value.peer, caught.value.tried) == ("a:1,b:1", {"a:1": "refused", "b:1": "refused"})


def test_there_is_no_other_round_when_all_are_of_no_use() -> None:
    search = Search(route(A, B), Deadline(60))
    for _ in range(3):
        assert tried(search, useless=(A,)) == [A, B]
        search.pause_s()
    tried(search, useless=(A, B))
    with pytest.raises(ConnectFailed):
        search.pause_s()


def test_what_is_said_of_an_address_is_what_happened_last() -> None:
    search = Search(route(A, B), Deadline(0))
    search.failed(A, {"a": "the name cannot be resolved"})
    search.failed(B, "no answer")
    search.failed(A, {"10.0.0.1:1": "refused", "10.0.0.2:1": "no answer"})
    with pytest.raises(ConnectFailed) as caught:
        search.pause_s()
    assert caught.value.tried == {"10.0.0.1:1": "refused", "10.0.0.2:1": "no answer", "b:1": "no answer"}


# By a relay

RELAY = RelayAddress("tcp://r:1", Endpoints([A]))


def test_a_relay_is_first_until_the_session_has_moved() -> None:
    by_relay = Route(Endpoints([A, B]), RELAY)
    assert by_relay.relayed and (by_relay.at, by_relay.here) == (A, RELAY) and by_relay.doubted
    assert [address for address, _ in Search(by_relay, Deadline(60)).round()] == [RELAY, A, B]
    by_relay.arrived(RELAY, Client("test", b"id"))
    assert (by_relay.relayed, by_relay.at, by_relay.identity) == (True, A, b"id")
    by_relay.arrived(B, Client("test", b"id"))
    assert (by_relay.relayed, by_relay.at, by_relay.here, by_relay.doubted) == (False, B, B, True)
    assert [address for address, _ in Search(by_relay, Deadline(60), resumes=True).round()] == [B, A]
    assert by_relay.copy().relayed, "another session begins at the relay"
    assert by_relay.begin() == b"id" and by_relay.relayed
    by_relay.leave()
    assert (by_relay.relayed, by_relay.at) == (False, B), "a relay that hangs up is left for where we were"


@pytest.mark.parametrize("resumes", [False, True])
def test_nothing_is_tried_behind_a_relay_that_waits_for_its_server(
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


def test_a_relay_has_half_the_time_at_most() -> None:
    for resumes, limit_s in ((False, search_module.RELAY_S), (True, RESUMING_S[0])):
        for within_s in (0.0, 1.0, 60.0):
            search = Search(Route(Endpoints([A]), RELAY), Deadline(within_s), resumes)
            _, turn = next(search.round())
            assert turn.timeout_s <= max(min(limit_s, within_s / 2), LEAST_S)


def test_a_relay_that_is_of_no_use_does_not_end_the_search() -> None:
    search = Search(Route(Endpoints([A]), RELAY), Deadline(60))
    for address, _ in search.round():
        search.failed(address, "not a store", useless=address is RELAY)
    assert search.pause_s() > 0
    for address, _ in search.round():
        search.failed(address, "not a store", useless=True)
    with pytest.raises(ConnectFailed) as caught:
        search.pause_s()
    assert caught.value.tried == {"tcp://r:1": "not a store", "a:1": "not a store"}
