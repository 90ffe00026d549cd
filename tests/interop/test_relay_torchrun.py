"""torchrun with our back end on two nodes, a relay beside each agent, while links are cut and the server is killed.

The nodes are network namespaces. No worker is started again: the same processes train to the end, with the right
result, be their store rank 0's relay or each node's own.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from tests.hosts import enter

from .agents import run_agent
from .crew import Crew
from .relayed_nodes import SERVER_PORT, RelayedNodes, relayed_nodes
from .relayed_program import WORLD

pytestmark = [pytest.mark.needs("torch"), pytest.mark.needs("netns")]

KILLS, CUTS = 5, 2


class Agents:
    """torchrun on every node, in members of the crew, and what it and its worker say."""

    def __init__(self, crew: Crew, nodes: RelayedNodes, relay: str) -> None:
        options = f"--nnodes={WORLD} --nproc-per-node=1 --rdzv-backend=rallypoint --rdzv-id=job --max-restarts=0"
        where = f"--rdzv-endpoint={nodes.server_host.name}:{SERVER_PORT} --rdzv-conf=relay={relay}"
        words = [*options.split(), *where.split(), "-m", "tests.interop.relayed_program", str(nodes.place)]
        self._nodes = nodes
        self._logs = [nodes.place / f"agent-{number}" for number in range(WORLD)]
        self._members = []
        for node, log in zip(nodes.nodes, self._logs, strict=True):
            log.touch()
            self._members.append(crew.start(run_agent_on, node.namespace, words, str(log)))

    def said(self) -> str:
        return "\n".join(log.read_text(errors="replace") for log in self._logs)

    def work_on(self) -> None:
        """Return when the workers have made a few more steps."""
        try:
            self._nodes.work_on(self._members)
        except BaseException as error:
            error.add_note(self.said())
            raise

    def end(self) -> list[int]:
        return [member.result() for member in self._members]


def run_agent_on(namespace: str, words: list[str], output: str) -> int:
    """Be torchrun on a node."""
    enter(namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    return run_agent(words, output)


@pytest.mark.parametrize("relay", ["rank0", "local"])
def test_workers_of_torchrun_go_on(relay: str, crew: Crew, tmp_path: Path) -> None:
    with relayed_nodes(tmp_path, relays=False) as nodes:
        agents = Agents(crew, nodes, relay)
        agents.work_on()
        for _ in range(KILLS):
            nodes.restart_server()
            agents.work_on()
        for number in range(CUTS):
            nodes.cut(nodes.nodes[number % 2])
            agents.work_on()
        nodes.stop()
        assert agents.end() == [0] * WORLD, agents.said()
        begun = re.findall(r"begins (\d+ \d+)", agents.said())
        ended = re.findall(r"ends (\d+ \d+) \(\d+, True\)", agents.said())
        assert sorted(begun) == sorted(ended) and len(ended) == WORLD, agents.said()
