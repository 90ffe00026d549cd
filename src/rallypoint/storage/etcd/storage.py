"""`EtcdStorage`: the log of the leader, in etcd, which survives the loss of any machine.

Every append is a transaction that compares the epoch: once another server leads, an append fails with `Deposed`,
whatever the clocks of the two servers show. One commit is in flight at a time. If its outcome is unknown (no answer,
another etcd member), the same transaction is retried: it writes to a log index that must be free, so it takes effect
only once, and nothing is appended after it until its outcome is known. An abandoned attempt may still be executed
later, by a member that hung: so the index must never be used for another value, not even when etcd is full.

A read must see everything committed, and a deposed leader does not know what others commit. So reads wait for
`confirm`, which reads the epoch by quorum after the read was requested; while it is ours, no other server has
committed.

    layout.py      the keys in etcd
    batch.py       a batch of records in values of at most 1 MiB
    reader.py      reading the log and the snapshot, for standbys and compactions
    compaction.py  a child process that folds the log into a snapshot
    lookup.py      finding the servers of a store, for clients and relays

Rejected: trusting the leader's lease for reads. That is correct only if two clocks run equally fast.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

from rallypoint.deadline import Deadline
from rallypoint.errors import DiskFull, NoQuorum
from rallypoint.etcd import requests, responses
from rallypoint.etcd.address import Address
from rallypoint.etcd.client import EtcdClient, EtcdReply, LeaseGone, Refusal
from rallypoint.etcd.requests import Method, Txn
from rallypoint.etcd.responses import KV
from rallypoint.storage import CommitCallback
from rallypoint.storage.errors import Deposed, StorageFailed, StoreGone
from rallypoint.storage.etcd.batch import pack
from rallypoint.storage.etcd.compaction import EtcdCompactor
from rallypoint.storage.etcd.layout import Layout

__all__ = ["EtcdStorage"]

_log = logging.getLogger("rallypoint.storage")

CALL_S = 5.0
"""Timeout of one attempt of a call; then the silence of etcd is logged, and the call retried."""

LATE_S = 1.5
"""How long a call may take before clients are notified: a member that hangs costs 1 s, then the next one answers."""

FULL_S = 0.5
"""Pause before an append is retried that a full etcd refused, and whose earlier attempts got no answer."""

ENTRY_BYTES = 512
"""Approximate overhead of a log index in etcd in addition to its value."""


class EtcdStorage:
    """The log of one leader in its epoch; see `rallypoint.storage.Storage`. The leader has already read the log."""

    confirms = True

    def __init__(
        self,
        client: EtcdClient,
        address: Address,
        epoch: int,
        lease: int,
        index: int,
        log_bytes: int = 0,
        snapshot_bytes: int = 0,
    ) -> None:
        self.epoch = epoch
        self.index = index
        """The last log index in use."""

        self.trouble = ""
        """Why etcd does not answer; empty while it does."""

        self.on_trouble: Callable[[str], None] = lambda trouble: None
        """Called with `trouble` when it changes."""

        self.commits = self.confirmations = self.bytes = 0
        self._client, self._layout, self._lease = client, Layout(address.space), lease
        self._fence = self._layout.fence(epoch, lease)
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._complete_index = index  # the last index of a complete batch
        self._compactor = EtcdCompactor(address, epoch, lease, log_bytes, snapshot_bytes)

    def recover(self) -> tuple[Iterator[bytes] | None, Iterator[bytes]]:
        """Return nothing: a new leader has followed the log to its end."""
        return None, iter(())

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Do nothing: the etcd client already runs on this event loop."""

    def commit(self, records: Sequence[bytes], done: CommitCallback, urgent: bool = False) -> None:
        """Append a batch, then call `done` with None, Deposed, StoreGone, StorageFailed, or DiskFull (etcd is full)."""
        values = pack(records)
        self._start(lambda: self._append_all(values), done)

    def confirm(self, done: CommitCallback) -> None:
        """Check that no other server leads, by a read that starts after this call; then call `done`, as `commit`."""
        self._start(self._confirm, done)

    def compact_if_due(self) -> bool:
        """Start a compaction if the log has grown enough; return whether it was started."""
        return self._compactor.start_if_due(self._complete_index)

    def save(self, chunks: Iterable[bytes]) -> None:
        """Do nothing: the next leader reads the log."""

    def close(self) -> None:
        """Cancel commits in flight, and start no others: the index of a commit with unknown outcome may be in use."""
        self._closed = True
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

    # Internal

    def _start(self, work: Callable[[], Awaitable[None]], done: CommitCallback) -> None:
        if not self._closed:
            task = asyncio.ensure_future(self._report_outcome(work, done))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _report_outcome(self, work: Callable[[], Awaitable[None]], done: CommitCallback) -> None:
        try:
            await work()
        except Exception as error:
            done(error)
        else:
            done(None)

    async def _append_all(self, values: list[bytes]) -> None:
        for value in values:
            await self._append(value)
            self._compactor.grown(len(value) + ENTRY_BYTES)
            self.bytes += len(value)
        self._complete_index = self.index
        self.commits += 1

    async def _append(self, value: bytes) -> None:
        """Write to the next log index; return once it is known to be written.

        DiskFull: it was not written, and will not be.
        """
        key = self._layout.entry(self.index + 1)
        free, put = requests.version_is(key, 0), requests.put(key, value, self._lease)
        request, repeated = Txn([*self._fence, free], [put]).encode(), False
        while True:
            try:
                answer = await self._call(Method.TXN, request)
            except Refusal as refusal:
                repeated = repeated or refusal.repeated
                if not repeated:
                    raise DiskFull(path=self._client.name, why=refusal.why, number=errno.ENOSPC) from None
                if await self._wrote(key, value):
                    break
                await asyncio.sleep(FULL_S)
            else:
                if responses.read_txn(answer.data).succeeded or await self._wrote(key, value):
                    break
                raise StorageFailed(path=self._client.name, why=f"{key.decode()} could not be written, yet is free")
        self.index += 1

    async def _wrote(self, key: bytes, value: bytes) -> bool:
        """Return whether an earlier attempt has written this value to a log index."""
        query = Txn([], [requests.get(self._layout.epoch), requests.get(key)]).encode()
        epoch, found = responses.read_txn((await self._call(Method.TXN, query)).data).answers
        self._check_epoch(epoch.kvs)
        if found.kvs and found.kvs[0].value != value:
            raise StorageFailed(path=self._client.name, why=f"{key.decode()} already has another value")
        return bool(found.kvs)

    async def _confirm(self) -> None:
        answer = await self._call(Method.RANGE, requests.get(self._layout.epoch).body)
        self._check_epoch(responses.read_range(answer.data).kvs)
        self.confirmations += 1

    def _check_epoch(self, found: list[KV]) -> None:
        if not found or found[0].value != b"%d" % self.epoch or found[0].lease != self._lease:
            raise Deposed(store=self._client.name, epoch=self.epoch)

    async def _call(self, method: str, request: bytes) -> EtcdReply:
        """Retry a call until it is answered, however long that takes: its outcome must be known.

        Raises Refusal if etcd is full.
        """
        late = asyncio.get_running_loop().call_later(LATE_S, self._set_trouble, f"no answer from etcd for {LATE_S:g} s")
        try:
            return await self._retry_until_answered(method, request)
        finally:
            late.cancel()

    def _set_trouble(self, trouble: str) -> None:
        """Record why etcd does not answer, empty if it does; log and report a change."""
        if trouble and not self.trouble:
            _log.warning("commits are stalled: %s", trouble)
        changed, self.trouble = trouble != self.trouble, trouble
        if changed:
            self.on_trouble(trouble)

    async def _retry_until_answered(self, method: str, request: bytes) -> EtcdReply:
        repeated = False
        while True:
            try:
                answer = await self._client.call(method, request, Deadline(CALL_S))
            except NoQuorum as error:
                repeated = True
                self._set_trouble(str(error))
            except LeaseGone:
                raise StoreGone(store=self._client.name) from None
            except Refusal as refusal:
                if "space exceeded" not in refusal.why:
                    raise StorageFailed(path=self._client.name, why=refusal.why) from None
                refusal.repeated = refusal.repeated or repeated
                raise
            else:
                self._set_trouble("")
                return answer
