"""Functions that tests run with `rallypoint.launch`; workers import this module."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import rallypoint

__all__ = ["Config", "Unreadable", "adder", "ask", "decorated", "end", "fail_on", "hang", "meet", "nested", "restarted"]


class Config:
    """An argument and a result that is neither a number nor a string."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def scaled(self, by: float) -> float:
        return self.rate * by


class Unreadable:
    """A result that can be pickled, but not unpickled by the caller."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _only_in, (os.getpid(),)


def _only_in(pid: int) -> int:
    if pid != os.getpid():
        raise ValueError("not here")
    return pid


def ask(*args: object, **kwargs: object) -> tuple[int, int, tuple[object, ...], dict[str, object], dict[str, str]]:
    worker = rallypoint.worker()
    return worker.rank, worker.world_size, args, kwargs, dict(os.environ)


def meet(data: str) -> list[str]:
    return [found.decode() for found in rallypoint.worker().all_gather(data.encode(), timeout=60)]


def hang() -> None:
    threading.Event().wait()


def fail_on(rank: int, how: Callable[[], object]) -> int:
    """Fail on one rank, when the others are up; these hang until they are ended, after they have told their pids."""
    worker = rallypoint.worker()
    os.write(1, f"pid {os.getpid()}\n".encode())
    worker.barrier(timeout=60)
    if worker.rank == rank:
        how()
    hang()
    return rank


def end(how: str) -> object:
    """End in an unusual way, on the last rank."""
    if rallypoint.worker().rank < rallypoint.worker().world_size - 1:
        return "fine"
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "exit 0":
        sys.exit(0)
    if how == "exit 3":
        sys.exit(3)
    if how == "exit words":
        sys.exit("no more disk")
    if how == "vanish":
        os._exit(0)
    if how == "kill agent":
        os.kill(os.getppid(), signal.SIGKILL)
        hang()
    if how == "lock":
        return threading.Lock()
    if how == "unreadable":
        return Unreadable()
    raise KeyError(how)


def restarted(needed: int) -> tuple[int, int]:
    """Fail until the job has used so many restarts."""
    worker = rallypoint.worker()
    if worker.restarts < needed and worker.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return worker.rank, worker.restarts


def adder(by: int) -> Callable[..., int]:
    """Return a closure that calls another one, and itself."""

    def count(left: int) -> int:
        return 0 if not left else 1 + count(left - 1)

    def add(to: int, *, more: int = 0) -> int:
        return to + count(by) + more

    return add


def nested(nproc: int) -> list[int]:
    return [found[0] for found in rallypoint.launch(ask, nproc)]


def twice(function: Callable[[int], int]) -> Callable[[int], int]:
    @functools.wraps(function)
    def call(number: int) -> int:
        return 2 * function(number)

    return call


@twice
def decorated(number: int) -> int:
    return number + 1
