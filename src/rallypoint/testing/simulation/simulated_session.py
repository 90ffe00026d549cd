"""The session of a simulated process, as an asyncio store uses it: requests to a simulated server, in virtual time."""

from __future__ import annotations

import types
from collections.abc import Callable, Generator
from typing import Any

from rallypoint.client.outage import operation_name
from rallypoint.core import ops
from rallypoint.core.records import show
from rallypoint.deadline import Deadline, Timeout, seconds
from rallypoint.errors import RallypointError, SessionLost, StoreClosed, Unsupported
from rallypoint.protocol.native_client import Reply
from rallypoint.testing.simulation.simulated_server import SimulatedServer
from rallypoint.testing.simulation.simulator import ScheduledProcess, Steps

__all__ = ["Crashed", "SimulatedDeadline", "SimulatedSession", "run_steps"]


class Crashed(BaseException):
    """The process has crashed: its code does nothing more, not even in a `finally` block."""


@types.coroutine
def run_steps(process: ScheduledProcess, steps: Steps) -> Generator[Any, None, Any]:
    """Await a part of what a process does."""
    if process.crashed or process.done:
        raise Crashed
    return (yield from steps)


class SimulatedDeadline(Deadline):
    """A deadline in virtual time."""

    __slots__ = ("_now",)

    def __init__(self, timeout: Timeout, now: Callable[[], float]) -> None:
        self.timeout_s = seconds(timeout)
        self.at = now() + self.timeout_s
        self._now = now

    def remaining(self) -> float:
        """Return the seconds left, never less than zero."""
        return max(0.0, self.at - self._now())

    def expired(self) -> bool:
        """Return whether no time is left."""
        return self._now() >= self.at


class SimulatedSession:
    """The current session of one process."""

    label = "the simulated store"

    def __init__(self, process: ScheduledProcess, server: SimulatedServer) -> None:
        self._process, self._server = process, server
        self._name = process.session
        self.over: RallypointError | None = None
        """Why it has ended."""

        self.waits_for = ""
        """What its process waits for; empty if for nothing."""

    def deadline(self, timeout: Timeout) -> SimulatedDeadline:
        """Return the deadline of a call."""
        return SimulatedDeadline(timeout, lambda: self._process.simulator.now)

    async def ask(self, op: ops.Op, wait_s: float | None = None) -> Reply:
        """Send a request and wait for its reply."""
        if self.over is not None:
            raise self.over
        key = getattr(op, "key", getattr(op, "name", None))
        op.number = next(self._server.numbers)
        self.waits_for = operation_name(op) if key is None else f"{operation_name(op)} {show(key)!r}"
        try:
            reply: Reply = await run_steps(self._process, self._server.request(self._name, op))
        except SessionLost as error:
            self.over = error
            raise
        self.waits_for = ""
        return reply

    def send(self, op: ops.Op, until: float | None = None) -> int:
        """Send a request, and return its number; a process that has crashed sends nothing."""
        if self.over is not None:
            raise self.over
        if isinstance(op, ops.WatchPrefix):
            raise Unsupported(operation="watch", store=self.label, why="a simulation has no pushed events")
        op.number = next(self._server.numbers)
        if not self._process.crashed:
            self._server.send(self._name, op)
        return op.number

    def close(self) -> None:
        """End the session."""
        if self.over is None:
            self.send(ops.Bye(0))
            self.over = StoreClosed(store=self.label)
