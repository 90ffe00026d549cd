"""How long calls on shared objects have waited, and who came last: noted by the server, which has the clock."""

from __future__ import annotations

import pytest
from tests.server.fake_log import FakeLog, both, in_memory
from tests.server.fake_relay import FakeRelay
from tests.server.peers import session_of, settle
from tests.server.test_arrivals import act, say
from tests.status.models import ACQUIRE, Turned, arrive, give

from rallypoint.core import ops
from rallypoint.core.machines.barrier import BarrierMachine, BarrierWithdraw
from rallypoint.core.machines.lock import LockRelease
from rallypoint.server.server import StoreServer
from rallypoint.server.status import stragglers, wait_times
from rallypoint.server.status.stragglers import MeetingKey, StragglerTable


@both
async def test_a_barrier_says_how_long_its_first_and_its_last_member_have_waited(
    server: StoreServer, log: FakeLog | None
) -> None:
    turned = Turned(server)
    for member in ("0", "1"):
        await turned.act(await turned.peer(), b"/b", member, arrive(3))
        turned.now += 10
    (found,) = turned.status().meetings
    assert (found.kind, found.name, found.size, found.arrived) == ("barrier", "b", 3, 2)
    assert (found.missing, found.waited_s, found.last_arrival_s) == (["2"], 20.0, 10.0)


@both
async def test_the_last_member_is_charged_with_its_time_behind_the_median(
    server: StoreServer, log: FakeLog | None
) -> None:
    turned = Turned(server)
    peers = [await turned.peer() for _ in range(3)]
    for _ in range(2):
        for member, peer in enumerate(peers):
            await turned.act(peer, b"/b", str(member), arrive(3))
            turned.now += 4
    (found,) = turned.status().stragglers
    assert (found.name, found.member, found.rounds, found.times_last) == ("b", "2", 2, 2)
    assert (found.late_s, found.worst_s) == (8.0, 4.0)


@both
async def test_an_exchange_has_stragglers_too(server: StoreServer, log: FakeLog | None) -> None:
    turned = Turned(server)
    await turned.act(await turned.peer(), b"/x", "0", give(2, 0))
    turned.now += 3
    assert turned.status().meetings[0].missing == ["1"]
    await turned.act(await turned.peer(), b"/x", "1", give(2, 1))
    (found,) = turned.status().stragglers
    assert (found.kind, found.member, found.late_s) == ("exchange", "1", 3.0)


@both
async def test_arrivals_behind_a_relay_are_timed_and_the_last_is_named(
    server: StoreServer, log: FakeLog | None
) -> None:
    turned = Turned(server)
    relays = [await FakeRelay(server).opens() for _ in range(2)]
    clients = [[await one.greeted() for _ in range(2)] for one in relays]
    say(relays[0], clients[0], [act("barrier", 4, rank) for rank in (0, 1)])
    await settle()
    turned.now += 5
    assert turned.status().meetings[0].waited_s == 5.0
    say(relays[1], clients[1], [act("barrier", 4, rank) for rank in (2, 3)])
    await settle()
    (found,) = turned.status().stragglers
    assert (found.member, found.times_last, found.late_s) == ("3", 1, 5.0)


@in_memory(grace_s=0.0)
async def test_a_broken_round_blames_nobody_and_the_next_starts_again(server: StoreServer, log: FakeLog | None) -> None:
    turned = Turned(server)
    lost, other = await turned.peer(), await turned.peer()
    for member, peer in (("0", lost), ("1", other)):
        await turned.act(peer, b"/b", member, arrive(3))
    lost.hangs_up()
    while server.state.namespaces[0].objects.waiting:
        await settle()
        turned.server.clock._tick()
    turned.now += 50
    await turned.act(other, b"/b", "1", arrive(3))
    turned.now += 1
    status = turned.status()
    assert [one.waited_s for one in status.meetings] == [1.0] and not status.stragglers
    for member in ("0", "2"):
        await turned.act(await turned.peer(), b"/b", member, arrive(3))
        turned.now += 1
    (found,) = turned.status().stragglers
    assert (found.member, found.late_s) == ("2", 1.0), "arrivals at the broken round do not count"


@in_memory()
async def test_a_member_that_looks_again_has_waited_all_the_while(server: StoreServer, log: FakeLog | None) -> None:
    turned = Turned(server)
    peer = await turned.peer()
    await turned.act(peer, b"/b", "0", arrive(2), call=7)
    turned.now += 5
    await turned.act(peer, b"/b", "0", arrive(2), call=7)
    assert turned.status().meetings[0].waited_s == 5.0
    await turned.act(peer, b"/b", "0", BarrierWithdraw(7))
    assert not turned.status().meetings


@in_memory()
async def test_a_look_at_an_earlier_round_does_not_end_the_present_one(
    server: StoreServer, log: FakeLog | None
) -> None:
    turned = Turned(server)
    first, second = await turned.peer(), await turned.peer()
    looks = ops.Act(1, b"/b", "0", 1, arrive(2), 0.0)  # does not wait: it is between two looks
    first.asks(looks)
    await settle()
    await turned.act(second, b"/b", "1", arrive(2), call=900)  # opens the round
    turned.now += 5
    await turned.act(second, b"/b", "1", arrive(2), call=901)  # waits in the next
    turned.now += 5
    first.asks(ops.Act(2, b"/b", "0", 1, arrive(2), 1.0))  # learns that its round has opened
    await settle()
    status = turned.status()
    assert [one.waited_s for one in status.meetings] == [5.0]
    assert all(one.late_s < 5 for one in status.stragglers)


@in_memory()
async def test_a_call_that_waits_without_a_machine_is_not_timed(server: StoreServer, log: FakeLog | None) -> None:
    """As one whose refusal is contested, when the machine has gone."""
    turned = Turned(server)
    peer = await turned.peer()
    await turned.act(peer, b"/b", "0", arrive(2), call=7)
    namespace, times = server.state.namespaces[0], server.clock.times
    namespace.objects.machines.clear()
    times.forget(0)
    times.acted(namespace, session_of(server, peer), ops.Act(1, b"/b", "0", 7, arrive(2), 1.0))
    assert not times.namespaces


@in_memory()
async def test_a_lock_has_been_held_since_it_was_passed_on(server: StoreServer, log: FakeLog | None) -> None:
    turned = Turned(server)
    first, second = await turned.peer(), await turned.peer()
    held = await turned.act(first, b"/l", "a", ACQUIRE)
    turned.now += 5
    await turned.act(second, b"/l", "b", ACQUIRE)
    turned.now += 5
    (lock,) = turned.status().locks
    assert (lock.holder, lock.held_s) == ("a (test)", 10.0)
    assert [(one.name, one.waited_s) for one in lock.queue] == [("b (test)", 5.0)]
    await turned.act(first, b"/l", "a", LockRelease(held))
    turned.now += 1
    (lock,) = turned.status().locks
    assert (lock.holder, lock.held_s, lock.queue) == ("b (test)", 1.0, [])


@in_memory()
async def test_times_of_a_bounded_number_of_objects_are_kept(server: StoreServer, log: FakeLog | None) -> None:
    turned, most = Turned(server), 8
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wait_times, "MAX_OBJECTS", most)
        peer = await turned.peer()
        for number in range(most + 1):
            await turned.act(peer, b"/%d" % number, "0", arrive(2))
        times = server.clock.times
        assert len(times._objects) == most
        assert (0, BarrierMachine, b"/0") not in times._objects, "the oldest goes"
        turned.now += 7
        waits = {one.name: one.waited_s for one in turned.status().meetings}
        assert waits["0"] == waits["8"] == 7.0, "a call without a time has waited since the server began"


def test_the_table_of_stragglers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stragglers, "MAX_MEETINGS", 2)
    monkeypatch.setattr(stragglers, "MAX_STRAGGLERS", 2)
    table = StragglerTable()
    for name in (b"a", b"b", b"a", b"c"):
        for member, late_s in (("slow", 9.0), ("fast", 0.1), ("medium", 3.0)):
            table.add(MeetingKey(0, "barrier", name), member, late_s)
    found = {(key.name, member): (rounds, one.times) for key, rounds, member, one in table}
    assert set(found) == {(name, member) for name in (b"a", b"c") for member in ("slow", "medium")}
    assert found[b"a", "slow"] == (6, 2), "the object used least recently goes, and the member that cost least"
    table.forget(0)
    assert not list(table)
