"""Calls to one member over real sockets: deadlines, silence, lost and shared connections, streams, TLS.

The servers are in the same event loop (h2_server.py), so a test can wait until a server has received something.
Deadlines that must expire are short; the others are `AMPLE_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from h2.events import PingAckReceived
from hypothesis import given, settings
from hypothesis import strategies as some
from tests.etcd.h2_server import HEADERS, Request, RpcServer, echo, goaway, message, trailers
from tests.etcd.test_lookup import certificates
from tests.event_loop import in_loop
from tests.ports import reserve_port
from tests.raw_peer import AMPLE_S, MIB

from rallypoint import net
from rallypoint.deadline import Deadline
from rallypoint.etcd.address import Access
from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.rpc import connection as rpc_connection
from rallypoint.etcd.rpc.channel import RpcChannel
from rallypoint.etcd.rpc.http2 import STREAM_WINDOW
from rallypoint.etcd.rpc.status import Code, RpcError
from rallypoint.etcd.tls import tls_context

SOON_S = 0.4
"""A deadline that expires, and is long enough to detect a silent connection."""

METHOD = "/etcdserverpb.KV/Range"


@contextlib.asynccontextmanager
async def serving(
    handle: Callable[[Request], object], tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[RpcServer, RpcChannel]]:
    """Run a server, and a channel to it."""
    async with RpcServer(handle, tls) as server:
        with calling(server.endpoint) as channel:
            yield server, channel


@contextlib.contextmanager
def calling(endpoint: net.Endpoint, tls: ssl.SSLContext | None = None) -> Iterator[RpcChannel]:
    """Open a channel, and close it."""
    channel = RpcChannel(endpoint, tls)
    try:
        yield channel
    finally:
        channel.close()


async def call(channel: RpcChannel, request: bytes = b"x", timeout_s: float = AMPLE_S) -> bytes:
    return await channel.unary(METHOD, request, timeout_s)


def begin(channel: RpcChannel, request: bytes = b"x", timeout_s: float = AMPLE_S) -> asyncio.Task[bytes]:
    return asyncio.ensure_future(call(channel, request, timeout_s))


async def failure(work: Coroutine[Any, Any, Any] | asyncio.Task[Any]) -> tuple[int, str]:
    """Return how a call failed."""
    with pytest.raises(RpcError) as caught:
        await work
    return caught.value.code, caught.value.why


def keep(request: Request) -> None:
    """Answer nothing yet."""


def unless(held: bytes) -> Callable[[Request], None]:
    """Answer every call but one."""
    return lambda request: None if request.body == held else echo(request)


# Calls


@in_loop
async def test_requests_and_answers_of_any_size() -> None:
    async with serving(echo) as (server, channel):
        for size in (0, 1, 16_379, 65_531, 3 * MIB):
            body = bytes(range(251)) * (size // 251 + 1)
            assert await call(channel, body[:size]) == body[:size]
        assert len(server.connections) == 1
        assert {request.path for request in server.requests} == {METHOD}


@in_loop
async def test_a_large_answer_arrives() -> None:
    body = bytes(range(256)) * (10 * MIB // 256)
    async with serving(lambda request: request.answer(body)) as (_, channel):
        assert await call(channel) == body


@in_loop
async def test_many_calls_at_once_share_one_connection_and_are_answered_in_any_order() -> None:
    async with serving(keep) as (server, channel):
        tasks = [begin(channel, b"%d" % at * 1000) for at in range(100)]
        await server.until(lambda: len(server.requests) == 100)
        for request in sorted(server.requests, key=lambda request: request.stream * 7919 % 101):
            echo(request)
        assert await asyncio.gather(*tasks) == [b"%d" % at * 1000 for at in range(100)]
        assert len(server.connections) == 1


@in_loop
async def test_a_refusal_has_its_code_and_reason_and_harms_nobody() -> None:
    async with serving(unless(b"bad")) as (server, channel):
        task = begin(channel, b"bad")
        await server.until(lambda: server.requests)
        request = server.requests[0]
        request.peer.h2.send_headers(request.stream, [*HEADERS, *trailers(5, "lease: nöt found")], end_stream=True)
        request.connection.flush()
        assert await failure(task) == (5, "lease: nöt found")
        assert await call(channel) == b"x"
        assert len(server.connections) == 1


MALFORMED = {
    "no message": b"",
    "half a message": message(b"whole")[:-1],
    "more than a message": message(b"whole") + b"\0",
    "two messages": message(b"one") + message(b"two"),
    "a compressed message": b"\1" + message(b"whole")[1:],
}


@pytest.mark.parametrize("name", MALFORMED)
@in_loop
async def test_an_answer_that_is_not_one_message_is_an_error(name: str) -> None:
    def handle(request: Request) -> None:
        request.peer.begin(request.stream)
        request.peer.send(request.stream, MALFORMED[name])
        request.peer.end(request.stream)

    async with serving(handle) as (_, channel):
        code, why = await failure(call(channel))
        assert code == Code.INTERNAL and "malformed answer" in why


@in_loop
async def test_the_token_goes_with_the_call() -> None:
    async with serving(echo) as (server, channel):
        for at in range(100):  # more than are remembered
            await channel.unary(METHOD, b"", AMPLE_S, (("token", f"t{at}"),))
        seen = [dict(event.headers) for event in server.connections[0].peer.events if hasattr(event, "headers")]
        assert [headers["token"] for headers in seen] == [f"t{at}" for at in range(100)]
        assert {headers[":authority"] for headers in seen} == {str(server.endpoint)}


# Deadlines


@in_loop
async def test_a_silent_connection_is_given_up_and_the_next_call_has_a_new_one() -> None:
    async with serving(keep) as (server, channel):
        server.handle = lambda request: echo(request) if len(server.connections) == 2 else None
        other, stream = begin(channel), await channel.stream(METHOD, b"", AMPLE_S)
        assert await failure(call(channel, timeout_s=SOON_S)) == (Code.DEADLINE_EXCEEDED, "no answer in time")
        await server.until(lambda: server.connections[0].lost)
        assert await failure(other) == (Code.UNAVAILABLE, "the connection is silent")
        assert (await failure(stream.read(AMPLE_S)))[0] == Code.UNAVAILABLE
        assert await call(channel) == b"x"
        assert len(server.connections) == 2


@in_loop
async def test_a_server_that_never_says_anything_at_all() -> None:
    accepted: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(lambda _, writer: accepted.append(writer), "127.0.0.1", 0)
    with calling(net.Endpoint("127.0.0.1", silent.sockets[0].getsockname()[1])) as channel:
        for _ in range(2):
            assert (await failure(call(channel, timeout_s=SOON_S)))[0] == Code.DEADLINE_EXCEEDED
    assert len(accepted) == 2, "each call had a connection of its own"
    for writer in accepted:
        writer.close()
    silent.close()


@in_loop
async def test_an_unanswered_call_fails_alone_while_others_are_answered() -> None:
    async with serving(unless(b"held")) as (server, channel):
        stream = await channel.stream(METHOD, b"held", AMPLE_S)
        held = begin(channel, b"held", 4 * SOON_S)
        await server.until(lambda: len(server.requests) == 2)
        assert await call(channel) == b"x"
        assert await failure(held) == (Code.DEADLINE_EXCEEDED, "no answer in time")
        await server.until(lambda: server.connections[0].peer.reset)
        assert server.connections[0].peer.reset == {server.requests[1].stream}
        assert await call(channel) == b"x" and len(server.connections) == 1
        with pytest.raises(asyncio.TimeoutError):
            await stream.read(0.0)


@in_loop
async def test_a_very_short_deadline_does_not_end_the_connection_of_others() -> None:
    async with serving(keep) as (server, channel):
        other = begin(channel, b"other")
        await server.until(lambda: server.requests)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rpc_connection, "SILENT_S", AMPLE_S)
            assert (await failure(call(channel, b"short", 0.0)))[0] == Code.DEADLINE_EXCEEDED
        echo(server.requests[0])
        assert await other == b"other" and len(server.connections) == 1


@in_loop
async def test_a_cancelled_call_resets_its_stream() -> None:
    async with serving(unless(b"held")) as (server, channel):
        held = begin(channel, b"held")
        await server.until(lambda: server.requests)
        held.cancel()
        with pytest.raises(asyncio.CancelledError):
            await held
        await server.until(lambda: server.connections[0].peer.reset == {server.requests[0].stream})
        assert await call(channel) == b"x" and len(server.connections) == 1


# Connections


@in_loop
async def test_connecting_where_nothing_listens_fails_at_once() -> None:
    with calling(net.Endpoint("127.0.0.1", reserve_port())) as channel:
        assert await failure(call(channel)) == (Code.UNAVAILABLE, "refused, nothing listens there")
        assert (await failure(channel.stream(METHOD, b"", AMPLE_S)))[0] == Code.UNAVAILABLE


@pytest.mark.parametrize("host", ["nobody.invalid", "x" * 64 + ".invalid", "a..b"])
@in_loop
async def test_a_name_that_cannot_be_resolved(host: str) -> None:
    with calling(net.Endpoint(host, 2379)) as channel:
        code, why = await failure(call(channel))
        assert code == Code.UNAVAILABLE and why


@contextlib.contextmanager
def black_hole() -> Iterator[net.Endpoint]:
    """An address that neither accepts nor refuses connections: its queue is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                caller.connect(listener.getsockname())
        yield net.Endpoint("127.0.0.1", listener.getsockname()[1])


@in_loop
async def test_a_black_hole_ends_at_the_deadline() -> None:
    with black_hole() as endpoint, calling(endpoint) as channel:
        for _ in range(2):
            assert await failure(call(channel, timeout_s=0.05)) == (Code.DEADLINE_EXCEEDED, "no connection")
        assert (await failure(channel.stream(METHOD, b"", 0.05)))[0] == Code.DEADLINE_EXCEEDED


@in_loop
async def test_a_short_deadline_does_not_end_the_connecting_of_others() -> None:
    with black_hole() as endpoint, calling(endpoint) as channel:
        other = begin(channel)
        assert (await failure(call(channel, timeout_s=0.05)))[0] == Code.DEADLINE_EXCEEDED
        assert not other.done()
        channel.close()
        assert await failure(other) == (Code.CANCELLED, "the client is closed")


@in_loop
async def test_callers_share_one_connect() -> None:
    async with serving(echo) as (server, channel):
        tasks = [begin(channel, b"%d" % at) for at in range(10)]
        stream = await channel.stream(METHOD, b"stream", AMPLE_S)
        assert await asyncio.gather(*tasks) == [b"%d" % at for at in range(10)]
        assert await stream.read(AMPLE_S) == b"stream" and len(server.connections) == 1


@in_loop
async def test_a_caller_that_is_cancelled_leaves_the_connecting_to_others() -> None:
    async with serving(echo) as (server, channel):
        first, second = begin(channel, b"first"), begin(channel, b"second")
        await asyncio.sleep(0)
        first.cancel()
        assert await second == b"second" and len(server.connections) == 1
        with pytest.raises(asyncio.CancelledError):
            await first


@in_loop
async def test_closing_fails_calls_in_flight() -> None:
    closed = (Code.CANCELLED, "the client is closed")
    async with serving(keep) as (server, channel):
        task, stream = begin(channel), await channel.stream(METHOD, b"", AMPLE_S)
        reading = asyncio.ensure_future(stream.read(AMPLE_S))
        await server.until(lambda: len(server.requests) == 2)
        channel.close()
        assert [await failure(work) for work in (task, reading, call(channel))] == [closed] * 3
        await server.until(lambda: server.connections[0].lost)
        channel.close()


@in_loop
async def test_closing_while_it_connects() -> None:
    async with serving(echo) as (_, channel):
        task = begin(channel)
        await asyncio.sleep(0)
        channel.close()
        assert await failure(task) == (Code.CANCELLED, "the client is closed")


@in_loop
async def test_a_connection_that_ends_fails_its_calls_and_the_next_has_a_new_one() -> None:
    async with serving(unless(b"held")) as (server, channel):
        for end in ("close", "abort"):
            held = begin(channel, b"held")
            await server.until(lambda: server.requests and server.requests[-1].body == b"held")
            getattr(server.connections[-1].transport, end)()
            assert (await failure(held))[0] == Code.UNAVAILABLE
            assert await call(channel) == b"x"
        assert len(server.connections) == 3


@in_loop
async def test_goaway_lets_calls_finish_and_the_next_has_a_new_connection() -> None:
    async with serving(unless(b"held")) as (server, channel):
        first, second = begin(channel, b"held"), begin(channel, b"held")
        await server.until(lambda: len(server.requests) == 2)
        old = server.connections[0]
        old.peer.send_frames(goaway(1))
        old.flush()
        assert await failure(second) == (Code.UNAVAILABLE, "the member closes the connection")
        assert await call(channel) == b"x" and len(server.connections) == 2
        assert not old.lost
        echo(server.requests[0])
        assert await first == b"held"
        await server.until(lambda: old.lost)


@in_loop
async def test_goaway_on_an_idle_connection() -> None:
    async with serving(echo) as (server, channel):
        assert await call(channel) == b"x"
        server.connections[0].peer.send_frames(goaway(1))
        server.connections[0].flush()
        await server.until(lambda: server.connections[0].lost)
        assert await call(channel) == b"x" and len(server.connections) == 2


@in_loop
async def test_closing_ends_connections_that_were_draining() -> None:
    async with serving(unless(b"held")) as (server, channel):
        held = begin(channel, b"held")
        await server.until(lambda: server.requests)
        server.connections[0].peer.send_frames(goaway(2**31 - 1))
        server.connections[0].flush()
        while len(server.connections) == 1:
            assert await call(channel) == b"x"
        channel.close()
        assert await failure(held) == (Code.CANCELLED, "the client is closed")
        await server.until(lambda: all(connection.lost for connection in server.connections))


@in_loop
async def test_pings_are_answered_without_being_asked() -> None:
    async with serving(echo) as (server, channel):
        assert await call(channel) == b"x"
        connection = server.connections[0]
        for _ in range(2):
            connection.peer.h2.ping(b"abcdefgh")
            connection.peer.events.clear()
            connection.flush()
            await server.until(lambda: any(isinstance(event, PingAckReceived) for event in connection.peer.events))


# Streams


@in_loop
async def test_messages_go_both_ways_on_a_stream_until_it_ends() -> None:
    def handle(request: Request) -> None:
        if request.stream not in begun:
            begun.add(request.stream)
            request.peer.begin(request.stream)
        request.peer.send(request.stream, message(request.body.upper()))
        if request.body == b"end":
            request.peer.end(request.stream)

    begun: set[int] = set()
    async with serving(handle) as (server, channel):
        stream = await channel.stream(METHOD, b"first", AMPLE_S)
        assert await stream.read(AMPLE_S) == b"FIRST"
        with pytest.raises(asyncio.TimeoutError):
            await stream.read(0.0)
        for body in (b"", b"large" * 100_000, b"end"):
            stream.write(body)
        assert [await stream.read(AMPLE_S) for _ in range(3)] == [b"", b"LARGE" * 100_000, b"END"]
        assert [await stream.read(AMPLE_S) for _ in range(2)] == [None, None]
        stream.write(b"too late")
        stream.cancel()
        assert len(server.connections) == 1


@in_loop
async def test_an_abandoned_stream_is_reset() -> None:
    async with serving(keep) as (server, channel):
        stream = await channel.stream(METHOD, b"", AMPLE_S)
        await server.until(lambda: server.requests)
        stream.cancel()
        await server.until(lambda: server.connections[0].peer.reset)


@in_loop
async def test_a_stream_fails_after_what_came_before_is_read() -> None:
    def handle(request: Request) -> None:
        request.peer.begin(request.stream)
        request.peer.send(request.stream, message(b"one") + message(b"two"))
        request.peer.end(request.stream, 14, "no leader")

    async with serving(handle) as (_, channel):
        stream = await channel.stream(METHOD, b"", AMPLE_S)
        assert [await stream.read(AMPLE_S) for _ in range(2)] == [b"one", b"two"]
        assert await failure(stream.read(AMPLE_S)) == (14, "no leader")


@pytest.mark.parametrize(
    ("data", "why"), [(message(b"whole")[:-1], "ends within"), (b"\1" + message(b"whole")[1:], "compressed")]
)
@in_loop
async def test_a_stream_of_malformed_messages_fails(data: bytes, why: str) -> None:
    def handle(request: Request) -> None:
        request.peer.begin(request.stream)
        request.peer.send(request.stream, message(b"good") + data)
        request.peer.end(request.stream)

    async with serving(handle) as (_, channel):
        stream = await channel.stream(METHOD, b"", AMPLE_S)
        assert await stream.read(AMPLE_S) == b"good"
        code, told = await failure(stream.read(AMPLE_S))
        assert code == Code.INTERNAL and why in told


@in_loop
async def test_a_part_of_a_message_is_not_taken_for_silence() -> None:
    async with serving(keep) as (server, channel):
        stream = await channel.stream(METHOD, b"", AMPLE_S)
        await server.until(lambda: server.requests)
        request, whole = server.requests[0], message(b"in many pieces")
        request.peer.begin(request.stream)
        reading = asyncio.ensure_future(stream.read(AMPLE_S))
        for at in range(len(whole)):
            request.peer.send(request.stream, whole[at : at + 1])
            request.connection.flush()
            if at + 1 < len(whole):
                assert await call_through(server, channel), "the piece has arrived"
        assert await reading == b"in many pieces"


async def call_through(server: RpcServer, channel: RpcChannel) -> bool:
    """Make a call, after which everything that the server sent before has arrived."""
    task, count = begin(channel, b"through"), len(server.requests)
    await server.until(lambda: len(server.requests) > count)
    echo(server.requests[-1])
    return await task == b"through"


@pytest.mark.parametrize("padding", [None, 255])
@in_loop
async def test_a_stream_that_nobody_reads_holds_its_server_back(padding: int | None) -> None:
    bodies = [b"%d" % at * 50_000 for at in range(100, 200)]

    def handle(request: Request) -> None:
        if request.body != b"watch":
            return echo(request)
        request.peer.padding = padding
        request.peer.begin(request.stream)
        for body in bodies:
            request.peer.send(request.stream, message(body))
        return request.peer.end(request.stream)

    async with serving(handle) as (server, channel):
        stream = await channel.stream(METHOD, b"watch", AMPLE_S)
        await server.until(lambda: server.requests)
        peer, number = server.requests[0].peer, server.requests[0].stream
        assert await call(channel, bytes(MIB)) == bytes(MIB), "other streams continue"
        assert peer.held_back and peer.sent[number] <= STREAM_WINDOW
        read = 0
        for body in bodies:
            assert peer.sent[number] - read <= STREAM_WINDOW + len(message(body)), "a window, and a part of a message"
            assert await stream.read(AMPLE_S) == body
            read += len(message(body))
        assert await stream.read(AMPLE_S) is None


@pytest.mark.parametrize("padding", [None, 255])
@in_loop
async def test_a_message_larger_than_the_window_arrives(padding: int | None) -> None:
    body = bytes(range(256)) * (3 * STREAM_WINDOW // 256)

    def handle(request: Request) -> None:
        request.peer.padding = padding
        request.peer.begin(request.stream)
        request.peer.send(request.stream, message(b"small") + message(body) + message(body))
        request.peer.end(request.stream)

    async with serving(handle) as (_, channel):
        stream = await channel.stream(METHOD, b"", AMPLE_S)
        assert await stream.read(AMPLE_S) == b"small"
        assert [await stream.read(AMPLE_S) == body for _ in range(2)] == [True, True]
        assert await stream.read(AMPLE_S) is None


# Servers of something else


@contextlib.asynccontextmanager
async def babbling(said: bytes, hang_up: bool = False, tls: ssl.SSLContext | None = None) -> AsyncIterator[RpcChannel]:
    """Run a server that sends the same bytes to every client, and a channel to it."""
    writers = []

    def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        writer.write(said)
        if hang_up:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    with calling(net.Endpoint("127.0.0.1", server.sockets[0].getsockname()[1]), tls) as channel:
        yield channel
    for writer in writers:
        writer.close()
    server.close()


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\x15\x03\x01\x00\x02\x02\x28",
        b"SSH-2.0-OpenSSH\r\n",
        b"\0\0\0\x04\0\0\0\0\0" + b"\0\x40\x01" + bytes(6),
    ],
)
@in_loop
async def test_a_peer_that_does_not_speak_http2_is_reported_at_once(said: bytes) -> None:
    async with babbling(said) as channel:
        code, why = await failure(call(channel))
        assert code == Code.UNAVAILABLE and "HTTP/2" in why
        code, why = await failure(call(channel))
        assert code == Code.UNAVAILABLE and "HTTP/2" in why


@settings(max_examples=30)
@given(some.binary(max_size=100), some.booleans())
def test_noise_ends_a_call_with_an_error(noise: bytes, greeted: bool) -> None:
    async def body() -> None:
        async with babbling(b"\0\0\0\x04\0\0\0\0\0" * greeted + noise, hang_up=True) as channel:
            assert (await failure(call(channel)))[0] in (Code.UNAVAILABLE, Code.INTERNAL)

    asyncio.run(asyncio.wait_for(body(), AMPLE_S))


@pytest.mark.parametrize("status", ["404", "502"])
@in_loop
async def test_a_proxy_is_named_by_its_status(status: str) -> None:
    def handle(request: Request) -> None:
        request.peer.h2.send_headers(request.stream, [(":status", status), ("content-type", "text/html")])
        request.peer.h2.send_data(request.stream, b"<html>", end_stream=True)

    async with serving(handle) as (_, channel):
        assert await failure(call(channel)) == (Code.UNAVAILABLE, f"not a gRPC server: HTTP status {status}")


# TLS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of an authority, and of a server's certificate for 127.0.0.1."""
    made = tmp_path_factory.mktemp("certificates")
    certificates(made)
    return made


def server_tls(folder: Path, *protocols: str) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "own.pem", folder / "own.key")
    if protocols:
        context.set_alpn_protocols(protocols)
    return context


def client_tls(folder: Path, **options: str) -> ssl.SSLContext | None:
    return tls_context(Access(**{"ca": str(folder / "ca.pem"), **options}), "h2")


@pytest.mark.needs("openssl")
@in_loop
async def test_tls(folder: Path) -> None:
    async with serving(echo, server_tls(folder, "h2")) as (server, _):
        with calling(server.endpoint, client_tls(folder)) as channel:
            assert await call(channel, bytes(MIB)) == bytes(MIB)
            server.connections[0].transport.abort()
            await server.until(lambda: server.connections[0].lost)
            while len(server.connections) == 1:
                with contextlib.suppress(RpcError):
                    assert await call(channel) == b"x"


@pytest.mark.needs("openssl")
@pytest.mark.parametrize("protocols", [(), ("http/1.1",)])
@in_loop
async def test_tls_without_http2(folder: Path, protocols: tuple[str, ...]) -> None:
    async with serving(echo, server_tls(folder, *protocols)) as (server, _):
        with calling(server.endpoint, client_tls(folder)) as channel:
            code, why = await failure(call(channel))
            assert code == Code.UNAVAILABLE and ("HTTP/2" in why or "protocol" in why.lower())
            await server.until(lambda: all(connection.lost for connection in server.connections))


@pytest.mark.needs("openssl")
@in_loop
async def test_tls_of_another_authority(folder: Path, tmp_path: Path) -> None:
    certificates(tmp_path)
    async with serving(echo, server_tls(folder, "h2")) as (server, _):
        with calling(server.endpoint, client_tls(tmp_path)) as channel:
            code, why = await failure(call(channel))
            assert code == Code.UNAVAILABLE and "certificate verify failed" in why


@pytest.mark.needs("openssl")
@in_loop
async def test_tls_of_another_host(folder: Path) -> None:
    async with serving(echo, server_tls(folder, "h2")) as (server, _):
        with calling(net.Endpoint("localhost", server.endpoint.port), client_tls(folder)) as channel:
            code, why = await failure(call(channel))
            assert code == Code.UNAVAILABLE and "localhost" in why


@pytest.mark.needs("openssl")
@in_loop
async def test_tls_without_the_certificate_that_the_server_wants(folder: Path) -> None:
    tls = server_tls(folder, "h2")
    tls.verify_mode = ssl.CERT_REQUIRED
    tls.load_verify_locations(folder / "ca.pem")
    async with serving(echo, tls) as (server, _):
        with calling(server.endpoint, client_tls(folder)) as channel:
            code, why = await failure(call(channel))
            assert code == Code.UNAVAILABLE and why
        own = client_tls(folder, cert=str(folder / "own.pem"), key=str(folder / "own.key"))
        with calling(server.endpoint, own) as channel:
            assert await call(channel) == b"x"


@pytest.mark.needs("openssl")
@in_loop
async def test_only_one_side_speaks_tls(folder: Path) -> None:
    async with serving(echo, server_tls(folder, "h2")) as (_, channel):
        assert (await failure(call(channel)))[0] == Code.UNAVAILABLE
    async with babbling(b"HTTP/1.1 400 Bad Request\r\n\r\n", tls=client_tls(folder)) as channel:
        code, why = await failure(call(channel))
        assert code == Code.UNAVAILABLE and "SSL" in why


# Which member is asked


@in_loop
async def test_a_member_without_a_leader_is_asked_again_before_one_that_does_not_answer() -> None:
    """During an election both survivors refuse; trying the vanished member again would cost a whole attempt."""
    refusals = [2]

    def elects(request: Request) -> None:
        refusals[0] -= 1
        if refusals[0] >= 0:
            request.answer(b"", Code.UNAVAILABLE, "etcdserver: no leader")
        else:
            echo(request)

    async with RpcServer(lambda request: None) as vanished, RpcServer(elects) as survivor:
        client = EtcdClient([str(vanished.endpoint), str(survivor.endpoint)], Access(), "test")
        answer = await client.call(METHOD, b"x", Deadline(AMPLE_S))
        assert (answer.data, len(vanished.requests), len(survivor.requests)) == (b"x", 1, 3)
        client.close()
