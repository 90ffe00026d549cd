"""`within`: an awaitable with a timeout, for asyncio.

Before Python 3.12, `asyncio.wait_for` may swallow a cancellation that arrives just as the awaited task finishes. A
caller that cancels a task and waits for its end then waits for ever: here, a server that was about to take over.

Rejected: asyncio.timeout, which Python 3.10 does not have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

__all__ = ["within"]

T = TypeVar("T")


async def within(timeout_s: float, work: Awaitable[T]) -> T:
    """Return the result of an awaitable; after `timeout_s`, cancel it and raise asyncio.TimeoutError."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task,), timeout=timeout_s)
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))  # its cleanup finishes before the caller goes on
    finally:
        task.cancel()
    if task.cancelled():
        raise asyncio.TimeoutError
    return task.result()
