"""Interrupts: whenever a signal or a cancellation ends a call, what it held is free, and the session goes on.

A storm of signals needs a process of its own, for here pytest has the alarm. Its handler raises at most once a call.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from types import FrameType
from typing import Any

import pytest
from tests.cutter import Cutter

import rallypoint
from rallypoint import aio
from rallypoint.core import ops
from rallypoint.deadline import Deadline
from rallypoint.protocol.client import Client
from rallypoint.store.slot import Slot

DEADLINE_S = 60


@pytest.fixture(scope="module")
def server() -> Iterator[rallypoint.Server]:
    with rallypoint.Server() as server:
        yield server


@pytest.fixture
def store(server: rallypoint.Server) -> Iterator[rallypoint.Store]:
    with rallypoint.connect(server.url, timeout=DEADLINE_S) as store:
        yield store
        store.delete_prefix("")


def until(true: Callable[[], bool], what: str) -> None:
    """Look until something is so."""
    deadline = Deadline(DEADLINE_S)
    while not true():
        assert not deadline.expired(), f"not within {DEADLINE_S} s: {what}"


STORM = """
import random, signal, sys, rallypoint, rallypoint.deadline

class Alarm(BaseException):
    pass

def ring(*_):
    if armed:
        raise Alarm

armed = False
signal.signal(signal.SIGALRM, ring)
store = rallypoint.connect(sys.argv[1], timeout=60)
wire = store._backend._wire
calls = {
    "add": lambda: store.add("n", 1),
    "queue_pop": lambda: store.queue_pop("q", timeout=0.001),
    "wait": lambda: store.wait(["never"], timeout=0.001),
}
chance = random.Random(int(sys.argv[2]))
rings = acknowledged = ambiguous = 0
while rings < 300:
    name, result = chance.choice(list(calls)), None
    try:
        armed = True
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(2e-5, 4e-4))
        result = calls[name]()
        armed = False
    except Alarm:
        rings += 1
    except (rallypoint.StoreTimeout, rallypoint.QueueEmpty):
        pass
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
    if name == "add":
        acknowledged += result is not None
        ambiguous += result is None
    store.add("quiet", 1)  # more than five cuts in a row, with no answer in between, would end the session
deadline = rallypoint.deadline.Deadline(10)
while wire._reader is not None or wire._sender.locked() or wire._lock.locked():  # the keeper may be at it for a moment
    assert not deadline.expired(), (wire._reader, wire._sender, wire._lock)
print(acknowledged <= store.add("n", 0) <= acknowledged + ambiguous)
"""


@pytest.mark.parametrize("seed", [1, 2])
def test_after_a_storm_of_signals_nothing_is_held_and_all_adds_are_counted(
    seed: int, server: rallypoint.Server, store: rallypoint.Store
) -> None:
    with store.pipeline() as pipe:
        for number in range(100):
            pipe.queue_push("q", str(number))
    done = subprocess.run(
        [sys.executable, "-c", STORM, server.url, str(seed)], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.stdout == "True\n", done.stderr


class Interrupted(BaseException):
    """What the profiler raises in place of a signal's handler."""


def interrupted_at(point: int, call: Callable[[], object]) -> bool:
    """Run a call, and interrupt it at one point, counted from 1; say whether it got that far.

    A point is where a function is entered, or one in C was left: there Python runs the handlers of signals.
    """
    left = point

    def strike(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left
        left -= event in ("call", "c_return") and argument is not sys.setprofile
        if not left:
            sys.setprofile(None)
            raise Interrupted

    sys.setprofile(strike)
    try:
        call()
    except Interrupted:
        return True
    finally:
        sys.setprofile(None)
    return False


CALLS: dict[str, Callable[[rallypoint.Store], object]] = {
    "add": lambda store: store.add("n", 1),
    "queue_pop": lambda store: store.queue_pop("q"),
    "wait": lambda store: store.wait(["there"]),
    "pipeline": lambda store: store._backend.pipeline([ops.Add(0, b"/n", 1), ops.Add(0, b"/n", 1)]),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_interrupted_anywhere_leaves_nothing_held(name: str, store: rallypoint.Store) -> None:
    wire = store._backend._wire
    store.set("there", "v")
    for point in count(1):
        store.queue_push("q", "item")
        if not interrupted_at(point, lambda: CALLS[name](store)):
            break
        until(lambda: wire._reader is None and not wire._sender.locked() and not wire._lock.locked(), f"at {point}")
        assert store.add("quiet", 1) == point
    assert point > 10


# Pipelines


@pytest.mark.parametrize("moment", ["before", "after"])
def test_ctrl_c_while_a_pipeline_is_numbered_costs_the_pipeline_and_no_more(
    moment: str, server: rallypoint.Server, store: rallypoint.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of it was sent, so after a cut none of it may be repeated, behind the later numbers."""
    ask, asked = Client.ask, []

    def interrupted(client: Client, *arguments: Any, **more: Any) -> Any:
        asked.append(arguments)
        if len(asked) == 5 and moment == "before":
            raise KeyboardInterrupt
        request = ask(client, *arguments, **more)
        if len(asked) == 5:
            raise KeyboardInterrupt
        return request

    with Cutter(server.port) as cutter, rallypoint.connect(f"tcp://127.0.0.1:{cutter.port}") as cut:
        cut.lease("mine", "v")
        monkeypatch.setattr(Client, "ask", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cut._backend.pipeline([ops.Add(0, b"/n", 1) for _ in range(10)])
        monkeypatch.undo()
        assert len(asked) == 5 and cut.add("n", 1) == 1
        for total in range(2, 5):
            cutter.cut_all()
            assert cut.add("n", 1) == total
        assert store.get("mine") == b"v", "it is the same session"
        assert cut._backend._wire._slots == {}


# Other threads


def test_calls_may_come_and_go_while_the_next_reader_is_chosen(store: rallypoint.Store) -> None:
    """The one that is looked at ends just then, and takes itself off the list."""
    wire = store._backend._wire

    class Leaving(Slot):
        @property
        def waiting(self) -> bool:  # type: ignore[override]
            wire._slots.pop(self.number, None)
            return False

        @waiting.setter
        def waiting(self, value: bool) -> None:
            pass

        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

    wire._slots.update({number: Leaving(number) for number in range(1 << 40, (1 << 40) + 3)})
    wire._wake_another()
    assert wire._slots == {}
    assert store.add("n", 1) == 1


def test_many_threads_that_come_and_go_all_get_their_own_answers(store: rallypoint.Store) -> None:
    def short(name: str) -> bool:
        return [store.add(name, 1) for _ in range(20)] == list(range(1, 21))

    def blocked() -> bool:
        for _ in range(10):
            with pytest.raises(rallypoint.StoreTimeout):
                store.wait(["never"], timeout=0.001)
        return True

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(60) as pool:
            ends = [pool.submit(short, f"n {number}") for number in range(20)]
            ends += [pool.submit(blocked) for _ in range(40)]
            assert all(end.result(DEADLINE_S) for end in ends)
    finally:
        sys.setswitchinterval(interval_s)
    assert store._backend._wire._slots == {}


# Cancellation


def test_a_cancelled_pop_whose_item_was_on_its_way_gives_it_back(server: rallypoint.Server) -> None:
    """Two pops get their items at about the same time, and the first of them cancels the other."""

    async def main() -> None:
        async with await aio.connect(server.url, timeout=DEADLINE_S) as store:
            for _ in range(10):
                first, second = (asyncio.ensure_future(store.queue_pop("pair")) for _ in range(2))
                await asyncio.to_thread(until, lambda: server.statistics()["waiting"] == 2, "both wait")
                answer, _ = store._session._waiting.values()
                answer.add_done_callback(lambda _, second=second: second.cancel())  # type: ignore[misc]
                await asyncio.to_thread(push_two, server.url)
                assert await first == b"one"
                with pytest.raises(asyncio.CancelledError):
                    await second
                await store.add("settled", 1)  # behind the Drop
                assert await store.queue_pop("pair", block=False) == b"two"

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


def push_two(url: str) -> None:
    with rallypoint.connect(url, timeout=DEADLINE_S) as other, other.pipeline() as pipe:
        pipe.queue_push("pair", "one")
        pipe.queue_push("pair", "two")
