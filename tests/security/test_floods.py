"""Floods of strangers: others are served meanwhile, and what the server holds for strangers is bounded, and ends."""

from __future__ import annotations

import contextlib
import functools
import json
import secrets
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.raw_peer import AMPLE_S, MIB, SERVE, ServerProcess, http, until
from tests.security.certs import certificate
from tests.security.protected import TOKEN
from tests.security.strangers import hello_frame, http_request
from tests.security.tls_ends import MemoryEnd

import rallypoint
from rallypoint.core import ops
from rallypoint.protocol import channels, native
from rallypoint.protocol.challenge import ANSWER_BYTES, HTTP_PREFACE
from rallypoint.security.credentials import Credentials
from rallypoint.server.denied_peers import MAX_DELAYED
from rallypoint.server.tls_queue import WINDOW

MANY, AT_ONCE = 1000, 250
KNOWN = Credentials(token=TOKEN)
WRITES = hello_frame() + native.frame(ops.Set(1, b"/forged", b"value"))


class ProtectedProcess(ServerProcess):
    """A server with the credentials of the environment, and any settings; its log must have no traceback."""

    code = SERVE.replace("type=Settings), ", "type=Settings), resolve(), ").replace(
        "import logging", "from rallypoint.security.credentials import resolve\nimport logging"
    )

    def statistics(self) -> dict[str, Any]:
        request = http_request("GET", "/statistics", f"authorization: Bearer {TOKEN}", "connection: close")
        facts: dict[str, Any] = json.loads(http(self.address, request).partition(b"\r\n\r\n")[2])
        return facts


Start = Callable[..., ProtectedProcess]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts servers with a token and TLS."""
    place = certificate(tmp_path / "tls")
    monkeypatch.setenv("RALLYPOINT_TOKEN", TOKEN)
    monkeypatch.setenv("RALLYPOINT_TLS_CERT", str(place / "node.pem"))
    monkeypatch.setenv("RALLYPOINT_TLS_KEY", str(place / "node.key"))
    with contextlib.ExitStack() as undo:
        yield lambda **settings: undo.enter_context(ProtectedProcess(tmp_path, **settings))


@contextlib.contextmanager
def flood(server: ServerProcess, kinds: list[bytes]) -> Iterator[Callable[[], None]]:
    """Make connections, `AT_ONCE` at each call, which each send one of these; keep them until the end of the block."""
    with contextlib.ExitStack() as undo:

        def more() -> None:
            for number in range(AT_ONCE):
                sock = undo.enter_context(socket.create_connection(server.address, AMPLE_S))
                with contextlib.suppress(ConnectionError):
                    sock.sendall(kinds[number % len(kinds)])

        yield more


def use(store: rallypoint.Store) -> None:
    """Do what a client does, and check it."""
    count = store.add("count", 1)
    store.set("key", str(count))
    assert store.get("key") == str(count).encode()


def statistics_after_use(store: rallypoint.Store, server: ServerProcess) -> dict[str, Any]:
    use(store)
    return server.statistics()


def has_denied(count: int, facts: dict[str, Any]) -> bool:
    return bool(facts["denied_connections"] >= count)


def check_another(server: ServerProcess) -> None:
    with rallypoint.connect(server.url, credentials=KNOWN) as another:
        use(another)


def test_failed_attempts(start: Start) -> None:
    """From the address of the client that works on: failures delay failures alone."""
    server = start()
    kinds = [preface + secrets.token_bytes(ANSWER_BYTES) + WRITES for preface in (native.PREFACE, channels.PREFACE)]
    kinds += [HTTP_PREFACE + secrets.token_bytes(ANSWER_BYTES), http_request("GET", "/", "authorization: Bearer wrong")]
    with rallypoint.connect(server.url, credentials=KNOWN) as store, flood(server, kinds) as more:
        use(store)
        before, memory = server.statistics(), server.memory()
        for batch in range(1, MANY // AT_ONCE + 1):
            more()
            use(store)
            check_another(server)
            facts = server.until(functools.partial(has_denied, batch * AT_ONCE))
            assert facts["connections"] <= before["connections"] + MAX_DELAYED + 1
        assert facts["denied_connections"] == MANY
        assert server.memory(peak=True) < memory + 32 * MIB
        until(lambda: statistics_after_use(store, server), lambda facts: facts["connections"] <= before["connections"])
        assert store.list_keys() == ["count", "key"]
    assert server.log().count("denied 127.0.0.1") == 1


def client_hello() -> bytes:
    """Return the first message of a TLS client."""
    context = ssl.create_default_context()
    end = MemoryEnd(context, "localhost")
    end.go_on()
    return end.give()


HALF = [
    b"",
    native.PREFACE[:1],
    native.PREFACE[:-1],
    native.PREFACE,
    native.PREFACE + secrets.token_bytes(ANSWER_BYTES - 1),
    channels.PREFACE,
    HTTP_PREFACE,
    b"GET / HT",
    http_request("POST", "/login", "content-length: 100") + b"code=",
    b"\x16\x03\x01\x02\x00\x01",
    client_hello(),
]
"""Greetings that are never completed."""


def test_greetings_that_are_never_completed(start: Start) -> None:
    server = start(greeting_s=3.0)
    with rallypoint.connect(server.url, credentials=KNOWN) as store, flood(server, HALF) as more:
        before, memory = server.statistics()["connections"], server.memory()
        for _ in range(MANY // AT_ONCE):
            more()
            use(store)
        check_another(server)
        until(lambda: statistics_after_use(store, server), lambda facts: facts["connections"] <= before)
        assert server.memory(peak=True) < memory + 96 * MIB, "TLS takes most of it, some 100 KiB for each connection"
        assert server.statistics()["denied_connections"] == 0


def over_tls(server: ServerProcess, place: Path) -> contextlib.AbstractContextManager[rallypoint.Store]:
    """Connect a client that asks for TLS, from the address of the strangers."""
    known = Credentials(token=TOKEN, tls_ca=str(place / "tls" / "ca.pem"))
    return rallypoint.connect(f"tcps://127.0.0.1:{server.address[1]}", AMPLE_S, credentials=known)


def test_handshakes_that_are_never_completed(start: Start, tmp_path: Path) -> None:
    """Only a window of them begins; a client from their address does not wait behind the others."""
    server = start()
    with rallypoint.connect(server.url, credentials=KNOWN) as store, flood(server, [client_hello()]) as more:
        use(store)
        memory = server.memory()
        for _ in range(MANY // AT_ONCE):
            more()
            use(store)
        until(lambda: statistics_after_use(store, server), lambda facts: facts["connections"] > MANY)
        assert server.memory(peak=True) < memory + 32 * MIB, "TLS takes some 100 KiB for each connection that begins it"
        with over_tls(server, tmp_path) as another:
            use(another)


def test_failed_attempts_over_tls(start: Start, tmp_path: Path) -> None:
    """Those after the first begin slowly, and many are closed before they do; a client from their address gets in."""
    server = start()
    context = ssl.create_default_context(cafile=str(tmp_path / "tls" / "ca.pem"))
    with rallypoint.connect(server.url, credentials=KNOWN) as store:
        for _ in range(WINDOW):
            plain = socket.create_connection(server.address, AMPLE_S)
            with context.wrap_socket(plain, server_hostname="localhost") as sock:
                sock.sendall(native.PREFACE + secrets.token_bytes(ANSWER_BYTES))
        server.until(functools.partial(has_denied, WINDOW))
        with flood(server, [client_hello()]) as more:
            more()
            facts = server.until(lambda facts: bool(facts["refused_handshakes"]))
            use(store)
            with over_tls(server, tmp_path) as another:
                use(another)
        assert facts["denied_connections"] == WINDOW
    assert server.log().count("denied 127.0.0.1") == 1


def test_strangers_who_take_all_connections_lose_them_again(start: Start) -> None:
    server = start(greeting_s=3.0, max_connections=100)
    with rallypoint.connect(server.url, credentials=KNOWN) as store, flood(server, HALF[:1]) as more:
        more()
        use(store)
        check_another(server)  # it tries until there is room
        assert server.statistics()["refused_connections"] > 0
