"""Sessions of a protected server that are cut: they are resumed through the challenge, or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.raw_peer import AMPLE_S, RawPeer
from tests.replicated.clients import Connect, asynchronous, blocking
from tests.security.credential_files import CredentialFiles

import rallypoint
from rallypoint import AuthenticationFailed
from rallypoint.security.credentials import Credentials, new_token
from rallypoint.testing import CuttingProxy

CLIENTS = {"blocking": blocking, "asyncio": asynchronous}


@pytest.fixture(params=[False, True], ids=["token", "token and TLS"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> CredentialFiles:
    return CredentialFiles(tmp_path / "files", tls=request.param)


@pytest.fixture
def known(files: CredentialFiles, monkeypatch: pytest.MonkeyPatch) -> Credentials:
    """The credentials of the server, which the environment has for clients."""
    for name, value in files.credentials.environ().items():
        monkeypatch.setenv(name, value)
    return files.credentials


@contextlib.contextmanager
def proxied(known: Credentials) -> Iterator[tuple[CuttingProxy, str]]:
    """Start a server; yield a proxy of it, and its URL there."""
    with rallypoint.Server(credentials=known) as server, CuttingProxy(server.port) as proxy:
        yield proxy, f"tcp{'s' if known.tls_ca else ''}://127.0.0.1:{proxy.port}"


@pytest.mark.parametrize("connect", CLIENTS.values(), ids=CLIENTS)
def test_a_session_that_is_cut_goes_on(connect: Connect, known: Credentials) -> None:
    with proxied(known) as (proxy, url), connect(url, timeout=AMPLE_S) as store:
        store.lease("alive", "yes")
        for cuts in range(1, 4):
            proxy.cut_all()
            assert store.add("count", 1) == cuts and store.get("alive") == b"yes"
            assert proxy.connections == 1 + cuts


@pytest.mark.parametrize("connect", CLIENTS.values(), ids=CLIENTS)
def test_a_session_is_not_resumed_at_a_server_with_another_token(connect: Connect, known: Credentials) -> None:
    other = Credentials(token=new_token(), tls_cert=known.tls_cert, tls_key=known.tls_key)
    with rallypoint.Server(credentials=other) as impostor, proxied(known) as (proxy, url):
        with connect(url, timeout=AMPLE_S) as store:
            store.lease("alive", "yes")
            proxy.redirect(impostor.port)
            proxy.cut_all()
            with pytest.raises(AuthenticationFailed, match="the server has another token"):
                store.add("count", 1)
        assert impostor.statistics()["keys"] == 0


def test_pytorch_clients_of_a_relay_do_not_notice_a_cut(known: Credentials) -> None:
    with proxied(known) as (proxy, url), rallypoint.Relay(url, credentials=known) as relay:
        with RawPeer(("127.0.0.1", relay.port)) as peer:
            for cuts in range(1, 4):
                assert peer.add(b"/count", 1) == cuts
                proxy.cut_all()
            assert peer.add(b"/count", 1) == 4
        assert relay.statistics()["upstream_connections"] == 4
