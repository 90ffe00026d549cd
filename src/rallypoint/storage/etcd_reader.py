"""Reading a replicated store: its head, its snapshot and its log; by servers that stand by, or fold the log.

The log only grows at its end, and what a snapshot covers is deleted at its beginning, some time after. So a reader that
finds a part of a snapshot or a place of the log missing has been too slow, begins again with the head, and gets there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple

import msgspec

from rallypoint.deadline import Deadline
from rallypoint.etcd import answers, messages
from rallypoint.etcd.client import Client
from rallypoint.etcd.messages import Method, Txn
from rallypoint.storage.etcd_batch import Assembler
from rallypoint.storage.etcd_layout import Layout, Leader, Server, SnapshotHead

__all__ = ["Head", "Overtaken", "Reader"]

PAGE, MAX_PAGE = 8, 128
"""How many places of the log, or parts of a snapshot, are read at a time: at first, and where they are small."""

PAGE_BYTES = 1024 * 1024
"""A page that has less is followed by one of twice as many places."""


class Overtaken(Exception):
    """What was to be read has been replaced by a later snapshot."""


class Head(NamedTuple):
    """What is known of a store, as of a revision of etcd, beside its log."""

    revision: int
    lease: int
    """The id of the lease on which the store hangs; 0: there is no such store."""

    epoch: int
    leader: Leader | None
    snapshot: SnapshotHead | None
    servers: list[str]


class Reader:
    """Reads one store."""

    def __init__(self, client: Client, layout: Layout) -> None:
        self.name = client.name
        self._client, self._layout = client, layout

    async def head(self, deadline: Deadline) -> Head:
        """Return what there is at one moment, by quorum."""
        layout = self._layout
        keys = (layout.lease, layout.epoch, layout.leader, layout.snapshot)
        servers = messages.get(layout.servers, messages.next_after(layout.servers))
        txn = Txn([], [*map(messages.get, keys), servers])
        result = answers.read_txn((await self._client.call(Method.TXN, txn.encode(), deadline)).data)
        lease, epoch, leader, snapshot = (found.kvs[0].value if found.kvs else None for found in result.answers[:4])
        return Head(
            result.revision,
            int(lease or b"0"),
            int(epoch or b"0"),
            None if leader is None else msgspec.json.decode(leader, type=Leader),
            None if snapshot is None else msgspec.json.decode(snapshot, type=SnapshotHead),
            [msgspec.json.decode(one.value, type=Server).url for one in result.answers[4].kvs],
        )

    async def leader_written(self, deadline: Deadline) -> int:
        """Return the revision at which the leader last wrote its key, by quorum; 0: there is none."""
        request = messages.get(self._layout.leader).body
        found = answers.read_range((await self._client.call(Method.RANGE, request, deadline)).data).kvs
        return found[0].modified if found else 0

    async def snapshot(self, head: SnapshotHead, call_s: float) -> list[bytes]:
        """Return the chunks of a snapshot; raise Overtaken where it is not there any more, NoQuorum as `entries`."""
        chunks: list[bytes] = []
        assembler, count = Assembler(), 0
        first, end = (self._layout.part(head.index, number) for number in (0, head.parts))
        async for _, value in self._range(first, end, call_s):
            chunks += assembler.take(value)
            count += 1
        if count != head.parts:
            raise Overtaken(f"snapshot {head.index} is not whole any more")
        return chunks

    async def entries(self, after: int, call_s: float) -> AsyncIterator[tuple[int, bytes]]:
        """Yield the places of the log after one, with their values, in order; raise Overtaken at a gap.

        NoQuorum: one of the calls that this takes had no answer in its time.
        """
        expected = after + 1
        first = self._layout.entry(expected)
        async for key, value in self._range(first, self._layout.entries_end, call_s):
            index = self._layout.index(key)
            if index != expected:
                raise Overtaken(f"place {expected} of the log is not there any more")
            yield index, value
            expected += 1

    async def _range(self, first: bytes, end: bytes, call_s: float) -> AsyncIterator[tuple[bytes, bytes]]:
        page = PAGE
        while True:
            request = messages.get(first, end, limit=page).body
            found = answers.read_range((await self._client.call(Method.RANGE, request, Deadline(call_s))).data)
            for one in found.kvs:
                yield one.key, one.value
            if len(found.kvs) == found.total:
                return
            first = found.kvs[-1].key + b"\0"
            small = sum(len(one.value) for one in found.kvs) < PAGE_BYTES
            page = min(2 * page, MAX_PAGE) if small else PAGE
