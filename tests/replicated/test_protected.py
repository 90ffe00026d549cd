"""Servers of a store in etcd with a token: clients, relays and standbys show it; a standby tells strangers nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.raw_peer import AMPLE_S, RawPeer, until
from tests.replicated.clients import Connect, asynchronous, blocking

import rallypoint
from rallypoint import AuthenticationFailed, aio
from rallypoint.deadline import Deadline
from rallypoint.protocol.challenge import CHALLENGE, DENIED, NONCE_BYTES, ClientGreeting
from rallypoint.protocol.native import PREFACE, STANDBY
from rallypoint.security.credentials import OPEN, Credentials, new_token
from rallypoint.storage.etcd.lookup import look_up
from rallypoint.store.url import parse_url

pytestmark = pytest.mark.needs("etcd")

KNOWN = Credentials(token=new_token())
KINDS = {"blocking": blocking, "asyncio": asynchronous}


class ProtectedPair:
    """Two servers of a store: the one that leads, and the standby that is connected to it."""

    def __init__(self, url: str, servers: list[rallypoint.Server]) -> None:
        self.url, self._servers = url, servers
        until(lambda: [one["speaks"] for one in self.leader.statistics()["clients"]], lambda found: WATCHES in found)

    @property
    def leader(self) -> rallypoint.Server:
        found = until(lambda: look_up(parse_url(self.url).etcd(), Deadline(AMPLE_S)).leader, bool)
        return next(server for server in self._servers if server.url == found)

    @property
    def standby(self) -> rallypoint.Server:
        leader = self.leader
        return next(server for server in self._servers if server is not leader)


WATCHES = "rallypoint channels"
"""What a standby speaks to the leader that it watches."""


@pytest.fixture
def pair(etcd_url: str) -> Iterator[ProtectedPair]:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(rallypoint.Server(storage=etcd_url, credentials=KNOWN)) for _ in range(2)]
        yield ProtectedPair(etcd_url, servers)


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give clients the token by the environment, as a launcher does."""
    monkeypatch.setenv("RALLYPOINT_RUN_TOKEN", KNOWN.token)


@pytest.mark.usefixtures("token")
@pytest.mark.parametrize("where", ["etcd", "standby", "relay"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_session_survives_the_leader(kind: str, where: str, pair: ProtectedPair) -> None:
    connect: Connect = KINDS[kind]
    with contextlib.ExitStack() as stack:
        url = {"etcd": pair.url, "standby": pair.standby.url}.get(where, "")
        if where == "relay":
            url = stack.enter_context(rallypoint.Relay(pair.url, credentials=KNOWN)).url
        store = stack.enter_context(connect(url, timeout=AMPLE_S))
        store.lease("alive", "yes")
        leader = pair.leader
        epoch = leader.statistics()["storage"]["epoch"]
        assert epoch == 1, "the standby leaves a leader alone that asks it for the token"
        os.kill(leader.pid, signal.SIGKILL)
        assert store.add("count", 1) == 1 and store.get("alive") == b"yes"
        assert until(lambda: pair.leader, lambda now: now is not leader).statistics()["storage"]["epoch"] == 2


async def connect_and_close(url: str, **more: Any) -> None:
    await (await aio.connect(url, AMPLE_S, **more)).close()


CONNECTS: list[Callable[..., Any]] = [
    lambda url, **more: rallypoint.connect(url, AMPLE_S, **more).close(),
    lambda url, **more: asyncio.run(connect_and_close(url, **more)),
]


@pytest.mark.parametrize("connect", CONNECTS, ids=["blocking", "asyncio"])
def test_clients_without_the_token_are_refused_by_every_server(
    connect: Callable[..., Any], pair: ProtectedPair
) -> None:
    other = Credentials(token=new_token())
    for url in (pair.url, pair.leader.url, pair.standby.url):
        connect(url, credentials=KNOWN)
        for known, why in ((other, "the server has another token"), (OPEN, "this client has none")):
            with pytest.raises(AuthenticationFailed, match=why):
                connect(url, credentials=known)


def test_a_standby_tells_the_leader_to_clients_with_the_token_alone(pair: ProtectedPair) -> None:
    address = ("127.0.0.1", pair.standby.port)
    answers = []
    for token in (KNOWN.token, new_token(), ""):
        with RawPeer(address, greet=False) as peer:
            peer.send(PREFACE)
            asked = peer.read(len(CHALLENGE) + NONCE_BYTES)
            assert asked.startswith(CHALLENGE)
            greeting = ClientGreeting(PREFACE, (token or "none").encode(), os.urandom)
            proof = greeting.feed(asked)
            peer.send(proof if token else proof[:-1])
            if not token:
                peer.socket.shutdown(1)
            answers.append(peer.rest())
    told, denied, nothing = answers
    assert told.startswith(STANDBY) and pair.leader.url.encode() in told
    assert denied == DENIED and nothing == b""


def test_a_server_that_a_client_starts_has_the_clients_token(etcd_url: str) -> None:
    with rallypoint.connect(etcd_url, AMPLE_S, credentials=KNOWN) as store:
        store.set("key", "value")
        with pytest.raises(AuthenticationFailed, match="this client has none"):
            rallypoint.connect(etcd_url, AMPLE_S, credentials=OPEN)
        with rallypoint.connect(etcd_url, AMPLE_S, credentials=KNOWN) as other:
            assert other.get("key") == b"value"
