"""Barrier, exchange, lock and group on every kind of store: the same calls, results and errors."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from tests.store_kinds import AMPLE_S, HOSTED, Open, replicated, together

from rallypoint import Server, TCPStore
from rallypoint.core.machines import barrier as core
from rallypoint.core.machines.machine import Waiting
from rallypoint.deadline import Deadline
from rallypoint.errors import BadDeviceMap, Disagreement, MembersMissing, NameTaken, NotAMember, SessionLost
from rallypoint.recipes.barrier import Barrier
from rallypoint.recipes.exchange import Exchange
from rallypoint.recipes.group import Group
from rallypoint.recipes.hosting import shared_object
from rallypoint.recipes.lock import Lock
from rallypoint.store.base import Store
from rallypoint.testing import CuttingProxy

MEMBERS = 5


# Barrier


def test_a_barrier_can_be_passed_repeatedly(open_store: Open) -> None:
    passed: list[int] = []

    def run(member: int) -> None:
        barrier = Barrier(open_store(), "start", MEMBERS)
        for number in range(20):
            passed.append(number)
            barrier.wait(member, AMPLE_S)
            assert passed.count(number) == MEMBERS, "a member passed before all had arrived"

    together([partial(run, member) for member in range(MEMBERS)])


def test_a_barrier_may_have_named_members(open_store: Open) -> None:
    names = ["ann", "bob"]

    def run(name: str) -> None:
        Barrier(open_store(), "start", names).wait(name, AMPLE_S)

    together([partial(run, name) for name in names])


class WithdrawalSeen:
    """The progress of rank 0 of three: it waits alone, then rank 1 arrives and withdraws."""

    def __init__(self) -> None:
        self.alone, self.withdrawn = threading.Event(), threading.Event()

    def progress(self, waiting: Waiting) -> None:
        self.alone.set()
        if (tuple(waiting.missing), tuple(waiting.withdrawn)) == (("1", "2"), ("1",)):
            self.withdrawn.set()


def test_a_timeout_names_the_missing_and_withdraws_the_arrival(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_object, "PROGRESS_S", 0.05)
    seen = WithdrawalSeen()
    first = Barrier(open_store(), "start", 3, seen.progress)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.wait, 0, AMPLE_S)
        assert seen.alone.wait(AMPLE_S)
        with pytest.raises(MembersMissing) as caught:
            Barrier(open_store(), "start", 3).wait(1, 0.1)
        assert caught.value.missing == ("2",)
        assert seen.withdrawn.wait(AMPLE_S)
        later = [Barrier(open_store(), "start", 3) for _ in range(2)]
        together([lambda: later[0].wait(1, AMPLE_S), lambda: later[1].wait(2, AMPLE_S)])
        waiting.result(AMPLE_S)
    others = [Barrier(open_store(), "start", 3) for _ in range(3)]
    together([partial(others[member].wait, member, AMPLE_S) for member in range(3)])


def test_a_member_that_arrives_twice_counts_once(open_store: Open) -> None:
    barrier = Barrier(open_store(), "start", 2)
    with pytest.raises(MembersMissing) as caught:
        together([lambda: barrier.wait(0, 0.5), lambda: Barrier(open_store(), "start", 2).wait(0, 0.5)])
    assert caught.value.missing == ("1",)


def test_a_member_over_the_size_is_refused_by_name(open_store: Open) -> None:
    with pytest.raises(NotAMember, match="'2'") as caught:
        Barrier(open_store(), "start", 2).wait(2, 1)
    assert caught.value.member == "2"


def test_members_must_agree_on_the_size(open_store: Open) -> None:
    arrived = threading.Event()

    def wait() -> None:
        Barrier(open_store(), "start", 2, progress=lambda _: arrived.set()).wait(0, AMPLE_S)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(shared_object, "PROGRESS_S", 0.05)
        first = pool.submit(wait)
        assert arrived.wait(AMPLE_S)
        with pytest.raises(Disagreement) as caught:
            Barrier(open_store(), "start", 3).wait(1, 1)
        assert caught.value.theirs.startswith("2 members")
        Barrier(open_store(), "start", 2).wait(1, AMPLE_S)
        first.result(AMPLE_S)


def test_progress_reports_the_missing_and_the_waited_time(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_object, "PROGRESS_S", 0.05)
    reports: list[Waiting] = []
    enough = threading.Event()

    def progress(waiting: Waiting) -> None:
        reports.append(waiting)
        if len(reports) > 2:
            enough.set()

    barrier = Barrier(open_store(), "start", 2, progress)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(barrier.wait, 0, AMPLE_S)
        assert enough.wait(AMPLE_S)
        Barrier(open_store(), "start", 2).wait(1, AMPLE_S)
        waiting.result(AMPLE_S)
    assert list(reports[0].missing) == ["1"] and "1 of 2 members are here; missing: 1" in reports[0].reason
    assert 0 < reports[0].waited_s < reports[2].waited_s


def test_the_last_member_out_leaves_after_all_others(open_store: Open) -> None:
    left: list[int] = []

    def run(member: int) -> None:
        barrier = Barrier(open_store(), "job", MEMBERS)
        barrier.enter(member, AMPLE_S)
        barrier.leave(member, AMPLE_S, last=2)
        left.append(member)

    for _ in range(5):
        left.clear()
        together([partial(run, member) for member in range(MEMBERS)])
        assert sorted(left) == list(range(MEMBERS))


def test_a_last_member_lost_on_its_way_out_does_not_affect_the_next_job(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if that has another size; there, the last member waits for those that have not left."""
    monkeypatch.setattr(shared_object, "PROGRESS_S", 0.05)

    def lost_on_the_way() -> None:
        arrival = core.BarrierArrive(3, "0")
        Barrier(open_store(), "job", 3)._object.perform("0", arrival, core.BarrierWithdraw, Deadline(AMPLE_S))

    def leave(member: int) -> None:
        Barrier(open_store(), "job", 3).leave(member, AMPLE_S, 0)

    together([lost_on_the_way, *(partial(leave, member) for member in (1, 2))])
    slow, waits = Barrier(open_store(), "job", 2), threading.Event()
    last = Barrier(open_store(), "job", 2, lambda waiting: waits.set() if "still inside: 1" in waiting.reason else None)
    with ThreadPoolExecutor(1) as pool:
        out = pool.submit(last.leave, 0, AMPLE_S, 0)
        number, _ = slow._object.perform("1", core.BarrierArrive(2, "0"), core.BarrierWithdraw, Deadline(AMPLE_S))
        assert waits.wait(AMPLE_S) and not out.done()
        slow._object.perform("1", core.BarrierLeave(number), core.BarrierUndoLeave, Deadline(AMPLE_S))
        out.result(AMPLE_S)


def test_the_last_member_out_names_those_that_have_not_left(open_store: Open) -> None:
    stays, last = (Barrier(open_store(), "job", 2) for _ in range(2))
    arrival = core.BarrierArrive(2, "0")
    with ThreadPoolExecutor(1) as pool:
        arrived = pool.submit(stays._object.perform, "1", arrival, core.BarrierWithdraw, Deadline(AMPLE_S))
        number, _ = last._object.perform("0", arrival, core.BarrierWithdraw, Deadline(AMPLE_S))
        arrived.result(AMPLE_S)
    with pytest.raises(MembersMissing, match="last out; still inside: 1") as caught:
        last._object.perform("0", core.BarrierLeave(number), core.BarrierUndoLeave, Deadline(0.1))
    assert caught.value.missing == ("1",)


# Exchange


def test_an_exchange_can_be_repeated(open_store: Open) -> None:
    def run(rank: int) -> None:
        exchange = Exchange(open_store(), "data", MEMBERS)
        for number in range(20):
            got = exchange.all_gather(rank, b"%d of %d" % (number, rank), AMPLE_S)
            assert got == [b"%d of %d" % (number, other) for other in range(MEMBERS)]
            assert exchange.broadcast(rank, b"from %d" % rank, 3, AMPLE_S) == b"from 3"
            gathered = exchange.gather(rank, bytes([rank, 0, 255]), 1, AMPLE_S)
            assert gathered == ([bytes([other, 0, 255]) for other in range(MEMBERS)] if rank == 1 else None)

    together([partial(run, rank) for rank in range(MEMBERS)])


def test_an_exchange_names_missing_ranks(open_store: Open) -> None:
    with pytest.raises(MembersMissing) as caught:
        Exchange(open_store(), "data", 3).all_gather(1, b"", 0.1)
    assert caught.value.missing == ("0", "2")


def test_an_exchange_names_a_rank_that_withdrew(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_object, "PROGRESS_S", 0.05)
    seen = WithdrawalSeen()
    first = Exchange(open_store(), "data", 3, seen.progress)
    with ThreadPoolExecutor(1) as pool:
        giving = pool.submit(first.all_gather, 0, b"zero", AMPLE_S)
        assert seen.alone.wait(AMPLE_S)
        with pytest.raises(MembersMissing):
            Exchange(open_store(), "data", 3).all_gather(1, b"old", 0)
        assert seen.withdrawn.wait(AMPLE_S)
        later = [Exchange(open_store(), "data", 3) for _ in range(2)]
        together([lambda: later[0].all_gather(1, b"new", AMPLE_S), lambda: later[1].all_gather(2, b"two", AMPLE_S)])
        assert giving.result(AMPLE_S) == [b"zero", b"new", b"two"]


def test_ranks_and_data_are_checked(open_store: Open) -> None:
    exchange = Exchange(open_store(), "data", 3)
    with pytest.raises(ValueError, match="rank of exchange 'data' must be 0 to 2, not 3"):
        exchange.all_gather(3, b"")
    with pytest.raises(TypeError, match="must be bytes, not"):
        exchange.all_gather(0, "text")  # type: ignore[arg-type]


def test_a_client_with_a_new_session_replaces_its_old_one_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The connection is dead, which the server has not noticed yet."""
    monkeypatch.setattr(shared_object, "PROGRESS_S", 0.05)
    with Server(grace=0.5) as server, CuttingProxy(server.port) as cutter, ThreadPoolExecutor(2) as pool:
        given, given_again = threading.Event(), threading.Event()
        other = Exchange(TCPStore("127.0.0.1", server.port), "e", 2)
        group = Group(TCPStore("127.0.0.1", server.port), "g")
        store = TCPStore("127.0.0.1", cutter.port)
        Group(store, "g").join("ann")
        waits = pool.submit(Exchange(store, "e", 2, lambda _: given.set()).all_gather, 0, b"old", AMPLE_S)
        assert given.wait(AMPLE_S)
        cutter.half_open = cutter.refusing = True
        cutter.cut_all()
        with pytest.raises(SessionLost):
            waits.result(AMPLE_S)
        cutter.half_open = cutter.refusing = False
        assert len(server.statistics()["sessions"]) == 3, "the server still has the old session"
        again = TCPStore("127.0.0.1", cutter.port)
        waits_again = pool.submit(Exchange(again, "e", 2, lambda _: given_again.set()).all_gather, 0, b"new", AMPLE_S)
        assert given_again.wait(AMPLE_S)
        assert other.all_gather(1, b"other", AMPLE_S) == waits_again.result(AMPLE_S) == [b"new", b"other"]
        assert Group(again, "g").join("ann").id == group.members().members["ann"].id


# Lock


def test_a_lock_has_one_holder_and_increasing_fences(open_store: Open) -> None:
    inside: list[int] = []
    fences: list[int] = []

    def run(number: int) -> None:
        lock = Lock(open_store(), "token")
        for _ in range(10):
            with lock:
                inside.append(number)
                fences.append(lock.fence)
                assert not lock.lost
                assert inside == [number]
                inside.remove(number)

    together([partial(run, number) for number in range(MEMBERS)])
    assert fences == sorted(set(fences)) and len(fences) == 10 * MEMBERS


def test_a_timeout_for_a_lock_names_its_holder(open_store: Open) -> None:
    with Lock(open_store(), "token", member="ann"), pytest.raises(MembersMissing, match="held by ann") as late:
        Lock(open_store(), "token", member="bob").acquire(0.1)
    assert "Look at its holder" in str(late.value) and "Look at the missing" not in str(late.value)
    with Lock(open_store(), "token"):
        pass


def test_a_lock_object_is_not_reentrant(open_store: Open) -> None:
    lock = Lock(open_store(), "token")
    with pytest.raises(RuntimeError, match="is not held"):
        lock.release()
    with lock, pytest.raises(RuntimeError, match="is already held by this object"):
        lock.acquire()


# Group


def test_members_may_join_leave_and_rejoin(open_store: Open) -> None:
    group = Group(open_store(), "workers")
    with group.join("ann", b"one") as ann:
        bob = Group(open_store(), "workers").join("bob")
        assert list(ann.wait_for(["bob"], AMPLE_S).members) == ["ann", "bob"]
        assert bob.leave() and not bob.leave()
        again = Group(open_store(), "workers").join("bob")
        assert again.id > bob.id
        events = ann.events(AMPLE_S)
        assert [(event.what, event.member, event.id) for event in (next(events) for _ in range(3))] == [
            ("joined", "bob", bob.id),
            ("left", "bob", bob.id),
            ("joined", "bob", again.id),
        ]
        assert ann.view.members["ann"].info == b"one"
    assert list(group.members().members) == ["bob"]


def test_a_name_in_use_is_refused(open_store: Open) -> None:
    with Group(open_store(), "workers").join("ann"), pytest.raises(NameTaken, match="already has a member 'ann'"):
        Group(open_store(), "workers").join("ann")


def test_wait_for_names_the_missing_members(open_store: Open) -> None:
    with Group(open_store(), "workers").join("ann") as ann, pytest.raises(MembersMissing) as caught:
        ann.wait_for(["ann", "bob", "eve"], 0.1)
    assert caught.value.missing == ("bob", "eve")


def test_device_maps_are_reversed_and_checked(open_store: Open) -> None:
    group = Group(open_store(), "workers")
    with group.join("ann", devices=["cuda:0", "cuda:1"], device_maps={"bob": {"cuda:0": "cuda:3"}}):
        with pytest.raises(BadDeviceMap, match="'cuda:3'"):
            Group(open_store(), "workers").join("bob", devices=["cuda:0"])
        with Group(open_store(), "workers").join("bob", devices=["cuda:3"]) as bob:
            assert bob.view.members["bob"].reverse_maps == {"ann": {"cuda:3": "cuda:0"}}


# All objects


def test_statistics_of_an_object_name_its_host(open_store: Open, request: pytest.FixtureRequest) -> None:
    hosted_by = "server" if request.node.callspec.params["open_store"] in (*HOSTED, replicated) else "members"
    store = open_store()
    theirs = f"<TCPStore of {type(store).__module__} at 127.0.0.1:"
    label = repr(store) if isinstance(store, Store) else f"{theirs}{store.port}>"
    barrier, exchange = Barrier(store, "b", 1), Exchange(store, "x", 1)
    lock, group = Lock(store, "l"), Group(store, "g")
    barrier.wait(0)
    exchange.all_gather(0, b"")
    with lock:
        group.members()
    assert [one.statistics() for one in (barrier, exchange, lock, group)] == [
        ("barrier", "b", hosted_by, label, 1),
        ("exchange", "x", hosted_by, label, 1),
        ("lock", "l", hosted_by, label, 2),
        ("group", "g", hosted_by, label, 1),
    ]
