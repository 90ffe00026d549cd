"""`TorchStore`: any rallypoint store as a `torch.distributed.Store`. Needs PyTorch.

    dist.init_process_group("gloo", store=TorchStore(rallypoint.connect("file:///shared/run-7")), rank=0, world_size=2)

A program that connects to a rallypoint server by address does not need this module: see docs/torch.md.

Torch's C++ calls a store written in Python through a trampoline, by these names: set get compare_set add check wait
append multi_get multi_set has_extended_api clone, and `deleteKey` and `getNumKeys` for Python's delete_key and
num_keys. It has no call for queues, list_keys, barrier and the timeout. So the timeout lives in torch's half of the
object, where `set_timeout` from either side sets it; a barrier through torch's PrefixStore consists of add and wait, as
on torch's own stores; and torch refuses queues and list_keys through it: apply the prefix underneath instead,
`TorchStore(rallypoint.PrefixStore("p", store))`.

Errors are both ours and torch's: a timeout is a `rallypoint.StoreTimeout`, a `TimeoutError` and a
`torch.distributed.DistStoreError`. They pickle as ours, so a process without torch can read them. Rejected: torch's
error with ours as its cause; it would lose the fields, and repeat everything in a traceback.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rallypoint.deadline import Timeout, seconds
from rallypoint.errors import NetworkError, QueueEmpty, RallypointError
from rallypoint.store.base import Store

__all__ = ["TorchStore"]

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _distributed() -> Any:
    try:
        module = importlib.import_module("torch.distributed")
    except ImportError as error:
        raise ImportError(
            f"rallypoint.torch needs PyTorch, which cannot be imported: pip install torch ({error})"
        ) from error
    if not module.is_available():
        raise ImportError("rallypoint.torch needs a PyTorch that was built with torch.distributed; this one was not")
    return module


_dist = _distributed()

if TYPE_CHECKING:  # so that the type check is the same with and without torch

    class _TorchBase:
        timeout: timedelta

        def set_timeout(self, timeout: timedelta) -> None: ...
else:
    _TorchBase = _dist.Store


@functools.cache
def _both(ours: type[RallypointError]) -> type[RallypointError]:
    """Return the error class that is both `ours` and torch's equivalent."""
    theirs = _dist.DistNetworkError if issubclass(ours, NetworkError) else _dist.DistStoreError
    if issubclass(ours, QueueEmpty):
        theirs = _dist.QueueEmptyError

    def __reduce__(self: RallypointError) -> tuple[Any, ...]:
        revive, (_, *facts) = ours.__reduce__(self)
        return revive, (ours, *facts)

    body = {"__doc__": ours.__doc__, "__module__": ours.__module__, "__reduce__": __reduce__}
    return type(ours.__name__, (ours, theirs), body)


def _for_torch(method: _Method) -> _Method:
    """Make a method raise errors that torch's code can catch."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except RallypointError as error:
            revive, (ours, *facts) = error.__reduce__()
            raise revive(_both(ours), *facts).with_traceback(error.__traceback__) from error.__cause__

    return cast(_Method, call)


_kept: set[TorchStore] = set()


class TorchStore(_TorchBase):
    """A rallypoint store as a `torch.distributed.Store`, for Python and for torch's C++; thread-safe.

    It starts with the store's timeout and then keeps its own. Keep it open while torch uses it: a process group keeps
    its store. It stays in memory until `close`, because torch's C++ would lose the Python half of an object that only
    C++ still references.
    """

    def __init__(self, store: Store) -> None:
        if not isinstance(store, Store):
            raise TypeError(f"TorchStore needs a rallypoint store, not {type(store).__name__}")
        super().__init__()
        self.underlying_store = store
        self.set_timeout(store.timeout)
        _kept.add(self)

    @_for_torch
    def set(self, key: str, value: str | bytes) -> None:
        """Write a value; all clients can read it when this returns."""
        self.underlying_store.set(key, value)

    @_for_torch
    def get(self, key: str) -> bytes:
        """Return a value, waiting until the key exists."""
        return self.underlying_store.get(key, self.timeout)

    @_for_torch
    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""
        return self.underlying_store.add(key, amount)

    @_for_torch
    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Write if the value equals the expected one; return the value after the call."""
        return self.underlying_store.compare_set(key, expected_value, desired_value)

    @_for_torch
    def append(self, key: str, value: str | bytes) -> None:
        """Append bytes to a value."""
        self.underlying_store.append(key, value)

    @_for_torch
    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of the keys exist now."""
        return self.underlying_store.check(keys)

    @_for_torch
    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Return when all of the keys exist at the same time."""
        self.underlying_store.wait(keys, self._within(timeout))

    @_for_torch
    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of all the keys, waiting until all exist."""
        return self.underlying_store.multi_get(keys, self.timeout)

    @_for_torch
    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Write all the pairs atomically."""
        self.underlying_store.multi_set(keys, values)

    @_for_torch
    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it existed."""
        return self.underlying_store.delete_key(key)

    @_for_torch
    def num_keys(self) -> int:
        """Return the number of keys."""
        return self.underlying_store.num_keys()

    deleteKey = delete_key  # the names that torch's C++ calls
    getNumKeys = num_keys

    @_for_torch
    def list_keys(self) -> list[str]:
        """List the keys."""
        return self.underlying_store.list_keys()

    @_for_torch
    def queue_push(self, key: str, value: str | bytes) -> None:
        """Append an item to a queue."""
        self.underlying_store.queue_push(key, value)

    @_for_torch
    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Pop the first item of a queue, waiting in FIFO order; without `block`, raise if there is none."""
        return self.underlying_store.queue_pop(key, block, self.timeout)

    @_for_torch
    def queue_len(self, key: str) -> int:
        """Return the number of items in a queue."""
        return self.underlying_store.queue_len(key)

    @_for_torch
    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        """Return when `world_size` callers have arrived at this key."""
        self.underlying_store.barrier(key, world_size, self._within(timeout))

    @_for_torch
    def clone(self) -> TorchStore:
        """Return an independent handle on the same store, with this one's timeout."""
        copy = TorchStore(self.underlying_store.clone())
        copy.set_timeout(self.timeout)
        return copy

    def has_extended_api(self) -> bool:
        """Return True: append, multi_get and multi_set are available."""
        return True

    def close(self) -> None:
        """Close the underlying store, and release this object; torch must no longer use it."""
        self.underlying_store.close()
        _kept.discard(self)

    def __repr__(self) -> str:
        return f"<TorchStore of {self.underlying_store!r}>"

    def _within(self, timeout: Timeout | None) -> float:
        return seconds(self.timeout if timeout is None else timeout)
