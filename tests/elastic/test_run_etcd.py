"""`rallypoint run --store etcd://…`: nodes that meet in etcd, each with a gateway of its own; any may be lost."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from tests.elastic.runs import Node, Place, gone
from tests.wire import AMPLE_S

import rallypoint

pytestmark = pytest.mark.needs("etcd")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with Place(tmp_path) as made:
        yield made


def start(place: Place, url: str, name: str, *words: str) -> Node:
    return place.run("--store", url, "--rdzv-id=job", "--node", name, *words)


def test_three_nodes_survive_the_loss_of_the_one_that_came_first_with_its_gateway(place: Place, etcd_url: str) -> None:
    script = place.script("""
        import rallypoint
        me = rallypoint.worker()
        me.store.add("seen", 1)
        assert sum(map(int, me.exchange().all_gather(me.rank, b"%d" % me.rank))) == sum(range(me.world_size))
        say("gateway", os.environ["MASTER_PORT"])
        stay()
    """)
    words = ["--nnodes=2:3", "--rdzv-conf=last_call_timeout=1", script]
    nodes = [start(place, etcd_url, name, *words) for name in ("first", "second", "third")]
    ports, pids = set(), {}
    for node in nodes:
        ports.add(node.until(r"^gateway (\d+)$")[-1][1])
        found = node.until(r"^up (\d) 3 0 (\d+)$")[-1]
        pids[int(found[1])] = int(found[2])
    assert len(ports) == 3, "every node has its own"
    assert sorted(pids) == [0, 1, 2]
    nodes[0].signal("SIGKILL")
    ups = [node.until(r"^up (\d) 2 0 (\d+)$")[-1] for node in nodes[1:]]
    assert sorted(up[1] for up in ups) == ["0", "1"]
    assert all("lost first" in node.err for node in nodes[1:])
    for node in nodes[1:]:
        node.signal("SIGUSR1")
    assert [node.end() for node in nodes[1:]] == [0, 0]
    gone(*pids.values(), *(int(up[2]) for up in ups))


def test_a_gateway_that_dies_before_its_workers_come_to_it_is_replaced_and_uses_no_restart(
    place: Place, etcd_url: str
) -> None:
    script = place.script("""
        say("gateway", os.environ["RALLYPOINT_URL"])
        stay()
    """)
    nodes = [start(place, etcd_url, name, "--nnodes=2", script) for name in ("first", "second")]
    before = [node.until(r"^up \d 2 0 (\d+)$")[-1] for node in nodes]
    pid = about(nodes[0].until(r"^gateway tcp://(.*)$")[-1][1])
    os.kill(pid, signal.SIGKILL)
    after = [node.until(r"^up \d 2 0 (\d+)$", 2)[-1] for node in nodes]
    gone(*(int(up[1]) for up in before))
    words = rf"first: its gateway \(pid {pid}\) has ended: killed by SIGKILL \(9\)"
    nodes[0].until(f"{words}; no restart is used")
    nodes[1].until(words)
    assert about(nodes[0].until(r"^gateway tcp://(.*)$", 2)[-1][1]) != pid
    for node in nodes:
        node.signal("SIGUSR1")
    assert [node.end() for node in nodes] == [0, 0]
    gone(*(int(up[1]) for up in after))


def about(address: str) -> int:
    """Return the pid of the server at an address."""
    with urlopen(f"http://{address}/about", timeout=AMPLE_S) as page:
        return int(json.load(page)["pid"])


def test_a_gateway_that_runs_is_the_server_of_a_run(place: Place, etcd_url: str) -> None:
    script = place.script("""
        import rallypoint
        me = rallypoint.worker()
        assert sum(map(int, me.exchange().all_gather(me.rank, b"%d" % me.rank))) == 1
        say("url", os.environ["RALLYPOINT_URL"])
    """)
    with rallypoint.Server(engine=etcd_url) as gateway:
        nodes = [start(place, gateway.url, name, "--nnodes=2", script) for name in ("first", "second")]
        assert [node.end() for node in nodes] == [0, 0], [node.err for node in nodes]
        assert all(node.out == f"url {gateway.url}" for node in nodes)
        with rallypoint.connect(gateway.url) as store:
            assert not [key for key in store.list_keys() if not key.startswith("rendezvous:")]


def test_an_etcd_that_nobody_reaches_is_named(place: Place) -> None:
    node = start(place, "etcd://127.0.0.1:1/x", "a", "--rdzv-conf=join_timeout=2", place.script("stay()"))
    assert node.end() == 1
    assert "etcd://127.0.0.1:1/x" in node.err and "127.0.0.1:1:" in node.err, node.err
