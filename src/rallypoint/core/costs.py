"""What each thing in a state costs in memory, besides its own bytes (keys, values, names).

The costs are the growth of the resident memory of a server, divided by the number of things: CPython 3.11 on x86-64,
Linux, glibc; keys of a few bytes, because the shortest ones have the largest overhead. Tables (dicts) double, so the
cost depends on their number; these are the largest costs found, rounded up. `python -m benchmarks memory` measures
them again: it fills a server with one kind of thing and prints counted against resident bytes.

A cost decides whether a change is refused, so a log can be replayed only with the costs that it was written with:
whoever changes one raises `VERSION` in `core/entries.py`.
"""

from __future__ import annotations

__all__ = [
    "CALL_BYTES",
    "ITEM_BYTES",
    "KEPT_BYTES",
    "KEY_BYTES",
    "LATE_BYTES",
    "LEASE_BYTES",
    "OBJECT_BYTES",
    "PUSH_BYTES",
    "QUEUE_BYTES",
    "SESSION_BYTES",
    "WAITED_KEY_BYTES",
    "WAIT_BYTES",
    "WATCH_BYTES",
    "WORK_ITEM_BYTES",
]

KEY_BYTES = 140
"""A key with a value: two objects, and their places in the table and the index."""

LEASE_BYTES = 700
"""A lease, besides its key: its places in four tables, and the deadline of its heartbeat."""

QUEUE_BYTES = 900
"""A queue, besides its items: a deque allocates a block for 64 of them."""

ITEM_BYTES = 100
"""An item of a queue."""

WATCH_BYTES = 720
"""A watch on a prefix of its own."""

WAIT_BYTES = 880
"""A waiting request or a turn, with its deadline."""

WAITED_KEY_BYTES = 100
"""One of the keys that a request waits for."""

OBJECT_BYTES = 1200
"""A shared object, besides what its calls make it keep."""

CALL_BYTES = 1500
"""A call on a shared object: its wait, and what the object keeps of it."""

LATE_BYTES = 400
"""A call that has yet to poll for its result."""

WORK_ITEM_BYTES = 300
"""An item of a work queue."""

SESSION_BYTES = 4096
"""A session, and the connection or channel that carries it."""

KEPT_BYTES = 190
"""An answer that its client has not confirmed."""

PUSH_BYTES = 260
"""A push that its client has not confirmed."""
