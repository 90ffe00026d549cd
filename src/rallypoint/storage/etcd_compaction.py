"""Compaction of a log in etcd: a child process folds snapshot and log into a new snapshot, then deletes what it covers.

The child reads all that from etcd itself, and is told what to do on its standard input, for the address may have a
password in it. Every write of its own compares the epoch of the leader that started it, so one that outlives its leader
does no harm. The head of a snapshot is written only in place of the one before: a write that comes late, from a member
that hung, must not bring back a snapshot whose parts are deleted. A follower that still reads what is deleted begins
again with the new snapshot.

It is due when the log has grown by as much as the last snapshot holds, and by `LEAST_BYTES`. If the child fails, the
log grows, the reason is logged, and it is tried again after a while.

Rejected: a snapshot made by the leader itself. To write down a large state takes seconds, in which nobody is answered.
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
from rallypoint.etcd import answers, messages
from rallypoint.etcd.address import Address
from rallypoint.etcd.client import Client
from rallypoint.etcd.messages import Compare, Method, Op, Txn
from rallypoint.storage.errors import Deposed
from rallypoint.storage.etcd_batch import Assembler, pack
from rallypoint.storage.etcd_layout import Layout, SnapshotHead, encode
from rallypoint.storage.etcd_reader import Reader

__all__ = ["EtcdCompactor", "Job", "SnapshotWriter", "main"]

LEAST_BYTES = 32 * 1024 * 1024
"""How much the log must have grown at least."""

RETRY_S = 30.0
CALL_S = 60.0
"""How long one call of the child may take."""

DELETED = 1024
"""How many places of the log are deleted at a time."""

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from rallypoint.storage.etcd_compaction import main; main()"
)
_log = logging.getLogger("rallypoint.storage")


class Job(msgspec.Struct, frozen=True):
    """What to fold: the log up to an index, in the epoch and on the lease of the leader."""

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
        """Start a child that folds the log up to an index, if it is due; return whether it was started."""
        due = self._log_bytes > max(LEAST_BYTES, self._snapshot_bytes)
        if not due or (self._task is not None and not self._task.done()) or time.monotonic() < self._retry_at:
            return False
        job = Job(self._address, self._epoch, self._lease, index, os.getpid())
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

    async def _run(self, job: Job, covered: int) -> None:
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
            _log.warning("the log in %s could not be compacted, and grows: %s", self._address.name, why)


async def _run_child(job: bytes) -> tuple[bytes, str]:
    """Return what the child wrote, or nothing and the reason why it failed."""
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
    """Fold a log, as standard input says; write the size of the snapshot to standard output."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    os.nice(10)
    try:
        print(asyncio.run(_fold(job)))
    except RallypointError as error:
        sys.exit(str(error))


async def _fold(job: Job) -> int:
    layout = Layout(job.address.space)
    client = Client(job.address.endpoints, job.address.access, job.address.name)
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
    await client.close()
    return size


class SnapshotWriter:
    """Writes a snapshot in the name of the leader, while it leads."""

    def __init__(self, client: Client, layout: Layout, job: Job) -> None:
        self._client, self._layout, self._job = client, layout, job

    async def put(self, key: bytes, value: bytes) -> None:
        await self._do(messages.put(key, value, self._job.lease))

    async def replace_head(self, old: SnapshotHead | None, new: SnapshotHead) -> None:
        """Have readers begin with the new snapshot."""
        key, value = self._layout.snapshot, encode(new)
        before = messages.version_is(key, 0) if old is None else messages.value_is(key, encode(old))
        found = await self._do(messages.put(key, value, self._job.lease), [before], [messages.get(key)])
        if found is not None and [one.value for one in found[0].kvs] != [value]:
            raise self._deposed()

    async def delete_before(self, index: int, after: int) -> None:
        """Delete what a snapshot covers: the log up to its index, and earlier snapshots.

        What is before `after` was deleted by earlier ones, but for appends that were made again and came late.
        """
        layout = self._layout
        await self._do(messages.delete(layout.snapshots, layout.parts(index)))
        for first in range(after + 1, index + 1, DELETED):
            end = layout.entry(min(first + DELETED, index + 1))
            await self._do(messages.delete(layout.entries, end))

    async def _do(self, op: Op, compares: Sequence[Compare] = (), seen: Sequence[Op] = ()) -> list[Any] | None:
        """Do something while the leader leads; where more is compared and does not hold, return what is seen then."""
        job = self._job
        if os.getppid() != job.parent_pid:
            sys.exit("its server is gone")
        fence = self._layout.fence(job.epoch, job.lease)
        txn = Txn([*fence, *compares], [op], seen)
        result = answers.read_txn((await self._client.call(Method.TXN, txn.encode(), Deadline(CALL_S))).data)
        if result.succeeded:
            return None
        if not seen:
            raise self._deposed()
        return result.answers

    def _deposed(self) -> RallypointError:
        return Deposed(store=self._job.address.name, epoch=self._job.epoch)
