"""Native clients and relays of a replicated store find its leader, whichever servers they are given.

They also learn of new servers, and report a lost quorum.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.calls import Call
from tests.etcd.cluster import Cluster
from tests.etcd.fixtures import etcd_space
from tests.raw_peer import AMPLE_S, RawPeer, RelayProcess, read_line, script, until
from tests.replicated.clients import Connect, asynchronous, blocking, by_relay
from tests.replicated.servers import Servers

import rallypoint
from rallypoint.errors import NoQuorum, RallypointError
from rallypoint.protocol.c10d import hello

pytestmark = pytest.mark.needs("etcd")

KINDS = {"blocking": blocking, "asyncio": asynchronous}


@pytest.fixture(params=KINDS)
def direct(request: pytest.FixtureRequest) -> Connect:
    """A client that connects to servers itself."""
    return KINDS[request.param]


@pytest.fixture(params=[*KINDS, *(f"{kind} by relay" for kind in KINDS)])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Connect:
    """A client that connects to servers itself, or through a relay."""
    kind, _, relayed = request.param.partition(" ")
    return by_relay(KINDS[kind], tmp_path) if relayed else KINDS[kind]


def known(client: Any) -> int:
    """Return how many addresses a client knows."""
    session: Any = client._backend if isinstance(client, rallypoint.Store) else client.store._session
    return len(session._route.addresses)


def a_standby(servers: Servers) -> str:
    """Return the address of a server that does not lead."""
    return servers[servers.standbys()[0]].url


def test_a_client_of_a_standby_finds_the_leader(etcd_url: str, tmp_path: Path, connect: Connect) -> None:
    with Servers(etcd_url, tmp_path, 2) as servers, connect(a_standby(servers), timeout=AMPLE_S) as store:
        store.set("key", "value")
        assert store.get("key") == b"value"


def test_a_pytorch_client_of_a_standby_is_logged_with_the_leaders_address(etcd_url: str, tmp_path: Path) -> None:
    with Servers(etcd_url, tmp_path, 2) as servers:
        (standby,) = servers.standbys()
        for _ in range(2):
            with RawPeer(servers[standby].address, greet=False) as peer:
                peer.send(hello(os.getpid()))
                assert peer.rest() == b""
        log = servers[standby].log()
        assert log.count("this server is a standby and cannot serve PyTorch clients") == 1
        assert f"the leader is at {servers[servers.leader()].url}: connect there, or to a relay" in log


def test_a_client_given_only_the_leader_survives_it(etcd_url: str, tmp_path: Path, direct: Connect) -> None:
    with Servers(etcd_url, tmp_path, 3) as servers, direct(servers[servers.leader()].url, timeout=AMPLE_S) as store:
        store.lease("alive", "yes")
        until(lambda: known(store), lambda count: count == 3)  # the last server may have just started
        waiting = Call(store.get, "later", AMPLE_S)
        for number in range(2):
            servers.kill(servers.leader())
            assert store.add("count", 1) == number + 1
        store.set("later", "now")
        assert waiting.result() == b"now"
        assert store.get("alive") == b"yes", "the session is the same"


def test_a_relay_given_only_the_leader_survives_it(etcd_url: str, tmp_path: Path) -> None:
    """Its PyTorch clients survive: the relay learns of the other servers through their shared session."""
    with Servers(etcd_url, tmp_path, 2) as servers:
        leader = servers.leader()
        with RelayProcess(tmp_path, upstream=servers[leader].url) as relay, relay.peer() as peer:
            peer.set(b"key", b"value")
            servers.kill(leader)
            assert peer.add(b"count", 1) == 1
            assert peer.get(b"key") == b"value"


def test_a_client_learns_of_servers_that_start_later(etcd_url: str, tmp_path: Path, direct: Connect) -> None:
    with Servers(etcd_url, tmp_path, 1) as servers, direct(servers[0].url, timeout=AMPLE_S) as store:
        store.lease("alive", "yes")
        assert known(store) == 1
        servers.start()
        until(lambda: known(store), lambda count: count == 2)
        servers.kill(0)
        assert store.add("count", 1) == 1
        assert store.get("alive") == b"yes"
        until(lambda: known(store), lambda count: count == 2)  # the given address is kept
        servers.start()
        until(lambda: known(store), lambda count: count == 3)


FORK = """
import os, signal, sys, rallypoint
store = rallypoint.connect(sys.argv[1], timeout=60)
store.lease("parent", "alive")
child = os.fork()
if child == 0:
    signal.alarm(60)
    status = 99
    try:
        status = 0 if store.add("count", 1) == 1 and store.get("parent") == b"alive" else 1
        print("child", flush=True)
        sys.stdin.readline()
        status += store.add("count", 1) != 2
        store.close()
    finally:
        os._exit(status)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
print(store.add("count", 1), store.get("parent").decode(), flush=True)
"""


def test_the_session_of_a_forked_child_survives_the_leader(etcd_url: str, tmp_path: Path) -> None:
    with Servers(etcd_url, tmp_path, 2) as servers, script(FORK, a_standby(servers)) as process:
        assert read_line(process) == "child"
        servers.kill(servers.leader())
        assert process.stdin is not None
        process.stdin.write(b"go on\n")
        assert read_line(process) == "0"
        assert read_line(process) == "3 alive"


# Without a quorum


@pytest.fixture
def two_down(cluster: Cluster) -> Iterator[None]:
    """Restart the members killed by `lose_quorum` at the end."""
    cluster.settle()
    yield
    bring_back(cluster)


def lose_quorum(cluster: Cluster) -> None:
    for index in (0, 1):
        cluster.kill(index)


def bring_back(cluster: Cluster) -> None:
    for index in (0, 1):
        if not list(cluster)[index].running():
            cluster.restart(index, wait=False)
    cluster.settle()


def attempt(connect: Connect, url: str) -> RallypointError | None:
    """Open a session and write; return the error, if any."""
    try:
        with connect(url, timeout=3.0) as store:
            store.set("new", "session")
    except RallypointError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("connect", "count"),
    [("blocking", 1), ("blocking", 3), ("asyncio", 3), ("blocking by relay", 3), ("asyncio by relay", 1)],
    indirect=["connect"],
)
def test_calls_without_a_quorum_raise_no_quorum_and_work_continues_with_one(
    cluster: Cluster, two_down: None, tmp_path: Path, connect: Connect, count: int
) -> None:
    with (
        Servers(etcd_space(cluster), tmp_path, count) as servers,
        connect(servers.url(), timeout=3.0) as store,
        rallypoint.connect(servers.url(), timeout=3.0) as other,
    ):
        store.lease("alive", "yes")
        store.set("before", "1")
        waiting = Call(store.wait, ["later"], AMPLE_S)
        barrier = Call(lambda: rallypoint.Barrier(other, "all", 2).wait(0, timeout=3.0))
        lose_quorum(cluster)
        calls = [Call(store.get, "missing", 3.0), Call(store.set, "unknown", "2"), Call(store.get, "before", 3.0)]
        errors = [call.error() for call in (*calls, barrier)]
        assert [type(error) for error in errors] == [NoQuorum] * 4, errors
        assert isinstance(errors[0], NoQuorum) and errors[0].timeout_s == 3.0 and errors[0].tried
        for new in [Call(attempt, connect, servers.url()) for _ in range(2)]:
            assert isinstance(error := new.result(), NoQuorum), error
        bring_back(cluster)
        until(lambda: attempt_set(store), lambda done: done)
        assert store.get("after", AMPLE_S) == b"3"
        store.set("later", "now")
        waiting.result()
        assert store.get("alive") == b"yes", "the session is the same"


def attempt_set(store: Any) -> bool:
    """Write; return whether there was a quorum."""
    try:
        store.set("after", "3")
    except NoQuorum:
        return False
    return True
