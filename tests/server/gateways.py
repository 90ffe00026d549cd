"""Gateways on a fake etcd, and peers of theirs, in one event loop: what the tests of the gateway share.

A peer's transport is in the hands of the test: it takes what is written for it, and can stop reading.
"""

from __future__ import annotations

import asyncio
import functools
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from tests.server.fake_space import FakeEtcd, FakeSpace
from tests.wire import AMPLE_S

from rallypoint.core import native
from rallypoint.core.c10d import Op, encode, hello
from rallypoint.core.native import ACCEPTED, PREFACE, Frames, Hello, frame
from rallypoint.server.connection import Connection
from rallypoint.server.gateway import Gateway
from rallypoint.server.settings import Settings

HIGH = 65_536
TURNS = 60
"""After how many turns of the loop nothing more happens by itself."""


def on_fake_etcd(test: Callable[[FakeEtcd], Awaitable[None]]) -> Callable[[], None]:
    """Run a test in a loop of its own, with a cluster."""

    async def run() -> None:
        await asyncio.wait_for(test(FakeEtcd()), AMPLE_S)

    @functools.wraps(test)
    def call() -> None:
        asyncio.run(run())

    del call.__wrapped__  # type: ignore[attr-defined]
    return call


async def settle() -> None:
    """Let everything happen that happens by itself."""
    for _ in range(TURNS):
        await asyncio.sleep(0)


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


class Line(asyncio.Transport):
    """One peer's end of a connection."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__()
        self.pending = b""
        self.paused = self.stopped = self.closing = False
        self.deaf = False
        self.bell = asyncio.Event()
        self.connection = Connection(gateway)
        self.connection.connection_made(self)

    def says(self, data: bytes) -> None:
        """Send; the gateway must be willing to read."""
        assert not self.stopped and not self.closing
        self.connection.data_received(data)

    async def hears(self, size: int) -> bytes:
        """Return the next bytes that come, so many."""
        while len(self.pending) < size:
            assert not self.closing, f"hung up on after {self.pending!r}"
            self.bell.clear()
            await self.bell.wait()
        data, self.pending = self.pending[:size], self.pending[size:]
        self._drained()
        return data

    async def ends(self) -> None:
        """Return when the gateway has hung up."""
        while not self.closing:
            self.bell.clear()
            await self.bell.wait()

    def hangs_up(self) -> None:
        self.abort()

    def _drained(self) -> None:
        if self.paused and len(self.pending) <= HIGH // 4:
            self.paused = False
            self.connection.resume_writing()

    # What the gateway calls

    def write(self, data: Any) -> None:
        if not self.closing:
            self.pending += data
            self.bell.set()
        if len(self.pending) > HIGH and not self.paused:
            self.paused = True
            self.connection.pause_writing()

    def get_write_buffer_size(self) -> int:
        return len(self.pending) if self.paused else 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("fake", id(self)) if name == "peername" else default

    def pause_reading(self) -> None:
        self.stopped = True

    def resume_reading(self) -> None:
        self.stopped = False

    def is_closing(self) -> bool:
        return self.closing

    def abort(self) -> None:
        if not self.closing:
            self.closing = True
            self.pending = b""
            self.bell.set()
            asyncio.get_running_loop().call_soon(self.connection.connection_lost, None)

    close = abort


class Torch(Line):
    """A client that speaks PyTorch's protocol."""

    async def greets(self) -> Torch:
        self.says(hello(7))
        assert await self.hears(4) == b"\7\0\0\0"
        return self

    def asks(self, op: int, *fields: bytes | int) -> None:
        self.says(encode(op, *fields))

    async def number(self) -> int:
        return int(struct.unpack("<q", await self.hears(8))[0])

    async def string(self) -> bytes:
        return await self.hears(await self.number())

    async def gets(self, key: bytes) -> bytes:
        self.asks(Op.GET, key)
        return await self.string()

    async def pings(self) -> None:
        self.asks(Op.PING, 9)
        assert await self.hears(4) == b"\x09\0\0\0"


class Ours(Line):
    """A client that speaks our protocol."""

    async def greets(self, session: bytes = b"", seen: int = 0) -> Any:
        """Say hello; return what comes back."""
        self.frames = Frames(1 << 30)
        self.inbox: list[Any] = []
        self.says(PREFACE)
        assert await self.hears(4) == ACCEPTED
        self.says(frame(Hello(native.VERSION, "test", session, seen)))
        _, status, answer = await self.reads()
        self.session = answer[2] if not status else b""
        return answer

    def asks(self, *requests: native.Request) -> None:
        self.says(b"".join(map(frame, requests)))

    async def reads(self) -> Any:
        """Return the next frame that comes."""
        while not self.inbox:
            await self.hears(0)
            while not self.pending:
                assert not self.closing, "hung up on"
                self.bell.clear()
                await self.bell.wait()
            data, self.pending = self.pending, b""
            self._drained()
            self.inbox += [msgspec.msgpack.decode(payload) for payload in self.frames.feed(data)]
        return self.inbox.pop(0)

    async def asked(self, request: native.Request) -> Any:
        """Ask, and return the answer; it must be the next thing that comes."""
        self.asks(request)
        number, status, result = await self.reads()
        assert number == request.number and not status, (number, status, result)
        return result
