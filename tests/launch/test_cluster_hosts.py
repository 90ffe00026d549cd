"""Four agents with the environments of Slurm and of Kubernetes, on four hosts: no option says where they belong.

The hosts are network namespaces with the names that the scheduler gives them. A pod that is replaced has its name
again, but another address: its host is renumbered, and then the /etc/hosts of all, which stand for the DNS.
Neither scheduler is here: their variables are as their documentation has them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.hosts import FILES, IP, Host, hosts
from tests.launch.runs import PRELUDE, Node, gone
from tests.pages import pid_at

pytestmark = pytest.mark.needs("netns")

PORT = 29400
SERVICE = "mesh.ml.svc.cluster.local"
SLURM_NAMES = ["node01", "node02", "node07", "gpu-a1"]
SCRIPT = f"{PRELUDE}\nsay('run', os.environ['TORCHELASTIC_RUN_ID'])\nstay()\n"


class Cluster:
    """Four hosts of a scheduler, and the agents on them."""

    def __init__(self, kind: str, where: Path, places: Sequence[Host]) -> None:
        self.kind, self.places = kind, places
        self._where = where
        self._known: dict[str, str] = {}
        (where / "train.py").write_text(SCRIPT)
        for index, host in enumerate(places):
            host.name = SLURM_NAMES[index] if kind == "slurm" else f"train-{index}"

    def environ(self, index: int) -> dict[str, str]:
        """Return the variables that the scheduler sets on a host."""
        if self.kind == "kubernetes":
            return {
                "KUBERNETES_SERVICE_HOST": "10.96.0.1", "JOB_COMPLETION_INDEX": str(index), "PET_NNODES": "4",
                "HOSTNAME": f"train-{index}",
            }  # fmt: skip
        return {
            "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(index), "SLURM_NODEID": str(index),
            "SLURM_LOCALID": "0", "SLURM_NNODES": "4", "SLURM_JOB_NUM_NODES": "6", "SLURM_STEP_NUM_NODES": "4",
            "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
            "SLURM_JOB_NODELIST": "login,node[01-02,07],gpu-a[1-2]", "SLURM_STEP_NODELIST": "node[01-02,07],gpu-a1",
            "SLURMD_NODENAME": SLURM_NAMES[index],
        }  # fmt: skip

    @property
    def first(self) -> str:
        """The name of the first host."""
        return self._full_name(self.places[0])

    @property
    def run_id(self) -> str:
        """The name that the run gets."""
        return "slurm-4711.0" if self.kind == "slurm" else f"kubernetes-train.{SERVICE}"

    def _full_name(self, host: Host) -> str:
        return host.name if self.kind == "slurm" else f"{host.name}.{SERVICE}"

    def publish(self, *known: Host) -> None:
        """Have every host resolve the names of these hosts, and its own."""
        for host in self.places:
            lines = ["127.0.0.1 localhost"]
            for other in dict.fromkeys([host, *known]):
                short = f" {other.name}" if other is host and self.kind == "kubernetes" else ""
                lines.append(f"{other.address} {self._full_name(other)}{short}")
            (FILES / host.namespace / "hosts").write_text("\n".join(lines) + "\n")

    def renumber(self, host: Host) -> None:
        """Give a host another address, and publish it."""
        network, _, last = host.address.rpartition(".")
        before, host.address = host.address, f"{network}.{int(last) + 100}"
        for words in (("del", f"{before}/24"), ("add", f"{host.address}/24")):
            subprocess.run([IP, "-n", host.namespace, "addr", *words, "dev", "eth0"], check=True)
        self.publish(*self.places)

    def start(self, index: int, *words: str) -> Node:
        """Start an agent."""
        command = [sys.executable, "-m", "rallypoint", "run", *words, "train.py"]
        return Node(self.places[index].command(command), self._where, self.environ(index))

    def server(self) -> int:
        """Return the pid of the server."""
        with self.places[0].inside():
            return pid_at(f"{self.places[0].address}:{PORT}", "")

    def kill_all_on(self, host: Host) -> None:
        """Kill all processes on a host, as when a pod is deleted."""
        listed = subprocess.run([IP, "netns", "pids", host.namespace], check=True, capture_output=True, text=True)
        pids = [int(pid) for pid in listed.stdout.split()]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(params=["slurm", "kubernetes"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    with hosts(4) as places:
        yield Cluster(request.param, tmp_path, places)


def finish(nodes: Sequence[Node]) -> None:
    for node in nodes:
        node.signal("SIGUSR1")
    assert [node.end() for node in nodes] == [0] * 4, "\n".join(node.text() for node in nodes)


def test_four_nodes_have_their_ranks_and_the_first_hosts_the_server(cluster: Cluster) -> None:
    """The agents start in the wrong order, and the first host's name cannot be resolved until all have started."""
    cluster.publish()
    nodes = {index: cluster.start(index) for index in (3, 1, 2, 0)}
    for index in (1, 2, 3):
        nodes[index].until(rf"no server answers at {cluster.first}:{PORT} yet")
    cluster.publish(*cluster.places)
    for index, node in nodes.items():
        node.up(index, world=4)
        said = f"4 nodes, this is node {index}, server at {cluster.first}:{PORT}, run {cluster.run_id}"
        assert node.err.count(said) == 1, node.err
        assert f"run {cluster.run_id}" in node.out
    assert (
        Path(f"/proc/{cluster.server()}/ns/net").stat().st_ino
        == Path(f"/run/netns/{cluster.places[0].namespace}").stat().st_ino
    )
    finish(list(nodes.values()))


@pytest.mark.timeout(300)
def test_the_first_node_is_killed_and_returns_with_another_address(cluster: Cluster) -> None:
    """Its server dies with it; the others wait, find the new one by name, and all have their ranks again."""
    cluster.publish(*cluster.places)
    nodes = [cluster.start(index, "--max-restarts", "1") for index in range(4)]
    before = [node.up(index, world=4)[index] for index, node in enumerate(nodes)]
    first = cluster.places[0]
    cluster.kill_all_on(first)
    assert nodes[0].end() == -signal.SIGKILL
    cluster.renumber(first)
    nodes[0] = cluster.start(0, "--max-restarts", "1")
    nodes[0].until(r"^up 0 4 \d+ ")
    for index, node in enumerate(nodes[1:], 1):
        node.up(index, world=4, restarts=1)
    gone(*before)
    finish(nodes)
