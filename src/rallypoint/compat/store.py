"""Meeting on a store as `torch.distributed.elastic.utils.store` does, on ours or PyTorch's, with whoever uses that.

The keys are PyTorch's, so that callers of its functions and of these meet:

    PREFIX0 … PREFIXn-1                     what each rank gave to `synchronize`
    PREFIX/finished/num_members, …          a barrier's two, on which rank 0 waits for those who still read
    PREFIX/num_members, PREFIX/last_member  how many came to a barrier, and the key that opens it
    PREFIXr/TRACE                           rank r has come (PyTorch writes it only when it gives up); ours say "gone"
                                            in it when they have given up
    PREFIX/TRACING_GATE                     written by rank 0 when it has looked; releases PyTorch's others

As there, one PREFIX serves one meeting, callers are counted and not told apart, and the keys stay. What is mended:

    what                            PyTorch                               here
    who names the missing           rank 0, at most 16, itself never      every caller that gave a rank, all of them
    a barrier without a rank        the store's error                     the same class, and how many came
    a time-out on its FileStore     no names, for it is another error     names
    a caller that gives up          stays counted: a retry opens early    is taken back, unless the barrier opened
    the store's timeout             replaced; after an error, for good    not touched; `store_timeout` restores it
    synchronize's timeout           begins anew for each wait             bounds the whole call
    a timeout of 0                  on some stores, for ever              only if it is true now

Rejected: our own `Barrier` beneath. It tells callers apart, but PyTorch's would never arrive.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from rallypoint.deadline import Deadline
from rallypoint.errors import StoreError, StoreTimeout

__all__ = ["BarrierTimeout", "store_timeout", "get_all", "synchronize", "barrier"]

LEAST_S, MOST_S = 0.001, 365 * 86400.0
"""What PyTorch's stores understand as a timeout: 0 is for ever on some, and a large one wraps around."""

SLACK_S = 0.05
"""How much too early a store's time-out may come."""

POLL_S, MAX_POLL_S = 0.02, 0.5
"""How often those are looked at who come, or leave, without a key to wait for; ever less often."""

_HERE, _GONE = b"here", b"gone"


class BarrierTimeout(StoreTimeout):
    """Fewer callers than the world size came to a barrier in time.

    `missing_ranks` are the ranks that never came; where all have, those that came and gave up before. `missing` is what
    the decoder made of them. Without a rank both are empty, and `arrived`, how many had come and not given up, is all.
    """

    rank: int | None
    key_prefix: str
    world_size: int
    arrived: int
    missing_ranks: tuple[int, ...]

    def __init__(
        self,
        *,
        store: str,
        key_prefix: str,
        world_size: int,
        timeout_s: float,
        arrived: int,
        rank: int | None = None,
        missing_ranks: Sequence[int] = (),
        missing: Sequence[str] = (),
    ) -> None:
        on = "" if rank is None else f" on rank {rank}"
        who = f"arrived={arrived}" if rank is None else f"missing_ranks=[{', '.join(missing)}]"
        StoreError.__init__(
            self,
            f"Timed out waiting on barrier{on}, for key prefix: {key_prefix} "
            f"(world_size={world_size}, {who}, timeout={timeout_s})",
            operation="barrier",
            keys=(key_prefix + "/last_member",),
            missing=tuple(missing),
            timeout_s=timeout_s,
            store=store,
            rank=rank,
            key_prefix=key_prefix,
            world_size=world_size,
            arrived=arrived,
            missing_ranks=tuple(missing_ranks),
        )


@contextmanager
def store_timeout(store: Any, timeout: float) -> Iterator[None]:
    """Let blocking calls of a store wait so many seconds within the block, however that ends."""
    before = store.timeout
    store.set_timeout(timedelta(seconds=timeout))
    try:
        yield
    finally:
        store.set_timeout(before)


def get_all(store: Any, rank: int, prefix: str, world_size: int) -> list[bytes]:
    """Return the values of `{prefix}0` to `{prefix}n-1`, once all are there, within the store's timeout.

    Rank 0 returns when all others have read them, so that whoever hosts the store may exit.
    """
    return _collect(store, rank, prefix, world_size, Deadline(store.timeout))


def synchronize(
    store: Any, data: bytes, rank: int, world_size: int, key_prefix: str, timeout: float = 300
) -> list[bytes]:
    """Give `data`, and return what all ranks gave, in their order. Raises what the store does at a time-out."""
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
    """Return when `world_size` callers have come to this prefix.

    Raises BarrierTimeout, which is also what the store itself raises at a time-out. It names the missing where a rank
    was given; up to `trace_timeout` passes while others, that have come and not said who they are, may say so, and
    while rank 0, who may host the store, lets the others look first.
    """
    if rank is None and rank_tracing_decoder is not None:
        raise AssertionError("rank_tracing_decoder was given without rank: only ranks can be named")
    deadline = Deadline(barrier_timeout)
    error = _meet(store, world_size, key_prefix, deadline, rank)
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
    """Return the class of our error that is caught, too, where the store's own would be."""
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
        error = _meet(store, world_size, f"{prefix}/finished", deadline)
        if error is None or _leave(store, world_size, f"{prefix}/finished") >= world_size:
            return values
    raise error


def _meet(store: Any, world_size: int, prefix: str, deadline: Deadline, rank: int | None = None) -> Exception | None:
    """Arrive and wait for the others; return the store's error where they do not come in time."""
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
    """Count one caller; return the key that is there when all have come."""
    opened = f"{prefix}/last_member"
    if store.add(f"{prefix}/num_members", 1) >= world_size:
        store.set(opened, "1")
    return opened


def _leave(store: Any, world_size: int, prefix: str) -> int:
    """Take one caller back, and return how many there were with it; where all had come, it stays."""
    arrived = int(store.add(f"{prefix}/num_members", -1)) + 1
    if arrived >= world_size:
        _arrive(store, world_size, prefix)
    return arrived


def _wait(store: Any, keys: list[str], deadline: Deadline) -> Exception | None:
    """Wait for keys; return the store's error where the time runs out, whatever that store calls it."""
    try:
        store.wait(keys, timedelta(seconds=min(max(deadline.remaining(), LEAST_S), MOST_S)))
    except RuntimeError as error:
        if isinstance(error, ConnectionError) or deadline.remaining() > SLACK_S:
            raise
        if not store.check(keys):  # raises, where what ended was not the time but the store
            return error
    return None


def _trace(prefix: str, rank: int) -> str:
    return f"{prefix}{rank}/TRACE"


def _marks(store: Any, world_size: int, prefix: str) -> dict[int, bytes]:
    """Return what is written of each rank that has come."""
    absent = set(_absent(store, prefix, range(world_size)))
    here = [rank for rank in range(world_size) if rank not in absent]
    return dict(zip(here, store.multi_get([_trace(prefix, rank) for rank in here]), strict=True)) if here else {}


def _absent(store: Any, prefix: str, ranks: range) -> list[int]:
    """Return the ranks that have not come: halved and halved again, for as a rule they are few of many."""
    if not ranks or store.check([_trace(prefix, rank) for rank in ranks]):
        return []
    if len(ranks) == 1:
        return list(ranks)
    half = len(ranks) // 2
    return _absent(store, prefix, ranks[:half]) + _absent(store, prefix, ranks[half:])


def _polls(deadline: Deadline) -> Iterator[None]:
    """Yield now, and ever less often until the deadline."""
    pause_s = POLL_S
    while True:
        yield
        if deadline.expired():
            return
        time.sleep(min(pause_s, deadline.remaining()))
        pause_s = min(pause_s * 1.5, MAX_POLL_S)


def _roll_call(store: Any, rank: int, world_size: int, prefix: str, deadline: Deadline) -> list[int]:
    """Return the missing ranks, when all who have come have said who they are, or the deadline passed."""
    marks: dict[int, bytes] = {}
    for _ in _polls(deadline):
        arrived = int(store.add(f"{prefix}/num_members", 0))
        marks = _marks(store, world_size, prefix)
        if sum(mark != _GONE for mark in marks.values()) >= arrived:
            break
    absent = [number for number in range(world_size) if number not in marks]
    return absent or [number for number, mark in marks.items() if mark == _GONE and number != rank]


def _see_off(store: Any, rank: int, world_size: int, prefix: str, deadline: Deadline) -> None:
    """Say that this rank is gone. Rank 0 goes last: others that have come may still be looking who is missing."""
    store.set(_trace(prefix, rank), _GONE)
    if rank != 0:
        return
    store.set(f"{prefix}/TRACING_GATE", "1")
    for _ in _polls(deadline):
        if _HERE not in _marks(store, world_size, prefix).values():
            return
