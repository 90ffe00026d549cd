"""Logs in a real etcd for tests: create a store, become its leader, commit to it and read it back.

A `Book` is one server's connection to the cluster; several of them act as several servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from tests.raw_peer import AMPLE_S

from rallypoint.deadline import Deadline
from rallypoint.etcd import requests, responses
from rallypoint.etcd.address import Address
from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.lease import EtcdLease
from rallypoint.etcd.requests import Method, Txn, TxnOp
from rallypoint.storage.etcd.batch import Assembler
from rallypoint.storage.etcd.layout import Layout
from rallypoint.storage.etcd.reader import Head, Reader
from rallypoint.storage.etcd.storage import EtcdStorage
from rallypoint.store.url import parse_url


def run(work: Any) -> Any:
    """Run a test's coroutine with a generous timeout."""
    return asyncio.run(asyncio.wait_for(work, 2 * AMPLE_S))


class Book:
    """One server's access to a store; an asynchronous context manager."""

    def __init__(self, url: str, endpoints: Sequence[str] = ()) -> None:
        address: Address = parse_url(url).etcd()
        self.address = address._replace(endpoints=tuple(endpoints)) if endpoints else address
        self.layout = Layout(address.space)
        self._storages: list[EtcdStorage] = []

    async def __aenter__(self) -> Book:
        self.client = EtcdClient(self.address.endpoints, self.address.access, self.address.name)
        self.reader = Reader(self.client, self.layout)
        return self

    async def __aexit__(self, *_: object) -> None:
        for storage in self._storages:
            storage.close()
        self.client.close()

    async def do(self, *ops: TxnOp) -> list[Any]:
        """Run a transaction; return the answers of its requests."""
        answer = await self.client.call(Method.TXN, Txn([], ops).encode(), Deadline(AMPLE_S))
        return responses.read_txn(answer.data).answers

    async def head(self) -> Head:
        return await self.reader.head(Deadline(AMPLE_S))

    async def found(self, ttl_s: int = 60) -> int:
        """Create the store; return its lease, which nobody renews."""
        lease = (await EtcdLease.grant(self.client, ttl_s, Deadline(AMPLE_S))).id
        await self.do(requests.put(self.layout.lease, b"%d" % lease, lease))
        return lease

    async def lead(self) -> EtcdStorage:
        """Become the leader, whoever was; create the store if there is none."""
        head = await self.head()
        lease = head.lease or await self.found()
        epoch = head.epoch + 1
        await self.do(requests.put(self.layout.epoch, b"%d" % epoch, lease))
        index = await self.last_index()
        storage = EtcdStorage(self.client, self.address, epoch, lease, index)
        self._storages.append(storage)
        return storage

    async def places(self) -> dict[int, bytes]:
        """Return the entries of the log that are in etcd, by index."""
        (found,) = await self.do(requests.get(self.layout.entries, self.layout.entries_end))
        return {self.layout.index(one.key): one.value for one in found.kvs}

    async def last_index(self) -> int:
        head = await self.head()
        return max([*await self.places(), head.snapshot.index if head.snapshot else 0])

    async def records(self) -> list[bytes]:
        """Return all records of the log, as a new follower reads them."""
        assembler, found = Assembler(), list[bytes]()
        async for _, value in self.reader.entries(0, AMPLE_S):
            found += assembler.take(value)
        return found


async def commit(storage: EtcdStorage, *records: bytes) -> None:
    """Commit a batch; raise its error."""
    done: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
    storage.commit(records, done.set_result)
    error = await done
    if error is not None:
        raise error


async def confirm(storage: EtcdStorage) -> None:
    """Confirm that the storage is still the leader's; raise Deposed if it is not."""
    done: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
    storage.confirm(done.set_result)
    error = await done
    if error is not None:
        raise error
