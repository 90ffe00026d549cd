"""A server that announces a recovery time, is killed, and returns with its sessions, without them, or never."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise

import pytest
from tests.outage_log import DEADLINE_S, LogRecorder, told, until
from tests.recovering_server import RecoveringServer

import rallypoint
from rallypoint import Lock, Store
from rallypoint.client import outage
from rallypoint.client.routing import route
from rallypoint.core import ops
from rallypoint.core.machines.machine import Disconnected
from rallypoint.recipes.hosting import shared_object

__all__ = ["told"]

BRIEF_S = 0.1
"""A grace period shorter than every outage here."""


@pytest.fixture
def server() -> Iterator[RecoveringServer]:
    with RecoveringServer(BRIEF_S, DEADLINE_S) as server:
        yield server


def kill(server: RecoveringServer, told: LogRecorder) -> None:
    """Kill the server, and return when its client has logged that, which is long after the grace period."""
    before = told.count("is down")
    server.kill()
    told.until("is down", before + 1)


def test_a_session_survives_outages_shorter_than_the_recovery_time(
    server: RecoveringServer, store: Store, told: LogRecorder, pool: ThreadPoolExecutor
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


def test_without_a_recovery_time_the_session_ends_with_the_grace_period(told: LogRecorder) -> None:
    with RecoveringServer(BRIEF_S, 0.0) as server, rallypoint.connect(server.url, timeout=DEADLINE_S) as store:
        server.kill()
        with pytest.raises(rallypoint.SessionLost, match=f"cut for {BRIEF_S:g} s"):
            store.get("k")
    assert told.lines == []


def test_a_session_is_lost_when_the_server_is_down_for_longer_than_its_recovery_time() -> None:
    with RecoveringServer(BRIEF_S, 0.5) as server, rallypoint.connect(server.url, timeout=DEADLINE_S) as store:
        server.kill()
        with pytest.raises(rallypoint.SessionLost, match=r"cut for 0\.5 s.*refused"):
            store.get("k")
        with pytest.raises(rallypoint.SessionLost):
            store.set("k", "v")


def test_a_restarted_server_may_change_the_recovery_time(told: LogRecorder) -> None:
    with RecoveringServer(BRIEF_S, DEADLINE_S) as server, rallypoint.connect(server.url, timeout=DEADLINE_S) as store:
        server.recovers_within(0.5)
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
def test_calls_fail_at_once_when_the_server_returns_without_the_session(
    identity: bytes,
    error: type[rallypoint.RallypointError],
    words: str,
    server: RecoveringServer,
    store: Store,
    told: LogRecorder,
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
    """Kill the server as soon as it has the request again, this many times, or until the client gives up."""
    for again in range(2, times + 2):
        server.kill()
        server.start()
        until(lambda again=again: waiting.done() or server.count(ops.Get) == again, "it waits again")  # type: ignore[misc]


def test_calls_survive_a_crash_loop(
    server: RecoveringServer, store: Store, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route, "IN_A_ROW_S", DEADLINE_S)
    waiting = pool.submit(store.get, "late")
    until(lambda: server.count(ops.Get) == 1, "it waits")
    cut_in_a_row(server, waiting, 2 * route.MAX_CUTS)
    with rallypoint.connect(server.url, timeout=DEADLINE_S) as other:
        other.set("late", "v")
    assert waiting.result(DEADLINE_S) == b"v"


def test_a_crash_loop_without_a_recovery_time_loses_the_connection(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route, "IN_A_ROW_S", DEADLINE_S)
    with RecoveringServer(DEADLINE_S, 0.0) as server, rallypoint.connect(server.url, timeout=DEADLINE_S) as store:
        waiting = pool.submit(store.get, "late")
        until(lambda: server.count(ops.Get) == 1, "it waits")
        cut_in_a_row(server, waiting, route.MAX_CUTS + 1)
        with pytest.raises(rallypoint.ConnectionLost, match=f"cut {route.MAX_CUTS} times in a row"):
            waiting.result(DEADLINE_S)


# Repeated requests

TIMED: dict[str, tuple[type[ops.Op], Callable[[Store], object], Callable[[Store], object]]] = {
    "get": (ops.Get, lambda s: s.get("k"), lambda s: s.set("k", "v")),
    "wait": (ops.Wait, lambda s: s.wait(["k"]), lambda s: s.set("k", "v")),
    "multi_get": (ops.MultiGet, lambda s: s.multi_get(["k", "l"]), lambda s: s.multi_set(["k", "l"], ["", ""])),
    "queue_pop": (ops.BlockingPop, lambda s: s.queue_pop("q"), lambda s: s.queue_push("q", "v")),
    "barrier": (ops.Arrive, lambda s: s.barrier("b", 2), lambda s: s.barrier("b", 2)),
}


@pytest.mark.parametrize("name", TIMED)
def test_a_wait_is_repeated_with_its_remaining_time(
    name: str, server: RecoveringServer, store: Store, told: LogRecorder, pool: ThreadPoolExecutor
) -> None:
    kind, call, release = TIMED[name]
    waiting = pool.submit(call, store)
    until(lambda: server.count(kind) == 1, "it waits")
    for again in (2, 3):
        kill(server, told)
        server.start()
        until(lambda again=again: server.count(kind) == again, "it is repeated")  # type: ignore[misc]
    with rallypoint.connect(server.url, timeout=DEADLINE_S) as other:
        asked = server.of(kind)
        release(other)
    waiting.result(DEADLINE_S)
    assert len({request.number for request in asked}) == 1
    times = [request.timeout_s for request in asked]
    assert times[0] <= DEADLINE_S
    assert all(later <= earlier - outage.DOWN_S for earlier, later in pairwise(times)), times


def test_an_expired_wait_is_repeated_with_timeout_zero(
    server: RecoveringServer, store: Store, told: LogRecorder, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call on a shared object is a series of waits; the one in progress when the server died is not abandoned."""
    monkeypatch.setattr(shared_object, "PROGRESS_S", 0.5)
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
        until(lambda: server.count(ops.Act) > 2, "it is repeated")
        assert holder.release()
        assert waiting.result(DEADLINE_S) == lock.fence > 0
    again = [request for request in server.of(ops.Act)[2:] if request.number == step.number]
    assert [(request.call, request.timeout_s) for request in again] == [(step.call, 0.0)]


def test_requests_executed_before_the_server_died_are_not_executed_again(
    server: RecoveringServer, store: Store, told: LogRecorder
) -> None:
    for number in range(1, 6):
        assert store.add("n", 1) == number
        store.queue_push("q", str(number))
        kill(server, told)
        server.start()
    assert [store.queue_pop("q") for _ in range(5)] == [b"%d" % number for number in range(1, 6)]
    assert store.add("n", 0) == 5


def test_a_lease_holder_sends_a_heartbeat_first_after_a_reconnect(
    server: RecoveringServer, store: Store, told: LogRecorder, pool: ThreadPoolExecutor
) -> None:
    store.lease("mine", "v", heartbeat=DEADLINE_S)
    waiting = pool.submit(store.get, "late")
    until(lambda: server.count(ops.Get) == 1, "it waits")
    kill(server, told)
    said = len(server.requests)
    server.start()
    until(lambda: server.count(ops.Get) == 2, "it waits again")
    assert isinstance(server.requests[said], ops.SessionHeartbeat)
    with rallypoint.connect(server.url, timeout=DEADLINE_S) as other:
        other.set("late", "v")
    assert waiting.result(DEADLINE_S) == b"v"


def test_a_memory_server_has_no_recovery_time() -> None:
    with rallypoint.Server(grace=0.2) as server, rallypoint.connect(server.url, timeout=DEADLINE_S) as store:
        server.close()
        with pytest.raises(rallypoint.SessionLost, match=r"cut for 0\.2 s"):
            store.get("k")
