"""Killed: how long the lease of a client outlives its process, when that is killed; there is no peer for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import rallypoint
from benchmarks.rig import PLACEMENTS, in_turn, say
from benchmarks.servers import Running
from benchmarks.table import Line, Target

PATIENCE_S = 60.0
HOLDER = """
import sys, rallypoint
store = rallypoint.connect(sys.argv[1])
store.lease("bench/lease", "held")
sys.stdin.read()
"""


def run(server: Running, rounds: int) -> list[Line]:
    """Measure, on our server with its usual grace."""
    say("  killed client")
    url = f"tcp://127.0.0.1:{server.port}"
    with rallypoint.connect(url, timeout=PATIENCE_S) as store, store.watch("bench/lease") as changes:
        figures = in_turn(["rallypoint"], rounds, lambda _: _outlived_ms(url, changes))
    where = PLACEMENTS[-1].name
    return [Line("killed client, lease gone", where, "ms", figures["rallypoint"], target=Target(None, 2500, "ms"))]


def _outlived_ms(url: str, changes: rallypoint.Watch) -> float:
    """Have a process take the lease and kill it; return how long the lease stayed."""
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, url], stdin=subprocess.PIPE)
    try:
        if changes.next().value != b"held":
            raise RuntimeError("the lease went before its holder was killed")
        killed_at = time.monotonic()
        os.kill(holder.pid, signal.SIGKILL)
        if changes.next().value is not None:
            raise RuntimeError("the lease was written once more, and not deleted")
        return (time.monotonic() - killed_at) * 1000
    finally:
        holder.kill()
        holder.communicate()
