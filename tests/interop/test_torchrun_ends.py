"""How torchrun's agents end with the plug-in: a failed agent ends the others, a finished one does not.

Agents and workers are real processes; each agent runs torchrun's own `main`, sometimes with another time-out for its
exit barrier, which has no option.
"""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.hosts import Host, hosts
from tests.launch.runs import Node

from rallypoint import Rendezvous, Server, TCPStore, net

from .torch_processes import AMPLE_S

pytestmark = pytest.mark.needs("torch")

MAIN = """
import functools, sys
from torch.distributed import run
from torch.distributed.launcher import api
api.LocalElasticAgent = functools.partial(api.LocalElasticAgent, exit_barrier_timeout=float(sys.argv[1]))
run.main(sys.argv[2:])
"""
UP = """
import os, pathlib, signal, sys, threading
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
def hang():
    threading.Event().wait()
signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))
say("up", rank, world, os.getpid())
"""

Start = Callable[..., Node]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A function that starts an agent, whose workers run the given code."""
    started: list[Node] = []
    (tmp_path / "main.py").write_text(MAIN)

    def start(code: str, where: str, *options: str, exit_barrier: float = 300, on: Host | None = None) -> Node:
        (tmp_path / "script.py").write_text(UP + textwrap.dedent(code))
        words = ["--rdzv-backend=rallypoint", f"--rdzv-endpoint={where}", "--rdzv-id=job", "--nproc-per-node=1"]
        command = [sys.executable, "main.py", str(exit_barrier), *words, *options, "script.py"]
        started.append(Node(command if on is None else on.command(command), tmp_path, {}))
        return started[-1]

    yield start
    for node in started:
        node.child.kill()
        node.end()


@pytest.fixture
def where() -> Iterator[str]:
    with Server() as server:
        yield f"127.0.0.1:{server.port}"


def conf(node: str, rank: int) -> str:
    return f"--rdzv-conf=node={node},rank={rank},is_host=0"


def test_a_failure_ends_the_other_agents_if_too_few_are_left(start: Start, where: str) -> None:
    code = "sys.exit(3) if rank == 1 else hang()"
    a, b = (start(code, where, "--nnodes=2", conf(node, rank)) for rank, node in enumerate("ab"))
    assert [a.end() != 0, b.end() != 0] == [True, True]
    assert "ended in failure, 1 of at least 2 nodes are left: rank 1 failed: exit code 3" in a.text()
    assert a.out.count("up 0 2") < 2, "it was not restarted; the failure may have come before its first line"


def test_a_failure_does_not_end_the_other_agents_if_they_are_enough(start: Start, where: str) -> None:
    code = "sys.exit(3) if rank == 1 else None if world == 1 else hang()"
    a, b = (start(code, where, "--nnodes=1:2", conf(node, rank)) for rank, node in enumerate("ab"))
    assert b.end() != 0 and a.end() == 0, a.text() + b.text()
    a.until("^up 0 1 ")


def test_an_agent_that_ends_first_leaves_the_others_running(start: Start, where: str) -> None:
    code = "hang() if rank == 1 else None"
    a, b = (start(code, where, "--nnodes=2", conf(node, r), exit_barrier=0) for r, node in enumerate("ab"))
    pid = int(b.until(r"^up 1 2 (\d+)")[0][1])
    assert a.end() == 0, a.text()
    host, port = net.parse_endpoint(where, 0)
    with TCPStore(host, port, timeout=AMPLE_S) as store:
        status = Rendezvous(store, "job", 2).status()
    assert (status.phase, list(status.nodes)) == ("formed", ["b"])
    os.kill(pid, signal.SIGUSR1)
    assert b.end() == 0 and b.out.count("up 1 2") == 1, b.text()


def test_a_second_job_under_the_same_name_is_refused(start: Start, where: str) -> None:
    code = "hang()"
    first = [start(code, where, "--nnodes=2", conf(node, rank)) for rank, node in enumerate("ab")]
    pids = [int(node.until(r"^up \d 2 (\d+)")[0][1]) for node in first]
    second = start(code, where, "--nnodes=2", "--rdzv-conf=node=c,is_host=0")
    assert second.end() != 0 and "is full: it has all of its 2 nodes (a, b)" in second.text()
    assert "up" not in second.out
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)
    assert [node.end() for node in first] == [0, 0]


@pytest.mark.needs("netns")
def test_an_agent_that_was_cut_off_rejoins(start: Start) -> None:
    code = "hang()"
    with hosts(2) as places:
        agents = [
            start(code, "host-a:29400", "--nnodes=1:2", "--rdzv-conf=last_call_timeout=60", on=place)
            for place in places
        ]
        for agent in agents:
            agent.until(r"^up \d 2 ")
        places[1].cut()
        agents[0].until("^up 0 1 ")
        agents[1].until("looking for the server again")
        places[1].mend()
        pids = [int(agent.until(r"^up \d 2 (\d+)", 2)[-1][1]) for agent in agents]
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)
        assert [agent.end() for agent in agents] == [0, 0], "\n".join(agent.text() for agent in agents)
