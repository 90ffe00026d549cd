"""An engine whose operations are methods, as those of a store in etcd are: a model of one."""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.core import ops
from rallypoint.core.engine import Engine
from rallypoint.core.records import Swap

__all__ = ["NamedEngine"]


class NamedEngine(Engine):
    """One store."""

    def set(self, key: bytes, value: bytes, owner: bytes | None = None) -> None:
        self.put(key, value, owner)

    def multi_set(self, pairs: Sequence[tuple[bytes, bytes]]) -> None:
        self.put_all(pairs)

    def get(self, key: bytes) -> bytes | None:
        value: bytes | None = self.execute(ops.Peek(0, key))
        return value

    def multi_get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return list(self.execute(ops.MultiPeek(0, list(keys))))

    def add(self, key: bytes, amount: int) -> int:
        return int(self.execute(ops.Add(0, key, amount)))

    def append(self, key: bytes, value: bytes) -> None:
        self.execute(ops.Append(0, key, value))

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        return bytes(self.execute(ops.CompareSet(0, key, expected, desired)))

    def swap(self, key: bytes, expected: bytes | None, desired: bytes) -> Swap:
        return Swap(*self.execute(ops.Swap(0, key, expected, desired)))

    def delete(self, key: bytes) -> bool:
        return self.remove(key)

    def delete_prefix(self, prefix: bytes) -> int:
        return int(self.execute(ops.DeletePrefix(0, prefix)))

    def check(self, keys: Sequence[bytes]) -> bool:
        return all(map(self.exists, keys))

    def num_keys(self, prefix: bytes = b"") -> int:
        return int(self.execute(ops.Count(0, prefix)))

    def list_keys(self, prefix: bytes = b"") -> list[bytes]:
        return list(self.execute(ops.List(0, prefix)))

    def queue_push(self, key: bytes, value: bytes, front: bool = False) -> None:
        self.push(key, value, front)

    def queue_pop(self, key: bytes) -> bytes | None:
        return self.pop(key)

    def queue_len(self, key: bytes) -> int:
        return int(self.execute(ops.QueueLen(0, key)))
