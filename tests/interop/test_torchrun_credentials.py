"""The handler of a torchrun agent with a token: what its workers get, and what is refused by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.security.credential_files import CredentialFiles, token_file

import rallypoint
from rallypoint.security.credentials import OPEN

from .torch_processes import AMPLE_S

pytestmark = pytest.mark.needs("torch")

Make = Callable[..., Any]
TOKEN = "RALLYPOINT_RUN_TOKEN"


@pytest.fixture
def files(tmp_path: Path) -> CredentialFiles:
    return CredentialFiles(tmp_path / "files", tls=False)


@pytest.fixture
def make(files: CredentialFiles) -> Iterator[Make]:
    """A function that creates the handler of an agent of a server with a token."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    from rallypoint.integrations.torchrun import handler

    made: list[Any] = []
    with rallypoint.Server(credentials=files.credentials) as server:

        def make(nodes: int = 1, **conf: str) -> Any:
            where = f"localhost:{server.port}"
            params = RendezvousParameters("rallypoint", where, "run", nodes, nodes, "localhost", **conf)
            made.append(handler()(params))
            return made[-1]

        yield make
        for one in made:
            one.shutdown()


@pytest.mark.parametrize("by", ["option", "environment"])
def test_workers_get_the_token_in_their_environment(
    by: str, make: Make, files: CredentialFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by == "environment":
        monkeypatch.setenv("RALLYPOINT_TOKEN", files.token)
    agent = make(**(files.named() if by == "option" else {}))
    found = agent.next_rendezvous()
    assert os.environ[TOKEN] == files.token
    place = found.bootstrap_store_info
    assert place.master_addr == "127.0.0.1"
    with pytest.raises(rallypoint.AuthenticationFailed, match="requires a token, and this client has none"):
        rallypoint.TCPStore(place.master_addr, place.master_port, timeout=AMPLE_S, credentials=OPEN)
    with rallypoint.TCPStore(place.master_addr, place.master_port, timeout=AMPLE_S) as store:
        assert store.add("count", 1) == 1, "a worker needs no options"
    agent.shutdown()
    assert TOKEN not in os.environ


def test_an_agent_with_another_token_or_none_is_refused_at_once(make: Make, tmp_path: Path) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError

    token_file(tmp_path / "wrong")
    with pytest.raises(RendezvousConnectionError, match=r"the server has another token\. Set RALLYPOINT_TOKEN"):
        make(token_file=str(tmp_path / "wrong"))
    with pytest.raises(RendezvousConnectionError, match="the server requires a token, and this client has none"):
        make()


def test_workers_of_all_nodes_cannot_use_one_relay(make: Make, files: CredentialFiles) -> None:
    with pytest.raises(ValueError, match=r"relay=rank0 lets workers of all nodes .* use relay=local"):
        make(2, relay="rank0", **files.named())
    assert make(1, relay="rank0", **files.named()).next_rendezvous().rank == 0, "they are all on this node"


@pytest.mark.parametrize(
    ("conf", "words"),
    [
        ({"token_file": "/nowhere/token"}, "cannot read the token file /nowhere/token: No such file"),
        ({"token_file": "{open}"}, "token file {open} has mode 644.*chmod 600 {open}"),
        ({"token_file": "{short}"}, "the token in {short} has 5 characters.*rallypoint token new"),
        ({"tls_cert": "node.pem"}, "--tls-cert .* needs --tls-key"),
        ({"tls_client_ca": "ca.pem"}, "--tls-client-ca .* needs --tls-cert"),
        ({"token": "secret"}, "unknown --rdzv-conf option 'token'; .*token_file"),
        ({"tls_caa": "ca.pem"}, "unknown --rdzv-conf option 'tls_caa'"),
    ],
)
def test_a_bad_option_is_refused_by_name(conf: dict[str, str], words: str, make: Make, tmp_path: Path) -> None:
    places = {"open": str(tmp_path / "open"), "short": str(tmp_path / "short")}
    token_file(tmp_path / "open")
    (tmp_path / "open").chmod(0o644)
    (tmp_path / "short").touch(0o600)
    (tmp_path / "short").write_text("short")
    with pytest.raises(ValueError, match=words.format(**places)) as caught:
        make(**{name: value.format(**places) for name, value in conf.items()})
    assert "secret" not in str(caught.value)
