"""Strangers get nothing, from anywhere, by any protocol, and change nothing; those who may come in do."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence

import pytest
import uvloop  # noqa: F401 (for a server in a process that may not be able to read it)
from tests.hosts import IP, Host, hosts
from tests.raw_peer import AMPLE_S, until
from tests.security import strangers
from tests.security.certs import certificate
from tests.security.other_user import NOBODY, SOMEBODY, connections_of, running_as
from tests.security.protected import KINDS, TOKEN, Protected, started
from tests.security.strangers import (
    KEY,
    VALUE,
    Connect,
    ask,
    attack,
    attempts,
    loopback_sources,
    over_tls,
    torch_requests,
)

import rallypoint
from rallypoint.protocol import native
from rallypoint.security.credentials import Credentials
from rallypoint.server import http, process  # noqa: F401 (http: as uvloop)
from rallypoint.server.settings import Settings

PROTOCOLS = ("native", "channels", "own http", "torch", "http")
ALL = {"kind": KINDS, "target": ("server", "relay")}
WITH_TOKEN = [kind for kind in KINDS if "token" in kind]
WITH_TLS = [kind for kind in KINDS if "tls" in kind]

_sources = itertools.count()


def target_of(found: Protected, target: str) -> tuple[str, int]:
    child = {"server": found.server, "relay": found.relay}[target]
    return child.url.partition("//")[2].rpartition(":")[0], child.port


def expected(kind: str, remote: bool, tls: bool) -> dict[str, set[bytes]]:
    """Return the replies that strangers get, by protocol: few, and the same for all of them."""
    if tls and "mutual" in kind:
        return {protocol: {strangers.NOTHING} for protocol in PROTOCOLS}  # they fail in the handshake
    if "tls" in kind and not tls and (remote or "token" not in kind):
        prefaced, page, others = {strangers.PLAIN_REFUSED}, strangers.NO_PLAIN_HTTP, set()
    else:
        prefaced, page = {strangers.CHALLENGED, strangers.REFUSED}, strangers.NEEDS_TOKEN
        others = {strangers.BAD_LINK, strangers.NOTHING}  # nothing: to half a login
        if remote and not tls:
            others |= {strangers.IN_THE_CLEAR, strangers.head_of(strangers.IN_THE_CLEAR)}
    others |= {strangers.HEALTHY, strangers.BAD_REQUEST, strangers.TOO_LONG}
    pages = others | {page, strangers.head_of(page), strangers.to_older(page)}
    return {**dict.fromkeys(PROTOCOLS[:3], prefaced), "torch": {strangers.NOTHING}, "http": pages}


def check(found: Protected, connect: Connect, protocols: Sequence[str], remote: bool, tls: bool = False) -> None:
    """Attack, and check what that gave and changed."""
    held, connections = found.held(), found.connections()
    replies = attack(connect, protocols)
    for protocol, wanted in expected(found.kind, remote, tls).items():
        if protocol in protocols:
            assert (replies[protocol] - wanted, wanted - replies[protocol]) == (set(), set()), protocol
    assert not [word for each in replies.values() for reply in each for word in found.secrets() if word in reply]
    assert found.held() == held
    until(found.connections, lambda now: now == connections)


# From this machine


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Protected]]:
    with started(tmp_path_factory.mktemp("here"), "127.0.0.1") as found:
        yield found


@pytest.mark.parametrize("target", ALL["target"])
@pytest.mark.parametrize("kind", WITH_TOKEN)
def test_a_process_without_the_token(kind: str, target: str, here: dict[str, Protected]) -> None:
    address = target_of(here[kind], target)

    def connect(count: int) -> list[socket.socket]:
        return [socket.create_connection(address, AMPLE_S, (source, 0)) for source in loopback_sources(count)]

    check(here[kind], connect, ("native", "channels", "own http", "http"), remote=False)


@pytest.mark.needs("root")
@pytest.mark.parametrize("target", ALL["target"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_process_of_another_user(kind: str, target: str, here: dict[str, Protected]) -> None:
    address = target_of(here[kind], target)

    def connect(count: int) -> list[socket.socket]:
        return connections_of(NOBODY, [(address, source) for source in loopback_sources(count)])

    check(here[kind], connect, PROTOCOLS, remote=False)


# From another machine


@pytest.fixture(scope="module")
def network() -> Iterator[tuple[Host, Host]]:
    """A host, and one of strangers, which has all addresses of 172.16.0.0/12."""
    with hosts(2) as (victim, stranger):
        many = "172.16.0.0/12"
        for words in (
            ["-n", stranger.namespace, "route", "add", "local", many, "dev", "lo"],
            ["-n", victim.namespace, "route", "add", many, "via", stranger.address],
        ):
            subprocess.run([IP, *words], check=True, timeout=AMPLE_S)
        yield victim, stranger


@pytest.fixture(scope="module")
def there(network: tuple[Host, Host], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Protected]]:
    with started(tmp_path_factory.mktemp("there"), network[0].address, network[0].inside) as found:
        yield found


@pytest.fixture(scope="module")
def other_ca(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A certificate that nobody trusts, and its key."""
    place = certificate(tmp_path_factory.mktemp("other") / "tls", "stranger")
    return str(place / "node.pem"), str(place / "node.key")


def connector(stranger: Host, address: tuple[str, int]) -> Connect:
    def connect(count: int) -> list[socket.socket]:
        numbers = list(itertools.islice(_sources, count))
        with stranger.inside():
            sources = [f"172.{16 + (number >> 14 & 15)}.{number >> 7 & 127}.{2 + (number & 127)}" for number in numbers]
            return [socket.create_connection(address, AMPLE_S, (source, 0)) for source in sources]

    return connect


@pytest.mark.needs("netns")
@pytest.mark.parametrize("target", ALL["target"])
@pytest.mark.parametrize("kind", KINDS)
def test_another_machine(kind: str, target: str, there: dict[str, Protected], network: tuple[Host, Host]) -> None:
    connect = connector(network[1], target_of(there[kind], target))
    check(there[kind], connect, PROTOCOLS, remote=True)


@pytest.mark.needs("netns")
@pytest.mark.parametrize("target", ALL["target"])
@pytest.mark.parametrize("kind", [kind for kind in WITH_TLS if kind != "tls"])
def test_another_machine_by_tls(
    kind: str, target: str, there: dict[str, Protected], network: tuple[Host, Host], other_ca: tuple[str, str]
) -> None:
    connect = connector(network[1], target_of(there[kind], target))
    if "mutual" not in kind:
        check(there[kind], over_tls(connect), PROTOCOLS, remote=True, tls=True)
        return
    for own in (None, other_ca):  # all is over before the first byte is read
        check(there[kind], over_tls(connect, own), ("own http", "torch"), remote=True, tls=True)


# Those who may


@pytest.mark.parametrize("target", ALL["target"])
@pytest.mark.parametrize("kind", KINDS)
def test_pytorch_clients_of_this_user_are_let_in(kind: str, target: str, here: dict[str, Protected]) -> None:
    """They send the same bytes as the strangers: the requests are real."""
    found = here[kind]
    with socket.create_connection(target_of(found, target), AMPLE_S) as sock:
        sock.sendall(torch_requests()["GET"])
        reply = b""
        while len(reply) < 8 + len(VALUE):
            piece = sock.recv(4096)
            assert piece, reply
            reply += piece
    assert reply == len(VALUE).to_bytes(8, "little") + VALUE


def test_without_credentials_the_same_requests_get_everything() -> None:
    with rallypoint.Server(credentials=Credentials()) as server, rallypoint.connect(server.url) as store:
        store.set(KEY, VALUE)
        ours, revision = attempts(), server.statistics()["revision"]
        replies = {
            (protocol, name): ask(socket.create_connection(("127.0.0.1", server.port), AMPLE_S), data)
            for protocol, name in (
                ("native", "Get"),
                ("channels", "Get"),
                ("own http", "/statistics"),
                ("http", "GET /"),
            )
            for data in [ours[protocol][name]]
        }
        assert all(VALUE in replies[protocol, "Get"] for protocol in ("native", "channels")), replies
        assert str(server.pid).encode() in replies["own http", "/statistics"]
        assert rallypoint.__version__.encode() in replies["http", "GET /"]
        for name, data in ours["native"].items():
            if "forged" not in name:
                reply = ask(socket.create_connection(("127.0.0.1", server.port), AMPLE_S), data)
                assert reply.startswith(native.ACCEPTED), (name, reply)
        assert server.statistics()["revision"] > revision, "some of them changed something"


@pytest.mark.needs("root")
def test_a_server_of_another_user_lets_that_user_in_and_root() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    ready, report = os.pipe()

    def serve() -> None:
        settings = Settings(fds=(listener.fileno(),), parent_pid=os.getppid(), ready_fd=report)
        process.serve(settings, Credentials(token=TOKEN))

    with listener, running_as(NOBODY, serve), open(ready, "rb") as url:
        os.close(report)
        address = listener.getsockname()
        assert url.readline().decode() == f"tcp://127.0.0.1:{address[1]}\n"
        request = torch_requests()["PING"]
        root, nobody, somebody = (
            ask(connections_of(user, [(address, None)])[0], request) for user in (0, NOBODY, SOMEBODY)
        )
        assert (root, nobody, somebody) == (b"\7\0\0\0", b"\7\0\0\0", strangers.NOTHING)
        with rallypoint.connect(f"tcp://127.0.0.1:{address[1]}", credentials=Credentials(token=TOKEN)) as store:
            store.set(KEY, VALUE)
            assert store.get(KEY) == VALUE
