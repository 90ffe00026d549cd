"""An etcd lease that is kept alive: its keys are deleted when it is not renewed within its time to live.

`reached_at` is the local time at which the last successful renewal was requested. A caller that must not act on an
expired lease compares it with the time to live, and needs no other clock.

A keep-alive is a stream with one message each way, so it is made as a unary call. Rejected: a stream that stays open. A
member that hangs would hold it, whereas each new call can use another member.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from rallypoint.deadline import Deadline
from rallypoint.errors import RallypointError
from rallypoint.etcd import requests, responses
from rallypoint.etcd.client import ATTEMPT_S, REQUIRE_LEADER, EtcdClient
from rallypoint.etcd.requests import Method
from rallypoint.etcd.rpc.status import RpcError

__all__ = ["EtcdLease"]

PAUSE_S = 0.1
LOG_IN_S = 1.0


class EtcdLease:
    """One lease, kept alive from `keep` to `close`."""

    def __init__(self, client: EtcdClient, identity: int, ttl_s: float) -> None:
        self.id = identity
        self.ttl_s = ttl_s
        self.reached_at = time.monotonic()
        self.ended = asyncio.Event()
        """Set when etcd reports that the lease does not exist."""

        self._client = client
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def grant(cls, client: EtcdClient, ttl_s: int, deadline: Deadline) -> EtcdLease:
        """Create a lease; it is not kept alive yet."""
        data = (await client.call(Method.LEASE_GRANT, requests.lease(0, ttl_s), deadline)).data
        identity, granted_s = responses.read_lease(data)
        return cls(client, identity, granted_s or ttl_s)

    def keep(self) -> None:
        """Start to keep it alive."""
        self._task = asyncio.ensure_future(self._keep())

    async def revoke(self, deadline: Deadline) -> None:
        """Revoke it, which deletes its keys."""
        self.close()
        await self._client.call(Method.LEASE_REVOKE, requests.lease(self.id), deadline)

    def close(self) -> None:
        """Stop keeping it alive."""
        if self._task is not None:
            self._task.cancel()

    async def _keep(self) -> None:
        while not self.ended.is_set():
            asked_at = time.monotonic()
            if await self._beat():
                self.reached_at = asked_at
                await asyncio.sleep(self.ttl_s / 4)
            else:
                await asyncio.sleep(PAUSE_S)

    async def _beat(self) -> bool:
        """Renew it once; return whether etcd answered."""
        endpoint, since = self._client.some_endpoint(), time.monotonic()
        within_s, metadata = min(ATTEMPT_S, self.ttl_s / 3), (*self._client.metadata, REQUIRE_LEADER)
        try:
            data = await endpoint.channel.unary(Method.KEEP_ALIVE, requests.lease(self.id), within_s, metadata)
        except RpcError as error:
            endpoint.failed(error.why, since)
            if "auth token" in error.why:
                with contextlib.suppress(RallypointError):
                    await self._client.log_in(Deadline(LOG_IN_S))
            return False
        endpoint.answered()
        ttl_s = responses.read_lease(data)[1]
        if ttl_s:
            self.ttl_s = ttl_s  # another process may have granted it
        else:
            self.ended.set()
        return True
