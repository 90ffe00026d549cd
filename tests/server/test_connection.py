"""What a connection makes the server hold; the test controls every byte of the transport."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from tests.event_loop import in_loop
from tests.server.peers import HIGH, FakeTransport, engine_of, settle

from rallypoint.protocol.c10d import Opcode, encode, hello
from rallypoint.server.connections.native_connection import REPLIES_BYTES
from rallypoint.server.server import StoreServer
from rallypoint.server.settings import Settings

MIB = 1024 * 1024


class ByteTransport(FakeTransport):
    """A peer that speaks PyTorch's protocol: `reads` returns what the server has written."""

    def __init__(self, server: StoreServer, greet: bool = True) -> None:
        super().__init__(server)
        if greet:
            self.says(hello(1))
            assert self.reads() == b"\1\0\0\0"

    def reads(self) -> bytes:
        data, self.pending = self.pending, b""
        self._drained()
        return data

    def get_write_buffer_size(self) -> int:
        return len(self.pending)


def with_server(**settings: int) -> Callable[[Callable[[StoreServer], Awaitable[None]]], Callable[[], None]]:
    """Run a test in a loop, with a server of these settings."""

    def decorate(test: Callable[[StoreServer], Awaitable[None]]) -> Callable[[], None]:
        async def run() -> None:
            server = StoreServer(Settings(**settings))  # type: ignore[arg-type]
            await server.open([])
            await test(server)
            await server.close()

        return in_loop(run)

    return decorate


def held(server: StoreServer) -> int:
    return server.listener.memory.held


GET = encode(Opcode.GET, b"/k")


@with_server()
async def test_the_server_stops_reading_from_a_peer_that_does_not_read(server: StoreServer) -> None:
    transport = ByteTransport(server)
    engine_of(server).put(b"/k", b"v" * 100_000)
    transport.says(GET * 200)
    await settle()
    assert transport.stopped
    assert len(transport.pending) < 2 * REPLIES_BYTES
    answers = [transport.reads()]
    for _ in range(200):
        await settle()
        answers.append(transport.reads())
    assert b"".join(answers) == (b"\xa0\x86\1\0\0\0\0\0" + b"v" * 100_000) * 200
    assert not transport.stopped and held(server) == 0


@with_server()
async def test_small_answers_that_are_not_read_are_counted_too(server: StoreServer) -> None:
    engine_of(server).put(b"/k", b"v" * 50_000)
    transports = [ByteTransport(server) for _ in range(10)]
    for transport in transports:
        transport.says(GET)
        transport.says(GET)
        assert transport.stopped
    assert held(server) == sum(len(transport.pending) for transport in transports) == 10 * 2 * 50_008
    for transport in transports:
        transport.reads()
        assert not transport.stopped
    assert held(server) == 0


async def read_all(transport: ByteTransport) -> bytes:
    """Read until the server has nothing more to send."""
    data = transport.reads()
    while True:
        await settle()
        more = transport.reads()
        if not more:
            return data
        data += more


@with_server()
async def test_one_value_that_many_do_not_read_is_not_copied(server: StoreServer) -> None:
    engine_of(server).put(b"/k", b"v" * 7 * MIB)
    mute = [ByteTransport(server) for _ in range(100)]
    for transport in mute:
        transport.says(GET)
    await settle()
    assert not any(transport.closing for transport in mute)
    assert held(server) < 100 * 2 * REPLIES_BYTES
    engine_of(server).put(b"/k", b"")
    assert [len(await read_all(transport)) for transport in mute] == [7 * MIB + 8] * 100
    assert held(server) == 0 and not server.listener.memory.holders


@with_server(max_memory=40 * MIB)
async def test_over_the_limit_the_longest_holders_are_dropped_first(server: StoreServer) -> None:
    engine_of(server).put(b"/k", b"v" * 7 * MIB)
    mute = [ByteTransport(server) for _ in range(10)]
    for transport in mute:
        transport.says(GET * 3)
        await settle()
        engine_of(server).put(b"/k", b"w" * 7 * MIB)  # from now on the reply alone holds the value
    assert [transport.closing for transport in mute] == [True] * 5 + [False] * 5
    healthy = ByteTransport(server)
    healthy.says(GET)
    assert not healthy.closing and len(await read_all(healthy)) == 7 * MIB + 8
    for transport in mute:
        transport.abort()
    await settle()
    assert held(server) == 0 and not server.listener.memory.holders and server.listener.connections == 1


@with_server(max_memory=32 * MIB)
async def test_half_sent_messages_make_room_for_whole_ones(server: StoreServer) -> None:
    message = encode(Opcode.SET, b"/k", b"v" * 8 * MIB)
    half = [ByteTransport(server) for _ in range(6)]
    for transport in half:
        transport.says(message[: 7 * MIB])
        await settle()
    assert [transport.closing for transport in half] == [True] * 2 + [False] * 4
    healthy = ByteTransport(server)
    for at in range(0, len(message), MIB):
        healthy.says(message[at : at + MIB])
    healthy.says(GET)
    await settle()
    assert not healthy.closing and len(await read_all(healthy)) == 8 * MIB + 8


@with_server(max_memory=16 * MIB)
async def test_a_full_store_can_still_be_read(server: StoreServer) -> None:
    engine_of(server).put(b"/k", b"v" * 8 * MIB)
    engine_of(server).put(b"/rest", b"v" * (server.settings.max_memory - engine_of(server).size - 150))
    reader, slow = ByteTransport(server), ByteTransport(server)
    reader.says(GET)
    slow.says(GET[:-1])
    slow.says(GET[-1:])
    await settle()
    assert len(await read_all(reader)) == len(await read_all(slow)) == 8 * MIB + 8


@with_server(max_memory=32 * MIB)
async def test_a_dropped_connection_holds_nothing_and_is_not_counted_twice(server: StoreServer) -> None:
    engine_of(server).put(b"/k", b"v" * 8 * MIB)
    for _ in range(50):
        transport = ByteTransport(server)
        transport.says(GET * 10)
        assert held(server) == sum(other.connection._held for other in transports_of(server))
    await settle()
    assert held(server) == sum(
        len(transport.pending) + transport.connection.handler.held for transport in open_transports(server)
    )


def transports_of(server: StoreServer) -> list[Any]:
    return [connection._transport for connection in server.listener._connections]


def open_transports(server: StoreServer) -> list[Any]:
    return [transport for transport in transports_of(server) if not transport.closing]


@with_server()
async def test_unread_pages_are_counted(server: StoreServer) -> None:
    transport = ByteTransport(server, greet=False)
    transport.says(b"GET /statistics HTTP/1.1\r\nhost: x\r\n\r\n" * 2000)
    await settle()
    assert transport.stopped
    assert held(server) > HIGH and len(transport.pending) < 2 * HIGH
    answers = transport.reads()
    while transport.stopped:
        await settle()
        answers += transport.reads()
    assert answers.count(b'"max_bytes"') == 2000 and held(server) == 0


# The end


@with_server()
async def test_a_connection_admitted_after_close_is_closed(server: StoreServer) -> None:
    await server.close()
    assert ByteTransport(server, greet=False).closing
    await settle()
    assert not server.listener.connections and not server.listener.limit.connections
