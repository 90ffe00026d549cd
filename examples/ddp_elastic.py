"""Train with PyTorch's DDP on the CPU, and go on from the last checkpoint whenever a worker dies or a node comes.

When the job is preempted (`--preempt-signal`, `rallypoint runs drain`), all workers stop at one step, which is saved.

rallypoint run --nproc-per-node 2 --max-restarts 100 examples/ddp_elastic.py --checkpoint /tmp/line.pt
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import rallypoint

ROWS, WEIGHTS, BIAS = 240, [[3.0, -2.0, 0.5, 1.0]], 4.0


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs, and what a model that has learnt WEIGHTS and BIAS says to them."""
    x = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(7))
    return x, x @ torch.tensor(WEIGHTS).T + BIAS


def untrained() -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    """Return the model and the optimizer as they begin; both have to come back from a checkpoint."""
    torch.manual_seed(7)
    model = torch.nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)


def save(checkpoint: Path, model: torch.nn.Linear, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write a checkpoint: the old one or the new one is there, whenever this is killed."""
    draft = checkpoint.with_name(f"{checkpoint.name}.draft")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, draft)
    draft.replace(checkpoint)


def whether_to_stop() -> Callable[[int], bool]:
    """Return a function that says whether to stop before a step; under torchrun there is nobody who asks for that."""
    try:
        return rallypoint.worker().should_stop
    except rallypoint.NotLaunched:
        return lambda step: False


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, required=True, help="a file that all nodes see")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=10, help="how many steps there are between two checkpoints")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to rest after a step, for those who watch")
    told = parser.parse_args()

    dist.init_process_group("gloo")  # rallypoint run has told where, and which rank this is
    rank, size = dist.get_rank(), dist.get_world_size()
    model, optimizer = untrained()
    step = 0
    if told.checkpoint.exists():
        saved = torch.load(told.checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    should_stop = whether_to_stop()
    stops = should_stop(step)  # the same in all workers; who never asks is killed instead
    if rank == 0:
        print(f"{size} workers go on after step {step}" if step else f"{size} workers begin", flush=True)
    parallel = DistributedDataParallel(model)
    x, y = (part[rank::size] for part in data())  # ROWS can be divided by 2, 3, 4, 5 and 6: all shares weigh the same
    while step < told.steps and not stops:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(parallel(x), y).backward()
        optimizer.step()
        step += 1
        if rank == 0 and (step % told.every == 0 or step == told.steps):
            save(told.checkpoint, model, optimizer, step)
        time.sleep(told.pause)
        stops = step < told.steps and should_stop(step)
    if rank == 0 and stops:
        save(told.checkpoint, model, optimizer, step)
        print(f"stopped before step {step + 1}", flush=True)
    elif rank == 0:
        with torch.no_grad():
            x, y = data()
            print(f"step {step}: loss {torch.nn.functional.mse_loss(model(x), y):.3e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
