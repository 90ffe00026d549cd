"""Replicated servers that are killed, held and cut off, and etcd below them: nothing is lost, doubled or stale.

Servers are processes on one real cluster. Threads work on the store all the while (crew.py); each fault is followed by
work of all of them, and so is its end. What they were told is then compared with what is in the store.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.calls import Call
from tests.cutter import HANGS_UP, REFUSES, SILENT, Cutter
from tests.etcd.cluster import Cluster
from tests.etcd.fixtures import etcd_space
from tests.replicated.crew import Crew
from tests.replicated.holder import Holder
from tests.replicated.servers import Servers
from tests.storage.etcd_logs import Book, run
from tests.storage.test_etcd_log import fill, make_room
from tests.wire import AMPLE_S, until

import rallypoint
from rallypoint.deadline import Deadline
from rallypoint.errors import DiskFull
from rallypoint.etcd import messages
from rallypoint.etcd.client import Refusal
from rallypoint.etcd.lease import Lease
from rallypoint.etcd.member import ask
from rallypoint.etcd.messages import Method
from rallypoint.protocol.c10d import Opcode, encode
from rallypoint.storage.etcd_reader import Head

pytestmark = pytest.mark.needs("etcd")

QUOTA_BYTES = 16 * 1024 * 1024


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(cuttable=True) as cluster:
        yield cluster


@pytest.fixture
def url(cluster: Cluster) -> str:
    cluster.settle()
    return etcd_space(cluster)


def head(url: str) -> Head:
    """Return what etcd has of a store."""

    async def body() -> Head:
        async with Book(url) as book:
            return await book.head()

    found: Head = run(body())
    return found


def keys(url: str) -> list[bytes]:
    """Return the keys of a store in etcd."""

    async def body() -> list[bytes]:
        async with Book(url) as book:
            (found,) = await book.do(messages.get(book.layout.prefix, book.layout.end))
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
    "the leader is held": (leader, Servers.stop, Servers.cont),
    "a standby is killed": (standby, Servers.kill, Servers.restart),
    "a standby is held": (standby, Servers.stop, Servers.cont),
    "etcd's leader is killed": (etcd_leader, Cluster.kill, Cluster.restart),
    "etcd's leader is held": (etcd_leader, Cluster.stop, Cluster.cont),
    "etcd's leader is cut off": (etcd_leader, Cluster.partition, lambda cluster, _: cluster.heal()),
    "a follower of etcd is held": (etcd_follower, Cluster.stop, Cluster.cont),
    "a follower of etcd is cut off": (etcd_follower, Cluster.partition, lambda cluster, _: cluster.heal()),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_work_goes_on_and_nothing_is_lost_or_doubled(cluster: Cluster, url: str, tmp_path: Path, fault: str) -> None:
    choose, begin, end = FAULTS[fault]
    with Servers(url, tmp_path) as servers, rallypoint.connect(servers.url(), timeout=100) as store:
        with store.watch("seen/") as watch, Crew(servers.url()) as crew:
            store.lease("alive", "yes")
            waiting, item = Call(store.wait, ["go"], AMPLE_S), Call(store.queue_pop, "late", True, AMPLE_S)
            of: Any = servers if choose in (leader, standby) else cluster
            index = choose(servers, cluster)
            begin(of, index)
            crew.rounds()
            end(of, index)
            crew.rounds()
            store.set("seen/it", "1")
            store.set("go", "now")
            store.queue_push("late", "item")
            assert next(iter(watch)).key == "seen/it"
            waiting.result()
            assert item.result() == b"item"
            assert store.get("alive") == b"yes"
        crew.check(store)
        assert len([one for one in servers.running if servers.statistics(one).get("storage")]) == 1
    assert "Traceback" not in "".join(one.log() for one in servers.all)


def test_all_servers_killed_at_once_come_back_with_everything(url: str, tmp_path: Path) -> None:
    with Servers(url, tmp_path) as servers, rallypoint.connect(servers.url(), timeout=100) as store:
        store.lease("alive", "yes")
        with Crew(servers.url()) as crew:
            for index in servers.running:
                servers.kill(index)
            servers.restart(1)
            crew.rounds()
        crew.check(store)
        assert store.get("alive") == b"yes", "its session came back in time"


# The leader, etcd, and the network between


def through(cluster: Cluster, url: str, proxies: list[Any]) -> str:
    """Return the URL of a store whose members are reached by proxies."""
    return url.replace(",".join(cluster.endpoints), ",".join(f"127.0.0.1:{proxy.port}" for proxy in proxies))


@pytest.mark.parametrize("how", [REFUSES, HANGS_UP, SILENT])
def test_a_leader_that_is_cut_off_from_etcd_answers_nothing_until_it_stands_by(
    cluster: Cluster, url: str, tmp_path: Path, how: str
) -> None:
    with ExitStack() as stack:
        proxies = [stack.enter_context(Cutter(one.client_port)) for one in cluster]
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
        assert peer.rest() == b"", "the deposed leader hangs up"
        for proxy in proxies:
            proxy.come_back()
        servers.kill(second)
        assert servers.leader() == first
        assert store.get("key") == b"new"
        assert store.add("count", 1) == 1


def test_a_leader_that_no_client_reaches_leads_on(cluster: Cluster, url: str, tmp_path: Path) -> None:
    with Servers(url, tmp_path, 2) as servers:
        first = servers.leader()
        with Cutter(servers[first].address[1]) as proxy, rallypoint.connect(f"tcp://127.0.0.1:{proxy.port}") as store:
            store.set("key", "value")
            proxy.go_down(SILENT)
            late = Call(store.add, "count", 1)
            proxy.come_back()
            assert late.result() == 1
        assert servers.leader() == first
        assert head(url).epoch == 1


@pytest.mark.parametrize("held", [False, True], ids=["idle", "between confirmation and reply"])
def test_a_leader_that_wakes_up_deposed_answers_no_read(cluster: Cluster, url: str, tmp_path: Path, held: bool) -> None:
    """A read that was confirmed before another led may be answered late; one that came later must not be.

    With `held`, the leader is stopped while etcd's answer to such a confirmation is on its way: it arrives when the
    leader wakes up, together with reads that were sent when the value was another.
    """
    with ExitStack() as stack:
        proxies = [stack.enter_context(Holder(one.client_port)) for one in cluster]
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
    """Return what a PyTorch client is answered to a get."""
    return len(value).to_bytes(8, "little") + value


def test_a_leader_that_was_deposed_tells_clients_that_only_wait(cluster: Cluster, url: str, tmp_path: Path) -> None:
    """Nobody asks it anything, its lease lives, and yet it finds out that another leads."""
    with Servers(url, tmp_path, 2) as servers, rallypoint.connect(servers.url(), timeout=100) as store:
        first = servers.leader()
        waiting = Call(store.wait, ["go"], AMPLE_S).blocked()

        async def claim() -> None:
            async with Book(url) as book:
                await book.lead()

        run(claim())  # an epoch that is nobody's: whoever led claims the next one
        until(lambda: epoch(servers), lambda found: found == 3)
        assert first in servers.running
        store.set("go", "now")
        waiting.result()


def test_a_leader_that_is_silent_is_missed_though_its_lease_lives(cluster: Cluster, url: str, tmp_path: Path) -> None:
    """As where etcd's leader has vanished with it: the next one gives all leases their whole time again."""

    async def keep_and_stop(servers: Servers, first: int) -> int:
        async with Book(url) as book:
            (found,) = await book.do(messages.get(book.layout.leader))
            lease = Lease(book.client, found.kvs[0].lease, 3.0)
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


def test_servers_that_start_at_the_same_moment_agree_at_once(cluster: Cluster, tmp_path: Path) -> None:
    for _ in range(5):
        url = etcd_space(cluster)
        with Servers(url, tmp_path, 3) as servers:
            servers.leader()
            storages = [servers.statistics(index).get("storage") for index in servers.running]
            assert [found["epoch"] for found in storages if found] == [1], "nobody was deposed on the way"
            assert len(head(url).servers) == 3


def test_a_server_that_is_told_to_end_hands_over(url: str, tmp_path: Path) -> None:
    with Servers(url, tmp_path) as servers, rallypoint.connect(servers.url(), timeout=100) as store:
        with Crew(servers.url()) as crew:
            for turn in range(1, 3):
                old = servers.leader()
                assert servers.kill(old, signal.SIGTERM) == 0, servers[old].log()
                found = head(url)
                assert found.leader is None or found.leader.url != servers[old].url, "its lease is revoked"
                assert servers[old].url not in found.servers
                crew.rounds()
                assert servers.statistics(servers.leader())["storage"]["epoch"] == turn + 1
        crew.check(store)


def test_a_store_is_gone_some_time_after_its_last_server(url: str, tmp_path: Path) -> None:
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


def test_clients_hear_that_the_store_has_ended_and_another_begun(url: str, tmp_path: Path) -> None:
    with Servers(url, tmp_path, 2) as servers, rallypoint.connect(servers.url(), timeout=30) as store:
        store.set("key", "old")

        async def end() -> None:
            async with Book(url) as book:
                lease = (await book.head()).lease
                await book.client.call(Method.LEASE_REVOKE, messages.lease(lease), Deadline(AMPLE_S))

        run(end())
        with pytest.raises((rallypoint.ServerRestarted, rallypoint.SessionLost)):
            until(lambda: store.get("key", timeout=20), lambda value: value != b"old")
        with rallypoint.connect(servers.url(), timeout=100) as again:
            assert not again.check(["key"])
            again.set("key", "new")
        assert sorted(servers.running) == [0, 1]


# etcd's own limits


def test_a_standby_for_which_etcd_has_compacted_its_history_catches_up(url: str, tmp_path: Path) -> None:
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


def test_servers_outlive_an_etcd_that_is_full(tmp_path: Path) -> None:
    async def full() -> None:
        async with Book(url) as book:
            with pytest.raises(Refusal, match="space exceeded"):
                await fill(book)

    async def emptied() -> None:
        async with Book(url) as book:
            await book.do(messages.delete(b"junk/", b"junk0"))

    flags = [f"--quota-backend-bytes={QUOTA_BYTES}"]
    with Cluster(members=1, flags=flags) as cluster, ExitStack() as stack:
        url = etcd_space(cluster)
        servers = stack.enter_context(Servers(url, tmp_path, 2))
        store = stack.enter_context(rallypoint.connect(servers.url(), timeout=100))
        store.set("key", "value")
        run(full())
        with pytest.raises(DiskFull):
            store.set("key", "refused")
        assert store.get("key") == b"value", "reads go on"
        servers.kill(servers.leader())
        (left,) = servers.running
        late = Call(store.set, "key", "late")
        until(servers[left].log, lambda said: "space exceeded" in said)
        run(emptied())
        make_room(cluster, head(url).revision)
        assert late.error() is None or isinstance(late.error(), DiskFull)
        store.set("key", "last")
        assert store.get("key") == b"last"
        assert servers.leader() == left


def test_work_goes_on_when_quorum_is_back(cluster: Cluster, url: str, tmp_path: Path) -> None:
    with Servers(url, tmp_path) as servers, rallypoint.connect(servers.url(), timeout=100) as store:
        with Crew(servers.url()) as crew:
            for index in (0, 1):
                cluster.kill(index)
            late = Call(store.add, "late", 1)
            until(lambda: [one.log() for one in servers.all], lambda said: "cannot reach the log" in "".join(said))
            for index in (0, 1):
                cluster.restart(index, wait=False)
            cluster.settle()
            assert late.result() == 1
            crew.rounds()
        crew.check(store)
        assert servers.running == [0, 1, 2]
