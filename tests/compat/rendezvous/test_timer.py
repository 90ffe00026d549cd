"""The periodic timer: when it calls, and every way in which it ends; and delays. Threads are joined, not timed."""

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
from datetime import timedelta
from itertools import count
from typing import Any

import pytest

from rallypoint.compat.rendezvous import _delay, _PeriodicTimer

AMPLE_S = 60.0
SOON = timedelta(milliseconds=1)
Calls = queue.SimpleQueue[Any]
names = (f"timer under test {number}" for number in count())


def started(timer: _PeriodicTimer) -> threading.Thread:
    """Start the timer and return its thread."""
    name = next(names)
    timer.set_name(name)
    timer.start()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == name]
    return thread


def ends(thread: threading.Thread) -> bool:
    thread.join(AMPLE_S)
    return not thread.is_alive()


@pytest.fixture
def calls() -> Calls:
    return queue.SimpleQueue()


def test_the_timer_calls_repeatedly_with_its_arguments(calls: Calls) -> None:
    timer = _PeriodicTimer(SOON, lambda *args, **more: calls.put((args, more)), 1, "two", three=3)
    thread = started(timer)
    assert [calls.get(timeout=AMPLE_S) for _ in range(3)] == [((1, "two"), {"three": 3})] * 3
    assert thread.daemon
    timer.cancel()
    assert not thread.is_alive()


def test_the_first_call_is_one_interval_after_the_start(calls: Calls) -> None:
    timer = _PeriodicTimer(timedelta(days=1), lambda: calls.put("called"))
    thread = started(timer)
    timer.cancel()
    assert not thread.is_alive() and calls.empty()


def test_cancel_waits_for_the_call_under_way() -> None:
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


def test_a_timer_can_be_cancelled_by_its_own_call(calls: Calls) -> None:
    def call() -> None:
        timer.cancel()
        calls.put(threading.current_thread())

    timer = _PeriodicTimer(SOON, call)
    timer.start()
    assert ends(calls.get(timeout=AMPLE_S)) and calls.empty()
    timer.cancel()


def test_the_thread_ends_when_the_timer_is_unreferenced(calls: Calls) -> None:
    timer = _PeriodicTimer(SOON, lambda: calls.put("called"))
    thread = started(timer)
    assert calls.get(timeout=AMPLE_S)
    del timer
    gc.collect()
    assert ends(thread)


THEIRS = pytest.param("torch.distributed.elastic.rendezvous.utils", marks=pytest.mark.needs("torch"), id="torch's")


@pytest.mark.parametrize("module", ["rallypoint.compat.rendezvous", THEIRS])
def test_deleting_a_timer_waits_for_the_call_under_way(module: str) -> None:
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
    """Owns a timer that calls one of its methods."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.timer = _PeriodicTimer(SOON, self.beat)

    def beat(self) -> None:
        self.calls.put("beat")


def test_the_thread_ends_when_the_owner_of_timer_and_callback_is_deleted() -> None:
    owner = Owner()
    thread = started(owner.timer)
    assert owner.calls.get(timeout=AMPLE_S) == "beat"
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert ends(thread)
    assert gone() is None


def test_the_thread_ends_when_the_owner_of_the_callback_is_deleted() -> None:
    owner = Owner()
    timer = _PeriodicTimer(SOON, owner.beat)
    thread = started(timer)
    del owner
    gc.collect()
    assert ends(thread)
    assert timer.name == thread.name


def test_a_timer_starts_once_and_cannot_be_renamed_afterwards(calls: Calls) -> None:
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


def test_cancelling_before_the_start_has_no_effect(calls: Calls) -> None:
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


def test_a_blocked_call_does_not_keep_the_interpreter_alive() -> None:
    run = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=AMPLE_S)
    assert (run.returncode, run.stdout) == (0, "main ends\n"), run.stderr


@pytest.mark.parametrize(("asked", "slept"), [(0.25, 0.25), (0, 0), (-1, 0), ((0.5, 0.5), 0.5)])
def test_a_delay_sleeps_as_long_as_asked(
    monkeypatch: pytest.MonkeyPatch, asked: float | tuple[float, float], slept: float
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    _delay(asked)
    assert waits == [slept]


def test_random_delays_cover_the_whole_range(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    random.seed(7)
    for _ in range(100):
        _delay((1.0, 2.0))
    assert all(1.0 <= wait <= 2.0 for wait in waits)
    assert min(waits) < 1.1 and max(waits) > 1.9
