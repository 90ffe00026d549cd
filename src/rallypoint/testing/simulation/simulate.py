"""`simulate`: run a program on simulated processes, with faults that a seed determines, and report what went wrong.

The program is a coroutine function that uses the store of its process. All processes share one thread and one seeded
scheduler, time is virtual, and the server is a real one without sockets: the same seed gives the same run, a thousand
seeds take some seconds, and a failure shows every step that led to it.

Faults are crashes and freezes. A crashed process does nothing more, its session ends after the grace period of 2 s, and
it is started again. A frozen process is cut off; if it thaws in time it goes on with its session, if not, its next call
raises SessionLost. A process whose program ends with an error of rallypoint is started again as well, as a launcher
would do; every other exception is a violation.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from rallypoint.core import ops
from rallypoint.errors import RallypointError
from rallypoint.testing.simulation.simulated_process import MAX_SLEEP_S, SimulatedProcess
from rallypoint.testing.simulation.simulated_server import SimulatedServer
from rallypoint.testing.simulation.simulated_session import Crashed
from rallypoint.testing.simulation.simulator import STEPS, ScheduledProcess, Simulator, Violation

__all__ = ["Program", "Simulation", "simulate"]

MOST_STARTS = 200
"""How often a process may be started: a program that always fails must not be started for ever."""

Program = Callable[[SimulatedProcess], Awaitable[object]]
"""What every process of a simulation does."""


def simulate(
    program: Program,
    processes: int = 3,
    *,
    seed: int,
    faults: bool = True,
    check: Callable[[Simulation], object] | None = None,
    most_steps: int = STEPS,
) -> Simulation:
    """Run a program on so many processes until all have ended; then call `check`.

        async def work(process):
            queue = process.store.work_queue("shards")
            ...

        for seed in range(1000):
            simulate(work, 3, seed=seed)

    Raises Violation, an AssertionError, with the seed and the trace, if the program or `check` raises anything but an
    error of rallypoint, if a process waits for something that cannot happen, or if there is no end after `most_steps`
    steps. Without `faults`, an error of rallypoint is a violation, too.
    """
    if isinstance(processes, bool) or not isinstance(processes, int) or processes < 1:
        raise ValueError(f"processes must be a number of at least 1, not {processes!r}")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an integer, not {seed!r}")
    simulation = Simulation(program, seed, faults)
    name = getattr(program, "__name__", repr(program))
    try:
        with simulation.simulator.explained(f"simulate({name}, {processes}, seed={seed}, faults={faults})"):
            simulation.run(processes, most_steps)
            if check is not None:
                check(simulation)
    finally:
        simulation.close()
    return simulation


class Simulation:
    """One run of a program, and its result."""

    def __init__(self, program: Program, seed: int, faults: bool) -> None:
        self.seed = seed
        self.faults: Counter[str] = Counter()
        """How often a process crashed, froze, or ended with an error."""

        self.simulator = Simulator(seed)
        self._may_fail = faults
        self._program = program
        self._starts: Counter[str] = Counter()
        self._handles: dict[ScheduledProcess, SimulatedProcess] = {}
        self.simulator.trouble *= faults
        self.simulator.replaced, self.simulator.quiet_s = 1.0, MAX_SLEEP_S
        self.simulator.live_like = self._live
        self._server = self.simulator.host = SimulatedServer(self.simulator)

    @property
    def now(self) -> float:
        """The virtual time at the end, in seconds."""
        return self.simulator.now

    @property
    def trace(self) -> list[str]:
        """Everything that happened, as lines: the step, the time, and the event."""
        return [" ".join(map(str, line)) for line in self.simulator.trace]

    def value(self, key: str) -> bytes | None:
        """Return the value of a key at the end; None if there is no such key."""
        found: bytes | None = self._server.engine.execute(ops.Peek(0, b"/" + key.encode()))
        return found

    def run(self, processes: int, most_steps: int) -> None:
        """Run until all processes have ended; raise Violation if they do not."""
        simulator = self.simulator
        simulator.steps = most_steps
        for rank in range(processes):
            simulator.start(str(rank))
        simulator.run()
        happened = [line[2] for line in simulator.trace if len(line) > 2]
        self.faults = Counter(what for what in happened if what in ("crash", "freeze", "failed"))
        left = [one for one in simulator.processes if not (one.done or one.crashed)]
        if left:
            told = ", ".join(f"{self._handles[one]!r} in {self._handles[one].waits_for or 'a sleep'}" for one in left)
            raise Violation(f"these cannot end: {told}")

    def close(self) -> None:
        """End the code of crashed processes, which does nothing more."""
        for process in self.simulator.processes:
            process.crashed = True
            life: Any = process.life
            with contextlib.suppress(Crashed, Exception):  # what it raises now has no effect, either
                life.close()

    async def _live(self, scheduled: ScheduledProcess) -> None:
        self._starts[scheduled.name] += 1
        process = SimulatedProcess(scheduled, self._server, self._starts[scheduled.name])
        self._handles[scheduled] = process
        try:
            await self._program(process)
        except RallypointError as error:
            if not self._may_fail:
                raise
            self.simulator.note("failed", str(scheduled), repr(error))
            if process.starts == MOST_STARTS:
                raise Violation(
                    f"process {process.rank} failed again and again, {MOST_STARTS} starts in all"
                ) from error
            self.simulator.start(scheduled.name)
        process.close()
