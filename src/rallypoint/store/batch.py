"""A batch: requests of one handle that are sent together, and collected later; for callers far from their server.

    with Batch(store) as batch:
        batch.set(store, "done", "")
        keys = batch.list_keys(store)
    print(keys.value)

The requests take effect in order, and before any request made after they were sent. So `send` without `wait` lets the
caller go on with a request of its own, which the server handles after them, and pay for one round trip.

Rejected: one thread for each request. Their order would be unknown, and a signal would interrupt only one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from rallypoint.core import ops
from rallypoint.core.records import TimedOut
from rallypoint.deadline import Timeout, seconds
from rallypoint.errors import RallypointError
from rallypoint.store.base import Lease, Store, Watch
from rallypoint.store.view import whole_amount

__all__ = ["Answer", "Batch"]

T = TypeVar("T")


class Answer(Generic[T]):
    """What a request of a batch returns, once the batch has been collected."""

    def __init__(self, read: Callable[[Any], T], optional: bool = False) -> None:
        self._read = read
        self._values: list[T] = []
        self._use: Callable[[T], object] | None = None
        self.optional = optional
        """Whether the batch succeeds without it: its error is dropped."""

    @property
    def value(self) -> T:
        """What the request returned."""
        return self._values[0]

    def then(self, use: Callable[[T], object]) -> None:
        """Call `use` with what the request returned, as soon as that is known."""
        self._use = use

    def settle(self, result: Any) -> RallypointError | None:
        """Take the result; return the error if it is one."""
        if isinstance(result, RallypointError):
            return result
        try:
            value = self._read(result)
        except RallypointError as error:
            return error
        self._values.append(value)
        if self._use is not None:
            self._use(value)
        return None


class Batch:
    """Requests of one handle, and its views, that do not wait for anything but their replies.

    At the end of a `with` block they are sent and collected; after an exception in the block, nothing is sent.
    """

    def __init__(self, store: Store) -> None:
        self._backend = store._backend
        self._requests: list[tuple[ops.Op, Answer[Any]]] = []
        self._collect: Callable[[], list[Any]] | None = None

    def send(self) -> None:
        """Send the requests, and return at once; then call `wait`."""
        assert self._collect is None
        self._collect = self._backend.begin([op for op, _ in self._requests]) if self._requests else list

    def wait(self) -> None:
        """Wait for the answers; raise the first error among them. What was collected before is not waited for again."""
        if self._collect is None:
            self.send()
        collect, self._collect = self._collect, list
        requests, self._requests = self._requests, []
        assert collect is not None
        errors = [
            error
            for (_, answer), result in zip(requests, collect(), strict=True)
            if (error := answer.settle(result)) is not None and not answer.optional
        ]
        if errors:
            raise errors[0]

    def request(self, op: ops.Op, read: Callable[[Any], T], optional: bool = False) -> Answer[T]:
        """Add an operation; `read` converts its result, or raises its error."""
        answer = Answer(read, optional)
        self._requests.append((op, answer))
        return answer

    def set(self, store: Store, key: str, value: str | bytes) -> Answer[None]:
        """Write a value."""
        return self.request(ops.Set(0, store._name(key), store._value(key, value)), _nothing)

    def add(self, store: Store, key: str, amount: int) -> Answer[int]:
        """Add to a counter."""
        return self.request(ops.Add(0, store._name(key), whole_amount(key, amount)), int)

    def get(self, store: Store, key: str) -> Answer[bytes | None]:
        """Read a value as it is now; None if there is no such key."""
        op = ops.Get(0, store._name(key), 0.0)
        return self.request(op, lambda found: None if isinstance(found, TimedOut) else bytes(found[0]))

    def compare_set(self, store: Store, key: str, expected: str | bytes, desired: str | bytes) -> Answer[bytes]:
        """Write if the value equals the expected one."""
        values = store._value(key, expected), store._value(key, desired)
        return self.request(ops.CompareSet(0, store._name(key), *values), bytes)

    def check(self, store: Store, keys: Sequence[str]) -> Answer[bool]:
        """Ask whether all of the keys exist."""
        return self.request(ops.Check(0, store._names(keys)), bool)

    def list_keys(self, store: Store, start: str = "") -> Answer[list[str]]:
        """List the keys of a view that begin with `start`, without it."""
        prefix = store._name(start)
        return self.request(ops.List(0, prefix), lambda names: [name[len(prefix) :].decode() for name in names])

    def delete_prefix(self, store: Store, prefix: str) -> Answer[int]:
        """Delete every key and queue whose name starts with `prefix`."""
        return self.request(ops.DeletePrefix(0, store._name(prefix)), int)

    def lease(self, store: Store, key: str, value: str | bytes, heartbeat: Timeout | None = None) -> Answer[Lease]:
        """Write a key that is deleted when the lease is released, or its owner dies."""
        ttl_s = 0.0 if heartbeat is None else seconds(heartbeat, "heartbeat")
        op = ops.SetLease(0, store._name(key), store._value(key, value), ttl_s)
        return self.request(op, lambda _: Lease(store, key))

    def release(self, lease: Lease) -> Answer[bool]:
        """Release a lease."""
        return self.request(ops.ReleaseLease(0, lease._store._name(lease.key)), bool)

    def watch(self, store: Store, prefix: str, optional: bool = False) -> Answer[Watch]:
        """Watch the changes of all keys that start with `prefix`, from this request on."""
        op = ops.WatchPrefix(0, store._name(prefix))
        return self.request(op, lambda feed: Watch(store, prefix, None, feed), optional)

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.wait()


def _nothing(_: Any) -> None:
    pass
