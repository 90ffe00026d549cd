"""Count to 600 with all workers in step. A job whose workers or nodes are killed goes on where it was.

rallypoint run --nproc-per-node 2 --max-restarts 3 examples/count.py
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import rallypoint

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=600)
parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()), help="for the checkpoint of each node")
told = parser.parse_args()

worker = rallypoint.worker()
checkpoint = told.out / f"{worker.run_id}-{worker.node}.step"

mine = checkpoint.read_text() if checkpoint.exists() else "0"
step = max(map(int, worker.all_gather(mine.encode(), timeout=60)))  # the newest checkpoint of all nodes
print(f"rank {worker.rank} of {worker.world_size} starts at step {step}, pid {os.getpid()}")

while step < told.steps:
    time.sleep(0.1)  # stands for the work of a step
    worker.barrier(timeout=60)  # stands for the collective at its end
    step += 1
    worker.progress(step)
    if worker.local_rank == 0:
        draft = checkpoint.with_suffix(".draft")
        draft.write_text(str(step))
        draft.replace(checkpoint)  # the old one or the new one, whenever the worker is killed
    if worker.rank == 0 and step % 50 == 0:
        print(f"step {step}")

worker.barrier(timeout=60)
if worker.local_rank == 0:
    checkpoint.unlink(missing_ok=True)  # the next run begins anew
