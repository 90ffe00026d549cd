"""What keeps the leases of one client alive: all of them by one short stream, a few times in their time to live."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from rallypoint.deadline import Deadline
from rallypoint.etcd import answers, messages
from rallypoint.etcd.client import ATTEMPT_S, Client, stream_trouble
from rallypoint.etcd.messages import Method
from rallypoint.etcd.rpc import grpc

__all__ = ["Kept", "Keeper"]


class Kept(Protocol):
    """What has a lease."""

    lease: int

    def end_of_it(self) -> Exception:
        """Note that the lease is gone."""


class Keeper:
    """The leases of one client."""

    def __init__(self, client: Client, name: str, ttl_s: float, patience_s: float) -> None:
        self.name = name
        self.patience_s = patience_s
        self._client = client
        self._ttl_s = ttl_s
        self._kept: dict[int, Kept] = {}
        self._task: asyncio.Task[None] | None = None

    def add(self, kept: Kept) -> None:
        """Keep a lease alive."""
        self._kept[kept.lease] = kept
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())

    def hurry(self, ttl_s: float) -> None:
        """Beat often enough for a lease of this time to live."""
        self._ttl_s = min(self._ttl_s, ttl_s)

    def remove(self, kept: Kept) -> None:
        """Keep it alive no longer, unless another here has the same lease: a session that came back."""
        if self._kept.get(kept.lease) is kept:
            del self._kept[kept.lease]

    def close(self) -> None:
        """Keep none alive any longer."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._ttl_s / 4)
            for lease in await self._beat():
                kept = self._kept.get(lease)
                if kept is not None:
                    kept.end_of_it()

    async def _beat(self) -> list[int]:
        """Keep all alive once more; return the leases that are gone."""
        deadline = Deadline(self._ttl_s / 2)
        left = list(self._kept)
        gone: list[int] = []
        while left and not deadline.expired():
            endpoint, since = self._client.some_endpoint(), time.monotonic()
            stream = self._client.stream(Method.KEEP_ALIVE, endpoint, ATTEMPT_S)
            try:
                for number in left:
                    await stream.write(messages.lease(number))
                await stream.done_writing()
                for number in list(left):
                    data = await stream.read()
                    if data is grpc.aio.EOF:
                        break
                    if not answers.read_lease(data)[1]:
                        gone.append(number)
                    left.remove(number)
                endpoint.answered()
            except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
                endpoint.failed(stream_trouble(error), since)
                await asyncio.sleep(min(0.1, deadline.remaining()))
            finally:
                stream.cancel()
        return gone
