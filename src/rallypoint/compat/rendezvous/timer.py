"""Delays and periodic calls, as in `torch.distributed.elastic.rendezvous.utils`.

A timer's thread is a daemon and holds no reference to the timer. It ends with `cancel`, or when the timer is
garbage-collected, or, if the function is a method, when its object is: an object can own a timer that calls it.
Dropping the last reference waits for a call in progress, as `cancel` does. Interpreter exit does not wait, because a
call that never returns would block it.
"""

from __future__ import annotations

import random
import threading
import time
import types
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

__all__ = ["_PeriodicTimer", "_delay"]


def _delay(seconds: float | tuple[float, float]) -> None:
    """Sleep for the given seconds, or for a random time between two bounds."""
    if isinstance(seconds, tuple):
        seconds = random.uniform(*seconds)
    time.sleep(max(0.0, seconds))


class _PeriodicTimer:
    """Calls a function in a daemon thread each time an interval has passed since the last call."""

    def __init__(self, interval: timedelta, function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._name: str | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        # The thread's arguments refer neither to this object nor to a method's owner, so that both can be collected.
        bound = isinstance(function, types.MethodType)
        find = weakref.WeakMethod(function) if bound else lambda: function
        self._run: tuple[Any, ...] = (self._stop, interval.total_seconds(), find, args, kwargs)

    @property
    def name(self) -> str | None:
        """The name of the thread, if one was set."""
        return self._name

    def set_name(self, name: str) -> None:
        """Set the name of the thread. Raises RuntimeError if it has started."""
        self._refuse_if_started()
        self._name = name

    def start(self) -> None:
        """Start the periodic calls, the first after one interval. Raises RuntimeError if already started."""
        self._refuse_if_started()
        self._stop.clear()
        self._thread = threading.Thread(target=_call, args=self._run, name=self._name or "PeriodicTimer", daemon=True)
        weakref.finalize(self, _end, self._stop, self._thread).atexit = False
        self._thread.start()

    def cancel(self) -> None:
        """Stop the calls, and wait for a call in progress, unless that call itself cancels."""
        _end(self._stop, self._thread)

    def _refuse_if_started(self) -> None:
        if self._thread is not None:
            raise RuntimeError("the timer has already started; create another one")


def _end(stop: threading.Event, thread: threading.Thread | None) -> None:
    """Stop the calls, and wait for a call in progress, unless this is that call."""
    stop.set()
    if thread is not None and thread is not threading.current_thread() and thread.is_alive():
        thread.join()


def _call(stop: threading.Event, interval_s: float, find: Callable[[], Any], args: Any, kwargs: Any) -> None:
    while not stop.wait(interval_s):
        function = find()
        if function is None:
            return
        function(*args, **kwargs)
        del function  # or the owner lives for another interval
