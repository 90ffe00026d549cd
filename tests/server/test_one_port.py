"""One port for PyTorch's clients, browsers, strangers and silent peers, none of which affects another."""

from __future__ import annotations

import http.client
import re
from pathlib import Path

import pytest
from tests.raw_peer import AMPLE_S, ServerProcess
from tests.raw_peer import http as ask

from rallypoint.protocol.c10d import Opcode, encode, hello
from rallypoint.server.admission import Admission
from rallypoint.server.http import MAX_HEAD_BYTES, HttpHandler
from rallypoint.server.listener import ERRORS_KEPT, PeerLog
from rallypoint.server.server import StoreServer
from rallypoint.server.settings import Settings

GET = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
LAST = b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


def request(
    server: ServerProcess, method: str, path: str, body: bytes | None = None
) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection(*server.address, timeout=AMPLE_S)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read(), {name.lower(): value for name, value in answer.getheaders()}
    finally:
        connection.close()


# HTTP


def test_healthz(server: ServerProcess) -> None:
    status, body, headers = request(server, "GET", "/healthz")
    assert (status, body, headers["content-type"]) == (200, b"ok\n", "text/plain; charset=utf-8")
    assert request(server, "GET", "/healthz?from=probe")[0] == 200


def test_the_page_says_what_the_server_holds(server: ServerProcess) -> None:
    with server.peer() as one, server.peer() as other:
        one.set(b"/page", b"v")
        one.push(b"/page-queue", b"v")
        other.wait(b"/never")
        other.ping()
        status, body, headers = request(server, "GET", "/")
        assert status == 200 and headers["content-type"] == "text/html; charset=utf-8"
        facts = re.search(r"(\d+) connections, 0 sessions, (\d+) keys?, (\d+) waiting", body.decode())
        assert facts and int(facts[1]) >= 3 and int(facts[2]) >= 1 and int(facts[3]) >= 1
        assert b"/page" not in body, "the page shows no keys and values"
    assert server.until(lambda facts: facts["waiting"] == 0)


@pytest.mark.parametrize(("path", "status"), [("/healthz", 200), ("/", 200), ("/nothing", 404)])
def test_head_is_get_without_the_body(server: ServerProcess, path: str, status: int) -> None:
    head = request(server, "HEAD", path)
    assert head[:2] == (status, b"")
    assert int(head[2]["content-length"]) > 0


def test_unknown_paths_and_methods_get_404_and_405(server: ServerProcess) -> None:
    nothing = b"nothing here: try /, /status, /metrics, /about, /healthz or /statistics\n"
    assert request(server, "GET", "/favicon.ico")[:2] == (404, nothing)
    for method in ("PUT", "DELETE", "OPTIONS", "PATCH"):
        status, body, headers = request(server, method, "/")
        assert status == 405 and headers["allow"] == "GET, HEAD" and body
    assert ask(server.address, b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").startswith(
        b"HTTP/1.1 405"
    )


def test_a_body_is_skipped_and_the_connection_is_kept(server: ServerProcess) -> None:
    connection = http.client.HTTPConnection(*server.address, timeout=AMPLE_S)
    for body in (b"x", b"x" * 300_000, [b"chunk", b"by", b"chunk"]):
        connection.request("POST", "/", body, encode_chunked=isinstance(body, list))
        answer = connection.getresponse()
        assert answer.status == 405 and answer.read()
        sock = connection.sock
        connection.request("GET", "/healthz")
        assert connection.getresponse().read() == b"ok\n"
        assert connection.sock is sock, "a new connection was needed"
    connection.close()


def test_requests_may_follow_each_other_or_come_together(server: ServerProcess) -> None:
    one = ask(server.address, LAST)
    with server.peer(greet=False) as peer:
        kept = one.replace(b"Connection: close\r\n", b"")
        for _ in range(2):
            peer.send(GET)
            assert peer.read(len(kept)) == kept
        peer.send(GET * 500 + LAST)
        assert peer.rest() == kept * 500 + one


def test_a_request_may_come_byte_by_byte(server: ServerProcess) -> None:
    with server.peer(greet=False) as peer, server.peer() as other:
        for byte in LAST:
            peer.send(bytes((byte,)))
            other.ping()
        assert peer.rest().endswith(b"ok\n")


def test_http_1_0_is_answered_and_closed(server: ServerProcess) -> None:
    assert ask(server.address, b"GET /healthz HTTP/1.0\r\n\r\n").endswith(b"ok\n")


@pytest.mark.parametrize(
    "garbage",
    [b"\0\1\2\3\r\n\r\n", b"NONSENSE\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nhost : x\r\n\r\n"],
)
@pytest.mark.parametrize("before", [b"", GET])
def test_bad_http_gets_400_after_the_requests_before_it(server: ServerProcess, garbage: bytes, before: bytes) -> None:
    if not before and garbage.startswith(b"\0"):
        garbage = b"G" + garbage
    with server.peer() as healthy:
        answer = ask(server.address, before + garbage)
        assert answer.count(b"ok\n") == (1 if before else 0)
        assert b"HTTP/1.1 400" in answer and b"onnection: close" in answer
        healthy.work(2)


def test_a_head_that_never_ends_is_cut(server: ServerProcess) -> None:
    with server.peer(greet=False) as peer, server.peer() as healthy:
        peer.send(b"GET / HTTP/1.1\r\n")
        try:
            for _ in range(1000):
                peer.send(b"x" * 1000)
                healthy.ping()
        except ConnectionError:
            pass
        else:
            pytest.fail("it may go on for ever")


class _ByteTransport:
    """A connection as `HttpHandler` knows it, from this machine."""

    is_local, over_tls, socket = True, False, None

    def __init__(self) -> None:
        self.sent = b""
        self.closed = False
        self.errors: list[str] = []

    def send(self, data: bytes) -> None:
        self.sent += data

    def close(self) -> None:
        self.closed = True

    def log_error(self, why: str) -> None:
        self.errors.append(why)


def http_handler() -> tuple[HttpHandler, _ByteTransport]:
    transport = _ByteTransport()
    return HttpHandler(StoreServer(Settings()).site, transport, Admission()), transport  # type: ignore[arg-type]


def test_a_head_is_counted_and_limited() -> None:
    web, transport = http_handler()
    web.receive(b"GET / HTTP/1.1\r\nx: " + b"x" * 10_000)
    assert web.held > 10_000 and not transport.sent
    web.receive(b"x" * MAX_HEAD_BYTES)
    assert transport.sent.startswith(b"HTTP/1.1 431") and transport.closed
    assert [why.startswith("bad HTTP: ") for why in transport.errors] == [True]


def test_a_body_is_not_kept() -> None:
    web, transport = http_handler()
    web.receive(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n")
    for _ in range(90):
        web.receive(b"x" * 1_000_000)
        assert web.held == 0
    assert transport.sent.startswith(b"HTTP/1.1 405") and not transport.closed


def test_many_requests_at_once_are_answered_a_few_at_a_time() -> None:
    web, transport = http_handler()
    web.receive(GET * 10_000)
    assert web.blocked and web.held > 0
    assert transport.sent.count(b"ok\n") < 100, "other clients would have to wait"
    while web.blocked:
        web.receive(b"")
    assert transport.sent.count(b"ok\n") == 10_000 and web.held == 0 and not transport.closed


# Strangers


def test_strangers_are_dropped_and_logged_once_per_address(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server, server.peer() as healthy:
        strangers = [b"\x17\x03\x01\x02\x00", b"\xff", b"get / HTTP/1.1\r\n\r\n", b"\x01\0\0\0", b"SSH-2.0-x\r\n\r\n"]
        for source in ("127.0.0.2", "127.0.0.3"):
            for first in strangers:
                with server.peer(greet=False, source=source) as peer:
                    peer.send(first)
                    peer.rest()
                healthy.work(1)
        log = server.log()
        assert log.count("dropped") == 2 and log.count("127.0.0.2:") == 1 and log.count("127.0.0.3:") == 1
        assert r"unrecognized protocol; first bytes: b'\x17\x03\x01\x02\x00'" in log


def test_the_log_does_not_grow_with_the_number_of_attackers(caplog: pytest.LogCaptureFixture) -> None:
    peer_log = PeerLog()
    for number in range(ERRORS_KEPT + 50):
        host = f"2001:db8::{number:x}"
        peer_log.protocol_error(host, f"{host}:1", "nonsense")
        peer_log.protocol_error(host, f"{host}:2", "nonsense")
    assert len(caplog.records) == ERRORS_KEPT


@pytest.mark.parametrize("uvloop", [True, False])
def test_silent_connections_are_dropped_and_no_others(tmp_path: Path, uvloop: bool) -> None:
    with ServerProcess(tmp_path, uvloop, greeting_s=1.0) as server:
        with server.peer() as idle, server.peer() as busy, server.peer(greet=False) as browser:
            browser.send(b"G")
            silent = [server.peer(greet=False) for _ in range(5)]
            for peer in silent:
                assert peer.rest() == b""
                peer.close()
            busy.work(2)
            idle.ping()  # a client may be silent after its greeting
            assert browser.rest() == b""  # an unfinished HTTP request counts as silence
        assert "no complete greeting within 1 s" in server.log()


def test_a_greeting_may_be_cut_anywhere(server: ServerProcess) -> None:
    greeting = hello(5)
    for at in range(1, len(greeting)):
        with server.peer(greet=False) as peer, server.peer() as other:
            peer.send(greeting[:at])
            other.ping()
            peer.send(greeting[at:])
            assert peer.read(4) == b"\5\0\0\0"


def test_an_unknown_greeting_ends_the_connection(server: ServerProcess) -> None:
    for first in (encode(Opcode.VALIDATE, 1), b"\0\0\0\0\0\0\0\0", hello(1) + encode(Opcode.VALIDATE, 0x3C85F7CE)):
        with server.peer(greet=False) as peer:
            peer.send(first)
            assert peer.rest() in (b"", b"\1\0\0\0")
