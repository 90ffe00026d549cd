"""The rig: which core a process runs on, children that carry out calls, and measuring in turn.

A `Team` is some processes forked off a server process that has imported torch once; each holds one object and answers
calls of its methods. Placements change by moving threads that exist, so nothing is started again between them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.util
import multiprocessing
import os
import shutil
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Protocol

CORES = sorted(os.sched_getaffinity(0))
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch.distributed"])


class Placement(NamedTuple):
    """Where the servers and their clients run."""

    name: str
    servers: int
    clients: int

    def put(self, servers: Iterable[int], clients: Iterable[int]) -> None:
        """Move these processes to their cores."""
        for pid in servers:
            pin(pid, self.servers)
        for pid in clients:
            pin(pid, self.clients)


PLACEMENTS = [Placement("one core", CORES[0], CORES[0])]
if len(CORES) > 1:
    PLACEMENTS.append(Placement("two cores", CORES[0], CORES[1]))


class Missing(Exception):
    """An outside part that a subject needs is not installed."""


def need(*parts: str) -> None:
    """Raise Missing for a module or a program that is not there."""
    for part in parts:
        if not shutil.which(part) and importlib.util.find_spec(part) is None:
            raise Missing(f"{part} is not installed")


def pin(pid: int, core: int) -> None:
    """Keep every thread of a process on one core; threads it starts later stay there too."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):  # it may have ended since
            os.sched_setaffinity(int(thread), {core})


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used, all its threads together."""
    return time.clock_gettime((~pid << 3) | 2)  # how Linux numbers the clock of another process


def resident_kb(pid: int) -> float:
    """Return the memory of a process that is in use."""
    facts = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return float(facts["VmRSS"].split()[0])


def ask_no_resolver() -> None:
    """Have this process look up names in /etc/hosts alone: torch's clients and server do so at every connect."""
    with contextlib.suppress(AttributeError):  # a C library other than GNU's
        ctypes.CDLL(None)["__nss_configure_lookup"](b"hosts", b"files")


def say(words: str) -> None:
    """Show progress."""
    print(words, file=sys.stderr, flush=True)


def in_turn(names: Sequence[str], rounds: int, measure: Callable[[str], float]) -> dict[str, list[float]]:
    """Measure each name once a round, the order reversed every other round; the first round is for warming up.

    Figures with one index were taken next to each other, so that they can be divided.
    """
    figures: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        for name in names if turn % 2 else reversed(names):
            figure = measure(name)
            if turn:
                figures[name].append(figure)
    say(f"    {', '.join(f'{name} {statistics.median(figures[name]):.4g}' for name in names)}")
    return figures


class Counting(Protocol):
    """A caller on an event loop, which counts its answers."""

    answers: int


async def calls_a_second(callers: Sequence[Counting], warm_s: float, slice_s: float) -> float:
    """Return how many answers a second callers get together, after a while for them to warm up."""
    await asyncio.sleep(warm_s)
    before, began_at = sum(caller.answers for caller in callers), time.monotonic()
    await asyncio.sleep(slice_s)
    return (sum(caller.answers for caller in callers) - before) / (time.monotonic() - began_at)


class Team:
    """Child processes that each hold one `made(*arguments)` and answer calls of its methods."""

    def __init__(self, size: int, made: Callable[..., object], *arguments: object) -> None:
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(size):
            pipe, theirs = _FORKS.Pipe()
            process = _FORKS.Process(target=_answer, args=(theirs, made, arguments), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(pipe)
            self._processes.append(process)
        self.hear()

    @property
    def pids(self) -> list[int]:
        """The process ids of all."""
        return [process.pid for process in self._processes if process.pid is not None]

    def tell(self, method: str, *arguments: object) -> None:
        """Have all of them call a method."""
        for pipe in self._pipes:
            pipe.send((method, arguments))

    def hear(self) -> list[Any]:
        """Return what the call returned, from each; raise what went wrong in any."""
        answers = [pipe.recv() for pipe in self._pipes]
        for failed, answer in answers:
            if failed:
                raise RuntimeError(f"a client process failed:\n{answer}")
        return [answer for _, answer in answers]

    def ask(self, method: str, *arguments: object) -> list[Any]:
        """Have all of them call a method, and return what they return."""
        self.tell(method, *arguments)
        return self.hear()

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            process.kill()


@contextlib.contextmanager
def team(size: int, made: Callable[..., object], *arguments: object) -> Iterator[Team]:
    """Hold a Team for a while."""
    members = Team(size, made, *arguments)
    try:
        yield members
    finally:
        members.close()


def _answer(pipe: Connection, made: Callable[..., object], arguments: tuple[object, ...]) -> None:
    """Live as one member of a Team, until its pipe is closed."""
    ask_no_resolver()
    try:
        held = made(*arguments)
        pipe.send((False, None))
        while True:
            method, arguments = pipe.recv()
            pipe.send((False, getattr(held, method)(*arguments)))
    except EOFError:
        os._exit(0)  # without a farewell to a thousand connections
    except Exception:
        pipe.send((True, traceback.format_exc()))
