"""Orientation: the same work by redis-py on redis-server, and the bare limit of a loopback exchange from Python."""

from __future__ import annotations

from benchmarks.clients import SLICE_S, compare
from benchmarks.rig import need
from benchmarks.table import Line

TITLE = "Orientation: redis, and the bare limit"
NOTES = (
    "Ours is measured with torch's client, which is C++; redis-py is Python, and much of its time is its own. `echo` "
    "exchanges as many bytes in as many round trips with a server that does nothing else. "
    "`add` is INCRBY and `check` is EXISTS; redis gets in one round trip what takes torch's client two. No targets."
)


def run(quick: bool) -> list[Line]:
    """Measure get, add and check."""
    need("torch", "redis", "redis-server")
    rounds, slice_s = (2, 0.2) if quick else (6, SLICE_S)
    return compare(("redis", "echo"), None, rounds, slice_s)
