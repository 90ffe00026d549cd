"""Logs in a real etcd for tests: founding a store, taking its lead, committing to it and reading all of it back.

A `Book` is one connection to the cluster with what a server would do there; several of them are several servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from tests.wire import AMPLE_S

from rallypoint.deadline import Deadline
from rallypoint.etcd import answers, messages
from rallypoint.etcd.address import Address
from rallypoint.etcd.client import Client
from rallypoint.etcd.lease import Lease
from rallypoint.etcd.messages import Method, Op, Txn
from rallypoint.storage.etcd import EtcdStorage
from rallypoint.storage.etcd_batch import Assembler
from rallypoint.storage.etcd_layout import Layout
from rallypoint.storage.etcd_reader import Head, Reader
from rallypoint.store.url import parse_url


def run(work: Any) -> Any:
    """Run a test's coroutine, and give up on it after a while."""
    return asyncio.run(asyncio.wait_for(work, 2 * AMPLE_S))


class Book:
    """One server's way to a store; an asynchronous context manager."""

    def __init__(self, url: str, endpoints: Sequence[str] = ()) -> None:
        address: Address = parse_url(url).etcd()
        self.address = address._replace(endpoints=tuple(endpoints)) if endpoints else address
        self.layout = Layout(address.space)
        self._storages: list[EtcdStorage] = []

    async def __aenter__(self) -> Book:
        self.client = Client(self.address.endpoints, self.address.access, self.address.name)
        self.reader = Reader(self.client, self.layout)
        return self

    async def __aexit__(self, *_: object) -> None:
        for storage in self._storages:
            storage.close()
        await self.client.close()

    async def do(self, *ops: Op) -> list[Any]:
        """Make a transaction; return the answers of its requests."""
        answer = await self.client.call(Method.TXN, Txn([], ops).encode(), Deadline(AMPLE_S))
        return answers.read_txn(answer.data).answers

    async def head(self) -> Head:
        return await self.reader.head(Deadline(AMPLE_S))

    async def found(self, ttl_s: int = 60) -> int:
        """Begin the store; return its lease, which nobody keeps."""
        lease = (await Lease.grant(self.client, ttl_s, Deadline(AMPLE_S))).id
        await self.do(messages.put(self.layout.lease, b"%d" % lease, lease))
        return lease

    async def lead(self) -> EtcdStorage:
        """Take the lead, whoever had it; found the store where there is none."""
        head = await self.head()
        lease = head.lease or await self.found()
        epoch = head.epoch + 1
        await self.do(messages.put(self.layout.epoch, b"%d" % epoch, lease))
        index = await self.last_index()
        storage = EtcdStorage(self.client, self.address, epoch, lease, index)
        self._storages.append(storage)
        return storage

    async def places(self) -> dict[int, bytes]:
        """Return the places of the log that are in etcd, with their values."""
        (found,) = await self.do(messages.get(self.layout.entries, self.layout.entries_end))
        return {self.layout.index(one.key): one.value for one in found.kvs}

    async def last_index(self) -> int:
        head = await self.head()
        return max([*await self.places(), head.snapshot.index if head.snapshot else 0])

    async def records(self) -> list[bytes]:
        """Return all records of the log, as a follower reads them that begins at its beginning."""
        assembler, found = Assembler(), list[bytes]()
        async for _, value in self.reader.entries(0, AMPLE_S):
            found += assembler.take(value)
        return found


async def commit(storage: EtcdStorage, *records: bytes) -> None:
    """Commit a batch; raise what became of it, if that was not well."""
    done: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
    storage.commit(records, done.set_result)
    error = await done
    if error is not None:
        raise error


async def confirm(storage: EtcdStorage) -> None:
    """Have it confirmed that a storage is the leader's; raise Deposed where it is not."""
    done: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
    storage.confirm(done.set_result)
    error = await done
    if error is not None:
        raise error
