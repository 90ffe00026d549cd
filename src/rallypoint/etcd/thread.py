"""The one thread of a process in which all its stores in etcd live, for those who are not in an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["Thread", "the_thread"]

T = TypeVar("T")


class Thread:
    """An event loop that runs in a thread of its own, to the end of the process."""

    def __init__(self) -> None:
        self.loop = _new_loop()
        threading.Thread(target=self.loop.run_forever, name="rallypoint-etcd", daemon=True).start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Have work done there, and return what comes of it; an interrupt of this thread cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


_thread: Thread | None = None
_lock = threading.Lock()


def the_thread() -> Thread:
    """Return it; the first to ask starts it."""
    global _thread
    with _lock:
        if _thread is None:
            _thread = Thread()
        return _thread
