"""Compaction of a log in etcd, and followers that read it meanwhile: the state stays the same.

The child process is real. A follower here is a state that applies what it reads.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterable

import pytest
from tests.core.logged_state import Server
from tests.etcd.cluster import Cluster
from tests.raw_peer import AMPLE_S
from tests.storage.etcd_logs import Book, commit, run

from rallypoint.core import entries, ops
from rallypoint.core.snapshot import read, write
from rallypoint.core.state import State
from rallypoint.deadline import Deadline
from rallypoint.etcd import requests
from rallypoint.etcd.local.member import ask
from rallypoint.etcd.requests import Method
from rallypoint.etcd.watch import watch
from rallypoint.server.replication.log_follower import LogFollower
from rallypoint.storage.errors import Deposed
from rallypoint.storage.etcd import batch, compaction
from rallypoint.storage.etcd.compaction import EtcdCompactionJob, SnapshotWriter
from rallypoint.storage.etcd.layout import SnapshotHead
from rallypoint.storage.etcd.reader import Reader
from rallypoint.storage.etcd.storage import EtcdStorage

pytestmark = pytest.mark.needs("etcd")

PAUSE = threading.Event()


@pytest.fixture(autouse=True)
def due_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "LEAST_BYTES", 0)


class Work:
    """Changes of a state as records of a log, and the resulting state."""

    def __init__(self) -> None:
        self._server = Server(sessions=1)
        self._number = self._logged = 0

    def more(self, count: int = 20, size: int = 10) -> list[bytes]:
        """Return the records of `count` more changes; the first call includes the start of the log."""
        for _ in range(count):
            self._number += 1
            value = (b"%d" % self._number).ljust(size, b".")
            self._server.ask(1, ops.Set(self._number, b"key %d" % (self._number % 13), value))
        records, self._logged = self._server.log[self._logged :], len(self._server.log)
        return records

    @property
    def state(self) -> list[bytes]:
        return list(write(self._server.state))


class Replica:
    """The state of a server that follows the log."""

    def __init__(self) -> None:
        self._state = State()

    def restore(self, chunks: Iterable[bytes]) -> None:
        self._state = read(chunks)

    def apply_record(self, record: bytes) -> None:
        self._state.apply(entries.decode(record))
        self._state.outputs.clear()

    @property
    def state(self) -> list[bytes]:
        return list(write(self._state))


async def compact(storage: EtcdStorage) -> dict[str, float]:
    """Compact the log; return the statistics after its end, successful or not."""
    before = storage.statistics()
    names = ("compactions", "failed_compactions")
    while not storage.compact_if_due():  # due when the log is larger than the last snapshot
        await commit(storage)
    while all(storage.statistics()[name] == before[name] for name in names):
        await asyncio.to_thread(PAUSE.wait, 0.01)  # the child is a process
    return storage.statistics()


async def state_by(reader: Reader) -> list[bytes]:
    replica = Replica()
    await LogFollower(reader, replica).catch_up(Deadline(AMPLE_S))  # type: ignore[arg-type]
    return replica.state


def test_compaction_keeps_the_state_and_deletes_covered_keys(etcd_url: str) -> None:
    async def body() -> None:
        async with Book(etcd_url) as book:
            storage, work = await book.lead(), Work()
            for turn in range(3):
                await commit(storage, *work.more())
                await commit(storage, *work.more(3 + 2 * turn, size=batch.MAX_BYTES))
                assert await state_by(book.reader) == work.state
                facts = await compact(storage)
                assert (facts["compactions"], facts["log_bytes"]) == (turn + 1, 0)
                assert await book.places() == {}, "what the snapshot covers is deleted"
                assert await state_by(book.reader) == work.state
                head = (await book.head()).snapshot
                (parts,) = await book.do(requests.get(book.layout.snapshots, book.layout.parts(10**15)))
                assert head is not None and head.index == storage.index
                assert len(parts.kvs) == head.parts, "earlier snapshots are deleted"
                assert facts["snapshot_bytes"] == head.bytes == sum(len(one.value) for one in parts.kvs)
                assert {one.lease for one in parts.kvs} == {(await book.head()).lease}

    run(body())


def test_compaction_drops_parts_of_an_unfinished_batch(etcd_url: str) -> None:
    async def body() -> None:
        async with Book(etcd_url) as book:
            storage, work = await book.lead(), Work()
            await commit(storage, *work.more())
            torn = batch.pack([bytes(2 * batch.MAX_BYTES)])
            await book.do(requests.put(book.layout.entry(storage.index + 1), torn[0], (await book.head()).lease))
            storage = await book.lead()
            await compact(storage)
            await commit(storage, *work.more())
            assert await state_by(book.reader) == work.state

    run(body())


def test_the_child_of_a_deposed_leader_changes_nothing(etcd_url: str) -> None:
    async def body() -> None:
        async with Book(etcd_url) as book, Book(etcd_url) as other:
            storage, work = await book.lead(), Work()
            await commit(storage, *work.more())
            new = await other.lead()
            places = await book.places()
            assert (await compact(storage))["failed_compactions"] == 1
            assert await book.places() == places
            assert (await book.head()).snapshot is None
            (parts,) = await book.do(requests.get(book.layout.snapshots, book.layout.parts(10**15)))
            assert parts.kvs == []
            await commit(new, *work.more())
            assert await state_by(book.reader) == work.state

    run(body())


def test_a_late_write_does_not_restore_an_earlier_snapshot(etcd_url: str) -> None:
    """An etcd member that hung may execute a write long after it was repeated and the snapshot replaced."""

    async def body() -> None:
        async with Book(etcd_url) as book:
            storage, work = await book.lead(), Work()
            heads: list[SnapshotHead | None] = [None]
            for _ in range(2):
                await commit(storage, *work.more())
                await compact(storage)
                heads.append((await book.head()).snapshot)
            job = EtcdCompactionJob(book.address, storage.epoch, (await book.head()).lease, storage.index, os.getppid())
            writer = SnapshotWriter(book.client, book.layout, job)
            first, last = heads[1], heads[2]
            assert first is not None and last is not None
            with pytest.raises(Deposed):
                await writer.replace_head(None, first)
            await writer.replace_head(first, last)  # a repetition of the last write
            assert (await book.head()).snapshot == last
            assert await state_by(book.reader) == work.state

    run(body())


def test_the_child_of_an_ended_store_deletes_nothing_of_the_next_one(etcd_url: str) -> None:
    async def body() -> None:
        async with Book(etcd_url) as book:
            await book.lead()
            lease = (await book.head()).lease
            await book.client.call(Method.LEASE_REVOKE, requests.lease(lease), Deadline(AMPLE_S))
            new, work = await book.lead(), Work()
            await commit(new, *work.more())
            late = SnapshotWriter(
                book.client, book.layout, EtcdCompactionJob(book.address, new.epoch, lease, 1, os.getppid())
            )
            with pytest.raises(Deposed):
                await late.delete_before(1, 0)
            assert await state_by(book.reader) == work.state

    run(body())


class Overtaking(Reader):
    """A reader that is overtaken once by a compaction, between reading the head and the rest."""

    def __init__(self, book: Book, storage: EtcdStorage, work: Work) -> None:
        super().__init__(book.client, book.layout)
        self._storage, self._work = storage, work
        self.overtaken = 0

    async def _overtake(self) -> None:
        if not self.overtaken:
            self.overtaken = 1
            await commit(self._storage, *self._work.more())
            await compact(self._storage)
            await commit(self._storage, *self._work.more())

    async def snapshot(self, head: SnapshotHead, call_s: float) -> list[bytes]:
        await self._overtake()
        return await super().snapshot(head, call_s)

    async def entries(self, after: int, call_s: float) -> AsyncIterator[tuple[int, bytes]]:
        await self._overtake()
        async for place in super().entries(after, call_s):
            yield place


@pytest.mark.parametrize("compacted", [False, True], ids=["the log", "the snapshot"])
def test_a_follower_overtaken_by_a_compaction_starts_again(etcd_url: str, compacted: bool) -> None:
    async def body() -> None:
        async with Book(etcd_url) as book:
            storage, work = await book.lead(), Work()
            await commit(storage, *work.more())
            if compacted:
                await compact(storage)
            reader = Overtaking(book, storage, work)
            assert await state_by(reader) == work.state
            assert reader.overtaken

    run(body())


def test_a_late_follower_continues_from_the_snapshot(etcd_url: str) -> None:
    async def body() -> None:
        async with Book(etcd_url) as book:
            storage, work, replica = await book.lead(), Work(), Replica()
            follower = LogFollower(book.reader, replica)  # type: ignore[arg-type]
            for away in (0, 1, 2):
                for _ in range(away):
                    await commit(storage, *work.more())
                    await compact(storage)
                await commit(storage, *work.more())
                await follower.catch_up(Deadline(AMPLE_S))
                assert replica.state == work.state
                assert follower.index == storage.index
            await compact(storage)  # a follower that is up to date
            head = await follower.catch_up(Deadline(AMPLE_S))
            assert replica.state == work.state
            assert head.snapshot is not None
            assert (follower.log_bytes, follower.snapshot_bytes) == (0, head.snapshot.bytes)

    run(body())


def test_a_watch_ends_where_etcd_has_compacted_its_history(etcd_cluster: Cluster, etcd_url: str) -> None:
    async def body() -> None:
        async with Book(etcd_url) as book:
            storage, work = await book.lead(), Work()
            before = (await book.head()).revision
            for _ in range(5):
                await commit(storage, *work.more(1))
            port, now = next(iter(etcd_cluster)).client_port, (await book.head()).revision
            await asyncio.to_thread(ask, port, "/v3/kv/compaction", {"revision": str(now)})
            seen: list[object] = []
            layout = book.layout
            why = await watch(book.client, layout.prefix, layout.end, before + 1, seen.append)
            assert "compacted" in why
            assert await state_by(book.reader) == work.state

    run(body())
