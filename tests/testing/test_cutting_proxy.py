"""The proxy itself: exact cuts, the same ones for a seed, delays and held bytes without loss, outages, and misuse."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.raw_peer import AMPLE_S, until

import rallypoint
from rallypoint.testing import DOWN, HANGS_UP, REFUSES, SILENT, UP, CuttingProxy, InProcessServer

CUTS = 30


class EchoServer:
    """Sends back what it receives; keeps the sockets of its clients."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.received = b""
        self._clients: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for sock in (self._listener, *self._clients):
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._clients.append(client)
                threading.Thread(target=self._echo, args=[client], daemon=True).start()

    def _echo(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                self.received += data
                client.sendall(data)


@pytest.fixture
def echo() -> Iterator[EchoServer]:
    with contextlib.closing(EchoServer()) as server:
        yield server


@pytest.fixture
def proxy(echo: EchoServer) -> Iterator[CuttingProxy]:
    with CuttingProxy(echo.port) as proxy:
        yield proxy


def dial(proxy: CuttingProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), AMPLE_S)


def read_all(sock: socket.socket) -> bytes:
    """Read to the end, or to the reset that a cut with unread bytes becomes."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while piece := sock.recv(65536):
            data += piece
    return data


def read(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += sock.recv(size - len(data))
    return data


@pytest.mark.parametrize("size", [0, 1, 7, 99, 100])
def test_a_connection_is_cut_after_exactly_so_many_bytes(size: int, proxy: CuttingProxy, echo: EchoServer) -> None:
    with dial(proxy) as sock:
        sock.sendall(b"x")
        assert sock.recv(1) == b"x"
        proxy.cut_after(DOWN, size)
        sock.sendall(b"y" * 100)
        assert read_all(sock) == b"y" * size
    assert proxy.was_cut.wait(AMPLE_S) and proxy.passed[DOWN] == 1 + size
    with dial(proxy) as sock:  # once
        sock.sendall(b"z" * 1000)
        assert len(read(sock, 1000)) == 1000
    assert proxy.connections == 2


def test_the_server_receives_no_byte_after_the_cut(proxy: CuttingProxy, echo: EchoServer) -> None:
    with dial(proxy) as sock:
        proxy.cut_after(UP, 5)
        sock.sendall(b"0123456789")
        read_all(sock)
    assert proxy.was_cut.wait(AMPLE_S) and proxy.passed[UP] == 5
    assert b"01234".startswith(echo.received)


def test_a_cut_that_was_disarmed_does_not_happen(proxy: CuttingProxy) -> None:
    with dial(proxy) as sock:
        proxy.cut_after(UP, 50)
        proxy.disarm()
        sock.sendall(b"x" * 100)
        assert len(read(sock, 100)) == 100


def cuts_of(seed: int, port: int) -> list[int]:
    """Return after how many bytes each of some random cuts happened; the other direction may be some bytes behind."""
    sizes: list[int] = []
    with CuttingProxy(port) as proxy:
        proxy.cut_randomly(seed, 100)
        while len(sizes) < CUTS:
            before = proxy.passed[UP] + proxy.passed[DOWN]
            with dial(proxy) as sock, contextlib.suppress(OSError):
                while True:
                    sock.sendall(b"x")
                    if not sock.recv(1):
                        break
            sizes.append(proxy.passed[UP] + proxy.passed[DOWN] - before)
        proxy.disarm()
        with dial(proxy) as sock:
            sock.sendall(b"x" * 1000)
            assert len(read(sock, 1000)) == 1000
    return sizes


def test_the_seed_decides_where_the_cuts_are(echo: EchoServer) -> None:
    sizes, again, others = (cuts_of(seed, echo.port) for seed in (1, 1, 2))
    assert max(abs(one - other) for one, other in zip(sizes, again, strict=True)) <= 10
    assert max(abs(one - other) for one, other in zip(sizes, others, strict=True)) > 20


def test_a_client_survives_random_cuts() -> None:
    with (
        InProcessServer() as server,
        CuttingProxy(server.url) as proxy,
        rallypoint.connect(proxy.url, timeout=AMPLE_S) as store,
    ):
        proxy.cut_randomly(3, 400)
        for count in range(1, 200):
            assert store.add("n", 1) == count
        assert proxy.connections > 10


def seen_by_a_client(proxy: CuttingProxy) -> str:
    try:
        with dial(proxy) as sock:
            sock.settimeout(0.1)
            return "an answer" if sock.recv(1) else HANGS_UP
    except ConnectionRefusedError:
        return REFUSES
    except ConnectionResetError:
        return HANGS_UP
    except TimeoutError:
        return SILENT


@pytest.mark.parametrize("how", [REFUSES, HANGS_UP, SILENT])
def test_a_proxy_that_is_down(how: str, proxy: CuttingProxy) -> None:
    with dial(proxy) as old:
        old.sendall(b"x")
        assert old.recv(1) == b"x"
        proxy.go_down(how)
        assert read_all(old) == b""
    assert seen_by_a_client(proxy) == how
    proxy.come_back()
    with dial(proxy) as sock:
        sock.sendall(b"x")
        assert sock.recv(1) == b"x"


def test_nobody_else_gets_the_port_in_an_outage(proxy: CuttingProxy) -> None:
    """Neither another test, nor a client that tries to reconnect and would be given it as its own port."""
    proxy.go_down(REFUSES)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", proxy.port))
    proxy.come_back()


def test_refusing_leaves_existing_connections_alone(proxy: CuttingProxy) -> None:
    with dial(proxy) as old:
        old.sendall(b"x")
        assert old.recv(1) == b"x"
        proxy.refusing = True
        with dial(proxy) as sock:
            assert read_all(sock) == b""
        old.sendall(b"y")
        assert old.recv(1) == b"y"


def test_held_bytes_are_released_in_order(proxy: CuttingProxy) -> None:
    with dial(proxy) as sock:
        proxy.hold()
        for number in range(50):
            sock.sendall(b"%03d" % number)
        assert proxy.holding.wait(AMPLE_S)
        sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            sock.recv(1)
        sock.settimeout(AMPLE_S)
        proxy.release()
        assert read(sock, 150) == b"".join(b"%03d" % number for number in range(50))


def test_a_stop_ends_everything(echo: EchoServer) -> None:
    before = threading.active_count()
    proxy = CuttingProxy(echo.port)
    socks = [dial(proxy) for _ in range(5)]
    proxy.hold(UP)
    for sock in socks:
        sock.sendall(b"x")
    assert proxy.holding.wait(AMPLE_S)
    proxy.stop()
    proxy.stop()
    for sock in socks:
        assert read_all(sock) == b""
        sock.close()
    with pytest.raises(ConnectionRefusedError):
        dial(proxy)
    with pytest.raises(ValueError, match="stopped> cannot come back"):
        proxy.come_back()
    until(threading.active_count, lambda count: count <= before + 5)  # the five of the echo server


def test_a_delay_counts_in_each_direction_and_loses_nothing(proxy: CuttingProxy) -> None:
    proxy.delay(0.1)
    with dial(proxy) as sock:
        began_at = time.monotonic()
        for number in range(100):
            sock.sendall(b"%03d" % number)
        assert read(sock, 300) == b"".join(b"%03d" % number for number in range(100))
        assert time.monotonic() - began_at >= 0.2
        proxy.delay(0)
        sock.sendall(b"x")
        assert sock.recv(1) == b"x"


@pytest.mark.parametrize(
    ("upstream", "error", "says"),
    [
        (True, TypeError, "upstream must be a port"),
        (None, TypeError, "upstream must be a port"),
        ("tcp://127.0.0.1", ValueError, "has no port"),
        ("192.0.2.1:80", ValueError, r"192\.0\.2\.1:80 is not on loopback: pass allow_remote=True"),
        ("tcp://127.0.0.1:x", ValueError, "x"),
    ],
)
def test_a_bad_upstream_is_named(upstream: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        CuttingProxy(upstream)


def test_bad_arguments_are_named(proxy: CuttingProxy) -> None:
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: proxy.cut_after("left", 1), "way must be 'up' or 'down', not 'left'"),
        (lambda: proxy.cut_after(UP, -1), "size must be at least 0 bytes, got -1"),
        (lambda: proxy.cut_randomly(1, 0), "most must be at least 1"),
        (lambda: proxy.go_down("dead"), "how must be 'refuses', 'hangs up' or 'silent', not 'dead'"),
        (lambda: proxy.hold("both"), "way must be"),
        (lambda: proxy.delay(-1), "delay must not be negative"),
        (lambda: proxy.redirect("192.0.2.1:80"), "not on loopback"),
    ]
    for call, says in wrong:
        with pytest.raises(ValueError, match=says):
            call()
    for call, name in ((lambda: proxy.cut_after(UP, 1.5), "size"), (lambda: proxy.cut_randomly(1, "9"), "most")):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=f"{name} must be a number of bytes, not"):
            call()
