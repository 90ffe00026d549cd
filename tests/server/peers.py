"""Peers of a server in the same event loop: clients whose transport the test controls.

A peer collects what is written to it, can stop reading, and can disconnect. Writing to a lost transport raises, as with
uvloop.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Any, Protocol, TypeVar

import msgspec

from rallypoint.core import ops
from rallypoint.core.engine import Engine
from rallypoint.core.session import Session
from rallypoint.protocol import native
from rallypoint.protocol.c10d import Opcode, encode, hello
from rallypoint.protocol.native import ACCEPTED, PREFACE, Frames, Hello, frame
from rallypoint.server.connections.connection import Connection
from rallypoint.server.listener import Listener
from rallypoint.server.server import StoreServer

__all__ = [
    "HIGH",
    "FakeTransport",
    "Listening",
    "NativePeer",
    "TorchPeer",
    "engine_of",
    "native_peer",
    "next_replies",
    "session_of",
    "settle",
    "torch_peer",
    "value_of",
]

L = TypeVar("L", bound="FakeTransport")

HIGH = 65_536
"""Unread bytes above which a transport pauses its protocol, as real ones do."""

TURNS = 60
"""How many turns of the loop it takes until nothing more happens by itself."""


class Listening(Protocol):
    """A server, of whatever kind."""

    listener: Listener


async def settle() -> None:
    """Run the loop until nothing more happens by itself."""
    for _ in range(TURNS):
        await asyncio.sleep(0)


class _Socket(asyncio.Protocol):
    """Passes the bytes of a real socket to a peer."""

    def __init__(self, peer: FakeTransport) -> None:
        self._peer = peer

    def data_received(self, data: bytes) -> None:
        self._peer.pending += data
        self._peer.changed.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._peer.closing = True
        self._peer.changed.set()


class FakeTransport(asyncio.Transport):
    """One peer's end of a connection."""

    def __init__(self, server: Listening | None) -> None:
        super().__init__()
        self.pending = b""
        self.paused = self.stopped = self.closing = self.lost = False
        self.changed = asyncio.Event()
        self._socket: asyncio.Transport | None = None
        if server is not None:
            self.connection = Connection(server.listener)
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
        """Return the next `size` bytes received."""
        data = bytearray()
        while len(data) < size:
            if self.pending:
                left = size - len(data)
                data += self.pending[:left]
                self.pending = self.pending[left:]
                self._drained()
            else:
                assert not self.closing, f"disconnected after {bytes(data)!r}"
                self.changed.clear()
                await self.changed.wait()
        return bytes(data)

    async def ends(self) -> None:
        """Return when the server has closed the connection."""
        while not self.closing:
            self.changed.clear()
            await self.changed.wait()

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
            self.changed.set()
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
            self.changed.set()
            asyncio.get_running_loop().call_soon(self._lose)

    close = abort

    def _lose(self) -> None:
        self.lost = True
        self.connection.connection_lost(None)


class TorchPeer(FakeTransport):
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


class NativeCaller:
    """What sends requests of our protocol and reads replies: on a connection, or on a channel of one."""

    def says(self, data: bytes) -> None:
        raise NotImplementedError

    async def reads(self) -> Any:
        """Return the next frame received."""
        raise NotImplementedError

    def asks(self, *requests: ops.Op) -> None:
        self.says(b"".join(map(frame, requests)))

    async def asked(self, request: ops.Op) -> Any:
        """Send a request, and return its result, which must be the next frame."""
        self.asks(request)
        number, status, result = await self.reads()
        assert number == request.number and not status, (number, status, result)
        return result


class NativePeer(FakeTransport, NativeCaller):
    """A client that speaks our protocol."""

    async def greets(self, session: bytes = b"", seen: int = 0) -> Any:
        """Send a hello; return the reply."""
        self.frames = Frames(1 << 30)
        self.inbox: list[Any] = []
        self.says(PREFACE)
        assert await self.hears(4) == ACCEPTED
        self.says(frame(Hello(native.VERSION, "test", session, seen)))
        _, status, answer = await self.reads()
        self.session = answer[2] if not status else b""
        return answer

    async def reads(self) -> Any:
        """Return the next frame received."""
        while not self.inbox:
            await self.hears(0)
            while not self.pending:
                assert not self.closing, "disconnected"
                self.changed.clear()
                await self.changed.wait()
            data, self.pending = self.pending, b""
            self._drained()
            self.inbox += [msgspec.msgpack.decode(payload) for payload in self.frames.feed(data)]
        return self.inbox.pop(0)


async def native_peer(server: StoreServer, session: bytes = b"") -> NativePeer:
    """Return a native client that has opened or resumed a session."""
    peer = NativePeer(server)
    await peer.greets(session)
    assert peer.session
    return peer


async def torch_peer(server: StoreServer) -> TorchPeer:
    """Return a client of PyTorch's protocol that has greeted."""
    return await TorchPeer(server).greets()


async def next_replies(peer: NativePeer, count: int) -> list[Any]:
    """Return the next `count` frames."""
    return [await peer.reads() for _ in range(count)]


# What the server holds


def engine_of(server: StoreServer, namespace: int = 0) -> Engine:
    return server.state.namespaces[namespace].engine


def value_of(server: StoreServer, key: bytes) -> bytes | None:
    found: bytes | None = engine_of(server).execute(ops.Peek(0, key))
    return found


def session_of(server: StoreServer, peer: NativePeer) -> Session:
    return server.state.sessions_by_id[peer.session]
