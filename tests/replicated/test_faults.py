"""Replicated servers and their etcd are killed, stopped and cut off: nothing is lost, applied twice or stale.

Servers are processes on one real cluster. Threads change the store all the while (load.py); each of them finishes
some rounds after the fault begins, and after it ends. The results that they got are then compared with the store.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.calls import Call
from tests.etcd.cluster import Cluster
from tests.etcd.fixtures import etcd_space
from tests.raw_peer import AMPLE_S, until
from tests.replicated.load import StoreLoad
from tests.replicated.servers import Servers
from tests.storage.etcd_logs import Book, run
from tests.storage.test_etcd_log import fill, make_room

import rallypoint
from rallypoint.deadline import Deadline
from rallypoint.errors import DiskFull
from rallypoint.etcd import requests
from rallypoint.etcd.client import Refusal
from rallypoint.etcd.lease import EtcdLease
from rallypoint.etcd.local.member import ask
from rallypoint.etcd.requests import Method
from rallypoint.protocol.c10d import Opcode, encode
from rallypoint.storage.etcd.reader import Head
from rallypoint.testing import HANGS_UP, REFUSES, SILENT, CuttingProxy

pytestmark = pytest.mark.needs("etcd")

QUOTA_BYTES = 16 * 1024 * 1024


def head(url: str) -> Head:
    """Return the head of a store in etcd."""

    async def body() -> Head:
        async with Book(url) as book:
            return await book.head()

    found: Head = run(body())
    return found


def keys(url: str) -> list[bytes]:
    """Return the keys of a store in etcd."""

    async def body() -> list[bytes]:
        async with Book(url) as book:
            (found,) = await book.do(requests.get(book.layout.prefix, book.layout.end))
            return [one.key for one in found.kvs]

    found: list[bytes] = run(body())
    return found


# One fault


def leader(servers: Servers, _: Cluster) -> int:
    return servers.leader()


def standby(servers: Servers, _: Cluster) -> int:
    return servers.standbys()[0]


def etcd_leader(_: Servers, cluster: Cluster) -> int:
    return cluster.leader()


def etcd_follower(_: Servers, cluster: Cluster) -> int:
    return (cluster.leader() + 1) % 3


Change = Callable[[Any, int], object]
FAULTS: dict[str, tuple[Callable[[Servers, Cluster], int], Change, Change]] = {
    "the leader is killed": (leader, Servers.kill, Servers.restart),
    "the leader is stopped": (leader, Servers.stop, Servers.cont),
    "a standby is killed": (standby, Servers.kill, Servers.restart),
    "a standby is stopped": (standby, Servers.stop, Servers.cont),
    "etcd's leader is killed": (etcd_leader, Cluster.kill, Cluster.restart),
    "etcd's leader is stopped": (etcd_leader, Cluster.stop, Cluster.cont),
    "etcd's leader is cut off": (etcd_leader, Cluster.partition, lambda cluster, _: cluster.heal()),
    "a follower of etcd is stopped": (etcd_follower, Cluster.stop, Cluster.cont),
    "a follower of etcd is cut off": (etcd_follower, Cluster.partition, lambda cluster, _: cluster.heal()),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_work_continues_and_nothing_is_lost_or_applied_twice(
    cluster: Cluster, url: str, tmp_path: Path, fault: str
) -> None:
    choose, begin, end = FAULTS[fault]
    with Servers(url, tmp_path) as servers, rallypoint.connect(servers.url(), timeout=100) as store:
        with store.watch("after/") as watch, StoreLoad(servers.url()) as load:
            of: Any = servers if choose in (leader, standby) else cluster
            index = choose(servers, cluster)
            load.survive(store, lambda: begin(of, index), lambda: end(of, index))
            store.set("after/fault", "1")
            assert next(iter(watch)).key == "after/fault"
        load.check(store)
        assert len([one for one in servers.running if servers.statistics(one).get("storage")]) == 1
    assert "Traceback" not in "".join(one.log() for one in servers.all)


def test_all_servers_killed_at_once_come_back_with_everything(url: str, tmp_path: Path) -> None:
    with Servers(url, tmp_path) as servers, rallypoint.connect(servers.url(), timeout=100) as store:
        store.lease("alive", "yes")
        with StoreLoad(servers.url()) as load:
            for index in servers.running:
                servers.kill(index)
            servers.restart(1)
            load.rounds()
        load.check(store)
        assert store.get("alive") == b"yes", "its session was resumed in time"


# The leader, etcd, and the network between


def through(cluster: Cluster, url: str, proxies: list[Any]) -> str:
    """Return the URL of a store, with proxies in front of the members of etcd."""
    return url.replace(",".join(cluster.endpoints), ",".join(f"127.0.0.1:{proxy.port}" for proxy in proxies))


@pytest.mark.parametrize("how", [REFUSES, HANGS_UP, SILENT])
def test_a_leader_cut_off_from_etcd_answers_nothing_until_it_is_a_standby(
    cluster: Cluster, url: str, tmp_path: Path, how: str
) -> None:
    with ExitStack() as stack:
        proxies = [stack.enter_context(CuttingProxy(one.client_port)) for one in cluster]
        servers = stack.enter_context(Servers(url, tmp_path, 0))
        first = servers.start(storage=through(cluster, url, proxies))
        second = servers.start()
        assert servers.leader() == first
        store = stack.enter_context(rallypoint.connect(servers.url([second, first]), timeout=100))
        store.set("key", "old")
        peer = stack.enter_context(servers[first].peer())
        assert peer.get(b"/key") == b"old"
        for proxy in proxies:
            proxy.go_down(how)
        assert servers.leader(other_than=first) == second
        with rallypoint.connect(servers.url([second]), timeout=100) as other:
            other.set("key", "new")
        peer.send(encode(Opcode.GET, b"/key"))
        assert store.get("key") == b"new"
        assert peer.rest() == b"", "the deposed leader disconnects its clients"
        for proxy in proxies:
            proxy.come_back()
        servers.kill(second)
        assert servers.leader() == first
        assert store.get("key") == b"new"
        assert store.add("count", 1) == 1


def test_a_leader_that_no_client_reaches_stays_leader(cluster: Cluster, url: str, tmp_path: Path) -> None:
    with Servers(url, tmp_path, 2) as servers:
        first = servers.leader()
        with (
            CuttingProxy(servers[first].address[1]) as proxy,
            rallypoint.connect(f"tcp://127.0.0.1:{proxy.port}") as store,
        ):
            store.set("key", "value")
            proxy.go_down(SILENT)
            late = Call(store.add, "count", 1)
            proxy.come_back()
            assert late.result() == 1
        assert servers.leader() == first
        assert head(url).epoch == 1


@pytest.mark.parametrize("held", [False, True], ids=["idle", "between confirmation and reply"])
def test_a_leader_deposed_while_stopped_answers_no_read(cluster: Cluster, url: str, tmp_path: Path, held: bool) -> None:
    """A read confirmed before the change of leaders may be answered late; a later read must not be.

    With `held`, the leader is stopped while etcd's reply to such a confirmation is in flight: it arrives when the
    leader continues, together with reads sent after the value had changed.
    """
    with ExitStack() as stack:
        proxies = [stack.enter_context(CuttingProxy(one.client_port)) for one in cluster]
        servers = stack.enter_context(Servers(url, tmp_path, 0))
        first = servers.start(storage=through(cluster, url, proxies))
        second = servers.start()
        early, late = stack.enter_context(servers[first].peer()), stack.enter_context(servers[first].peer())
        early.set(b"key", b"old")
        assert late.get(b"key") == b"old"
        if held:
            for proxy in proxies:
                proxy.hold()
            early.send(encode(Opcode.GET, b"key"))
            until(lambda: [proxy.holding.wait(0.01) for proxy in proxies], any)
        servers.stop(first)
        assert servers.leader() == second
        with servers[second].peer() as other:
            assert other.get(b"key") == b"old"
            other.set(b"key", b"new")
        late.send(encode(Opcode.GET, b"key"))
        for proxy in proxies:
            proxy.release()
        servers.cont(first)
        assert late.rest() == b""
        assert early.rest() in ((b"", answered(b"old")) if held else (b"",))
        servers.kill(second)
        assert servers.leader() == first
        with servers[first].peer() as peer:
            assert peer.get(b"key") == b"new"


def answered(value: bytes) -> bytes:
    """Return the reply to a get of a PyTorch client."""
    return len(value).to_bytes(8, "little") + value


def test_clients_that_only_wait_survive_a_deposed_leader(cluster: Cluster, url: str, tmp_path: Path) -> None:
    """No request reaches the deposed leader, and its lease lives; yet it notices that another server leads."""
    with Servers(url, tmp_path, 2) as servers, rallypoint.connect(servers.url(), timeout=100) as store:
        first = servers.leader()
        waiting = Call(store.wait, ["go"], AMPLE_S).blocked()

        async def claim() -> None:
            async with Book(url) as book:
                await book.lead()

        run(claim())  # an epoch without a leader: a server claims the next one
        until(lambda: epoch(servers), lambda found: found == 3)
        assert first in servers.running
        store.set("go", "now")
        waiting.result()


def test_a_silent_leader_is_replaced_although_its_lease_lives(cluster: Cluster, url: str, tmp_path: Path) -> None:
    """As when etcd's leader vanishes too: its successor renews all leases for their full time."""

    async def keep_and_stop(servers: Servers, first: int) -> int:
        async with Book(url) as book:
            (found,) = await book.do(requests.get(book.layout.leader))
            lease = EtcdLease(book.client, found.kvs[0].lease, 3.0)
            lease.keep()
            servers.stop(first)
            second = await asyncio.to_thread(servers.leader, first)
            assert not lease.ended.is_set()
            lease.close()
            return second

    with Servers(url, tmp_path, 2) as servers, rallypoint.connect(servers.url(), timeout=100) as store:
        store.set("key", "value")
        first = servers.leader()
        assert run(keep_and_stop(servers, first)) != first
        assert store.get("key") == b"value"
        servers.cont(first)
        store.set("key", "new")


def epoch(servers: Servers) -> int:
    """Return the latest epoch in which a server leads."""
    found = [servers.statistics(index).get("storage") for index in servers.running]
    return max((int(one["epoch"]) for one in found if one), default=0)


# Beginning and end


def test_servers_started_together_elect_one_leader_at_once(cluster: Cluster, tmp_path: Path) -> None:
    for _ in range(5):
        url = etcd_space(cluster)
        with Servers(url, tmp_path, 3) as servers:
            servers.leader()
            storages = [servers.statistics(index).get("storage") for index in servers.running]
            assert [found["epoch"] for found in storages if found] == [1], "no server was deposed"
            assert len(head(url).servers) == 3


def test_a_terminated_leader_hands_over(url: str, tmp_path: Path) -> None:
    with Servers(url, tmp_path) as servers, rallypoint.connect(servers.url(), timeout=100) as store:
        with StoreLoad(servers.url()) as load:
            for turn in range(1, 3):
                old = servers.leader()
                assert servers.kill(old, signal.SIGTERM) == 0, servers[old].log()
                found = head(url)
                assert found.leader is None or found.leader.url != servers[old].url, "its lease is revoked"
                assert servers[old].url not in found.servers
                load.rounds()
                assert servers.statistics(servers.leader())["storage"]["epoch"] == turn + 1
        load.check(store)


def test_a_store_expires_after_its_last_server(url: str, tmp_path: Path) -> None:
    with Servers(url, tmp_path, 2, recovery_s=6.0) as servers:
        with rallypoint.connect(servers.url(), timeout=100) as store:
            store.set("key", "value")
            identity = servers.statistics(servers.leader())["storage"]
            assert identity["epoch"] == 1
        assert len(keys(url)) > 5
        for index in servers.running:
            servers.kill(index)
        until(lambda: keys(url), lambda found: not found)
        servers.start()
        with rallypoint.connect(servers.url(servers.running), timeout=100) as store:
            assert not store.check(["key"])


def test_clients_are_notified_that_the_store_was_replaced(url: str, tmp_path: Path) -> None:
    with Servers(url, tmp_path, 2) as servers, rallypoint.connect(servers.url(), timeout=30) as store:
        store.set("key", "old")

        async def end() -> None:
            async with Book(url) as book:
                lease = (await book.head()).lease
                await book.client.call(Method.LEASE_REVOKE, requests.lease(lease), Deadline(AMPLE_S))

        run(end())
        with pytest.raises((rallypoint.ServerRestarted, rallypoint.SessionLost)):
            until(lambda: store.get("key", timeout=20), lambda value: value != b"old")
        with rallypoint.connect(servers.url(), timeout=100) as again:
            assert not again.check(["key"])
            again.set("key", "new")
        assert sorted(servers.running) == [0, 1]


# etcd's own limits


def test_a_standby_behind_a_compaction_of_etcd_catches_up(url: str, tmp_path: Path) -> None:
    with Servers(url, tmp_path, 2) as servers, rallypoint.connect(servers.url(), timeout=100) as store:
        (behind,) = servers.standbys()
        servers.stop(behind)
        for _ in range(100):
            store.add("count", 1)
        port = int(url.removeprefix("etcd://").split(",")[0].split("/")[0].rpartition(":")[2])
        ask(port, "/v3/kv/compaction", {"revision": str(head(url).revision)})
        servers.cont(behind)
        servers.kill(next(index for index in servers.running if index != behind))
        assert store.add("count", 1) == 101
        assert servers.leader() == behind


def test_servers_survive_a_full_etcd(tmp_path: Path) -> None:
    async def full(url: str) -> None:
        async with Book(url) as book:
            with pytest.raises(Refusal, match="space exceeded"):
                await fill(book)

    async def emptied(url: str) -> None:
        async with Book(url) as book:
            await book.do(requests.delete(b"junk/", b"junk0"))

    flags = [f"--quota-backend-bytes={QUOTA_BYTES}"]
    with Cluster(members=1, flags=flags) as cluster, ExitStack() as stack:
        url = etcd_space(cluster)
        servers = stack.enter_context(Servers(url, tmp_path, 2))
        store = stack.enter_context(rallypoint.connect(servers.url(), timeout=100))
        store.set("key", "value")
        run(full(url))
        with pytest.raises(DiskFull):
            store.set("key", "refused")
        assert store.get("key") == b"value", "reads go on"
        servers.kill(servers.leader())
        (left,) = servers.running
        late = Call(store.set, "key", "late")
        until(servers[left].log, lambda said: "space exceeded" in said)
        run(emptied(url))
        make_room(cluster, head(url).revision)
        assert late.error() is None or isinstance(late.error(), DiskFull)
        store.set("key", "last")
        assert store.get("key") == b"last"
        assert servers.leader() == left


def test_work_continues_when_the_quorum_is_back(cluster: Cluster, url: str, tmp_path: Path) -> None:
    with Servers(url, tmp_path) as servers, rallypoint.connect(servers.url(), timeout=100) as store:
        with StoreLoad(servers.url()) as load:
            for index in (0, 1):
                cluster.kill(index)
            late = Call(store.add, "late", 1)
            until(lambda: [one.log() for one in servers.all], lambda said: "cannot reach the log" in "".join(said))
            for index in (0, 1):
                cluster.restart(index, wait=False)
            cluster.settle()
            assert late.result() == 1
            load.rounds()
        load.check(store)
        assert servers.running == [0, 1, 2]
