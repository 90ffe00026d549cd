"""The engine's output: plain answers, and the handles that owners hold.

An owner holds `Waiter`, `WatchHandle` and `Turn` handles. They are compared by identity; a log or a snapshot names them
by owner and by the number of the operation that created them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

from rallypoint.core.costs import WAIT_BYTES, WAITED_KEY_BYTES
from rallypoint.core.long_value import LongValue
from rallypoint.core.machines.machine import Done, Refused, Waiting
from rallypoint.errors import StoreError, WithFields

__all__ = [
    "LATER",
    "OUTCOMES",
    "Answer",
    "PopResult",
    "Event",
    "InternalError",
    "Packed",
    "PushedEvent",
    "SharedAnswer",
    "Statistics",
    "ReplyStatus",
    "Swap",
    "TimedOut",
    "Turn",
    "WaitKind",
    "Waiter",
    "WatchHandle",
    "internal_error",
    "pack",
    "show",
    "size_of",
]


def show(key: bytes) -> str:
    """Return a key as readable text."""
    return key.decode("utf-8", "backslashreplace")


class InternalError(WithFields, StoreError):
    """A request or a log entry failed because of a bug."""

    why: str

    def _sentence(self) -> str:
        return f"internal server error, please report it: {self.why}"


def internal_error(error: Exception, doing: str) -> InternalError:
    """Return the answer to a request that hit a bug. A replay must reproduce it, so it omits the error's own text."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else f" in {trace.tb_frame.f_code.co_name}"
    return InternalError(why=f"{type(error).__name__}{where}, during {doing}")


class ReplyStatus:
    """How a request ended."""

    OK, TIMED_OUT, ERROR, REFUSED = range(4)


DONE, REFUSED, WAITING = range(3)
"""How a call on a shared object ended: the first element of its packed answer."""

OUTCOMES: dict[int, type[Done] | type[Refused] | type[Waiting]] = {DONE: Done, REFUSED: Refused, WAITING: Waiting}
"""The outcome of a call, by that element; the others are its fields."""


class Swap(NamedTuple):
    """The answer of `swap`: whether it won, and the current value (None: no such key)."""

    won: bool
    value: bytes | None


class TimedOut(NamedTuple):
    """The answer of a wait that timed out: the keys still missing."""

    missing: tuple[bytes, ...]
    down: str = ""
    """The known state of the server, if it was down, so that the missing keys are unknown."""


class PopResult(NamedTuple):
    """The answer of `TurnPop`: the queue's length before the pop, and the item (None: the queue was empty)."""

    length: int
    item: bytes | None


class Event(NamedTuple):
    """One change of one key: its new value, or None when it was deleted."""

    revision: int
    key: bytes
    value: bytes | None


class PushedEvent(NamedTuple):
    """An event for a watch, numbered within its session."""

    push: int
    watch: int
    event: Event


class WaitKind(Enum):
    """What a waiter waits for."""

    KEYS = auto()
    VALUES = auto()
    ITEM = auto()
    COUNT = auto()
    CALL = auto()
    TURN = auto()
    CLEARED = auto()


class Waiter:
    """One waiting request, compared by identity.

    `key` is the missing key that the waiter is registered under; `rest` yields the next candidates, some of which may
    exist by now. `removals` is the engine's removal count when `rest` was built. `arrived`: a barrier has counted this
    waiter.
    """

    __slots__ = ("arrived", "done", "key", "keys", "need", "number", "owner", "removals", "rest", "want")

    def __init__(self, want: WaitKind, keys: Sequence[bytes], owner: Hashable, number: int) -> None:
        self.want = want
        self.keys = keys
        self.owner = owner
        self.number = number
        self.key = keys[0]
        self.rest: Iterator[bytes] = iter(())
        self.removals = 0
        self.need = 0
        self.arrived = False
        self.done = 0
        """For a `DeletePrefix` in progress: how many keys and queues it has deleted."""

    @property
    def reads(self) -> bool:
        """Whether it only reads, and so is not part of the state."""
        return self.want is WaitKind.KEYS or self.want is WaitKind.VALUES

    @property
    def cost(self) -> int:
        """The bytes charged for it."""
        return WAIT_BYTES + WAITED_KEY_BYTES * len(self.keys) + sum(map(len, self.keys))


class WatchHandle:
    """A watch on the keys that start with a prefix; compared by identity."""

    __slots__ = ("number", "owner", "prefix")

    def __init__(self, prefix: bytes, owner: Hashable, number: int) -> None:
        self.prefix = prefix
        self.owner = owner
        self.number = number


class Turn:
    """The right to pop the next item of a queue, granted to a waiter in line."""

    __slots__ = ("aged", "key", "number", "owner")

    def __init__(self, key: bytes, owner: Hashable, number: int) -> None:
        self.key = key
        self.owner = owner
        self.number = number
        self.aged = False
        """Whether the last sweep already saw it; not part of the state."""


class SharedAnswer:
    """An encoded answer to many requests, kept as one copy; `holders` counts the sessions that keep it."""

    __slots__ = ("data", "holders")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.holders = 0


class Packed(NamedTuple):
    """An answer as plain data, restored from a snapshot or from a kept answer."""

    status: int
    result: Any


class _Later:
    """The answer is not available yet."""

    def __repr__(self) -> str:
        return "LATER"


LATER = _Later()
"""Returned for a request whose answer comes later, or never."""

Answer = (
    None | bool | int | bytes | list[bytes] | tuple[bytes, ...] | list[bytes | None] | Swap | PopResult | Turn
    | TimedOut | Event | PushedEvent | Done | Refused | Waiting | StoreError | Packed
)  # fmt: skip
"""Everything that an operation returns, a wait ends with, or a watch delivers."""


def pack(answer: Any) -> Packed:
    """Return an answer as plain data: a status, and a result that msgpack can hold."""
    kind = answer.__class__
    if kind in _PLAIN:
        return Packed(ReplyStatus.OK, answer)
    if kind is Packed:
        packed: Packed = answer
        return packed
    if kind is TimedOut:
        return Packed(ReplyStatus.TIMED_OUT, answer.missing)
    if kind is Done:
        return Packed(ReplyStatus.OK, (DONE, answer.answer))
    if kind is Refused:
        return Packed(ReplyStatus.OK, (REFUSED, *answer))
    if kind is Waiting:
        return Packed(ReplyStatus.OK, (WAITING, *answer))
    if kind is Turn:
        return Packed(ReplyStatus.OK, True)
    assert isinstance(answer, StoreError)
    return Packed(ReplyStatus.ERROR, (kind.__name__, answer.__dict__))


def size_of(answer: Any) -> int:
    """Return the approximate size of an answer in bytes; accurate enough for a limit."""
    kind = answer.__class__
    if kind in _SMALL:
        return 16
    if kind is bytes or kind is LongValue:
        return 16 + len(answer)
    if kind is list or kind is tuple:
        return 16 + 8 * len(answer) + sum(map(len, filter(None, answer)))
    if kind is Swap or kind is PopResult:
        return 16 + sum(8 + len(part) if part.__class__ in (bytes, LongValue) else 8 for part in answer)
    if kind is TimedOut:
        return 16 + sum(8 + len(key) for key in answer.missing)
    if kind is Done and answer.answer.__class__ is SharedAnswer:
        return 16 + len(answer.answer.data)
    if kind is Waiting:  # it may list very many names
        return 80 + len(answer.reason) + sum(8 * len(names) + sum(map(len, names)) for names in answer[1:3])
    if kind is Packed:
        return 16 + _plain_size(answer.result)
    return 16 + _plain_size(pack(answer).result)


def _plain_size(data: Any) -> int:
    if isinstance(data, (bytes, str)):
        return 8 + len(data)
    if isinstance(data, SharedAnswer):
        return len(data.data)
    if isinstance(data, dict):
        return 8 + sum(_plain_size(key) + _plain_size(value) for key, value in data.items())
    if isinstance(data, (list, tuple)):
        return 8 + sum(map(_plain_size, data))
    return len(data) if hasattr(data, "__len__") else 8


_SMALL = frozenset((int, bool, type(None)))
_PLAIN = _SMALL | {bytes, LongValue, list, tuple, Swap, PopResult}


class Statistics(NamedTuple):
    """What an engine holds at one moment."""

    keys: int
    queues: int
    waiters: int
    watches: int
    leased_keys: int
    size: int
    revision: int
