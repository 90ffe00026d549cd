"""The store interface: a view (a key prefix, a default timeout) of a backend that holds the bytes.

`Store` has the public operations, with PyTorch's names, argument order and semantics. It checks arguments, encodes
keys, computes the deadline, and turns outcomes into errors that name the caller's keys. All of that is written once,
here. Stores differ only in their `Backend`: it executes the operations of `core/ops.py`, whose expected outcomes are
return values (`TimedOut`, None). `PrefixStore` is therefore only another view of the same backend.

Rejected: a `PrefixStore` that forwards every method; each of them would check its arguments twice.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TypeVar

from rallypoint.core import ops
from rallypoint.core.records import Event, Swap, TimedOut
from rallypoint.deadline import Deadline, Timeout, seconds
from rallypoint.errors import NotAnInteger, QueueEmpty, RallypointError, Unsupported
from rallypoint.store.pipeline import Pipeline
from rallypoint.store.view import DEFAULT_TIMEOUT_S, StoreView, whole_amount

__all__ = ["Backend", "Change", "Feed", "StoreDependent", "Lease", "Store", "Watch", "checked"]

_Self = TypeVar("_Self", bound="Store")


class Change(NamedTuple):
    """One change of a watched key: its new value, or None if it was deleted."""

    key: str
    value: bytes | None
    revision: int


class Feed(abc.ABC):
    """A backend's stream of events for one watch."""

    @abc.abstractmethod
    def next(self, deadline: Deadline) -> Event | TimedOut:
        """Return the next event, waiting for it until the deadline; raise StoreClosed once closed."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop the stream and wake the threads that wait on it."""


class Backend(abc.ABC):
    """Holds the data of a store. Keys arrive checked and with their full prefix; any thread may call."""

    name: str
    """The name of this store in errors: a URL or similar."""

    hosts_objects: bool = False
    """Whether it executes `Act`, that is, hosts barriers, locks and other shared objects itself."""

    root: bytes = b""
    """Prefix of every key on this backend; users never see it."""

    @abc.abstractmethod
    def execute(self, op: ops.Op) -> Any:
        """Execute an operation and return the engine's result; `TimedOut` for a wait that exceeds its `timeout_s`.

        Raises Unsupported for an operation of `Store` that this backend does not have.
        """

    @abc.abstractmethod
    def clone(self) -> Backend:
        """Return a backend on the same data with its own session."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release leases and watches, end waiting calls with StoreClosed, and close files and connections."""

    def watch(self, prefix: bytes) -> Feed:
        """Stream the changes of keys that start with a prefix, from now on."""
        raise self.unsupported("watch")

    def begin(self, batch: Sequence[ops.Op]) -> Callable[[], list[Any]]:
        """Begin operations that do not wait, in order; return a function that waits for their results.

        The result of an operation that failed is its error, and that of `WatchPrefix` is a feed. They take effect in
        order, and before any later operation. A backend without pipelining executes them at once.
        """
        results = [self._result(op) for op in batch]
        return lambda: results

    def _result(self, op: ops.Op) -> Any:
        try:
            return self.watch(op.prefix) if isinstance(op, ops.WatchPrefix) else self.execute(op)
        except RallypointError as error:
            return error

    def pipeline(self, batch: Sequence[ops.Op]) -> list[Any]:
        """Execute operations that do not wait, in order; return their results, or raise the first error."""
        return checked(self.begin(batch)())

    def unsupported(self, operation: str) -> Unsupported:
        """Build the error for an operation that this backend does not have."""
        return Unsupported(operation=operation, store=self.name, why="this kind of store cannot do it")


def checked(results: list[Any]) -> list[Any]:
    """Return the results of a batch; raise the first error among them."""
    for result in results:
        if isinstance(result, RallypointError):
            raise result
    return results


class StoreDependent(Protocol):
    """An object that uses a store in the background."""

    def end(self) -> None:
        """Stop: the store is about to be closed."""


_dependents: weakref.WeakKeyDictionary[Backend, weakref.WeakSet[StoreDependent]] = weakref.WeakKeyDictionary()


class Lease:
    """A key that exists while its owner lives; release it, or leave the `with` block, to delete it."""

    def __init__(self, store: Store, key: str) -> None:
        self.key = key
        self._store = store

    def release(self) -> bool:
        """Delete the key; return whether it was still ours (another writer may have overwritten it)."""
        return bool(self._store._backend.execute(ops.ReleaseLease(0, self._store._name(self.key))))

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Lease of {self.key!r} in {self._store!r}>"


class Watch:
    """The changes of keys under a prefix, in order, since its creation; an iterator and a context manager."""

    def __init__(self, store: Store, prefix: str, timeout: Timeout | None, feed: Feed | None = None) -> None:
        self.prefix = prefix
        self._store = store
        self._timeout_s = None if timeout is None else seconds(timeout)
        self._feed = store._backend.watch(store._name(prefix)) if feed is None else feed

    def next(self, timeout: Timeout | None = None) -> Change:
        """Return the next change, waiting at most `timeout` (default: the watch's timeout, else the store's).

        Raises StoreTimeout if nothing changes in that time, StoreClosed once the watch or its store is closed.
        """
        deadline = Deadline(self._store._wait_s(self._timeout_s if timeout is None else timeout))
        event = self._feed.next(deadline)
        if isinstance(event, TimedOut):
            what = f"no key that starts with {self.prefix!r} changed"
            raise self._store._timed_out("watch", [self.prefix], [self.prefix], deadline.timeout_s, what, event.down)
        return Change(self._store._unname(event.key), event.value, event.revision)

    def close(self) -> None:
        """Stop watching and wake the threads that wait in `next`."""
        self._feed.close()

    def __iter__(self) -> Iterator[Change]:
        while True:
            yield self.next()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Store(StoreView):
    """A linearizable map from text keys to bytes that the processes of a job share.

    Thread-safe. Blocking calls end by their timeout (`StoreTimeout`), by Ctrl-C, or by `close`.
    """

    def __init__(self, backend: Backend, prefix: bytes, timeout: Timeout = DEFAULT_TIMEOUT_S) -> None:
        super().__init__(backend.name, backend.root, prefix, timeout)
        self._backend = backend

    # PyTorch's operations

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value; all clients can read it when this returns."""
        self._backend.execute(ops.Set(0, self._name(key), self._value(key, value)))

    def get(self, key: str, timeout: Timeout | None = None) -> bytes:
        """Return a value, waiting until the key exists."""
        name, wait_s = self._name(key), self._wait_s(timeout)
        outcome = self._backend.execute(ops.Get(0, name, wait_s))
        if isinstance(outcome, TimedOut):
            raise self._timed_out("get", [key], [key], wait_s, down=outcome.down)
        value: bytes = outcome[0]
        return value

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, stored as decimal text (a missing key is 0), and return its new value."""
        try:
            return int(self._backend.execute(ops.Add(0, self._name(key), whole_amount(key, amount))))
        except NotAnInteger as error:
            raise NotAnInteger(key=key, value=error.value) from None

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Write if the value equals the expected one; return the value after the call, as PyTorch does.

        On a missing key it writes only if `expected_value` is empty; otherwise it returns `expected_value`, which looks
        like an existing value. `swap` distinguishes the two.
        """
        expected, desired = self._value(key, expected_value), self._value(key, desired_value)
        return bytes(self._backend.execute(ops.CompareSet(0, self._name(key), expected, desired)))

    def append(self, key: str, value: str | bytes) -> None:
        """Append bytes to a value; a missing key counts as empty."""
        self._backend.execute(ops.Append(0, self._name(key), self._value(key, value)))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of the keys exist now. A queue that holds an item counts."""
        return bool(self._backend.execute(ops.Check(0, self._names(keys))))

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Return when all of the keys exist at the same time. A queue that holds an item counts."""
        names, wait_s = self._names(keys), self._wait_s(timeout)
        outcome = self._backend.execute(ops.Wait(0, names, wait_s))
        if outcome is not None:
            raise self._timed_out("wait", keys, self._unnamed(outcome.missing), wait_s, down=outcome.down)

    def multi_get(self, keys: Sequence[str], timeout: Timeout | None = None) -> list[bytes]:
        """Return the values of all the keys at one revision, waiting until all exist."""
        names, wait_s = self._names(keys), self._wait_s(timeout)
        outcome = self._backend.execute(ops.MultiGet(0, names, wait_s))
        if isinstance(outcome, TimedOut):
            raise self._timed_out("multi_get", keys, self._unnamed(outcome.missing), wait_s, down=outcome.down)
        return list(outcome)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Write all the pairs atomically."""
        self._backend.execute(ops.MultiSet(0, self._pairs(keys, values)))

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it existed. A queue of that name is not affected."""
        return bool(self._backend.execute(ops.Delete(0, self._name(key))))

    def num_keys(self) -> int:
        """Return the number of keys; in a prefixed view, of those under the prefix."""
        prefix = self._prefix if self._prefix != self._backend.root else b""
        return int(self._backend.execute(ops.Count(0, prefix)))

    def list_keys(self) -> list[str]:
        """List the keys in byte order; in a prefixed view, those under the prefix, which is removed.

        Raises UnicodeDecodeError for a key that is not UTF-8.
        """
        names = self._backend.execute(ops.List(0, self._prefix))
        return [name[len(self._prefix) :].decode() for name in names]

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Append an item to a queue. A queue and a key of the same name are independent."""
        self._backend.execute(ops.Push(0, self._name(key), self._value(key, value)))

    def queue_pop(self, key: str, block: bool = True, timeout: Timeout | None = None) -> bytes:
        """Pop the first item of a queue; every item goes to exactly one caller.

        With `block`, waits for an item in FIFO order (StoreTimeout). Without, raises QueueEmpty if there is none.
        """
        name = self._name(key)
        if not block:
            item = self._backend.execute(ops.Pop(0, name))
            if item is None:
                raise QueueEmpty(key=key, store=self._backend.name)
            return bytes(item)
        wait_s = self._wait_s(timeout)
        outcome = self._backend.execute(ops.BlockingPop(0, name, wait_s))
        if isinstance(outcome, TimedOut):
            raise self._timed_out("queue_pop", [key], [key], wait_s, down=outcome.down)
        return bytes(outcome)

    def queue_len(self, key: str) -> int:
        """Return the number of items in a queue."""
        return int(self._backend.execute(ops.QueueLen(0, self._name(key))))

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        """Return when `world_size` callers have arrived at this key.

        Like PyTorch's, it counts in the key itself and works once per key; a caller that times out is not counted.
        """
        if isinstance(world_size, bool) or not isinstance(world_size, int):
            raise TypeError(f"the world size of barrier {key!r} must be an int, not {world_size!r}")
        name, wait_s = self._name(key), self._wait_s(timeout)
        size = max(-(2**63), min(world_size, 2**63 - 1))
        try:
            outcome = self._backend.execute(ops.Arrive(0, name, size, wait_s))
        except NotAnInteger as error:
            raise NotAnInteger(key=key, value=error.value) from None
        if outcome is not None:
            what = f"fewer than {world_size} callers arrived at {key!r}"
            raise self._timed_out("barrier", [key], [key], wait_s, what, outcome.down)

    def clone(self: _Self) -> _Self:
        """Return an independent handle on the same store, with its own timeout, leases and connection."""
        copy = self.__class__.__new__(self.__class__)
        copy.__dict__.update(self.__dict__, _backend=self._backend.clone())
        return copy

    def has_extended_api(self) -> bool:
        """Return True: append, multi_get, multi_set and the queues are always available."""
        return True

    # Extensions

    def swap(self, key: str, expected: str | bytes | None, desired: str | bytes) -> Swap:
        """Write if the value equals the expected one (None: the key is missing); return (won, current value)."""
        wanted = None if expected is None else self._value(key, expected)
        outcome: Swap = self._backend.execute(ops.CompareSwap(0, self._name(key), wanted, self._value(key, desired)))
        return outcome

    def delete_prefix(self, prefix: str) -> int:
        """Delete every key and queue whose name starts with `prefix`; return their number."""
        return int(self._backend.execute(ops.DeletePrefix(0, self._name(prefix))))

    def lease(self, key: str, value: str | bytes, heartbeat: Timeout | None = None) -> Lease:
        """Write a key that is deleted when the lease is released, this handle is closed, or the process dies.

        With a `heartbeat`, also after this process has not run for that long (stopped, or swapped out) while its host
        is still up. A later write by any client overwrites the key and ends the lease.
        """
        ttl_s = 0.0 if heartbeat is None else seconds(heartbeat, "heartbeat")
        self._backend.execute(ops.SetLease(0, self._name(key), self._value(key, value), ttl_s))
        return Lease(self, key)

    def pipeline(self) -> Pipeline:
        """Collect writes in a `with` block; they are sent together and acknowledged when the block ends."""
        return Pipeline(self)

    def watch(self, prefix: str = "", timeout: Timeout | None = None) -> Watch:
        """Watch the changes of all keys that start with `prefix`, from now on."""
        return Watch(self, prefix, timeout)

    def close(self) -> None:
        """Close this handle and every view of it: leases are released, waiting calls raise StoreClosed."""
        for dependent in list(_dependents.pop(self._backend, ())):
            dependent.end()
        self._backend.close()

    def _add_dependent(self, dependent: StoreDependent) -> None:
        """End `dependent` before this handle, or a view of it, is closed; only a weak reference is kept."""
        _dependents.setdefault(self._backend, weakref.WeakSet()).add(dependent)

    def _same_session_view(self: _Self) -> _Self:
        """Return another view of the same handle."""
        view = self.__class__.__new__(self.__class__)
        view.__dict__.update(self.__dict__)
        return view

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
