"""torchrun with our back end: agents that train together, die, rejoin, join late, are spares, or have other options.

Each test starts few agents and checks much, because every agent and every worker of every round imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.request import urlopen

import pytest
from tests.raw_peer import wait_for_end

import rallypoint

from .torch_processes import TorchProcesses
from .torchrun_agents import TorchrunAgents, torchrun_agents

pytestmark = pytest.mark.needs("torch")

CALL = "last_call_timeout=20"
"""Long enough for all expected nodes; complete rounds do not wait for it."""


@pytest.fixture
def torchrun(torch_processes: TorchProcesses, tmp_path: Path) -> Iterator[TorchrunAgents]:
    """torchrun without a server: the first agent starts one."""
    with torchrun_agents(torch_processes, tmp_path) as everybody:
        yield everybody


@pytest.fixture
def torchrun_at_server(
    torch_processes: TorchProcesses, tmp_path: Path, server: rallypoint.Server
) -> Iterator[TorchrunAgents]:
    """torchrun with an existing server."""
    with torchrun_agents(torch_processes, tmp_path, server.port) as everybody:
        yield everybody


def pid_of_server(agents: TorchrunAgents) -> int:
    """Return the pid of the server that agents have started; 0 while there is none."""
    with contextlib.suppress(OSError), urlopen(f"http://localhost:{agents.port}/about") as about:
        return int(json.load(about)["pid"])
    return 0


def test_two_agents_survive_the_death_of_a_worker_and_finish(torchrun: TorchrunAgents) -> None:
    """The real commands, with two workers per node and only the required options."""
    agents = [torchrun.start(name, "--nnodes=2 --nproc-per-node=2", command=True) for name in ("_one", "_two")]
    ranks = torchrun.train_as(agents, workers=2)
    assert sorted(ranks) == [0, 1] and torchrun.step == 0
    step = torchrun.some_steps()
    os.kill(agents[0].begun[-1].pid, signal.SIGKILL)
    assert torchrun.train_as(agents, after=step, workers=2) == ranks, "nodes keep their ranks"
    torchrun.some_steps()
    torchrun.stop_file().touch()
    assert torchrun.codes(*agents) == [0, 0], torchrun.said()
    assert torchrun.checkpoint() > torchrun.step


def test_training_survives_killed_agents_even_the_one_that_started_the_server(torchrun: TorchrunAgents) -> None:
    first = torchrun.start("a", "--nnodes=1:2", CALL)
    torchrun.poll(lambda: pid_of_server(torchrun), "the first has started a server")
    second = torchrun.start("b", "--nnodes=1:2", CALL)
    assert torchrun.train_as([first, second]) == [0, 1]

    step = torchrun.some_steps()
    torchrun.kill(second)
    assert torchrun.train_as([first], after=step) == [0], "the other goes on alone"

    step = torchrun.some_steps()
    second = torchrun.start("b", "--nnodes=1:2", CALL)
    assert torchrun.train_as([first, second], after=step) == [0, 1], "it has its rank back"

    step = torchrun.some_steps()
    orphan = first.begun[-1].pid
    torchrun.kill(first, workers=False)
    assert torchrun.train_as([second], after=step) == [0], "the server outlives the agent that started it"
    wait_for_end(orphan)

    step = torchrun.some_steps()
    torchrun.stop_file().touch()
    assert torchrun.codes(second) == [0], torchrun.said()

    torchrun.stop_file().unlink()
    again = [torchrun.start(name, "--nnodes=2") for name in "cd"]
    ranks = torchrun.train_as(again, after=step)
    assert sorted(ranks) == [0, 1], "the same id, right after the run has ended, with other limits"
    torchrun.stop_file().touch()
    assert torchrun.codes(*again) == [0, 0], torchrun.said()


def test_a_late_agent_joins_and_spares_wait(torchrun_at_server: TorchrunAgents) -> None:
    first, second = (torchrun_at_server.start(name, "--nnodes=2:3", "last_call_timeout=0") for name in "ab")
    torchrun_at_server.train_as([first, second])
    step = torchrun_at_server.some_steps()
    third = torchrun_at_server.start("c", "--nnodes=2:3", "last_call_timeout=0")
    ranks = torchrun_at_server.train_as([first, second, third], after=step)
    assert ranks[2] == 2, "earlier nodes keep their ranks"

    spares = [torchrun_at_server.start(name, "--nnodes=2:3", "last_call_timeout=0") for name in "de"]
    rendezvous = rallypoint.Rendezvous(rallypoint.TCPStore("localhost", torchrun_at_server.port), "job", 1)
    torchrun_at_server.poll(lambda: len(rendezvous.status().spares) == 2, "two spares")
    step = torchrun_at_server.some_steps()
    torchrun_at_server.kill(second)
    (spare,) = torchrun_at_server.poll(lambda: [spare for spare in spares if spare.begun], "a spare steps in")
    assert torchrun_at_server.train_as([first, third, spare], after=step) == [ranks[0], ranks[2], ranks[1]]
    assert len(spare.begun) == 1, "it has not been in a round before"

    torchrun_at_server.some_steps()
    torchrun_at_server.stop_file().touch()
    assert torchrun_at_server.codes(first, third, *spares) == [0] * 4, torchrun_at_server.said()
    (idle,) = (other for other in spares if other is not spare)
    assert not idle.begun and idle.says("this node was not needed")
    assert rendezvous.status().result == "succeeded"


def test_jobs_on_one_server_are_independent(torchrun_at_server: TorchrunAgents, server: rallypoint.Server) -> None:
    agents = {job: torchrun_at_server.start("node", "--nnodes=1", job=job) for job in ("one", "other")}
    for job, agent in agents.items():
        torchrun_at_server.train_as([agent])
        torchrun_at_server.some_steps(job)
    rounds = server.statistics()["namespaces"]
    assert set(rounds) == set(agents) and all(one["sessions"] for one in rounds.values())
    step = torchrun_at_server.some_steps("one")
    os.kill(agents["one"].begun[-1].pid, signal.SIGKILL)
    torchrun_at_server.train_as([agents["one"]], after=step)
    torchrun_at_server.some_steps("other")
    assert len(agents["other"].begun) == 1
    for job, agent in agents.items():
        torchrun_at_server.stop_file(job).touch()
        assert torchrun_at_server.codes(agent) == [0], torchrun_at_server.said()
    assert server.statistics()["rounds"] == 0, "a run that is over leaves no round"


def test_an_agent_with_different_options_is_refused_at_once_by_name(torchrun_at_server: TorchrunAgents) -> None:
    first = torchrun_at_server.start("a", "--nnodes=2", "rank=0")
    rendezvous = rallypoint.Rendezvous(rallypoint.TCPStore("localhost", torchrun_at_server.port), "job", 1)
    torchrun_at_server.poll(lambda: rendezvous.status().waiting == ("a",), "the first waits")
    refusals = {
        ("b", "--nnodes=3", ""): ["min_nodes", "3 (b ", "2", "a ("],
        ("b", "--nnodes=2", "last_call_timeout=7"): ["last_call_s", "7 (b ", "a ("],
        ("b", "--nnodes=2", "rank=0"): ["rank 0", "'b'", "a ("],
        ("b", "--nnodes=2", "rank=2"): ["rank 2", "b", "0 to 1"],
        ("b", "--nnodes=2", "last_cal=3"): ["'last_cal'", "last_call_timeout"],
        ("b", "--nnodes=2", "rank=first"): ["rank", "'first'"],
    }
    others = {case: torchrun_at_server.start(*case) for case in refusals}
    namesake = torchrun_at_server.start("a", "--nnodes=2")
    for case, other in others.items():
        assert other.ended() != 0, case
        torchrun_at_server.wait(partial(other.says, "torchrun raised"), "why it ended")
        (why,) = (line for line in other.lines if "torchrun raised" in line)
        assert not [words for words in refusals[case] if words not in why], why
    torchrun_at_server.wait(lambda: namesake.says("for its name: "), "an agent with the same name logs it, and waits")
    (line,) = (line for line in namesake.lines if "for its name: " in line)
    assert f":{first.pid}" in line, line
    assert not first.begun and rendezvous.status().waiting == ("a",)
