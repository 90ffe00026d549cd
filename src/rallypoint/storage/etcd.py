"""`EtcdStorage`: the log of the server that leads, in etcd, where any machine may die.

Every append is a transaction that compares the epoch: once another server leads, nothing more can be appended here,
and `Deposed` says so, whatever the clocks of the two show. One commit is under way at a time. Where its fate is not
known (no answer, another member), the same transaction is made again: it writes the same value to the same place, so
twice is once, and nothing is appended behind it before it is settled.

A read may see what was committed, and a leader that was deposed does not know what is committed. So reads wait for
`confirm`: the epoch is read, by quorum, after the read was asked for; while it is ours, nobody else has committed.

    etcd_layout.py      the keys, as people see them
    etcd_batch.py       a batch of records in values of at most 1 MiB
    etcd_reader.py      reading the log and the snapshot, as a server does that stands by or takes over
    etcd_compaction.py  a child process that folds the log into a snapshot

Rejected: to trust the lease of the leader for reads. It holds only if two clocks run equally fast.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from typing import Any

from rallypoint.deadline import Deadline
from rallypoint.errors import DiskFull, NoQuorum
from rallypoint.etcd import answers, messages
from rallypoint.etcd.address import Address
from rallypoint.etcd.client import Client, LeaseGone, Refusal
from rallypoint.etcd.messages import Method, Txn
from rallypoint.storage import Done
from rallypoint.storage.errors import Deposed, StorageFailed, StoreGone
from rallypoint.storage.etcd_batch import pack
from rallypoint.storage.etcd_compaction import EtcdCompactor
from rallypoint.storage.etcd_layout import Layout

__all__ = ["EtcdStorage"]

_log = logging.getLogger("rallypoint.storage")

SETTLE_S = 5.0
"""How long to try before it is noted that etcd does not answer; the trying goes on."""

ENTRY_BYTES = 512
"""What a place of the log costs etcd beside its value; near enough to decide when to compact."""


class EtcdStorage:
    """The log of one leader in its epoch. See `rallypoint.storage.Storage`; what to recover was read before."""

    confirms = True

    def __init__(self, client: Client, address: Address, epoch: int, lease: int, index: int, log_bytes: int) -> None:
        self.epoch = epoch
        self.index = index
        """The last place of the log that is taken."""

        self.trouble = ""
        """Why etcd has not answered for a while, if so."""

        self.commits = self.confirmations = self.bytes = 0
        self._client, self._layout, self._lease = client, Layout(address.space), lease
        self._epoch = b"%d" % epoch
        self._tasks: set[asyncio.Task[None]] = set()
        self._settled = index  # up to where all batches are whole
        self._compactor = EtcdCompactor(address, epoch, lease, log_bytes)

    def recover(self) -> tuple[Iterator[bytes] | None, Iterator[bytes]]:
        """Return nothing: whoever takes the lead has followed the log to its end."""
        return None, iter(())

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Commit on this event loop, on which the client is."""

    def commit(self, records: Sequence[bytes], done: Done, urgent: bool = False) -> None:
        """Append a batch, then call `done`: with None, Deposed, StoreGone, or DiskFull where etcd has no room."""
        self._start(self._append_all(pack(records)), done)

    def confirm(self, done: Done) -> None:
        """Make sure that no other server has led since this call, then call `done`; with Deposed where one has."""
        self._start(self._confirm(), done)

    def compact_if_due(self) -> bool:
        """Start replacing the log by a snapshot if it has grown enough; return whether it did."""
        return self._compactor.start_if_due(self._settled)

    def save(self, chunks: Iterable[bytes]) -> None:
        """Do nothing: the log is read by whoever leads next."""

    def close(self) -> None:
        """Give up what is under way."""
        self._compactor.close()
        for task in self._tasks:
            task.cancel()

    def statistics(self) -> dict[str, int | float]:
        """Return counts and sizes."""
        return {
            "epoch": self.epoch,
            "index": self.index,
            "commits": self.commits,
            "confirmations": self.confirmations,
            "committed_bytes": self.bytes,
            **self._compactor.statistics(),
        }

    # Inside

    def _start(self, work: Awaitable[None], done: Done) -> None:
        task = asyncio.ensure_future(self._tell(work, done))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell(self, work: Awaitable[None], done: Done) -> None:
        try:
            await work
        except Exception as error:
            done(error)
        else:
            done(None)

    async def _append_all(self, values: list[bytes]) -> None:
        for value in values:
            await self._append(value)
            self._compactor.grown(len(value) + ENTRY_BYTES)
            self.bytes += len(value)
        self._settled = self.index
        self.commits += 1

    async def _append(self, value: bytes) -> None:
        """Write to the next place of the log; return once it is known to be there."""
        key = self._layout.entry(self.index + 1)
        put = messages.put(key, value, self._lease)
        txn = Txn([messages.value_is(self._layout.epoch, self._epoch)], [put]).encode()
        try:
            data = await self._settle(Method.TXN, txn)
        except Refusal as refusal:
            if "space exceeded" not in refusal.why:
                raise StorageFailed(path=self._client.name, why=refusal.why) from None
            if not refusal.repeated or not await self._holds(key):
                raise DiskFull(path=self._client.name, why=refusal.why, number=errno.ENOSPC) from None
        else:
            if not answers.read_txn(data).succeeded:
                raise Deposed(store=self._client.name, epoch=self.epoch)
        self.index += 1

    async def _holds(self, key: bytes) -> bool:
        return bool(answers.read_range(await self._settle(Method.RANGE, messages.get(key).body)).kvs)

    async def _confirm(self) -> None:
        found = answers.read_range(await self._settle(Method.RANGE, messages.get(self._layout.epoch).body)).kvs
        if not found or found[0].value != self._epoch:
            raise Deposed(store=self._client.name, epoch=self.epoch)
        self.confirmations += 1

    async def _settle(self, method: str, request: bytes) -> bytes:
        """Make a call until it is answered, however long that takes: what it comes to must be known."""
        while True:
            try:
                answer: Any = await self._client.call(method, request, Deadline(SETTLE_S))
            except NoQuorum as error:
                if not self.trouble:
                    _log.warning("nothing can be committed at the moment: %s", error)
                self.trouble = str(error)
            except LeaseGone:
                raise StoreGone(store=self._client.name) from None
            else:
                self.trouble = ""
                data: bytes = answer.data
                return data
