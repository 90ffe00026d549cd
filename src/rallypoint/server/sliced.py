"""Long lists are encoded a slice at a time, with others served in between: no reply blocks the event loop."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

__all__ = ["SLICE_ITEMS", "encode_in_slices"]

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
    loop = asyncio.get_running_loop()
    parts: list[bytes] = []
    size = 0

    def step(start: int) -> None:
        nonlocal size
        sizes = list(accumulate(len(item or b"") for item in items[start : start + SLICE_ITEMS]))
        count = max(1, bisect_right(sizes, SLICE_BYTES))
        part = encode(items[start : start + count])
        parts.append(part)
        size += len(part)
        start += count
        if start < len(items) and size <= limit:
            loop.call_soon(step, start)
        else:
            done(parts, size)

    loop.call_soon(step, 0)
