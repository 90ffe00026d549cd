"""EtcdStore: servers are found through etcd, started if there is none, and found again when all known ones are gone."""

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
from tests.client.test_addresses import nobody
from tests.conformance.calls import Call
from tests.etcd.access import USER, WORD, base64, guarded, post
from tests.etcd.cluster import Cluster
from tests.etcd.fixtures import etcd_space
from tests.ports import reserve_port
from tests.raw_peer import AMPLE_S, read_line, script, until
from tests.replicated.servers import Servers

import rallypoint
from rallypoint import ConnectFailed, NoQuorum, Relay, Server, aio, connect, net
from rallypoint.client.routing.relay_address import VARIABLE, RelayAddress
from rallypoint.client.routing.route import Route
from rallypoint.client.routing.search import Search
from rallypoint.deadline import Deadline
from rallypoint.etcd.address import Access, Address, parse
from rallypoint.protocol.native import Standby
from rallypoint.protocol.native_client import ClientProtocol
from rallypoint.storage.etcd.lookup import claim_start_permit, look_up
from rallypoint.store import etcd
from rallypoint.store.url import parse_url

__all__ = ["guarded"]

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
def test_an_address_survives_conversion_to_a_url(address: Address) -> None:
    assert address_of(address.url) == address
    assert "s#c" not in address.name


def test_a_server_listens_on_the_address_facing_etcd() -> None:
    assert etcd.listen_host(parse("127.0.0.1:1", "x", {})) == "127.0.0.1"
    assert etcd.listen_host(parse("127.0.0.1:1", "x", {"host": "10.1.2.3"})) == "10.1.2.3"
    assert etcd.listen_host(parse("no.such.host.invalid:1", "x", {})) == "127.0.0.1"


# Existing servers


@needs_etcd
def test_a_running_server_is_found(etcd_url: str) -> None:
    with Server(storage=etcd_url) as server, connect(etcd_url) as store, connect(server.url) as direct:
        direct.set("k", "v")
        assert store.get("k") == b"v"
        assert address_of(etcd_url) not in etcd._own
        assert repr(store) == f"<EtcdStore {etcd_url}>"
        with store.clone() as other:
            assert other.get("k") == b"v"


@needs_etcd
def test_new_servers_are_looked_up_when_all_known_ones_are_gone(etcd_url: str, tmp_path: Path) -> None:
    with Servers(etcd_url, tmp_path, 1) as servers, connect(etcd_url) as store:
        store.set("k", "v")
        call = Call(store.get, "later").blocked()
        servers.start(port=0)  # on another port, which the client may or may not learn before the kill
        servers.kill(0)
        store.set("later", "w")
        assert (store.get("k"), call.result()) == (b"v", b"w")


@needs_etcd
def test_the_asyncio_client_finds_servers_and_looks_up_new_ones(etcd_url: str, tmp_path: Path) -> None:
    async def use(servers: Servers) -> None:
        async with await aio.connect(etcd_url, AMPLE_S) as store:
            await store.set("k", "v")
            await asyncio.get_running_loop().run_in_executor(None, servers.start)
            servers.kill(0)
            assert await store.get("k") == b"v"
            assert etcd_url in repr(store)

    with Servers(etcd_url, tmp_path, 1) as servers:
        asyncio.run(use(servers))


# Servers started by clients


@needs_etcd
def test_a_missing_server_is_started_and_outlives_the_store(etcd_url: str) -> None:
    with connect(etcd_url) as store:
        store.set("k", "v")
        server = own_server(etcd_url)
    assert server.running()
    with connect(etcd_url) as store:
        assert store.get("k") == b"v"
        assert own_server(etcd_url) is server
    assert servers_of(etcd_url) == (server.url,)


@needs_etcd
def test_a_killed_server_is_replaced_without_loss(etcd_url: str) -> None:
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
def test_data_outlives_the_process_that_started_the_server(etcd_url: str, end: str) -> None:
    with script(HOLDER, etcd_url) as holder:
        assert read_line(holder) == "ready"
        store = connect(etcd_url)
        if end == "kill":
            holder.kill()
        else:
            assert holder.stdin is not None
            holder.stdin.write(b"\n")
            holder.stdin.flush()
        assert holder.wait(AMPLE_S) == (-signal.SIGKILL if end == "kill" else 0)
    with store:
        assert store.get("holder") == b"here"
        assert own_server(etcd_url).running()


def in_child(use: Callable[[], object]) -> int:
    """Make a call in a forked child; return its exit code."""
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
from rallypoint.client.routing.route import Route
from rallypoint.client.routing.search import Search
print(len(etcd._own), "hpack" in sys.modules, flush=True)
sys.stdin.readline()
"""


@needs_etcd
def test_at_most_three_of_many_processes_start_a_server(etcd_url: str) -> None:
    command = [sys.executable, "-c", MANY, etcd_url]
    pipe = subprocess.PIPE
    started = [subprocess.Popen([*command, str(rank)], stdin=pipe, stdout=pipe) for rank in range(8)]
    try:
        printed = [read_line(one).split() for one in started]
        assert 1 <= sum(int(count) for count, _ in printed) <= 3
        assert {imported for _, imported in printed} == {"False"}
        with connect(etcd_url) as store:
            assert store.get("count") == b"8"
    finally:
        for one in started:
            one.kill()
            one.communicate()


# Failures


@needs_etcd
def test_a_timeout_says_that_the_store_has_no_server(etcd_url: str) -> None:
    for _ in range(3):
        assert claim_start_permit(address_of(etcd_url), Deadline(AMPLE_S)) is not None
    with pytest.raises(ConnectFailed, match="no server of the store is registered in etcd; waiting for one") as caught:
        connect(etcd_url, 0.3)
    assert caught.value.peer == address_of(etcd_url).name


@needs_etcd
def test_connecting_continues_past_a_registered_server_that_is_gone(etcd_cluster: Cluster, etcd_url: str) -> None:
    place, name = etcd_cluster.endpoints[0], address_of(etcd_url).space
    gone = f"tcp://127.0.0.1:{reserve_port()}"
    value = base64(json.dumps({"url": gone}))
    post(place, "/v3/kv/put", {"key": base64(f"{name}/servers/1"), "value": value})
    call = Call(lambda: connect(etcd_url, AMPLE_S)).blocked()
    post(place, "/v3/kv/deleterange", {"key": base64(f"{name}/servers/1")})
    with call.result() as store:
        store.set("k", "v")


def test_an_unreachable_etcd_raises_no_quorum() -> None:
    gone = reserve_port()
    with pytest.raises(NoQuorum, match=f"127.0.0.1:{gone}: refused"):
        connect(f"etcd://127.0.0.1:{gone}/x", 0.2)
    with pytest.raises(NoQuorum, match=f"127.0.0.1:{gone}: refused"):
        asyncio.run(aio.connect(f"etcd://127.0.0.1:{gone}/x", 0.2))


@needs_etcd
def test_the_error_of_a_server_that_cannot_start_is_raised(etcd_url: str) -> None:
    with pytest.raises(rallypoint.AddressTaken, match=r"192\.0\.2\.1"):
        connect(f"{etcd_url}?host=192.0.2.1", AMPLE_S)


# Relays


@pytest.fixture
def relayed(etcd_cluster: Cluster) -> Iterator[tuple[str, Relay]]:
    url = etcd_space(etcd_cluster)
    with Server(storage=url), Relay(url) as relay:
        yield url, relay


def connected(relay: Relay) -> dict[str, Any]:
    facts: dict[str, Any] = until(relay.statistics, lambda facts: facts["upstream_connected"])
    return facts


@needs_etcd
def test_a_relay_finds_the_servers_and_clients_use_the_relay(
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
def test_a_relay_looks_up_new_servers_when_all_known_ones_are_gone(etcd_url: str, tmp_path: Path) -> None:
    with Servers(etcd_url, tmp_path, 1) as servers, Relay(etcd_url) as relay:
        connected(relay)
        with connect(relay.url) as store:
            store.set("k", "v")
            servers.start()
            servers.kill(0)
            assert store.get("k") == b"v"


@needs_etcd
def test_a_relay_of_a_store_without_servers_waits_and_starts_none(etcd_url: str) -> None:
    with Relay(etcd_url) as relay:
        until(relay.statistics, lambda facts: "no server of the store is registered" in facts["upstream_why"])
        assert servers_of(etcd_url) == ()
        with Server(storage=etcd_url):
            connected(relay)


def without_relay(url: str, port: int, identity: bytes, *servers: str) -> str:
    """Return RALLYPOINT_RELAY as a relay sets it that was at this port and is gone, with these servers."""
    address = address_of(url)
    members, known = (net.parse_endpoints(",".join(some), 0) for some in (address.endpoints, servers))
    return RelayAddress(f"tcp://127.0.0.1:{port}", members, identity, address.space, known).variable


def identity_of(store: rallypoint.Store) -> bytes:
    return bytes(store._backend.server_id)  # type: ignore[attr-defined]


@needs_etcd
@pytest.mark.parametrize("asyncio_client", [False, True])
def test_servers_named_in_the_environment_are_found_without_relay_and_password(
    guarded: Cluster, monkeypatch: pytest.MonkeyPatch, asyncio_client: bool
) -> None:
    public = f"{guarded.url}/hers"
    secret = f"{public}?user={USER}&password={WORD}"

    async def get() -> bytes:
        async with await aio.connect(public, AMPLE_S) as store:
            return bytes(await store.get("k"))

    with nobody() as gone, Server(storage=secret) as first, Server(storage=secret) as second, connect(secret) as theirs:
        theirs.set("k", "v")
        ends = [one.url.removeprefix("tcp://") for one in (second, first)]
        monkeypatch.setenv(VARIABLE, without_relay(public, gone, identity_of(theirs), f"127.0.0.1:{gone}", *ends))
        if asyncio_client:
            assert asyncio.run(get()) == b"v"
            return
        with connect(public, AMPLE_S) as store:
            assert store.get("k") == b"v"
            first.close()  # even if it led, the client finds the other one without a password
            assert store.add("n", 1) == 1


@needs_etcd
def test_another_store_at_an_address_in_the_environment_is_rejected(
    etcd_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nobody() as gone, Server(storage=etcd_url) as server, Server() as other, connect(server.url) as theirs:
        known = other.url.removeprefix("tcp://")
        monkeypatch.setenv(VARIABLE, without_relay(etcd_url, gone, identity_of(theirs), known))
        with connect(etcd_url, AMPLE_S) as store:
            store.set("k", "v")
            assert theirs.get("k") == b"v"


def test_a_relay_does_not_import_hpack() -> None:
    code = "import sys, rallypoint.relay.process, rallypoint.store.etcd; print('hpack' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


# The search without a network


def looking(*answers: Any) -> tuple[Route, Search]:
    """Return a route whose lookups have these outcomes in turn, and a search of a new session along it."""
    outcomes = iter(answers)

    def look(deadline: Deadline) -> tuple[str, ...]:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return tuple(outcome)

    route = Route(net.Endpoints(), None, "etcd://e:1/x", look)
    return route, Search(route, Deadline(AMPLE_S))


A, B = net.Endpoint("a", 1), net.Endpoint("b", 2)


def test_a_search_looks_up_servers_when_it_knows_none_and_when_all_fail() -> None:
    route, search = looking(["tcp://a:1"], ["tcp://b:2", "tcp://a:1"])
    for found in ([A], [B, A]):
        for address, _ in search.round():
            search.failed(address, "refused")
        search._look_at = 0.0
        assert search.wants_look
        search.look()
        assert [address for address, _ in search.round()] == found
    assert route.label == "etcd://e:1/x" and route.peer(A) == "a:1 (a server of etcd://e:1/x)"


def test_a_search_does_not_look_up_servers_while_a_standby_answers() -> None:
    _, search = looking(["tcp://a:1"])
    search.look()
    search._look_at = 0.0
    for address, _ in search.round():
        search.stands_by(address, Standby("", ["tcp://a:1"], "no server leads yet"))
    assert not search.wants_look


def test_another_server_ends_a_session_only_at_an_address_just_looked_up() -> None:
    route, search = looking(["tcp://a:1"], ["tcp://a:1"])
    stranger = rallypoint.ServerRestarted(peer="a:1", why="its identity has changed")
    search.look()
    assert search.ends(A, stranger)
    route.arrived(A, ClientProtocol("test"))
    assert not search.ends(A, stranger)
    search.look()
    assert search.ends(A, stranger)


def test_a_refusal_by_etcd_ends_only_the_search_of_a_new_session() -> None:
    refused = rallypoint.EtcdRefused(store="etcd://e:1/x", key="k", why="permission denied")
    route, search = looking(refused, refused)
    with pytest.raises(rallypoint.EtcdRefused):
        search.look()
    resuming = Search(route, Deadline(AMPLE_S), resumes=True)
    resuming.look()
    assert "permission denied" in resuming.explain_failure


def test_a_client_refused_by_etcd_waits_for_its_relay() -> None:
    refused = rallypoint.EtcdRefused(store="etcd://e:1/x", key="no user", why="user name is empty")
    route, _ = looking(refused)
    route.relay, route.relayed = RelayAddress("tcp://127.0.0.1:1", net.Endpoints(), store="x"), True
    search = Search(route, Deadline(AMPLE_S))
    assert [address for address, _ in search.round()] == [route.relay]
    search.failed(route.relay, "refused")
    assert search.wants_look
    search.look()
    assert "user name is empty" in search.explain_failure and search.pause_s() >= 0.0
    assert [address for address, _ in search.round()] == [route.relay]
