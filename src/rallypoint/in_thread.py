"""`in_thread`: run a blocking call beside an event loop without delaying the exit of the process.

Each call has its own daemon thread. If the caller is cancelled, the thread runs on and its result is discarded: use it
only for calls that end by themselves and are harmless if they end late.

Rejected: `loop.run_in_executor`. Its threads are joined when the loop or the interpreter ends: a process asked to
terminate would wait for a request to an unresponsive etcd.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["in_thread"]

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Return the result of a blocking call, or raise its exception."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if outcome.done():  # it was cancelled
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failed = None, None
        try:
            result = work()
        except BaseException as error:
            failed = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, failed)

    threading.Thread(target=run, name="in_thread", daemon=True).start()
    return await outcome
