"""A pipeline: writes of the caller that are sent together, in one round trip.

Rejected: reads in a pipeline. Their results exist only after the block, in which users would look for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rallypoint.core import ops
from rallypoint.store.view import whole_amount

if TYPE_CHECKING:
    from rallypoint.store.base import Store

__all__ = ["Pipeline"]


class Pipeline:
    """Writes sent together at the end of a `with` block, in order; `results` then has the result of each.

    After an exception in the block, nothing is sent. After an error of the store, the writes before it are applied, and
    later ones may be.
    """

    def __init__(self, store: Store) -> None:
        self.results: list[Any] = []
        self._store = store
        self._batch: list[ops.Op] = []

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._batch.append(ops.Set(0, self._store._name(key), self._store._value(key, value)))

    def append(self, key: str, value: str | bytes) -> None:
        """Append bytes to a value."""
        self._batch.append(ops.Append(0, self._store._name(key), self._store._value(key, value)))

    def add(self, key: str, amount: int) -> None:
        """Add to a counter."""
        self._batch.append(ops.Add(0, self._store._name(key), whole_amount(key, amount)))

    def delete_key(self, key: str) -> None:
        """Delete a key."""
        self._batch.append(ops.Delete(0, self._store._name(key)))

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Append an item to a queue."""
        self._batch.append(ops.Push(0, self._store._name(key), self._store._value(key, value)))

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.results = self._store._backend.pipeline(self._batch)
