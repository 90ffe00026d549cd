"""What comes out of the engine: plain answers, and the handles of what an owner holds.

`Waiter`, `Watch` and `Turn` are what an owner can hold. They are compared by identity; in a log and in a snapshot they
are named by their owner and their number, which is that of the operation that made them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

from rallypoint.core.machine import Done, Refused, Waiting
from rallypoint.errors import StoreError

__all__ = [
    "LATER",
    "Answer",
    "Drawn",
    "Event",
    "InternalError",
    "Packed",
    "Push",
    "Shared",
    "Statistics",
    "Status",
    "Swap",
    "TimedOut",
    "Turn",
    "Want",
    "Waiter",
    "Watch",
    "internal_error",
    "pack",
    "show",
    "weigh",
]


def show(key: bytes) -> str:
    """Return a key as text for people."""
    return key.decode("utf-8", "backslashreplace")


class InternalError(StoreError):
    """A request or an entry could not be carried out, because of a bug."""

    why: str

    def __init__(self, *, why: str) -> None:
        super().__init__(f"internal error of the server, please report it: {why}", why=why)


def internal_error(error: Exception, doing: str) -> InternalError:
    """Return what to answer after a bug: the same words at every replay, so without what an error's own may have."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else f" in {trace.tb_frame.f_code.co_name}"
    return InternalError(why=f"{type(error).__name__}{where}, during {doing}")


class Status:
    """How a request ended."""

    OK, TIMED_OUT, ERROR, REFUSED = range(4)


DONE, REFUSED, WAITING = range(3)
"""How a call on a shared object ended: the first element of its packed answer."""


class Swap(NamedTuple):
    """What `swap` did: whether it won, and the value that is there now (None: no such key)."""

    won: bool
    value: bytes | None


class TimedOut(NamedTuple):
    """The answer of a wait that ended by its deadline: what was still missing."""

    missing: tuple[bytes, ...]
    down: str = ""
    """What is known of the server, where nobody could say what is missing because it was down."""


class Drawn(NamedTuple):
    """The answer of `Draw`: the queue's length before, and the item (None: the queue was empty)."""

    length: int
    item: bytes | None


class Event(NamedTuple):
    """One change of one key: its new value, or None when it was deleted."""

    revision: int
    key: bytes
    value: bytes | None


class Push(NamedTuple):
    """An event for a watch, numbered within its session."""

    push: int
    watch: int
    event: Event


class Want(Enum):
    """What a waiter waits for."""

    KEYS = auto()
    VALUES = auto()
    ITEM = auto()
    COUNT = auto()
    CALL = auto()
    TURN = auto()
    CLEARED = auto()


class Waiter:
    """One request that waits, compared by identity.

    `key` is the missing key that it is registered under, and `rest` has the next ones, of which some may have come
    since it was made, when there were so many `removals`; `arrived`: a barrier has counted it.
    """

    __slots__ = ("arrived", "done", "key", "keys", "need", "number", "owner", "removals", "rest", "want")

    def __init__(self, want: Want, keys: Sequence[bytes], owner: Hashable, number: int) -> None:
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
        """Of a delete_prefix under way: how many it has deleted."""

    @property
    def reads(self) -> bool:
        """Whether it only reads, and so is no part of the state."""
        return self.want is Want.KEYS or self.want is Want.VALUES

    @property
    def size(self) -> int:
        """The bytes of its keys."""
        return sum(map(len, self.keys))


class Watch:
    """One interest in the changes of keys that start with a prefix; compared by identity."""

    __slots__ = ("number", "owner", "prefix")

    def __init__(self, prefix: bytes, owner: Hashable, number: int) -> None:
        self.prefix = prefix
        self.owner = owner
        self.number = number


class Turn:
    """The right to draw the next item of a queue, given to one that waited in line for it."""

    __slots__ = ("aged", "key", "number", "owner")

    def __init__(self, key: bytes, owner: Hashable, number: int) -> None:
        self.key = key
        self.owner = owner
        self.number = number
        self.aged = False
        """Whether it was there at the last sweep already; no part of the state."""


class Shared:
    """An answer to many, encoded, of which there is to be one copy; and how many sessions keep it."""

    __slots__ = ("data", "holders")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.holders = 0


class Packed(NamedTuple):
    """An answer as plain data: what is restored of a snapshot, or of an answer that was kept."""

    status: int
    result: Any


class _Later:
    """The answer is not there yet."""

    def __repr__(self) -> str:
        return "LATER"


LATER = _Later()
"""Returned for a request whose answer comes later, or never."""

Answer = (
    None | bool | int | bytes | list[bytes] | tuple[bytes, ...] | list[bytes | None] | Swap | Drawn | Turn | TimedOut
    | Event | Push | Done | Refused | Waiting | StoreError | Packed
)  # fmt: skip
"""What an operation answers, a wait ends with, or a watch delivers."""


def pack(answer: Any) -> Packed:
    """Return an answer as plain data: a status, and a result that msgpack can hold."""
    kind = answer.__class__
    if kind in _PLAIN:
        return Packed(Status.OK, answer)
    if kind is Packed:
        packed: Packed = answer
        return packed
    if kind is TimedOut:
        return Packed(Status.TIMED_OUT, answer.missing)
    if kind is Done:
        return Packed(Status.OK, (DONE, answer.answer))
    if kind is Refused:
        return Packed(Status.OK, (REFUSED, *answer))
    if kind is Waiting:
        return Packed(Status.OK, (WAITING, *answer))
    if kind is Turn:
        return Packed(Status.OK, True)
    assert isinstance(answer, StoreError)
    return Packed(Status.ERROR, (kind.__name__, answer.__dict__))


def weigh(answer: Any) -> int:
    """Return about how many bytes an answer takes; near enough for a limit."""
    kind = answer.__class__
    if kind in _SMALL:
        return 16
    if kind is bytes:
        return 16 + len(answer)
    if kind is list or kind is tuple:
        return 16 + 8 * len(answer) + sum(map(len, filter(None, answer)))
    if kind is Swap or kind is Drawn:
        return 16 + sum(8 + len(part) if part.__class__ is bytes else 8 for part in answer)
    if kind is TimedOut:
        return 16 + sum(8 + len(key) for key in answer.missing)
    if kind is Done and answer.answer.__class__ is Shared:
        return 16 + len(answer.answer.data)
    if kind is Waiting:  # which may name very many
        return 80 + len(answer.reason) + sum(8 * len(names) + sum(map(len, names)) for names in answer[1:3])
    if kind is Packed:
        return 16 + _weigh_plain(answer.result)
    return 16 + _weigh_plain(pack(answer).result)


def _weigh_plain(data: Any) -> int:
    if isinstance(data, (bytes, str)):
        return 8 + len(data)
    if isinstance(data, Shared):
        return len(data.data)
    if isinstance(data, dict):
        return 8 + sum(_weigh_plain(key) + _weigh_plain(value) for key, value in data.items())
    if isinstance(data, (list, tuple)):
        return 8 + sum(map(_weigh_plain, data))
    return len(data) if hasattr(data, "__len__") else 8


_SMALL = frozenset((int, bool, type(None)))
_PLAIN = _SMALL | {bytes, list, tuple, Swap, Drawn}


class Statistics(NamedTuple):
    """What an engine holds at one moment."""

    keys: int
    queues: int
    waiters: int
    watches: int
    leased_keys: int
    size: int
    revision: int
