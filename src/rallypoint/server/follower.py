"""Following the log of the server that leads, with a state of one's own; and noticing that it is gone.

A server that stands by reads the snapshot and the log, and then watches for more. It knows its place in the log, so it
may read any stretch twice: what it has applied before, it skips.

Whether the leader is there is known from etcd: it writes its key there twice a second, and `Silence` looks whether it
does. A look that fails, or is slow, counts for nothing: while etcd is not well, no leader can write. Most of the time
only its process dies, and then its address refuses or resets connections at once: so there is one connection to the
leader, which carries nothing (`leader_gone`). A leader that answers that it stands by has claimed the lead a
moment ago, and is about to serve; were it deposed for that, nobody would ever lead. To take over too early does no
harm, for a leader that was deposed commits nothing (`storage/etcd.py`); but nobody is to take over because of a network
between the two.

Rejected: to wait for the leader's lease to end. When etcd's leader vanishes along with it, as where both are on one
host, the next leader of etcd gives every lease its whole time again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

from rallypoint import net
from rallypoint.deadline import Deadline
from rallypoint.errors import NoQuorum
from rallypoint.etcd.client import Refusal
from rallypoint.protocol import channels
from rallypoint.protocol.native import STANDBY
from rallypoint.server.server import StoreServer
from rallypoint.storage.errors import StoreGone
from rallypoint.storage.etcd_batch import Assembler
from rallypoint.storage.etcd_reader import Head, Overtaken, Reader
from rallypoint.within import within

__all__ = ["BEAT_S", "Follower", "Silence", "leader_gone"]

LOOK_S = 0.5
"""How long to wait before the leader's address is tried again, and how long it may take to answer."""

PAUSE_S = 0.01
"""How long to wait after the leader hung up, or said that it stands by: its process may be about to end, or to lead."""

BEAT_S = 0.5
"""How often a leader writes its key, and others look whether it did."""

SILENT_S = 1.9
"""How long all looks must find nothing new before the leader is taken to be gone."""

SLICE_ENTRIES = 16
"""How many places of the log are applied before others have a turn."""


class Follower:
    """A server's place in the log."""

    def __init__(self, reader: Reader, server: StoreServer) -> None:
        self.index = 0
        """The last place of the log that was taken in."""

        self.log_bytes = 0
        """How much of the log came behind the snapshot, nearly."""

        self.snapshot_bytes = 0
        """How large the newest snapshot is."""

        self._reader, self._server = reader, server
        self._assembler = Assembler()
        self._lease = self._folded = 0

    async def catch_up(self, deadline: Deadline) -> Head:
        """Take in all that was in the log when this was called, at least; return the head of the store.

        NoQuorum: one of the calls that it takes had no answer within the time of the deadline.
        """
        while True:
            with contextlib.suppress(Overtaken):
                return await self._catch_up(deadline)

    async def _catch_up(self, deadline: Deadline) -> Head:
        head = await self._reader.head(deadline)
        if self._lease and head.lease != self._lease:
            raise StoreGone(store=self._reader.name)
        self._lease = head.lease
        if head.snapshot is not None and head.snapshot.index > self._folded:
            if head.snapshot.index > self.index:
                self._server.restore(await self._reader.snapshot(head.snapshot, deadline.timeout_s))
                self.index, self._assembler = head.snapshot.index, Assembler()
            self._folded, self.log_bytes, self.snapshot_bytes = head.snapshot.index, 0, head.snapshot.bytes
        async for index, value in self._reader.entries(self.index, deadline.timeout_s):
            self.take(index, value)
            if not index % SLICE_ENTRIES:
                await asyncio.sleep(0)
        return head

    def take(self, index: int, value: bytes) -> None:
        """Take in a place of the log, unless that was done before; raise Overtaken where one is missing before it."""
        if index <= self.index:
            return
        if index != self.index + 1:
            raise Overtaken(f"place {self.index + 1} of the log was missed")
        for record in self._assembler.take(value):
            self._server.apply_record(record)
        self.index = index
        self.log_bytes += len(value)


class Silence:
    """Whether the leader of an epoch writes its key; what was seen is kept from one `wait` to the next."""

    def __init__(self, epoch: int, reader: Reader, write: Callable[[Deadline], Awaitable[object]]) -> None:
        self.epoch = epoch
        self._reader, self._write = reader, write
        self._written = 0
        self._since = self._looked_at = float("-inf")  # since when etcd is well and nothing was written; the last look

    async def wait(self) -> None:
        """Return when the leader has written nothing for a while, though etcd was well, and let this server write."""
        while True:
            began_at = time.monotonic()
            try:
                written = await self._reader.leader_written(Deadline(BEAT_S))
                if self._lasts(written, time.monotonic()):
                    await self._write(Deadline(BEAT_S))
                    return
            except (NoQuorum, Refusal):
                self._looked_at = float("-inf")
            await asyncio.sleep(max(0.0, began_at + BEAT_S - time.monotonic()))

    def _lasts(self, written: int, now: float) -> bool:
        """Take in at which revision the leader wrote last; return whether that has been so for long."""
        if written != self._written or now - self._looked_at > 3 * BEAT_S:
            self._since = now
        self._written, self._looked_at = written, now
        return now - self._since >= SILENT_S


async def leader_gone(endpoint: net.Endpoint) -> None:
    """Return when an address refuses connections, or is another program's; while it is silent or stands by, wait."""
    while True:
        try:
            reader, writer = await within(LOOK_S, asyncio.open_connection(*endpoint))
        except ConnectionRefusedError:
            return
        except (OSError, asyncio.TimeoutError):  # it may be the network between us
            await asyncio.sleep(LOOK_S)
            continue
        try:
            net.set_options(writer.get_extra_info("socket"))
            writer.write(channels.PREFACE)
            answer = await within(LOOK_S, reader.readexactly(len(channels.ACCEPTED)))
            if answer not in (channels.ACCEPTED, STANDBY):
                return
            await reader.read()
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
        await asyncio.sleep(PAUSE_S)
