"""EtcdStore: servers found through etcd, started where there is none, and found again when all known ones are gone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.calls import Call
from tests.etcd.access import base64, post
from tests.etcd.cluster import Cluster
from tests.etcd.fixtures import etcd_space
from tests.replicated.servers import Servers
from tests.wire import AMPLE_S, read_line, script, until

import rallypoint
from rallypoint import ConnectFailed, NoQuorum, Relay, Server, aio, connect, net
from rallypoint.deadline import Deadline
from rallypoint.etcd.address import Access, Address, parse
from rallypoint.protocol.client import Client
from rallypoint.protocol.native import Standby
from rallypoint.storage.etcd_lookup import claim_seat, look_up
from rallypoint.store import etcd
from rallypoint.store.route import Route
from rallypoint.store.search import Search
from rallypoint.store.url import parse_url

needs_etcd = pytest.mark.needs("etcd")


def address_of(url: str) -> Address:
    return parse_url(url).etcd()


def servers_of(url: str) -> tuple[str, ...]:
    return look_up(address_of(url), Deadline(AMPLE_S)).servers


def own_server(url: str) -> Server:
    server = etcd._own[address_of(url)].server
    assert server is not None
    return server


# Addresses


@pytest.mark.parametrize(
    "address",
    [
        Address(("a:2379", "[::1]:1"), "job/7", Access()),
        Address(("a:2379",), "jöb", Access("c&a", "x", "y", "ann", "s#c/r?t=&"), "::1"),
    ],
)
def test_an_address_is_the_same_after_a_way_as_url(address: Address) -> None:
    assert address_of(address.url) == address
    assert "s#c" not in address.name


def test_a_server_listens_where_etcd_would_see_it() -> None:
    assert etcd.listen_host(parse("127.0.0.1:1", "x", {})) == "127.0.0.1"
    assert etcd.listen_host(parse("127.0.0.1:1", "x", {"host": "10.1.2.3"})) == "10.1.2.3"
    assert etcd.listen_host(parse("no.such.host.invalid:1", "x", {})) == "127.0.0.1"


# Servers that are there


@needs_etcd
def test_a_server_that_runs_is_found(etcd_url: str) -> None:
    with Server(storage=etcd_url) as server, connect(etcd_url) as store, connect(server.url) as direct:
        direct.set("k", "v")
        assert store.get("k") == b"v"
        assert address_of(etcd_url) not in etcd._own
        assert repr(store) == f"<EtcdStore {etcd_url}>"
        with store.clone() as other:
            assert other.get("k") == b"v"


@needs_etcd
def test_when_all_known_servers_are_gone_etcd_is_asked_for_others(etcd_url: str, tmp_path: Path) -> None:
    with Servers(etcd_url, tmp_path, 1) as servers, connect(etcd_url) as store:
        store.set("k", "v")
        call = Call(store.get, "later").blocked()
        servers.start(port=0)  # on another port; whether the client hears of it before is a matter of chance
        servers.kill(0)
        store.set("later", "w")
        assert (store.get("k"), call.result()) == (b"v", b"w")


@needs_etcd
def test_the_asyncio_client_finds_them_and_finds_them_again(etcd_url: str, tmp_path: Path) -> None:
    async def use(servers: Servers) -> None:
        async with await aio.connect(etcd_url, AMPLE_S) as store:
            await store.set("k", "v")
            await asyncio.get_running_loop().run_in_executor(None, servers.start)
            servers.kill(0)
            assert await store.get("k") == b"v"
            assert etcd_url in repr(store)

    with Servers(etcd_url, tmp_path, 1) as servers:
        asyncio.run(use(servers))


# A server of one's own


@needs_etcd
def test_where_there_is_none_one_is_started_and_lives_on_when_the_store_is_closed(etcd_url: str) -> None:
    with connect(etcd_url) as store:
        store.set("k", "v")
        server = own_server(etcd_url)
    assert server.running()
    with connect(etcd_url) as store:
        assert store.get("k") == b"v"
        assert own_server(etcd_url) is server
    assert servers_of(etcd_url) == (server.url,)


@needs_etcd
def test_when_it_dies_another_is_started_with_all_that_was_stored(etcd_url: str) -> None:
    with connect(etcd_url) as store:
        store.set("k", "v")
        first = own_server(etcd_url)
        first.kill(first.pid)
        store.set("l", "w")
        assert (store.get("k"), store.get("l")) == (b"v", b"w")
        assert own_server(etcd_url) is not first


HOLDER = """
import sys, rallypoint
store = rallypoint.connect(sys.argv[1], 60)
store.set("holder", "here")
print("ready", flush=True)
sys.stdin.readline()
"""


@needs_etcd
@pytest.mark.parametrize("end", ["exit", "kill"])
def test_what_was_stored_outlives_the_process_that_had_the_server(etcd_url: str, end: str) -> None:
    with script(HOLDER, etcd_url) as holder:
        assert read_line(holder) == "ready"
        store = connect(etcd_url)
        if end == "kill":
            holder.kill()
        else:
            holder.stdin.write(b"\n")
            holder.stdin.flush()
        assert holder.wait(AMPLE_S) == (-signal.SIGKILL if end == "kill" else 0)
    with store:
        assert store.get("holder") == b"here"
        assert own_server(etcd_url).running()


def in_child(use: Callable[[], object]) -> int:
    """Return how a forked child ends that makes a call."""
    pid = os.fork()
    if not pid:
        try:
            use()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@needs_etcd
def test_forked_children_use_the_store_and_leave_the_server_to_their_parent(etcd_url: str) -> None:
    with connect(etcd_url) as store:
        store.set("k", "v")
        server = own_server(etcd_url)
        assert in_child(lambda: store.get("k")) == 0
        assert in_child(lambda: connect(etcd_url, AMPLE_S).set("l", "w")) == 0
        assert in_child(lambda: None if not etcd._own else 1 / 0) == 0
        assert server.running() and store.get("l") == b"w"


MANY = """
import sys, rallypoint
store = rallypoint.connect(sys.argv[1], 60)
store.add("count", 1)
rallypoint.Barrier(store, "all", 8).wait(int(sys.argv[2]))
from rallypoint.store import etcd
from rallypoint.store.route import Route
from rallypoint.store.search import Search
print(len(etcd._own), "grpc" in sys.modules, flush=True)
sys.stdin.readline()
"""


@needs_etcd
def test_of_many_processes_that_begin_together_at_most_three_start_one(etcd_url: str) -> None:
    command = [sys.executable, "-c", MANY, etcd_url]
    pipe = subprocess.PIPE
    started = [subprocess.Popen([*command, str(rank)], stdin=pipe, stdout=pipe) for rank in range(8)]
    try:
        said = [read_line(one).split() for one in started]
        assert 1 <= sum(int(count) for count, _ in said) <= 3
        assert {imported for _, imported in said} == {"False"}
        with connect(etcd_url) as store:
            assert store.get("count") == b"8"
    finally:
        for one in started:
            one.kill()
            one.communicate()


# What is in the way


@needs_etcd
def test_who_waits_for_the_server_of_another_says_so(etcd_url: str) -> None:
    for _ in range(3):
        assert claim_seat(address_of(etcd_url), Deadline(AMPLE_S)) is not None
    with pytest.raises(
        ConnectFailed, match="etcd knows no server of the store; waiting for one that another"
    ) as caught:
        connect(etcd_url, 0.3)
    assert caught.value.peer == address_of(etcd_url).name


@needs_etcd
def test_a_listed_server_that_is_not_there_is_not_the_end(etcd_cluster: Cluster, etcd_url: str) -> None:
    place, name = etcd_cluster.endpoints[0], address_of(etcd_url).space
    gone = f"tcp://127.0.0.1:{net.free_port('127.0.0.1')}"
    value = base64(json.dumps({"url": gone}))
    post(place, "/v3/kv/put", {"key": base64(f"{name}/servers/1"), "value": value})
    call = Call(lambda: connect(etcd_url, AMPLE_S)).blocked()
    post(place, "/v3/kv/deleterange", {"key": base64(f"{name}/servers/1")})
    with call.result() as store:
        store.set("k", "v")


def test_silence_is_no_quorum() -> None:
    gone = net.free_port("127.0.0.1")
    with pytest.raises(NoQuorum, match=f"127.0.0.1:{gone}: refused"):
        connect(f"etcd://127.0.0.1:{gone}/x", 0.2)
    with pytest.raises(NoQuorum, match=f"127.0.0.1:{gone}: refused"):
        asyncio.run(aio.connect(f"etcd://127.0.0.1:{gone}/x", 0.2))


@needs_etcd
def test_a_server_that_cannot_come_up_is_the_error(etcd_url: str) -> None:
    with pytest.raises(rallypoint.AddressTaken, match=r"192\.0\.2\.1"):
        connect(f"{etcd_url}?host=192.0.2.1", AMPLE_S)


# Relays


@pytest.fixture
def relayed(etcd_cluster: Cluster) -> Iterator[tuple[str, Relay]]:
    url = etcd_space(etcd_cluster)
    with Server(storage=url), Relay(url) as relay:
        yield url, relay


def connected(relay: Relay) -> dict[str, Any]:
    return until(relay.statistics, lambda facts: facts["upstream_connected"])


@needs_etcd
def test_a_relay_finds_the_servers_and_sessions_begin_there(
    relayed: tuple[str, Relay], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, relay = relayed
    assert connected(relay)["upstream"] == url
    (variable,) = relay.environ.values()
    assert variable == f"{relay.url}?upstream={url}"
    monkeypatch.setenv("RALLYPOINT_RELAY", variable)
    with connect(url) as store:
        store.set("k", "v")
        assert relay.statistics()["channels_opened"] >= 1
    with connect(f"{url}-other") as other:
        opened = relay.statistics()["channels_opened"]
        other.set("k", "w")
        assert relay.statistics()["channels_opened"] == opened


@needs_etcd
def test_a_relay_looks_again_when_all_its_servers_are_gone(etcd_url: str, tmp_path: Path) -> None:
    with Servers(etcd_url, tmp_path, 1) as servers, Relay(etcd_url) as relay:
        connected(relay)
        with connect(relay.url) as store:
            store.set("k", "v")
            servers.start()
            servers.kill(0)
            assert store.get("k") == b"v"


@needs_etcd
def test_a_relay_of_a_store_that_has_no_server_waits_and_starts_none(etcd_url: str) -> None:
    with Relay(etcd_url) as relay:
        until(relay.statistics, lambda facts: "etcd knows no server" in facts["upstream_why"])
        assert servers_of(etcd_url) == ()
        with Server(storage=etcd_url):
            connected(relay)


def test_a_relay_does_not_import_grpc() -> None:
    code = "import sys, rallypoint.relay.process, rallypoint.store.etcd; print('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


# Looking, by itself


def looking(*answers: Any) -> tuple[Route, Search]:
    """Return a route whose looks have these outcomes, in turn, and a search of a new session along it."""
    outcomes = iter(answers)

    def look(deadline: Deadline) -> tuple[str, ...]:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return tuple(outcome)

    route = Route(net.Endpoints(), None, "etcd://e:1/x", look)
    return route, Search(route, Deadline(AMPLE_S))


A, B = net.Endpoint("a", 1), net.Endpoint("b", 2)


def test_it_looks_where_it_knows_nobody_and_then_where_nobody_is() -> None:
    route, search = looking(["tcp://a:1"], ["tcp://b:2", "tcp://a:1"])
    for found in ([A], [B, A]):
        for address, _ in search.round():
            search.failed(address, "refused")
        search._look_at = 0.0
        assert search.wants_look
        search.look()
        assert [address for address, _ in search.round()] == found
    assert route.label == "etcd://e:1/x" and route.peer(A) == "a:1 (a server of etcd://e:1/x)"


def test_where_a_server_stands_by_it_does_not_look() -> None:
    _, search = looking(["tcp://a:1"])
    search.look()
    search._look_at = 0.0
    for address, _ in search.round():
        search.stands_by(address, Standby("", ["tcp://a:1"], "no server leads yet"))
    assert not search.wants_look


def test_a_stranger_at_an_address_found_before_ends_no_session_and_one_just_found_does() -> None:
    route, search = looking(["tcp://a:1"], ["tcp://a:1"])
    stranger = rallypoint.ServerRestarted(peer="a:1", why="its identity is another")
    search.look()
    assert search.ends(A, stranger)
    route.arrived(A, Client("test"))
    assert not search.ends(A, stranger)
    search.look()
    assert search.ends(A, stranger)


def test_a_refusal_ends_the_search_for_a_new_session_and_no_other() -> None:
    refused = rallypoint.EtcdRefused(store="etcd://e:1/x", key="k", why="permission denied")
    route, search = looking(refused, refused)
    with pytest.raises(rallypoint.EtcdRefused):
        search.look()
    resuming = Search(route, Deadline(AMPLE_S), resumes=True)
    resuming.look()
    assert "permission denied" in resuming.why
