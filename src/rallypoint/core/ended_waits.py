"""Waits that one change ended and that are answered in slices, and the values that answers contain.

A change ends all waits for its key; answering 300,000 of them takes seconds. So their queue moves here as a whole,
which costs nothing, and is consumed from its end, which frees each wait as it is answered. `Released` waits are part of
the state: log entries answer them. `WokenReads` are not: the host answers them.

Rejected: leaving the waits in their queue, and checking the key again for each slice. One of the first clients to wake
may delete the key, and the others would wait for ever.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from rallypoint.core.long_value import LongValue
from rallypoint.core.records import Waiter

__all__ = ["Released", "WokenReads", "fixed_value", "short_value"]


class Released:
    """Waits that one change ended; answered in slices, the last first, and compared by identity."""

    __slots__ = ("value", "waiters")

    def __init__(self, waiters: dict[Waiter, None], value: bytes | None = None) -> None:
        self.waiters = waiters
        self.value = value
        """The value of the key that they waited for."""


class WokenReads(NamedTuple):
    """Reads that waited for a key or queue when it was created, and the key's value, None for a queue."""

    key: bytes
    value: bytes | None
    waiters: dict[Waiter, None]


def short_value(value: bytes | LongValue | None, limit: int) -> bytes | None:
    """Return a value if it was requested and is at most `limit` bytes long."""
    return bytes(value) if limit and value is not None and len(value) <= limit else None


def fixed_value(value: Any) -> Any:
    """Return a value that later appends do not change."""
    return value.copy() if value.__class__ is LongValue else value
