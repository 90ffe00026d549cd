"""Synchronize on a store, ours or PyTorch's, as `torch.distributed.elastic.utils.store` does, also with its callers.

The keys are PyTorch's, so callers of its functions and of these meet:

    PREFIX0 … PREFIXn-1                     the data of each rank in `synchronize`
    PREFIX/finished/num_members, …          the two keys of a barrier, at which rank 0 waits for the other readers
    PREFIX/num_members, PREFIX/last_member  the number of callers at a barrier, and the key that opens it
    PREFIXr/TRACE                           rank r has arrived (PyTorch writes it only when it gives up); our callers
                                            write "gone" to it when they give up
    PREFIX/TRACING_GATE                     written by rank 0 when it has checked; releases PyTorch's other ranks

As in PyTorch, a PREFIX serves one barrier, callers are counted but not told apart, and the keys stay. Differences:

                                    PyTorch                                 here
    missing ranks are named by      rank 0; at most 16, never itself        every caller that gave a rank; all of them
    barrier without a rank          the store's error                       the same class, with the number arrived
    timeout on a FileStore          no names: another error class           names
    caller that gives up            stays counted: a retry opens early      is no longer counted, unless it opened
    the store's timeout             replaced; for good after an error       not changed; `store_timeout` restores it
    timeout of `synchronize`        starts again for each wait              limits the whole call
    timeout 0                       on some stores, waits for ever          returns only if already complete

Rejected: use our own `Barrier`. It tells callers apart, but PyTorch's callers would never arrive at it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from rallypoint.deadline import Deadline
from rallypoint.errors import StoreTimeout

__all__ = ["BarrierTimeout", "store_timeout", "get_all", "synchronize", "barrier"]

LEAST_S, MOST_S = 0.001, 365 * 86400.0
"""The timeouts that PyTorch's stores accept: 0 means for ever on some, and large values overflow."""

SLACK_S = 0.05
"""How much too early a store may time out."""

POLL_S, MAX_POLL_S = 0.02, 0.5
"""The first and the longest poll interval for arrivals and departures that have no key to wait for."""

_HERE, _GONE = b"here", b"gone"


class BarrierTimeout(StoreTimeout):
    """Fewer callers than the world size arrived at a barrier in time.

    `missing_ranks` are the ranks that never arrived or, if all did, those that gave up earlier. `missing` has their
    names from the decoder. Both are empty for a caller without a rank. `arrived` counts the callers that arrived and
    did not give up.
    """

    key_prefix: str
    world_size: int
    arrived: int
    rank: int | None = None
    missing_ranks: Sequence[int] = ()
    missing: Sequence[str] = ()
    operation: str = "barrier"
    keys: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.keys = (self.key_prefix + "/last_member",)

    def _sentence(self) -> str:
        on = "" if self.rank is None else f" on rank {self.rank}"
        who = f"arrived={self.arrived}" if self.rank is None else f"missing_ranks=[{', '.join(self.missing)}]"
        return (
            f"Timed out waiting on barrier{on}, for key prefix: {self.key_prefix} "
            f"(world_size={self.world_size}, {who}, timeout={self.timeout_s})"
        )


@contextmanager
def store_timeout(store: Any, timeout: float) -> Iterator[None]:
    """Set the store's timeout, in seconds, for the block, and restore it afterwards."""
    before = store.timeout
    store.set_timeout(timedelta(seconds=timeout))
    try:
        yield
    finally:
        store.set_timeout(before)


def get_all(store: Any, rank: int, prefix: str, world_size: int) -> list[bytes]:
    """Return the values of `{prefix}0` to `{prefix}n-1` once all exist, within the store's timeout.

    Rank 0 returns when all others have read them, so that it can exit if it hosts the store.
    """
    return _collect(store, rank, prefix, world_size, Deadline(store.timeout))


def synchronize(
    store: Any, data: bytes, rank: int, world_size: int, key_prefix: str, timeout: float = 300
) -> list[bytes]:
    """Contribute `data`, and return the data of all ranks, by rank. Raises the store's error at the timeout."""
    deadline = Deadline(timeout)
    store.set(f"{key_prefix}{rank}", data)
    return _collect(store, rank, key_prefix, world_size, deadline)


def barrier(
    store: Any,
    world_size: int,
    key_prefix: str,
    barrier_timeout: float = 300,
    rank: int | None = None,
    rank_tracing_decoder: Callable[[int], str] | None = None,
    trace_timeout: float = 10,
) -> None:
    """Return when `world_size` callers have arrived at this prefix.

    Raises BarrierTimeout, which is also an instance of the store's own timeout error. It names the missing ranks if a
    rank was given: this takes up to `trace_timeout`, in which other callers can identify themselves, and in which
    rank 0, which may host the store, lets the others check first.
    """
    if rank is None and rank_tracing_decoder is not None:
        raise AssertionError("rank_tracing_decoder needs rank: without it no rank can be named")
    deadline = Deadline(barrier_timeout)
    error = _await_members(store, world_size, key_prefix, deadline, rank)
    if error is None:
        return
    missing: list[int] = []
    tracing = Deadline(trace_timeout)
    if rank is not None:
        missing = _roll_call(store, rank, world_size, key_prefix, tracing)
    arrived = _leave(store, world_size, key_prefix)
    if arrived >= world_size:
        return
    if rank is not None:
        _see_off(store, rank, world_size, key_prefix, tracing)
    kind: Any = type(error)
    raise _as(kind)(
        store=repr(store),
        key_prefix=key_prefix,
        world_size=world_size,
        timeout_s=barrier_timeout,
        arrived=arrived,
        rank=rank,
        missing_ranks=missing,
        missing=[_decoded(rank_tracing_decoder, absent) for absent in missing],
    ) from None


@functools.cache
def _as(theirs: Any) -> type[BarrierTimeout]:
    """Return a subclass of our error that is also a subclass of the store's own."""
    if issubclass(BarrierTimeout, theirs):
        return BarrierTimeout

    def __reduce__(self: BarrierTimeout) -> tuple[Any, ...]:
        revive, (_, *facts) = BarrierTimeout.__reduce__(self)
        return revive, (BarrierTimeout, *facts)

    body = {"__doc__": BarrierTimeout.__doc__, "__module__": __name__, "__reduce__": __reduce__}
    return type("BarrierTimeout", (BarrierTimeout, theirs), body)


def _decoded(decoder: Callable[[int], str] | None, rank: int) -> str:
    if decoder is None:
        return str(rank)
    try:
        return str(decoder(rank))
    except Exception as error:  # a decoder that does not know a rank must not hide that it is missing
        return f"{rank} (the decoder raised {type(error).__name__})"


def _collect(store: Any, rank: int, prefix: str, world_size: int, deadline: Deadline) -> list[bytes]:
    keys = [f"{prefix}{number}" for number in range(world_size)]
    error = _wait(store, keys, deadline)
    if error is None:
        values: list[bytes] = store.multi_get(keys)
        if rank != 0:
            _arrive(store, world_size, f"{prefix}/finished")
            return values
        error = _await_members(store, world_size, f"{prefix}/finished", deadline)
        if error is None or _leave(store, world_size, f"{prefix}/finished") >= world_size:
            return values
    raise error


def _await_members(
    store: Any, world_size: int, prefix: str, deadline: Deadline, rank: int | None = None
) -> Exception | None:
    """Arrive and wait for the others; return the store's error if they do not arrive in time."""
    if rank is not None:
        store.set(_trace(prefix, rank), _HERE)
    opened = _arrive(store, world_size, prefix)
    try:
        return _wait(store, [opened], deadline)
    except BaseException:
        with suppress(Exception):
            if _leave(store, world_size, prefix) < world_size and rank is not None:
                store.set(_trace(prefix, rank), _GONE)
        raise


def _arrive(store: Any, world_size: int, prefix: str) -> str:
    """Count one caller; return the key that exists when all have arrived."""
    opened = f"{prefix}/last_member"
    if store.add(f"{prefix}/num_members", 1) >= world_size:
        store.set(opened, "1")
    return opened


def _leave(store: Any, world_size: int, prefix: str) -> int:
    """Uncount one caller, and return the count with it; if all had arrived, it stays counted."""
    arrived = int(store.add(f"{prefix}/num_members", -1)) + 1
    if arrived >= world_size:
        _arrive(store, world_size, prefix)
    return arrived


def _wait(store: Any, keys: list[str], deadline: Deadline) -> Exception | None:
    """Wait for keys; return the store's timeout error, of whatever class, or None."""
    try:
        store.wait(keys, timedelta(seconds=min(max(deadline.remaining(), LEAST_S), MOST_S)))
    except RuntimeError as error:
        if isinstance(error, ConnectionError) or deadline.remaining() > SLACK_S:
            raise
        if not store.check(keys):  # raises if the store failed and this was no timeout
            return error
    return None


def _trace(prefix: str, rank: int) -> str:
    return f"{prefix}{rank}/TRACE"


def _marks(store: Any, world_size: int, prefix: str) -> dict[int, bytes]:
    """Return the trace value of each rank that has arrived."""
    absent = set(_absent(store, prefix, range(world_size)))
    here = [rank for rank in range(world_size) if rank not in absent]
    return dict(zip(here, store.multi_get([_trace(prefix, rank) for rank in here]), strict=True)) if here else {}


def _absent(store: Any, prefix: str, ranks: range) -> list[int]:
    """Return the ranks that have not arrived, by bisection: usually few of many."""
    if not ranks or store.check([_trace(prefix, rank) for rank in ranks]):
        return []
    if len(ranks) == 1:
        return list(ranks)
    half = len(ranks) // 2
    return _absent(store, prefix, ranks[:half]) + _absent(store, prefix, ranks[half:])


def _polls(deadline: Deadline) -> Iterator[None]:
    """Yield at once, then at growing intervals until the deadline."""
    pause_s = POLL_S
    while True:
        yield
        if deadline.expired():
            return
        time.sleep(min(pause_s, deadline.remaining()))
        pause_s = min(pause_s * 1.5, MAX_POLL_S)


def _roll_call(store: Any, rank: int, world_size: int, prefix: str, deadline: Deadline) -> list[int]:
    """Return the missing ranks, once all callers that arrived have identified themselves, or at the deadline."""
    marks: dict[int, bytes] = {}
    for _ in _polls(deadline):
        arrived = int(store.add(f"{prefix}/num_members", 0))
        marks = _marks(store, world_size, prefix)
        if sum(mark != _GONE for mark in marks.values()) >= arrived:
            break
    absent = [number for number in range(world_size) if number not in marks]
    return absent or [number for number, mark in marks.items() if mark == _GONE and number != rank]


def _see_off(store: Any, rank: int, world_size: int, prefix: str, deadline: Deadline) -> None:
    """Mark this rank as gone. Rank 0 returns last: others may still be checking which ranks are missing."""
    store.set(_trace(prefix, rank), _GONE)
    if rank != 0:
        return
    store.set(f"{prefix}/TRACING_GATE", "1")
    for _ in _polls(deadline):
        if _HERE not in _marks(store, world_size, prefix).values():
            return
