"""Deadlines: which keys are due, in which order, and what is left behind; and the server's clock that drives them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Hashable
from itertools import pairwise

import pytest
from tests.server.fake_log import FakeLog, on_log
from tests.server.peers import Ours, settle
from tests.wire import AMPLE_S

from rallypoint.core import ops
from rallypoint.core.deadlines import NEVER, Deadlines
from rallypoint.core.records import Status
from rallypoint.server import clock
from rallypoint.server.clock import RETURN_S
from rallypoint.server.server import StoreServer
from rallypoint.server.settings import Settings

# The deadlines themselves


def test_what_is_due_comes_out_once_the_earliest_first() -> None:
    deadlines = Deadlines()
    for key, at in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
        deadlines.set(key, at)
    assert deadlines.earliest == 1.0 and len(deadlines) == 3
    assert deadlines.due(0.9) == []
    assert deadlines.due(2.0) == ["a", "b"], "one that is due now is due"
    assert deadlines.earliest == 3.0 and len(deadlines) == 1 and "a" not in deadlines and "c" in deadlines
    assert deadlines.due(9.0) == ["c"] and deadlines.due(9.0) == []
    assert deadlines.earliest == NEVER and not deadlines


def test_of_one_moment_the_first_that_was_set_comes_first() -> None:
    deadlines = Deadlines()
    for key in ("b", ("tuple", 1), "a", 7):
        deadlines.set(key, 1.0)
    assert deadlines.due(1.0) == ["b", ("tuple", 1), "a", 7]


@pytest.mark.parametrize("later", [0.5, 1.0, 2.0])
def test_a_deadline_that_is_moved_is_due_once_when_it_is_now(later: float) -> None:
    deadlines = Deadlines()
    deadlines.set("k", 1.0)
    deadlines.set("k", later)
    assert len(deadlines) == 1
    assert deadlines.due(later - 0.1) == []
    assert deadlines.due(later) == ["k"]
    assert deadlines.due(9.0) == [] and deadlines.earliest == NEVER


def test_a_deadline_that_is_dropped_is_never_due() -> None:
    deadlines = Deadlines()
    deadlines.set("a", 1.0)
    deadlines.set("b", 2.0)
    deadlines.drop("a")
    deadlines.drop("a")
    deadlines.drop("never set")
    assert "a" not in deadlines and len(deadlines) == 1
    assert deadlines.earliest <= 2.0, "it may be early, and must not be late"
    assert deadlines.due(1.5) == [] and deadlines.earliest == 2.0
    deadlines.set("a", 3.0)
    assert deadlines.due(9.0) == ["b", "a"]


def test_one_that_is_dropped_and_set_again_for_the_same_moment_is_due_once() -> None:
    deadlines = Deadlines()
    for _ in range(3):
        deadlines.set("k", 1.0)
        deadlines.drop("k")
    deadlines.set("k", 1.0)
    assert deadlines.due(1.0) == ["k"] and deadlines.due(1.0) == []


def test_heartbeats_leave_nothing_behind() -> None:
    deadlines = Deadlines()
    for beat in range(10_000):
        for key in range(5):
            deadlines.set(key, beat + 5.0)
        assert len(deadlines._heap) <= 2 * 5 + 64 + 1
    for number in range(10_000):
        deadlines.set("wait", 1e9 + number)
        deadlines.drop("wait")
        assert len(deadlines._heap) <= 2 * 6 + 64 + 1
    assert len(deadlines) == 5 and deadlines.due(1e10) == [0, 1, 2, 3, 4]


def test_deadlines_come_out_so_many_at_a_time() -> None:
    deadlines = Deadlines()
    for key in range(10):
        deadlines.set(key, 1.0)
    assert [deadlines.due(1.0, 4) for _ in range(4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], []]
    assert deadlines.earliest == NEVER


def test_all_deadlines_can_be_put_off() -> None:
    deadlines = Deadlines()
    for key in range(100):
        deadlines.set(key, float(key))
        deadlines.set(key, key + 10.0)
    deadlines.drop(5)
    deadlines.delay(100.0)
    assert deadlines.earliest <= 110.0 and deadlines.due(109.9) == []
    assert deadlines.due(113.0) == [0, 1, 2, 3]
    assert deadlines.due(1000.0) == [4, *range(6, 100)]
    deadlines.delay(1.0)
    assert deadlines.earliest == NEVER


@pytest.mark.parametrize("seed", range(20))
def test_as_a_plain_dict_would_have_it(seed: int) -> None:
    chance, deadlines, model = random.Random(seed), Deadlines(), dict[Hashable, float]()
    now = 0.0
    for _ in range(2000):
        key = chance.randrange(50)
        what = chance.random()
        if what < 0.6:
            model[key] = now + chance.choice((0.0, 1.0, 1.0, chance.uniform(0, 20)))
            deadlines.set(key, model[key])
        elif what < 0.8:
            model.pop(key, None)
            deadlines.drop(key)
        else:
            now += chance.uniform(0, 3)
            due = deadlines.due(now)
            assert len(set(due)) == len(due) and set(due) == {key for key, at in model.items() if at <= now}
            assert [model[key] for key in due] == sorted(model[key] for key in due)
            for one in due:
                del model[one]
        assert len(deadlines) == len(model) and deadlines.earliest <= min(model.values(), default=NEVER)
        assert (key in deadlines) == (key in model)


# The server's clock

LONG_S = 1000.0


async def ours(server: StoreServer, session: bytes = b"") -> Ours:
    peer = Ours(server)
    await peer.greets(session)
    return peer


@on_log
async def test_what_is_over_leaves_no_deadline(server: StoreServer, log: FakeLog) -> None:
    peer, other = await ours(server), await ours(server)
    peer.asks(
        ops.Get(1, b"/answered", LONG_S),
        ops.Take(2, b"/dropped", LONG_S),
        ops.Lease(3, b"/unleased", b"v", LONG_S),
        ops.Arrive(4, b"/bar", 2, LONG_S),
    )
    await settle()
    assert len(server.clock.deadlines) == 4
    other.asks(ops.Set(1, b"/answered", b"v"), ops.Arrive(2, b"/bar", 2, LONG_S))
    peer.asks(ops.Drop(5, 2), ops.Unlease(6, b"/unleased"))
    await settle()
    assert not server.clock.deadlines


@on_log(grace_s=0.0)
async def test_a_session_that_ends_leaves_no_deadline(server: StoreServer, log: FakeLog) -> None:
    for turn in range(10):
        peer = await ours(server)
        peer.asks(
            ops.Get(1, b"/never", LONG_S),
            ops.Take(2, b"/q", LONG_S),
            ops.Lease(3, b"/leased", b"v", LONG_S),
            ops.Wait(4, [b"/never", b"/nor this"], LONG_S),
        )
        await settle()
        assert len(server.clock.deadlines) == 4
        if turn % 2:
            peer.asks(ops.Bye(5))
            await settle()
        peer.hangs_up()
        while server.state.sessions:
            await asyncio.sleep(0)
        assert not server.clock.deadlines


@on_log
async def test_a_wait_that_times_out_is_logged_unless_it_reads(server: StoreServer, log: FakeLog) -> None:
    peer = await ours(server)
    before = len(log.records)
    peer.asks(ops.Get(1, b"/never", 0.001))
    assert await peer.reads() == [1, Status.TIMED_OUT, [b"/never"]]
    assert len(log.records) == before
    peer.asks(ops.Arrive(2, b"/bar", 2, 0.001))
    assert await peer.reads() == [2, Status.TIMED_OUT, [b"/bar"]]
    assert len(log.records) == before + 2, "the arrival, and that it was taken back"
    assert not server.clock.deadlines


@on_log
async def test_a_request_that_comes_again_keeps_its_deadline(server: StoreServer, log: FakeLog) -> None:
    """With a new one each time, it would wait for as long as its client is cut off now and then."""
    peer = await ours(server)
    request = ops.Arrive(1, b"/bar", 2, 0.5)
    ends_at = asyncio.get_running_loop().time() + AMPLE_S
    while not peer.pending:
        peer.asks(request)
        await settle()
        if not peer.pending:
            peer.hangs_up()
            await settle()
            peer = await ours(server, peer.session)
        assert asyncio.get_running_loop().time() < ends_at
    assert (await peer.reads())[:2] == [1, Status.TIMED_OUT]


@on_log
async def test_a_lease_whose_heartbeat_stops_is_given_up(server: StoreServer, log: FakeLog) -> None:
    beating, still = await ours(server), await ours(server)
    for peer, key in ((beating, b"/beats"), (still, b"/still")):
        await peer.asked(ops.Lease(1, key, b"v", 0.5))
    await beating.asked(ops.Lease(2, b"/long", b"v", LONG_S))

    async def until_gone(key: bytes, number: int, beats: bool) -> int:
        while await beating.asked(ops.Check(number, [key])):
            number += 1
            if beats:
                beating.asks(ops.Beat(0))
            await settle()
        return number + 1

    number = await until_gone(b"/still", 3, beats=True)
    assert await beating.asked(ops.Check(number, [b"/beats", b"/long"])) is True
    number = await until_gone(b"/beats", number + 1, beats=False)
    assert await beating.asked(ops.Check(number, [b"/long"])) is True
    assert len(server.clock.deadlines) == 1


class ShiftedTime:
    """A clock that can be moved, in the place of the server's."""

    def __init__(self) -> None:
        self.by = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.by

    def __enter__(self) -> ShiftedTime:
        self._real, clock.time = clock.time, self  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        clock.time = self._real


@on_log(grace_s=0.5)
async def test_a_pause_of_the_server_is_nobodys_fault(server: StoreServer, log: FakeLog) -> None:
    """Stopped for a while, it has heard no heartbeat; the clients may have sent them all."""
    with ShiftedTime() as shifted:
        peer, away = await ours(server), await ours(server)
        await peer.asked(ops.Lease(1, b"/leased", b"v", 0.5))
        await away.asked(ops.Lease(1, b"/of another", b"v", 0.0))
        away.hangs_up()
        await settle()
        for pause in range(20):
            server.clock.now()
            shifted.by += 100.0
            server.clock._tick()
            peer.asks(ops.Beat(0))
            await settle()
            assert await peer.asked(ops.Check(2 + pause, [b"/leased"])) is True, "its heartbeat was on its way"
            assert await peer.asked(ops.Check(100 + pause, [b"/of another"])) is True, "so may its client be"
        while await peer.asked(ops.Check(1000, [b"/leased"])) or await peer.asked(ops.Check(1001, [b"/of another"])):
            await settle()


@on_log
async def test_a_heartbeat_from_before_a_pause_counts(server: StoreServer, log: FakeLog) -> None:
    with ShiftedTime() as shifted:
        peer = await ours(server)
        await peer.asked(ops.Lease(1, b"/leased", b"v", 10.0))
        shifted.by += 8.0
        peer.asks(ops.Beat(0))
        shifted.by += 1000.0
        server.clock._tick()
        shifted.by += 2.0 + clock.LATE_S / 2
        server.clock._tick()
        await settle()
        assert await peer.asked(ops.Check(2, [b"/leased"])) is True


@on_log
async def test_after_a_pause_time_goes_on_where_it_was(server: StoreServer, log: FakeLog) -> None:
    with ShiftedTime() as shifted:
        peer = await ours(server)
        peer.asks(ops.Get(1, b"/never", 50.0))
        await settle()
        before = server.clock.deadlines.earliest
        server.clock.now()
        shifted.by += 1000.0
        server.clock.now()
        assert before + 999.0 < server.clock.deadlines.earliest < before + 1001.0
        assert not peer.pending
        shifted.by += 0.9 * clock.LATE_S
        server.clock.now()
        assert server.clock.deadlines.earliest < before + 1001.0, "that is not a pause"


@on_log
async def test_a_heartbeat_costs_the_same_however_many_leases_it_keeps(server: StoreServer, log: FakeLog) -> None:
    peer = await ours(server)
    for number in range(1, 2001):
        peer.asks(ops.Lease(number, b"/%d" % number, b"v", LONG_S))
        await peer.reads()
    before = server.clock.deadlines._arrivals
    for _ in range(1000):
        peer.asks(ops.Beat(0))
    assert server.clock.deadlines._arrivals == before, "it moves no deadline"


@on_log
async def test_of_many_leases_that_end_at_once_a_few_end_in_a_turn_of_the_loop(
    server: StoreServer, log: FakeLog
) -> None:
    with ShiftedTime() as shifted:
        count = 20 * clock.MAX_DUE
        peer, engine = await ours(server), server.state.namespaces[0].engine
        for first in range(1, count, 1000):
            peer.asks(*(ops.Lease(number, b"/%d" % number, b"v", 10.0) for number in range(first, first + 1000)))
            for _ in range(1000):
                await peer.reads()
        left = [len(server.clock.deadlines)]
        shifted.by += 10.0
        server.clock._ticks_at += 10.0  # the process ran meanwhile
        server.clock._tick()
        while left[-1]:
            left.append(len(server.clock.deadlines))
            await asyncio.sleep(0)
        assert max(before - after for before, after in pairwise(left)) <= 2 * clock.MAX_DUE
        while engine.execute(ops.Count(0, b"/")):
            await asyncio.sleep(0)


@on_log
async def test_a_lease_that_was_written_over_is_not_kept_by_heartbeats(server: StoreServer, log: FakeLog) -> None:
    peer, other = await ours(server), await ours(server)
    await peer.asked(ops.Lease(1, b"/k", b"v", 0.01))
    await other.asked(ops.Set(1, b"/k", b"of another"))
    while server.clock.deadlines:
        peer.asks(ops.Beat(0))
        await settle()
    assert await other.asked(ops.Get(2, b"/k", 0.0)) == [b"of another"]


def test_clients_have_time_to_come_back_after_a_restart() -> None:
    async def main() -> None:
        log = FakeLog()
        first = StoreServer(Settings(grace_s=0.0), log)
        await first.open([])
        peer = await ours(first)
        await peer.asked(ops.Lease(1, b"/leased", b"v", 0.1))
        second = StoreServer(Settings(grace_s=0.0), FakeLog(log.records))
        restarted_at = time.monotonic()
        await second.open([])
        assert second.clock.deadlines.earliest >= restarted_at + RETURN_S
        assert len(second.clock.deadlines) == 2

    asyncio.run(main())
