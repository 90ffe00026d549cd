"""Long lists are encoded, and looked up, a slice at a time, with others served in between."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from rallypoint.core.engine import Engine
from rallypoint.errors import LimitExceeded
from rallypoint.protocol.native import encode_answer, encode_items, encode_list_head

if TYPE_CHECKING:
    from rallypoint.server.carrier import Carrier

__all__ = ["LARGE_BYTES", "SLICE_ITEMS", "encode_in_slices", "look_in_slices", "send_list"]

LARGE_BYTES = 256 * 1024
"""From what size of a request on its keys are looked up in slices: to decode them took long enough."""

SLICE_ITEMS = 4096
"""How many items of a list are encoded at a time: about a millisecond's worth of keys."""

SLICE_BYTES = 1024 * 1024
"""How many bytes of items are encoded at a time, beside a single larger one."""


def encode_in_slices(
    items: Sequence[Any],
    encode: Callable[[Sequence[Any]], bytes],
    limit: int,
    done: Callable[[list[bytes], int], None],
) -> None:
    """Encode a list; then call `done` with the parts and their size. It ends early once they are over the limit."""
    asyncio.get_running_loop().call_soon(_encode, items, 0, encode, limit, [], 0, done)


def send_list(connection: Carrier, number: int, items: Sequence[Any], limit: int, sent: Callable[[], None]) -> None:
    """Send a long list as the native answer of a request, or why it is too long; then call `sent`."""

    def done(parts: list[bytes], size: int) -> None:
        if size > limit:
            error = LimitExceeded(what="answer", key="", size=size, limit=limit)
            connection.send(encode_answer(number, error))
        else:
            connection.send_parts([encode_list_head(number, len(items), size), *parts])
        sent()

    encode_in_slices(items, encode_items, limit, done)


def look_in_slices(engine: Engine, keys: Sequence[bytes], done: Callable[[bool], None]) -> None:
    """Look for keys; then call `done` with whether all are there at this moment, or with False if that is not known.

    Where nothing was deleted meanwhile, what was there when it was looked at is there at the end.
    """
    asyncio.get_running_loop().call_soon(_look, engine, engine.removals, keys, 0, done)


# One step each. A closure that schedules itself would be a cycle, and keep the whole list until a garbage collection.


def _encode(
    items: Sequence[Any],
    start: int,
    encode: Callable[[Sequence[Any]], bytes],
    limit: int,
    parts: list[bytes],
    size: int,
    done: Callable[[list[bytes], int], None],
) -> None:
    sizes = list(accumulate(len(item or b"") for item in items[start : start + SLICE_ITEMS]))
    end = start + max(1, bisect_right(sizes, SLICE_BYTES))
    parts.append(encode(items[start:end]))
    size += len(parts[-1])
    if end < len(items) and size <= limit:
        asyncio.get_running_loop().call_soon(_encode, items, end, encode, limit, parts, size, done)
    else:
        done(parts, size)


def _look(engine: Engine, removals: int, keys: Sequence[bytes], start: int, done: Callable[[bool], None]) -> None:
    end = start + SLICE_ITEMS
    here = engine.has_all(keys[start:end]) and engine.removals == removals
    if here and end < len(keys):
        asyncio.get_running_loop().call_soon(_look, engine, removals, keys, end, done)
    else:
        done(here)
