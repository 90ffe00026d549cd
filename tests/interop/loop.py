"""A PyTorch program to be run by torchrun: it counts steps until a file appears, and goes on where it was interrupted.

    loop.py CHECKPOINT STOP

It knows nothing of rallypoint. Every step is an all_reduce whose result is checked; rank 0 writes down how many there
were. Each worker also counts itself in a store without any prefix: if that were another round's or another job's, there
would be more workers than the world has.
"""

import os
import sys
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

STEP_S = 0.02
PATIENCE = timedelta(seconds=60)


def say(words: str) -> None:
    """Tell the test; in one piece, for all workers of an agent share its output."""
    os.write(1, f"{words}\n".encode())


def own_store(size: int) -> dist.TCPStore:
    """Return the store, without a prefix, and see that it is this round's own."""
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False, timeout=PATIENCE)
    came = store.add("came", 1)
    assert came <= size, f"{came} came to a store for {size}: it is not this round's"
    return store


def end_together(store: dist.TCPStore, size: int) -> None:
    """Return when all have made the last step: one that ends before may cut off those who still read from it."""
    if store.add("done", 1) == size:
        store.set("all done", "")
    store.wait(["all done"])


def train(checkpoint: Path, stop: Path) -> None:
    """Count steps, together."""
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
