"""Shared objects in the model: what is listed of them, and what is only counted."""

from __future__ import annotations

import pytest
from tests.server.fake_log import FakeLog, in_memory
from tests.status.models import ACQUIRE, GROUP_JOIN, Turned, arrive

from rallypoint.core.machines.barrier import BarrierLeave
from rallypoint.core.machines.work_queue import WorkPut, WorkTake
from rallypoint.server.server import StoreServer
from rallypoint.server.status import objects


@in_memory()
async def test_members_and_objects_over_the_limits_are_counted(server: StoreServer, log: FakeLog | None) -> None:
    turned = Turned(server)
    peer = await turned.peer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects, "MAX_LISTED", 2)
        patch.setattr(objects, "MAX_NAMES", 3)
        for name in (b"/a", b"/b", b"/c"):
            await turned.act(peer, name, "0", arrive(10))
            await turned.act(peer, b"l" + name, "me", ACQUIRE)
            for member in range(5):
                await turned.act(peer, b"g" + name, str(member), GROUP_JOIN)
                await turned.act(peer, b"l/a", str(member), ACQUIRE)
        status = turned.status()
    assert ([one.missing for one in status.meetings], status.more_meetings) == ([["1", "2", "3"]] * 2, 1)
    assert status.meetings[0].more_missing == 6
    assert (len(status.locks), status.more_locks, len(status.groups), status.more_groups) == (2, 1, 2, 1)
    assert (len(status.locks[0].queue), status.locks[0].more_queued) == (3, 12)
    group = status.groups[0]
    assert (group.size, group.members, group.more_members) == (5, ["0 (test)", "1 (test)", "2 (test)"], 2)


@in_memory()
async def test_the_last_out_waits_for_those_inside(server: StoreServer, log: FakeLog | None) -> None:
    turned = Turned(server)
    peers = {name: await turned.peer() for name in "abc"}
    calls = {name: await turned.act(peer, b"/b", name, arrive(list("abc"), "a")) for name, peer in peers.items()}
    await turned.act(peers["b"], b"/b", "b", BarrierLeave(calls["b"]))
    assert not turned.status().meetings
    await turned.act(peers["a"], b"/b", "a", BarrierLeave(calls["a"]))
    (found,) = turned.status().meetings
    assert (found.missing, found.size, found.arrived) == (["c"], 3, 2)


@in_memory()
async def test_a_barrier_of_the_most_members_is_described_in_slices(server: StoreServer, log: FakeLog | None) -> None:
    turned = Turned(server)
    await turned.act(await turned.peer(), b"/b", "0", arrive(65_536))
    steps = sum(1 for _ in turned.builder.build())
    (found,) = turned.status().meetings
    assert (found.arrived, len(found.missing), found.more_missing) == (1, objects.MAX_NAMES, 65_535 - objects.MAX_NAMES)
    machine = next(iter(server.state.namespaces[0].objects.machines.values()))
    machine.arrived.update({str(member): 1 for member in range(65_535)})  # type: ignore[attr-defined]
    assert sum(1 for _ in turned.builder.build()) >= steps + 65_536 // objects.SLICE_NAMES
    assert turned.status().meetings[0].missing == ["65535"]


@in_memory()
async def test_leases_and_counts(server: StoreServer, log: FakeLog | None) -> None:
    turned = Turned(server)
    peer = await turned.peer()
    await turned.put(peer, b"/key", b"value")
    status = turned.status()
    assert [(one.key, one.owner) for one in status.leases] == [("key", "test")]
    assert (status.role, status.keys, status.leased_keys, status.sessions) == ("server", 1, 1, 1)
    assert status.connections == 1 and status.max_bytes == server.settings.max_memory


@in_memory()
async def test_a_work_queue_shows_who_holds_what(server: StoreServer, log: FakeLog | None) -> None:
    turned = Turned(server)
    peer, other = await turned.peer(), await turned.peer()
    await turned.act(other, b"/w", "bob", WorkTake())
    (empty,) = turned.status().work_queues
    assert (empty.ready, empty.taken, empty.waiting, empty.held) == (0, 0, 1, [])
    await turned.act(peer, b"/w", "ann", WorkPut([b"x", b"y", b"z"], 5))
    await turned.act(peer, b"/w", "ann", WorkTake())
    (queue,) = turned.status().work_queues
    assert (queue.name, queue.ready, queue.taken, queue.dead, queue.done, queue.waiting) == ("w", 1, 2, 0, 0, 0)
    assert [one.holder for one in queue.held] == ["bob (test)", "ann (test)"]
    assert all(0 <= one.held_s < 600 for one in queue.held)
