"""The shared objects of a server on a bare engine: calls that are withdrawn, refused, late or abandoned.

In the end there must be no call and no counted byte; and no machine, except for runs that had a round, which are
remembered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from rallypoint.core import objects
from rallypoint.core.calls.call_waiter import CallWaiter, Woken, object_bytes
from rallypoint.core.costs import CALL_BYTES, LATE_BYTES
from rallypoint.core.deadlines import NEVER, Deadlines
from rallypoint.core.engine import Engine
from rallypoint.core.machines import rendezvous
from rallypoint.core.machines.barrier import BarrierArrive, BarrierWithdraw
from rallypoint.core.machines.barrier import BarrierLeave as LeaveBarrier
from rallypoint.core.machines.exchange import ExchangeGive, ExchangeWithdraw
from rallypoint.core.machines.lock import LockAcquire, LockRelease
from rallypoint.core.machines.machine import Call, Command, Done, Refused, Waiting
from rallypoint.core.machines.rendezvous import (
    RendezvousClose,
    RendezvousJoin,
    RendezvousLeave,
    RendezvousQuery,
    RendezvousReopen,
)
from rallypoint.core.objects import MAX_IDLE, MAX_IDLE_BYTES, Objects
from rallypoint.core.ops import Add, Confirm, Drop, Op, Pop
from rallypoint.core.policy.round_policy import NodeLimits
from rallypoint.core.records import ReplyStatus
from rallypoint.errors import StoreFull
from rallypoint.protocol.native import Frames, decode_request, frame
from rallypoint.protocol.native_client import CONFIRM_EVERY, ClientProtocol, Reply

ENDED = "timed out"


class Host:
    """The server around the objects, with its clock. A session has the name of its only member."""

    def __init__(self, max_bytes: int = 1 << 62) -> None:
        self.engine = Engine()
        self.engine.memory.limit = max_bytes
        self.objects = Objects(self.engine)
        self.deadlines = Deadlines()

    def act(self, session: str, number: int, command: Command, name: bytes = b"/o", now: float = 0.0) -> Any:
        return self.call(Call(session, session, number), command, session, name, now=now)

    def call(
        self, call: Call, command: Command, owner: str, name: bytes = b"/o", number: int = 0, now: float = 0.0
    ) -> Any:
        """Execute a command; if it waits, it times out after nine seconds."""
        outcome = self.objects.act(name, call, command, owner, 9.0, number or call.number)
        if isinstance(outcome, CallWaiter):
            self.deadlines.set(outcome, now + 9.0)
        self.set_timers(now)
        return outcome

    def set_timers(self, now: float) -> None:
        """Set the deadlines of the timers that have changed."""
        changed, self.objects.changed_timers = self.objects.changed_timers, []
        for place in changed:
            timer = self.objects.timers.get(place)
            if timer is None:
                self.deadlines.drop(place)
            else:
                self.deadlines.set(place, now + timer[1])

    def due_at(self) -> float:
        """Return when the next timer is due."""
        return min((at for key, at in self.deadlines._at.items() if isinstance(key, tuple)), default=NEVER)

    def time_out(self, waiter: CallWaiter) -> Waiting:
        """End a wait by its deadline; until the caller repeats the call, it is a late one."""
        assert waiter.waits
        return self.objects.explain(waiter)

    def end(self, *sessions: str, now: float = 0.0) -> None:
        for session in sessions:
            self.engine.end(session)
            self.objects.end(session)
            self.set_timers(now)

    def answers(self) -> list[tuple[Any, Any]]:
        return [(waiter.number, answer) for waiter, answer in self.taken()]

    def taken(self) -> list[tuple[CallWaiter, Any]]:
        """Return the waiters answered since the last call, and their answers."""
        out = self.engine.take()
        each = [(one.waiters if isinstance(one, Woken) else [one], answer) for one, answer in out]
        return [(waiter, answer) for waiters, answer in each for waiter in waiters]

    def tick(self, now: float) -> dict[str, Any]:
        """Let time pass and timers fire, as a server does; return the answers by session."""
        answers = {}
        for key in self.deadlines.due(now):
            if isinstance(key, tuple):
                self.objects.fire(key, self.objects.timers[key][0])
                self.set_timers(now)
            elif isinstance(key, CallWaiter) and key.waits:
                self.objects.forget(key)
                answers[str(key.owner)] = ENDED
            for waiter, answer in self.taken():
                answers[str(waiter.owner)] = answer
        return answers | {str(waiter.owner): answer for waiter, answer in self.taken()}

    @property
    def charged_idle(self) -> int:
        """The bytes charged for machines, and for what the idle ones keep."""
        return sum(object_bytes(name) for _, name in self.objects.machines) + self.objects._idle_bytes

    def assert_empty(self) -> None:
        left = self.objects
        assert (left._calls, left.late, left.late.by_session, left.timers) == ({}, {}, {}, {})
        assert self.engine.size == self.charged_idle and left.waiting == 0
        assert self.answers() == []
        assert list(left.machines) == list(left._idle), "only remembered machines are left"
        for machine in left.machines.values():
            assert isinstance(machine, rendezvous.RendezvousMachine) and machine.idle and machine.persists_idle
            ended = not (machine.waiting or machine.nodes or machine.ranks or machine.calls or machine.watchers)
            assert ended and not machine.settings and machine.origin is None
        assert left._idle_bytes == sum(left._idle.values()) <= MAX_IDLE_BYTES

    def remembered(self, name: bytes = b"/o") -> rendezvous.RendezvousMachine:
        machine = self.objects.machines[rendezvous.RendezvousMachine, name]
        assert isinstance(machine, rendezvous.RendezvousMachine)
        return machine


UNDONE: dict[str, tuple[Command, Callable[[int], Command]]] = {
    "barrier": (BarrierArrive(2), BarrierWithdraw),
    "exchange": (ExchangeGive(2, 0, b"x" * 1000, "all_gather"), ExchangeWithdraw),
}


@pytest.mark.parametrize("kind", UNDONE)
def test_a_withdrawn_wait_is_answered_and_leaves_nothing(kind: str) -> None:
    host = Host()
    command, undo = UNDONE[kind]
    assert isinstance(host.act("0", 1, command), CallWaiter)
    assert not isinstance(host.act("0", 2, undo(1)), CallWaiter)
    assert host.answers() == [(1, Refused("Undone", {}))]
    host.assert_empty()


def test_a_withdrawn_wait_for_a_lock_is_answered_and_the_holder_keeps_it() -> None:
    host = Host()
    fence = host.act("0", 1, LockAcquire())
    assert isinstance(host.act("1", 1, LockAcquire()), CallWaiter)
    assert host.act("1", 2, LockRelease(1)) == Done(False)
    assert host.answers() == [(1, Refused("Undone", {}))]
    assert host.act("0", 1, LockAcquire()) == fence
    assert host.act("0", 2, LockRelease(1)) == Done(True)
    host.assert_empty()


def test_explain_has_an_answer_after_the_machine_is_gone() -> None:
    """The wait times out, and the call is withdrawn before its host asks for the reason."""
    host = Host()
    waiter = host.act("0", 1, BarrierArrive(2))
    host.objects.forget(waiter)
    host.act("0", 2, BarrierWithdraw(1))
    assert host.objects.statistics() == {}
    assert host.objects.explain(waiter) == Waiting("it was taken back")
    host.engine.take()
    host.assert_empty()


def test_one_call_number_at_two_objects_is_counted_at_both() -> None:
    host = Host()
    give = ExchangeGive(2, 0, b"x" * 1000, "gather", 1)
    first = host.act("0", 1, give, b"/a")
    counted = host.engine.size
    second = host.act("0", 1, give, b"/b")
    assert isinstance(first, CallWaiter) and isinstance(second, CallWaiter)
    assert host.engine.size == 2 * counted >= 2000
    host.act("0", 2, ExchangeWithdraw(1), b"/a")
    assert host.engine.size == counted
    host.end("0")
    host.engine.take()
    host.assert_empty()


def test_one_call_number_at_two_objects_waits_at_both() -> None:
    host = Host()
    for name in (b"/a", b"/b"):
        assert isinstance(host.act("0", 1, BarrierArrive(2), name), CallWaiter)
    for name in (b"/a", b"/b"):
        assert isinstance(host.act("1", 1, BarrierArrive(2), name), Done)
        ((number, answer),) = host.answers()
        assert number == 1 and isinstance(answer, Done)
    host.end("0", "1")
    host.assert_empty()


@pytest.mark.parametrize("spare", range(0, CALL_BYTES, 100))
def test_a_call_that_a_full_store_refuses_changes_nothing(spare: int) -> None:
    """There is no room, or only for a part of what it needs to wait."""
    host = Host()
    host.act("0", 1, LockAcquire())
    size, revision = host.engine.size, host.engine.revision
    host.engine.memory.limit = size + spare
    with pytest.raises(StoreFull):
        host.act("1", 1, LockAcquire())
    assert (host.engine.size, host.engine.revision) == (size, revision)
    assert host.act("0", 2, LockRelease(1)) == Done(True)
    host.assert_empty()


def test_the_end_of_a_session_drops_the_machine_of_its_late_call() -> None:
    """The exchange ends after one call has timed out, and its session never repeats it."""
    host = Host()
    late = host.act("0", 1, ExchangeGive(2, 0, b"x" * 1000, "all_gather"))
    assert host.time_out(late).missing
    assert isinstance(host.act("1", 1, ExchangeGive(2, 1, b"", "all_gather")), Done)
    assert host.objects.statistics() == {"exchange": 1}, "the late call may still be repeated"
    host.end("0", "1")
    host.assert_empty()


def test_the_result_for_a_late_call_is_counted_until_it_is_fetched() -> None:
    host = Host()
    assert host.time_out(host.act("0", 1, ExchangeGive(2, 0, b"x" * 10_000, "all_gather"))).missing
    given = host.engine.size
    last = host.act("1", 1, ExchangeGive(2, 1, b"y" * 5000, "all_gather"))
    assert given + 5000 <= host.engine.size <= given + 5000 + CALL_BYTES + 2 * LATE_BYTES, "the whole result, once"
    assert host.act("0", 1, ExchangeGive(2, 0, b"x" * 10_000, "all_gather")) == last
    host.assert_empty()


def test_calls_that_never_fetch_their_result_are_bounded_by_the_store() -> None:
    """One member arrives, times out, and is released by the other: repeatedly, at 50 objects."""
    host = Host(100_000)

    def fill() -> None:
        for number in range(1_000_000):
            place = b"/%d" % (number % 50)
            host.time_out(host.act("0", number, BarrierArrive(2), place))
            assert host.act("1", number, BarrierArrive(2), place) == Done()

    with pytest.raises(StoreFull):
        fill()
    late = sum(len(late.calls) for late in host.objects.late.values())
    assert late * LATE_BYTES < host.engine.size < host.engine.memory.limit
    host.end("0", "1")
    host.assert_empty()


def test_the_end_of_a_session_drops_only_its_own_late_calls() -> None:
    host = Host()
    for session in "01":
        host.time_out(host.act(session, 1, BarrierArrive(3)))
    host.act("2", 1, BarrierArrive(3))
    host.end("0")
    assert host.objects.statistics() == {"barrier": 1} and host.engine.size > 0
    assert host.act("1", 1, BarrierArrive(3)) == Done()
    host.end("2")
    host.assert_empty()


@pytest.mark.parametrize("ends", ["0", "1", "none"])
def test_a_barrier_with_a_member_that_leaves_last_leaves_nothing(ends: str) -> None:
    """While members leave, none of them dies, or the last one does, or another."""
    host = Host()
    assert isinstance(host.act("0", 1, BarrierArrive(2, "0")), CallWaiter)
    assert host.act("1", 1, BarrierArrive(2, "0")) == Done()
    assert host.answers() == [(1, Done())]
    if ends == "1":
        host.end("1")
        assert host.act("0", 2, LeaveBarrier(1)) == Done()
    else:
        assert isinstance(host.act("0", 2, LeaveBarrier(1)), CallWaiter)
        assert host.engine.size > 0
        if ends == "0":
            host.end("0")
        assert host.act("1", 2, LeaveBarrier(1)) == Done()
        assert host.answers() == ([] if ends == "0" else [(2, Done())])
    host.assert_empty()


# Timers, on the example of the last call of a rendezvous

JOIN = RendezvousJoin(NodeLimits(2, 4, 5.0))


def rank_of(result: Any) -> int:
    assert isinstance(result, Done)
    answer = msgspec.msgpack.decode(result.answer) if isinstance(result.answer, msgspec.Raw) else result.answer
    assert isinstance(answer, list)
    return int(answer[3])


def test_a_timer_fires_when_its_time_has_passed() -> None:
    host = Host()
    host.act("0", 1, JOIN)
    assert host.due_at() == NEVER, "no timer yet"
    host.act("1", 1, JOIN, now=1.0)
    assert host.due_at() == 6.0
    assert host.tick(5.9) == {}
    answers = host.tick(6.0)
    assert {name: rank_of(answer) for name, answer in answers.items()} == {"0": 0, "1": 1}
    assert host.objects.timers == {}
    host.end("0", "1")
    host.assert_empty()


def test_later_joins_do_not_restart_a_timer() -> None:
    host = Host()
    for session, now in (("0", 0.0), ("1", 1.0), ("2", 4.0)):
        host.act(session, 1, JOIN, now=now)
    assert sorted(map(rank_of, host.tick(6.0).values())) == [0, 1, 2]


@pytest.mark.parametrize("how", ["full", "withdrawn", "left behind", "closed"])
def test_a_timer_is_stopped_when_last_call_ends(how: str) -> None:
    host = Host()
    host.act("0", 1, JOIN)
    host.act("1", 1, JOIN)
    assert len(host.objects.timers) == 1
    match how:
        case "full":
            host.act("2", 1, JOIN)
            host.act("3", 1, JOIN)
        case "withdrawn":
            host.act("1", 2, rendezvous.RendezvousWithdraw(1))
        case "left behind":
            host.end("1")
        case "closed":
            host.act("2", 1, RendezvousClose("done", "well"))
    assert host.objects.timers == {} and host.due_at() == NEVER
    host.engine.take()
    revision = host.engine.revision
    host.tick(5.0)
    assert host.engine.revision == revision, "nothing fired"
    for session in "0123":
        host.end(session)
    host.engine.take()
    if how != "closed":
        host.assert_empty()


def test_a_due_timer_that_is_stopped_does_not_fire() -> None:
    """The timer is due, and before its entry is applied, a node withdraws and rejoins: that sets another timer."""
    host = Host()
    host.act("0", 1, JOIN)
    host.act("1", 1, JOIN)
    ((place, (number, duration_s)),) = host.objects.timers.items()
    assert host.deadlines.due(5.0) == [place] and duration_s == 5.0
    host.act("1", 2, rendezvous.RendezvousWithdraw(1))
    host.act("1", 3, JOIN, now=5.0)
    assert host.answers() == [(1, Refused("Undone", {}))]
    host.objects.fire(place, number)
    assert host.engine.take() == [] and host.objects.timers[place][0] != number
    assert host.act("2", 1, RendezvousQuery()).answer["phase"] == "gathering"
    assert host.tick(9.5) == {"0": ENDED}
    assert set(host.tick(10.0)) == {"1"}


def test_a_timer_is_set_by_the_end_of_a_session() -> None:
    """A spare waits, and a node of the round is lost: the other has until the timer fires to rejoin."""
    host = Host()
    join = RendezvousJoin(NodeLimits(1, 2, 5.0))
    spare = [host.act(session, 1, join) for session in "012"][-1]
    assert isinstance(spare, CallWaiter)
    host.engine.take()
    host.end("1", now=7.0)
    assert host.due_at() == 12.0
    assert host.tick(11.9) == {"2": ENDED}
    assert host.objects.explain(spare).missing == ("0",)
    host.act("2", 1, join, now=11.9)
    assert rank_of(host.tick(12.0)["2"]) == 0, "in a round of its own"
    for session in "02":
        host.end(session)
    host.assert_empty()


def test_every_object_has_its_own_timer() -> None:
    host = Host()
    for name, now in ((b"/a", 0.0), (b"/b", 2.0)):
        for session in "01":
            host.act(session, 1, JOIN, name, now)
    assert len(host.objects.timers) == 2
    assert len(host.tick(5.0)) == 2 and len(host.objects.timers) == 1
    assert len(host.tick(7.0)) == 2 and host.objects.timers == {}
    host.end("0", "1")
    host.assert_empty()


@pytest.mark.parametrize("spare", range(0, 2 * CALL_BYTES, 100))
def test_there_is_room_for_a_timer_or_the_call_is_refused(spare: int) -> None:
    host = Host()
    host.act("0", 1, JOIN)
    host.engine.memory.limit = host.engine.size + spare
    before = (host.engine.size, host.engine.revision)
    try:
        host.act("1", 1, JOIN)
    except StoreFull:
        assert (host.engine.size, host.engine.revision) == before and not host.objects.timers
    else:
        assert len(host.objects.timers) == 1 and set(host.tick(5.0)) == {"0", "1"}
    host.end("0", "1")
    host.engine.take()
    host.assert_empty()


def test_every_node_gets_its_own_rank() -> None:
    """Answers that differ in the rank must not share an encoding."""
    host, size = Host(), 50
    join = RendezvousJoin(NodeLimits(size, size))
    last = [host.act(str(number), 1, join) for number in range(size)][-1]
    answers = {int(name): rank_of(answer) for name, answer in host.tick(0.0).items()}
    assert answers == {number: number for number in range(size - 1)} and rank_of(last) == size - 1
    for number in range(size):
        host.end(str(number))
    host.assert_empty()


def test_rejoining_nodes_do_not_cost_more_each_time() -> None:
    host, sizes = Host(), set()
    join = RendezvousJoin(NodeLimits(2, 2), {"batch": "16"})
    for number in range(1, 300, 3):
        assert isinstance(host.act("0", number, join), CallWaiter)
        scope = host.act("1", number, join).answer[2]
        assert isinstance(host.act("0", number + 1, rendezvous.RendezvousWatch(scope)), CallWaiter)
        sizes.add(host.engine.size)
        host.engine.take()
    assert len(sizes) == 1 and all(len(held) == 2 for session, held in host.objects._calls.items() if session == "0")
    assert host.act("0", 1000, RendezvousLeave(298)) == Done(1)
    assert host.act("1", 1000, RendezvousLeave(298)) == Done(0)
    host.engine.take()
    host.assert_empty()


def test_a_closed_run_is_remembered_without_members() -> None:
    host = Host()
    host.act("0", 1, RendezvousJoin(NodeLimits()))
    host.act("0", 2, RendezvousClose("done", "well"))
    host.end("0")
    assert host.engine.size == host.charged_idle and host.objects.statistics() == {"rendezvous": 1}
    assert host.act("1", 1, RendezvousJoin(NodeLimits())) == Refused(
        "RunClosed", {"result": "done", "reason": "well", "waited": False}
    )
    assert host.objects.statistics() == {"rendezvous": 1}, "it is still remembered"
    host.end("1")


def test_a_reopened_run_is_remembered() -> None:
    """Otherwise nodes of the previous run would be taken for its own."""
    host = Host()
    run = host.act("0", 1, RendezvousJoin(NodeLimits())).answer[0]
    host.act("0", 2, RendezvousClose("done", "well"))
    host.end("0")
    assert host.act("1", 1, RendezvousReopen()) == Done(True)
    assert host.act("1", 2, RendezvousJoin(NodeLimits(), run=run)).error == "RunClosed"
    assert host.act("1", 3, RendezvousJoin(NodeLimits())).answer[0] > run


def test_reopening_a_closed_run_frees_its_nodes() -> None:
    host = Host()
    for session in "01":
        host.act(session, 1, RendezvousJoin(NodeLimits(2, 2)))
    host.engine.take()
    host.act("0", 2, RendezvousClose("done", "well"))
    assert host.engine.size > 0, "they have not left"
    host.act("0", 3, RendezvousReopen())
    assert host.engine.size == host.charged_idle and host.objects._calls == {}


def test_the_most_recently_used_closed_runs_are_remembered() -> None:
    host = Host()
    names = [f"/{number}".encode() for number in range(MAX_IDLE + 3)]
    for number, name in enumerate(names[:-1]):
        host.act("0", number, RendezvousClose("done", "well"), name)
    assert host.act("0", 9_001, RendezvousQuery(), names[2]).answer["phase"] == "closed", (
        "which makes it the most recently used"
    )
    host.act("0", 9_002, RendezvousClose("done", "well"), names[-1])
    assert host.objects.statistics() == {"rendezvous": MAX_IDLE} and len(host.objects._idle) == MAX_IDLE
    phases = [host.act("0", 9_003, RendezvousQuery(), name).answer["phase"] for name in names[:5]]
    assert phases == ["gathering", "gathering", "closed", "gathering", "closed"]
    assert host.engine.size == host.charged_idle


def test_ranks_are_remembered_after_all_nodes_were_lost_but_settings_are_not() -> None:
    host = Host()
    join = RendezvousJoin(NodeLimits(2, 2), {"batch": "x" * 1000})
    for session in "01":
        host.act(session, 1, join)
    for session in "10":
        host.end(session)
    host.engine.take()
    assert host.remembered().past == {"0": 0, "1": 1}
    host.assert_empty()
    waits = host.act("1", 2, RendezvousJoin(NodeLimits(2, 2), {"batch": "y"}))
    assert isinstance(waits, CallWaiter), "the old settings do not matter any more"
    assert rank_of(host.act("0", 2, RendezvousJoin(NodeLimits(2, 2), {"batch": "y"}))) == 0


def test_ranks_of_a_closed_run_are_not_remembered() -> None:
    host = Host()
    for session in "01":
        host.act(session, 1, RendezvousJoin(NodeLimits(2, 2)))
    host.act("0", 2, RendezvousClose("done", "well"))
    for session in "01":
        host.end(session)
    host.engine.take()
    assert host.remembered().past == {} and host.remembered().closed == ("done", "well")
    host.assert_empty()


def lost_run(host: Host, name: bytes, nodes: list[str]) -> None:
    """Form a round of these nodes, all in one session, and end the session."""
    join = RendezvousJoin(NodeLimits(len(nodes), len(nodes)))
    for number, node in enumerate(nodes):
        host.call(Call(node, "s", number), join, "s", name, number)
    host.end("s")
    host.engine.take()


def test_the_memory_of_idle_runs_is_bounded_and_keeps_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "MAX_IDLE_BYTES", 30_000)
    host = Host()
    for run in range(20):
        lost_run(host, b"/%d" % run, [f"{node:0250}" for node in range(10)])
        host.assert_empty()
        assert host.objects._idle_bytes <= 30_000
    assert 2 < len(host.objects._idle) < 10 and (rendezvous.RendezvousMachine, b"/19") in host.objects._idle


def test_an_idle_run_over_the_limit_forgets_its_oldest_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """But it keeps the numbers of its rounds and runs."""
    monkeypatch.setattr(objects, "MAX_IDLE_BYTES", 10_000)
    host = Host()
    nodes = [f"{node:0250}" for node in range(100)]
    lost_run(host, b"/o", nodes)
    kept = host.remembered()
    assert kept.number == 1 and 5 < len(kept.past) < 40 and list(kept.past) == nodes[-len(kept.past) :]
    assert host.objects._idle_bytes <= 10_000
    host.assert_empty()


def test_a_run_in_use_is_not_forgotten_for_idle_ones() -> None:
    host = Host()
    host.act("0", 1, RendezvousClose("done", "well"))
    host.act("0", 2, RendezvousReopen())
    host.act("0", 3, RendezvousJoin(NodeLimits()))
    for number in range(MAX_IDLE + 1):
        host.act("1", number, RendezvousClose("done", "well"), f"/{number}".encode())
    assert host.act("0", 4, RendezvousQuery()).answer["phase"] == "formed"


# A client that withdraws a call


def requests_in(data: bytes) -> list[Op]:
    return [decode_request(payload) for payload in Frames(1 << 20).feed(data)]


@pytest.mark.parametrize("answered", [CONFIRM_EVERY - 1, CONFIRM_EVERY, 3 * CONFIRM_EVERY])
def test_a_drop_is_sent_before_a_confirm(answered: int) -> None:
    """An interrupted call may have taken an item: if that is confirmed first, it cannot be returned."""
    client = ClientProtocol("test")
    client.ask(Pop(0, b"/q"))
    for number in range(2, answered + 2):
        client.ask(Add(0, b"/n", 1))
        (reply,) = client.receive(frame((number, ReplyStatus.OK, 1)))
        client.settle(reply)
    client.forget(1)
    first, *others = requests_in(client.ask(Drop(0, 1)))
    assert isinstance(first, Drop) and first.target == 1
    assert [type(other) for other in others] == ([Confirm] if answered >= CONFIRM_EVERY else [])


def test_a_confirm_is_sent_before_any_other_request() -> None:
    client = ClientProtocol("test")
    client.ask(Pop(0, b"/q"))
    client.settle(Reply(1, ReplyStatus.OK, b"an item, which is confirmed at once"))
    confirm, add = requests_in(client.ask(Add(0, b"/n", 1)))
    assert (type(confirm), type(add)) == (Confirm, Add)
    assert isinstance(confirm, Confirm) and confirm.last == 1 and confirm.open == []


def test_a_restarted_rank_waits_for_the_end_of_its_old_session() -> None:
    host = Host()
    host.call(Call("0", "old", 1), ExchangeGive(2, 0, b"old", "all_gather"), "old", number=1)
    held = host.call(Call("0", "new", 1), ExchangeGive(2, 0, b"new", "all_gather"), "new", number=2)
    assert isinstance(host.act("1", 1, ExchangeGive(2, 1, b"b", "all_gather")), CallWaiter)
    assert "0's earlier process of session old still holds the place" in host.time_out(held).reason
    held = host.call(Call("0", "new", 1), ExchangeGive(2, 0, b"new", "all_gather"), "new", number=3)
    assert isinstance(held, CallWaiter) and host.answers() == []
    host.end("old")
    assert [(number, msgspec.msgpack.decode(answer.answer)) for number, answer in host.answers()] == [
        (1, [b"new", b"b"]),
        (3, [b"new", b"b"]),
    ]
    host.assert_empty()


def test_a_call_replaced_by_a_later_one_of_its_session_is_refused_and_freed() -> None:
    host = Host()
    host.act("0", 1, ExchangeGive(2, 0, b"a", "all_gather"))
    host.act("0", 2, ExchangeGive(2, 0, b"b", "all_gather"))
    other = "0, by a later call of the same process"
    assert host.answers() == [(1, Refused("NameTaken", {"member": "0", "other": other}))]
    assert host.act("1", 3, ExchangeGive(2, 1, b"c", "all_gather")) == Done([b"b", b"c"])
    assert [number for number, _ in host.answers()] == [2]
    host.assert_empty()


# Refusals because of a disconnected session


def test_a_call_contested_by_a_disconnected_session_waits_for_its_end() -> None:
    host = Host()
    host.act("0", 1, BarrierArrive(3))
    host.objects.contested.session_detached("0")
    waiter = host.act("1", 2, BarrierArrive(2))
    assert "blocked by 0" in host.time_out(waiter).reason
    assert isinstance(host.act("1", 2, BarrierArrive(2)), CallWaiter)
    host.end("0")
    ((number, answer),) = host.answers()
    assert number == 2 and isinstance(answer, Waiting), "it must recheck"
    assert isinstance(host.act("1", 2, BarrierArrive(2)), CallWaiter)
    assert host.act("0'", 3, BarrierArrive(["1", "0'"])).error == "Disagreement"
    host.call(Call("0", "new", 4), BarrierArrive(2), "new", number=4)
    assert host.answers() == [(2, Done())]
    host.assert_empty()


def test_a_contested_call_is_refused_when_the_other_session_resumes() -> None:
    host = Host()
    host.act("0", 1, BarrierArrive(3))
    host.objects.contested.session_detached("0")
    assert isinstance(host.act("1", 2, BarrierArrive(2)), CallWaiter)
    assert isinstance(host.act("2", 3, BarrierArrive(2)), CallWaiter)
    host.objects.session_settled("0")
    assert [(number, type(answer)) for number, answer in host.answers()] == [(2, Waiting), (3, Waiting)]
    for session, number in (("1", 2), ("2", 3)):
        assert host.act(session, number, BarrierArrive(2)).error == "Disagreement"
    host.act("0", 4, BarrierWithdraw(1))
    assert [number for number, _ in host.answers()] == [1]
    host.assert_empty()


@pytest.mark.parametrize("how", ["undo", "end"])
def test_a_contested_call_may_be_withdrawn_or_end(how: str) -> None:
    host = Host()
    host.act("0", 1, BarrierArrive(3))
    host.objects.contested.session_detached("0")
    host.act("1", 2, BarrierArrive(2))
    if how == "undo":
        assert host.act("1", 3, BarrierWithdraw(2)) == Done()
        assert [number for number, _ in host.answers()] == [2]
    host.end("1")
    host.end("0")
    host.assert_empty()


def test_a_contested_call_with_timeout_zero_is_refused_at_once() -> None:
    host = Host()
    host.act("0", 1, BarrierArrive(3))
    host.objects.contested.session_detached("0")
    outcome = host.objects.act(b"/o", Call("1", "1", 2), BarrierArrive(2), "1", 0.0, 2)
    assert isinstance(outcome, Refused) and outcome.error == "Disagreement"
    host.end("0")
    host.assert_empty()


# Deadlines at the same moment


@pytest.mark.parametrize("why_first", [True, False])
@pytest.mark.parametrize("kind", ["barrier", "exchange"])
def test_a_round_that_ends_as_its_wait_times_out_is_not_forgotten(kind: str, why_first: bool) -> None:
    """A server times out waits, then ends sessions after their grace, before any client can repeat its call."""
    host = Host()
    commands = [
        BarrierArrive(3) if kind == "barrier" else ExchangeGive(3, rank, b"", "all_gather") for rank in range(2)
    ]
    waiters = [host.act(str(rank), 1, command) for rank, command in enumerate(commands)]
    assert set(host.tick(9.0).values()) == {ENDED}
    if why_first:
        assert all(isinstance(host.objects.explain(waiter), Waiting) for waiter in waiters)
    host.end("1")
    if not why_first:
        assert all(isinstance(host.objects.explain(waiter), Waiting) for waiter in waiters)
    assert host.answers() == []
    assert host.act("0", 1, commands[0]) == Refused("MembersLost", {"lost": ["1"]})
    host.assert_empty()
