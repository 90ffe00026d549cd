"""Read a replicated store from etcd: its head, its snapshot and its log. Used by standbys and by compactions.

The leader appends to the log, and a compaction deletes the beginning that a snapshot covers. So a reader that misses a
part of a snapshot or a log index was too slow: it starts again with the head, and finds the newer snapshot.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple

import msgspec

from rallypoint.deadline import Deadline
from rallypoint.etcd import requests, responses
from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.requests import Method, Txn
from rallypoint.storage.etcd.batch import Assembler
from rallypoint.storage.etcd.layout import Layout, LeaderEntry, ServerEntry, SnapshotHead

__all__ = ["Head", "Overtaken", "Reader"]

PAGE, MAX_PAGE = 8, 128
"""Keys read at a time: at first, and at most, if their values are small."""

PAGE_BYTES = 1024 * 1024
"""A page with fewer bytes is followed by one with twice as many keys."""


class Overtaken(Exception):
    """The reader was too slow: a later snapshot has replaced what it reads."""


class Head(NamedTuple):
    """The state of a store in etcd at one revision, except for its log."""

    revision: int
    lease: int
    """The id of the store's lease; 0: there is no such store."""

    epoch: int
    leader: LeaderEntry | None
    snapshot: SnapshotHead | None
    servers: list[str]


class Reader:
    """Reads one store."""

    def __init__(self, client: EtcdClient, layout: Layout) -> None:
        self.name = client.name
        self._client, self._layout = client, layout

    async def head(self, deadline: Deadline) -> Head:
        """Return the head of the store, read at one moment, by quorum."""
        layout = self._layout
        keys = (layout.lease, layout.epoch, layout.leader, layout.snapshot)
        servers = requests.get(layout.servers, requests.next_after(layout.servers))
        txn = Txn([], [*map(requests.get, keys), servers])
        result = responses.read_txn((await self._client.call(Method.TXN, txn.encode(), deadline)).data)
        lease, epoch, leader, snapshot = (found.kvs[0].value if found.kvs else None for found in result.answers[:4])
        return Head(
            result.revision,
            int(lease or b"0"),
            int(epoch or b"0"),
            None if leader is None else msgspec.json.decode(leader, type=LeaderEntry),
            None if snapshot is None else msgspec.json.decode(snapshot, type=SnapshotHead),
            [msgspec.json.decode(one.value, type=ServerEntry).url for one in result.answers[4].kvs],
        )

    async def leader_written(self, deadline: Deadline) -> int:
        """Return the revision of the leader's last heartbeat, read by quorum; 0: there is no leader."""
        request = requests.get(self._layout.leader).body
        found = responses.read_range((await self._client.call(Method.RANGE, request, deadline)).data).kvs
        return found[0].mod_revision if found else 0

    async def snapshot(self, head: SnapshotHead, call_s: float) -> list[bytes]:
        """Return the chunks of a snapshot. Raises Overtaken if it was deleted, and NoQuorum."""
        chunks: list[bytes] = []
        assembler, count = Assembler(), 0
        first, end = (self._layout.part(head.index, number) for number in (0, head.parts))
        async for _, value in self._range(first, end, call_s):
            chunks += assembler.take(value)
            count += 1
        if count != head.parts:
            raise Overtaken(f"snapshot {head.index} was deleted")
        return chunks

    async def entries(self, after: int, call_s: float) -> AsyncIterator[tuple[int, bytes]]:
        """Yield the log indexes greater than `after`, with their values, in order. Raises Overtaken at a gap.

        Raises NoQuorum if etcd does not answer one of the calls within `call_s`.
        """
        expected = after + 1
        first = self._layout.entry(expected)
        async for key, value in self._range(first, self._layout.entries_end, call_s):
            index = self._layout.index(key)
            if index != expected:
                raise Overtaken(f"log index {expected} was deleted")
            yield index, value
            expected += 1

    async def _range(self, first: bytes, end: bytes, call_s: float) -> AsyncIterator[tuple[bytes, bytes]]:
        page = PAGE
        while True:
            request = requests.get(first, end, limit=page).body
            found = responses.read_range((await self._client.call(Method.RANGE, request, Deadline(call_s))).data)
            for one in found.kvs:
                yield one.key, one.value
            if len(found.kvs) == found.total:
                return
            first = found.kvs[-1].key + b"\0"
            small = sum(len(one.value) for one in found.kvs) < PAGE_BYTES
            page = min(2 * page, MAX_PAGE) if small else PAGE
