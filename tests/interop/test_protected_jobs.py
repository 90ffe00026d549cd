"""PyTorch jobs with a token and TLS on two nodes: what the network between them shows, and what they survive.

With `rallypoint run` and with torchrun; the nodes are network namespaces.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.capture import Capture
from tests.hosts import hosts
from tests.security.credential_files import CredentialFiles

from .etcd_nodes import etcd_nodes
from .node_agents import NodeAgents, run_job_on, run_torchrun_on
from .relayed_nodes import SERVER_PORT, relayed_nodes
from .torch_processes import TorchProcesses

pytestmark = [pytest.mark.needs("torch"), pytest.mark.needs("netns")]

PORT = 29400
KEY, VALUE, RUN, NODE = MARKS = "marked-key", "marked-value", "marked-run", "marked-node"
"""What only the store carries, for the workers and for the rendezvous."""

JOB = "--nnodes=2 --nproc-per-node=1 --max-restarts=0"
CLIENT_HELLO = b"\x16\x03\x01"
"""How a TLS stream begins."""


@pytest.mark.parametrize(("launch", "tls"), [(run_job_on, True), (run_job_on, False), (run_torchrun_on, True)])
def test_what_the_network_shows_of_a_job(
    launch: Any, tls: bool, torch_processes: TorchProcesses, tmp_path: Path
) -> None:
    """Without TLS it shows everything but the token; so the capture would have seen what TLS hides."""
    with hosts(2) as nodes, Capture(nodes[0]) as capture:
        files = CredentialFiles(tmp_path / "files", nodes, tls)
        members, logs = [], [tmp_path / node.name for node in nodes]
        for node, log in zip(nodes, logs, strict=True):
            log.touch()
            name = f"{NODE}-{node.name}"
            known = [f"--node={name}", *files.options()] if launch is run_job_on else torchrun(files, name)
            words = [*JOB.split(), f"--rdzv-endpoint={nodes[0].name}:{PORT}", f"--rdzv-id={RUN}", *known]
            words += ["-m", "tests.interop.marked_program", KEY, VALUE]
            members.append(torch_processes.start(launch, node.namespace, words, str(log)))
        codes = [member.result() for member in members]
        output = "\n".join(log.read_text() for log in logs)
        assert codes == [0, 0], output
        streams = capture.streams()
    seen = {mark for mark in (*MARKS, files.token) if any(mark.encode() in stream for stream in streams)}
    assert seen == (set() if tls else set(MARKS))
    assert any(stream.startswith(CLIENT_HELLO) for stream in streams) == tls
    assert files.token not in output


def torchrun(files: CredentialFiles | None, node: str = "") -> list[str]:
    """Return the options by which torchrun uses the plug-in, and its credentials."""
    assert files is not None
    return ["--rdzv-backend=rallypoint", f"--rdzv-conf={files.conf()}" + (f",node={node}" if node else "")]


def test_workers_of_torchrun_outlive_cuts_and_their_server(torch_processes: TorchProcesses, tmp_path: Path) -> None:
    with relayed_nodes(tmp_path, relays=False, protected=True) as nodes:
        where = f"--rdzv-endpoint={nodes.server_host.name}:{SERVER_PORT} --rdzv-id=job"
        options = " ".join([JOB, where, *torchrun(nodes.files)])
        agents = NodeAgents(torch_processes, nodes, run_torchrun_on, options)
        agents.work_on()
        nodes.restart_server()
        agents.work_on()
        nodes.cut(nodes.nodes[0])
        agents.work_on()
        agents.end(2)


@pytest.mark.needs("etcd")
def test_workers_outlive_the_leader_of_a_store_in_etcd(torch_processes: TorchProcesses, tmp_path: Path) -> None:
    with etcd_nodes(tmp_path, protected=True) as nodes:
        assert nodes.files is not None
        options = " ".join([JOB, "--rdzv-id=job", f"--store={nodes.url}", *nodes.files.options()])
        agents = NodeAgents(torch_processes, nodes, run_job_on, options)
        agents.work_on()
        assert "lost:" not in agents.output(), "one server leads, and the other leaves it alone"
        nodes.kill_leader()
        agents.work_on()
        agents.end(2)
