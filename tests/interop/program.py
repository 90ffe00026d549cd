"""An ordinary PyTorch program: it trains a model on every rank, and does not use rallypoint.

Rank and world size come from the environment, as launchers give them; the one argument, if any, is the init method.
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

ROWS, STEPS = 8, 5


def train(rank: int, world_size: int) -> list[float]:
    """Return the weights after a few steps on this rank's share of the rows."""
    torch.manual_seed(7)
    inputs, targets = torch.randn(ROWS, 3), torch.randn(ROWS, 1)
    layer = torch.nn.Linear(3, 1)
    model = DistributedDataParallel(layer) if world_size > 1 else layer
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss: Any = torch.nn.functional.mse_loss(model(inputs[rank::world_size]), targets[rank::world_size])
        loss.backward()
        optimizer.step()
    return [round(weight, 5) for weight in layer.weight.flatten().tolist()]


def run(method: str) -> tuple[int, float, list[float]]:
    """Add up the ranks, train, and return (rank, sum, weights)."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world_size)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    weights = train(rank, world_size)
    dist.destroy_process_group()
    return rank, total.item(), weights


if __name__ == "__main__":
    result = run(sys.argv[1] if len(sys.argv) > 1 else "env://")
    os.write(1, f"{result}\n".encode())  # in one piece: both ranks may share this pipe
    os._exit(0)  # gloo's threads sometimes abort a Python that is going down, and that is not what is tested
