"""PyTorch programs whose store is etcd: each rank at a gateway, while a member and another gateway are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.etcd.cluster import Cluster
from tests.wire import AMPLE_S, Peer, until

import rallypoint

pytestmark = [pytest.mark.needs("torch"), pytest.mark.needs("etcd")]

LOOP = Path(__file__).with_name("loop.py")
STEPS = 10
"""After how many steps it is shown that the work goes on."""


def start(port: int, rank: int, size: int, place: Path) -> subprocess.Popen[str]:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    who = {"RANK": str(rank), "WORLD_SIZE": str(size), "GROUP_RANK": str(rank)}
    command = [sys.executable, str(LOOP), str(place / "checkpoint"), str(place / "stop")]
    return subprocess.Popen(command, env={**os.environ, **where, **who}, stdout=subprocess.PIPE, text=True)


def steps_on(checkpoint: Path, workers: list[subprocess.Popen[str]]) -> None:
    """Return when a few more steps were made, by all."""

    def steps() -> int:
        assert all(worker.poll() is None for worker in workers), "a worker has ended"
        return int(checkpoint.read_text()) if checkpoint.exists() else 0

    enough = steps() + STEPS
    until(steps, lambda made: made >= enough)


@pytest.mark.parametrize("size", [2, 4])
def test_training_goes_on_while_a_member_and_another_gateway_are_killed(size: int, tmp_path: Path) -> None:
    checkpoint, stop = tmp_path / "checkpoint", tmp_path / "stop"
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster())
        gateways = [stack.enter_context(rallypoint.Server(engine=f"{cluster.url}/job")) for _ in range(3)]
        workers = [start(gateways[rank % 2].port, rank, size, tmp_path) for rank in range(size)]
        for worker in workers:
            stack.callback(worker.communicate)
            stack.callback(worker.kill)
        steps_on(checkpoint, workers)
        peers = [stack.enter_context(Peer(("127.0.0.1", gateway.port))) for gateway in gateways[:2]]
        cluster.kill(cluster.leader())
        for peer in peers:
            peer.work(3)
        steps_on(checkpoint, workers)
        os.kill(gateways[2].pid, signal.SIGKILL)
        for peer in peers:
            peer.work(3)
        steps_on(checkpoint, workers)
        stop.write_text("")
        assert [worker.wait(AMPLE_S) for worker in workers] == [0] * size
