"""examples/jax_elastic.py, without JAX: a stand-in has the few functions that it calls.

The stand-in's `initialize` is strict where JAX is: rank 0 binds the port of the coordinator, with SO_REUSEADDR as gRPC
does, and all others connect to it. JAX itself is not a dependency of the tests; docs/run.md says with which version the
example was run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.kill_workers import AMPLE_S, ROOT

STAND_IN = {
    "jax/__init__.py": """
from jax import distributed
def jit(function):
    return function
def grad(function, argnums):
    def gradient(*at):
        by = lambda each, size: function(*(value + size * (number == each) for number, value in enumerate(at)))
        return tuple((by(each, 1e-3) - by(each, -1e-3)) / 2e-3 for each in argnums)
    return gradient
def process_count():
    return distributed.processes
""",
    "jax/distributed.py": """
import rallypoint, socket
def initialize(coordinator_address, num_processes, process_id):
    global processes, coordinator
    processes, (host, port) = num_processes, coordinator_address.rsplit(":", 1)
    if process_id == 0:
        coordinator = socket.create_server(("", int(port)))
    rallypoint.worker().barrier(timeout=60, name="coordinator")
    if process_id:
        coordinator = socket.create_connection((host, int(port)), 60)
    print("coordinator at", coordinator_address)
""",
    "jax/experimental/__init__.py": "",
    "jax/experimental/multihost_utils.py": """
import json, rallypoint, statistics
class Array(list):
    def mean(self):
        return statistics.fmean(self)
def process_allgather(values):
    gathered = rallypoint.worker().all_gather(json.dumps(values).encode(), timeout=60, name="gradients")
    return [Array(each) for each in zip(*map(json.loads, gathered))]
""",
}


def test_killed_half_way_it_goes_on_from_its_checkpoint_with_another_coordinator(tmp_path: Path) -> None:
    for name, code in STAND_IN.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(code)
    script = str(ROOT / "examples" / "jax_elastic.py")
    options = f"-m rallypoint run --nproc-per-node 4 --max-restarts 1 --grace 5 {script} --kill-half-way"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, *options.split()], env=environment, capture_output=True, text=True, timeout=AMPLE_S
    )
    assert done.returncode == 0, done.stderr
    assert "y = 3.000x + 2.000, after 200 steps on 4 processes" in done.stdout
    assert sorted(re.findall(r"rank (\d): goes on after step 100", done.stdout)) == ["0", "1", "2", "3"]
    assert len(set(re.findall(r"coordinator at (\S+)", done.stdout))) == 2, "one for each round"
