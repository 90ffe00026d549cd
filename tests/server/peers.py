"""Peers of a server in the same event loop: clients whose transport is in the hands of the test.

A peer takes what is written for it, can stop reading, and hangs up when told. Writing to a transport that is lost
raises, as uvloop's does.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Any, TypeVar

import msgspec

from rallypoint.core import ops
from rallypoint.protocol import native
from rallypoint.protocol.c10d import Opcode, encode, hello
from rallypoint.protocol.native import ACCEPTED, PREFACE, Frames, Hello, frame
from rallypoint.server.base import ServerBase
from rallypoint.server.connection import Connection

__all__ = ["Line", "Ours", "Torch", "settle"]

L = TypeVar("L", bound="Line")

HIGH = 65_536
TURNS = 60
"""After how many turns of the loop nothing more happens by itself."""


async def settle() -> None:
    """Let everything happen that happens by itself."""
    for _ in range(TURNS):
        await asyncio.sleep(0)


class _Socket(asyncio.Protocol):
    """Hands what comes by a real socket to a peer."""

    def __init__(self, peer: Line) -> None:
        self._peer = peer

    def data_received(self, data: bytes) -> None:
        self._peer.pending += data
        self._peer.bell.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._peer.closing = True
        self._peer.bell.set()


class Line(asyncio.Transport):
    """One peer's end of a connection."""

    def __init__(self, server: ServerBase | None) -> None:
        super().__init__()
        self.pending = b""
        self.paused = self.stopped = self.closing = self.lost = False
        self.bell = asyncio.Event()
        self._socket: asyncio.Transport | None = None
        if server is not None:
            self.connection = Connection(server)
            self.connection.connection_made(self)

    @classmethod
    async def dial(cls: type[L], port: int) -> L:
        """Connect to a port of this host, by a real socket."""
        peer, loop = cls(None), asyncio.get_running_loop()
        peer._socket, _ = await loop.create_connection(lambda: _Socket(peer), "127.0.0.1", port)
        return peer

    def says(self, data: bytes) -> None:
        """Send; the server must be willing to read."""
        assert not self.stopped and not self.closing
        if self._socket is not None:
            self._socket.write(data)
        else:
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
        """Return when the server has hung up."""
        while not self.closing:
            self.bell.clear()
            await self.bell.wait()

    def hangs_up(self) -> None:
        if self._socket is not None:
            self._socket.abort()
        else:
            self.abort()

    def _drained(self) -> None:
        if self.paused and len(self.pending) <= HIGH // 4:
            self.paused = False
            self.connection.resume_writing()

    # What the server calls

    def write(self, data: Any) -> None:
        if self.lost:
            raise RuntimeError("the transport is closed")  # as uvloop's does
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
            asyncio.get_running_loop().call_soon(self._lose)

    close = abort

    def _lose(self) -> None:
        self.lost = True
        self.connection.connection_lost(None)


class Torch(Line):
    """A client that speaks PyTorch's protocol."""

    async def greets(self: L) -> L:
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
        self.asks(Opcode.GET, key)
        return await self.string()

    async def pings(self) -> None:
        self.asks(Opcode.PING, 9)
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

    def asks(self, *requests: ops.Op) -> None:
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

    async def asked(self, request: ops.Op) -> Any:
        """Ask, and return the answer; it must be the next thing that comes."""
        self.asks(request)
        number, status, result = await self.reads()
        assert number == request.number and not status, (number, status, result)
        return result
