"""`EtcdStorage`: the log of the server that leads, in etcd, where any machine may die.

Every append is a transaction that compares the epoch: once another server leads, nothing more can be appended here,
and `Deposed` says so, whatever the clocks of the two show. One commit is under way at a time. Where its fate is not
known (no answer, another member), the same transaction is made again: it writes to a place that must be free, so twice
is once, and nothing is appended behind it before it is settled. An attempt that nobody waits for any more may still be
carried out, by a member that hung: so the place must never be used for anything else, not even when etcd is full.

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
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

from rallypoint.deadline import Deadline
from rallypoint.errors import DiskFull, NoQuorum
from rallypoint.etcd import answers, messages
from rallypoint.etcd.address import Address
from rallypoint.etcd.answers import KV, Result
from rallypoint.etcd.client import Answer, Client, LeaseGone, Refusal
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

LATE_S = 1.5
"""How long a call may take before clients are told: a member that hangs costs a second, and the next one answers."""

FULL_S = 0.5
"""How long to wait before a full etcd is asked again about an append whose earlier attempts have no answer."""

ENTRY_BYTES = 512
"""What a place of the log costs etcd beside its value; near enough to decide when to compact."""


class EtcdStorage:
    """The log of one leader in its epoch. See `rallypoint.storage.Storage`; what to recover was read before."""

    confirms = True

    def __init__(
        self,
        client: Client,
        address: Address,
        epoch: int,
        lease: int,
        index: int,
        log_bytes: int = 0,
        snapshot_bytes: int = 0,
    ) -> None:
        self.epoch = epoch
        self.index = index
        """The last place of the log that is taken."""

        self.trouble = ""
        """Why etcd has not answered for a while, if so."""

        self.on_trouble: Callable[[str], None] = lambda trouble: None
        """Called with that when it changes."""

        self.commits = self.confirmations = self.bytes = 0
        self._client, self._layout, self._lease = client, Layout(address.space), lease
        self._fence = self._layout.fence(epoch, lease)
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._settled = index  # up to where all batches are whole
        self._compactor = EtcdCompactor(address, epoch, lease, log_bytes, snapshot_bytes)

    def recover(self) -> tuple[Iterator[bytes] | None, Iterator[bytes]]:
        """Return nothing: whoever takes the lead has followed the log to its end."""
        return None, iter(())

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Commit on this event loop, on which the client is."""

    def commit(self, records: Sequence[bytes], done: Done, urgent: bool = False) -> None:
        """Append a batch, then call `done`: with None, Deposed, StoreGone, or DiskFull where etcd has no room."""
        values = pack(records)
        self._start(lambda: self._append_all(values), done)

    def confirm(self, done: Done) -> None:
        """Make sure that no other server has led since this call, then call `done`; with Deposed where one has."""
        self._start(self._confirm, done)

    def compact_if_due(self) -> bool:
        """Start replacing the log by a snapshot if it has grown enough; return whether it did."""
        return self._compactor.start_if_due(self._settled)

    def save(self, chunks: Iterable[bytes]) -> None:
        """Do nothing: the log is read by whoever leads next."""

    def close(self) -> None:
        """Give up what is under way, and begin nothing more: the place of a commit of unknown fate may be taken."""
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

    # Inside

    def _start(self, work: Callable[[], Awaitable[None]], done: Done) -> None:
        if not self._closed:
            task = asyncio.ensure_future(self._tell(work, done))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _tell(self, work: Callable[[], Awaitable[None]], done: Done) -> None:
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
        self._settled = self.index
        self.commits += 1

    async def _append(self, value: bytes) -> None:
        """Write to the next place of the log; return once it is known to be there."""
        key = self._layout.entry(self.index + 1)
        free, put = messages.version_is(key, 0), messages.put(key, value, self._lease)
        seen = [messages.get(self._layout.epoch), messages.get(key)]
        result = await self._write(Txn([*self._fence, free], [put], seen))
        if not result.succeeded:
            self._check_epoch(result.answers[0].kvs)
            if [one.value for one in result.answers[1].kvs] != [value]:
                raise StorageFailed(path=self._client.name, why=f"{key.decode()} is taken")
        self.index += 1

    async def _write(self, txn: Txn) -> Result:
        """Make the transaction of an append; DiskFull where it is certain that it was not made and will not be."""
        request, look, repeated = txn.encode(), Txn([], txn.failure).encode(), False
        while True:
            try:
                return answers.read_txn((await self._settle(Method.TXN, request)).data)
            except Refusal as refusal:
                repeated = repeated or refusal.repeated
                if not repeated:
                    raise DiskFull(path=self._client.name, why=refusal.why, number=errno.ENOSPC) from None
            seen = answers.read_txn((await self._settle(Method.TXN, look)).data)
            self._check_epoch(seen.answers[0].kvs)
            if seen.answers[1].kvs:
                return seen._replace(succeeded=False)
            await asyncio.sleep(FULL_S)

    async def _confirm(self) -> None:
        answer = await self._settle(Method.RANGE, messages.get(self._layout.epoch).body)
        self._check_epoch(answers.read_range(answer.data).kvs)
        self.confirmations += 1

    def _check_epoch(self, found: list[KV]) -> None:
        if not found or found[0].value != b"%d" % self.epoch or found[0].lease != self._lease:
            raise Deposed(store=self._client.name, epoch=self.epoch)

    async def _settle(self, method: str, request: bytes) -> Answer:
        """Make a call until it is answered, however long that takes: what it comes to must be known.

        Refusal: etcd has no room.
        """
        late = asyncio.get_running_loop().call_later(LATE_S, self._note, f"etcd does not answer for {LATE_S:g} s")
        try:
            return await self._settle_late(method, request)
        finally:
            late.cancel()

    def _note(self, trouble: str) -> None:
        """Note why etcd does not answer, or ("") that it does."""
        if trouble and not self.trouble:
            _log.warning("nothing can be committed at the moment: %s", trouble)
        changed, self.trouble = trouble != self.trouble, trouble
        if changed:
            self.on_trouble(trouble)

    async def _settle_late(self, method: str, request: bytes) -> Answer:
        repeated = False
        while True:
            try:
                answer = await self._client.call(method, request, Deadline(SETTLE_S))
            except NoQuorum as error:
                repeated = True
                self._note(str(error))
            except LeaseGone:
                raise StoreGone(store=self._client.name) from None
            except Refusal as refusal:
                if "space exceeded" not in refusal.why:
                    raise StorageFailed(path=self._client.name, why=refusal.why) from None
                refusal.repeated = refusal.repeated or repeated
                raise
            else:
                self._note("")
                return answer
