"""A lease of etcd that is kept alive: what hangs on it goes when its keeper is gone for its time to live.

`reached_at` is when etcd last said that it is alive, by our own clock and counted from the moment of asking: so
whoever must not act on a lease that may have ended compares that with the time to live, and trusts no other clock.

Rejected: one stream that stays open. A member that hangs would keep it, and a short one finds another member.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from rallypoint.deadline import Deadline
from rallypoint.errors import RallypointError
from rallypoint.etcd import answers, messages
from rallypoint.etcd.client import ATTEMPT_S, Client, stream_trouble
from rallypoint.etcd.messages import Method
from rallypoint.etcd.rpc import grpc

__all__ = ["Lease"]

PAUSE_S = 0.1
LOG_IN_S = 1.0


class Lease:
    """One lease, kept alive from `keep` to `close`."""

    def __init__(self, client: Client, identity: int, ttl_s: float) -> None:
        self.id = identity
        self.ttl_s = ttl_s
        self.reached_at = time.monotonic()
        self.ended = asyncio.Event()
        """Set when etcd said that there is no such lease."""

        self._client = client
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def grant(cls, client: Client, ttl_s: int, deadline: Deadline) -> Lease:
        """Have a new lease granted; it is not kept alive yet."""
        data = (await client.call(Method.LEASE_GRANT, messages.lease(0, ttl_s), deadline)).data
        identity, granted_s = answers.read_lease(data)
        return cls(client, identity, granted_s or ttl_s)

    def keep(self) -> None:
        """Keep it alive from now on."""
        self._task = asyncio.ensure_future(self._keep())

    async def revoke(self, deadline: Deadline) -> None:
        """End it, with all that hangs on it."""
        self.close()
        await self._client.call(Method.LEASE_REVOKE, messages.lease(self.id), deadline)

    def close(self) -> None:
        """Keep it alive no longer."""
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
        """Keep it alive once more; return whether etcd answered."""
        endpoint, since = self._client.some_endpoint(), time.monotonic()
        stream = self._client.stream(Method.KEEP_ALIVE, endpoint, min(ATTEMPT_S, self.ttl_s / 3))
        try:
            await stream.write(messages.lease(self.id))
            await stream.done_writing()
            data = await stream.read()
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            why = stream_trouble(error)
            endpoint.failed(why, since)
            if "auth token" in why:
                with contextlib.suppress(RallypointError):
                    await self._client.log_in(Deadline(LOG_IN_S))
            return False
        finally:
            stream.cancel()
        if data is grpc.aio.EOF:
            return False
        endpoint.answered()
        ttl_s = answers.read_lease(data)[1]
        if ttl_s:
            self.ttl_s = ttl_s  # it may have been granted to another
        else:
            self.ended.set()
        return True
