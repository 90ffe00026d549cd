"""Data-parallel training with JAX that goes on from its last checkpoint when a worker is killed.

rallypoint run --nproc-per-node 4 --max-restarts 3 --grace 5 examples/jax_elastic.py --kill-half-way

JAX's processes meet at a coordinator, which runs in rank 0's process: `rank0_address` and `free_port` give all workers
its address. When a worker dies, all workers restart, in a new round with another port, and meet again. The short grace
period is for JAX's handler of SIGTERM, which does not end the process. On several nodes, --out is a shared directory.
"""

import argparse
import json
import os
import shutil
import signal
import tempfile
from pathlib import Path

import jax
from jax.experimental import multihost_utils

import rallypoint

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--out", type=Path, help="where the checkpoint is kept; else in a directory for this run alone")
parser.add_argument("--kill-half-way", action="store_true", help="let one worker kill itself in its first life")
told = parser.parse_args()

worker = rallypoint.worker()
port = worker.free_port(timeout=60)
jax.distributed.initialize(f"{worker.rank0_address}:{port}", num_processes=worker.world_size, process_id=worker.rank)

out = told.out or Path(tempfile.gettempdir()) / f"jax-{worker.run_id}"
out.mkdir(parents=True, exist_ok=True)
checkpoint = out / "checkpoint.json"
done, slope, offset = json.loads(checkpoint.read_text()) if checkpoint.exists() else (0, 0.0, 0.0)
print(f"rank {worker.rank}: " + (f"goes on after step {done}" if done else "begins"))

mine = [number / 32 for number in range(worker.rank, 32, worker.world_size)]  # y = 3x + 2, at these x


def loss(slope, offset):
    """Return the mean squared error over this worker's points."""
    return sum((slope * x + offset - (3 * x + 2)) ** 2 for x in mine) / len(mine)


gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
for step in range(done + 1, told.steps + 1):
    by_slope, by_offset = multihost_utils.process_allgather(gradient(slope, offset))  # those of all workers
    slope, offset = slope - 0.5 * float(by_slope.mean()), offset - 0.5 * float(by_offset.mean())
    if worker.rank == 0 and step % 10 == 0:
        draft = out / "draft"
        draft.write_text(json.dumps((step, slope, offset)))
        draft.replace(checkpoint)  # all of it or nothing, whenever we are killed
    if told.kill_half_way and worker.restarts == 0 and (worker.rank, step) == (worker.world_size // 2, told.steps // 2):
        print(f"rank {worker.rank}: kills itself with SIGKILL, to show what happens then")
        os.kill(os.getpid(), signal.SIGKILL)

if worker.rank == 0:
    print(f"y = {slope:.3f}x + {offset:.3f}, after {told.steps} steps on {jax.process_count()} processes")
    if not told.out:
        shutil.rmtree(out)
