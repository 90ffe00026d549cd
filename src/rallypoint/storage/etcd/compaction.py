"""Compaction of a log in etcd: a child process folds snapshot and log into a new snapshot, then deletes the old ones.

The child reads snapshot and log from etcd. It gets its job on standard input, because the address may contain a
password. Each of its writes compares the epoch of the leader that started it, so a child that outlives its leader is
harmless. The head of a snapshot only replaces the previous head, by compare-and-set: a delayed write, from an etcd
member that hung, must not restore a snapshot whose parts are deleted. A follower that still reads deleted keys restarts
with the new snapshot.

A compaction is due when the log has grown by more than the size of the last snapshot and by more than `LEAST_BYTES`. If
the child fails, the log grows, the reason is logged, and the compaction is retried after `RETRY_S`.

Rejected: a snapshot written by the leader itself. Encoding a large state takes seconds, in which no client is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from rallypoint.core import entries
from rallypoint.core.snapshot import read, write
from rallypoint.core.state import State
from rallypoint.deadline import Deadline
from rallypoint.errors import RallypointError
from rallypoint.etcd import requests, responses
from rallypoint.etcd.address import Address
from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.requests import Compare, Method, Txn, TxnOp
from rallypoint.storage.errors import Deposed
from rallypoint.storage.etcd.batch import Assembler, pack
from rallypoint.storage.etcd.layout import Layout, SnapshotHead, encode
from rallypoint.storage.etcd.reader import Reader

__all__ = ["EtcdCompactor", "EtcdCompactionJob", "SnapshotWriter", "main"]

LEAST_BYTES = 32 * 1024 * 1024
"""Minimum growth of the log before a compaction."""

RETRY_S = 30.0
CALL_S = 60.0
"""Timeout of one call of the child to etcd."""

DELETE_BATCH = 1024
"""Number of log indexes deleted at a time."""

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from rallypoint.storage.etcd.compaction import main; main()"
)
_log = logging.getLogger("rallypoint.storage")


class EtcdCompactionJob(msgspec.Struct, frozen=True):
    """A job of the child: fold the log up to `index`, in the epoch and on the lease of the leader."""

    address: Address
    epoch: int
    lease: int
    index: int
    parent_pid: int


class EtcdCompactor:
    """Runs at most one child at a time."""

    def __init__(self, address: Address, epoch: int, lease: int, log_bytes: int, snapshot_bytes: int = 0) -> None:
        self._address, self._epoch, self._lease = address, epoch, lease
        self._log_bytes, self._snapshot_bytes = log_bytes, snapshot_bytes
        self._task: asyncio.Task[None] | None = None
        self._retry_at = float("-inf")
        self._runs = self._failures = 0

    def grown(self, size: int) -> None:
        """Note that the log has grown."""
        self._log_bytes += size

    def start_if_due(self, index: int) -> bool:
        """Start a child that folds the log up to an index, if that is due; return whether it was started."""
        due = self._log_bytes > max(LEAST_BYTES, self._snapshot_bytes)
        if not due or (self._task is not None and not self._task.done()) or time.monotonic() < self._retry_at:
            return False
        job = EtcdCompactionJob(self._address, self._epoch, self._lease, index, os.getpid())
        self._task = asyncio.ensure_future(self._run(job, self._log_bytes))
        return True

    def close(self) -> None:
        """Kill the child, if there is one."""
        if self._task is not None:
            self._task.cancel()

    def statistics(self) -> dict[str, int | float]:
        """Return counts and sizes."""
        return {
            "log_bytes": self._log_bytes,
            "snapshot_bytes": self._snapshot_bytes,
            "compactions": self._runs,
            "failed_compactions": self._failures,
        }

    async def _run(self, job: EtcdCompactionJob, covered: int) -> None:
        try:
            out, why = await _run_child(msgspec.json.encode(job))
        except OSError as error:
            out, why = b"", str(error)
        if out:
            self._runs += 1
            self._log_bytes -= covered
            self._snapshot_bytes = int(out)
        else:
            self._failures += 1
            self._retry_at = time.monotonic() + RETRY_S
            _log.warning("compaction of %s failed, next attempt in %g s: %s", self._address.name, RETRY_S, why)


async def _run_child(job: bytes) -> tuple[bytes, str]:
    """Run the child; return its output and "", or nothing and the reason of its failure."""
    pipe = asyncio.subprocess.PIPE
    arguments = (sys.executable, "-c", _BOOT, json.dumps(sys.path))
    child = await asyncio.create_subprocess_exec(*arguments, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        out, errors = await child.communicate(job)
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        raise
    if child.returncode == 0:
        return out, ""
    return b"", errors.decode(errors="replace").strip().rpartition("\n")[2] or f"exit code {child.returncode}"


# The child


def main() -> None:
    """Fold a log as the job on standard input says; write the size of the snapshot to standard output."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=EtcdCompactionJob)
    os.nice(10)
    try:
        print(asyncio.run(_fold(job)))
    except RallypointError as error:
        sys.exit(str(error))


async def _fold(job: EtcdCompactionJob) -> int:
    layout = Layout(job.address.space)
    client = EtcdClient(job.address.endpoints, job.address.access, job.address.name)
    reader = Reader(client, layout)
    head = await reader.head(Deadline(CALL_S))
    state, after = State(), 0
    if head.snapshot is not None:
        state, after = read(await reader.snapshot(head.snapshot, CALL_S)), head.snapshot.index
    assembler = Assembler()
    async for index, value in reader.entries(after, CALL_S):
        if index > job.index:
            break
        for record in assembler.take(value):
            state.apply(entries.decode(record))
            state.outputs.clear()
    writer = SnapshotWriter(client, layout, job)
    parts = size = 0
    for chunk in write(state):
        for value in pack([chunk]):
            await writer.put(layout.part(job.index, parts), value)
            parts, size = parts + 1, size + len(value)
    await writer.replace_head(head.snapshot, SnapshotHead(job.index, parts, size))
    await writer.delete_before(job.index, after)
    client.close()
    return size


class SnapshotWriter:
    """Writes a snapshot on behalf of the leader, as long as it leads."""

    def __init__(self, client: EtcdClient, layout: Layout, job: EtcdCompactionJob) -> None:
        self._client, self._layout, self._job = client, layout, job

    async def put(self, key: bytes, value: bytes) -> None:
        """Write a part of the snapshot."""
        await self._do(requests.put(key, value, self._job.lease))

    async def replace_head(self, old: SnapshotHead | None, new: SnapshotHead) -> None:
        """Publish the new snapshot, if `old` is still the current one."""
        key, value = self._layout.snapshot, encode(new)
        before = requests.version_is(key, 0) if old is None else requests.value_is(key, encode(old))
        found = await self._do(requests.put(key, value, self._job.lease), [before], [requests.get(key)])
        if found is not None and [one.value for one in found[0].kvs] != [value]:
            raise self._deposed()

    async def delete_before(self, index: int, after: int) -> None:
        """Delete the log up to the index of a snapshot, and earlier snapshots.

        Earlier compactions deleted the log up to `after`, except for retried appends that were executed later.
        """
        layout = self._layout
        await self._do(requests.delete(layout.snapshots, layout.parts(index)))
        for first in range(after + 1, index + 1, DELETE_BATCH):
            end = layout.entry(min(first + DELETE_BATCH, index + 1))
            await self._do(requests.delete(layout.entries, end))

    async def _do(
        self, op: TxnOp, compares: Sequence[Compare] = (), on_failure: Sequence[TxnOp] = ()
    ) -> list[Any] | None:
        """Execute an operation while the leader leads; if a comparison fails, return the results of `on_failure`."""
        job = self._job
        if os.getppid() != job.parent_pid:
            sys.exit("the server that started the compaction has ended")
        fence = self._layout.fence(job.epoch, job.lease)
        txn = Txn([*fence, *compares], [op], on_failure)
        result = responses.read_txn((await self._client.call(Method.TXN, txn.encode(), Deadline(CALL_S))).data)
        if result.succeeded:
            return None
        if not on_failure:
            raise self._deposed()
        return result.answers

    def _deposed(self) -> RallypointError:
        return Deposed(store=self._job.address.name, epoch=self._job.epoch)
