"""The world of one seed: processes that take steps in an order that chance decides, and what goes wrong with them.

A process is a generator. It yields when others may go before it: nothing (it can go on at any time), or the instant
until which it sleeps unless it is woken. Chance picks who goes next, which message arrives, and who crashes or freezes.
A crashed process may be replaced by one of the same name. One that froze for longer than the grace may have been
declared dead meanwhile, and goes on as if nothing had happened until it is told. After some steps nothing more goes
wrong, so that what is left can be judged: nobody may wait for what cannot come.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from itertools import count
from typing import Any, Protocol

GRACE_S = 2.0
QUIET_S = 9.0
"""When nothing has happened for so long, nothing will: the longest time-out and the grace are over."""

STEPS = 20_000
NEVER = float("inf")

Life = Generator[float | None, None, Any]


class SessionLost(Exception):
    """The session was declared dead."""


class Wrong(AssertionError):
    """Something that must never be, was."""


class Host(Protocol):
    """Where the machines are; what the world does to it."""

    waits_for_the_dead: bool
    """Whether a call that only the dead are in the way of waits for their end."""

    def deliver(self) -> bool:
        """Let a message arrive that is under way; say whether there was one."""

    def tick(self) -> None:
        """Notice that time has passed."""

    def due(self) -> float:
        """Return when the next alarm rings by itself."""

    def crashed(self, process: Process) -> None:
        """Notice that a process is no more."""


class Process:
    """One member's process, in its current session."""

    def __init__(self, world: World, name: str, at: int = 0) -> None:
        self.world = world
        self.name = name
        self.at = at
        """Which line of its script comes next."""

        self.session = world.new_session(self)
        self.former: tuple[str, ...] = ()
        """The sessions that it has lost."""

        self.numbers = count(1)
        self.life: Life | None = None
        self.until: float | None = None
        self.woken = False
        self.stopped_at: float | None = None
        """When it crashed or froze."""

        self.thaws_at: float | None = None
        self.crashed = self.done = False
        self.repeated = False
        """Whether a write of the call under way was not answered, so that it was applied again."""

        self.unsure: dict[str, int] = {}
        """By key, the version on which a write of ours may still land."""

        self.waits: tuple[Any, ...] | None = None
        """What it waits for: a key, a call and its command."""

    def __str__(self) -> str:
        return f"{self.name}@{self.session}"

    @property
    def runs(self) -> bool:
        return not (self.crashed or self.done) and self.stopped_at is None

    def still(self, now: float) -> bool:
        """Say whether others may take it for dead."""
        return self.stopped_at is not None and now - self.stopped_at >= GRACE_S

    def renew(self) -> None:
        """Go on in a new session."""
        self.former = (*self.former, self.session)
        self.session = self.world.new_session(self)
        self.waits = None


class World:
    """All processes of one seed, their host, and the time."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now = 0.0
        self.step = 0
        self.changed_at = 0.0
        self.processes: list[Process] = []
        self.by_session: dict[str, Process] = {}
        self.doubtful: set[str] = set()
        """Sessions that crashed, or stood still for longer than the grace: they may be declared dead."""

        self.trace: list[tuple[Any, ...]] = []
        self.host: Host
        self.live_like: Any = None
        self.trouble = self.chance.choice((0, 0.005, 0.02, 0.05))
        self.calm_after = self.chance.randrange(50, 600)
        self.steps = STEPS
        self.pace_s = 0.04
        """How much time one step takes at most: the more processes there are, the less."""

    def new_session(self, process: Process) -> str:
        """Return the name of a new session: the number that a server gives it, if it opens all in this order."""
        session = str(len(self.by_session) + 1)
        self.by_session[session] = process
        return session

    def note(self, *what: Any) -> None:
        """Write a line of the story."""
        self.trace.append((self.step, round(self.now, 2), *what))
        self.changed_at = self.now

    def alive(self, session: str) -> bool:
        """Say whether a session's process still uses it."""
        process = self.by_session[session]
        return not process.crashed and process.session == session

    def start(self, name: str, at: int = 0) -> None:
        process = Process(self, name, at)
        self.processes.append(process)
        process.life = self.live_like(process)
        self.note("start", str(process), at)

    def run(self) -> None:
        """Go on until nothing more can happen."""
        while self.step < self.steps:
            self.step += 1
            self.now += self.chance.random() * self.pace_s
            self._doubt()
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
            if self.now - self.changed_at > QUIET_S and self.step > self.calm_after:
                return
        raise Wrong(f"no end after {self.steps} steps")

    def _go_on(self, process: Process) -> None:
        process.woken = False
        assert process.life is not None
        try:
            process.until = next(process.life)
        except StopIteration:
            process.done = True
            self.note("done", str(process))

    def _sleep(self) -> bool:
        """Let the time pass until somebody has something to do; say whether there is somebody."""
        times = [one.until for one in self.processes if one.runs and one.until is not None]
        times += [one.thaws_at for one in self.processes if one.thaws_at is not None]
        times += [self.now + 0.5 for one in self.processes if one.crashed and self.now - self.changed_at < QUIET_S]
        times.append(self.host.due())
        if self.step < self.calm_after:
            times.append(self.now + 0.5)
        soonest = min(times, default=NEVER)
        if soonest == NEVER:
            return False
        self.now = max(self.now, soonest)
        return True

    def _doubt(self) -> None:
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
        if self.chance.random() < 0.7:
            self.start(process.name, max(0, process.at - self.chance.randrange(2)))
