"""The plain side of a `TlsTransport` for the tests: a user of it, its server in a thread, and a transport in memory."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

from tests.raw_peer import AMPLE_S

from rallypoint.server.connections.tls import TlsTransport

__all__ = ["FakeTransport", "PlainUser", "TlsServer", "serving"]

Act = Callable[["PlainUser", bytes], object]


class PlainUser:
    """What a `Connection` is to a TlsTransport; it does `act` with received data, and notes what it is told."""

    def __init__(self, act: Act) -> None:
        self.transport: Any = None
        self.act = act
        self.received = bytearray()
        self.told: list[str] = []
        self.dropped: Future[str] = Future()
        self.lost: Future[Exception | None] = Future()

    def data_received(self, data: bytes) -> None:
        self.act(self, data)

    def pause_writing(self) -> None:
        self.told.append("pause")

    def resume_writing(self) -> None:
        self.told.append("resume")

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set_result(error)

    def drop(self, why: str) -> None:
        self.dropped.set_result(why)
        self.transport.abort()


class FirstBytes(asyncio.Protocol):
    """Starts TLS when the first bytes have been read, as the server does."""

    def __init__(self, context: ssl.SSLContext, user: PlainUser) -> None:
        self._context, self._user = context, user

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._user.transport = tls = TlsTransport(self._transport, self._user, self._context)
        tls.data_received(data)


class TlsServer(NamedTuple):
    """A server in a thread: its address, its users as they come, and its event loop."""

    address: tuple[str, int]
    users: queue.SimpleQueue[PlainUser]
    loop: asyncio.AbstractEventLoop

    def user(self) -> PlainUser:
        return self.users.get(timeout=AMPLE_S)

    def call(self, work: Callable[[], Any]) -> Any:
        """Do something in the thread of the event loop, and return its result."""

        async def run() -> Any:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(AMPLE_S)


@contextlib.contextmanager
def serving(
    act: Act, context: ssl.SSLContext, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> Iterator[TlsServer]:
    """Serve TLS by an event loop in a thread; nothing may go wrong in its callbacks."""
    loop, users, wrong = new_loop(), queue.SimpleQueue[PlainUser](), []

    def accept() -> FirstBytes:
        user = PlainUser(act)
        users.put(user)
        return FirstBytes(context, user)

    loop.set_exception_handler(lambda _, facts: wrong.append(facts))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        opening = loop.create_server(accept, "127.0.0.1", 0)
        listener = asyncio.run_coroutine_threadsafe(opening, loop).result(AMPLE_S)
        yield TlsServer(listener.sockets[0].getsockname(), users, loop)
        loop.call_soon_threadsafe(listener.close)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(AMPLE_S)
        loop.close()
    assert not wrong, wrong


class FakeTransport(asyncio.Transport):
    """A socket's transport in memory: takes everything, or, with `full`, nothing more than it has."""

    HIGH_WATER = 65536

    def __init__(self) -> None:
        super().__init__()
        self.sent = bytearray()
        self.waiting = bytearray()
        self.full = self.closed = self.aborted = False
        self.protocol: Any = None

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def write(self, data: Any) -> None:
        assert not self.closed, "uvloop's would raise"
        if not self.full:
            self.sent += data
            return
        before = len(self.waiting)
        self.waiting += data
        if before <= self.HIGH_WATER < len(self.waiting):
            self.protocol.pause_writing()

    async def take(self) -> None:
        """The peer reads: send all that waits."""
        before = len(self.waiting)
        self.sent += self.waiting
        self.waiting.clear()
        if before > self.HIGH_WATER:
            self.protocol.resume_writing()
        await asyncio.sleep(0)

    def get_write_buffer_size(self) -> int:
        return len(self.waiting)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True
