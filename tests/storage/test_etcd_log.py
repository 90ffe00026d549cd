"""The log in a real etcd: committed records are there once, in order, and a deposed leader adds nothing.

Leaders here are objects in one event loop, so that the test controls every step; tests/replicated has whole servers.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import ExitStack

import pytest
from tests.etcd.cluster import Cluster
from tests.etcd.fixtures import etcd_space
from tests.raw_peer import AMPLE_S
from tests.storage.etcd_logs import Book, commit, confirm, run

from rallypoint.deadline import Deadline
from rallypoint.errors import DiskFull
from rallypoint.etcd import requests
from rallypoint.etcd.client import Refusal
from rallypoint.etcd.local.member import ask
from rallypoint.etcd.requests import Method
from rallypoint.storage.errors import Deposed, StorageFailed, StoreGone
from rallypoint.storage.etcd.batch import MAX_BYTES, pack
from rallypoint.testing import DOWN, UP, CuttingProxy

pytestmark = pytest.mark.needs("etcd")


def test_batches_of_any_size_are_read_back_in_order(etcd_url: str) -> None:
    async def body() -> None:
        async with Book(etcd_url) as book:
            storage = await book.lead()
            large = random.Random(1).randbytes(2 * MAX_BYTES + 7)
            batches = [[b"a"], [b"b", b""], [large, b"behind"], [b"c"]]
            for batch in batches:
                await commit(storage, *batch)
            assert await book.records() == [record for batch in batches for record in batch]
            assert storage.index == await book.last_index() == 6
            assert storage.statistics()["commits"] == 4

    run(body())


def test_a_deposed_leader_adds_nothing_to_the_log(etcd_url: str) -> None:
    async def body() -> None:
        async with Book(etcd_url) as one, Book(etcd_url) as other:
            old = await one.lead()
            await commit(old, b"before")
            await confirm(old)
            new = await other.lead()
            for attempt in (commit(old, b"late"), commit(old, bytes(3 * MAX_BYTES)), confirm(old)):
                with pytest.raises(Deposed, match="epoch 1 has ended"):
                    await attempt
            await commit(new, b"after")
            await confirm(new)
            with pytest.raises(Deposed):
                await commit(old, b"after")  # even the same value: the entry is another leader's
            assert await one.records() == [b"before", b"after"]

    run(body())


def test_parts_left_by_a_leader_deposed_in_a_large_batch_are_ignored(etcd_url: str) -> None:
    async def body() -> None:
        async with Book(etcd_url) as one, Book(etcd_url) as other:
            old = await one.lead()
            large = asyncio.ensure_future(commit(old, bytes(20 * MAX_BYTES)))
            while old.index < 2:  # until some parts are written
                await asyncio.sleep(0)
            new = await other.lead()
            with pytest.raises(Deposed):
                await large
            index = await other.last_index()
            assert 2 <= new.index <= index < 20
            storage = await other.lead()  # a leader that has read the whole log
            await commit(storage, b"after")
            assert await other.records() == [b"after"]

    run(body())


def test_the_leader_of_an_ended_store_cannot_write_to_its_successor(etcd_url: str) -> None:
    async def body() -> None:
        async with Book(etcd_url) as one, Book(etcd_url) as other:
            old = await one.lead()
            lease = (await one.head()).lease
            await commit(old, b"of the old store")
            await one.client.call(Method.LEASE_REVOKE, requests.lease(lease), Deadline(AMPLE_S))
            assert (await one.head()).lease == 0
            assert await one.places() == {}, "all keys of a store have its lease"
            new = await other.lead()
            assert new.epoch == old.epoch, "epochs count from 1 again"
            with pytest.raises(Deposed):
                await confirm(old)
            with pytest.raises((StoreGone, Deposed)):
                await commit(old, b"late")
            await commit(new, b"of the new store")
            with pytest.raises((StoreGone, Deposed)):
                await commit(old, b"late")
            assert await other.records() == [b"of the new store"]

    run(body())


def test_a_closed_storage_starts_no_commit(etcd_url: str) -> None:
    """A commit in flight may still be executed: if its index were reused, followers would differ."""

    async def body() -> None:
        async with Book(etcd_url) as book:
            storage = await book.lead()
            outcomes: list[object] = []
            storage.commit([b"in flight"], outcomes.append)
            storage.close()
            storage.commit([b"after"], outcomes.append)
            storage.confirm(outcomes.append)
            other = await book.lead()
            await commit(other, b"next")
            assert set(await book.records()) <= {b"in flight", b"next"}
            assert outcomes == []

    run(body())


def test_an_existing_entry_is_never_overwritten(etcd_url: str) -> None:
    async def body() -> None:
        async with Book(etcd_url) as book:
            storage = await book.lead()
            (value,) = pack([b"somebody's"])
            await book.do(requests.put(book.layout.entry(1), value))
            with pytest.raises(StorageFailed, match="already has another value"):
                await commit(storage, b"mine")
            assert await book.records() == [b"somebody's"]

    run(body())


@pytest.mark.parametrize("seed", range(4))
def test_a_commit_whose_answer_is_lost_is_in_the_log_once(etcd_cluster: Cluster, etcd_url: str, seed: int) -> None:
    async def body(cutters: list[CuttingProxy]) -> None:
        chance = random.Random(seed)
        async with Book(etcd_url, [f"127.0.0.1:{cutter.port}" for cutter in cutters]) as book:
            storage = await book.lead()
            committed = []
            for number in range(40):
                chance.choice(cutters).cut_after(chance.choice((UP, DOWN)), chance.randrange(1, 400))
                committed.append(b"%d" % number)
                await commit(storage, committed[-1])
            assert await book.records() == committed
            assert storage.index == len(committed)

    with ExitStack() as stack:
        cutters = [stack.enter_context(CuttingProxy(one.client_port)) for one in etcd_cluster]
        run(body(cutters))
        assert sum(cutter.connections for cutter in cutters) > 12, "nothing was cut"


def test_commits_continue_while_etcd_members_are_killed_and_stopped() -> None:
    async def body(cluster: Cluster) -> None:
        async with Book(etcd_space(cluster)) as book:
            storage, committed = await book.lead(), list[bytes]()

            async def work(times: int) -> None:
                for _ in range(times):
                    committed.append(b"%d" % len(committed))
                    await commit(storage, committed[-1])

            for begin, end in ((cluster.kill, cluster.restart), (cluster.stop, cluster.cont)):
                for index in (cluster.leader(), (cluster.leader() + 1) % 3):
                    working = asyncio.ensure_future(work(30))
                    await asyncio.to_thread(begin, index)
                    await working
                    await work(10)
                    await asyncio.to_thread(end, index)
                    await asyncio.to_thread(cluster.settle)
                    await work(10)
            assert await book.records() == committed

    with Cluster() as cluster:
        run(body(cluster))


def test_a_full_etcd_refuses_commits_until_it_has_room() -> None:
    async def body(cluster: Cluster) -> None:
        async with Book(etcd_space(cluster)) as book:
            storage = await book.lead()
            await commit(storage, b"first")
            with pytest.raises(Refusal, match="space exceeded"):
                await fill(book)
            for _ in range(2):
                with pytest.raises(DiskFull):
                    await commit(storage, b"refused")
                with pytest.raises(DiskFull):
                    await commit(storage, bytes(3 * MAX_BYTES))
                await confirm(storage)
            await book.do(requests.delete(b"junk/", b"junk0"))
            await asyncio.to_thread(make_room, cluster, (await book.head()).revision)
            await commit(storage, b"last")
            assert await book.records() == [b"first", b"last"]

    with Cluster(flags=["--quota-backend-bytes=16777216"], members=1) as cluster:
        run(body(cluster))


async def fill(book: Book) -> None:
    """Write keys outside the store until etcd refuses."""
    for number in range(400):  # its quota is checked with a delay
        await book.do(requests.put(b"junk/%d" % number, bytes(MAX_BYTES // 2)))


def make_room(cluster: Cluster, revision: int) -> None:
    """Act as an operator: compact the history, defragment each member, and clear the alarm."""
    members = list(cluster)
    ask(members[0].client_port, "/v3/kv/compaction", {"revision": str(revision), "physical": True}, timeout_s=AMPLE_S)
    for one in members:
        ask(one.client_port, "/v3/maintenance/defragment", {}, timeout_s=AMPLE_S)
    for alarm in ask(members[0].client_port, "/v3/maintenance/alarm", {"action": "GET"}).get("alarms", []):
        ask(members[0].client_port, "/v3/maintenance/alarm", {"action": "DEACTIVATE", **alarm}, timeout_s=AMPLE_S)
