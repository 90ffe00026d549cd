"""`VirtualClock`: the time of servers in a test, which passes only when the test says so.

An event loop asks its selector to wait until its next timer. `TimedSelector` does not wait: with nothing to read or
write, it moves the loop's time to that timer, but never past the instant that the clock was advanced to. So every timer
runs at its own time and in order, as it would if the time had passed: a server that jumped over its timers would take
itself for stopped, and forgive its clients.

Rejected: to replace `time.monotonic` in all modules. The threads of blocking clients wait in the kernel, which counts
real seconds; half of the program would then live in another time than the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import threading
from collections.abc import Callable, Mapping
from typing import Any

from rallypoint.deadline import Deadline, Timeout, seconds

__all__ = ["TimedLoop", "Timeline", "VirtualClock"]

START_AT = 1000.0
"""Where the time starts: not at zero, as little as `time.monotonic` does."""

ADVANCE_S = 60.0
"""How long servers may take, in real time, to do what is due when the clock is advanced."""


class VirtualClock:
    """A clock that stands still until `advance`. It may be the clock of several servers.

    clock = VirtualClock()
    with InProcessServer(clock=clock) as server:
        ...
        clock.advance(30)    # all that is due within the next 30 s happens now
    """

    def __init__(self) -> None:
        self._now = START_AT
        self._changed = threading.Condition()
        self._timelines: list[Timeline] = []
        self._advancing = threading.Lock()

    def now(self) -> float:
        """Return the time in seconds; only differences mean something, as with `time.monotonic`."""
        return self._now

    def advance(self, duration: Timeout) -> None:
        """Let time pass, and return when the servers have done all that was due, each thing at its time.

        What clients do when they get their replies, they do in their own threads, after this: wait for that. Raises
        ValueError for a negative or infinite duration, and TimeoutError if a server is not ready within a minute.
        """
        step_s = seconds(duration, "duration")
        if step_s == float("inf"):
            raise ValueError("duration must be finite")
        deadline = Deadline(ADVANCE_S)
        with self._advancing, self._changed:
            self._now += step_s
            timelines = [one for one in self._timelines if not one.ended]
            for timeline in timelines:
                timeline.move_to(self._now)
            if not self._changed.wait_for(lambda: all(one.settled for one in timelines), deadline.remaining()):
                raise TimeoutError(f"a server was still busy {ADVANCE_S:g} s after the clock was advanced")

    def timeline(self, wake: Callable[[], object]) -> Timeline:
        """Return the time of an event loop, which follows this clock; `wake` makes the loop look at it again."""
        with self._changed:
            self._timelines = [one for one in self._timelines if not one.ended]
            timeline = Timeline(self._now, self._changed, wake)
            self._timelines.append(timeline)
            return timeline


class Timeline:
    """The time of one event loop; `changed` is the lock of its clock, and announces that a timeline has settled."""

    def __init__(self, now: float, changed: threading.Condition, wake: Callable[[], object]) -> None:
        self.now = now
        self.settled = self.ended = False
        """Whether the loop has arrived at the clock's time and has nothing to do; whether it is closed."""

        self._until = now
        self._changed = changed
        self._wake = wake

    def move_to(self, until: float) -> None:
        """Let the loop proceed to an instant; the lock is held."""
        self._until, self.settled = until, False
        self._wake()

    def step(self, next_s: float | None) -> bool:
        """Move towards the clock's time, as far as the next timer; return False if the loop must wait for events."""
        with self._changed:
            if self.now < self._until:
                self.now = self._until if next_s is None else min(self._until, self.now + next_s)
                return True
            self.settled = True
            self._changed.notify_all()
            return False

    def end(self) -> None:
        """Stop to follow the clock: the loop is closed."""
        with self._changed:
            self.settled = self.ended = True
            self._changed.notify_all()


class TimedLoop(asyncio.SelectorEventLoop):
    """An event loop that calls `on_idle` before it waits, and lives in the time of a virtual clock, if there is one."""

    def __init__(self, clock: VirtualClock | None = None) -> None:
        self.on_idle: Callable[[], object] = lambda: None
        self._timeline = None if clock is None else clock.timeline(self._look_again)
        super().__init__(_TimedSelector(self._before_wait))

    def time(self) -> float:
        """Return the time by which timers run."""
        return super().time() if self._timeline is None else self._timeline.now

    def close(self) -> None:
        """Close the loop; its clock no longer waits for it."""
        if self._timeline is not None:
            self._timeline.end()
        super().close()

    def _look_again(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is closed
            self.call_soon_threadsafe(lambda: None)

    def _before_wait(self, next_s: float | None) -> float | None:
        """Return how long to wait for events, given the duration until the next timer."""
        self.on_idle()
        if self._timeline is None:
            return next_s
        return 0.0 if self._timeline.step(next_s) else None


class _TimedSelector(selectors.BaseSelector):
    """A selector that asks, before it waits, how long it may."""

    def __init__(self, before_wait: Callable[[float | None], float | None]) -> None:
        self._real = selectors.DefaultSelector()
        self._before_wait = before_wait

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._real.select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        return self._real.select(self._before_wait(timeout))

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()
