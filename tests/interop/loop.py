"""A PyTorch program for torchrun: it counts steps until a file appears, and continues where it was interrupted.

    loop.py CHECKPOINT STOP

It does not use rallypoint. Every step is an all_reduce whose result is checked; rank 0 saves the number of steps. Each
worker also counts itself in a store without a prefix: if that belonged to another round or job, there would be more
workers than the world size.
"""

import importlib
import os
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

dist = importlib.import_module("torch.distributed")  # its types leave out TCPStore

STEP_S = 0.02
PATIENCE = timedelta(seconds=60)


def say(words: str) -> None:
    """Print a line for the test, in one write, because all workers of an agent share its output."""
    os.write(1, f"{words}\n".encode())


def own_store(size: int) -> Any:
    """Return the store without a prefix, and check that it belongs to this round."""
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False, timeout=PATIENCE)
    came = store.add("came", 1)
    assert came <= size, f"{came} workers in a store for {size}: it belongs to another round"
    return store


def end_together(store: Any, size: int) -> None:
    """Return when all workers have made the last step: an earlier exit may break those that still read."""
    if store.add("done", 1) == size:
        store.set("all done", "")
    store.wait(["all done"])


def train(checkpoint: Path, stop: Path) -> None:
    """Count steps together with the other workers."""
    dist.init_process_group("gloo", timeout=PATIENCE)
    rank, size = dist.get_rank(), dist.get_world_size()
    store = own_store(size)
    start = torch.tensor([int(checkpoint.read_text()) if rank == 0 and checkpoint.exists() else 0])
    dist.broadcast(start, src=0)
    step = int(start)
    say(f"worker {rank} of {size} on node {os.environ['GROUP_RANK']} begins after step {step}, pid {os.getpid()}")
    work = threading.Event()
    while True:
        values = torch.tensor([rank + 1.0, float(rank == 0 and stop.exists())])
        dist.all_reduce(values)
        assert values[0] == size * (size + 1) / 2, f"the ranks of {size} workers add up to {values[0]}"
        step += 1
        if rank == 0:
            whole = checkpoint.with_suffix(".new")
            whole.write_text(f"{step}")
            whole.replace(checkpoint)
        if values[1]:
            return end_together(store, size)
        work.wait(STEP_S)


if __name__ == "__main__":
    try:
        train(*map(Path, sys.argv[1:]))
    except BaseException as error:
        say(f"worker failed: {error!r}")
        os._exit(1)
    os._exit(0)  # gloo's threads sometimes abort a Python that is going down, and that is not what is tested
