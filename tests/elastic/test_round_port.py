"""The port of a round at the relay of a node: asked for until it is there, and lost with the relay that has it."""

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
from tests.wire import AMPLE_S, Peer, until

import rallypoint
from rallypoint import MeetingError, net
from rallypoint.elastic import round_port
from rallypoint.elastic.node_relay import NodeRelay
from rallypoint.elastic.round_port import RoundOver


class RelayOfNode:
    """A server, and a relay of it as an agent has one; `ended` counts how often it was told of an end."""

    def __init__(self, server: rallypoint.Server) -> None:
        self.server = server
        self.ended = threading.Semaphore(0)
        self.relay = NodeRelay(server.url, self.ended.release)

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
    with rallypoint.Server() as server:
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
        where = net.Endpoint(*listener.getsockname())
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
    with Peer(("127.0.0.1", first)) as peer:
        peer.set(b"/k", b"first")
        with pytest.raises(RoundOver, match="a later round of 'a/b c' has begun, and this one is over"):
            node.open("a/b c", 4)
        second = node.open("a/b c", 6)
        assert peer.rest() == b""
    with Peer(("127.0.0.1", second)) as peer:
        peer.set(b"/other", b"second")
    with rallypoint.TCPStore("127.0.0.1", second, timeout=AMPLE_S) as store:
        assert store.list_keys() == ["other"], "nothing is left of the round before"
    assert not node.relay.lost() and not node.ended.acquire(blocking=False)


def test_the_last_one_closes_the_round_at_the_server(node: RelayOfNode) -> None:
    with Peer(("127.0.0.1", node.open("run", 2))) as peer:
        peer.work(1)
        assert node.server.statistics()["rounds"] == 1
        node.relay.close_round("run", 1, AMPLE_S)
        assert set(node.ports()) == {"run"}, "that is a later one"
        node.relay.close_round("run", 2, AMPLE_S)
    assert node.ports() == {} and node.server.statistics()["rounds"] == 0


def test_a_round_that_goes_on_at_another_node_is_closed_here(node: RelayOfNode) -> None:
    node.relay.close_port("run", AMPLE_S)  # there is none
    port = node.open("run", 1)
    node.relay.close_port("run", AMPLE_S)
    assert node.ports() == {} and not node.relay.lost()
    with pytest.raises(ConnectionRefusedError):
        Peer(("127.0.0.1", port))
    assert not node.ended.acquire(blocking=False), "it has not died"


def test_the_port_is_lost_with_the_relay_and_the_next_one_is_had_from_another(node: RelayOfNode) -> None:
    node.open("run", 1)
    assert not node.relay.lost()
    pid = node.kill()
    assert node.ended.acquire(timeout=AMPLE_S)
    assert node.relay.lost() == f"its relay (pid {pid}) has died"
    with Peer(("127.0.0.1", node.open("run", 2))) as peer:
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
        relay = NodeRelay(server.url)
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
    at = net.Endpoint("127.0.0.1", node.relay.relay.port)
    with pytest.raises(MeetingError, match=f"{at} refused PUT /rounds//1.round=1: nothing here"):
        node.open("", 1)
    node.relay.close()
    with pytest.raises(rallypoint.ConnectionLost, match="PUT /rounds/run/1"):
        round_port.open_port(at, "run", 1, 0.1, lambda: None)


def test_what_workers_are_told_names_the_store_and_its_relay(
    node: RelayOfNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = node.server.url
    with rallypoint.connect(url) as store:
        identity: Any = store._backend
        monkeypatch.setenv("RALLYPOINT_RELAY", node.relay.variable(identity.server_id))
    with rallypoint.connect(url) as store:
        store.set("k", "v")
        assert node.relay.relay.statistics()["channels"] == 1
    about = json.dumps(node.relay.relay.statistics())
    assert f"127.0.0.1:{node.server.port}" in about
