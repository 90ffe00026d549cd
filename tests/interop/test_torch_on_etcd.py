"""torchrun and unmodified PyTorch on etcd: every agent has a gateway, and training outlives what is lost around it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from tests.etcd.cluster import Cluster
from tests.etcd.fixtures import etcd_space
from tests.wire import wait_for_end

import rallypoint

from .agents import Cast, cast

pytestmark = [pytest.mark.needs("torch"), pytest.mark.needs("etcd")]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as members:
        yield members


@pytest.fixture
def stage(crew, tmp_path, cluster) -> Iterator[Cast]:
    with cast(crew, tmp_path, endpoint=etcd_space(cluster)) as everybody:
        yield everybody


def test_four_ranks_train_on_while_a_member_and_a_gateway_that_nobody_uses_are_killed(stage, cluster):
    agents = [stage.start(name, "--nnodes=2 --nproc-per-node=2") for name in ("one", "two")]
    stage.train_as(agents, workers=2)
    begun = [len(agent.begun) for agent in agents]
    with rallypoint.Server(engine=stage.endpoint) as spare, rallypoint.connect(spare.url) as store:
        store.set("seen", "here")
        cluster.kill(cluster.leader())
        stage.some_steps()
        store.set("seen", "still")
        os.kill(spare.pid, signal.SIGKILL)
        wait_for_end(spare.pid)
        stage.some_steps()
    assert [len(agent.begun) for agent in agents] == begun, "and nobody began anew"
    with rallypoint.connect(stage.endpoint) as store:
        assert store.get("seen") == b"still"
    stage.stop_file().touch()
    assert stage.codes(*agents) == [0, 0], stage.said()


def test_two_ranks_go_on_when_an_agent_dies_with_its_gateway(stage):
    agents = [stage.start(name, "--nnodes=1:2", "last_call_timeout=1") for name in ("one", "two")]
    stage.train_as(agents)
    step = stage.some_steps()
    stage.kill(agents[0])
    stage.train_as(agents[1:], after=step)
    stage.some_steps()
    stage.stop_file().touch()
    assert stage.codes(agents[1]) == [0], stage.said()
