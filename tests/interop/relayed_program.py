"""A worker that trains through relays: it uses the store in every step, and checks its contents at the end.

    python -m tests.interop.relayed_program PLACE      # as a worker of torchrun, or of `rallypoint run`

`test_relays.py` runs it in processes that find their relay by themselves; a launcher gives its workers the address of
the store. PLACE is the directory through which the test and the workers communicate (`relayed_nodes.py`).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import rallypoint

from .relayed_nodes import stop_asked, tell_progress

__all__ = ["AMPLE", "WORLD", "check_stores", "train", "use_stores"]

AMPLE = timedelta(seconds=60)
WORLD = 2
GROUP_EVERY = 2
"""Every how many steps a new group is opened."""


def use_stores(torchs: Any, ours: rallypoint.Store, step: int, rank: int, world: int = WORLD) -> None:
    """Count, exchange keys and meet at barriers, with both clients; nothing may be lost or applied twice."""
    other = (rank + 1) % world
    for store, name in ((torchs, "torch"), (ours, "ours")):
        store.set(f"{name}/{step}/{rank}", f"{rank} was here")
        assert store.get(f"{name}/{step}/{other}") == f"{other} was here".encode()
        store.add(f"{name}/count", 1)
        store.append(f"{name}/log", f"{step}.{rank};")
        store.barrier(f"{name}/{step}", world)
        assert store.add(f"{name}/count", 0) >= step * world
    torchs.queue_push(f"queue/{rank}", str(step))
    assert ours.queue_pop(f"queue/{other}") == str(step).encode()
    torchs.barrier(f"end/{step}", world)


def check_stores(torchs: Any, ours: rallypoint.Store, steps: int, world: int = WORLD) -> None:
    """Check the keys that all steps have left."""
    assert sorted(torchs.get("torch/log").split(b";")) == sorted(ours.get("ours/log").split(b";"))
    assert len(set(torchs.get("torch/log").split(b";"))) == steps * world + 1
    assert ours.get("torch/count") == torchs.get("ours/count") == str(steps * world).encode()


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
        loss: Any = torch.nn.functional.mse_loss(self._model(self._rows), self._targets)
        loss.backward()
        self._optimizer.step()


def train(place: str, rank: int, torchs: Any, ours: rallypoint.Store, world: int = WORLD) -> tuple[int, bool]:
    """Train by DDP in the open group until asked to stop; return the steps, and whether the weights are right."""
    import torch

    dist = importlib.import_module("torch.distributed")
    from torch.nn.parallel import DistributedDataParallel

    learner = Learner(DistributedDataParallel, rank, world)
    step, stop = 0, torch.zeros(1)
    while not stop:
        step += 1
        use_stores(torchs, ours, step, rank, world)
        learner.learn()
        if step % GROUP_EVERY == 0:
            add_up_in_a_new_group(rank, world)
        stop = torch.tensor([float(rank == 0 and stop_asked(place))])
        dist.all_reduce(stop)
        if rank == 0:
            tell_progress(place, step)
    check_stores(torchs, ours, step, world)
    alone = Learner(lambda layer: layer, 0, 1)
    for _ in range(step):
        alone.learn()
    torchs.barrier("over", world)
    return step, torch.allclose(learner.layer.weight, alone.layer.weight, atol=1e-5)


def add_up_in_a_new_group(rank: int, world: int) -> None:
    """Open a group, whose ranks find each other in the store, and check that it works."""
    import torch

    dist = importlib.import_module("torch.distributed")

    group = dist.new_group(timeout=AMPLE)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total, group=group)
    assert total == world * (world + 1) / 2
    dist.destroy_process_group(group)


def main(place: str) -> None:
    """Run as a worker of a launcher: print the beginning and the result."""
    dist = importlib.import_module("torch.distributed")

    world = int(os.environ["WORLD_SIZE"])
    rank, host, port = int(os.environ["RANK"]), os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    dist.init_process_group("gloo", timeout=AMPLE)
    torchs = dist.TCPStore(host, port, is_master=False, timeout=AMPLE)
    ours = rallypoint.connect(f"tcp://{host}:{port}", timeout=AMPLE)
    os.write(1, f"begins {rank} {os.getpid()}\n".encode())
    os.write(1, f"ends {rank} {os.getpid()} {train(place, rank, torchs, ours, world)}\n".encode())
    os._exit(0)  # gloo's threads sometimes abort a Python that is going down, and that is not what is tested


if __name__ == "__main__":
    main(*sys.argv[1:])
