"""Clients that are offered less than they demand: no question, a false proof, no TLS, PyTorch's protocol.

Each fails with the first answer, says which side failed and what to do, and has sent nothing but its greeting.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from tests.hosts import Host, hosts
from tests.raw_peer import AMPLE_S
from tests.security.certs import certificate
from tests.security.impostor import GREETINGS, Act, Impostor, Victim
from tests.security.other_user import NOBODY, running_as
from tests.security.refused_clients import CLIENTS, blocking, by_relay

import rallypoint
from rallypoint import aio, net
from rallypoint.client.routing.relay_address import RelayAddress
from rallypoint.client.routing.route import Route
from rallypoint.protocol import challenge, channels, native
from rallypoint.protocol.challenge import ANSWER_BYTES
from rallypoint.security.client_security import ClientSecurity
from rallypoint.security.credentials import Credentials

TOKEN = "only-the-right-ones-know-this"
WITH_TOKEN = Credentials(token=TOKEN)
# A client with a token


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("greeting", GREETINGS)
def test_a_client_with_a_token_refuses_an_impostor(greeting: str, client: str) -> None:
    act, why = GREETINGS[greeting]
    with Impostor(act) as impostor:
        assert why in CLIENTS[client](f"tcp://127.0.0.1:{impostor.port}", WITH_TOKEN)
    (sent,) = impostor.sent
    preface = channels.PREFACE if client == "relay" else native.PREFACE
    assert sent.startswith(preface) and len(sent) in (len(preface), len(preface) + ANSWER_BYTES)
    assert TOKEN.encode() not in sent


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_with_a_token_refuses_an_open_server(client: str) -> None:
    with rallypoint.Server(credentials=Credentials()) as server:
        assert "does not ask for the token" in CLIENTS[client](server.url, WITH_TOKEN)
        assert server.statistics()["keys"] == 0 and not server.statistics()["sessions"]


def test_a_token_is_not_sent_to_a_page_of_an_impostor() -> None:
    """Statistics are asked for over HTTP, behind the same greeting."""
    with Impostor(GREETINGS["does not ask"][0]) as impostor:
        server = rallypoint.Server(credentials=WITH_TOKEN)
        server.close()
        server.url = f"tcp://127.0.0.1:{impostor.port}"
        with pytest.raises(rallypoint.AuthenticationFailed, match="does not ask for the token"):
            server.statistics()
    assert impostor.sent == [challenge.HTTP_PREFACE]


# The server is replaced while a client waits

FORGED = b"".join(native.frame((number, 0, [b"forged"])) for number in range(1, 2000))
"""Replies to every request that a client may have open."""


def answers_at_once(victim: Victim) -> None:
    victim.read(len(native.PREFACE))
    victim.say(b"XXXX" + FORGED)


def denies_and_answers(victim: Victim) -> None:
    victim.read(len(native.PREFACE))
    victim.say(challenge.DENIED + 40 * FORGED)


def then(*acts: Act) -> Act:
    """Return what does one act with the first connection, the next with the second, and the last with all others."""
    left = list(acts)

    def act(victim: Victim) -> None:
        (left.pop(0) if len(left) > 1 else left[0])(victim)

    return act


@contextlib.contextmanager
def replaced(server: rallypoint.Server, act: Act) -> Iterator[Impostor]:
    """Put an impostor at the address of a server."""
    server.close()
    with Impostor(act, port=server.port) as impostor:
        yield impostor


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_an_impostor_answers_no_call_of_an_asyncio_client(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def run() -> None:
        server = await asyncio.to_thread(lambda: rallypoint.Server(credentials=WITH_TOKEN))
        store = await aio.connect(server.url, AMPLE_S, credentials=WITH_TOKEN)
        waits = [asyncio.ensure_future(store.get(f"key {number}")) for number in range(3)]
        await store.set("all were sent", "")
        with replaced(server, then(answers_at_once, denies_and_answers)) as impostor:
            found = await asyncio.gather(*waits, return_exceptions=True)
            assert [type(each) for each in found] == 3 * [rallypoint.AuthenticationFailed], found
        assert impostor.sent == 2 * [native.PREFACE]

    in_loop(new_loop, run())


def in_loop(new_loop: Callable[[], asyncio.AbstractEventLoop], work: Coroutine[Any, Any, None]) -> None:
    with contextlib.closing(new_loop()) as loop:
        loop.run_until_complete(asyncio.wait_for(work, AMPLE_S))


def test_an_impostor_answers_no_call_of_a_blocking_client() -> None:
    server = rallypoint.Server(credentials=WITH_TOKEN)
    store = rallypoint.connect(server.url, AMPLE_S, credentials=WITH_TOKEN)
    ends: list[object] = []

    def wait() -> None:
        try:
            ends.append(store.get("key"))
        except rallypoint.RallypointError as error:
            ends.append(type(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    other = rallypoint.connect(server.url, AMPLE_S, credentials=WITH_TOKEN)
    while not any(session["waits_for"] for session in server.statistics()["sessions"]):
        other.set("until it waits", "")
    other.close()
    with replaced(server, then(answers_at_once, denies_and_answers)) as impostor:
        waiting.join(AMPLE_S)
    assert ends == [rallypoint.AuthenticationFailed] and impostor.sent[:2] == 2 * [native.PREFACE]


# PyTorch's servers, which can prove nothing


def pings(victim: Victim) -> None:
    """Answer the preface as PyTorch's server does."""
    victim.say(victim.read(len(native.PREFACE))[-4:])


@pytest.fixture(scope="module")
def network() -> Iterator[tuple[Host, Host]]:
    with hosts(2) as (here, there):
        yield here, there


@pytest.mark.needs("netns")
def test_pytorchs_server_elsewhere_is_refused(network: tuple[Host, Host]) -> None:
    here, there = network
    with there.inside():
        impostor = Impostor(pings, host=there.address)
    with impostor, here.inside():
        url = f"tcp://{there.address}:{impostor.port}"
        why = "a PyTorch server answered, which cannot prove who it is, and PyTorch's protocol has no authentication"
        assert why in blocking(url, WITH_TOKEN)
        assert "PyTorch" in by_relay(url, WITH_TOKEN)
        with pytest.raises(rallypoint.Unsupported, match="the server there is PyTorch's"):  # as without a token
            asyncio.run(aio.connect(url, AMPLE_S, credentials=WITH_TOKEN))
        assert impostor.sent == [native.PREFACE, channels.PREFACE, native.PREFACE]


def listening_of(user: int) -> tuple[socket.socket, Callable[[], None]]:
    """Return a listening socket, and what serves it as PyTorch's server does."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            sock, _ = listener.accept()
            if os.fork() == 0:
                while data := sock.recv(65536):
                    sock.sendall(data[-4:])
                os._exit(0)

    return listener, serve


@pytest.mark.needs("root")
def test_pytorchs_server_of_another_user_is_refused() -> None:
    listener, serve = listening_of(NOBODY)
    with listener, running_as(NOBODY, serve):
        why = blocking(f"tcp://127.0.0.1:{listener.getsockname()[1]}", WITH_TOKEN)
    assert f"it is a process of user {NOBODY}, and" in why


@pytest.mark.needs("root")
def test_every_further_connection_to_pytorchs_server_is_looked_at() -> None:
    """A server that was our own may end, and another user may take its port."""
    listener, serve = listening_of(NOBODY)
    with listener:
        with running_as(0, serve):
            store = rallypoint.connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}", AMPLE_S, credentials=WITH_TOKEN)
        with running_as(NOBODY, serve), pytest.raises(rallypoint.AuthenticationFailed, match=f"of user {NOBODY}"):
            store.clone()
        store.close()


# A client that wants TLS


@pytest.fixture(scope="module", params=["open", "token"])
def plain_server(request: pytest.FixtureRequest) -> Iterator[rallypoint.Server]:
    """A server without TLS."""
    with rallypoint.Server(credentials=WITH_TOKEN if request.param == "token" else Credentials()) as server:
        yield server


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_that_wants_tls_refuses_a_server_without(client: str, plain_server: rallypoint.Server) -> None:
    url = plain_server.url.replace("tcp://", "tcps://")
    assert "the server does not speak TLS" in CLIENTS[client](url, Credentials())


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("answer", [native.ACCEPTED, b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH\r\n"])
def test_a_client_that_wants_tls_sends_nothing_without(client: str, answer: bytes) -> None:
    def answer_plainly(victim: Victim) -> None:
        victim.read(1)
        victim.say(answer + bytes(8))

    with Impostor(answer_plainly) as impostor:
        assert "the server does not speak TLS" in CLIENTS[client](f"tcps://127.0.0.1:{impostor.port}", WITH_TOKEN)
    (sent,) = impostor.sent
    assert sent[:1] == b"\x16" and native.PREFACE not in sent and channels.PREFACE not in sent


@pytest.mark.needs("netns")
@pytest.mark.parametrize("client", ["blocking", "asyncio", "relay"])
def test_without_tls_a_server_with_tls_is_out_of_reach(client: str, network: tuple[Host, Host], tmp_path: Path) -> None:
    here, there = network
    place = certificate(tmp_path / "tls", there.address)
    files = Credentials(token=TOKEN, tls_cert=str(place / "node.pem"), tls_key=str(place / "node.key"))
    with there.inside():
        server = rallypoint.Server(there.address, credentials=files)
    with server, here.inside():
        plain = f"tcp://{there.address}:{server.port}"
        assert "the server requires TLS from other machines" in CLIENTS[client](plain, WITH_TOKEN)
        known = Credentials(token=TOKEN, tls_ca=str(place / "ca.pem"))
        with rallypoint.connect(server.url, credentials=known) as store:
            assert store.num_keys() == 0


@pytest.mark.parametrize(
    ("place", "used"), [("tcp://127.0.0.1:1", True), ("unix:///tmp/relay", True), ("tcp://10.0.0.1:1", False)]
)
def test_a_client_that_wants_tls_uses_no_relay_on_another_machine(place: str, used: bool) -> None:
    """Relays are connected to without TLS."""
    store = net.Endpoints([net.Endpoint("10.0.0.2", 29400)])
    relay = RelayAddress(place, store)
    for security in (ClientSecurity(Credentials(tls_ca="ca.pem")), ClientSecurity(Credentials(), tls=True)):
        assert Route(store, relay, security=security).relayed is used
    assert Route(store, relay, security=ClientSecurity(WITH_TOKEN)).relayed


def test_a_fake_certificate_gets_nothing(tmp_path: Path) -> None:
    """Whoever has no certificate of the CA can ask for nothing, not even by TLS."""
    fake, real = certificate(tmp_path / "fake"), certificate(tmp_path / "real")
    known = Credentials(tls_cert=str(fake / "node.pem"), tls_key=str(fake / "node.key"))
    with rallypoint.Server(credentials=known) as server:
        url = f"tcps://127.0.0.1:{server.port}"
        for client in CLIENTS.values():
            assert "certificate is not valid here" in client(url, Credentials(tls_ca=str(real / "ca.pem")))


def test_the_credentials_of_a_client_are_those_of_every_connection() -> None:
    """A session that moves to another address demands the same there."""
    with rallypoint.Server(credentials=WITH_TOKEN) as server, Impostor(GREETINGS["does not ask"][0]) as impostor:
        both = net.Endpoints([net.Endpoint("127.0.0.1", impostor.port), net.Endpoint("127.0.0.1", server.port)])
        with rallypoint.connect(f"tcp://{both}", AMPLE_S, credentials=WITH_TOKEN) as store:
            store.set("key", "value")
        assert server.statistics()["keys"] == 1 and impostor.sent == [native.PREFACE]
        server.close()
        with pytest.raises(rallypoint.AuthenticationFailed, match="does not ask for the token"):
            rallypoint.connect(f"tcp://{both}", AMPLE_S, credentials=WITH_TOKEN)
        assert ClientSecurity(WITH_TOKEN).demands
