"""Gateways on a fake etcd, in one event loop: what the tests of the gateway share."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from tests.server.fake_space import FakeEtcd, FakeSpace
from tests.wire import AMPLE_S

from rallypoint.server.gateway import Gateway
from rallypoint.server.settings import Settings


def on_fake_etcd(test: Callable[[FakeEtcd], Awaitable[None]]) -> Callable[[], None]:
    """Run a test in a loop of its own, with a cluster."""

    async def run() -> None:
        await asyncio.wait_for(test(FakeEtcd()), AMPLE_S)

    @functools.wraps(test)
    def call() -> None:
        asyncio.run(run())

    del call.__wrapped__  # type: ignore[attr-defined]
    return call


class NoExecutor:
    """In the fake, nobody leaves anything."""

    def __init__(self, space: object, session: object) -> None:
        pass

    def stop(self) -> None:
        pass


async def open_gateway(etcd: FakeEtcd, by: str = "a", **settings: Any) -> Gateway:
    space = etcd.space(by=by)

    async def connect() -> FakeSpace:
        return space

    gateway = Gateway(Settings(**settings), connect, execute=NoExecutor)  # type: ignore[arg-type]
    await gateway.open([])
    return gateway


def kill(gateway: Gateway) -> None:
    """End a gateway as SIGKILL would: what it has under way never goes on, and its peers see their connections end."""
    gateway.space.dead = True  # type: ignore[attr-defined]
    gateway.guests._away.clear()
    for connection in list(gateway._connections):
        connection._transport.abort()
