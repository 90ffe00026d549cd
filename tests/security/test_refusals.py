"""Clients that reconnect and are refused: they fail at once with the reason, unless their server may return."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.launch.runs import Node, Place
from tests.raw_peer import AMPLE_S, until
from tests.replicated.clients import Connect, asynchronous, blocking
from tests.security.credential_files import CredentialFiles

import rallypoint
from rallypoint import AuthenticationFailed, net
from rallypoint.client.routing import refusals
from rallypoint.client.routing.refusals import REFUSED_S, Refusals
from rallypoint.client.routing.route import Route
from rallypoint.client.routing.search import Search
from rallypoint.client.routing.server_replies import IsStandby
from rallypoint.deadline import Deadline
from rallypoint.errors import ConnectFailed
from rallypoint.protocol import BadMessage
from rallypoint.protocol.native import Standby
from rallypoint.security.credentials import Credentials, new_token
from rallypoint.testing import CuttingProxy

CLIENTS = {"blocking": blocking, "asyncio": asynchronous}
REFUSED = AuthenticationFailed(peer="a", why="the server has another token")
UNREACHABLE = ConnectFailed(peer="a", timeout_s=1.0, tried={"a": "connection refused"})
WRONG = r"the server has another token\. Set RALLYPOINT_TOKEN"
A, B = net.Endpoint("a", 1), net.Endpoint("b", 2)


# Which are final


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_without_a_server_that_may_return_a_refusal_is_final() -> None:
    found = Refusals(confirms=False)
    assert found.final([A, B]) is None
    found.note(A, REFUSED)
    assert found.final([A, B]) is REFUSED, "of one address: the others were tried"


def test_otherwise_it_must_last() -> None:
    clock = Clock()
    found = Refusals(confirms=True, clock=clock)
    found.note(A, REFUSED)
    clock.now += REFUSED_S - 0.001
    found.note(A, REFUSED)
    assert found.final([A]) is None
    clock.now += 0.001
    assert found.final([A]) is None, "time alone proves nothing"
    found.note(A, REFUSED)
    assert found.final([A]) is REFUSED


@pytest.mark.parametrize("other", [UNREACHABLE, ConnectionRefusedError(), BadMessage("not a store")])
def test_any_other_sign_starts_the_time_again(other: Exception) -> None:
    clock = Clock()
    found = Refusals(confirms=True, clock=clock)
    found.note(A, REFUSED)
    found.note(A, other)
    clock.now += REFUSED_S
    found.note(A, REFUSED)
    assert found.final([A]) is None


def test_a_timeout_does_not_because_refusals_may_be_answered_late() -> None:
    clock = Clock()
    found = Refusals(confirms=True, clock=clock)
    found.note(A, REFUSED)
    found.note(A, TimeoutError())
    clock.now += REFUSED_S
    assert found.ends(REFUSED) is False, "of another server"
    found.note(A, REFUSED)
    assert found.final([A]) is REFUSED


def test_all_addresses_must_refuse() -> None:
    clock = Clock()
    found = Refusals(confirms=True, clock=clock)
    for address in (A, B, A):
        found.note(address, REFUSED)
        clock.now += REFUSED_S
    assert found.final([A, B]) is None and found.final([A]) is REFUSED
    found.note(B, REFUSED)
    assert found.final([A, B]) is REFUSED


def test_a_standby_that_knows_us_may_lead_soon() -> None:
    search = Search(Route(net.Endpoints([A, B])), Deadline(AMPLE_S))
    for address, _ in search.round():
        error = REFUSED if address == A else IsStandby(Standby("", [], "", False))
        assert not search.ends(address, error)
        search.attempt_failed(address, error, str(error), "")
    assert search.pause_s() >= 0
    for address, _ in search.round():
        search.attempt_failed(address, REFUSED, str(REFUSED), "")
    with pytest.raises(AuthenticationFailed):
        search.pause_s()


# Clients


class Setup(NamedTuple):
    """A proxy of a server with a data directory, and a server with another token."""

    proxy: CuttingProxy
    server: rallypoint.Server
    other: rallypoint.Server

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self.proxy.port}"

    def until_denied(self) -> None:
        until(self.other.statistics, lambda facts: facts["denied_connections"] > 0)


@pytest.fixture
def files(tmp_path: Path) -> CredentialFiles:
    return CredentialFiles(tmp_path / "files", tls=False)


@pytest.fixture
def begin(files: CredentialFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Setup]]:
    """Starts both servers; the environment has the token of the first."""
    with contextlib.ExitStack() as undo:

        def begin() -> Setup:
            server = undo.enter_context(rallypoint.Server(data_dir=tmp_path / "data", credentials=files.credentials))
            other = undo.enter_context(rallypoint.Server(credentials=Credentials(token=new_token())))
            return Setup(undo.enter_context(CuttingProxy(server.port)), server, other)

        monkeypatch.setenv("RALLYPOINT_TOKEN", files.token)
        yield begin


@pytest.mark.parametrize("connect", CLIENTS.values(), ids=CLIENTS)
def test_a_session_outlives_another_server_on_its_port(connect: Connect, begin: Callable[[], Setup]) -> None:
    setup = begin()
    with connect(setup.url, timeout=AMPLE_S) as store:
        store.lease("alive", "yes")
        setup.proxy.redirect(setup.other.port)
        setup.until_denied()
        setup.proxy.redirect(setup.server.port)
        assert store.add("count", 1) == 1 and store.get("alive") == b"yes"


@pytest.mark.parametrize("connect", CLIENTS.values(), ids=CLIENTS)
def test_a_session_ends_if_the_other_server_stays(
    connect: Connect, begin: Callable[[], Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "REFUSED_S", 0.3)
    setup = begin()
    with connect(setup.url, timeout=AMPLE_S) as store:
        store.lease("alive", "yes")
        setup.proxy.redirect(setup.other.port)
        with pytest.raises(
            AuthenticationFailed, match=r"the server has another token\. Set RALLYPOINT_TOKEN"
        ) as caught:
            store.add("count", 1)
        assert caught.value.peer == f"127.0.0.1:{setup.proxy.port}"


# Agents


def start(place: Place, setup: Setup, files: CredentialFiles) -> Node:
    """Start a run at the proxy, which would try for ten minutes to reconnect; return it when its worker is up."""
    timeouts = "join_timeout=600,last_call_timeout=0"
    node = place.run(
        "--store", setup.url, "--nnodes", "1:2", "--rdzv-conf", timeouts, *files.options(), place.script("stay()")
    )  # fmt: skip
    node.up(0, world=1)
    return node


def test_an_agent_that_is_refused_ends_and_says_why(
    begin: Callable[[], Setup], files: CredentialFiles, tmp_path: Path
) -> None:
    setup = begin()
    with Place(tmp_path) as place:
        node = start(place, setup, files)
        setup.proxy.redirect(setup.other.port)
        assert node.end() == 1, node.text()
        assert re.search(f"cannot authenticate at 127.0.0.1:{setup.proxy.port}: {WRONG}", node.err), node.text()


def test_an_agent_outlives_another_server_on_its_port(
    begin: Callable[[], Setup], files: CredentialFiles, tmp_path: Path
) -> None:
    setup = begin()
    with Place(tmp_path) as place:
        node = start(place, setup, files)
        (pid,) = node.up(0, world=1).values()
        setup.proxy.redirect(setup.other.port)
        setup.until_denied()
        setup.proxy.redirect(setup.server.port)
        os.kill(pid, signal.SIGUSR1)
        assert node.end() == 0, node.text()


@pytest.mark.needs("torch")
def test_a_torchrun_agent_that_is_refused_ends_and_says_why(
    begin: Callable[[], Setup], files: CredentialFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters

    from rallypoint.integrations.torchrun import handler

    monkeypatch.setattr(refusals, "REFUSED_S", 0.3)
    setup = begin()
    conf = {"join_timeout": "600", "last_call_timeout": "0", **files.named()}
    params = RendezvousParameters("rallypoint", f"127.0.0.1:{setup.proxy.port}", "run", 1, 1, "127.0.0.1", **conf)
    agent = handler()(params)
    try:
        assert agent.next_rendezvous().rank == 0
        setup.proxy.redirect(setup.other.port)
        with pytest.raises(RendezvousConnectionError, match=WRONG):
            agent.next_rendezvous()
    finally:
        agent.shutdown()
