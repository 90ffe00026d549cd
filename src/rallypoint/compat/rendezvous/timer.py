"""Delays, and a function that is called periodically, as in `torch.distributed.elastic.rendezvous.utils`.

A timer's thread is a daemon and has no hold on the timer. It ends with `cancel`, or when nobody refers to the timer
any more, or, if the function is a method, when its object is gone: an owner may keep a timer that calls the owner.
Whoever drops the last reference waits for a call that is under way, as `cancel` does; the end of the interpreter does
not, for a call that never returns would keep it.
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
    """Sleep so long, or by chance for a time between two."""
    if isinstance(seconds, tuple):
        seconds = random.uniform(*seconds)
    time.sleep(max(0.0, seconds))


class _PeriodicTimer:
    """Calls a function in a daemon thread each time an interval has passed since the last call."""

    def __init__(self, interval: timedelta, function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._name: str | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        # What the thread runs on refers neither to this object nor to the owner of a method, so that both can go.
        bound = isinstance(function, types.MethodType)
        find = weakref.WeakMethod(function) if bound else lambda: function
        self._run: tuple[Any, ...] = (self._stop, interval.total_seconds(), find, args, kwargs)

    @property
    def name(self) -> str | None:
        """The name of the thread, if it was given one."""
        return self._name

    def set_name(self, name: str) -> None:
        """Name the thread that is yet to be started."""
        self._refuse_if_started()
        self._name = name

    def start(self) -> None:
        """Start calling, an interval from now; this can be done once."""
        self._refuse_if_started()
        self._stop.clear()
        self._thread = threading.Thread(target=_call, args=self._run, name=self._name or "PeriodicTimer", daemon=True)
        weakref.finalize(self, _end, self._stop, self._thread).atexit = False
        self._thread.start()

    def cancel(self) -> None:
        """Stop calling; the last call has ended when this returns, unless it is that call that cancels."""
        _end(self._stop, self._thread)

    def _refuse_if_started(self) -> None:
        if self._thread is not None:
            raise RuntimeError("the timer has already started; make another one")


def _end(stop: threading.Event, thread: threading.Thread | None) -> None:
    """Stop calling, and wait for a call that is under way, unless it is that call that ends it."""
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
