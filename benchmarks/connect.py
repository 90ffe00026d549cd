"""Connect: two thousand torch clients connect at once, to our server and to torch's own."""

from __future__ import annotations

import time

from benchmarks.crowd import compare, release
from benchmarks.rig import Team, need
from benchmarks.servers import Running, greeted
from benchmarks.table import Line

TITLE = "Connect: 2,000 PyTorch clients at once"
NOTES = (
    "Time from the start signal until the last constructor has returned: 8 processes of 250 threads. Less is better. "
    "Torch's clients and its server look up a name at every connect: here in /etc/hosts alone, for a resolver that "
    "drops questions makes that seconds."
)
PROCESSES = 8
SETTLE_S = 0.2


def run(quick: bool) -> list[Line]:
    """Measure at every placement."""
    need("torch")
    rounds, each = (2, 25) if quick else (8, 250)
    return compare(f"connect {each * PROCESSES:,}", PROCESSES, each, rounds, _connect_all)


def _connect_all(crowds: Team, server: Running) -> float:
    crowds.ask("arm_connect", server.port)
    taken = release(crowds)
    crowds.ask("part")
    greeted(server.port).close()  # answered once the server has seen most of the others go
    time.sleep(SETTLE_S)
    return taken
