"""The server's TLS transport: with clients of the standard library and of OpenSSL, on asyncio and on uvloop."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import ssl
import struct
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from tests.raw_peer import AMPLE_S, MIB, until
from tests.security.certs import certificate, node
from tests.security.plain_user import FakeTransport, PlainUser, TlsServer, serving
from tests.security.tls_ends import MemoryEnd
from tests.security.tls_server import check_echoes, peak_memory, read_exactly

from rallypoint.client.tls_socket import wrap
from rallypoint.deadline import Deadline
from rallypoint.readiness import wait_writable
from rallypoint.security.credentials import Credentials
from rallypoint.security.tls import ServerTls, client_context, tls_error
from rallypoint.server.connections.tls import PIECE_BYTES, TURN_BYTES, TlsTransport

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
LENGTH = struct.Struct("<I")
ALERT = 21
"""The first byte of an alert."""

Loop = Callable[[], asyncio.AbstractEventLoop]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificate(tmp_path_factory.mktemp("tls") / "node")


@pytest.fixture(scope="module")
def server(place: Path) -> ssl.SSLContext:
    return ServerTls(node(place)).context()


@pytest.fixture
def client(place: Path) -> ssl.SSLContext:
    return client_context(Credentials(tls_ca=str(place / "ca.pem")))


@pytest.fixture(params=LOOPS)
def loop(request: pytest.FixtureRequest) -> Loop:
    return LOOPS[request.param]


def dial(served: TlsServer, client: ssl.SSLContext) -> ssl.SSLSocket:
    plain = socket.create_connection(served.address, AMPLE_S)
    return client.wrap_socket(plain, server_hostname="localhost", suppress_ragged_eofs=False)


def echo(user: PlainUser, data: bytes) -> None:
    user.transport.write(data)


def collect(user: PlainUser, data: bytes) -> None:
    user.received += data


def on_plain(served: TlsServer, data: bytes) -> bytes:
    """Send bytes that are not TLS, or only look like it; return what comes back before the end."""
    with socket.create_connection(served.address, AMPLE_S) as sock:
        sock.sendall(data)
        answer = b""
        try:
            while more := sock.recv(65536):
                answer += more
        except ConnectionError:
            pass
        return answer


# Bytes


def test_an_echo(server: ssl.SSLContext, client: ssl.SSLContext, loop: Loop) -> None:
    with serving(echo, server, loop) as served, dial(served, client) as sock:
        for size in (1, 100, 16383, 16384):
            value = os.urandom(size)
            sock.sendall(value)
            assert read_exactly(sock, size) == value
        user = served.user()
        assert user.transport.get_extra_info("peername") == sock.getsockname()
        assert user.transport.get_extra_info("ssl_object").version() == sock.version() == "TLSv1.3"
        assert user.transport.get_extra_info("nothing", 7) == 7


def test_large_writes_arrive_whole(server: ssl.SSLContext, client: ssl.SSLContext, loop: Loop) -> None:
    parts = [os.urandom(size) for size in (0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 0, 5 * MIB + 3)]

    def answer(user: PlainUser, _: bytes) -> None:
        user.transport.writelines(parts)
        user.transport.write(b"")
        user.transport.write(b"end")

    with serving(answer, server, loop) as served, dial(served, client) as sock:
        sock.sendall(b"?")
        whole = b"".join(parts) + b"end"
        assert read_exactly(sock, len(whole)) == whole


def test_large_requests_arrive_whole(server: ssl.SSLContext, client: ssl.SSLContext, loop: Loop) -> None:
    size = 240 * MIB
    piece = os.urandom(MIB)

    def take(user: PlainUser, data: bytes) -> None:
        counted[0] += len(data)
        digest.update(data)
        if counted[0] == size:
            user.transport.write(digest.digest())

    counted, digest = [0], hashlib.md5()
    with serving(take, server, loop) as served, dial(served, client) as sock, peak_memory() as grown:
        for _ in range(size // MIB):
            sock.sendall(piece)
        expected = hashlib.md5()
        for _ in range(size // MIB):
            expected.update(piece)
        assert read_exactly(sock, 16) == expected.digest()
        assert grown() < 32 * MIB


def test_many_threads_write_while_one_reads(server: ssl.SSLContext, client: ssl.SSLContext, loop: Loop) -> None:
    """Both of our ends: the client's socket and the server's transport."""
    with serving(echo, server, loop) as served:
        plain = socket.create_connection(served.address, AMPLE_S)
        with wrap(plain, client, "localhost", Deadline(AMPLE_S)) as sock:
            check_echoes(sock, threads=6, each=50)


def test_a_reply_to_a_slow_reader_takes_little_memory(
    server: ssl.SSLContext, client: ssl.SSLContext, loop: Loop
) -> None:
    size = 240 * MIB
    data = os.urandom(MIB) * (size // MIB)

    def answer(user: PlainUser, _: bytes) -> None:
        user.transport.writelines((data[:1], data))

    with serving(answer, server, loop) as served, dial(served, client) as sock, peak_memory() as grown:
        sock.sendall(b"?")
        user = served.user()
        until(lambda: served.call(lambda: list(user.told)), lambda told: told == ["pause"])
        # The socket's buffers have some of it; everything else is still plain, and counts.
        assert served.call(user.transport.get_write_buffer_size) > size - 16 * MIB
        digest, left = hashlib.md5(), size + 1
        while left:
            more = sock.recv(min(left, 4096))
            digest.update(more)
            left -= len(more)
        expected = hashlib.md5(data[:1])
        expected.update(data)
        assert digest.digest() == expected.digest()
        assert served.call(lambda: (user.told, user.transport.get_write_buffer_size())) == (["pause", "resume"], 0)
        assert grown() < 32 * MIB


def test_reading_may_be_paused(server: ssl.SSLContext, client: ssl.SSLContext, loop: Loop) -> None:
    def take(user: PlainUser, data: bytes) -> None:
        user.received += data
        if len(user.received) == len(data):
            user.transport.pause_reading()
            user.transport.write(b"!")

    with serving(take, server, loop) as served, dial(served, client) as sock, ThreadPoolExecutor(1) as pool:
        sock.sendall(b"first")
        assert read_exactly(sock, 1) == b"!"
        user = served.user()
        before = served.call(lambda: len(user.received))
        writing = pool.submit(sock.sendall, bytes(32 * MIB))  # more than the buffers take
        until(lambda: wait_writable(sock, timeout_s=0), lambda writable: not writable)
        assert served.call(lambda: len(user.received)) == before == 5 and not writing.done()
        served.call(user.transport.resume_reading)
        writing.result(AMPLE_S)
        until(lambda: served.call(lambda: len(user.received)), lambda size: size == 32 * MIB + 5)


# The end


@pytest.mark.parametrize("size", [0, 1, 10 * MIB])
def test_closing_sends_everything_first_and_says_so(
    size: int, server: ssl.SSLContext, client: ssl.SSLContext, loop: Loop
) -> None:
    data = os.urandom(size)

    def answer(user: PlainUser, _: bytes) -> None:
        user.transport.write(data)
        user.transport.close()
        assert user.transport.is_closing()
        user.transport.close()

    with serving(answer, server, loop) as served, dial(served, client) as sock:
        sock.sendall(b"?")
        assert read_exactly(sock, size) == data
        assert sock.recv(1) == b""  # by a close_notify: otherwise it raises
        assert served.user().lost.result(AMPLE_S) is None


def test_what_is_received_after_closing_is_ignored(server: ssl.SSLContext, client: ssl.SSLContext, loop: Loop) -> None:
    def answer(user: PlainUser, data: bytes) -> None:
        user.received += data
        user.transport.write(bytes(32 * MIB))
        user.transport.close()

    with serving(answer, server, loop) as served, dial(served, client) as sock:
        sock.sendall(b"?")
        read_exactly(sock, 1)
        sock.sendall(b"more")
        read_exactly(sock, 32 * MIB - 1)
        assert sock.recv(1) == b""
        user = served.user()
        user.lost.result(AMPLE_S)
        assert user.received == b"?"


def test_an_abort_does_not_wait(server: ssl.SSLContext, client: ssl.SSLContext, loop: Loop) -> None:
    def answer(user: PlainUser, _: bytes) -> None:
        user.transport.write(bytes(64 * MIB))
        user.transport.abort()

    with serving(answer, server, loop) as served, dial(served, client) as sock:
        sock.sendall(b"?")
        served.user().lost.result(AMPLE_S)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            read_exactly(sock, 64 * MIB)


def test_a_client_that_closes_without_a_close_notify(
    server: ssl.SSLContext, client: ssl.SSLContext, loop: Loop
) -> None:
    with serving(collect, server, loop) as served:
        with dial(served, client) as sock:
            sock.sendall(b"last")
        user = served.user()
        user.lost.result(AMPLE_S)
        assert user.received == b"last" and not user.dropped.done()


def test_a_client_that_closes_with_a_close_notify(server: ssl.SSLContext, client: ssl.SSLContext, loop: Loop) -> None:
    with serving(collect, server, loop) as served:
        with dial(served, client) as sock:
            sock.sendall(b"last")
            sock.unwrap().close()  # returns when the server has said so, too
        user = served.user()
        assert user.lost.result(AMPLE_S) is None
        assert user.received == b"last" and not user.dropped.done()


@pytest.mark.parametrize("politely", [True, False])
@pytest.mark.parametrize("size", [1, 10 * MIB])
def test_a_client_that_ends_its_requests_gets_its_replies(
    politely: bool, size: int, server: ssl.SSLContext, client: ssl.SSLContext, loop: Loop
) -> None:
    """As `curl` and pipes of a shell do: the request and the end arrive together."""
    with serving(lambda user, _: user.transport.write(bytes(size)), server, loop) as served:
        with socket.create_connection(served.address, AMPLE_S) as sock:
            end = MemoryEnd(client, "localhost")
            end.go_on()
            while not end.shaken:
                sock.sendall(end.give())
                end.take(sock.recv(65536))
            sock.sendall(end.give() + end.seal(b"?") + (end.end() if politely else b""))
            sock.shutdown(socket.SHUT_WR)
            while more := sock.recv(1 << 20):
                end.take(more)
            assert len(end.data) == size
        assert served.user().lost.result(AMPLE_S) is None


def test_a_client_that_vanishes_leaves_nothing_behind(
    server: ssl.SSLContext, client: ssl.SSLContext, loop: Loop
) -> None:
    with serving(lambda user, _: user.transport.write(bytes(64 * MIB)), server, loop) as served:
        sock = dial(served, client)
        sock.sendall(b"?")
        read_exactly(sock, MIB)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
        user = served.user()
        user.lost.result(AMPLE_S)
        told = list(user.told)
        assert served.call(user.transport.get_write_buffer_size) == 0
        served.call(user.transport.close)
        assert served.call(lambda: user.told) == told  # nothing more after the end


def test_an_http_client_is_content(server: ssl.SSLContext, client: ssl.SSLContext, loop: Loop) -> None:
    """The end of the body is the end of the connection, which must be genuine."""

    def answer(user: PlainUser, _: bytes) -> None:
        user.transport.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + bytes(MIB))
        user.transport.close()

    with serving(answer, server, loop) as served:
        url = f"https://localhost:{served.address[1]}/"
        assert urlopen(url, context=client, timeout=AMPLE_S).read() == bytes(MIB)


# What is not TLS, and who is not trusted


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x16\x03\x01\x00\x05hello", "TLS failed: unexpected message"),
        (b"\x16" + bytes(100), "TLS failed: wrong version number"),
        (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", "TLS failed: http request"),
        (b"\x16\x03\x01\xff\xff" + b"\x01" * 1000, "TLS failed: packet length too long"),
    ],
    ids=["garbage", "zeros", "http", "long"],
)
def test_garbage_instead_of_a_handshake(data: bytes, why: str, server: ssl.SSLContext, loop: Loop) -> None:
    with serving(echo, server, loop) as served:
        answer = on_plain(served, data)
        user = served.user()
        assert user.dropped.result(AMPLE_S) == why
        user.lost.result(AMPLE_S)
        assert answer[:1] in (b"", bytes([ALERT])) and len(answer) < 10


def test_a_handshake_that_is_never_completed_can_be_ended(server: ssl.SSLContext, loop: Loop) -> None:
    with serving(echo, server, loop) as served, socket.create_connection(served.address, AMPLE_S) as sock:
        sock.sendall(b"\x16\x03\x01\x00\xa0")
        user = served.user()
        until(lambda: served.call(lambda: user.transport), bool)
        served.call(user.transport.close)
        assert sock.recv(100) == b""
        assert user.lost.result(AMPLE_S) is None


def test_a_client_learns_why_it_is_not_trusted(place: Path, client: ssl.SSLContext, loop: Loop) -> None:
    strict = ServerTls(node(place, client_ca=place)).context()
    with serving(echo, strict, loop) as served, dial(served, client) as sock:
        with pytest.raises(ssl.SSLError) as caught:
            sock.recv(1)
        assert tls_error(caught.value).startswith("the server requires a certificate of its clients")
        user = served.user()
        assert user.dropped.result(AMPLE_S) == "TLS failed: peer did not return a certificate"
        user.lost.result(AMPLE_S)
        assert not user.received


def test_a_client_with_a_certificate_is_let_in(place: Path, loop: Loop) -> None:
    strict = ServerTls(node(place, client_ca=place)).context()
    with serving(echo, strict, loop) as served, dial(served, client_context(node(place))) as sock:
        sock.sendall(b"hello")
        assert read_exactly(sock, 5) == b"hello"
        found = served.user().transport.get_extra_info("ssl_object").getpeercert()
        assert found["subject"] == ((("commonName", "localhost"),),)


def test_a_client_that_does_not_trust_the_server_says_so(tmp_path: Path, server: ssl.SSLContext, loop: Loop) -> None:
    other = client_context(Credentials(tls_ca=str(certificate(tmp_path / "other") / "ca.pem")))
    with serving(echo, server, loop) as served:
        with pytest.raises(ssl.SSLCertVerificationError):
            dial(served, other)
        assert "unknown ca" in served.user().dropped.result(AMPLE_S)


def test_one_bad_client_does_not_disturb_another(server: ssl.SSLContext, client: ssl.SSLContext, loop: Loop) -> None:
    with serving(echo, server, loop) as served, dial(served, client) as sock:
        for _ in range(20):
            on_plain(served, b"\x16garbage")
            sock.sendall(b"hello")
            assert read_exactly(sock, 5) == b"hello"


# Key updates


@pytest.mark.needs("openssl")
@pytest.mark.parametrize("ask", ["k", "K"])  # "K" asks the server to change its keys as well
def test_keys_may_change_on_the_way(ask: str, place: Path, server: ssl.SSLContext, loop: Loop) -> None:
    with serving(echo, server, loop) as served:
        where = f"{served.address[0]}:{served.address[1]}"
        command = ["openssl", "s_client", "-connect", where, "-CAfile", str(place / "ca.pem"), "-msg"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        peer = subprocess.Popen(command, bufsize=0, **pipes)
        assert peer.stdin is not None and peer.stdout is not None
        output = peer.stdout
        update = b" TLS 1.3, Handshake [length 0005], KeyUpdate"

        def read_until(start: bytes) -> None:
            while not (line := output.readline()).startswith(start):
                assert line, "openssl has ended"

        try:
            read_until(b"---\n")
            for number in range(3):
                peer.stdin.write(ask.encode() + b"\n")
                read_until(b">>>" + update)
                peer.stdin.write(b"hello %d\n" % number)
                if ask == "K":
                    read_until(b"<<<" + update)
                read_until(b"hello %d\n" % number)
        finally:
            peer.kill()
            peer.communicate()
        assert not served.user().dropped.done()


# In memory: which bytes arrive when


class Ends:
    """A TlsTransport over a transport in memory, and its client."""

    def __init__(self, server: ssl.SSLContext, client: ssl.SSLContext, act: Any = echo, shaken: bool = True) -> None:
        self.transport, self.user = FakeTransport(), PlainUser(act)
        self.tls = self.user.transport = TlsTransport(self.transport, self.user, server)
        self.client = MemoryEnd(client, "localhost")
        self.client.go_on()
        while shaken and not self.client.shaken:
            self.exchange()
        if shaken:
            self.exchange()

    def exchange(self) -> None:
        """Carry what each side has to say to the other."""
        self.tls.data_received(self.client.give())
        self.receive()

    def receive(self) -> bytes:
        """Return what the client can decrypt of what was sent."""
        sent, self.transport.sent = bytes(self.transport.sent), bytearray()
        if sent:
            self.client.take(sent)
        data, self.client.data = self.client.data, b""
        return data


def test_a_whole_connection_byte_by_byte(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    ends = Ends(server, client, shaken=False)
    while not ends.client.shaken:
        for byte in ends.client.give():
            ends.tls.data_received(bytes([byte]))
        ends.receive()
    got = b""
    for byte in ends.client.give() + ends.client.seal(b"hello") + ends.client.seal(bytes(300)):
        ends.tls.data_received(bytes([byte]))
        got += ends.receive()
    assert got == b"hello" + bytes(300) and ends.client.error is None


def test_records_cut_at_every_byte(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    ends = Ends(server, client)
    size = 5 + 5 + 1 + 16  # the header of the record, the data, its kind, and the seal
    for cut in range(1, size):
        sealed = ends.client.seal(b"hello")
        assert len(sealed) == size
        ends.tls.data_received(sealed[:cut])
        assert ends.receive() == b""
        ends.tls.data_received(sealed[cut:])
        assert ends.receive() == b"hello"


def test_a_full_socket_is_not_given_more(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """What it does not take is not encrypted, counts as unsent, and is sent when it takes more."""
    ends = Ends(server, client)
    ends.transport.full = True
    for _ in range(10):
        ends.tls.write(bytes(MIB))
    assert ends.user.told == ["pause"]
    assert PIECE_BYTES < len(ends.transport.waiting) < PIECE_BYTES + 65536
    assert 10 * MIB <= ends.tls.get_write_buffer_size() < 10 * MIB + 65536

    async def read() -> None:
        for step in range(39):
            await ends.transport.take()
            assert ends.user.told == ["pause"], step
            assert len(ends.transport.waiting) < PIECE_BYTES + 65536
        await ends.transport.take()

    asyncio.run(read())
    assert ends.user.told == ["pause", "resume"] and ends.tls.get_write_buffer_size() == 0
    assert ends.receive() == bytes(10 * MIB)


def test_a_long_reply_to_a_fast_reader_leaves_time_for_others(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """However much the socket takes, only so much is encrypted in one turn of the event loop."""

    async def write() -> None:
        ends = Ends(server, client)
        ends.tls.write(bytes(10 * MIB))
        ends.tls.write(b"end")
        for turn in range(1, 11):
            assert TURN_BYTES * turn <= len(ends.transport.sent) < TURN_BYTES * turn + 65536 * turn
            assert ends.user.told == ["pause"] and ends.tls.get_write_buffer_size() == (10 - turn) * MIB + 3
            await asyncio.sleep(0)
        assert ends.user.told == ["pause", "resume"] and ends.tls.get_write_buffer_size() == 0
        assert ends.receive() == bytes(10 * MIB) + b"end"

    asyncio.run(write())


def test_small_writes_to_a_full_socket_wait_as_well(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    ends = Ends(server, client)
    ends.transport.full = True
    values = [b"%d," % number for number in range(30_000)]
    for value in values:
        ends.tls.write(value)
    assert ends.user.told == ["pause"] and len(ends.transport.waiting) < 2 * 65536

    async def read() -> None:
        while ends.user.told != ["pause", "resume"]:
            await ends.transport.take()
        await ends.transport.take()

    asyncio.run(read())
    assert ends.receive() == b"".join(values)


def test_what_is_written_before_the_handshake_is_sent_after_it(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    ends = Ends(server, client, shaken=False)
    ends.tls.write(b"welcome")
    assert not ends.transport.sent and ends.tls.get_write_buffer_size() == 7
    got = b""
    while not got:
        ends.tls.data_received(ends.client.give())
        got = ends.receive()
    assert got == b"welcome" and ends.tls.get_write_buffer_size() == 0


def test_a_close_while_the_socket_is_full_waits_for_it(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    ends = Ends(server, client)
    ends.transport.full = True
    ends.tls.write(bytes(MIB))
    ends.tls.close()
    assert ends.tls.is_closing() and not ends.transport.closed

    async def read() -> None:
        while not ends.transport.closed:
            await ends.transport.take()

    asyncio.run(read())
    ends.transport.sent += ends.transport.waiting
    assert ends.receive() == bytes(MIB) and ends.client.ended


def test_nothing_is_written_to_a_closed_socket(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    for end in ("close", "abort"):
        ends = Ends(server, client)
        getattr(ends.tls, end)()
        assert ends.transport.closed and ends.transport.aborted is (end == "abort")
        ends.tls.write(b"late")
        ends.tls.writelines([b"late"])
        ends.tls.pause_reading()
        ends.tls.resume_reading()
        ends.tls.close()
        ends.tls.data_received(ends.client.seal(b"late"))
        assert ends.receive() == b""


def test_after_the_end_the_user_is_told_nothing(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    async def lose() -> None:
        ends = Ends(server, client)
        ends.transport.full = True
        ends.tls.write(bytes(MIB))
        assert ends.user.told == ["pause"] and ends.transport.waiting
        await ends.transport.take()  # the socket would take more, and then is gone
        ends.transport.abort()
        ends.tls.connection_lost(None)
        ends.tls.close()
        ends.tls.resume_writing()
        await asyncio.sleep(0)
        assert ends.user.told == ["pause"] and ends.tls.get_write_buffer_size() == len(ends.transport.waiting)

    asyncio.run(lose())


def test_a_user_may_drop_the_connection_while_it_is_told_to_pause(
    server: ssl.SSLContext, client: ssl.SSLContext
) -> None:
    ends = Ends(server, client)
    ends.transport.full = True
    ends.user.pause_writing = lambda: ends.user.drop("too much memory")  # type: ignore[method-assign]
    ends.tls.write(bytes(4 * MIB))
    assert ends.transport.aborted and ends.user.dropped.result(0) == "too much memory"
    assert len(ends.transport.waiting) < 2 * PIECE_BYTES


def test_a_changed_byte_ends_the_connection(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    ends = Ends(server, client)
    sealed = bytearray(ends.client.seal(b"hello"))
    sealed[-1] ^= 1
    ends.tls.data_received(bytes(sealed))
    assert "bad record mac" in ends.user.dropped.result(0).replace("decryption failed or ", "")
    assert ends.transport.closed and ends.receive() == b""


@pytest.fixture(scope="module")
def anyone(place: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    return ServerTls(node(place)).context(), client_context(Credentials(tls_ca=str(place / "ca.pem")))


@given(data=st.data())
def test_no_bytes_do_worse_than_end_the_connection(
    anyone: tuple[ssl.SSLContext, ssl.SSLContext], data: st.DataObject
) -> None:
    """Before, within and after the handshake; with changes to genuine bytes, and without."""
    ends = Ends(*anyone, shaken=data.draw(st.booleans()))
    genuine = ends.client.give() if not ends.client.shaken else ends.client.seal(b"hello" * 10)
    start, end = sorted(data.draw(st.integers(0, len(genuine))) for _ in range(2))
    said = genuine[:start] + data.draw(st.binary(max_size=40)) + genuine[end:]
    cut = data.draw(st.integers(0, len(said)))
    for part in (said[:cut], said[cut:]):
        if part and not ends.transport.closed:
            ends.tls.data_received(part)
    assert ends.user.dropped.done() == ends.transport.aborted


def test_nobody_waits_for_ever(server: ssl.SSLContext, client: ssl.SSLContext, loop: Loop) -> None:
    """Many clients at once, each of which ends in its own way."""

    def use(number: int) -> None:
        with dial(served, client) as sock:
            sock.sendall(b"x" * 1000)
            read_exactly(sock, 1000)
            if number % 3 == 0:
                sock.unwrap().close()
            elif number % 3 == 1:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with serving(echo, server, loop) as served, ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(use, number) for number in range(60)]:
            done.result(AMPLE_S)
        for _ in range(60):
            served.user().lost.result(AMPLE_S)
