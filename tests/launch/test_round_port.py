"""The port of a round at a node's relay: requested until it is open, and lost with that relay."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.launch.runs import OPEN_CLIENT
from tests.raw_peer import AMPLE_S, RawPeer, until

import rallypoint
from rallypoint import MeetingError, net
from rallypoint.launch.stores import round_port
from rallypoint.launch.stores.node_relay import NodeRelay
from rallypoint.launch.stores.round_port import RelayRequests, RoundOver
from rallypoint.security.client_security import ClientSecurity
from rallypoint.security.credentials import Credentials, new_token

SECURITY = ClientSecurity(Credentials(token=new_token()))
"""The relay and its server are protected, as those of most jobs are."""


class RelayOfNode:
    """A server, and a relay of it as an agent has one; `ended` counts the calls that report an end."""

    def __init__(self, server: rallypoint.Server) -> None:
        self.server = server
        self.ended = threading.Semaphore(0)
        self.relay = NodeRelay(server.url, SECURITY, self.ended.release)

    @property
    def at(self) -> RelayRequests:
        return RelayRequests(net.Endpoint("127.0.0.1", self.relay.relay.port), SECURITY)

    def open(self, run: str, scope: int, **more: Any) -> int:
        return self.relay.open(run, scope, 1, AMPLE_S, **more)

    def ports(self) -> dict[str, Any]:
        found: dict[str, Any] = self.relay.relay.statistics()["round_ports"]
        return found

    def kill(self) -> int:
        pid = self.relay.relay.pid
        os.kill(pid, signal.SIGKILL)
        return pid


@pytest.fixture
def node() -> Iterator[RelayOfNode]:
    with rallypoint.Server(credentials=SECURITY.credentials) as server:
        node = RelayOfNode(server)
        yield node
        node.relay.close()


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_one_that_dies_of_a_request_is_asked_again(method: str) -> None:
    """Nobody can tell whether it had carried it out; to be asked twice is the same as once."""
    asked = []

    def serve(listener: socket.socket) -> None:
        whole = b'HTTP/1.1 200 OK\r\ncontent-length: 23\r\n\r\n{"port": 12, "pid": 345}'
        whole = whole.replace(b"23", b"%d" % len(whole.partition(b"\r\n\r\n")[2]))
        for answer in (b"", whole[:10], whole[:-1], whole):
            with listener.accept()[0] as peer:
                asked.append(peer.recv(1000).split(b" ")[0].decode())
                peer.sendall(answer)
                if answer == whole and method == "PUT":
                    peer.recv(1000)
                    peer.sendall(whole)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        serving = pool.submit(serve, listener)
        where = RelayRequests(net.Endpoint(*listener.getsockname()), OPEN_CLIENT)
        if method == "PUT":
            ended = threading.Event()
            opened = round_port.open_port(where, "run", 1, AMPLE_S, ended.set)
            assert (opened.port, opened.pid) == (12, 345)
            assert ended.wait(AMPLE_S) and opened.lost, "it has hung up"
        else:
            round_port.close_round(where, "run", AMPLE_S, 1)
        serving.result(AMPLE_S)
    assert asked == [method] * 4


def test_rounds_have_stores_of_their_own_one_after_the_other(node: RelayOfNode) -> None:
    first = node.open("a/b c", 5)
    assert first == node.open("a/b c", 5), "it is open already"
    with RawPeer(("127.0.0.1", first)) as peer:
        peer.set(b"/k", b"first")
        with pytest.raises(RoundOver, match="a later round of 'a/b c' has begun, and this one is over"):
            node.open("a/b c", 4)
        second = node.open("a/b c", 6)
        assert peer.rest() == b""
    with RawPeer(("127.0.0.1", second)) as peer:
        peer.set(b"/other", b"second")
    known = SECURITY.credentials
    with rallypoint.TCPStore("127.0.0.1", second, timeout=AMPLE_S, credentials=known) as store:
        assert store.list_keys() == ["other"], "nothing is left of the round before"
    assert not node.relay.lost() and not node.ended.acquire(blocking=False)


def test_the_last_one_closes_the_round_at_the_server(node: RelayOfNode) -> None:
    with RawPeer(("127.0.0.1", node.open("run", 2))) as peer:
        peer.work(1)
        assert node.server.statistics()["rounds"] == 1
        node.relay.close_round("run", 1, AMPLE_S).join(AMPLE_S)
        assert set(node.ports()) == {"run"}, "that is a later one"
        node.relay.close_round("run", 2, AMPLE_S).join(AMPLE_S)
    assert node.ports() == {} and node.server.statistics()["rounds"] == 0


def test_a_round_that_goes_on_at_another_node_is_closed_here(node: RelayOfNode) -> None:
    node.relay.close_port("run", AMPLE_S)  # there is none
    port = node.open("run", 1)
    node.relay.close_port("run", AMPLE_S)
    assert node.ports() == {} and not node.relay.lost()
    with pytest.raises(ConnectionRefusedError):
        RawPeer(("127.0.0.1", port))
    assert not node.ended.acquire(blocking=False), "it has not died"


def test_the_port_is_lost_with_the_relay_and_the_next_one_is_had_from_another(node: RelayOfNode) -> None:
    node.open("run", 1)
    assert not node.relay.lost()
    pid = node.kill()
    assert node.ended.acquire(timeout=AMPLE_S)
    assert node.relay.lost() == f"its relay (pid {pid}) has died"
    with RawPeer(("127.0.0.1", node.open("run", 2))) as peer:
        peer.work(1)
    assert not node.relay.lost() and node.relay.relay.restarts == 1


def test_a_relay_that_dies_when_no_round_is_open_is_nobodys_loss(node: RelayOfNode) -> None:
    assert node.relay.relay.running()
    node.kill()
    until(lambda: node.relay.relay.restarts, bool)
    assert not node.relay.lost() and not node.ended.acquire(blocking=False)


def test_a_relay_that_is_closed_is_not_lost(node: RelayOfNode) -> None:
    node.open("run", 1)
    node.relay.close()
    assert not node.relay.lost() and not node.ended.acquire(blocking=False)


def test_a_relay_that_is_closed_while_it_starts_is_gone() -> None:
    with rallypoint.Server() as server:
        relay = NodeRelay(server.url, OPEN_CLIENT)
        relay.close()
        assert not relay.relay.running()


def test_a_port_is_gone_when_nobody_answers_there(node: RelayOfNode) -> None:
    place = net.Endpoint("127.0.0.1", node.open("run", 1))
    assert not round_port.is_gone(place, AMPLE_S)
    node.kill()
    assert node.ended.acquire(timeout=AMPLE_S)
    until(lambda: round_port.is_gone(place, AMPLE_S), bool)
    with socket.create_server(("127.0.0.1", 0)) as dying, ThreadPoolExecutor(1) as pool:
        accepts = pool.submit(dying.accept)
        accepts.add_done_callback(lambda done: done.result()[0].close())
        assert round_port.is_gone(net.Endpoint(*dying.getsockname()), AMPLE_S), "it was accepted, and not answered"
        accepts.result(AMPLE_S)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not round_port.is_gone(net.Endpoint(*silent.getsockname()), 0.05)


def test_refusals(node: RelayOfNode) -> None:
    requests = node.at
    with pytest.raises(MeetingError, match=f"{requests.at} refused PUT /rounds//1.round=1: nothing here"):
        node.open("", 1)
    node.relay.close()
    with pytest.raises(rallypoint.ConnectionLost, match="PUT /rounds/run/1"):
        round_port.open_port(requests, "run", 1, 0.1, lambda: None)


def test_the_environment_of_workers_names_the_store_and_its_relay(
    node: RelayOfNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = node.server.url
    with rallypoint.connect(url, credentials=SECURITY.credentials) as store:
        identity: Any = store._backend
        monkeypatch.setenv("RALLYPOINT_RELAY", node.relay.variable(identity.server_id, []))
    with rallypoint.connect(url, credentials=SECURITY.credentials) as store:
        store.set("k", "v")
        assert node.relay.relay.statistics()["channels"] == 1
    about = json.dumps(node.relay.relay.statistics())
    assert f"127.0.0.1:{node.server.port}" in about
