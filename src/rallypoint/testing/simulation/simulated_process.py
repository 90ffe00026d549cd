"""`SimulatedProcess`: the world of a program under simulation: a store, barriers, locks, time and chance."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any, cast

from rallypoint import errors
from rallypoint.aio import AsyncStore
from rallypoint.client.async_session import AsyncSession
from rallypoint.core import ops
from rallypoint.core.machines import barrier, lock
from rallypoint.core.machines.machine import Command, Done, Refused, Undo, Waiting
from rallypoint.core.records import OUTCOMES, ReplyStatus
from rallypoint.deadline import Timeout, seconds
from rallypoint.errors import MeetingError, MembersMissing, SessionLost
from rallypoint.protocol.reported_errors import error_of
from rallypoint.recipes.arguments import members_of, name_of
from rallypoint.testing.simulation.simulated_server import SimulatedServer
from rallypoint.testing.simulation.simulated_session import SimulatedSession, run_steps
from rallypoint.testing.simulation.simulator import ScheduledProcess, Steps

__all__ = ["MAX_SLEEP_S", "SimulatedBarrier", "SimulatedLock", "SimulatedProcess"]

TIMEOUT_S = 300.0
PROGRESS_S = 10.0

MAX_SLEEP_S = 3600.0
"""The longest sleep: a simulation in which nothing has happened for that long is over."""


class SimulatedProcess:
    """One process of a simulation, from its start to its end or crash.

    A process that is started again gets a new one: what it knew is gone, and what it wrote to the store is there.
    """

    def __init__(self, scheduled: ScheduledProcess, server: SimulatedServer, starts: int) -> None:
        self.rank = int(scheduled.name)
        """Its number, from 0; the same after a restart."""

        self.starts = starts
        """How often it was started, this time included."""

        self.random: random.Random = scheduled.simulator.chance
        """Chance, which the seed determines."""

        self._scheduled = scheduled
        self._session = SimulatedSession(scheduled, server)
        self._calls = itertools.count(1 << 32)  # beside those of work queues
        self.store = AsyncStore(cast(AsyncSession, self._session), b"/", TIMEOUT_S)
        """The store, as `rallypoint.aio.connect` returns it, with its work queues; only `watch` is not available."""

    def __repr__(self) -> str:
        return f"<process {self.rank}, start {self.starts}>"

    @property
    def waits_for(self) -> str:
        """What it waits for; empty if for nothing."""
        return self._session.waits_for

    def now(self) -> float:
        """Return the virtual time in seconds since the simulation began."""
        return self._scheduled.simulator.now

    def note(self, *what: Any) -> None:
        """Add a line to the trace."""
        self._scheduled.simulator.note(repr(self), *what)

    async def sleep(self, duration: Timeout) -> None:
        """Let virtual time pass, at most an hour."""
        duration_s = seconds(duration, "duration")
        if duration_s > MAX_SLEEP_S:
            raise ValueError(f"duration must be at most {MAX_SLEEP_S:g} s, got {duration_s:g} s")
        await run_steps(self._scheduled, self._until(self.now() + duration_s))

    def barrier(self, name: str, members: int | Sequence[str]) -> SimulatedBarrier:
        """Return the barrier of that name, as `rallypoint.Barrier`."""
        return SimulatedBarrier(self, name, members)

    def lock(self, name: str) -> SimulatedLock:
        """Return the lock of that name, as `rallypoint.Lock`."""
        return SimulatedLock(self, name)

    def close(self) -> None:
        """End its session, as a process does that exits."""
        self._session.close()

    async def perform(
        self, title: str, name: str, member: str, command: Command, undo: type[Undo], timeout: Timeout | None
    ) -> tuple[int, Any]:
        """Make a call on a shared object; return its number and its answer. At the timeout, undo it."""
        call, deadline = next(self._calls), self._session.deadline(TIMEOUT_S if timeout is None else timeout)
        while True:
            outcome = await self.act(title, name, member, call, command, min(deadline.remaining(), PROGRESS_S))
            if isinstance(outcome, Done):
                return call, outcome.answer
            if deadline.expired():
                break
        late = await self.act(title, name, member, next(self._calls), undo(call))
        if isinstance(late, Done) and isinstance(late.answer, list):
            return call, late.answer[0]
        raise MembersMissing(
            thing=title,
            member=member,
            missing=outcome.missing,
            withdrawn=outcome.withdrawn,
            timeout_s=deadline.timeout_s,
            reason=outcome.reason,
        )

    async def act(
        self, title: str, name: str, member: str, call: int, command: Command, wait_s: float = 0.0
    ) -> Done | Waiting:
        """Make a call once; raise the error if it is refused."""
        act = ops.Act(0, b"/" + name.encode(), member, call or next(self._calls), command, wait_s)  # type: ignore[arg-type]
        reply = await self._session.ask(act)
        if reply.status != ReplyStatus.OK:
            raise error_of(reply, self._session.label)
        kind, *facts = reply.result
        outcome = OUTCOMES[kind](*facts)
        if isinstance(outcome, Refused):
            raise getattr(errors, outcome.error, MeetingError)(thing=title, **outcome.fields)
        return outcome

    def _until(self, until: float) -> Steps:
        yield until  # others may run first, however short the sleep is
        while self._scheduled.simulator.now < until:
            yield until


class SimulatedBarrier:
    """A barrier; names and errors are those of `rallypoint.Barrier`."""

    def __init__(self, process: SimulatedProcess, name: str, members: int | Sequence[str]) -> None:
        self._process = process
        self._name, self._title = name, f"barrier {name!r}"
        self._members = members_of(members)

    async def wait(self, member: int | str, timeout: Timeout | None = None) -> None:
        """Arrive, and return when all members have arrived."""
        arrival = barrier.BarrierArrive(self._members)
        undo = barrier.BarrierWithdraw
        await self._process.perform(self._title, self._name, name_of(member), arrival, undo, timeout)


class SimulatedLock:
    """A fair lock, tied to the session of its process; an async context manager."""

    def __init__(self, process: SimulatedProcess, name: str) -> None:
        self.fence = 0
        """The fencing token of this holder, larger than all earlier ones; 0 before the first acquire."""

        self._process = process
        self._name, self._title = name, f"lock {name!r}"
        self._member = str(process.rank)
        self._call = 0

    async def acquire(self, timeout: Timeout | None = None) -> int:
        """Acquire the lock, and return its fence. Raises MembersMissing, which names the holder, at the timeout."""
        if self._call:
            raise RuntimeError(f"{self._title} is already held by this object; use a separate lock per user")
        command = lock.LockAcquire()
        self._call, fence = await self._process.perform(
            self._title, self._name, self._member, command, lock.LockRelease, timeout
        )
        self.fence = int(fence)
        return self.fence

    async def release(self) -> bool:
        """Release the lock; return whether this object still held it."""
        call, self._call = self._call, 0
        if not call:
            raise RuntimeError(f"{self._title} is not held by this object")
        outcome = await self._process.act(self._title, self._name, self._member, 0, lock.LockRelease(call))
        return isinstance(outcome, Done) and bool(outcome.answer)

    async def __aenter__(self) -> SimulatedLock:
        await self.acquire()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Release the lock. Raises SessionLost if it was lost before, unless the block itself raised."""
        if kind is not None and issubclass(kind, SessionLost):
            return
        if not await self.release() and kind is None:
            raise SessionLost(peer=self._title, why=f"it was lost before it was released (fence {self.fence})")
