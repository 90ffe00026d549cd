"""A standby: follow the leader's log with a state of its own, and detect the loss of the leader.

A standby reads the snapshot and the log, then watches for more. It knows its index in the log, so it may read any part
twice: it skips what it has applied.

The leader writes its key to etcd twice a second as a heartbeat, and `LeaderSilence` checks that it does. A check that
fails or is slow does not count: while etcd is unhealthy, no leader can write. Most often only the leader's process
dies, and then its address refuses or resets connections at once: so the standby keeps one idle connection to the leader
(`leader_gone`). A leader that replies as a standby has just won the election and is about to serve; if it were deposed
for that, no server would ever lead. Taking over too early is harmless, because a deposed leader commits nothing
(`storage/etcd/storage.py`); but a broken network between leader and standby is no reason to take over.

Rejected: waiting for the leader's lease to expire. If etcd's own leader vanishes along with it, as when both are on one
host, the next leader of etcd renews every lease for its full time to live.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

from rallypoint import net
from rallypoint.client.side_connection import side_connection
from rallypoint.deadline import Deadline
from rallypoint.errors import NoQuorum
from rallypoint.etcd.client import Refusal
from rallypoint.protocol import BadMessage, channels
from rallypoint.protocol.challenge import Denied
from rallypoint.security.client_security import ClientSecurity
from rallypoint.server.server import StoreServer
from rallypoint.storage.errors import StoreGone
from rallypoint.storage.etcd.batch import Assembler
from rallypoint.storage.etcd.reader import Head, Overtaken, Reader
from rallypoint.within import within

__all__ = ["BEAT_S", "LogFollower", "LeaderSilence", "leader_gone"]

log = logging.getLogger("rallypoint.server")

LOOK_S = 0.5
"""Timeout of a connection to the leader, and pause before the next attempt."""

PAUSE_S = 0.01
"""Pause after the leader closed the connection or replied as a standby: it may be about to exit, or to lead."""

BEAT_S = 0.5
"""Interval of the leader's heartbeats in etcd, and of the standbys' checks."""

SILENT_S = 1.9
"""How long all checks must find no new heartbeat before the leader counts as lost."""

SLICE_ENTRIES = 16
"""Log indexes applied in one turn of the event loop."""


class LogFollower:
    """Applies the log to the state of one server."""

    def __init__(self, reader: Reader, server: StoreServer) -> None:
        self.index = 0
        """The last log index that was applied."""

        self.log_bytes = 0
        """Approximate size of the log behind the snapshot."""

        self.snapshot_bytes = 0
        """Size of the newest snapshot."""

        self._reader, self._server = reader, server
        self._assembler = Assembler()
        self._lease = self._folded = 0

    async def catch_up(self, deadline: Deadline) -> Head:
        """Apply at least everything that was in the log when this was called; return the head of the store.

        Raises NoQuorum if one of its calls to etcd got no answer within the deadline's timeout.
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
        """Apply the value at a log index, unless that was done before; raise Overtaken if an earlier one is missing."""
        if index <= self.index:
            return
        if index != self.index + 1:
            raise Overtaken(f"log index {self.index + 1} was missed")
        for record in self._assembler.take(value):
            self._server.apply_record(record)
        self.index = index
        self.log_bytes += len(value)


class LeaderSilence:
    """Watches the heartbeats of the leader of one epoch; keeps its observations from one `wait` to the next."""

    def __init__(self, epoch: int, reader: Reader, write: Callable[[Deadline], Awaitable[object]]) -> None:
        self.epoch = epoch
        self._reader, self._write = reader, write
        self._written = 0
        self._since = self._looked_at = float("-inf")  # start of the silence, with etcd healthy; the last check

    async def wait(self) -> None:
        """Return when the leader has been silent for `SILENT_S` while etcd was healthy and lets this server write."""
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
        """Note the revision of the last heartbeat; return whether it is older than `SILENT_S`."""
        if written != self._written or now - self._looked_at > 3 * BEAT_S:
            self._since = now
        self._written, self._looked_at = written, now
        return now - self._since >= SILENT_S


async def leader_gone(endpoint: net.Endpoint, security: ClientSecurity) -> None:
    """Return when an address refuses connections or is another program; wait while it is silent or a standby.

    If this server and the one there do not accept each other's credentials, only the heartbeat tells: wait for ever.
    """
    while True:
        try:
            await _until_cut(endpoint, security)
            await asyncio.sleep(PAUSE_S)
        except (ConnectionRefusedError, BadMessage):
            return
        except (OSError, Denied, asyncio.TimeoutError) as error:  # the fault may be in the network between us
            if failed := security.failure(error, str(endpoint)):
                log.warning("the leader is lost only when its heartbeat in etcd stops: %s", failed)
                await asyncio.Event().wait()
            await asyncio.sleep(PAUSE_S if isinstance(error, ConnectionError) else LOOK_S)


async def _until_cut(endpoint: net.Endpoint, security: ClientSecurity) -> None:
    """Return when a connection to a server has ended; raise BadMessage if it is none, and what fails before."""
    async with contextlib.AsyncExitStack() as stack:
        connecting = stack.enter_async_context(side_connection(endpoint, security, channels.PREFACE))
        reader, writer, greeting = await within(LOOK_S, connecting)
        net.set_options(writer.get_extra_info("socket"))
        if greeting.standby is None:
            greeting.require(channels.ACCEPTED)
        await reader.read()
