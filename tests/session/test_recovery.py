"""A server that says how long it may be away, is killed, and comes back with its sessions; or without, or never."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise

import pytest
from tests.outages import DEADLINE_S, Told, told, until
from tests.recovering import RecoveringServer

import rallypoint
from rallypoint import Lock, Store
from rallypoint.core import ops
from rallypoint.core.machine import Disconnected
from rallypoint.recipes import hosting
from rallypoint.store import outage, route

__all__ = ["told"]

BRIEF_S = 0.1
"""A grace that every outage here outlasts."""


@pytest.fixture
def server() -> Iterator[RecoveringServer]:
    with RecoveringServer(BRIEF_S, DEADLINE_S) as server:
        yield server


@pytest.fixture
def store(server: RecoveringServer) -> Iterator[Store]:
    with rallypoint.connect(server.url, timeout=DEADLINE_S) as store:
        yield store


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(10) as pool:
        yield pool


def kill(server: RecoveringServer, told: Told) -> None:
    """Kill the server, and return when its client has found it down, which is long after the grace."""
    before = told.count("is down")
    server.kill()
    told.until("is down", before + 1)


def test_a_session_outlives_the_server_for_as_long_as_that_says(
    server: RecoveringServer, store: Store, told: Told, pool: ThreadPoolExecutor
) -> None:
    store.lease("mine", "v")
    assert store.add("n", 1) == 1
    waiting = pool.submit(store.get, "late")
    until(lambda: server.count(ops.Get) == 1, "it waits")
    for _ in range(3):
        kill(server, told)
        added = pool.submit(store.add, "n", 1)
        server.start()
        assert added.result(DEADLINE_S) > 1
    with rallypoint.connect(server.url, timeout=DEADLINE_S) as other:
        assert other.get("mine") == b"v"
        other.set("late", "v")
        assert other.get("n") == b"4"
    assert waiting.result(DEADLINE_S) == b"v"


def test_without_such_a_promise_the_grace_is_all(told: Told) -> None:
    with RecoveringServer(BRIEF_S, 0.0) as server, rallypoint.connect(server.url, timeout=DEADLINE_S) as store:
        server.kill()
        with pytest.raises(rallypoint.SessionLost, match=f"cut for {BRIEF_S:g} s"):
            store.get("k")
    assert told.lines == []


def test_a_session_is_lost_when_the_server_is_away_for_longer_than_it_said() -> None:
    with RecoveringServer(BRIEF_S, 0.5) as server, rallypoint.connect(server.url, timeout=DEADLINE_S) as store:
        server.kill()
        with pytest.raises(rallypoint.SessionLost, match=r"cut for 0\.5 s.*refused"):
            store.get("k")
        with pytest.raises(rallypoint.SessionLost):
            store.set("k", "v")


def test_a_server_that_comes_back_may_promise_something_else(told: Told) -> None:
    with RecoveringServer(BRIEF_S, DEADLINE_S) as server, rallypoint.connect(server.url, timeout=DEADLINE_S) as store:
        server._recovery_s = 0.5
        kill(server, told)
        server.start()
        assert store.add("n", 1) == 1
        server.kill()
        with pytest.raises(rallypoint.SessionLost, match=r"cut for 0\.5 s"):
            store.get("k")


@pytest.mark.parametrize(
    ("identity", "error", "words"),
    [(b"identity", rallypoint.SessionLost, "unknown session"), (b"another", rallypoint.ServerRestarted, "not the one")],
)
def test_a_server_that_is_back_without_the_session_says_so_at_once(
    identity: bytes,
    error: type[rallypoint.RallypointError],
    words: str,
    server: RecoveringServer,
    store: Store,
    told: Told,
    pool: ThreadPoolExecutor,
) -> None:
    waiting = pool.submit(store.get, "late")
    until(lambda: server.count(ops.Get) == 1, "it waits")
    kill(server, told)
    server.forget(identity)
    server.start()
    with pytest.raises(error, match=words):
        waiting.result(DEADLINE_S)
    with pytest.raises(error):
        store.set("k", "v")


def cut_in_a_row(server: RecoveringServer, waiting: Future[bytes], times: int) -> None:
    """Kill the server as soon as it has the request again, so many times, or until the client gives up."""
    for again in range(2, times + 2):
        server.kill()
        server.start()
        until(lambda again=again: waiting.done() or server.count(ops.Get) == again, "it waits again")  # type: ignore[misc]


def test_a_crash_loop_is_outlasted(
    server: RecoveringServer, store: Store, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route, "IN_A_ROW_S", DEADLINE_S)
    waiting = pool.submit(store.get, "late")
    until(lambda: server.count(ops.Get) == 1, "it waits")
    cut_in_a_row(server, waiting, 2 * route.MENDS)
    with rallypoint.connect(server.url, timeout=DEADLINE_S) as other:
        other.set("late", "v")
    assert waiting.result(DEADLINE_S) == b"v"


def test_a_server_that_does_not_recover_is_given_up(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route, "IN_A_ROW_S", DEADLINE_S)
    with RecoveringServer(DEADLINE_S, 0.0) as server, rallypoint.connect(server.url, timeout=DEADLINE_S) as store:
        waiting = pool.submit(store.get, "late")
        until(lambda: server.count(ops.Get) == 1, "it waits")
        cut_in_a_row(server, waiting, route.MENDS + 1)
        with pytest.raises(rallypoint.ConnectionLost, match=f"cut {route.MENDS} times in a row"):
            waiting.result(DEADLINE_S)


# What is said again

TIMED: dict[str, tuple[type[ops.Op], Callable[[Store], object], Callable[[Store], object]]] = {
    "get": (ops.Get, lambda s: s.get("k"), lambda s: s.set("k", "v")),
    "wait": (ops.Wait, lambda s: s.wait(["k"]), lambda s: s.set("k", "v")),
    "multi_get": (ops.MultiGet, lambda s: s.multi_get(["k", "l"]), lambda s: s.multi_set(["k", "l"], ["", ""])),
    "queue_pop": (ops.Take, lambda s: s.queue_pop("q"), lambda s: s.queue_push("q", "v")),
    "barrier": (ops.Arrive, lambda s: s.barrier("b", 2), lambda s: s.barrier("b", 2)),
}


@pytest.mark.parametrize("name", TIMED)
def test_a_wait_is_said_again_with_the_time_that_is_left(
    name: str, server: RecoveringServer, store: Store, told: Told, pool: ThreadPoolExecutor
) -> None:
    kind, call, release = TIMED[name]
    waiting = pool.submit(call, store)
    until(lambda: server.count(kind) == 1, "it waits")
    for again in (2, 3):
        kill(server, told)
        server.start()
        until(lambda again=again: server.count(kind) == again, "it is said again")  # type: ignore[misc]
    with rallypoint.connect(server.url, timeout=DEADLINE_S) as other:
        asked = server.of(kind)
        release(other)
    waiting.result(DEADLINE_S)
    assert len({request.number for request in asked}) == 1
    times = [request.timeout_s for request in asked]
    assert times[0] <= DEADLINE_S
    assert all(later <= earlier - outage.DOWN_S for earlier, later in pairwise(times)), times


def test_a_wait_whose_time_is_over_is_said_again_with_none(
    server: RecoveringServer, store: Store, told: Told, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call on a shared object waits step by step; the step that was open when the server died is not given up."""
    monkeypatch.setattr(hosting, "PROGRESS_S", 0.5)
    with rallypoint.connect(server.url, timeout=DEADLINE_S) as other:
        holder = Lock(other, "l")
        holder.acquire()
        waits_on = threading.Event()
        lock = Lock(store, "l", progress=lambda waiting: waits_on.set() if isinstance(waiting, Disconnected) else None)
        waiting = pool.submit(lock.acquire)
        until(lambda: server.count(ops.Act) == 2, "it waits")
        step = server.of(ops.Act)[1]
        kill(server, told)
        assert waits_on.wait(DEADLINE_S)
        server.start()
        until(lambda: server.count(ops.Act) > 2, "it is said again")
        assert holder.release()
        assert waiting.result(DEADLINE_S) == lock.fence > 0
    again = [request for request in server.of(ops.Act)[2:] if request.number == step.number]
    assert [(request.call, request.timeout_s) for request in again] == [(step.call, 0.0)]


def test_what_was_carried_out_before_the_server_died_is_not_carried_out_again(
    server: RecoveringServer, store: Store, told: Told
) -> None:
    for number in range(1, 6):
        assert store.add("n", 1) == number
        store.queue_push("q", str(number))
        kill(server, told)
        server.start()
    assert [store.queue_pop("q") for _ in range(5)] == [b"%d" % number for number in range(1, 6)]
    assert store.add("n", 0) == 5


def test_leases_are_kept_alive_before_anything_else_is_said(
    server: RecoveringServer, store: Store, told: Told, pool: ThreadPoolExecutor
) -> None:
    store.lease("mine", "v", heartbeat=DEADLINE_S)
    waiting = pool.submit(store.get, "late")
    until(lambda: server.count(ops.Get) == 1, "it waits")
    kill(server, told)
    said = len(server.requests)
    server.start()
    until(lambda: server.count(ops.Get) == 2, "it waits again")
    assert isinstance(server.requests[said], ops.Beat)
    with rallypoint.connect(server.url, timeout=DEADLINE_S) as other:
        other.set("late", "v")
    assert waiting.result(DEADLINE_S) == b"v"


def test_an_old_server_promises_nothing() -> None:
    with rallypoint.Server(grace=0.2) as server, rallypoint.connect(server.url, timeout=DEADLINE_S) as store:
        server.close()
        with pytest.raises(rallypoint.SessionLost, match=r"cut for 0\.2 s"):
            store.get("k")
