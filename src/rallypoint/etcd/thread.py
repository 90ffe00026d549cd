"""The one thread of a process in which all its stores in etcd live, for those who are not in an event loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from rallypoint.errors import Unsupported

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
_inherited = False


def the_thread() -> Thread:
    """Return it; the first to ask starts it. Unsupported in a child of a process that had one, by fork."""
    global _thread
    if _inherited:
        why = "its parent uses etcd, and gRPC does not survive a fork: start this process by spawn, or by a fork server"
        raise Unsupported(operation="use of etcd", store="etcd://", why=why)
    with _lock:
        if _thread is None:
            _thread = Thread()
        return _thread


def _forked() -> None:
    global _thread, _lock, _inherited
    _inherited = _inherited or _thread is not None
    _thread, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forked)
