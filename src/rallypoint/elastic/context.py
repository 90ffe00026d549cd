"""What a script that was launched finds out about itself: `rallypoint.worker()`."""

from __future__ import annotations

import os
from functools import cached_property
from typing import Any

from rallypoint.deadline import Timeout
from rallypoint.elastic.card import round_prefix
from rallypoint.errors import RallypointError
from rallypoint.recipes.barrier import Barrier
from rallypoint.recipes.exchange import Exchange
from rallypoint.store.base import Store
from rallypoint.store.prefix import PrefixStore
from rallypoint.store.url import connect

__all__ = ["NotLaunched", "Worker", "worker"]


class NotLaunched(RallypointError):
    """This process was not started by `rallypoint run`; `missing` is the variable that it looked for."""

    missing: str

    def __init__(self, *, missing: str) -> None:
        super().__init__(
            f"this process was not started by `rallypoint run`: {missing} is not set. Start the script with it, "
            f"or make a store with rallypoint.connect",
            missing=missing,
        )


class Worker:
    """One worker of a job: its place, and the means to meet the others of its round."""

    def __init__(self, environment: dict[str, str]) -> None:
        def told(name: str) -> str:
            if name not in environment:
                raise NotLaunched(missing=name)
            return environment[name]

        self._url = told("RALLYPOINT_URL")
        self._scope = f"{round_prefix(told('RALLYPOINT_RUN'), told('RALLYPOINT_SCOPE'))}/workers"
        self.rank = int(told("RANK"))
        self.local_rank = int(told("LOCAL_RANK"))
        self.world_size = int(told("WORLD_SIZE"))
        self.local_world_size = int(told("LOCAL_WORLD_SIZE"))
        self.node = told("RALLYPOINT_NODE")
        self.round = int(told("RALLYPOINT_ROUND"))
        self.restarts = int(told("TORCHELASTIC_RESTART_COUNT"))
        self.run_id = told("RALLYPOINT_RUN")

    def __repr__(self) -> str:
        return f"<worker {self.rank} of {self.world_size}, round {self.round} of {self.run_id!r}>"

    @cached_property
    def store(self) -> Store:
        """A store that the workers of this round share; it is connected when it is first asked for."""
        return PrefixStore(self._scope, connect(self._url))

    def barrier(self, timeout: Timeout | None = None, name: str = "workers") -> None:
        """Wait until all workers of the round have come."""
        Barrier(self.store, name, self.world_size).wait(self.rank, timeout)

    def all_gather(self, data: bytes, timeout: Timeout | None = None, name: str = "workers") -> list[bytes]:
        """Give data, and return what all workers gave, by rank."""
        return self.exchange(name).all_gather(self.rank, data, timeout)

    def exchange(self, name: str = "workers") -> Exchange:
        """Return an exchange between all workers of the round."""
        return Exchange(self.store, name, self.world_size)


_worker: list[Any] = []


def worker() -> Worker:
    """Return this process's place in its job; raises NotLaunched outside of one."""
    if not _worker or _worker[0] != os.getpid():
        _worker[:] = [os.getpid(), Worker(dict(os.environ))]
    made: Worker = _worker[1]
    return made
