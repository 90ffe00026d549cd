"""Native clients of a relay with a fake server: flow control, ends of connections, and hellos of a round."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import pytest
from tests.relay.fake_upstream import FakeServer, in_loop, is_connected

from rallypoint import net
from rallypoint.protocol import native
from rallypoint.protocol.channels import WINDOW, shared_frames
from rallypoint.protocol.native import ACCEPTED, PREFACE, Hello, decode_hello, frame
from rallypoint.relay import native_forward
from rallypoint.relay.native_forward import HELLO_BYTES, RoundPortName
from rallypoint.relay.server import RelayServer
from rallypoint.server.settings import Settings

MIB = 1024 * 1024
HELLO = Hello(native.VERSION, "test")


@contextlib.asynccontextmanager
async def relaying(connect: bool = True) -> AsyncIterator[tuple[RelayServer, FakeServer]]:
    """Provide a relay, which is connected to a fake server."""
    server = FakeServer()
    await server.start()
    relay = RelayServer(Settings(), server.endpoints)
    if not connect:
        server.stop()
    await relay.open(net.listen(["127.0.0.1"], 0))
    if connect:
        await is_connected(relay.upstream)
    try:
        yield relay, server
    finally:
        await relay.close()
        server.stop()


class Client:
    """A native client that sends raw bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def dial(cls, port: int, greets: bool = True) -> Client:
        client = cls(*await asyncio.open_connection("127.0.0.1", port, limit=WINDOW // 4))
        client.writer.write(PREFACE)
        if greets:
            assert await client.reader.readexactly(4) == ACCEPTED
        return client

    @classmethod
    async def dial_two(cls, port: int) -> tuple[Client, Client]:
        return await cls.dial(port), await cls.dial(port)

    async def ends(self) -> bytes:
        """Return the bytes received until the relay closes the connection."""
        with contextlib.suppress(ConnectionError):
            return await self.reader.read()
        return b""

    def close(self) -> None:
        self.writer.close()


def port_of(relay: RelayServer) -> int:
    return int(relay.listener.sockets[0].getsockname()[1])


@in_loop
async def test_bytes_are_forwarded_without_decoding() -> None:
    async with relaying() as (relay, server):
        one, other = await Client.dial_two(port_of(relay))
        one.writer.write(b"\0whatever")
        await server.until(lambda: server.link.data == {1: b"\0whatever"})
        other.writer.write(b"else")
        await server.until(lambda: len(server.link.data) == 2)
        server.link.says(2, b"to the other")
        server.link.says(1, b"to the one")
        assert await one.reader.readexactly(10) == b"to the one"
        assert await other.reader.readexactly(12) == b"to the other"
        assert len(server.links) == 1
        one.close()
        other.close()


@in_loop
async def test_a_preface_in_pieces_with_a_hello_behind_it() -> None:
    async with relaying() as (relay, server):
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(relay))
        for byte in PREFACE + b"hello":
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert await reader.readexactly(4) == ACCEPTED
        await server.until(lambda: server.link.data == {1: b"hello"})
        writer.close()


@in_loop
async def test_a_client_that_does_not_read_stops_its_own_channel() -> None:
    async with relaying() as (relay, server):
        slow, quick = await Client.dial_two(port_of(relay))
        slow.writer.write(b"x")
        await server.until(lambda: server.link.data)
        quick.writer.write(b"y")
        await server.until(lambda: len(server.link.data) == 2)
        answer, said, quiet = random.Random(3).randbytes(24 * MIB), 0, 0
        while quiet < 20:  # round trips on the other channel, without a read on this one
            given = WINDOW + server.link.credit.get(1, 0)
            quiet = quiet + 1 if said == given else 0
            server.link.says(1, answer[said:given])  # as a server does: never beyond its credit
            said = given
            server.link.says(2, b"quick")
            assert await quick.reader.readexactly(5) == b"quick"
        assert said < len(answer)
        assert WINDOW // 2 < relay.listener.memory.held <= WINDOW + 65_536, "and the buffer of the transport"
        reading = asyncio.ensure_future(slow.reader.readexactly(len(answer)))
        while said < len(answer):
            await server.until(lambda: WINDOW + server.link.credit[1] > said)  # noqa: B023
            given = min(WINDOW + server.link.credit[1], len(answer))
            server.link.says(1, answer[said:given])
            said = given
        got = await reading
        assert got == answer
        assert not relay.listener.memory.held
        slow.close()
        quick.close()


@in_loop
async def test_a_full_window_stops_reading_from_its_client() -> None:
    async with relaying() as (relay, server):
        client, other = await Client.dial_two(port_of(relay))
        request = random.Random(4).randbytes(24 * MIB)
        client.writer.write(request)
        await server.until(lambda: len(server.link.data.get(1, b"")) == WINDOW)
        other.writer.write(b"goes on")
        await server.until(lambda: server.link.data.get(2) == b"goes on")
        assert len(server.link.data[1]) == WINDOW
        transport = client.writer.transport
        assert transport.get_write_buffer_size() > 8 * MIB, "the relay has not read it"
        assert relay.listener.memory.held <= 2 * MIB
        granted = 0
        while len(server.link.data[1]) < len(request):
            server.link.grants(1, len(server.link.data[1]) - granted)
            before = granted = len(server.link.data[1])
            await server.until(lambda: len(server.link.data[1]) > before)  # noqa: B023
        assert server.link.data[1] == request
        assert not relay.listener.memory.held
        client.close()
        other.close()


@in_loop
async def test_a_disconnecting_clients_channel_is_closed_after_its_last_bytes() -> None:
    async with relaying() as (relay, server):
        client = await Client.dial(port_of(relay))
        client.writer.write(b"hello")
        await server.until(lambda: server.link.data)
        client.writer.write(b", bye")
        client.close()
        await server.until(lambda: server.link.closes == [1])
        assert server.link.data == {1: b"hello, bye"}
        assert relay.upstream.channels == 0


@in_loop
async def test_the_end_of_a_channel_closes_its_client() -> None:
    async with relaying() as (relay, server):
        client, other = await Client.dial_two(port_of(relay))
        client.writer.write(b"x")
        await server.until(lambda: server.link.data)
        server.link.says(1, b"no")
        server.link.closes_channel(1, "not a greeting")
        assert await client.ends() == b"no"
        other.writer.write(b"y")
        await server.until(lambda: 2 in server.link.data)
        server.link.hangs_up()
        assert await other.ends() == b""
        await is_connected(relay.upstream, times=2)
        assert not relay.listener.connections


@in_loop
async def test_a_client_that_connects_during_an_outage_is_served_after_it() -> None:
    async with relaying(connect=False) as (relay, server):
        here, gone, many = [await Client.dial(port_of(relay)) for _ in range(3)]
        for client in (here, gone, many):
            client.writer.write(b"hello")
        many.writer.write(b"x" * (2 * WINDOW))
        gone.close()
        while relay.listener.connections > 2:
            await asyncio.sleep(0)
        await server.start()
        await is_connected(relay.upstream)
        await server.until(lambda: sorted(map(len, server.link.data.values())) == [5, WINDOW])
        assert set(server.link.data.values()) == {b"hello", b"hello" + b"x" * (WINDOW - 5)}
        number = max(server.link.data, key=lambda number: len(server.link.data[number]))
        server.link.grants(number, WINDOW)
        await server.until(lambda: len(server.link.data[number]) == 2 * WINDOW)
        server.link.says(3 - number, b"welcome")
        assert await here.reader.readexactly(7) == b"welcome"
        here.close()
        many.close()


@in_loop
async def test_a_client_is_disconnected_when_an_outage_lasts_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_forward, "HOLD_S", 0.0)
    async with relaying(connect=False) as (relay, server):
        client = await Client.dial(port_of(relay), greets=False)
        assert await client.ends() == ACCEPTED
        await server.start()
        await is_connected(relay.upstream)
        again = await Client.dial(port_of(relay))
        again.writer.write(b"hello")
        await server.until(lambda: server.link.data == {1: b"hello"})
        again.close()


@in_loop
async def test_a_reply_for_several_channels_reaches_each_client() -> None:
    async with relaying() as (relay, server):
        one, other = await Client.dial_two(port_of(relay))
        for client in (one, other):
            client.writer.write(b"hello")
        await server.until(lambda: len(server.link.data) == 2)
        server.link.transport.write(b"".join(shared_frames([(1, b"a"), (2, b"b")], b" same")))
        assert {await client.reader.readexactly(6) for client in (one, other)} == {b"a same", b"b same"}
        server.link.transport.write(b"".join(shared_frames([(1, b"a"), (9, b"b")], b" same")))
        await one.ends()
        await server.until(lambda: server.links[0].lost)
        one.close()
        other.close()


@in_loop
async def test_a_client_that_says_nothing_is_dropped() -> None:
    async with relaying() as (relay, server):
        silent, here = await Client.dial_two(port_of(relay))
        here.writer.write(b"hello")
        await server.until(lambda: server.link.data == {1: b"hello"})
        relay.listener.settings = Settings(greeting_s=0.0)
        assert await silent.ends() == b""
        here.writer.write(b"!")
        await server.until(lambda: server.link.data == {1: b"hello!"})
        here.close()


# The port of a round


@in_loop
async def test_a_hello_at_the_port_of_a_round_gets_its_namespace() -> None:
    async with relaying() as (relay, server):
        port = relay.rounds.open(RoundPortName("run", 3, 7))
        client = await Client.dial(port)
        hello = Hello(native.VERSION, "test", b"s" * 16, 5, b"secret", [b"former"], True, 9)
        for byte in frame(hello) + b"what ":
            client.writer.write(bytes([byte]))
            await client.writer.drain()
        client.writer.write(b"follows")
        await server.until(lambda: server.link.data.get(1, b"").endswith(b"what follows"))
        said = server.link.data[1].removesuffix(b"what follows")
        expected = Hello(native.VERSION, "test", b"s" * 16, 5, b"secret", [b"former"], True, 9, "run", 3, 7, True)
        assert decode_hello(said[4:]) == expected
        client.close()


@in_loop
@pytest.mark.parametrize(
    "bad",
    [
        frame("no hello"),
        (HELLO_BYTES + 1).to_bytes(4, "little"),
        frame(Hello(native.VERSION, "test", run="another", scope=3)),
        frame(Hello(native.VERSION, "test", run="run", scope=2)),
    ],
)
async def test_a_malformed_hello_ends_its_connection(bad: bytes) -> None:
    async with relaying() as (relay, server):
        client = await Client.dial(relay.rounds.open(RoundPortName("run", 3, None)))
        client.writer.write(bad)
        assert await client.ends() == b""
        assert not server.link.data and relay.upstream.channels == 0


@in_loop
async def test_a_hello_that_names_the_round_itself_passes() -> None:
    async with relaying() as (relay, server):
        client = await Client.dial(relay.rounds.open(RoundPortName("run", 3, None)))
        client.writer.write(frame(Hello(native.VERSION, "test", run="run", scope=3)))
        await server.until(lambda: server.link.data)
        assert decode_hello(server.link.data[1][4:]).scope == 3
        client.close()
