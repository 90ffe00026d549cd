"""`rallypoint runs`: operators end, restart and drain runs and nodes; who did it and why is shown."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.launch.runs import Node, Place, gone
from tests.raw_peer import AMPLE_S

from rallypoint.launch import failures

WHO = r"asked for by \S+@\S+: it is late"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with Place(tmp_path) as made:
        yield made


def operate(place: Place, *words: str) -> str:
    """Run `rallypoint runs` with a reason; return what it printed."""
    command = [sys.executable, "-m", "rallypoint", "runs", *words, "--store", f"tcp://localhost:{place.port}"]
    done = subprocess.run([*command, "--why", "it is late"], capture_output=True, text=True, timeout=AMPLE_S)
    return done.stdout + done.stderr


def two_nodes(place: Place, *words: object, nodes: str = "2") -> list[Node]:
    script, quick = place.script("stay()"), ["--rdzv-conf", "last_call_timeout=1"]
    names = enumerate(("n0", "n1"))
    started = [
        place.node(name, "--node-rank", at, *quick, *words, script, nodes=nodes, run="a/b") for at, name in names
    ]
    for rank, node in enumerate(started):
        node.up(rank, world=2)
    return started


def finish(*nodes: Node) -> None:
    for node in nodes:
        node.signal("SIGUSR1")
    assert [node.end() for node in nodes] == [0] * len(nodes), "\n".join(node.text() for node in nodes)


def test_a_run_is_restarted_without_a_restart_of_its_budget(place: Place) -> None:
    nodes = two_nodes(place)
    assert operate(place, "restart", "a/b") == "restart of a/b: confirmed by n0, n1\n"
    for node in nodes:
        node.until(r"^up \d 2 0 \d+$", 2)
        assert re.search(rf"restart {WHO}; no restart is used", node.err), node.err
        assert node.err.count("all nodes stop") == 1
    finish(*nodes)


def test_the_workers_of_one_node_are_restarted_where_nodes_restart_alone(place: Place) -> None:
    nodes = two_nodes(place, "--restart", "node")
    assert operate(place, "restart", "a/b/n1") == "restart of a/b/n1: confirmed by n1\n"
    nodes[1].until(r"^up 1 2 0 \d+$", 2)
    assert nodes[0].out.count("up") == 1
    finish(*nodes)


def test_a_drained_node_leaves_and_the_others_continue(place: Place) -> None:
    nodes = two_nodes(place, nodes="1:2")
    assert "there are: a/b/n0, a/b/n1" in operate(place, "drain", "a/b/n2")
    assert operate(place, "drain", "a/b/n1") == "drain of a/b/n1: confirmed by n1\n"
    assert nodes[1].end() == 75
    assert re.search(rf"this node leaves the run \(drain\), {WHO}", nodes[1].err)
    assert re.search(rf"n1: drain {WHO}: SIGTERM for ranks 0, 1, which never asked whether to stop", nodes[0].err)
    nodes[0].until(r"^up 0 1 0 \d+$")
    finish(nodes[0])


def test_a_killed_node_kills_its_workers_at_once(place: Place) -> None:
    script = place.script("on('SIGTERM', lambda: say('never ends'))\nstay()")
    node = place.node("n0", "--grace", 600, script, nodes="1", run="a/b")
    pids = node.up(0, world=1)
    assert operate(place, "kill", "a/b/n0") == "kill of a/b/n0: confirmed by n0\n"
    assert node.end() in (130, 143)
    assert re.search(rf"this node leaves the run \(kill\), {WHO}", node.err)
    gone(*pids.values())


@pytest.mark.parametrize("waits", [False, True])
def test_a_killed_run_ends_on_all_nodes_with_the_reason(place: Place, waits: bool) -> None:
    words = ["--log-dir", place.where / "logs"]
    if waits:  # for a node that never comes
        nodes = [place.node("n0", *words, place.script("stay()"), nodes="2", run="a/b")]
        until_reported(place)
    else:
        nodes = two_nodes(place, *words)
    assert operate(place, "kill", "a/b") == "kill of a/b: the run has ended\n"
    assert [node.end() for node in nodes] == [1] * len(nodes), "\n".join(node.text() for node in nodes)
    for node in nodes:
        assert re.search(rf"run killed, {WHO}", node.err), node.err
    if not waits:
        first = failures.read(place.where / "logs").first
        assert re.fullmatch(rf"run killed, {WHO}", first.message) and "@" in first.node
    assert "no run or node" in operate(place, "kill", "a/b")


def until_reported(place: Place) -> None:
    """Wait until the node is known to the store."""
    command = [sys.executable, "-m", "rallypoint", "get", "run:a%2Fb/node:n0", "--store"]
    subprocess.run([*command, f"tcp://localhost:{place.port}"], check=True, timeout=AMPLE_S, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(("what", "codes"), [("drain", {75}), ("kill", {130, 143})])
def test_a_node_that_is_out_for_its_health_leaves_for_good(place: Place, what: str, codes: set[int]) -> None:
    words = ["--health-check", "exit 3", "--health-cooldown", 900, place.script("stay()")]
    node = place.node("n0", *words, nodes="1:2", run="a/b")
    node.until("health check failed: exit code 3; this node is out of the run")
    until_reported(place)
    assert operate(place, what, "a/b/n0") == f"{what} of a/b/n0: confirmed by n0\n"
    assert node.end() in codes and not node.out
    assert re.search(rf"this node leaves the run \({what}\), {WHO}", node.err), node.err


def test_a_run_is_killed_while_its_node_is_out_for_its_health(place: Place) -> None:
    words = ["--health-check", "exit 3", "--health-cooldown", 900, place.script("stay()")]
    node = place.node("n0", *words, nodes="1:2", run="a/b")
    node.until("health check failed: exit code 3; this node is out of the run")
    until_reported(place)
    assert operate(place, "kill", "a/b") == "kill of a/b: the run has ended\n"
    assert node.end() == 1 and re.search(rf"run killed, {WHO}", node.err), node.err


def test_the_reason_is_one_line_whatever_it_contains(place: Place) -> None:
    node = place.node("n0", place.script("stay()"), nodes="1", run="a/b")
    node.up(0, world=1)
    url = f"tcp://localhost:{place.port}"
    command = [sys.executable, "-m", "rallypoint", "runs", "kill", "a/b", "--store", url, "--why", "x\n\x1b[31mforged"]
    subprocess.run(command, check=True, timeout=AMPLE_S, env={**os.environ, "LOGNAME": "me\nroot"})
    assert node.end() == 1
    assert "\x1b" not in node.err and not [line for line in node.err.splitlines() if line.startswith("forged")]
