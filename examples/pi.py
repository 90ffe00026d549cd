"""Estimate pi with several workers, and lose nothing when one is killed: every finished batch is in a file.

rallypoint run --nproc-per-node 4 --max-restarts 3 examples/pi.py --kill-half-way
"""

import argparse
import math
import os
import random
import shutil
import signal
import tempfile
from pathlib import Path

import rallypoint

BATCHES = 200

parser = argparse.ArgumentParser()
parser.add_argument("--points", type=int, default=80_000, help="how many random points a batch has")
parser.add_argument("--out", type=Path, help="where finished batches are kept; else in a directory for this run alone")
parser.add_argument("--kill-half-way", action="store_true", help="let one worker kill itself in its first life")
told = parser.parse_args()

worker = rallypoint.worker()
mine = range(worker.rank, BATCHES, worker.world_size)
out = told.out or Path(tempfile.gettempdir()) / f"pi-{worker.run_id}"
out.mkdir(parents=True, exist_ok=True)


def finished(batch: int) -> int:
    """Return how many points of a batch hit the circle: from its file, or by throwing them and writing that file."""
    file = out / f"batch-{batch}"
    if not file.exists():
        chance = random.Random(batch).random  # the same points, whoever throws them, and however often
        hits = sum(chance() ** 2 + chance() ** 2 < 1 for _ in range(told.points))
        draft = out / f"draft-{os.getpid()}"
        draft.write_text(str(hits))
        draft.replace(file)  # all of it or nothing, whenever we are killed
    return int(file.read_text())


before, half = sum((out / f"batch-{batch}").exists() for batch in mine), (len(mine) + 1) // 2
print(f"rank {worker.rank}: " + (f"goes on after {before} of {len(mine)} batches" if before else "begins"))
for number, batch in enumerate(mine, 1):
    worker.store.set(f"hits/{batch}", str(finished(batch)))  # set, not add: doing it again counts nothing twice
    if number > before and number in (half, len(mine)):
        print(f"rank {worker.rank}: {number} of {len(mine)} batches")
    if told.kill_half_way and worker.restarts == 0 and (worker.rank, number) == (worker.world_size // 2, half):
        print(f"rank {worker.rank}: kills itself with SIGKILL, to show what happens then")
        os.kill(os.getpid(), signal.SIGKILL)

if worker.rank == 0:
    hits = sum(map(int, worker.store.multi_get([f"hits/{batch}" for batch in range(BATCHES)])))  # waits for all
    points = BATCHES * told.points
    print(f"pi is about {4 * hits / points:.5f}, from {points:,} points; off by {abs(4 * hits / points - math.pi):.5f}")
    if not told.out:
        shutil.rmtree(out)
