"""PyTorch through a relay on each of two nodes, while links to the server are cut and the server is killed.

The nodes are network namespaces. Workers use the store in every step: they count, hand each other keys, meet at
barriers, and open new groups, by PyTorch's client and by ours. They are the same processes all the time, no call of
theirs fails, and in the end every count is exact and the weights are those of an undisturbed run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import rallypoint

from .crew import Crew
from .relayed_nodes import RELAY_PORT, RelayedNodes, become_worker, relayed_nodes, stop_asked, tell_progress

pytestmark = [pytest.mark.needs("torch"), pytest.mark.needs("netns")]

AMPLE = timedelta(seconds=60)
WORLD = 2
KILLS, CUTS = 5, 4
GROUP_EVERY = 2
"""In which steps a new group is opened."""


# What a worker does with the store, in every step


def use_stores(torchs: Any, ours: rallypoint.Store, step: int, rank: int) -> None:
    """Count, hand over keys, and meet, with both clients; nothing may be lost, and nothing done twice."""
    for store, name in ((torchs, "torch"), (ours, "ours")):
        store.set(f"{name}/{step}/{rank}", f"{rank} was here")
        assert store.get(f"{name}/{step}/{1 - rank}") == f"{1 - rank} was here".encode()
        store.add(f"{name}/count", 1)
        store.append(f"{name}/log", f"{step}.{rank};")
        store.barrier(f"{name}/{step}", WORLD)
        assert store.add(f"{name}/count", 0) >= step * WORLD
    torchs.queue_push(f"queue/{rank}", str(step))
    assert ours.queue_pop(f"queue/{1 - rank}") == str(step).encode()
    torchs.barrier(f"end/{step}", WORLD)


def check_stores(torchs: Any, ours: rallypoint.Store, steps: int) -> None:
    """See that every step left exactly what it should have."""
    assert sorted(torchs.get("torch/log").split(b";")) == sorted(ours.get("ours/log").split(b";"))
    assert len(set(torchs.get("torch/log").split(b";"))) == steps * WORLD + 1
    assert ours.get("torch/count") == torchs.get("ours/count") == str(steps * WORLD).encode()


def open_stores(upstream: str) -> tuple[Any, rallypoint.Store]:
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", RELAY_PORT, timeout=AMPLE), rallypoint.connect(upstream, timeout=AMPLE)


# Programs


def train(namespace: str, upstream: str, place: str, rank: int) -> tuple[int, int, bool]:
    """Train by DDP until told to stop; return the steps, the pid, and whether the weights are right."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    become_worker(namespace, upstream)
    torchs, ours = open_stores(upstream)
    dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=WORLD, timeout=AMPLE)
    learner = Learner(DistributedDataParallel, rank, WORLD)
    step, stop = 0, torch.zeros(1)
    while not stop:
        step += 1
        use_stores(torchs, ours, step, rank)
        learner.learn()
        if step % GROUP_EVERY == 0:
            group = dist.new_group(timeout=AMPLE)
            total = torch.tensor([rank + 1.0])
            dist.all_reduce(total, group=group)
            assert total == WORLD * (WORLD + 1) / 2
            dist.destroy_process_group(group)
        stop = torch.tensor([float(rank == 0 and stop_asked(place))])
        dist.all_reduce(stop)
        if rank == 0:
            tell_progress(place, step)
    check_stores(torchs, ours, step)
    alone = Learner(lambda layer: layer, 0, 1)
    for _ in range(step):
        alone.learn()
    right = torch.allclose(learner.layer.weight, alone.layer.weight, atol=1e-5)
    torchs.barrier("over", WORLD)
    return step, os.getpid(), right


class Learner:
    """A model, this rank's share of the rows, and one step of training at a time."""

    def __init__(self, wrap: Callable[[Any], Any], rank: int, world_size: int) -> None:
        import torch

        torch.manual_seed(7)
        rows, targets = torch.randn(8, 3), torch.randn(8, 1)
        self._rows, self._targets = rows[rank::world_size], targets[rank::world_size]
        self.layer = torch.nn.Linear(3, 1)
        self._model = wrap(self.layer)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1)

    def learn(self) -> None:
        import torch

        self._optimizer.zero_grad()
        torch.nn.functional.mse_loss(self._model(self._rows), self._targets).backward()
        self._optimizer.step()


def call(namespace: str, upstream: str, place: str, rank: int) -> tuple[int, int, bool]:
    """Call each other until told to stop: every step opens RPC anew, whose workers find each other in the store."""
    import torch
    from torch.distributed import rpc

    become_worker(namespace, upstream)
    torchs, ours = open_stores(upstream)
    step, stop, right = 0, False, True
    while not stop:
        step += 1
        options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=AMPLE.total_seconds(), num_worker_threads=2)
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=WORLD, rpc_backend_options=options)
        answer = rpc.rpc_sync(f"worker{1 - rank}", torch.add, args=(torch.ones(2), step))
        right = right and answer.tolist() == [step + 1.0] * 2
        use_stores(torchs, ours, step, rank)
        rpc.shutdown()
        if rank == 0:
            torchs.set(f"stop/{step}", "yes" if stop_asked(place) else "no")
            tell_progress(place, step)
        stop = torchs.get(f"stop/{step}") == b"yes"
    check_stores(torchs, ours, step)
    torchs.barrier("over", WORLD)
    return step, os.getpid(), right


# Faults


def kill_the_server(nodes: RelayedNodes, go_on: Callable[[], None]) -> None:
    for _ in range(KILLS):
        nodes.restart_server()
        go_on()


def cut_the_links(nodes: RelayedNodes, go_on: Callable[[], None]) -> None:
    for number in range(CUTS):
        nodes.cut(nodes.nodes[number % 2])
        go_on()
    for node in nodes.nodes:
        assert nodes.statistics(node)["upstream_connections"] > CUTS // 2, "it never noticed"


@pytest.mark.parametrize("fault", [kill_the_server, cut_the_links])
@pytest.mark.parametrize("program", [train, call])
def test_work_goes_on(crew: Crew, tmp_path: Path, program: Any, fault: Any) -> None:
    with relayed_nodes(tmp_path) as nodes:
        members = [crew.start(program, *nodes.arguments(rank)) for rank in range(WORLD)]
        nodes.work_on(members)
        fault(nodes, lambda: nodes.work_on(members))
        nodes.stop()
        (steps, *ended), (steps_too, *ended_too) = [member.result() for member in members]
        assert steps == steps_too
        assert [ended, ended_too] == [[member.pid, True] for member in members], "the same processes, and right results"
