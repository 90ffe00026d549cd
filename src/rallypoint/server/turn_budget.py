"""Fair sharing of the event loop: long work runs in slices, and single small requests are served in between.

The code for pipelined requests, committed entries, deadlines, deletions and ended sessions calls `spent` between two
steps. When it returns True the code stops, and `resume` queues the rest for a later turn of the loop. Queued work gets
`TURN_S` of each turn, a share of `SHARE_S` at a time, in the order in which it was queued; work that arrives in the
turn gets as much again. So a turn takes about ten milliseconds however many peers have work, and a peer with a
thousand requests does not delay one with two.

A single small request never calls `spent`: it is served as it arrives.

Rejected: a limit on the number of requests. A `multi_set` of many pairs takes ten thousand times as long as a `get`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

__all__ = ["SHARE_S", "TURN_S", "TurnBudget"]

TURN_S = 0.005
"""Time for queued work in one turn of the event loop, and again for work that arrives in it."""

SHARE_S = 0.001
"""Time for one piece of queued work, before the next in the queue is served."""


class TurnBudget:
    """The time for long work in the current turn of the event loop, and the work that waits for a later one."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._ends_at = 0.0
        self._waiting: deque[Callable[[], None]] = deque()
        self._scheduled = False
        self._begins = False  # whether a share begins: its first step runs, however slow the machine is

    def spent(self) -> bool:
        """Return whether the caller must stop, and `resume` in a later turn."""
        if not self._scheduled:  # the first long work of this turn
            self._schedule()
            return False
        if self._begins:
            self._begins = False
            return False
        return self._clock() >= self._ends_at

    def resume(self, work: Callable[[], None]) -> None:
        """Call `work` in a later turn, behind all work that already waits."""
        self._waiting.append(work)
        if not self._scheduled:
            self._schedule()

    def run(self, steps: Iterator[object]) -> None:
        """Run the steps of a generator, now and in as many later turns as they take."""
        for _ in steps:
            if self.spent():
                self.resume(partial(self.run, steps))
                return

    def _schedule(self) -> None:
        self._scheduled = True
        self._ends_at = self._clock() + TURN_S
        asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        """Run the waiting work until its time is spent; then let new work begin."""
        waiting, self._scheduled = self._waiting, True
        ends_at = self._clock() + TURN_S
        try:
            for _ in range(len(waiting)):
                now = self._clock()
                if now >= ends_at:
                    break
                self._ends_at, self._begins = now + SHARE_S, True
                waiting.popleft()()
        finally:
            self._scheduled = self._begins = False
            if waiting:
                self._schedule()
