"""Tests of programs that use rallypoint: a server in the test's process, a clock moved by hand, cuts, simulations.

    with InProcessServer() as server, rallypoint.connect(server.url) as store:
        ...                                   # the real server, in a thread; several at once; kill() and restart()
    with CuttingProxy(server.port) as proxy:
        ...                                   # cuts, delays, holds or refuses the connections of clients
    clock = VirtualClock()                    # of a server: leases, grace periods and timeouts pass by clock.advance()
    simulate(program, processes=3, seed=7)    # a program against a simulated server, with crashes, in virtual time
    check_transcript(path, run)               # pure code, tested by text files of commands and output

docs/testing.md has an example of each. `import rallypoint` does not import this package, and nothing here imports
pytest. Only `InProcessServer` needs the extra `server`. A `HashStore` is a store without a server, for tests that need
no more than that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rallypoint.testing.cutting_proxy import DOWN, HANGS_UP, REFUSES, SILENT, UP, CuttingProxy
from rallypoint.testing.simulation.simulate import Program, Simulation, simulate
from rallypoint.testing.simulation.simulated_process import SimulatedBarrier, SimulatedLock, SimulatedProcess
from rallypoint.testing.simulation.simulator import Violation
from rallypoint.testing.transcript import Run, check_transcript, replay_transcript
from rallypoint.testing.virtual_clock import VirtualClock

if TYPE_CHECKING:
    from rallypoint.testing.in_process_server import InProcessServer

__all__ = [
    # a server
    "InProcessServer",
    "VirtualClock",
    # the network
    "CuttingProxy",
    "UP",
    "DOWN",
    "REFUSES",
    "HANGS_UP",
    "SILENT",
    # simulations
    "simulate",
    "Simulation",
    "Program",
    "SimulatedProcess",
    "SimulatedBarrier",
    "SimulatedLock",
    "Violation",
    # transcripts
    "check_transcript",
    "replay_transcript",
    "Run",
]


def __getattr__(name: str) -> Any:
    if name == "InProcessServer":  # the only part that needs the extra `server`
        from rallypoint.testing.in_process_server import InProcessServer

        return InProcessServer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
