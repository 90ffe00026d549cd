"""Preemption on four hosts: one of their agents gets the signal; a host that is lost meanwhile holds nobody.

The hosts are network namespaces. `a` has the server.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.hosts import Host, hosts
from tests.launch.runs import PRELUDE, Node
from tests.launch.test_preemption import STEPS, agreed, words

pytestmark = pytest.mark.needs("netns")


@pytest.fixture
def places() -> Iterator[tuple[Host, ...]]:
    with hosts(4) as made:
        yield made


def start(where: Path, places: tuple[Host, ...], nodes: str, **how: int) -> list[Node]:
    """Start an agent with two workers on each host."""
    (where / "script.py").write_text(PRELUDE + STEPS)
    meet = ["--nnodes", nodes, "--rdzv-endpoint", "host-a:29400", "--rdzv-id", "job", "--nproc-per-node", "2"]
    conf = ["--rdzv-conf", "last_call_timeout=60", "--preempt-signal", "SIGUSR1", "--grace", "5"]
    command = [sys.executable, "-m", "rallypoint", "run", *meet, *conf, "script.py", *map(str, words(**how))]
    return [Node(place.command(command), where, {}) for place in places]


def ended(nodes: list[Node]) -> list[int]:
    return [node.end() for node in nodes]


def test_one_signal_stops_the_ranks_of_four_hosts(tmp_path: Path, places: tuple[Host, ...]) -> None:
    nodes = start(tmp_path, places, "4")
    for node in nodes:
        node.until(r"^on", 2)
    nodes[2].signal("SIGUSR1")
    assert ended(nodes) == [75] * 4, "\n".join(node.text() for node in nodes)
    agreed(8, *nodes)
    for node in nodes[:2] + nodes[3:]:
        assert "the run was preempted: host-c: SIGUSR1: all ranks have stopped at step " in node.err, node.err


def test_three_hosts_go_on_without_the_one_that_is_preempted(tmp_path: Path, places: tuple[Host, ...]) -> None:
    nodes = start(tmp_path, places, "3:4")
    for node in nodes:
        node.until(r"^on", 2)
    nodes[2].signal("SIGUSR1")
    assert nodes[2].end() == 75
    agreed(8, *nodes)
    for node in nodes[:2] + nodes[3:]:
        node.until(r"^up \d 6 0 \d+$", 2)
        node.until(r"^on", 4)
    nodes[0].signal("SIGUSR1")
    assert ended(nodes) == [75] * 4, "\n".join(node.text() for node in nodes)


def test_a_host_that_is_cut_off_meanwhile_holds_nobody(tmp_path: Path, places: tuple[Host, ...]) -> None:
    nodes = start(tmp_path, places, "2:4", long=0)
    for node in nodes:
        node.until("^up", 2)
    busy = next(at for at, node in enumerate(nodes) if re.search("^up 0 ", node.out, re.M))
    nodes[busy].until("^long 0$")
    cut, asked = (at for at in (1, 2, 3) if at != busy) if busy else (1, 2)
    nodes[asked].signal("SIGUSR1")
    nodes[busy].until("all ranks are asked to stop")
    places[cut].cut()
    assert nodes[asked].end() == 75, nodes[asked].text()
    others = [node for at, node in enumerate(nodes) if at not in (cut, asked)]
    for node in others:
        node.until(r"^up \d 4 0 \d+$", 2)
    for node in nodes:
        node.child.kill()
        node.end()
