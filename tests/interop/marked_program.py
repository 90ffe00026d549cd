"""A PyTorch program that exchanges a value through its store, under a recognizable key; it does not use rallypoint.

python -m tests.interop.marked_program KEY VALUE      # as a worker of a launcher
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

AMPLE = timedelta(seconds=60)


def run(key: str, value: str) -> None:
    """Add up the ranks, and exchange values by rank through the store."""
    dist.init_process_group("gloo", timeout=AMPLE)
    rank, size = dist.get_rank(), dist.get_world_size()
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    assert total.item() == size * (size - 1) / 2
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=AMPLE)
    store.set(f"{key}-{rank}", f"{value}-{rank}")
    for other in range(size):
        assert store.get(f"{key}-{other}") == f"{value}-{other}".encode()
    if store.add("done", 1) == size:
        store.set("all done", "")
    store.wait(["all done"])  # one that ends earlier may cut off those who still read from it


if __name__ == "__main__":
    run(*sys.argv[1:])
    os._exit(0)  # gloo's threads sometimes abort a Python that is going down
