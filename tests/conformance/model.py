"""A store as plain dicts: the reference for every kind of store, written so that it is obviously right.

A `View` has the operations of a store, at one prefix and in one session. Where a store raises, it raises `Refused` with
the class of the error and the fields that the error must have. It never waits: a call that would block times out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rallypoint import NotAnInteger, QueueEmpty, StoreTimeout

BLANKS = b" \t\n\v\f\r"
SMALLEST, LARGEST = -(2**63), 2**63 - 1


class Refused(Exception):
    """The error that a store must raise here."""

    def __init__(self, kind: type[Exception], **fields: Any) -> None:
        super().__init__(kind, fields)
        self.kind = kind
        self.fields = fields


def number(value: bytes) -> int | None:
    """Read a number as C's strtoll does, byte by byte; None if there is no number or it exceeds 64 bits."""
    text = value.lstrip(BLANKS)
    sign = -1 if text[:1] == b"-" else 1
    digits = text[1:] if text[:1] in (b"+", b"-") else text
    total, seen = 0, False
    for byte in digits:
        if not ord("0") <= byte <= ord("9"):
            break
        total, seen = total * 10 + byte - ord("0"), True
    return sign * total if seen and SMALLEST <= sign * total <= LARGEST else None


def wrapped(total: int) -> int:
    """Wrap a sum around to 64 bits, as C does."""
    while total > LARGEST:
        total -= 2**64
    while total < SMALLEST:
        total += 2**64
    return total


class Model:
    """The content of one store, and the changes since they were last taken."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.queues: dict[str, list[bytes]] = {}
        self.lessees: dict[str, str] = {}
        self.changes: list[tuple[str, bytes | None]] = []

    def put(self, name: str, value: bytes, lessee: str | None = None) -> None:
        self.values[name] = value
        self.lessees.pop(name, None)
        if lessee is not None:
            self.lessees[name] = lessee
        self.changes.append((name, value))

    def remove(self, name: str) -> bool:
        if name not in self.values:
            return False
        del self.values[name]
        self.lessees.pop(name, None)
        self.changes.append((name, None))
        return True

    def end(self, session: str) -> None:
        """Close a session: remove the keys that it leases."""
        for name in [name for name, lessee in self.lessees.items() if lessee == session]:
            self.remove(name)


class View:
    """A handle on a model: the operations of a store."""

    def __init__(self, model: Model, prefix: str, session: str) -> None:
        self.model, self.prefix, self.session = model, prefix, session

    def set(self, key: str, value: bytes) -> None:
        self.model.put(self.prefix + key, value)

    def get(self, key: str, timeout: float = 0) -> bytes:
        return self._values("get", [key], timeout)[0]

    def multi_get(self, keys: Sequence[str], timeout: float = 0) -> list[bytes]:
        return self._values("multi_get", keys, timeout)

    def add(self, key: str, amount: int) -> int:
        value = self.model.values.get(self.prefix + key, b"0")
        before = number(value)
        if before is None:
            raise Refused(NotAnInteger, key=key, value=value[:1024])
        total = wrapped(before + amount)
        self.set(key, str(total).encode())
        return total

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        current = self.model.values.get(self.prefix + key)
        if current is None and expected != b"":
            return expected
        if current is not None and current != expected:
            return current
        self.set(key, desired)
        return desired

    def swap(self, key: str, expected: bytes | None, desired: bytes) -> tuple[bool, bytes | None]:
        current = self.model.values.get(self.prefix + key)
        if current != expected:
            return False, current
        self.set(key, desired)
        return True, desired

    def append(self, key: str, value: bytes) -> None:
        self.set(key, self.model.values.get(self.prefix + key, b"") + value)

    def check(self, keys: Sequence[str]) -> bool:
        return self._missing(keys) == []

    def wait(self, keys: Sequence[str], timeout: float = 0) -> None:
        missing = self._missing(keys)
        if missing:
            raise Refused(StoreTimeout, operation="wait", keys=tuple(keys), missing=tuple(missing), timeout_s=timeout)

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        for key, value in dict(zip(keys, values, strict=True)).items():
            self.set(key, value)

    def delete_key(self, key: str) -> bool:
        return self.model.remove(self.prefix + key)

    def delete_prefix(self, prefix: str) -> int:
        names = [name for name in self.model.values if name.startswith(self.prefix + prefix)]
        queues = [name for name in self.model.queues if name.startswith(self.prefix + prefix)]
        for name in names:
            self.model.remove(name)
        for name in queues:
            del self.model.queues[name]
        return len(names) + len(queues)

    def num_keys(self) -> int:
        return len(self.list_keys())

    def list_keys(self) -> list[str]:
        return sorted(name.removeprefix(self.prefix) for name in self.model.values if name.startswith(self.prefix))

    def queue_push(self, key: str, value: bytes) -> None:
        self.model.queues.setdefault(self.prefix + key, []).append(value)

    def queue_pop(self, key: str, block: bool = True, timeout: float = 0) -> bytes:
        queue = self.model.queues.get(self.prefix + key)
        if queue is None and block:
            raise Refused(StoreTimeout, operation="queue_pop", keys=(key,), missing=(key,), timeout_s=timeout)
        if queue is None:
            raise Refused(QueueEmpty, key=key)
        item = queue.pop(0)
        if not queue:
            del self.model.queues[self.prefix + key]
        return item

    def queue_len(self, key: str) -> int:
        return len(self.model.queues.get(self.prefix + key, []))

    def barrier(self, key: str, world_size: int, timeout: float = 0) -> None:
        count = self.add(key, 1)
        if count < world_size:
            if count > 0:
                self.add(key, -1)
            raise Refused(StoreTimeout, operation="barrier", keys=(key,), missing=(key,), timeout_s=timeout)

    def lease(self, key: str, value: bytes) -> None:
        self.model.put(self.prefix + key, value, self.session)

    def release(self, key: str) -> bool:
        mine = self.model.lessees.get(self.prefix + key) == self.session
        return mine and self.model.remove(self.prefix + key)

    def _missing(self, keys: Sequence[str]) -> list[str]:
        names = {*self.model.values, *self.model.queues}
        return [key for key in dict.fromkeys(keys) if self.prefix + key not in names]

    def _values(self, operation: str, keys: Sequence[str], timeout: float) -> list[bytes]:
        values = self.model.values
        missing = tuple(key for key in dict.fromkeys(keys) if self.prefix + key not in values)
        if missing:
            raise Refused(StoreTimeout, operation=operation, keys=tuple(keys), missing=missing, timeout_s=timeout)
        return [values[self.prefix + key] for key in keys]
