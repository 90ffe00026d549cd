"""A view of a store: converts the user's keys, values and timeouts for a backend, and builds errors in user terms.

It is the part that `Store` and the asyncio store have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from rallypoint.core.limits import MAX_KEY_BYTES, MAX_KEYS, MAX_VALUE_BYTES
from rallypoint.core.ops import MAX_WAIT_S
from rallypoint.deadline import Timeout, seconds
from rallypoint.errors import LimitExceeded, StoreTimeout

__all__ = ["DEFAULT_TIMEOUT_S", "StoreView", "whole_amount"]

DEFAULT_TIMEOUT_S = 300.0
"""The default timeout of blocking calls."""


def whole_amount(key: str, amount: int) -> int:
    """Return the amount to add to a counter; raise TypeError or ValueError if it is not a 64-bit int."""
    if isinstance(amount, bool) or not isinstance(amount, int):
        raise TypeError(f"the amount to add to {key!r} must be an int, not {amount!r}")
    if not -(2**63) <= amount < 2**63:
        raise ValueError(f"the amount to add to {key!r} must fit in 64 bits, got {amount}")
    return amount


class StoreView:
    """A key prefix and a default timeout on a store; `label` is its name in errors, `root` a hidden key prefix."""

    def __init__(self, label: str, root: bytes, prefix: bytes, timeout: Timeout) -> None:
        self._label = label
        self._root = root
        self._prefix = prefix
        self._timeout_s = seconds(timeout)

    @property
    def timeout(self) -> timedelta:
        """The default timeout of blocking calls."""
        try:
            return timedelta(seconds=self._timeout_s)
        except OverflowError:
            return timedelta.max

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the default timeout of this handle's blocking calls."""
        self._timeout_s = seconds(timeout)

    def __repr__(self) -> str:
        prefix = self._unname(self._prefix, of=self._root)
        return f"<{type(self).__name__} {self._label}{' prefix ' + repr(prefix) if prefix else ''}>"

    def _name(self, key: str) -> bytes:
        if not isinstance(key, str):
            raise TypeError(f"a key must be a str, not {type(key).__name__}: {key!r}")
        try:
            name = self._prefix + key.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"key {key!r} is not valid Unicode: {error.reason}") from None
        size = len(name) - len(self._root)
        if size > MAX_KEY_BYTES:
            raise LimitExceeded(what="key", key=key, size=size, limit=MAX_KEY_BYTES)
        return name

    def _names(self, keys: Sequence[str]) -> list[bytes]:
        if isinstance(keys, (str, bytes)):
            raise TypeError(f"keys must be a list of str, not {keys!r}")
        if len(keys) > MAX_KEYS:
            raise LimitExceeded(what="keys", key=keys[0], size=len(keys), limit=MAX_KEYS)
        return [self._name(key) for key in keys]

    def _unname(self, name: bytes, of: bytes | None = None) -> str:
        return name[len(self._prefix if of is None else of) :].decode("utf-8", "backslashreplace")

    def _unnamed(self, names: Sequence[bytes]) -> list[str]:
        return [self._unname(name) for name in names]

    def _value(self, key: str, value: str | bytes) -> bytes:
        if isinstance(value, str):
            try:
                value = value.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"the value for {key!r} is not valid Unicode: {error.reason}") from None
        elif isinstance(value, (bytearray, memoryview)):
            value = bytes(value)
        elif not isinstance(value, bytes):
            raise TypeError(f"the value for {key!r} must be str or bytes, not {type(value).__name__}")
        if len(value) > MAX_VALUE_BYTES:
            raise LimitExceeded(what="value of", key=key, size=len(value), limit=MAX_VALUE_BYTES)
        return value

    def _pairs(self, keys: Sequence[str], values: Sequence[str | bytes]) -> list[tuple[bytes, bytes]]:
        names = self._names(keys)
        if len(names) != len(values):
            raise ValueError(f"multi_set got {len(names)} keys and {len(values)} values")
        return [(name, self._value(key, value)) for name, key, value in zip(names, keys, values, strict=True)]

    def _wait_s(self, timeout: Timeout | None) -> float:
        return min(self._timeout_s if timeout is None else seconds(timeout), MAX_WAIT_S)

    def _timed_out(
        self,
        operation: str,
        keys: Sequence[str],
        missing: Sequence[str],
        timeout_s: float,
        what: str | None = None,
        down: str = "",
    ) -> StoreTimeout:
        return StoreTimeout(
            operation=operation,
            keys=keys,
            missing=missing,
            timeout_s=timeout_s,
            store=repr(self),
            what=what,
            down=down,
        )
