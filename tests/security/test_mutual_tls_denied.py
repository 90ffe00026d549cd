"""Clients that fail mutual TLS are denied as with a wrong token: counted, logged once, reported to other clients."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.hosts import hosts
from tests.raw_peer import AMPLE_S, until
from tests.security.certs import certificate, node
from tests.security.test_floods import ProtectedProcess, client_hello, has_denied

import rallypoint
from rallypoint import aio
from rallypoint.security import certificates
from rallypoint.security.credentials import Credentials

CASES = {
    "no certificate": "TLS failed: peer did not return a certificate",
    "another CA": "TLS failed: invalid certificate: ",
    "expired": "TLS failed: invalid certificate: certificate has expired",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of the server, of another CA, and an expired one of the server's CA."""
    found = tmp_path_factory.mktemp("mutual")
    server = certificate(found / "server")
    certificate(found / "another CA")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificates, "CLOCK_SKEW", datetime.timedelta(days=60))
        certificate(found / "expired", ca=server, days=-30)
    return found


def credentials_of(case: str, place: Path) -> Credentials:
    """Return the credentials of a client that verifies the server."""
    ca = str(place / "server" / "ca.pem")
    if case == "no certificate":
        return Credentials(tls_ca=ca)
    return Credentials(tls_ca=ca, tls_cert=str(place / case / "node.pem"), tls_key=str(place / case / "node.key"))


def by_blocking(port: int, known: Credentials) -> None:
    with pytest.raises(rallypoint.AuthenticationFailed):
        rallypoint.connect(f"tcps://127.0.0.1:{port}", AMPLE_S, credentials=known)


def by_asyncio(port: int, known: Credentials) -> None:
    with pytest.raises(rallypoint.AuthenticationFailed):
        asyncio.run(aio.connect(f"tcps://127.0.0.1:{port}", AMPLE_S, credentials=known))


def by_relay(port: int, known: Credentials) -> None:
    with rallypoint.Relay(f"tcps://127.0.0.1:{port}", credentials=known) as relay:
        until(relay.statistics, lambda facts: "certificate" in facts["upstream_why"])


def by_http(port: int, known: Credentials, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> None:
    context = ssl.create_default_context(cafile=known.tls_ca)
    context.maximum_version = version
    if known.tls_cert:
        context.load_cert_chain(known.tls_cert, known.tls_key)
    plain = socket.create_connection(("127.0.0.1", port), AMPLE_S)
    with plain, contextlib.suppress(OSError), context.wrap_socket(plain, server_hostname="localhost") as sock:
        sock.sendall(b"GET /statistics HTTP/1.1\r\nhost: x\r\n\r\n")
        assert not sock.recv(1)


def by_older_http(port: int, known: Credentials) -> None:
    by_http(port, known, ssl.TLSVersion.TLSv1_2)


PATHS = {path.__name__: path for path in (by_blocking, by_asyncio, by_relay, by_http, by_older_http)}


@pytest.fixture
def server(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProtectedProcess]:
    for name, value in node(place / "server", place / "server").environ().items():
        monkeypatch.setenv(name, value)
    with ProtectedProcess(tmp_path) as server:
        monkeypatch.delenv("RALLYPOINT_TLS_CLIENT_CA")
        yield server


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("case", CASES)
def test_it_is_counted_logged_and_reported(
    case: str,
    path: Callable[[int, Credentials], None],
    server: ProtectedProcess,
    place: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    port, known = server.address[1], node(place / "server")
    with caplog.at_level(logging.WARNING), rallypoint.connect(f"tcps://127.0.0.1:{port}", credentials=known) as store:
        for count in (1, 2):
            path(port, credentials_of(case, place))
            server.until(functools.partial(has_denied, count))
        store.set("key", "value")
        told = f"server at 127.0.0.1:{port} denied access to 127.0.0.1 ({CASES[case]}"
        until(lambda: caplog.text, lambda text: told in text)
    assert server.log().count(f"denied 127.0.0.1 ({CASES[case]}") == 1
    assert server.log().count("denied") == 1 and "dropped" not in server.log()


@pytest.mark.needs("netns")
def test_whoever_hangs_up_when_it_is_asked_for_a_certificate(tmp_path: Path) -> None:
    with hosts(2) as (first, stranger):
        place = certificate(tmp_path / "tls", first.address)
        known = node(place, place)
        with first.inside(), rallypoint.Server("0.0.0.0", credentials=known) as server:
            with stranger.inside(), socket.create_connection((first.address, server.port), AMPLE_S) as sock:
                sock.sendall(client_hello())
                assert sock.recv(1) == b"\x16", "the server's part, with its question"
            until(server.statistics, lambda facts: facts["denied_connections"] == 1)
