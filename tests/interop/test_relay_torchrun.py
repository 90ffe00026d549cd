"""torchrun with our back end on two nodes, a relay beside each agent, while links are cut and the server is killed.

The nodes are network namespaces. No worker is started again: the same processes train to the end, with the right
result, be their store rank 0's relay or each node's own.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.wire import AMPLE_S, until

from .agents import TORCHRUN
from .crew import ROOT
from .relayed_nodes import SERVER_PORT, RelayedNodes, relayed_nodes
from .relayed_program import WORLD

pytestmark = [pytest.mark.needs("torch"), pytest.mark.needs("netns")]

KILLS, CUTS = 5, 2


class Agents:
    """torchrun on every node, and what it and its worker say."""

    def __init__(self, nodes: RelayedNodes, relay: str, stack: contextlib.ExitStack) -> None:
        self._nodes = nodes
        options = f"--nnodes={WORLD} --nproc-per-node=1 --rdzv-backend=rallypoint --rdzv-id=job --max-restarts=0"
        where = f"--rdzv-endpoint={nodes.server_host.name}:{SERVER_PORT} --rdzv-conf=relay={relay}"
        program = ["-m", "tests.interop.relayed_program", str(nodes.place)]
        self._logs = [nodes.place / f"agent-{number}" for number in range(WORLD)]
        self._children = []
        for node, log in zip(nodes.nodes, self._logs, strict=True):
            with log.open("wb") as file:
                command = [str(TORCHRUN), *options.split(), *where.split(), *program]
                child = node.popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT)
            stack.callback(child.wait)
            stack.callback(child.kill)
            self._children.append(child)

    def said(self) -> str:
        return "\n".join(log.read_text(errors="replace") for log in self._logs)

    def work_on(self) -> None:
        """Return when the workers have made a few more steps."""
        enough = self._nodes.steps() + 3

        def look() -> int:
            assert all(child.poll() is None for child in self._children), self.said()
            return self._nodes.steps()

        until(look, lambda made: made >= enough)

    def end(self) -> list[int]:
        return [child.wait(AMPLE_S) for child in self._children]


def kill_the_server(nodes: RelayedNodes, go_on: Callable[[], None]) -> None:
    for _ in range(KILLS):
        nodes.restart_server()
        go_on()


def cut_the_links(nodes: RelayedNodes, go_on: Callable[[], None]) -> None:
    for number in range(CUTS):
        nodes.cut(nodes.nodes[number % 2])
        go_on()


def everything(nodes: RelayedNodes, go_on: Callable[[], None]) -> None:
    kill_the_server(nodes, go_on)
    cut_the_links(nodes, go_on)


@pytest.mark.parametrize(("relay", "fault"), [("rank0", everything), ("local", everything)], ids=["rank0", "local"])
def test_workers_of_torchrun_go_on(relay: str, fault: Callable[..., None], tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(relayed_nodes(tmp_path, relays=False))
        agents = Agents(nodes, relay, stack)
        agents.work_on()
        fault(nodes, agents.work_on)
        nodes.stop()
        assert agents.end() == [0] * WORLD, agents.said()
        begun = re.findall(r"begins (\d+ \d+)", agents.said())
        ended = re.findall(r"ends (\d+ \d+) \(\d+, True\)", agents.said())
        assert sorted(begun) == sorted(ended) and len(ended) == WORLD, agents.said()
