"""Servers in virtual time: what is due happens when the clock is advanced, each thing at its time, and not before."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.raw_peer import AMPLE_S

import rallypoint
from rallypoint import Rendezvous, WorkQueue
from rallypoint.testing import HANGS_UP, UP, CuttingProxy, InProcessServer, VirtualClock
from rallypoint.testing.virtual_clock import TimedLoop

HOUR_S = 3600.0


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def server(clock: VirtualClock) -> Iterator[InProcessServer]:
    with InProcessServer(clock=clock) as server:
        yield server


@pytest.fixture
def store(server: InProcessServer) -> Iterator[rallypoint.Store]:
    with rallypoint.connect(server.url, timeout=2 * HOUR_S) as store:
        yield store


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_the_timeout_of_a_wait_passes_when_the_clock_is_advanced(
    clock: VirtualClock, server: InProcessServer, store: rallypoint.Store, pool: ThreadPoolExecutor
) -> None:
    waiting = pool.submit(store.get, "never", timeout=HOUR_S)
    server.wait_for_waiters(1)
    clock.advance(HOUR_S - 1)
    assert server.statistics()["waiting"] == 1
    clock.advance(1.001)
    with pytest.raises(rallypoint.StoreTimeout, match="timed out after 3600 s"):
        waiting.result(AMPLE_S)


def test_a_lease_without_heartbeats_expires(
    clock: VirtualClock, server: InProcessServer, store: rallypoint.Store
) -> None:
    with CuttingProxy(server.port) as proxy, rallypoint.connect(proxy.url, timeout=AMPLE_S) as away:
        away.lease("mine", "v", heartbeat=HOUR_S)
        proxy.hold(UP)
        clock.advance(HOUR_S - 1)
        assert store.check(["mine"])
        clock.advance(1)
        assert not store.check(["mine"])
        proxy.release()


def test_a_session_ends_with_its_grace_period(
    clock: VirtualClock, server: InProcessServer, store: rallypoint.Store
) -> None:
    queue = WorkQueue(store, "q")
    queue.put("item")
    with CuttingProxy(server.port) as proxy, rallypoint.connect(proxy.url, timeout=AMPLE_S) as away:
        WorkQueue(away, "q").take(AMPLE_S)
        proxy.go_down(HANGS_UP)
        server.wait_until(lambda statistics: not all(one["here"] for one in statistics["sessions"]))
        clock.advance(59)
        assert queue.status().taken == 1
        clock.advance(1)
        assert queue.take(AMPLE_S).deliveries == 2
        proxy.come_back()
        with pytest.raises(rallypoint.SessionLost):
            away.set("k", "v")


def test_the_last_call_of_a_rendezvous_ends(
    clock: VirtualClock, server: InProcessServer, pool: ThreadPoolExecutor
) -> None:
    def join(node: str) -> int:
        with (
            rallypoint.connect(server.url, timeout=AMPLE_S) as store,
            Rendezvous(store, "run", 2, 4, node=node, last_call=HOUR_S) as rendezvous,
        ):
            return rendezvous.join(AMPLE_S).world_size

    joining = [pool.submit(join, node) for node in "ab"]
    server.wait_for_waiters(2)
    clock.advance(HOUR_S - 1)
    server.wait_for_waiters(2)  # they ask again from time to time
    clock.advance(1)
    assert [one.result(AMPLE_S) for one in joining] == [2, 2]


def test_one_clock_drives_several_servers(clock: VirtualClock, pool: ThreadPoolExecutor) -> None:
    with InProcessServer(clock=clock) as one, InProcessServer(clock=clock, durable=True) as other:
        stores = [rallypoint.connect(server.url, timeout=2 * HOUR_S) for server in (one, other)]
        waiting = [pool.submit(store.get, "never", timeout=HOUR_S) for store in stores]
        for server in (one, other):
            server.wait_for_waiters(1)
        clock.advance(HOUR_S)
        for call in waiting:
            with pytest.raises(rallypoint.StoreTimeout):
                call.result(AMPLE_S)
        for store in stores:
            store.close()


def test_time_goes_on_over_a_restart(clock: VirtualClock, pool: ThreadPoolExecutor) -> None:
    with (
        InProcessServer(clock=clock, durable=True) as server,
        rallypoint.connect(server.url, timeout=2 * HOUR_S) as store,
    ):
        waiting = pool.submit(store.get, "never", timeout=HOUR_S)
        server.wait_for_waiters(1)
        server.kill()
        clock.advance(HOUR_S)  # nobody's time passes
        server.start()
        server.wait_for_waiters(1)
        clock.advance(HOUR_S)
        with pytest.raises(rallypoint.StoreTimeout):
            waiting.result(AMPLE_S)


def test_time_stands_still_by_itself(clock: VirtualClock, server: InProcessServer, store: rallypoint.Store) -> None:
    before = clock.now()
    for count in range(200):
        assert store.add("n", 1) == count + 1
    assert clock.now() == before
    clock.advance(0)
    clock.advance(0.25)
    assert clock.now() == before + 0.25


def test_durations_are_checked(clock: VirtualClock) -> None:
    for wrong in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="duration"):
            clock.advance(wrong)
    with pytest.raises(TypeError, match="duration must be seconds"):
        clock.advance("1")  # type: ignore[arg-type]


def test_a_busy_server_is_not_waited_for_for_ever(
    clock: VirtualClock, server: InProcessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rallypoint.testing.virtual_clock.ADVANCE_S", 0.01)
    busy = True
    server.wait_until(lambda statistics: True)

    def keep_busy(loop: asyncio.AbstractEventLoop) -> None:
        if busy:
            loop.call_soon(keep_busy, loop)

    assert server._run is not None
    loop = server._run._loop
    loop.call_soon_threadsafe(keep_busy, loop)
    with pytest.raises(TimeoutError, match="still busy"):
        clock.advance(1)
    busy = False
    monkeypatch.undo()
    clock.advance(1)


def test_timers_run_in_order_at_their_time(clock: VirtualClock, pool: ThreadPoolExecutor) -> None:
    """Also timers that other timers start, as the slices of a long wait are."""
    loop, ran = TimedLoop(clock), []
    began_at = clock.now()

    def run(name: str, again_s: float = 0.0) -> None:
        ran.append((round(loop.time() - began_at, 6), name))
        if again_s:
            loop.call_later(again_s, run, name, again_s)

    loop.call_soon(run, "now")
    loop.call_later(7.5, run, "once")
    loop.call_later(3, run, "each", 3.0)
    done = pool.submit(loop.run_forever)
    clock.advance(10)
    assert ran == [(0, "now"), (3, "each"), (6, "each"), (7.5, "once"), (9, "each")]
    clock.advance(2)
    assert ran[-1] == (12, "each")
    loop.call_soon_threadsafe(loop.stop)
    done.result(AMPLE_S)
    loop.close()
    clock.advance(10)  # it does not wait for a closed loop
