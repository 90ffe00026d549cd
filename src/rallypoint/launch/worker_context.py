"""`rallypoint.worker()`: the rank, round and store of a script started by `rallypoint run`."""

from __future__ import annotations

import os
from functools import cached_property
from time import monotonic_ns

from rallypoint.core.policy.stop_policy import NONE
from rallypoint.deadline import Timeout
from rallypoint.errors import AddressTaken, RallypointError, WithFields
from rallypoint.launch.held_ports import HeldPorts
from rallypoint.launch.monitoring.progress_record import MONITOR_VARIABLE, PROGRESS_AT, STEP, ProgressWriter
from rallypoint.launch.preemption.stop_record import PASSED, PROPOSED, wait_for_answer
from rallypoint.recipes.barrier import Barrier
from rallypoint.recipes.exchange import Exchange
from rallypoint.recipes.join_args import round_prefix
from rallypoint.store.base import Store
from rallypoint.store.prefix import PrefixStore
from rallypoint.store.url import connect

__all__ = ["NotLaunched", "Worker", "worker"]


class NotLaunched(WithFields, RallypointError):
    """This process was not started by `rallypoint run`; `missing` is the unset variable."""

    missing: str

    def _sentence(self) -> str:
        return (
            f"this process was not started by `rallypoint run`: {self.missing} is not set. Start the script with "
            f"`rallypoint run`, or open a store with rallypoint.connect"
        )


class Worker:
    """One worker of a job: its ranks, and what it shares with the other workers of its round."""

    def __init__(self, environment: dict[str, str]) -> None:
        def variable(name: str) -> str:
            if name not in environment:
                raise NotLaunched(missing=name)
            return environment[name]

        self._url = variable("RALLYPOINT_URL")
        self._scope = f"{round_prefix(variable('RALLYPOINT_RUN'), variable('RALLYPOINT_SCOPE'))}/workers"
        self.rank = int(variable("RANK"))
        self.local_rank = int(variable("LOCAL_RANK"))
        self.world_size = int(variable("WORLD_SIZE"))
        self.local_world_size = int(variable("LOCAL_WORLD_SIZE"))
        self.node = variable("RALLYPOINT_NODE")
        self.round = int(variable("RALLYPOINT_ROUND"))
        self.restarts = int(variable("TORCHELASTIC_RESTART_COUNT"))
        self.run_id = variable("RALLYPOINT_RUN")
        self.address = variable("RALLYPOINT_NODE_ADDR")
        self.rank0_address = variable("RALLYPOINT_RANK0_ADDR")
        self._held_ports = HeldPorts()
        self._record = ProgressWriter(environment.get(MONITOR_VARIABLE, "")).numbers

    def __repr__(self) -> str:
        return f"<worker {self.rank} of {self.world_size}, round {self.round} of {self.run_id!r}>"

    @cached_property
    def store(self) -> Store:
        """The store that the workers of this round share; connected on first use."""
        return PrefixStore(self._scope, connect(self._url))

    def progress(self, step: int) -> None:
        """Tell the agent that this worker has reached a step; takes less than a microsecond, and never blocks.

        With `--hang-timeout`, a worker that has called this and then stops calling it is restarted.
        """
        record = self._record
        record[STEP] = step
        record[PROGRESS_AT] = monotonic_ns()

    def should_stop(self, step: int) -> bool:
        """Return whether to stop before this step: save a checkpoint, and exit with code 0 or 75.

        When a node of the run is preempted (`--preempt-signal`, `rallypoint runs drain`), all ranks that call this get
        True at the same step, if they ask at the same steps. Steps must increase, and may skip numbers: count them over
        all epochs. It takes about a microsecond, and counts as `progress(step)`. Only during a preemption may it wait,
        until the other ranks have asked, too; signals are handled meanwhile.
        """
        record = self._record
        try:
            record[STEP] = step
        except (TypeError, ValueError):
            raise TypeError(f"step must be an integer of at most 64 bits, not {step!r}") from None
        record[PROGRESS_AT] = monotonic_ns()
        if record[PROPOSED] != NONE:
            return wait_for_answer(record, step)
        if step > record[PASSED]:
            record[PASSED] = step
        return False

    def barrier(self, timeout: Timeout | None = None, name: str = "workers") -> None:
        """Wait until all workers of the round have arrived."""
        Barrier(self.store, name, self.world_size).wait(self.rank, timeout)

    def all_gather(self, data: bytes, timeout: Timeout | None = None, name: str = "workers") -> list[bytes]:
        """Return the data of all workers of the round, by rank."""
        return self.exchange(name).all_gather(self.rank, data, timeout)

    def exchange(self, name: str = "workers") -> Exchange:
        """Return an exchange between all workers of the round."""
        return Exchange(self.store, name, self.world_size)

    def free_port(self, timeout: Timeout | None = None, name: str = "free_port", hold: bool = True) -> int:
        """Return a free port of rank 0's node, the same on all workers of the round; each call returns another one.

        All workers call it, in the same order for each `name`. Rank 0's process holds the port until it ends: no other
        process gets it by chance, and a server that sets SO_REUSEADDR, as most do, can bind it, in any process of that
        node. A server that does not set it needs `hold=False`: then the port was free a moment ago, and another process
        may take it first.

        Raises MembersMissing at the timeout, and AddressTaken on all workers if rank 0's node has no free port.
        """
        found = b""
        if self.rank == 0:
            try:
                found = str(self._held_ports.reserve(hold)).encode()
            except OSError as error:
                found = b"!" + (error.strerror or str(error)).encode()
        found = self.exchange(name).broadcast(self.rank, found, timeout=timeout)
        if found.startswith(b"!"):
            raise AddressTaken(address=f"a free port of rank 0's node ({self.rank0_address})", why=found[1:].decode())
        return int(found)


_worker: Worker | None = None


def worker() -> Worker:
    """Return the worker that this process is; raise NotLaunched if `rallypoint run` did not start it."""
    return _worker or _make_worker()


def _make_worker() -> Worker:
    global _worker
    _worker = Worker(dict(os.environ))
    return _worker


def _forget_worker() -> None:
    global _worker
    _worker = None


os.register_at_fork(after_in_child=_forget_worker)  # a child opens a store of its own
