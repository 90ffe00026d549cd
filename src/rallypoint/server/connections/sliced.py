"""Encode and look up long lists in slices, so that the event loop serves other clients in between.

Large items are not copied: they become shared parts of the reply (`outgoing.py`). The rest is counted while it is
encoded, because many connections may do so at the same time.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from rallypoint.core import ops
from rallypoint.core.engine import Engine
from rallypoint.core.long_value import LongValue
from rallypoint.errors import LimitExceeded
from rallypoint.protocol.native import (
    encode_answer,
    encode_item_head,
    encode_items,
    encode_list_head,
    encode_value_head,
)
from rallypoint.server.connections.outgoing import Part, ValuePart

if TYPE_CHECKING:
    from rallypoint.server.connections.session_transport import SessionTransport

__all__ = [
    "LARGE_BYTES",
    "NO_SOURCE",
    "SLICE_ITEMS",
    "VALUE",
    "ListEncoder",
    "ValueSource",
    "encode_in_slices",
    "is_long",
    "look_in_slices",
    "send_list",
    "shared_parts",
    "source_of",
    "value_parts",
]

LARGE_BYTES = 256 * 1024
"""Requests over this size look up their keys in slices: decoding them already took long. Larger answers are encoded in
slices."""

SHARED_BYTES = 16 * 1024
"""Larger items of a long list are not copied."""

SLICE_ITEMS = 4096
"""Items of a list encoded at a time: about a millisecond's worth of keys."""

SLICE_BYTES = 1024 * 1024
"""Bytes of items encoded at a time, except for a single larger item."""


VALUE: frozenset[type[Any]] = frozenset((bytes, LongValue))
"""The classes of values."""


class ListEncoder(NamedTuple):
    """How a protocol encodes lists."""

    items: Callable[[Sequence[Any]], bytes]
    head: Callable[[int], bytes]
    """Encodes what precedes the bytes of a large item, by its size."""

    overhead: int
    """The most bytes that precede an item."""


class ValueSource(NamedTuple):
    """Where the items of a list come from: the values of these keys, if they are known."""

    engine: Engine | None
    keys: Sequence[bytes] | None


NO_SOURCE = ValueSource(None, None)
"""The source of a list that is not in this process's state."""


def source_of(engine: Engine, op: ops.Op | None) -> ValueSource:
    """Return the source of the answer of an operation."""
    keys = getattr(op, "keys", None)
    key = getattr(op, "key", None)
    return ValueSource(engine, keys if key is None else (key,))


def is_long(answer: Any) -> bool:
    """Return whether an answer, a value or a list, is to be encoded in slices."""
    if answer.__class__ in VALUE:
        return len(answer) > LARGE_BYTES
    if len(answer) == 1:
        return len(answer[0] or b"") > LARGE_BYTES
    return len(answer) > SLICE_ITEMS or sum(map(len, filter(None, answer))) > LARGE_BYTES


def encode_in_slices(
    items: Sequence[Any],
    encoder: ListEncoder,
    source: ValueSource,
    limit: int,
    grown: Callable[[int], bool],
    done: Callable[[list[Part], int, int], None],
) -> None:
    """Encode a list, then call `done` with the parts, their size, and how much of it is not shared.

    `grown` is called with the growth of the latter, and returns whether to go on. Stops early once the size exceeds the
    limit.
    """
    _Encoding(items, encoder, source, limit, grown, done).schedule()


def value_parts(number: int, answer: Any, source: ValueSource) -> list[Part]:
    """Return the native reply to a request for a large value: the value, or a list of it alone."""
    single = answer.__class__ in VALUE
    value = answer if single else answer[0]
    item = encode_item_head(len(value))
    size = len(item) + len(value)
    head = encode_value_head(number, size) if single else encode_list_head(number, 1, size)
    return [head + item, *shared_parts(value, source, 0)]


def shared_parts(value: bytes | LongValue, source: ValueSource, at: int) -> list[Part]:
    """Return the parts of a value, which is the item at that place in the source."""
    key = None if source.keys is None else source.keys[at]
    pieces = value.parts if isinstance(value, LongValue) else [value]
    return [ValuePart(piece, source.engine, key, index) for index, piece in enumerate(pieces)]


def send_list(
    connection: SessionTransport,
    number: int,
    items: Sequence[Any],
    source: ValueSource,
    limit: int,
    grown: Callable[[int], bool],
    sent: Callable[[int], None],
) -> None:
    """Send a long list as the native reply to a request, or LimitExceeded; then call `sent`."""

    def done(parts: list[Part], size: int, owned: int) -> None:
        sent(owned)  # first, for `send_parts` counts it again
        if size > limit:
            error = LimitExceeded(what="answer", key="", size=size, limit=limit)
            connection.send(encode_answer(number, error))
        elif not connection.closing:
            connection.send_parts([encode_list_head(number, len(items), size), *parts])

    encode_in_slices(items, _NATIVE, source, limit, grown, done)


_NATIVE = ListEncoder(encode_items, encode_item_head, 5)


def look_in_slices(engine: Engine, keys: Sequence[bytes], done: Callable[[bool], None]) -> None:
    """Look up keys, then call `done` with True if all exist at that moment, False if not or if unknown.

    If nothing was deleted meanwhile, the keys found in earlier slices still exist at the end.
    """
    asyncio.get_running_loop().call_soon(_look, engine, engine.removals, keys, 0, done)


class _Encoding:
    """One list that is being encoded."""

    def __init__(
        self,
        items: Sequence[Any],
        encoder: ListEncoder,
        source: ValueSource,
        limit: int,
        grown: Callable[[int], bool],
        done: Callable[[list[Part], int, int], None],
    ) -> None:
        self._items = items
        self._encoder = encoder
        self._source = source
        self._limit = limit
        self._grown = grown
        self._done = done
        self._at = 0
        self._parts: list[Part] = []
        self._size = self._owned = 0

    def schedule(self) -> None:
        asyncio.get_running_loop().call_soon(self._step)

    def _step(self) -> None:
        owned = self._encode_slice()
        self._owned += owned
        goes_on = self._grown(owned)
        if goes_on and self._at < len(self._items) and self._size <= self._limit:
            self.schedule()
        else:
            self._done(self._parts, self._size, self._owned)

    def _encode_slice(self) -> int:
        """Encode the next items; return how many bytes of that are not shared."""
        start = self._at
        some = self._items[start : start + SLICE_ITEMS]
        sizes = list(accumulate(len(item or b"") if len(item or b"") <= SHARED_BYTES else 0 for item in some))
        self._at = end = start + max(1, bisect_right(sizes, SLICE_BYTES))
        large = [at for at in range(start, end) if len(self._items[at] or b"") > SHARED_BYTES]
        owned = 0
        for at in large:
            owned += self._add(self._encoder.items(self._items[start:at]) if at > start else b"")
            data = self._items[at]
            owned += self._add(self._encoder.head(len(data)))
            self._parts += shared_parts(data, self._source, at)
            self._size += len(data)
            start = at + 1
        return owned + self._add(self._encoder.items(self._items[start:end]) if end > start else b"")

    def _add(self, data: bytes) -> int:
        if data:
            self._parts.append(data)
            self._size += len(data)
        return len(data)


def _look(engine: Engine, removals: int, keys: Sequence[bytes], start: int, done: Callable[[bool], None]) -> None:
    end = start + SLICE_ITEMS
    here = engine.has_all(keys[start:end]) and engine.removals == removals
    if here and end < len(keys):
        asyncio.get_running_loop().call_soon(_look, engine, removals, keys, end, done)
    else:
        done(here)
