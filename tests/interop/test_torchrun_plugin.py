"""torchrun with our back end: agents that train together, die, return, come late, are too many, or do not agree.

Agents are started seldom and used for much, for each has to import torch, and so has every worker of every round.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from urllib.request import urlopen

import pytest
from tests.wire import wait_for_end

import rallypoint

from .agents import Cast, cast

pytestmark = pytest.mark.needs("torch")

CALL = "last_call_timeout=20"
"""Long enough for everybody who is expected; rounds that have all of them do not wait for it."""


@pytest.fixture
def stage(crew, tmp_path) -> Iterator[Cast]:
    """Agents that find no server, and start one."""
    with cast(crew, tmp_path) as everybody:
        yield everybody


@pytest.fixture
def served(crew, tmp_path, server) -> Iterator[Cast]:
    """Agents that find a server."""
    with cast(crew, tmp_path, server.port) as everybody:
        yield everybody


def pid_of_server(cast: Cast) -> int:
    """Return the process of the server that agents have started; 0 while there is none."""
    with contextlib.suppress(OSError), urlopen(f"http://localhost:{cast.port}/about") as about:
        return int(json.load(about)["pid"])
    return 0


def test_two_agents_survive_the_death_of_a_worker_and_finish(stage):
    """The commands are as a user types them, with two workers a node, and no more options than needed."""
    agents = [stage.start(name, "--nnodes=2 --nproc-per-node=2", command=True) for name in ("_one", "_two")]
    ranks = stage.train_as(agents, workers=2)
    assert sorted(ranks) == [0, 1] and stage.step == 0
    step = stage.some_steps()
    os.kill(agents[0].begun[-1].pid, signal.SIGKILL)
    assert stage.train_as(agents, after=step, workers=2) == ranks, "nodes keep their ranks"
    stage.some_steps()
    stage.stop_file().touch()
    assert stage.codes(*agents) == [0, 0], stage.said()
    assert stage.checkpoint() > stage.step


def test_nodes_die_and_return_and_so_does_the_one_that_started_the_server(stage):
    first = stage.start("a", "--nnodes=1:2", CALL)
    stage.poll(lambda: pid_of_server(stage), "the first has started a server")
    second = stage.start("b", "--nnodes=1:2", CALL)
    assert stage.train_as([first, second]) == [0, 1]

    step = stage.some_steps()
    stage.kill(second)
    assert stage.train_as([first], after=step) == [0], "the other goes on alone"

    step = stage.some_steps()
    second = stage.start("b", "--nnodes=1:2", CALL)
    assert stage.train_as([first, second], after=step) == [0, 1], "it has its rank back"

    step = stage.some_steps()
    orphan = first.begun[-1].pid
    stage.kill(first, workers=False)
    assert stage.train_as([second], after=step) == [0], "the server outlives the agent that started it"
    wait_for_end(orphan)

    step = stage.some_steps()
    stage.stop_file().touch()
    assert stage.codes(second) == [0], stage.said()

    stage.stop_file().unlink()
    again = [stage.start(name, "--nnodes=2") for name in "cd"]
    ranks = stage.train_as(again, after=step)
    assert sorted(ranks) == [0, 1], "the same id, right after the run has ended, with other limits"
    stage.stop_file().touch()
    assert stage.codes(*again) == [0, 0], stage.said()


def test_a_late_agent_is_taken_in_and_spares_wait(served):
    first, second = (served.start(name, "--nnodes=2:3", "last_call_timeout=0") for name in "ab")
    served.train_as([first, second])
    step = served.some_steps()
    third = served.start("c", "--nnodes=2:3", "last_call_timeout=0")
    ranks = served.train_as([first, second, third], after=step)
    assert ranks[2] == 2, "those who were there keep their ranks"

    spares = [served.start(name, "--nnodes=2:3", "last_call_timeout=0") for name in "de"]
    rendezvous = rallypoint.Rendezvous(rallypoint.TCPStore("localhost", served.port), "job", 1)
    served.poll(lambda: len(rendezvous.status().spares) == 2, "two spares")
    step = served.some_steps()
    served.kill(second)
    (spare,) = served.poll(lambda: [spare for spare in spares if spare.begun], "a spare steps in")
    assert served.train_as([first, third, spare], after=step) == [ranks[0], ranks[2], ranks[1]]
    assert len(spare.begun) == 1, "it has not been in a round before"

    served.some_steps()
    served.stop_file().touch()
    assert served.codes(first, third, *spares) == [0] * 4, served.said()
    (idle,) = (other for other in spares if other is not spare)
    assert not idle.begun and idle.says("this node was not needed")
    assert rendezvous.status().result == "succeeded"


def test_jobs_on_one_server_do_not_disturb_each_other(served, server):
    agents = {job: served.start("node", "--nnodes=1", job=job) for job in ("one", "other")}
    for job, agent in agents.items():
        served.train_as([agent])
        served.some_steps(job)
    rounds = server.statistics()["namespaces"]
    assert set(rounds) == set(agents) and all(one["sessions"] for one in rounds.values())
    step = served.some_steps("one")
    os.kill(agents["one"].begun[-1].pid, signal.SIGKILL)
    served.train_as([agents["one"]], after=step)
    served.some_steps("other")
    assert len(agents["other"].begun) == 1
    for job, agent in agents.items():
        served.stop_file(job).touch()
        assert served.codes(agent) == [0], served.said()
    assert server.statistics()["rounds"] == 0, "a run that is over leaves no round"


def test_who_does_not_agree_is_refused_at_once_by_name(served):
    first = served.start("a", "--nnodes=2", "rank=0")
    rendezvous = rallypoint.Rendezvous(rallypoint.TCPStore("localhost", served.port), "job", 1)
    served.poll(lambda: rendezvous.status().waiting == ("a",), "the first waits")
    refusals = {
        ("b", "--nnodes=3", ""): ["min_nodes", "3 (b ", "2", "a ("],
        ("b", "--nnodes=2", "last_call_timeout=7"): ["last_call_s", "7 (b ", "a ("],
        ("b", "--nnodes=2", "rank=0"): ["rank 0", "'b'", "a ("],
        ("b", "--nnodes=2", "rank=2"): ["rank 2", "b", "0 to 1"],
        ("b", "--nnodes=2", "last_cal=3"): ["'last_cal'", "last_call_timeout"],
        ("b", "--nnodes=2", "rank=first"): ["rank", "'first'"],
    }
    others = {case: served.start(*case) for case in refusals}
    namesake = served.start("a", "--nnodes=2")
    for case, other in others.items():
        assert other.ended() != 0, case
        served.wait(lambda other=other: other.says("torchrun raised"), "why it ended")
        (why,) = (line for line in other.lines if "torchrun raised" in line)
        assert not [words for words in refusals[case] if words not in why], why
    served.wait(lambda: namesake.says("for its name: "), "who has the same name is told, and waits a moment")
    (told,) = (line for line in namesake.lines if "for its name: " in line)
    assert f":{first.pid}" in told, told
    assert not first.begun and rendezvous.status().waiting == ("a",)
