"""`--health-check` on four hosts: three work, one is a spare; the status says which host is out, and why.

The agents have no names of their own, as on a cluster. The hosts are network namespaces.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tests.hosts import Host, hosts
from tests.launch.runs import PRELUDE, Node, gone
from tests.raw_peer import AMPLE_S, until

from rallypoint.server.status.model import NodeStatus, RunStatus, ServerStatus

pytestmark = pytest.mark.needs("netns")

PORT = 29400
CHECK = 'test ! -e "bad-$(hostname)" || { echo "Xid 79: GPU has fallen off the bus"; exit 9; }'
WHY = "exit code 9: Xid 79: GPU has fallen off the bus"


def start(host: Host, where: Path) -> Node:
    words = ["--nnodes=2:3", "--rdzv-endpoint", f"host-a:{PORT}", "--rdzv-id=job", "--max-restarts=1"]
    words += ["--health-check", CHECK, "--health-cooldown=1", "--rdzv-conf=last_call_timeout=60"]
    return Node(host.command([sys.executable, "-m", "rallypoint", "run", *words, "script.py"]), where, {})


def run_status(host: Host) -> RunStatus:
    """Return the run as `rallypoint status` shows it on a host."""
    command = [sys.executable, "-m", "rallypoint", "status", f"tcp://host-a:{PORT}", "--json"]
    told = subprocess.run(host.command(command), capture_output=True, check=True, timeout=AMPLE_S).stdout
    (run,) = msgspec.json.decode(told, type=ServerStatus).runs
    return run


def node_where(host: Host, true: Callable[[NodeStatus], bool]) -> NodeStatus:
    """Wait until a node of the run is as described, and return it."""
    seen = until(lambda: [node for node in run_status(host).nodes if true(node)], bool)
    return seen[0]


@pytest.mark.timeout(600)
def test_a_host_that_fails_its_check_is_out_and_a_spare_has_its_rank(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(f"{PRELUDE}\nstay()\n")
    with hosts(4) as (a, b, c, d):
        nodes = {host.name: start(host, tmp_path) for host in (a, b, c)}
        ups = {name: node.until(r"^up (\d) 3 0 (\d+)$")[0] for name, node in nodes.items()}
        nodes["host-d"] = start(d, tmp_path)
        node_where(a, lambda node: node.node == "host-d" and node.spare)

        (tmp_path / "bad-host-b").touch()
        os.kill(int(ups["host-b"][2]), 9)
        taken = nodes["host-d"].until(r"^up (\d) 3 0 (\d+)$")[0]
        assert taken[1] == ups["host-b"][1], "its rank, and the failure uses no restart"
        out = node_where(
            a, lambda node: node.state == "unhealthy" and node.health is not None and node.health.failed > 1
        )
        assert out.node == "host-b" and out.reason.endswith(WHY) and out.health is not None
        assert out.health.out_s > 0 and out.rank is None and out.pid == nodes["host-b"].child.pid
        assert not run_status(a).missing, "it left, and was not lost"
        text = subprocess.run(
            a.command([sys.executable, "-m", "rallypoint", "status", f"tcp://host-a:{PORT}"]),
            capture_output=True, check=True, timeout=AMPLE_S, text=True,
        ).stdout  # fmt: skip
        assert "node host-b (host-b, 10." in text.replace("\n", "") and "out for" in text

        (tmp_path / "bad-host-b").unlink()
        node_where(a, lambda node: node.node == "host-b" and node.spare)
        for name in ("host-a", "host-c", "host-d"):
            nodes[name].signal("SIGUSR1")
        assert [node.end() for node in nodes.values()] == [0] * 4
        assert {name: node.out.count("up") for name, node in nodes.items()} == {
            "host-a": 2, "host-b": 1, "host-c": 2, "host-d": 1
        }  # fmt: skip
        gone(*(int(match[2]) for match in [*ups.values(), taken]))


@pytest.mark.timeout(600)
def test_a_host_that_has_not_joined_has_a_report_and_then_its_name(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(f"{PRELUDE}\nstay()\n")
    bad = tmp_path / "bad-host-b"
    bad.touch()
    with hosts(3) as (a, b, c):
        nodes = [start(host, tmp_path) for host in (a, b, c)]
        nodes[1].until("this node is out of the run")
        out = node_where(a, lambda node: node.state == "unhealthy")
        assert out.node == f"host-b (pid {nodes[1].child.pid})" and out.host == "host-b" and out.reason.endswith(WHY)
        bad.unlink()
        for node in nodes:
            node.until(r"^up \d 3 0 ")
        until(
            lambda: sorted(node.node for node in run_status(a).nodes),
            lambda names: names == ["host-a", "host-b", "host-c"],
        )
        for node in nodes:
            node.signal("SIGUSR1")
        assert [node.end() for node in nodes] == [0] * 3
