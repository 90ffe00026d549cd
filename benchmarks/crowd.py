"""A crowd: many torch clients that all do one thing at the same moment, as threads of a few processes.

The threads of a process wait at a pipe, and one write to it releases them all. Torch lets go of Python's lock while it
connects and while it waits in a barrier, so the threads are at it together.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from benchmarks.rig import PLACEMENTS, Team, in_turn, say, team
from benchmarks.servers import Running, serving
from benchmarks.table import Line, Target

NAMES = ("rallypoint", "torch")
TARGET = Target(at_most=1.5)
PATIENCE = timedelta(seconds=60)


class Crowd:
    """The threads of one process, and the stores they hold."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._stores: dict[int, list[Any]] = {}
        self._fresh: list[object] = []
        self._threads: list[threading.Thread] = []
        self._errors: list[str] = []
        self._done_at: list[float] = []
        self._gate, self._lever = os.pipe()

    def arm_barrier(self, port: int, key: str, world_size: int) -> None:
        """Bring the threads before the gate, to pass a barrier behind it; connect them first, if it is the first."""
        if port not in self._stores:
            self._stores[port] = [connect(port) for _ in range(self._size)]
        self._arm([functools.partial(store.barrier, key, world_size) for store in self._stores[port]])

    def arm_connect(self, port: int) -> None:
        """Bring the threads before the gate, to connect behind it."""
        self._arm([lambda: self._fresh.append(connect(port))] * self._size)

    def go(self) -> float:
        """Open the gate; return the moment at which the last thread was done."""
        os.write(self._lever, b"." * self._size)
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise RuntimeError(f"{len(self._errors)} of {self._size} failed; the first: {self._errors[0]}")
        return max(self._done_at)

    def part(self) -> None:
        """Close the stores that were connected behind the gate."""
        self._fresh.clear()

    def _arm(self, actions: list[Callable[[], None]]) -> None:
        self._done_at.clear()
        self._threads = [threading.Thread(target=self._act, args=(action,), daemon=True) for action in actions]
        for thread in self._threads:
            thread.start()

    def _act(self, action: Callable[[], None]) -> None:
        os.read(self._gate, 1)
        try:
            action()
        except Exception as error:
            self._errors.append(repr(error))
        self._done_at.append(time.monotonic())


def connect(port: int) -> Any:
    """Return a torch client."""
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=PATIENCE)


def release(crowds: Team) -> float:
    """Let all crowds go; return how many milliseconds later the last thread of all was done."""
    start_at = time.monotonic()
    crowds.tell("go")
    return float(max(crowds.hear()) - start_at) * 1000


def compare(what: str, processes: int, each: int, rounds: int, act: Callable[[Team, Running], float]) -> list[Line]:
    """Have a crowd act on our server and on torch's in turn, at every placement; `act` returns milliseconds."""
    lines = []
    with serving(NAMES) as servers, team(processes, Crowd, each) as crowds:
        for placement in PLACEMENTS:
            say(f"  {what}, {placement.name}")
            placement.put([server.pid for server in servers.values()], crowds.pids)
            ours, theirs = in_turn(NAMES, rounds, lambda name: act(crowds, servers[name])).values()
            lines.append(Line(what, placement.name, "ms", ours, "torch", theirs, TARGET))
    return lines
