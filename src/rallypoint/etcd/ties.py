"""What a process has with one cluster of etcd, and all its stores there share."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rallypoint.deadline import Deadline
from rallypoint.etcd.batch import Reads, Writes
from rallypoint.etcd.client import Client
from rallypoint.etcd.keeper import Keeper
from rallypoint.etcd.run import RunLease
from rallypoint.etcd.watcher import Watcher

__all__ = ["Ties", "one_of"]

LONGEST_S = 1e6
"""How long one timer runs."""


class Ties:
    """What a process has with one cluster, and all its stores there share."""

    def __init__(self, client: Client, cluster: int, by: str, ttl_s: float, patience_s: float) -> None:
        self.client = client
        self.cluster = cluster
        self.ttl_s, self.patience_s = ttl_s, patience_s
        self.reads = Reads(client)
        self.writes = Writes(client)
        self.watcher = Watcher(client)
        self.keeper = Keeper(client, by, ttl_s, patience_s)
        self.run: RunLease | None = None

    async def close(self) -> None:
        """Let go of everything; sessions are not ended by this."""
        self.watcher.close()
        self.keeper.close()
        await self.client.close()


async def one_of(futures: Sequence[asyncio.Future[Any]], deadline: Deadline) -> bool:
    """Wait for one of these; say whether it came in time. Timers of event loops may go off a little early."""
    while True:
        left_s = min(deadline.remaining(), LONGEST_S)
        done, _ = await asyncio.wait(futures, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if done or deadline.expired():
            return bool(done)
