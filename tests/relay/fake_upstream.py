"""A server with channels for tests of the relay, in the same event loop; the test controls its data and credit."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvloop
from tests.raw_peer import AMPLE_S
from tests.server.fake_log import Bugs

from rallypoint import net
from rallypoint.protocol import channels
from rallypoint.relay.upstream.connection import Upstream

__all__ = ["FakeServer", "Owner", "connected", "in_loop", "is_connected"]

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test in an event loop of each kind; no exception may be logged."""

    @functools.wraps(test)
    def call(loop: str, **fixtures: Any) -> None:
        with Bugs.none(), contextlib.closing(LOOPS[loop]()) as running:
            running.run_until_complete(_in_time(test(**fixtures)))

    needs = list(inspect.signature(test).parameters.values())
    loop = inspect.Parameter("loop", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    call.__signature__ = inspect.Signature([*needs, loop])  # type: ignore[attr-defined]
    marked: Callable[..., None] = pytest.mark.parametrize("loop", LOOPS)(call)
    return marked


async def _in_time(work: Awaitable[None]) -> None:
    await asyncio.wait_for(work, AMPLE_S)


class FakeLink(asyncio.Protocol):
    """One connection of a relay, as the server sees it."""

    def __init__(self, server: FakeServer) -> None:
        self._server = server
        self._early = b""
        self.accepted = False
        self._frames = channels.ChannelFrames()
        self.data: dict[int, bytes] = {}
        """The data received on each channel."""

        self.credit: dict[int, int] = {}
        """The credit received on each channel."""

        self.closes: list[int] = []
        self.order: list[int] = []
        """The channels of the DATA frames received, in order."""

        self.reads = 0
        """How often data was received."""

        self.lost = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self._server.links.append(self)
        self._server.changed.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        self._server.changed.set()

    def data_received(self, data: bytes) -> None:
        if not self.accepted:
            self._early += data
            if len(self._early) < len(channels.PREFACE):
                return
            assert self._early.startswith(channels.PREFACE), self._early
            self.accepted = True
            self.transport.write(self._server.answer)
            data = self._early[len(channels.PREFACE) :]
        self.reads += bool(data)
        for frame in self._frames.feed(data):
            pieces = [(frame.channel, frame.body)] if frame.kind == channels.DATA else []
            grants = [(frame.channel, frame.size)] if frame.kind == channels.CREDIT else []
            if frame.kind == channels.GATHERED:
                pieces = channels.split_gathered(frame.channel, frame.body)
            elif frame.kind == channels.CREDITS:
                grants = channels.split_credits(frame.channel, frame.body)
            elif frame.kind == channels.CLOSE:
                self.closes.append(frame.channel)
            for number, piece in pieces:
                self.data[number] = self.data.get(number, b"") + piece
                self.order.append(number)
            for number, size in grants:
                self.credit[number] = self.credit.get(number, 0) + size
        self._server.changed.set()

    def says(self, number: int, data: bytes) -> None:
        self.transport.write(channels.data_frames(number, data))

    def grants(self, number: int, size: int) -> None:
        self.transport.write(channels.credit_frame(number, size))

    def closes_channel(self, number: int, why: str = "") -> None:
        self.transport.write(channels.close_frame(number, why))

    def hangs_up(self) -> None:
        self.transport.abort()


class FakeServer:
    """Listens on loopback; `links` are the connections so far, the latest last."""

    def __init__(self, answer: bytes = channels.ACCEPTED) -> None:
        self.answer = answer
        self.links: list[FakeLink] = []
        self.changed = asyncio.Event()
        self.port = 0

    @property
    def link(self) -> FakeLink:
        return self.links[-1]

    @property
    def endpoints(self) -> net.Endpoints:
        return net.Endpoints([net.Endpoint("127.0.0.1", self.port)])

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: FakeLink(self), "127.0.0.1", self.port, reuse_address=True)
        self.port = self._server.sockets[0].getsockname()[1]

    def stop(self) -> None:
        """Refuse new connections, and close the existing ones."""
        self._server.close()
        for link in self.links:
            if not link.lost:
                link.hangs_up()

    async def until(self, true: Any) -> None:
        """Return when a condition is true; it is checked whenever data arrives."""
        while not true():
            self.changed.clear()
            await self.changed.wait()


class Owner:
    """Owns one channel, and records its callbacks."""

    def __init__(self, upstream: Upstream, takes: bool = True) -> None:
        self.data = b""
        self.ends: list[str] = []
        self.writables = 0
        self.changed = asyncio.Event()
        self._takes = takes
        self.channel = upstream.open_channel(self)

    def received(self, data: bytes) -> None:
        assert not self.ends
        self.data += data
        if self._takes:
            self.channel.consumed(len(data))
        self.changed.set()

    def closed(self, why: str) -> None:
        self.ends.append(why)
        self.changed.set()

    def writable(self) -> None:
        assert not self.ends
        self.writables += 1
        self.changed.set()

    async def until(self, true: Any) -> None:
        while not true():
            self.changed.clear()
            await self.changed.wait()


async def is_connected(upstream: Upstream, times: int = 1) -> None:
    """Return when the upstream has connected for the `times`-th time."""
    changed = asyncio.Event()
    upstream.on_connected(changed.set)
    while not upstream.connected or upstream.connections < times:
        changed.clear()
        await changed.wait()
    upstream.forget(changed.set)


@contextlib.asynccontextmanager
async def connected(answer: bytes = channels.ACCEPTED) -> AsyncIterator[tuple[Upstream, FakeServer]]:
    """Provide an upstream that is connected to a fake server."""
    server = FakeServer(answer)
    await server.start()
    upstream = Upstream(server.endpoints)
    upstream.start()
    await is_connected(upstream)
    try:
        yield upstream, server
    finally:
        await upstream.close()
        server.stop()
