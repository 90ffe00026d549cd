"""Interrupts: a call ended by a signal or a cancellation releases everything it held, and the session continues.

The storm of signals runs in a child process, because pytest uses SIGALRM here. Its handler raises at most once a call.
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
from tests.client.sessions import connection_of, session_of
from tests.outage_log import DEADLINE_S, await_waiting, until
from tests.served import server_fixture

import rallypoint
from rallypoint import aio
from rallypoint.client.blocking.pending_call import PendingCall
from rallypoint.core import ops
from rallypoint.protocol.native_client import ClientProtocol
from rallypoint.store.batch import Batch
from rallypoint.testing import CuttingProxy

server = server_fixture("module")


@pytest.fixture
def store(server: rallypoint.Server) -> Iterator[rallypoint.Store]:
    with rallypoint.connect(server.url, timeout=DEADLINE_S) as store:
        yield store
        store.delete_prefix("")


STORM = """
import random, signal, sys, rallypoint, rallypoint.deadline

class Alarm(BaseException):
    pass

def on_alarm(*_):
    if armed:
        raise Alarm

armed = False
signal.signal(signal.SIGALRM, on_alarm)
store = rallypoint.connect(sys.argv[1], timeout=60)
session = store._backend._session
election, connection = session._election, session._connection
calls = {
    "add": lambda: store.add("n", 1),
    "queue_pop": lambda: store.queue_pop("q", timeout=0.001),
    "wait": lambda: store.wait(["never"], timeout=0.001),
}
chance = random.Random(int(sys.argv[2]))
alarms = acknowledged = ambiguous = 0
while alarms < 300:
    name, result = chance.choice(list(calls)), None
    try:
        armed = True
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(2e-5, 4e-4))
        result = calls[name]()
        armed = False
    except Alarm:
        alarms += 1
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
while election.reader is not None or connection.send_lock.locked() or connection.lock.locked():  # by the monitor
    assert not deadline.expired(), (election.reader, connection.send_lock, connection.lock)
print(acknowledged <= store.add("n", 0) <= acknowledged + ambiguous)
"""


@pytest.mark.parametrize("seed", [1, 2])
def test_a_storm_of_signals_leaves_no_lock_held_and_loses_no_add(
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
    """Raised by the profiler, in place of a signal handler."""


def is_free(store: rallypoint.Store) -> bool:
    """Return whether no thread reads for the store's session or holds one of its locks."""
    session = session_of(store)
    connection = session._connection
    return session._election.reader is None and not connection.send_lock.locked() and not connection.lock.locked()


def interrupted_at(point: int, call: Callable[[], object], store: rallypoint.Store) -> bool:
    """Run a call, and interrupt it at one point, counted from 1; return whether it got that far.

    Points are entries of Python functions and returns of C functions: there Python runs signal handlers. Locks must be
    free even while the exception exists, whose traceback keeps the frames of the call alive.
    """
    left = point

    def interrupt(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left
        left -= event in ("call", "c_return") and argument is not sys.setprofile
        if not left:
            sys.setprofile(None)
            raise Interrupted

    sys.setprofile(interrupt)
    try:
        call()
    except Interrupted:
        until(lambda: is_free(store), f"free after an interrupt at {point}")
        return True
    finally:
        sys.setprofile(None)
    return False


@pytest.mark.parametrize("read_by_another", [False, True])
def test_an_interrupt_before_a_request_has_its_number_withdraws_nothing(
    read_by_another: bool, server: rallypoint.Server, store: rallypoint.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread's request gets that number."""
    connection, withdrawn = connection_of(store), list[int]()
    ask = connection.core.ask

    def interrupted(*_: object) -> bytes:
        raise Interrupted

    with ThreadPoolExecutor(1) as pool:
        reading = [pool.submit(store.get, "late")] if read_by_another else []
        await_waiting(server, len(reading))
        monkeypatch.setattr(connection, "withdraw", withdrawn.append)
        monkeypatch.setattr(connection.core, "ask", interrupted)
        with pytest.raises(Interrupted):
            store.set("k", "v")
        assert withdrawn == [0] and connection.core.number not in connection.pending
        monkeypatch.setattr(connection.core, "ask", ask)
        store.set("late", "v")
        assert [one.result(DEADLINE_S) for one in reading] == [b"v"] * len(reading)


def watch_one(store: rallypoint.Store) -> None:
    """Receive a pushed event, which the reader confirms, and close the watch."""
    with store.watch("w") as changes:
        store.set("w", "v")
        assert changes.next(DEADLINE_S).key == "w"


def collect_later(store: rallypoint.Store) -> None:
    """Send a batch with a watch, and collect it after another call."""
    batch = Batch(store)
    count, watching = batch.add(store, "n", 1), batch.watch(store, "w")
    batch.send()
    store.set("w", "v")
    batch.wait()
    with watching.value as changes:
        assert count.value and changes.next(DEADLINE_S).key == "w"


CALLS: dict[str, Callable[[rallypoint.Store], object]] = {
    "add": lambda store: store.add("n", 1),
    "queue_pop": lambda store: store.queue_pop("q"),
    "wait": lambda store: store.wait(["there"]),
    "pipeline": lambda store: store._backend.pipeline([ops.Add(0, b"/n", 1), ops.Add(0, b"/n", 1)]),
    "watch": watch_one,
    "batch": collect_later,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_interrupted_at_any_point_leaves_no_lock_held(
    name: str, server: rallypoint.Server, store: rallypoint.Store
) -> None:
    store.set("there", "v")
    for point in count(1):
        store.queue_push("q", "item")
        with rallypoint.connect(server.url, timeout=DEADLINE_S) as new:  # without watches of calls interrupted before
            interrupted = interrupted_at(point, lambda: CALLS[name](new), new)
            assert new.add("quiet", 1) == point
        if not interrupted:
            break
    assert point > 10


def test_a_close_interrupted_at_any_point_leaves_no_lock_held_and_can_be_repeated(
    server: rallypoint.Server, store: rallypoint.Store
) -> None:
    for point in count(1):
        closing = rallypoint.connect(server.url, timeout=DEADLINE_S)
        interrupted = interrupted_at(point, closing.close, closing)
        closing.close()
        with pytest.raises(rallypoint.StoreClosed):
            closing.add("n", 1)
        if not interrupted:
            break
    assert point > 10
    until(lambda: len(server.statistics()["sessions"]) == 1, "only the session of the fixture's store is left")


# Pipelines


@pytest.mark.parametrize("moment", ["before", "after"])
def test_ctrl_c_before_a_pipeline_is_sent_cancels_all_of_it_and_nothing_else(
    moment: str, server: rallypoint.Server, store: rallypoint.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C arrives while its requests are being numbered. None was sent, so none may be repeated after a cut."""
    ask, asked = ClientProtocol.ask, []

    def interrupted(client: ClientProtocol, *arguments: Any, **more: Any) -> Any:
        asked.append(arguments)
        if len(asked) == 5 and moment == "before":
            raise KeyboardInterrupt
        request = ask(client, *arguments, **more)
        if len(asked) == 5:
            raise KeyboardInterrupt
        return request

    with CuttingProxy(server.port) as cutter, rallypoint.connect(f"tcp://127.0.0.1:{cutter.port}") as cut:
        cut.lease("mine", "v")
        monkeypatch.setattr(ClientProtocol, "ask", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cut._backend.pipeline([ops.Add(0, b"/n", 1) for _ in range(10)])
        monkeypatch.undo()
        assert len(asked) == 5 and cut.add("n", 1) == 1
        for total in range(2, 5):
            cutter.cut_all()
            assert cut.add("n", 1) == total
        assert store.get("mine") == b"v", "it is the same session"
        assert connection_of(cut).pending == {}


# Other threads


def test_calls_may_end_while_the_next_reader_is_elected(store: rallypoint.Store) -> None:
    """Each candidate ends, and removes itself from the pending calls, at the moment it is considered."""
    session = session_of(store)

    class Leaving(PendingCall):
        @property
        def waiting(self) -> bool:
            session._connection.pending.pop(self.number, None)
            return False

        @waiting.setter
        def waiting(self, value: bool) -> None:
            pass

        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

    session._connection.pending.update({number: Leaving(number) for number in range(1 << 40, (1 << 40) + 3)})
    session._election.wake_another()
    assert session._connection.pending == {}
    assert store.add("n", 1) == 1


def test_each_of_many_short_lived_calls_gets_its_own_reply(store: rallypoint.Store) -> None:
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
    assert connection_of(store).pending == {}


# Cancellation


def test_a_cancelled_pop_returns_an_item_that_was_in_flight(server: rallypoint.Server) -> None:
    """Two pops get their items at about the same time, and the end of the first cancels the second."""

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
