"""Nodes that are processes: two of eight are killed, three are started; when are all who live in one round?"""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
import time

from benchmarks.rig import PLACEMENTS, say
from benchmarks.servers import Running, child
from benchmarks.table import Line, Target

TARGET = Target(at_most=3000, unit="ms")
NODE = """
import sys, rallypoint
url, run, name = sys.argv[1:]
node = rallypoint.Rendezvous(rallypoint.connect(url, timeout=60), run, 4, 9, node=name, last_call=1.0)
while True:
    now = node.join()
    print(now.world_size, flush=True)
    node.changed.wait()
"""
_runs = itertools.count()


def run(server: Running, rounds: int) -> list[Line]:
    """Measure, on our server with its usual grace of 2 s."""
    say("  nodes that die and come")
    killed, came = zip(*(_once(f"tcp://127.0.0.1:{server.port}") for _ in range(rounds)), strict=True)
    where = PLACEMENTS[-1].name
    return [
        Line("two of eight nodes killed, six in a round", where, "ms", list(killed), target=TARGET),
        Line("three started, nine in a round", where, "ms", list(came), target=TARGET),
    ]


def _once(url: str) -> tuple[float, float]:
    name = f"flock-{next(_runs)}"
    with contextlib.ExitStack() as stack:

        def start(number: int) -> subprocess.Popen[str]:
            return stack.enter_context(child([sys.executable, "-c", NODE, url, name, f"node-{number}"]))

        nodes = [start(number) for number in range(8)]
        _until(nodes, "8")
        began_at = time.monotonic()
        for victim in nodes[:2]:
            victim.kill()
        _until(nodes[2:], "6")
        killed_ms = (time.monotonic() - began_at) * 1000
        began_at = time.monotonic()
        nodes = [*nodes[2:], *(start(number) for number in range(8, 11))]
        _until(nodes, "9")
        return killed_ms, (time.monotonic() - began_at) * 1000


def _until(nodes: list[subprocess.Popen[str]], size: str) -> None:
    """Wait until every node has said that it is in a round of that size."""
    for node in nodes:
        assert node.stdout is not None
        while (said := node.stdout.readline().strip()) != size:
            if not said:
                raise RuntimeError(f"node {node.pid} ended, and was to be in a round of {size}")
