"""An agent that is stopped (SIGSTOP): the others notice, continue without it, and take it back when it goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.launch.runs import Place, gone

from rallypoint.cli import main


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with Place(tmp_path) as made:
        yield made


@pytest.mark.parametrize("stopped", [0, 2])
def test_a_stopped_agent_is_lost_and_rejoins_when_it_goes_on(place: Place, stopped: int) -> None:
    words = ["--agent-timeout", 3, "--rdzv-conf", "last_call_timeout=1", place.script("stay()")]
    nodes = [place.node(name, "--node-rank", at, *words, nodes="2:3") for at, name in enumerate(("n0", "n1", "n2"))]
    before = {rank: nodes[rank].up(rank, world=3)[rank] for rank in range(3)}
    nodes[stopped].signal("SIGSTOP")
    others = [node for node in nodes if node is not nodes[stopped]]
    for node in others:
        node.until(r"^up \d 2 0 \d+$")
        node.until(rf"lost n{stopped} \(.*\): its agent has ended, or was stopped for 3 s \(--agent-timeout\)")
    nodes[stopped].signal("SIGCONT")
    for node in nodes:
        node.until(r"^up \d 3 0 \d+$", 1 if node is nodes[stopped] else 2)
    nodes[stopped].until(r"^up \d 3 0 \d+$", 2)
    gone(*before.values())
    for node in nodes:
        node.signal("SIGUSR1")
    assert [node.end() for node in nodes] == [0, 0, 0], "\n".join(node.text() for node in nodes)


def test_nodes_that_leave_are_not_taken_for_stopped(place: Place) -> None:
    script = place.script("import rallypoint\nrallypoint.worker().barrier(60)")
    nodes = [place.node(name, "--agent-timeout", 30, script, nodes="3") for name in ("n0", "n1", "n2")]
    assert [node.end() for node in nodes] == [0, 0, 0]
    assert not any("stopped" in node.err for node in nodes)


def test_an_agent_timeout_that_heartbeats_cannot_keep_is_refused() -> None:
    done = CliRunner().invoke(main, ["run", "--agent-timeout", "0.5", "x.py"])
    assert done.exit_code == 2 and "--agent-timeout must be at least 1 s, or 0" in done.output
