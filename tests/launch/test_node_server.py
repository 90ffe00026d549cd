"""The server of a store in etcd that a node runs: where it listens, when it fails, and how it ends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.launch.runs import OPEN_CLIENT
from tests.raw_peer import AMPLE_S, until, wait_for_end

import rallypoint
from rallypoint import ServerFailed, net
from rallypoint.deadline import Deadline
from rallypoint.etcd.address import Address
from rallypoint.launch.stores import node_server
from rallypoint.launch.stores.node_server import TRIES, NodeServer
from rallypoint.store.url import parse_url

pytestmark = pytest.mark.needs("etcd")

Make = Callable[..., NodeServer]


@pytest.fixture
def address(etcd_url: str) -> Address:
    return parse_url(etcd_url).etcd()


@pytest.fixture
def make(address: Address) -> Iterator[Make]:
    made: list[NodeServer] = []

    def make(*told: str) -> NodeServer:
        made.append(NodeServer(address, OPEN_CLIENT, *told))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_node_replaces_a_server_that_its_session_no_longer_lists(make: Make, address: Address) -> None:
    first, second, third = (rallypoint.Server(storage=address.url) for _ in range(3))
    own = make()
    told = [first.url, second.url, third.url]
    own.known = lambda: told
    assert len(own.find(Deadline(AMPLE_S))) == 3 and own.pid is None
    third.close()
    told.pop()
    until(lambda: own.pid, bool)
    assert len(until(lambda: own.find(Deadline(AMPLE_S)), lambda found: third.url not in found)) == 3
    first.close()
    second.close()


@pytest.mark.parametrize("host", ["", "?host=0.0.0.0"])
def test_a_server_that_hangs_is_killed_and_another_takes_its_place(
    etcd_url: str, host: str, caplog: pytest.LogCaptureFixture
) -> None:
    own = NodeServer(parse_url(etcd_url + host).etcd(), OPEN_CLIENT)
    try:
        hung = until(lambda: own.pid, bool)
        assert hung
        os.kill(hung, signal.SIGSTOP)
        wait_for_end(hung)
        until(lambda: own.pid, lambda pid: pid not in (None, hung))
        assert f"killing the server of this node (pid {hung}): no answer for 5 s" in caplog.text
    finally:
        own.close()


def test_a_server_that_never_comes_up_is_said_to_those_who_look_for_one(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[None] = []

    def fails(*_: object, **__: object) -> None:
        tries.append(None)
        raise ServerFailed(pid=0, why="no room")

    monkeypatch.setattr(node_server, "Server", fails)
    monkeypatch.setattr(node_server, "PAUSE_S", 0.0)
    own = make()

    def look() -> str:
        try:
            return str(own.find(Deadline(AMPLE_S)))
        except ServerFailed as error:
            return error.why

    assert until(look, lambda said: said != "()") == "no room"
    assert len(tries) >= TRIES


def test_it_listens_where_other_nodes_reach_this_one(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    started = threading.Event()

    def start(hosts: list[str], **_: object) -> None:
        told.append(hosts)
        started.set()
        raise ServerFailed(pid=0, why="this is a test")

    monkeypatch.setattr(node_server, "Server", start)
    monkeypatch.setattr(net, "is_this_host", lambda host: host != "elsewhere")
    monkeypatch.setattr(node_server, "resolved", lambda host: {"here": {"10.1.2.3"}}.get(host, {"127.0.1.1"}))
    for name, expected in (("here", "10.1.2.3"), ("loop", "127.0.0.1"), ("elsewhere", "127.0.0.1"), ("", "127.0.0.1")):
        started.clear()
        own = make(name)
        assert started.wait(AMPLE_S)
        own.close()
        assert told[-1] == [expected], name


def test_one_that_is_closed_while_its_server_comes_up_leaves_none(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    comes_up, closing, made = threading.Event(), threading.Event(), []

    def start(*hosts: Any, **options: Any) -> rallypoint.Server:
        comes_up.set()
        assert closing.wait(AMPLE_S)
        made.append(rallypoint.Server(*hosts, **options))
        return made[-1]

    monkeypatch.setattr(node_server, "Server", start)
    own = make()
    assert comes_up.wait(AMPLE_S)
    ending = threading.Thread(target=own.close)
    ending.start()
    until(own._closed.is_set, bool)
    closing.set()
    ending.join(AMPLE_S)
    assert len(made) == 1 and not made[0].running()
