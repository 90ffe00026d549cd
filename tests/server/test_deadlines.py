"""Deadlines: which keys are due, in which order, and what is left over; and the server's clock that drives them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Hashable
from itertools import pairwise

import pytest
from tests.raw_peer import AMPLE_S
from tests.server.fake_log import FakeLog, on_log
from tests.server.peers import native_peer, settle
from tests.turns import STEPS, SteppedTurns

from rallypoint.core import ops
from rallypoint.core.deadlines import NEVER, Deadlines
from rallypoint.core.records import ReplyStatus
from rallypoint.server import clock
from rallypoint.server.clock import RETURN_S
from rallypoint.server.server import StoreServer
from rallypoint.server.settings import Settings

# The deadlines themselves


def test_due_keys_are_returned_once_earliest_first() -> None:
    deadlines = Deadlines()
    for key, at in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
        deadlines.set(key, at)
    assert deadlines.earliest == 1.0 and len(deadlines) == 3
    assert deadlines.due(0.9) == []
    assert deadlines.due(2.0) == ["a", "b"], "a deadline that is now is due"
    assert deadlines.earliest == 3.0 and len(deadlines) == 1 and "a" not in deadlines and "c" in deadlines
    assert deadlines.due(9.0) == ["c"] and deadlines.due(9.0) == []
    assert deadlines.earliest == NEVER and not deadlines


def test_keys_due_at_the_same_time_keep_the_order_in_which_they_were_set() -> None:
    deadlines = Deadlines()
    for key in ("b", ("tuple", 1), "a", 7):
        deadlines.set(key, 1.0)
    assert deadlines.due(1.0) == ["b", ("tuple", 1), "a", 7]


@pytest.mark.parametrize("later", [0.5, 1.0, 2.0])
def test_a_moved_deadline_is_due_once_at_its_new_time(later: float) -> None:
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


def test_a_deadline_dropped_and_set_again_for_the_same_time_is_due_once() -> None:
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


def test_due_limits_how_many_keys_it_returns() -> None:
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
def test_random_operations_match_a_plain_dict(seed: int) -> None:
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


@on_log
async def test_answered_dropped_and_released_requests_leave_no_deadline(server: StoreServer, log: FakeLog) -> None:
    peer, other = await native_peer(server), await native_peer(server)
    peer.asks(
        ops.Get(1, b"/answered", LONG_S),
        ops.BlockingPop(2, b"/dropped", LONG_S),
        ops.SetLease(3, b"/unleased", b"v", LONG_S),
        ops.Arrive(4, b"/bar", 2, LONG_S),
    )
    await settle()
    assert len(server.clock.deadlines) == 4
    other.asks(ops.Set(1, b"/answered", b"v"), ops.Arrive(2, b"/bar", 2, LONG_S))
    peer.asks(ops.Drop(5, 2), ops.ReleaseLease(6, b"/unleased"))
    await settle()
    assert not server.clock.deadlines


@on_log(grace_s=0.0)
async def test_a_session_that_ends_leaves_no_deadline(server: StoreServer, log: FakeLog) -> None:
    for turn in range(10):
        peer = await native_peer(server)
        peer.asks(
            ops.Get(1, b"/never", LONG_S),
            ops.BlockingPop(2, b"/q", LONG_S),
            ops.SetLease(3, b"/leased", b"v", LONG_S),
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
    peer = await native_peer(server)
    before = len(log.records)
    peer.asks(ops.Get(1, b"/never", 0.001))
    assert await peer.reads() == [1, ReplyStatus.TIMED_OUT, [b"/never"]]
    assert len(log.records) == before
    peer.asks(ops.Arrive(2, b"/bar", 2, 0.001))
    assert await peer.reads() == [2, ReplyStatus.TIMED_OUT, [b"/bar"]]
    assert len(log.records) == before + 2, "the arrival, and its withdrawal"
    assert not server.clock.deadlines


@on_log
async def test_a_repeated_request_keeps_its_deadline(server: StoreServer, log: FakeLog) -> None:
    """With a new deadline each time, a client that is cut off repeatedly would wait for ever."""
    peer = await native_peer(server)
    request = ops.Arrive(1, b"/bar", 2, 0.5)
    ends_at = asyncio.get_running_loop().time() + AMPLE_S
    while not peer.pending:
        peer.asks(request)
        await settle()
        if not peer.pending:
            peer.hangs_up()
            await settle()
            peer = await native_peer(server, peer.session)
        assert asyncio.get_running_loop().time() < ends_at
    assert (await peer.reads())[:2] == [1, ReplyStatus.TIMED_OUT]


@on_log
async def test_a_lease_whose_heartbeat_stops_expires(server: StoreServer, log: FakeLog) -> None:
    beating, still = await native_peer(server), await native_peer(server)
    for peer, key in ((beating, b"/beats"), (still, b"/still")):
        await peer.asked(ops.SetLease(1, key, b"v", 0.5))
    await beating.asked(ops.SetLease(2, b"/long", b"v", LONG_S))

    async def until_gone(key: bytes, number: int, beats: bool) -> int:
        while await beating.asked(ops.Check(number, [key])):
            number += 1
            if beats:
                beating.asks(ops.SessionHeartbeat(0))
            await settle()
        return number + 1

    number = await until_gone(b"/still", 3, beats=True)
    assert await beating.asked(ops.Check(number, [b"/beats", b"/long"])) is True
    number = await until_gone(b"/beats", number + 1, beats=False)
    assert await beating.asked(ops.Check(number, [b"/long"])) is True
    assert len(server.clock.deadlines) == 1


class ShiftedTime:
    """The time of a server's clock, which can be moved forward."""

    def __init__(self, server: StoreServer) -> None:
        self.by = 0.0
        server.clock.monotonic = self.monotonic

    def monotonic(self) -> float:
        return time.monotonic() + self.by


@on_log(grace_s=0.5)
async def test_a_pause_of_the_server_expires_no_lease_or_session(server: StoreServer, log: FakeLog) -> None:
    """A server that was stopped has received no heartbeats, though the clients may have sent them all."""
    shifted = ShiftedTime(server)
    peer, away = await native_peer(server), await native_peer(server)
    await peer.asked(ops.SetLease(1, b"/leased", b"v", 0.5))
    await away.asked(ops.SetLease(1, b"/of another", b"v", 0.0))
    away.hangs_up()
    await settle()
    for pause in range(20):
        server.clock.now()
        shifted.by += 100.0
        server.clock._tick()
        peer.asks(ops.SessionHeartbeat(0))
        await settle()
        assert await peer.asked(ops.Check(2 + pause, [b"/leased"])) is True, "its heartbeat was in flight"
        assert await peer.asked(ops.Check(100 + pause, [b"/of another"])) is True, "its client may be reconnecting"
    while await peer.asked(ops.Check(1000, [b"/leased"])) or await peer.asked(ops.Check(1001, [b"/of another"])):
        await settle()


@on_log
async def test_a_heartbeat_from_before_a_pause_counts(server: StoreServer, log: FakeLog) -> None:
    shifted = ShiftedTime(server)
    peer = await native_peer(server)
    await peer.asked(ops.SetLease(1, b"/leased", b"v", 10.0))
    shifted.by += 8.0
    peer.asks(ops.SessionHeartbeat(0))
    shifted.by += 1000.0
    server.clock._tick()
    shifted.by += 2.0 + clock.LATE_S / 2
    server.clock._tick()
    await settle()
    assert await peer.asked(ops.Check(2, [b"/leased"])) is True


@on_log
async def test_a_pause_moves_deadlines_by_its_length(server: StoreServer, log: FakeLog) -> None:
    shifted = ShiftedTime(server)
    peer = await native_peer(server)
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
    peer = await native_peer(server)
    for number in range(1, 2001):
        peer.asks(ops.SetLease(number, b"/%d" % number, b"v", LONG_S))
        await peer.reads()
    before = server.clock.deadlines._arrivals
    for _ in range(1000):
        peer.asks(ops.SessionHeartbeat(0))
    assert server.clock.deadlines._arrivals == before, "it moves no deadline"


@on_log
async def test_many_leases_that_expire_at_once_end_a_few_per_turn(server: StoreServer, log: FakeLog) -> None:
    shifted = ShiftedTime(server)
    count = 1000
    server.turns = SteppedTurns()
    peer, engine = await native_peer(server), server.state.namespaces[0].engine
    for number in range(1, count + 1):
        assert await peer.asked(ops.SetLease(number, b"/%d" % number, b"v", 10.0)) is None
    left = [len(server.clock.deadlines)]
    shifted.by += 10.0
    server.clock._ticks_at += 10.0  # the process was not paused
    server.clock._tick()
    while left[-1]:
        left.append(len(server.clock.deadlines))
        await asyncio.sleep(0)
    assert max(before - after for before, after in pairwise(left)) <= 2 * STEPS
    while engine.execute(ops.Count(0, b"/")):
        await asyncio.sleep(0)


@on_log
async def test_heartbeats_do_not_keep_an_overwritten_lease(server: StoreServer, log: FakeLog) -> None:
    peer, other = await native_peer(server), await native_peer(server)
    await peer.asked(ops.SetLease(1, b"/k", b"v", 0.01))
    await other.asked(ops.Set(1, b"/k", b"of another"))
    while server.clock.deadlines:
        peer.asks(ops.SessionHeartbeat(0))
        await settle()
    assert await other.asked(ops.Get(2, b"/k", 0.0)) == [b"of another"]


def test_clients_have_time_to_reconnect_after_a_restart() -> None:
    async def main() -> None:
        log = FakeLog()
        first = StoreServer(Settings(grace_s=0.0), log)
        await first.open([])
        peer = await native_peer(first)
        await peer.asked(ops.SetLease(1, b"/leased", b"v", 0.1))
        second = StoreServer(Settings(grace_s=0.0), FakeLog(log.records))
        restarted_at = time.monotonic()
        await second.open([])
        assert second.clock.deadlines.earliest >= restarted_at + RETURN_S
        assert len(second.clock.deadlines) == 2

    asyncio.run(main())
