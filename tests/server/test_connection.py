"""What a connection makes the server hold, with a transport whose every byte is in the test's hands.

It takes what is written and sends it only when told, tells its protocol to pause past 64 KiB, as the real ones do, and
closes in the next turn of the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from rallypoint.core.engine import Engine
from rallypoint.protocol.c10d import Opcode, encode, hello
from rallypoint.server.connection import Connection
from rallypoint.server.native_connection import REPLIES_BYTES
from rallypoint.server.server import StoreServer
from rallypoint.server.settings import Settings

MIB = 1024 * 1024
HIGH = 65_536


class Wire(asyncio.Transport):
    """One peer's end: `says` goes to the server, `reads` takes what has been written for it."""

    def __init__(self, server: StoreServer, greet: bool = True) -> None:
        super().__init__()
        self.pending = b""
        self.paused = self.reading_stopped = self.closing = False
        self.connection = Connection(server)
        self.connection.connection_made(self)
        if greet:
            self.says(hello(1))
            assert self.reads() == b"\1\0\0\0"

    def says(self, data: bytes) -> None:
        assert not self.reading_stopped and not self.closing
        self.connection.data_received(data)

    def reads(self) -> bytes:
        data, self.pending = self.pending, b""
        if self.paused:
            self.paused = False
            self.connection.resume_writing()
        return data

    # What the server calls

    def write(self, data: Any) -> None:
        if not self.closing:
            self.pending += data
        if len(self.pending) > HIGH and not self.paused:
            self.paused = True
            self.connection.pause_writing()

    def get_write_buffer_size(self) -> int:
        return len(self.pending)

    def pause_reading(self) -> None:
        self.reading_stopped = True

    def resume_reading(self) -> None:
        self.reading_stopped = False

    def is_closing(self) -> bool:
        return self.closing

    def abort(self) -> None:
        if not self.closing:
            self.closing = True
            self.pending = b""
            asyncio.get_running_loop().call_soon(self.connection.connection_lost, None)

    close = abort


def with_server(**settings: int) -> Callable[[Callable[[StoreServer], Awaitable[None]]], Callable[[], None]]:
    """Run a test in a loop, with a server of these settings."""

    def decorate(test: Callable[[StoreServer], Awaitable[None]]) -> Callable[[], None]:
        async def run() -> None:
            server = StoreServer(Settings(**settings))  # type: ignore[arg-type]
            await server.open([])
            await test(server)
            await server.close()

        def call() -> None:
            asyncio.run(run())

        call.__name__, call.__doc__ = test.__name__, test.__doc__
        return call

    return decorate


async def settle() -> None:
    """Let everything run that is due now."""
    for _ in range(3):
        await asyncio.sleep(0)


def held(server: StoreServer) -> int:
    return int(server._held)


def engine(server: StoreServer) -> Engine:
    return server.state.namespaces[0].engine


GET = encode(Opcode.GET, b"/k")


@with_server()
async def test_who_does_not_read_is_not_read_from(server: StoreServer) -> None:
    wire = Wire(server)
    engine(server).put(b"/k", b"v" * 100_000)
    wire.says(GET * 200)
    await settle()
    assert wire.reading_stopped
    assert len(wire.pending) < 2 * REPLIES_BYTES
    answers = [wire.reads()]
    for _ in range(200):
        await settle()
        answers.append(wire.reads())
    assert b"".join(answers) == (b"\xa0\x86\1\0\0\0\0\0" + b"v" * 100_000) * 200
    assert not wire.reading_stopped and held(server) == 0


@with_server()
async def test_small_answers_that_are_not_read_are_counted_too(server: StoreServer) -> None:
    engine(server).put(b"/k", b"v" * 50_000)
    wires = [Wire(server) for _ in range(10)]
    for wire in wires:
        wire.says(GET)
        wire.says(GET)
        assert wire.reading_stopped
    assert held(server) == sum(len(wire.pending) for wire in wires) == 10 * 2 * 50_008
    for wire in wires:
        wire.reads()
        assert not wire.reading_stopped
    assert held(server) == 0


@with_server(max_memory=40 * MIB)
async def test_past_the_limit_who_has_held_longest_goes_first(server: StoreServer) -> None:
    engine(server).put(b"/k", b"v" * 7 * MIB)
    mute = [Wire(server) for _ in range(10)]
    for wire in mute:
        wire.says(GET * 3)
        await settle()
    assert [wire.closing for wire in mute] == [True] * 6 + [False] * 4
    assert held(server) + engine(server).size <= 40 * MIB
    healthy = Wire(server)
    healthy.says(GET)
    assert not healthy.closing and len(healthy.reads()) == 7 * MIB + 8
    for wire in mute:
        wire.abort()
    await settle()
    assert held(server) == 0 and not server._holders and len(server._connections) == 1


@with_server(max_memory=32 * MIB)
async def test_half_sent_messages_make_room_for_whole_ones(server: StoreServer) -> None:
    message = encode(Opcode.SET, b"/k", b"v" * 8 * MIB)
    half = [Wire(server) for _ in range(6)]
    for wire in half:
        wire.says(message[: 7 * MIB])
        await settle()
    assert [wire.closing for wire in half] == [True] * 2 + [False] * 4
    healthy = Wire(server)
    for at in range(0, len(message), MIB):
        healthy.says(message[at : at + MIB])
    healthy.says(GET)
    await settle()
    assert not healthy.closing and len(healthy.reads()) == 8 * MIB + 8


@with_server(max_memory=16 * MIB)
async def test_a_full_store_can_still_be_read(server: StoreServer) -> None:
    engine(server).put(b"/k", b"v" * 8 * MIB)
    engine(server).put(b"/rest", b"v" * (server.settings.max_memory - engine(server).size - 130))
    reader, slow = Wire(server), Wire(server)
    reader.says(GET)
    slow.says(GET[:-1])
    slow.says(GET[-1:])
    await settle()
    assert len(reader.reads()) == len(slow.reads()) == 8 * MIB + 8


@with_server(max_memory=32 * MIB)
async def test_a_dropped_connection_holds_nothing_and_is_not_counted_twice(server: StoreServer) -> None:
    engine(server).put(b"/k", b"v" * 8 * MIB)
    for _ in range(50):
        wire = Wire(server)
        wire.says(GET * 10)
        assert held(server) == sum(other.connection._held for other in wires_of(server))
    await settle()
    assert held(server) == sum(len(wire.pending) + wire.connection.handler.held for wire in open_wires(server))


def wires_of(server: StoreServer) -> list[Any]:
    return [connection._transport for connection in server._connections]


def open_wires(server: StoreServer) -> list[Any]:
    return [wire for wire in wires_of(server) if not wire.closing]


@with_server()
async def test_the_page_that_is_not_read_is_counted(server: StoreServer) -> None:
    wire = Wire(server, greet=False)
    wire.says(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 2000)
    await settle()
    assert wire.reading_stopped
    assert held(server) > HIGH and len(wire.pending) < 2 * HIGH
    answers = wire.reads()
    while wire.reading_stopped:
        await settle()
        answers += wire.reads()
    assert answers.count(b"</table>") == 2000 and held(server) == 0
