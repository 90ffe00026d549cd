"""The simulation of one seed: processes that take steps in a random order, and their faults.

A process is a generator or a coroutine. It yields whenever others may run first: None if it can continue at any time,
or the instant until which it sleeps unless it is woken. Random choices decide which process runs next, which message
arrives, and which process crashes or freezes. A crashed process may be replaced by one of the same name. One that froze
for longer than the grace may have been declared dead, and continues unaware until it finds out. After some steps there
are no more faults, so that the final state can be checked: no process may wait for something that cannot happen.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, Protocol

__all__ = [
    "GRACE_S",
    "INTERRUPTED",
    "NEVER",
    "STEPS",
    "Host",
    "ScheduledProcess",
    "Simulator",
    "Steps",
    "Violation",
]

GRACE_S = 2.0
"""The grace period: how long a session outlives its connection."""

QUIET_S = 9.0
"""After this time without an event nothing will happen: the longest timeout and the grace are over."""

STEPS = 20_000
"""How many steps a simulation may take."""

NEVER = float("inf")
"""The instant of what does not happen by itself."""

INTERRUPTED = "interrupted"
"""The outcome of a request that its process gave up at its deadline; it may have been executed."""

Steps = Generator[float | None, None, Any]
"""A part of what a process does: it yields the instant until which it sleeps, or None."""


class Violation(AssertionError):
    """An invariant was violated."""


class Host(Protocol):
    """The host of the machines, as the simulator drives it."""

    waits_for_the_dead: bool
    """Whether a call that only a dead session blocks waits for that session's end."""

    def deliver(self) -> bool:
        """Deliver a message in flight; return whether there was one."""

    def tick(self) -> None:
        """React to the passage of time."""

    def due(self) -> float:
        """Return when the next timer fires by itself."""

    def crashed(self, process: ScheduledProcess) -> None:
        """React to the crash of a process."""


class ScheduledProcess:
    """One member's process, in its current session."""

    def __init__(self, simulator: Simulator, name: str, at: int = 0) -> None:
        self.simulator = simulator
        self.name = name
        self.at = at
        """The next line of its script."""

        self.session = simulator.new_session(self)
        self.former: tuple[str, ...] = ()
        """Its lost sessions."""

        self.numbers = count(1)
        self.life: Steps | Coroutine[Any, Any, Any] | None = None
        self.until: float | None = None
        self.woken = False
        self.stopped_at: float | None = None
        """When it crashed or froze."""

        self.thaws_at: float | None = None
        self.crashed = self.done = False
        self.repeated = False
        """Whether a write of the current call was not answered, so that it was applied again."""

        self.unsure: dict[str, int] = {}
        """By key: the version that an unanswered write of this process may still replace."""

        self.waits: tuple[Any, ...] | None = None
        """The key, call and command that it waits for."""

    def __str__(self) -> str:
        return f"{self.name}@{self.session}"

    @property
    def runs(self) -> bool:
        return not (self.crashed or self.done) and self.stopped_at is None

    def still(self, now: float) -> bool:
        """Return whether others may take it for dead."""
        return self.stopped_at is not None and now - self.stopped_at >= GRACE_S

    def renew(self) -> None:
        """Continue in a new session."""
        self.former = (*self.former, self.session)
        self.session = self.simulator.new_session(self)
        self.waits = None


class Simulator:
    """All processes of one seed, their host, and the clock."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.now = 0.0
        self.step = 0
        self.changed_at = 0.0
        self.processes: list[ScheduledProcess] = []
        self.by_session: dict[str, ScheduledProcess] = {}
        self.doubtful: set[str] = set()
        """Sessions that crashed, or froze for longer than the grace: they may be declared dead."""

        self.trace: list[tuple[Any, ...]] = []
        self.host: Host
        self.live_like: Callable[[ScheduledProcess], Steps | Coroutine[Any, Any, Any]]
        """Returns what a new process does."""

        self.trouble = self.chance.choice((0, 0.005, 0.02, 0.05))
        """How likely a fault is in each step."""

        self.calm_after = self.chance.randrange(50, 600)
        """The step after which there are no more faults."""

        self.steps, self.quiet_s = STEPS, QUIET_S
        self.replaced = 0.7
        """How likely a crashed process is replaced."""

        self.pace_s = 0.04
        """The longest duration of one step; shorter with more processes."""

    @contextmanager
    def explained(self, again: str) -> Iterator[None]:
        """Raise a Violation with the trace, and how to repeat the seed, for any error in the block."""
        try:
            yield
        except Exception as error:
            what = f"seed {self.seed}: {error!r}"
            trace = "\n".join(" ".join(map(str, line)) for line in self.trace)
            raise Violation(f"{what}\n{trace}\n{what}\nagain: {again}") from error

    def new_session(self, process: ScheduledProcess) -> str:
        """Return the name of a new session: the number that a server would give it."""
        session = str(len(self.by_session) + 1)
        self.by_session[session] = process
        return session

    def note(self, *what: Any) -> None:
        """Append an event to the trace."""
        self.trace.append((self.step, round(self.now, 2), *what))
        self.changed_at = self.now

    def alive(self, session: str) -> bool:
        """Return whether a process still uses the session."""
        process = self.by_session[session]
        return not process.crashed and process.session == session

    def start(self, name: str, at: int = 0) -> None:
        """Start a process, at a line of its script."""
        process = ScheduledProcess(self, name, at)
        self.processes.append(process)
        process.life = self.live_like(process)
        self.note("start", str(process), at)

    def run(self) -> None:
        """Run until nothing more can happen."""
        while self.step < self.steps:
            self.step += 1
            self.now += self.chance.random() * self.pace_s
            self._declare_dead()
            self._thaw()
            self.host.tick()
            if self.step < self.calm_after and self.chance.random() < self.trouble:
                self._go_wrong()
            if self.chance.random() < 0.4 and self.host.deliver():
                continue
            ready = [one for one in self.processes if one.runs and (one.woken or (one.until or 0.0) <= self.now)]
            if ready:
                self._go_on(self.chance.choice(ready))
            elif not self.host.deliver() and not self._sleep():
                return
            if self.now - self.changed_at > self.quiet_s and self.step > self.calm_after:
                return
        raise Violation(f"no end after {self.steps} steps")

    def _go_on(self, process: ScheduledProcess) -> None:
        process.woken = False
        assert process.life is not None
        try:
            until = process.life.send(None)
        except StopIteration:
            process.done = True
            self.note("done", str(process))
            return
        if until is not None and not isinstance(until, (int, float)):
            raise TypeError(f"a simulated process can await only what its `process` has, not {until!r}")
        process.until = until

    def _sleep(self) -> bool:
        """Advance the clock to the next event; return False if there is none within the quiet time."""
        times = [one.until for one in self.processes if one.runs and one.until is not None]
        times += [one.thaws_at for one in self.processes if one.thaws_at is not None]
        times += [self.now + 0.5 for one in self.processes if one.crashed and self.now - self.changed_at < QUIET_S]
        times.append(self.host.due())
        if self.step < self.calm_after:
            times.append(self.now + 0.5)
        soonest = min(times, default=NEVER)
        if soonest - self.now > self.quiet_s:
            return False
        self.now = max(self.now, soonest)
        return True

    def _declare_dead(self) -> None:
        for process in self.processes:
            if process.crashed or process.still(self.now):
                self.doubtful.add(process.session)

    def _thaw(self) -> None:
        for process in self.processes:
            if process.thaws_at is not None and process.thaws_at <= self.now:
                process.thaws_at = process.stopped_at = None
                self.note("thaw", str(process))

    def _go_wrong(self) -> None:
        running = [one for one in self.processes if one.runs]
        if not running:
            return
        process = self.chance.choice(running)
        process.stopped_at = self.now
        if self.chance.random() < 0.5:
            process.thaws_at = self.now + self.chance.choice((0.5, 1.0, 3.0, 5.0))
            self.note("freeze", str(process), process.thaws_at)
            return
        process.crashed = True
        process.waits = None
        self.note("crash", str(process))
        self.host.crashed(process)
        if self.chance.random() < self.replaced:
            self.start(process.name, max(0, process.at - self.chance.randrange(2)))
