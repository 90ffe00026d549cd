"""`NodeAgents`: a launcher on each of several nodes, whose workers run relayed_program.py, and their output.

A launcher runs in a process forked from `TorchProcesses`, which enters the network namespace of its node.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from tests.hosts import enter

from rallypoint.cli import main

from .etcd_nodes import EtcdNodes
from .relayed_nodes import RelayedNodes
from .torch_processes import TorchProcesses
from .torchrun_agents import run_agent

__all__ = ["NodeAgents", "run_job_on", "run_torchrun_on"]


class NodeAgents:
    """A launcher on every node: `launch` runs with the node's namespace, the options and a file for the output."""

    def __init__(
        self,
        torch_processes: TorchProcesses,
        nodes: RelayedNodes | EtcdNodes,
        launch: Callable[[str, list[str], str], int],
        options: str,
    ) -> None:
        words = [*options.split(), "-m", "tests.interop.relayed_program", str(nodes.place)]
        self._nodes = nodes
        self._logs = [nodes.place / f"agent-{number}" for number in range(len(nodes.nodes))]
        self._members = []
        for node, log in zip(nodes.nodes, self._logs, strict=True):
            log.touch()
            self._members.append(torch_processes.start(launch, node.namespace, words, str(log)))

    def output(self) -> str:
        """Return everything that the launchers and their workers have printed."""
        return "\n".join(log.read_text(errors="replace") for log in self._logs)

    def work_on(self) -> None:
        """Return when the workers have made a few more steps."""
        try:
            self._nodes.work_on(self._members)
        except BaseException:
            print(self.output())
            raise

    def end(self, workers: int) -> None:
        """Have the workers end; they must be the same processes that began, with the right result."""
        self._nodes.stop()
        assert [member.result() for member in self._members] == [0] * len(self._members), self.output()
        begun = re.findall(r"begins (\d+ \d+)", self.output())
        ended = re.findall(r"ends (\d+ \d+) \(\d+, True\)", self.output())
        assert sorted(begun) == sorted(ended) and len(ended) == workers, self.output()


# In the process of a launcher


def run_torchrun_on(namespace: str, words: list[str], output: str) -> int:
    """Run torchrun on a node; return its exit code."""
    _enter_node(namespace)
    return run_agent(words, output)


def run_job_on(namespace: str, words: list[str], output: str) -> int:
    """Run `rallypoint run` on a node; return its exit code."""
    _enter_node(namespace)
    pipe = os.open(output, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(pipe, descriptor)
    try:
        main(["run", *words])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def _enter_node(namespace: str) -> None:
    enter(namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
