"""Barrier: a thousand connected torch clients pass one `store.barrier`, on our server and on torch's own."""

from __future__ import annotations

import itertools

from benchmarks.crowd import compare, release
from benchmarks.rig import Team, need
from benchmarks.servers import Running
from benchmarks.table import Line

TITLE = "Barrier: 1,000 PyTorch clients"
NOTES = (
    "Time from the start signal until the last client is through; the clients are connected beforehand. Less is better."
    " The clients' own work, 1,000 Python threads in 4 processes, is in both figures."
)
PROCESSES = 4


def run(quick: bool) -> list[Line]:
    """Measure at every placement."""
    need("torch")
    rounds, each = (2, 25) if quick else (12, 250)
    keys = itertools.count()

    def pass_once(crowds: Team, server: Running) -> float:
        crowds.ask("arm_barrier", server.port, f"bench/barrier/{next(keys)}", each * PROCESSES)
        return release(crowds)

    return compare(f"barrier of {each * PROCESSES:,}", PROCESSES, each, rounds, pass_once)
