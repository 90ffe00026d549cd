"""PyTorch on a store in etcd: training continues in the same processes while servers and members are killed.

With `rallypoint run` and with torchrun. Two nodes in network namespaces run the servers of the store and a relay each;
the leading server is killed, and a member of etcd.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.etcd.fixtures import etcd_space

from .etcd_nodes import etcd_nodes
from .node_agents import NodeAgents, run_job_on, run_torchrun_on
from .torch_processes import TorchProcesses
from .torchrun_agents import TorchrunAgents, torchrun_agents

pytestmark = [pytest.mark.needs("torch"), pytest.mark.needs("etcd")]

WORKERS = 2
"""On each of two nodes."""

STORE = {run_job_on: "--store=", run_torchrun_on: "--rdzv-backend=rallypoint --rdzv-endpoint="}
"""How each launcher is given the URL of the store."""


@pytest.mark.needs("netns")
@pytest.mark.parametrize("launch", [run_job_on, run_torchrun_on])
def test_four_ranks_on_two_nodes_continue_training(
    launch: Any, torch_processes: TorchProcesses, tmp_path: Path
) -> None:
    with etcd_nodes(tmp_path) as nodes:
        options = f"--nnodes=2 --nproc-per-node={WORKERS} --rdzv-id=job --max-restarts=0 {STORE[launch]}{nodes.url}"
        agents = NodeAgents(torch_processes, nodes, launch, options)
        agents.work_on()
        nodes.kill_leader()
        agents.work_on()
        nodes.kill_member(0)
        agents.work_on()
        nodes.kill_leader()
        agents.work_on()
        agents.end(2 * WORKERS)


# torchrun on one machine


@pytest.fixture
def torchrun(torch_processes: TorchProcesses, tmp_path: Path, etcd_cluster: Any) -> Iterator[TorchrunAgents]:
    with torchrun_agents(torch_processes, tmp_path, endpoint=etcd_space(etcd_cluster)) as everybody:
        yield everybody


def test_training_continues_when_an_agent_dies_with_its_server(torchrun: TorchrunAgents) -> None:
    agents = [torchrun.start(name, "--nnodes=1:2", "last_call_timeout=1") for name in ("one", "two")]
    torchrun.train_as(agents)
    step = torchrun.some_steps()
    torchrun.kill(agents[0])
    torchrun.train_as(agents[1:], after=step)
    torchrun.some_steps()
    torchrun.stop_file().touch()
    assert torchrun.codes(agents[1]) == [0], torchrun.said()
