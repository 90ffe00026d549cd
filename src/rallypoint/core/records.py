"""What goes into the engine and comes out of it: plain records, compared by value where they are answers.

`Waiter`, `Watch` and `Turn` are what an owner can hold. They are compared by identity; their `tag` is the host's own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

from rallypoint.core.machine import Done, Refused, Waiting

__all__ = ["Answer", "Event", "Shared", "Statistics", "Swap", "TimedOut", "Turn", "Want", "Waiter", "Watch", "show"]


def show(key: bytes) -> str:
    """Return a key as text for people."""
    return key.decode("utf-8", "backslashreplace")


class Swap(NamedTuple):
    """What `swap` did: whether it won, and the value that is there now (None: no such key)."""

    won: bool
    value: bytes | None


class TimedOut(NamedTuple):
    """The answer of a wait that ended by its deadline: what was still missing."""

    missing: tuple[bytes, ...]


class Event(NamedTuple):
    """One change of one key: its new value, or None when it was deleted."""

    revision: int
    key: bytes
    value: bytes | None


class Want(Enum):
    """What a waiter waits for."""

    KEYS = auto()
    VALUES = auto()
    ITEM = auto()
    COUNT = auto()
    CALL = auto()
    TURN = auto()


class Waiter:
    """One request that waits; compared by identity. `tag` is the host's own. `arrived`: a barrier has counted it."""

    __slots__ = ("arrived", "call", "deadline", "keys", "missing", "need", "owner", "tag", "want")

    def __init__(
        self,
        want: Want,
        keys: Sequence[bytes],
        missing: Iterable[bytes],
        owner: Hashable,
        deadline: float | None,
        tag: object,
        need: int = 0,
    ) -> None:
        self.want = want
        self.keys = keys
        self.missing = dict.fromkeys(missing)
        self.owner = owner
        self.deadline = deadline
        self.tag = tag
        self.need = need
        self.arrived = want is Want.COUNT
        self.call: Any = None
        """Of a call on a shared object: what `core/objects.py` knows of it."""


class Watch:
    """One interest in the changes of keys that start with a prefix; compared by identity."""

    __slots__ = ("owner", "prefix", "tag")

    def __init__(self, prefix: bytes, owner: Hashable, tag: object) -> None:
        self.prefix = prefix
        self.owner = owner
        self.tag = tag


class Turn:
    """The right to pop the next item of a queue, given to one that waited in line for it."""

    __slots__ = ("aged", "key", "owner")

    def __init__(self, key: bytes, owner: Hashable) -> None:
        self.key = key
        self.owner = owner
        self.aged = False


class Shared:
    """An answer to many, encoded, of which there is to be one copy; and how many of them have it kept."""

    __slots__ = ("data", "holders")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.holders = 0


Answer = None | bytes | list[bytes] | Turn | TimedOut | Event | Done | Refused | Waiting
"""What a wait ends with, or what a watch delivers."""


class Statistics(NamedTuple):
    """What an engine holds at one moment."""

    keys: int
    queues: int
    waiters: int
    watches: int
    leased_keys: int
    size: int
    revision: int
