"""PyTorch on a store in etcd: training goes on, in the same processes, while what the store is made of is killed.

With `rallypoint run` and with torchrun. Two nodes in network namespaces run the servers of the store and a relay each;
the leading server is killed, and a member of etcd.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.etcd.fixtures import etcd_space

from .agents import Cast, cast
from .crew import Crew
from .etcd_nodes import EtcdNodes, etcd_nodes, run_job_on, run_torchrun_on

pytestmark = [pytest.mark.needs("torch"), pytest.mark.needs("etcd")]

WORKERS = 2
"""On each of two nodes."""


class Agents:
    """A launcher on every node, and what it and its workers say."""

    def __init__(self, crew: Crew, nodes: EtcdNodes, launch: Any) -> None:
        where = f"--store={nodes.url}" if launch is run_job_on else f"--rdzv-endpoint={nodes.url}"
        options = f"--nnodes=2 --nproc-per-node={WORKERS} {where} --rdzv-id=job --max-restarts=0"
        more = "" if launch is run_job_on else " --rdzv-backend=rallypoint"
        words = [*(options + more).split(), "-m", "tests.interop.relayed_program", str(nodes.place)]
        self._nodes = nodes
        self._logs = [nodes.place / f"agent-{number}" for number in range(2)]
        self._members = []
        for node, log in zip(nodes.nodes, self._logs, strict=True):
            log.touch()
            self._members.append(crew.start(launch, node.namespace, words, str(log)))

    def said(self) -> str:
        return "\n".join(log.read_text(errors="replace") for log in self._logs)

    def work_on(self) -> None:
        """Return when the workers have made a few more steps."""
        try:
            self._nodes.work_on(self._members)
        except BaseException as error:
            error.add_note(self.said())
            raise

    def end(self) -> None:
        """Have the workers end; they must be those who began, with the right result."""
        self._nodes.stop()
        assert [member.result() for member in self._members] == [0, 0], self.said()
        begun = re.findall(r"begins (\d+ \d+)", self.said())
        ended = re.findall(r"ends (\d+ \d+) \(\d+, True\)", self.said())
        assert sorted(begun) == sorted(ended) and len(ended) == 2 * WORKERS, self.said()


@pytest.mark.needs("netns")
@pytest.mark.parametrize("launch", [run_job_on, run_torchrun_on])
def test_four_ranks_on_two_nodes_train_on(launch: Any, crew: Crew, tmp_path: Path) -> None:
    with etcd_nodes(tmp_path) as nodes:
        agents = Agents(crew, nodes, launch)
        agents.work_on()
        nodes.kill_leader()
        agents.work_on()
        nodes.kill_member(0)
        agents.work_on()
        nodes.kill_leader()
        agents.work_on()
        agents.end()


# torchrun on one machine


@pytest.fixture
def stage(crew: Crew, tmp_path: Path, etcd_cluster: Any) -> Iterator[Cast]:
    with cast(crew, tmp_path, endpoint=etcd_space(etcd_cluster)) as everybody:
        yield everybody


def test_two_ranks_go_on_when_an_agent_dies_with_its_server(stage: Cast) -> None:
    agents = [stage.start(name, "--nnodes=1:2", "last_call_timeout=1") for name in ("one", "two")]
    stage.train_as(agents)
    step = stage.some_steps()
    stage.kill(agents[0])
    stage.train_as(agents[1:], after=step)
    stage.some_steps()
    stage.stop_file().touch()
    assert stage.codes(agents[1]) == [0], stage.said()
