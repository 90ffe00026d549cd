"""Memory: what a server takes for each kind of thing, resident against counted, at a limit of 64 MiB.

Clients make it hold as much as it lets them (`tests/server/hoarders.py`), in one way each. The costs in `core/costs.py`
come from these figures: where resident memory, without that of an idle server, is more than was counted, a cost is too
low.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.raw_peer import MIB, ServerProcess
from tests.server.hoarders import HOARDERS

from benchmarks.rig import say
from benchmarks.table import Line, Target

TITLE = "Memory: resident against counted"
NOTES = (
    "A server with --max-memory 64M, filled with one kind of thing. The figure is the peak of its resident memory in "
    "MiB, of which an idle server takes about 32. The promise is 1.5 times the limit plus 64 MiB."
)
LIMIT_MIB = 64
SHORT = {"sessions": 10_000, "namespaces": 20_000, "pushes": 60_000, "pushes_of_sessions": 60_000}
"""How many things to make where they are fewer than `MANY`."""

MANY = 1_000_000
LARGE = 48 * MIB


def run(quick: bool) -> list[Line]:
    """Fill a server in every way."""
    return [_measure(name, quick) for name in HOARDERS]


def _measure(name: str, quick: bool) -> Line:
    count = LARGE if name.startswith("unread") else SHORT.get(name, MANY)
    with (
        tempfile.TemporaryDirectory() as place,
        ServerProcess(Path(place), max_memory=LIMIT_MIB * MIB, grace_s=60.0) as server,
    ):
        idle = server.memory()
        with HOARDERS[name](server, count // 10 if quick else count):
            counted, resident = server.statistics()["bytes"], server.memory()
            peak = server.memory(peak=True)
    more = (resident - idle) / MIB
    say(f"{name}: counted {counted / MIB:.1f} MiB, resident {more:.1f} MiB more than the idle server")
    most = Target(at_most=1.5 * LIMIT_MIB + 64, unit="MiB")
    return Line(name.replace("_", " "), "", "MiB", [peak / MIB], target=most)
