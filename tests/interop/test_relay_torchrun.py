"""torchrun with our back end on two nodes, a relay beside each agent, while links are cut and the server is killed.

The nodes are network namespaces. No worker is restarted: the same processes train to the end, with the right result,
whether their store is rank 0's relay or each node's own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .node_agents import NodeAgents, run_torchrun_on
from .relayed_nodes import SERVER_PORT, relayed_nodes
from .relayed_program import WORLD
from .torch_processes import TorchProcesses

pytestmark = [pytest.mark.needs("torch"), pytest.mark.needs("netns")]

KILLS, CUTS = 5, 2


@pytest.mark.parametrize("relay", ["rank0", "local"])
def test_the_same_workers_train_to_the_end(relay: str, torch_processes: TorchProcesses, tmp_path: Path) -> None:
    with relayed_nodes(tmp_path, relays=False) as nodes:
        options = f"--nnodes={WORLD} --nproc-per-node=1 --rdzv-backend=rallypoint --rdzv-id=job --max-restarts=0"
        options += f" --rdzv-endpoint={nodes.server_host.name}:{SERVER_PORT} --rdzv-conf=relay={relay}"
        agents = NodeAgents(torch_processes, nodes, run_torchrun_on, options)
        agents.work_on()
        for _ in range(KILLS):
            nodes.restart_server()
            agents.work_on()
        for number in range(CUTS):
            nodes.cut(nodes.nodes[number % 2])
            agents.work_on()
        agents.end(WORLD)
