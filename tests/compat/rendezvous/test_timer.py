"""A periodic timer: when it calls, and all the ways in which it ends; and delays. Threads are joined, not timed."""

from __future__ import annotations

import gc
import importlib
import queue
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from itertools import count

import pytest

from rallypoint.compat.rendezvous import _delay, _PeriodicTimer

AMPLE_S = 60.0
SOON = timedelta(milliseconds=1)
names = (f"timer under test {number}" for number in count())


def started(timer: _PeriodicTimer) -> threading.Thread:
    """Start a timer that does not end by itself, and return its thread."""
    name = next(names)
    timer.set_name(name)
    timer.start()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == name]
    return thread


def ends(thread: threading.Thread) -> bool:
    thread.join(AMPLE_S)
    return not thread.is_alive()


@pytest.fixture
def calls() -> Iterator[queue.SimpleQueue[object]]:
    return queue.SimpleQueue()


def test_it_calls_again_and_again_with_its_arguments(calls):
    timer = _PeriodicTimer(SOON, lambda *args, **more: calls.put((args, more)), 1, "two", three=3)
    thread = started(timer)
    assert [calls.get(timeout=AMPLE_S) for _ in range(3)] == [((1, "two"), {"three": 3})] * 3
    assert thread.daemon
    timer.cancel()
    assert not thread.is_alive()


def test_it_does_not_call_before_an_interval_has_passed(calls):
    timer = _PeriodicTimer(timedelta(days=1), lambda: calls.put("called"))
    thread = started(timer)
    timer.cancel()
    assert not thread.is_alive() and calls.empty()


def test_cancel_returns_when_the_last_call_has_ended():
    inside = threading.Event()
    ended: list[str] = []

    def call() -> None:
        inside.set()
        timer._stop.wait(AMPLE_S)
        ended.append("ended")

    timer = _PeriodicTimer(SOON, call)
    started(timer)
    assert inside.wait(AMPLE_S)
    timer.cancel()
    assert ended == ["ended"]


def test_it_can_be_cancelled_by_its_own_call(calls):
    def call() -> None:
        timer.cancel()
        calls.put(threading.current_thread())

    timer = _PeriodicTimer(SOON, call)
    timer.start()
    assert ends(calls.get(timeout=AMPLE_S)) and calls.empty()
    timer.cancel()


def test_it_ends_when_nobody_refers_to_it(calls):
    timer = _PeriodicTimer(SOON, lambda: calls.put("called"))
    thread = started(timer)
    assert calls.get(timeout=AMPLE_S)
    del timer
    gc.collect()
    assert ends(thread)


THEIRS = pytest.param("torch.distributed.elastic.rendezvous.utils", marks=pytest.mark.needs("torch"), id="torch's")


@pytest.mark.parametrize("module", ["rallypoint.compat.rendezvous", THEIRS])
def test_dropping_it_waits_for_the_call_under_way(module):
    inside, go_on = threading.Event(), threading.Event()
    ended: list[str] = []

    def call() -> None:
        inside.set()
        go_on.wait(AMPLE_S)
        ended.append("ended")

    timer = importlib.import_module(module)._PeriodicTimer(SOON, call)
    timer.start()
    assert inside.wait(AMPLE_S)
    threading.Timer(0.05, go_on.set).start()
    del timer
    assert ended == ["ended"]


class Owner:
    """Has a timer that calls it."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.timer = _PeriodicTimer(SOON, self.beat)

    def beat(self) -> None:
        self.calls.put("beat")


def test_it_ends_with_the_owner_that_it_calls():
    owner = Owner()
    thread = started(owner.timer)
    assert owner.calls.get(timeout=AMPLE_S) == "beat"
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert ends(thread)
    assert gone() is None


def test_a_timer_that_outlives_the_owner_of_its_method_ends_too():
    owner = Owner()
    timer = _PeriodicTimer(SOON, owner.beat)
    thread = started(timer)
    del owner
    gc.collect()
    assert ends(thread)
    assert timer.name == thread.name


def test_it_starts_once_and_is_named_before(calls):
    timer = _PeriodicTimer(SOON, lambda: calls.put("called"))
    assert timer.name is None
    timer.set_name("mine")
    timer.start()
    assert timer.name == "mine"
    for again in (timer.start, lambda: timer.set_name("yours")):
        with pytest.raises(RuntimeError, match="already started"):
            again()
    timer.cancel()
    timer.cancel()
    with pytest.raises(RuntimeError, match="already started"):
        timer.start()


def test_it_can_be_cancelled_before_it_starts(calls):
    timer = _PeriodicTimer(SOON, lambda: calls.put("called"))
    timer.cancel()
    started(timer)
    assert calls.get(timeout=AMPLE_S) == "called"
    timer.cancel()


STUCK = """
import threading
from datetime import timedelta
from rallypoint.compat.rendezvous import _PeriodicTimer
inside = threading.Event()
def call():
    inside.set()
    threading.Event().wait()
timer = _PeriodicTimer(timedelta(milliseconds=1), call)
timer.start()
inside.wait()
print("main ends")
"""


def test_a_call_that_never_returns_does_not_keep_the_interpreter():
    run = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=AMPLE_S)
    assert (run.returncode, run.stdout) == (0, "main ends\n"), run.stderr


@pytest.mark.parametrize(("asked", "slept"), [(0.25, 0.25), (0, 0), (-1, 0), ((0.5, 0.5), 0.5)])
def test_a_delay(monkeypatch, asked, slept):
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    _delay(asked)
    assert waits == [slept]


def test_delays_between_two_are_spread(monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    random.seed(7)
    for _ in range(100):
        _delay((1.0, 2.0))
    assert all(1.0 <= wait <= 2.0 for wait in waits)
    assert min(waits) < 1.1 and max(waits) > 1.9
