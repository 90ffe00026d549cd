"""The client's TLS socket: against TLS servers of the standard library and of OpenSSL, byte by byte, and under load."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import random
import select
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.raw_peer import AMPLE_S, MIB, until
from tests.security.certs import certificate, node
from tests.security.tls_ends import MemoryEnd
from tests.security.tls_server import LENGTH, check_echoes, peak_memory, read_exactly, serving

from rallypoint.client.blocking.socket_reader import SocketReader
from rallypoint.client.tls_socket import PIECE_BYTES, TlsSocket, wrap
from rallypoint.deadline import Deadline
from rallypoint.readiness import wait_writable
from rallypoint.security.credentials import Credentials
from rallypoint.security.tls import ServerTls, client_context, tls_error


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificate(tmp_path_factory.mktemp("tls") / "node")


@pytest.fixture
def server(place: Path) -> ssl.SSLContext:
    return ServerTls(node(place)).context()


@pytest.fixture
def client(place: Path) -> ssl.SSLContext:
    return client_context(Credentials(tls_ca=str(place / "ca.pem")))


def dial(address: tuple[str, int], context: ssl.SSLContext, name: str = "localhost") -> TlsSocket:
    return wrap(socket.create_connection(address, AMPLE_S), context, name, Deadline(AMPLE_S))


class Ends:
    """A TlsSocket, and the server's end of it in memory: `sock` is the server's plain socket."""

    def __init__(self, server: ssl.SSLContext, client: ssl.SSLContext) -> None:
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(AMPLE_S)
        self.server = MemoryEnd(server)
        with ThreadPoolExecutor(1) as pool:
            made = pool.submit(wrap, theirs, client, "localhost", Deadline(AMPLE_S))
            while not self.server.shaken:
                self.server.take(self.sock.recv(65536))
                self.sock.sendall(self.server.give())
            self.client = made.result(AMPLE_S)

    def receive(self) -> bytes:
        """Return what the client has sent, decrypted."""
        self.server.take(self.sock.recv(1 << 20))
        data, self.server.data = self.server.data, b""
        return data

    def close(self) -> None:
        self.sock.close()
        self.client.close()


@pytest.fixture
def ends(server: ssl.SSLContext, client: ssl.SSLContext) -> Iterator[Ends]:
    made = Ends(server, client)
    yield made
    made.close()


def all_of(sock: TlsSocket) -> bytes:
    """Read until the end."""
    sock.settimeout(AMPLE_S)
    parts = bytearray()
    while data := sock.recv(65536):
        parts += data
    return bytes(parts)


# Bytes


def test_it_is_a_socket_to_the_client(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    def echo(peer: ssl.SSLSocket) -> None:
        while data := peer.recv(100):
            peer.sendall(data.upper())

    with serving(echo, server) as (address, served), dial(address, client) as sock:
        assert sock.getpeername() == address and sock.getsockname()[0] == "127.0.0.1" and sock.family == socket.AF_INET
        reader = SocketReader(sock)  # type: ignore[arg-type]
        assert sock.send(b"hello") == 5
        assert reader.read(AMPLE_S) == b"HELLO"
        assert reader.read(0.0) is None
        sock.sendall(b"again")
        assert until(reader.read_soon, bool) == b"AGAIN"
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        sock.shutdown(socket.SHUT_WR)
        assert reader.read(AMPLE_S) == b""
        assert isinstance(served.exception(AMPLE_S), ssl.SSLEOFError)  # without a close_notify


def test_records_cut_at_every_byte(ends: Ends) -> None:
    for number, data in enumerate((b"x", b"hello", bytes(300))):
        sealed = ends.server.seal(data)
        for cut in range(len(sealed)):
            ends.sock.sendall(sealed[:cut])
            if cut:
                with pytest.raises(BlockingIOError, match="incomplete"):
                    ends.client.recv(100)
            ends.sock.sendall(sealed[cut:])
            assert ends.client.recv(100) == data, (number, cut)
            sealed = ends.server.seal(data)
        ends.sock.sendall(sealed)
        assert ends.client.recv(100) == data


def test_records_that_come_byte_by_byte(ends: Ends) -> None:
    got = b""
    for byte in ends.server.seal(b"one") + ends.server.seal(b"two" * 100) + ends.server.seal(b"three"):
        ends.sock.sendall(bytes([byte]))
        try:
            got += ends.client.recv(4096)
        except BlockingIOError:
            pass
    assert got == b"one" + b"two" * 100 + b"three"


@pytest.mark.parametrize("seed", range(3))
def test_records_in_any_pieces(ends: Ends, seed: int) -> None:
    chance = random.Random(seed)
    sent = [chance.randbytes(chance.choice((1, 100, 16384, 16385, 50000))) for _ in range(20)]
    sealed, got = b"".join(map(ends.server.seal, sent)), b""
    while sealed:
        size = chance.choice((1, 7, 16000, 60000))
        ends.sock.sendall(sealed[:size])
        sealed = sealed[size:]
        try:
            got += ends.client.recv(chance.choice((1, 8192, 1 << 20)))
        except BlockingIOError:
            pass
    ends.sock.close()
    assert got + all_of(ends.client) == b"".join(sent)


def test_a_read_leaves_nothing_where_poll_cannot_see_it(ends: Ends) -> None:
    """Whatever it was asked for: a reader polls before it reads."""
    ends.sock.sendall(ends.server.seal(bytes(20000)) + ends.server.seal(bytes(20000)))
    assert len(ends.client.recv(1)) == 40000
    reader = SocketReader(ends.client)  # type: ignore[arg-type]
    assert reader.read(0.0) is None


def test_data_that_comes_with_the_end_of_the_handshake_is_kept(
    server: ssl.SSLContext, client: ssl.SSLContext, place: Path
) -> None:
    """A TLS 1.2 server has the last word of the handshake, and may go on talking at once."""
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    ours, theirs = socket.socketpair()
    end = MemoryEnd(server)
    with ours, ThreadPoolExecutor(1) as pool:
        made = pool.submit(wrap, theirs, client, "localhost", Deadline(AMPLE_S))
        while not end.shaken:
            end.take(ours.recv(65536))
            ours.sendall(end.give() if not end.shaken else end.seal(b"welcome"))
        with made.result(AMPLE_S) as sock:
            assert sock.recv(100) == b"welcome"


def test_empty_and_large_writes(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    sizes = [0, 1, 16383, 16384, 16385, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 5 * MIB + 3]
    values = [os.urandom(size) for size in sizes]

    with (
        serving(lambda peer: read_exactly(peer, sum(sizes)), server) as (address, served),
        dial(address, client) as sock,
    ):
        for value in values:
            sock.sendall(value)
        assert sock.send(b"") == 0
        assert served.result(AMPLE_S) == b"".join(values)


def test_any_kind_of_bytes_is_sent(ends: Ends) -> None:
    for data in (b"abc", bytearray(b"abc"), memoryview(b"xabcx")[1:4]):
        assert ends.client.send(data) == 3  # type: ignore[arg-type]
        assert ends.receive() == b"abc"


# Many threads


def test_many_threads_write_while_one_reads(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    threads, each = 8, 60

    def echo(peer: ssl.SSLSocket) -> None:
        for _ in range(threads * each):
            head = read_exactly(peer, LENGTH.size)
            peer.sendall(head + read_exactly(peer, LENGTH.unpack(head)[0]))

    with serving(echo, server) as (address, served), dial(address, client) as sock:
        check_echoes(sock, threads, each)
        served.result(AMPLE_S)


def blocked_writer(ends: Ends) -> threading.Thread:
    """Start a thread that writes more than the server reads, and return once it waits; it ends by an OSError."""

    def write() -> None:
        with contextlib.suppress(OSError):
            ends.client.sendall(bytes(64 * MIB))

    writer = threading.Thread(target=write)
    writer.start()
    until(lambda: wait_writable(ends.client, timeout_s=0), lambda writable: not writable)
    return writer


def fill(ends: Ends, size: int) -> int:
    """Send pieces of this size until the socket is full; return how many bytes were accepted."""
    sent = 0
    try:
        while True:
            sent += ends.client.send(bytes(size), socket.MSG_DONTWAIT)
    except BlockingIOError:
        return sent


def test_a_reader_is_not_held_up_by_a_writer_that_waits(ends: Ends) -> None:
    """The server reads nothing; what it sends arrives all the same."""
    writer = blocked_writer(ends)
    for number in range(100):
        ends.sock.sendall(ends.server.seal(b"%d" % number))
        assert ends.client.recv(100) == b"%d" % number
    ends.client.shutdown(socket.SHUT_RDWR)  # as the session does, to end a writer
    writer.join(AMPLE_S)
    assert not writer.is_alive()


def test_a_large_write_to_a_slow_reader_takes_little_memory(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    size, go = 240 * MIB, threading.Event()

    def read_slowly(peer: ssl.SSLSocket) -> str:
        assert go.wait(AMPLE_S)
        digest, left = hashlib.md5(), size
        while left:
            data = peer.recv(4096)
            digest.update(data)
            left -= len(data)
        return digest.hexdigest()

    data = os.urandom(MIB) * (size // MIB)
    with serving(read_slowly, server) as (address, served), dial(address, client) as sock, peak_memory() as grown:
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(sock.sendall, data)
            until(lambda: wait_writable(sock, timeout_s=0), lambda writable: not writable)
            go.set()
            sending.result(4 * AMPLE_S)
        assert served.result(AMPLE_S) == hashlib.md5(data).hexdigest()
        assert grown() < 16 * MIB


def test_a_large_reply_is_read_in_pieces(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    size = 64 * MIB
    with serving(lambda peer: peer.sendall(bytes(size)), server) as (address, served), dial(address, client) as sock:
        sock.settimeout(AMPLE_S)
        with peak_memory() as grown:
            left = size
            while left:
                data = sock.recv(65536)
                assert data and len(data) <= 65536 + 16384
                left -= len(data)
            assert grown() < 16 * MIB
        served.result(AMPLE_S)


# Sending without waiting


def test_a_send_that_does_not_wait_fails_if_the_socket_is_full(ends: Ends) -> None:
    sent = fill(ends, 1000)
    assert sent >= 10_000
    with pytest.raises(BlockingIOError, match="full"):
        ends.client.send(b"x", socket.MSG_DONTWAIT)
    received = 0
    while received < sent:
        received += len(ends.receive())
    assert received == sent
    assert ends.client.send(b"after", socket.MSG_DONTWAIT) == 5
    assert ends.receive() == b"after"


@pytest.mark.parametrize("flags", [0, socket.MSG_DONTWAIT])
def test_a_record_that_was_sent_in_part_is_completed_by_the_next_send(ends: Ends, flags: int) -> None:
    sent = fill(ends, PIECE_BYTES)  # more than what poll means by writable
    received = 0
    poller = select.poll()
    poller.register(ends.sock, select.POLLIN)
    while poller.poll(0):
        received += len(ends.receive())
    assert 0 < received < sent, "the last record went out whole, and this test has tested nothing"
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(ends.client.send, b"next", flags)
        if flags:  # it may take several attempts
            while isinstance(done.exception(AMPLE_S), BlockingIOError):
                received += len(ends.receive())
                done = pool.submit(ends.client.send, b"next", flags)
        while received < sent + 4:
            received += len(ends.receive())
        assert done.result(AMPLE_S) == 4
    assert received == sent + 4 and ends.server.error is None


def test_a_send_that_does_not_wait_does_not_wait_for_another_thread(ends: Ends) -> None:
    writer = blocked_writer(ends)
    with pytest.raises(BlockingIOError, match="another thread is sending"):
        ends.client.send(b"ping", socket.MSG_DONTWAIT)
    ends.client.shutdown(socket.SHUT_RDWR)
    writer.join(AMPLE_S)


# The end


def test_a_close_notify_is_the_end(ends: Ends) -> None:
    ends.sock.sendall(ends.server.seal(b"last") + ends.server.end())
    assert [ends.client.recv(100) for _ in range(3)] == [b"last", b"", b""]


def test_a_close_without_a_close_notify_is_the_end_too(ends: Ends) -> None:
    ends.sock.sendall(ends.server.seal(b"last"))
    ends.sock.close()
    assert [ends.client.recv(100) for _ in range(3)] == [b"last", b"", b""]


def test_an_end_within_a_record_is_the_end(ends: Ends) -> None:
    ends.sock.sendall(ends.server.seal(b"cut off")[:-1])
    ends.sock.close()
    with pytest.raises(BlockingIOError):
        ends.client.recv(100)
    assert ends.client.recv(100) == b""


def test_changed_bytes_are_an_error(ends: Ends) -> None:
    sealed = bytearray(ends.server.seal(b"hello"))
    sealed[-1] ^= 1
    ends.sock.sendall(sealed)
    with pytest.raises(ssl.SSLError, match=r"(?i)bad.record.mac"):
        ends.client.recv(100)


def test_writing_to_a_closed_peer_is_an_error(ends: Ends) -> None:
    ends.sock.close()
    with pytest.raises(BrokenPipeError):
        ends.client.sendall(b"x")
    with pytest.raises(BrokenPipeError):
        ends.client.send(b"x", socket.MSG_DONTWAIT)


def test_closing_wakes_a_reader(ends: Ends) -> None:
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(ends.client.recv, 100)
        ends.client.shutdown(socket.SHUT_RDWR)
        assert reading.result(AMPLE_S) == b""


def test_the_timeout_is_that_of_the_socket_and_of_the_whole_read(ends: Ends) -> None:
    ends.client.settimeout(0.05)
    with pytest.raises(TimeoutError):
        ends.client.recv(100)
    sealed, stop = ends.server.seal(b"slow"), threading.Event()

    def trickle() -> None:
        for byte in sealed[:-1]:
            if stop.wait(0.02):
                return
            ends.sock.sendall(bytes([byte]))

    with ThreadPoolExecutor(1) as pool:
        trickling = pool.submit(trickle)
        with pytest.raises(TimeoutError):
            ends.client.recv(100)
        stop.set()
        trickling.result(AMPLE_S)


# The handshake


def other_server(said: bytes, handle: Callable[[socket.socket], object] = lambda _: None) -> Any:
    """Serve one connection that is not TLS: read something, and answer so."""

    def serve(listener: socket.socket) -> None:
        with listener, listener.accept()[0] as peer:
            peer.settimeout(AMPLE_S)
            peer.recv(65536)
            peer.sendall(said)
            handle(peer)

    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(AMPLE_S)
    thread = threading.Thread(target=serve, args=(listener,))
    thread.start()
    return listener.getsockname(), thread


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"-ERR unknown command\r\n", bytes(100)])
def test_a_server_that_does_not_speak_tls(said: bytes, client: ssl.SSLContext) -> None:
    address, thread = other_server(said)
    with pytest.raises(ssl.SSLError) as caught:
        dial(address, client)
    assert tls_error(caught.value) == "the server does not speak TLS"
    thread.join(AMPLE_S)


def test_a_server_that_hangs_up(client: ssl.SSLContext) -> None:
    address, thread = other_server(b"")
    with pytest.raises(ConnectionError):
        dial(address, client)
    thread.join(AMPLE_S)


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x03\x00\x7a\x02"])
def test_a_server_that_says_nothing_costs_no_longer_than_the_deadline(said: bytes, client: ssl.SSLContext) -> None:
    address, thread = other_server(said, lambda peer: peer.recv(100))
    sock = socket.create_connection(address, AMPLE_S)
    with pytest.raises(TimeoutError):
        wrap(sock, client, "localhost", Deadline(0.2))
    assert sock.fileno() == -1
    thread.join(AMPLE_S)


def test_a_certificate_that_is_not_valid_ends_it_and_the_server_is_told(
    server: ssl.SSLContext, client: ssl.SSLContext
) -> None:
    with serving(lambda peer: peer.recv(1), server) as (address, served):
        sock = socket.create_connection(address, AMPLE_S)
        with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
            wrap(sock, client, "elsewhere.example", Deadline(AMPLE_S))
        assert sock.fileno() == -1
        error = served.exception(AMPLE_S)
        assert isinstance(error, ssl.SSLError) and "alert" in str(error).lower()


@pytest.mark.parametrize("name", ["", ".", "a" * 300])
def test_an_impossible_name_closes_the_socket(name: str, client: ssl.SSLContext) -> None:
    ours, theirs = socket.socketpair()
    with ours, pytest.raises((ValueError, ssl.SSLError)):
        wrap(theirs, client, name, Deadline(AMPLE_S))
    assert theirs.fileno() == -1


def test_a_client_without_the_certificate_that_is_required_is_told_at_its_first_read(
    place: Path, client: ssl.SSLContext
) -> None:
    strict = ServerTls(node(place, client_ca=place)).context()
    with serving(lambda peer: None, strict) as (address, served), dial(address, client) as sock:
        with pytest.raises(ssl.SSLError) as caught:
            sock.recv(100)
        assert tls_error(caught.value).startswith("the server requires a certificate of its clients (--tls-cert)")
        assert isinstance(served.exception(AMPLE_S), ssl.SSLError)


def test_garbage_after_the_handshake_is_an_error(ends: Ends) -> None:
    ends.sock.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    with pytest.raises(ssl.SSLError):
        ends.client.recv(100)


# Key updates


def line_of(peer: subprocess.Popen[bytes], start: bytes) -> bytes:
    """Read what a program prints, up to a line that begins so."""
    assert peer.stdout is not None
    while not (line := peer.stdout.readline()).startswith(start):
        assert line, "it has ended"
    return line


@pytest.mark.needs("openssl")
@pytest.mark.parametrize("ask", ["k", "K"])  # "K" asks the client to change its keys as well
def test_keys_may_change_on_the_way(ask: str, place: Path, client: ssl.SSLContext) -> None:
    files = ["-cert", str(place / "node.pem"), "-key", str(place / "node.key")]
    command = ["openssl", "s_server", "-accept", "127.0.0.1:0", "-msg", *files]
    peer = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
    )
    try:
        assert peer.stdin is not None
        port = int(line_of(peer, b"ACCEPT").rpartition(b":")[2])
        with dial(("127.0.0.1", port), client) as sock:
            sock.settimeout(AMPLE_S)
            for number in range(3):
                peer.stdin.write(ask.encode() + b"\n")
                line_of(peer, b">>> TLS 1.3, Handshake [length 0005], KeyUpdate")
                peer.stdin.write(b"hello %d\n" % number)
                assert sock.recv(100) == b"hello %d\n" % number
                sock.sendall(b"answer %d\n" % number)
                if ask == "K":
                    line_of(peer, b"<<< TLS 1.3, Handshake [length 0005], KeyUpdate")
                line_of(peer, b"answer %d" % number)
    finally:
        peer.kill()
        peer.communicate()


def test_the_errors_of_incomplete_records_look_like_those_of_a_socket(ends: Ends) -> None:
    ends.sock.sendall(ends.server.seal(b"x")[:3])
    with pytest.raises(BlockingIOError) as caught:
        ends.client.recv(100)
    assert caught.value.errno == errno.EAGAIN
