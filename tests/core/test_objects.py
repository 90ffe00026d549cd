"""The shared objects of a server on a bare engine: calls that are taken back, refused, late or left behind.

Whatever happens to them, at the end there is no call, and not one byte counted; and no machine, but for runs that had
a round, which are remembered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from rallypoint.core import objects, rendezvous
from rallypoint.core.barrier import Arrive, Withdraw
from rallypoint.core.barrier import Leave as LeaveBarrier
from rallypoint.core.call_waiter import CallWaiter, Woken
from rallypoint.core.deadlines import NEVER, Deadlines
from rallypoint.core.engine import ENTRY_BYTES, Engine
from rallypoint.core.exchange import Give, TakeBack
from rallypoint.core.gathering import Limits
from rallypoint.core.lock import Acquire, Release
from rallypoint.core.machine import Call, Command, Done, Refused, Waiting
from rallypoint.core.objects import MAX_IDLE, MAX_IDLE_BYTES, Objects
from rallypoint.core.ops import Add, Confirm, Drop, Op, Pop
from rallypoint.core.records import Status
from rallypoint.core.rendezvous import Close, Join, Leave, Look, Open
from rallypoint.errors import StoreFull
from rallypoint.protocol.client import CONFIRM_EVERY, Client, Reply
from rallypoint.protocol.native import Frames, decode_request, frame

ENDED = "its time is over"


class Host:
    """What a server does around its objects, its clock included. A session is named as its one member is: 0 or 1."""

    def __init__(self, max_bytes: int = 1 << 62) -> None:
        self.engine = Engine()
        self.engine.max_bytes = max_bytes
        self.objects = Objects(self.engine)
        self.deadlines = Deadlines()

    def act(self, session: str, number: int, command: Command, name: bytes = b"/o", now: float = 0.0) -> Any:
        return self.call(Call(session, session, number), command, session, name, now=now)

    def call(
        self, call: Call, command: Command, owner: str, name: bytes = b"/o", number: int = 0, now: float = 0.0
    ) -> Any:
        """Carry out a command; where it waits, the caller wants to hear why after nine seconds."""
        outcome = self.objects.act(name, call, command, owner, 9.0, number or call.number)
        if isinstance(outcome, CallWaiter):
            self.deadlines.set(outcome, now + 9.0)
        self.set_timers(now)
        return outcome

    def set_timers(self, now: float) -> None:
        """Note when the timers are due that have changed."""
        changed, self.objects.changed_timers = self.objects.changed_timers, []
        for place in changed:
            timer = self.objects.timers.get(place)
            if timer is None:
                self.deadlines.drop(place)
            else:
                self.deadlines.set(place, now + timer[1])

    def due_at(self) -> float:
        """Return when a timer is due next."""
        return min((at for key, at in self.deadlines._at.items() if isinstance(key, tuple)), default=NEVER)

    def look_away(self, waiter: CallWaiter) -> Waiting:
        """Let a wait end by its deadline; its call is then between two looks."""
        assert waiter.waits
        return self.objects.why(waiter)

    def end(self, session: str, now: float = 0.0) -> None:
        self.engine.end(session)
        self.objects.end(session)
        self.set_timers(now)

    def answers(self) -> list[tuple[Any, Any]]:
        return [(waiter.number, answer) for waiter, answer in self.taken()]

    def taken(self) -> list[tuple[CallWaiter, Any]]:
        """Return who is answered, and how, since the last call."""
        out = self.engine.take()
        each = [(one.waiters if isinstance(one, Woken) else [one], answer) for one, answer in out]
        return [(waiter, answer) for waiters, answer in each for waiter in waiters]

    def tick(self, now: float) -> dict[str, Any]:
        """Let the time pass and timers fire, as a server does; return who was told what."""
        told = {}
        for key in self.deadlines.due(now):
            if isinstance(key, tuple):
                self.objects.fire(key, self.objects.timers[key][0])
                self.set_timers(now)
            elif isinstance(key, CallWaiter) and key.waits:
                self.objects.forget(key)
                told[str(key.owner)] = ENDED
            for waiter, answer in self.taken():
                told[str(waiter.owner)] = answer
        return told | {str(waiter.owner): answer for waiter, answer in self.taken()}

    def expect_nothing_left(self) -> None:
        left = self.objects
        assert (left._calls, left.late, left.late.by_session, left.timers) == ({}, {}, {}, {})
        assert self.engine.size == 0 and left.waiting == 0
        assert self.answers() == []
        assert list(left._machines) == list(left._idle), "those that are remembered, and no others"
        for machine in left._machines.values():
            assert isinstance(machine, rendezvous.Rendezvous) and machine.idle and machine.lasts
            ended = not (machine.waiting or machine.nodes or machine.ranks or machine.calls or machine.watchers)
            assert ended and not machine.settings and machine.origin is None
        assert left._idle_bytes == sum(left._idle.values()) <= MAX_IDLE_BYTES

    def remembered(self, name: bytes = b"/o") -> rendezvous.Rendezvous:
        machine = self.objects._machines[rendezvous.Rendezvous, name]
        assert isinstance(machine, rendezvous.Rendezvous)
        return machine


UNDONE: dict[str, tuple[Command, Callable[[int], Command]]] = {
    "barrier": (Arrive(2), Withdraw),
    "exchange": (Give(2, 0, b"x" * 1000, "all_gather"), TakeBack),
}


@pytest.mark.parametrize("kind", UNDONE)
def test_a_wait_that_is_undone_is_answered_and_leaves_nothing(kind: str) -> None:
    host = Host()
    command, undo = UNDONE[kind]
    assert isinstance(host.act("0", 1, command), CallWaiter)
    assert not isinstance(host.act("0", 2, undo(1)), CallWaiter)
    assert host.answers() == [(1, Refused("Undone", {}))]
    host.expect_nothing_left()


def test_a_wait_for_a_lock_that_is_undone_is_answered_and_the_holder_holds() -> None:
    host = Host()
    fence = host.act("0", 1, Acquire())
    assert isinstance(host.act("1", 1, Acquire()), CallWaiter)
    assert host.act("1", 2, Release(1)) == Done(False)
    assert host.answers() == [(1, Refused("Undone", {}))]
    assert host.act("0", 1, Acquire()) == fence
    assert host.act("0", 2, Release(1)) == Done(True)
    host.expect_nothing_left()


def test_why_has_an_answer_when_the_machine_has_gone() -> None:
    """The wait ends by its deadline, and before its host asks why, the call is taken back."""
    host = Host()
    waiter = host.act("0", 1, Arrive(2))
    host.objects.forget(waiter)
    host.act("0", 2, Withdraw(1))
    assert host.objects.statistics() == {}
    assert host.objects.why(waiter) == Waiting("it was taken back")
    host.engine.take()
    host.expect_nothing_left()


def test_one_call_number_at_two_places_is_counted_and_freed_at_both() -> None:
    host = Host()
    give = Give(2, 0, b"x" * 1000, "gather", 1)
    first = host.act("0", 1, give, b"/a")
    counted = host.engine.size
    second = host.act("0", 1, give, b"/b")
    assert isinstance(first, CallWaiter) and isinstance(second, CallWaiter)
    assert host.engine.size == 2 * counted >= 2000
    host.act("0", 2, TakeBack(1), b"/a")
    assert host.engine.size == counted
    host.end("0")
    host.engine.take()
    host.expect_nothing_left()


def test_one_call_number_at_two_places_waits_at_both() -> None:
    host = Host()
    for name in (b"/a", b"/b"):
        assert isinstance(host.act("0", 1, Arrive(2), name), CallWaiter)
    for name in (b"/a", b"/b"):
        assert isinstance(host.act("1", 1, Arrive(2), name), Done)
        ((number, answer),) = host.answers()
        assert number == 1 and isinstance(answer, Done)
    host.end("0")
    host.end("1")
    host.expect_nothing_left()


@pytest.mark.parametrize("spare", range(0, 3 * ENTRY_BYTES, 40))
def test_a_call_that_a_full_store_refuses_changes_nothing(spare: int) -> None:
    """There is room for none or some of what it needs to get in line and wait."""
    host = Host()
    host.act("0", 1, Acquire())
    size, revision = host.engine.size, host.engine.revision
    host.engine.max_bytes = size + spare
    with pytest.raises(StoreFull):
        host.act("1", 1, Acquire())
    assert (host.engine.size, host.engine.revision) == (size, revision)
    assert host.act("0", 2, Release(1)) == Done(True)
    host.expect_nothing_left()


def test_a_late_call_whose_session_ends_lets_the_machine_go() -> None:
    """The exchange ends while one call is between two looks, and its session never looks again."""
    host = Host()
    late = host.act("0", 1, Give(2, 0, b"x" * 1000, "all_gather"))
    assert host.look_away(late).missing
    assert isinstance(host.act("1", 1, Give(2, 1, b"", "all_gather")), Done)
    assert host.objects.statistics() == {"exchange": 1}, "the late one may still look"
    host.end("0")
    host.end("1")
    host.expect_nothing_left()


def test_what_is_kept_for_a_late_call_is_counted_until_it_looks() -> None:
    host = Host()
    assert host.look_away(host.act("0", 1, Give(2, 0, b"x" * 10_000, "all_gather"))).missing
    given = host.engine.size
    last = host.act("1", 1, Give(2, 1, b"y" * 5000, "all_gather"))
    assert given + 5000 <= host.engine.size <= given + 5000 + 5 * ENTRY_BYTES, "all of the result, and only once"
    assert host.act("0", 1, Give(2, 0, b"x" * 10_000, "all_gather")) == last
    host.expect_nothing_left()


def test_calls_that_never_look_fill_the_store_and_no_more() -> None:
    """One member arrives, looks away, and is let through by the other: again and again, and at more and more places."""
    host = Host(100_000)

    def fill() -> None:
        for number in range(1_000_000):
            place = b"/%d" % (number % 50)
            host.look_away(host.act("0", number, Arrive(2), place))
            assert host.act("1", number, Arrive(2), place) == Done()

    with pytest.raises(StoreFull):
        fill()
    late = sum(len(late.calls) for late in host.objects.late.values())
    assert late * ENTRY_BYTES < host.engine.size < host.engine.max_bytes
    host.end("0")
    host.end("1")
    host.expect_nothing_left()


def test_the_end_of_a_session_takes_only_its_own_late_calls() -> None:
    host = Host()
    for session in "01":
        host.look_away(host.act(session, 1, Arrive(3)))
    host.act("2", 1, Arrive(3))
    host.end("0")
    assert host.objects.statistics() == {"barrier": 1} and host.engine.size > 0
    assert host.act("1", 1, Arrive(3)) == Done()
    host.end("2")
    host.expect_nothing_left()


@pytest.mark.parametrize("ends", ["0", "1", "none"])
def test_a_barrier_with_a_last_one_out_leaves_nothing(ends: str) -> None:
    """Nobody dies on the way out, or the last one does, or another."""
    host = Host()
    assert isinstance(host.act("0", 1, Arrive(2, "0")), CallWaiter)
    assert host.act("1", 1, Arrive(2, "0")) == Done()
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
    host.expect_nothing_left()


# Timers, on the example of the last call of a rendezvous

JOIN = Join(Limits(2, 4, 5.0))


def rank_of(told: Any) -> int:
    assert isinstance(told, Done)
    answer = msgspec.msgpack.decode(told.answer) if isinstance(told.answer, msgspec.Raw) else told.answer
    assert isinstance(answer, list)
    return int(answer[3])


def test_a_timer_fires_when_its_time_has_passed() -> None:
    host = Host()
    host.act("0", 1, JOIN)
    assert host.due_at() == NEVER, "no timer yet"
    host.act("1", 1, JOIN, now=1.0)
    assert host.due_at() == 6.0
    assert host.tick(5.9) == {}
    told = host.tick(6.0)
    assert {name: rank_of(answer) for name, answer in told.items()} == {"0": 0, "1": 1}
    assert host.objects.timers == {}
    host.end("0")
    host.end("1")
    host.expect_nothing_left()


def test_a_timer_is_not_set_anew_by_those_who_come_meanwhile() -> None:
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
            host.act("1", 2, rendezvous.Withdraw(1))
        case "left behind":
            host.end("1")
        case "closed":
            host.act("2", 1, Close("done", "well"))
    assert host.objects.timers == {} and host.due_at() == NEVER
    host.engine.take()
    revision = host.engine.revision
    host.tick(5.0)
    assert host.engine.revision == revision, "nothing fired"
    for session in "0123":
        host.end(session)
    host.engine.take()
    if how != "closed":
        host.expect_nothing_left()


def test_a_timer_that_is_stopped_when_it_is_about_to_fire_does_not() -> None:
    """Its time is over, and before its entry is applied, one withdraws, and comes back: that is another."""
    host = Host()
    host.act("0", 1, JOIN)
    host.act("1", 1, JOIN)
    ((place, (number, duration_s)),) = host.objects.timers.items()
    assert host.deadlines.due(5.0) == [place] and duration_s == 5.0
    host.act("1", 2, rendezvous.Withdraw(1))
    host.act("1", 3, JOIN, now=5.0)
    assert host.answers() == [(1, Refused("Undone", {}))]
    host.objects.fire(place, number)
    assert host.engine.take() == [] and host.objects.timers[place][0] != number
    assert host.act("2", 1, Look()).answer["phase"] == "gathering"
    assert host.tick(9.5) == {"0": ENDED}, "0 is to hear why it waits"
    assert set(host.tick(10.0)) == {"1"}


def test_a_timer_is_set_by_the_end_of_a_session() -> None:
    """A spare waits, and one of the round is lost: the other has so long to come again."""
    host = Host()
    join = Join(Limits(1, 2, 5.0))
    spare = [host.act(session, 1, join) for session in "012"][-1]
    assert isinstance(spare, CallWaiter)
    host.engine.take()
    host.end("1", 7.0)
    assert host.due_at() == 12.0
    assert host.tick(11.9) == {"2": ENDED}
    assert host.objects.why(spare).missing == ("0",)
    host.act("2", 1, join, now=11.9)
    assert rank_of(host.tick(12.0)["2"]) == 0, "in a round of its own"
    for session in "02":
        host.end(session)
    host.expect_nothing_left()


def test_one_timer_at_every_place() -> None:
    host = Host()
    for name, now in ((b"/a", 0.0), (b"/b", 2.0)):
        for session in "01":
            host.act(session, 1, JOIN, name, now)
    assert len(host.objects.timers) == 2
    assert len(host.tick(5.0)) == 2 and len(host.objects.timers) == 1
    assert len(host.tick(7.0)) == 2 and host.objects.timers == {}
    host.end("0")
    host.end("1")
    host.expect_nothing_left()


@pytest.mark.parametrize("spare", range(0, 6 * ENTRY_BYTES, 40))
def test_there_is_room_for_a_timer_or_the_call_is_refused(spare: int) -> None:
    host = Host()
    host.act("0", 1, JOIN)
    host.engine.max_bytes = host.engine.size + spare
    before = (host.engine.size, host.engine.revision)
    try:
        host.act("1", 1, JOIN)
    except StoreFull:
        assert (host.engine.size, host.engine.revision) == before and not host.objects.timers
    else:
        assert len(host.objects.timers) == 1 and set(host.tick(5.0)) == {"0", "1"}
    host.end("0")
    host.end("1")
    host.engine.take()
    host.expect_nothing_left()


def test_everybody_is_told_its_own_rank() -> None:
    """The answers are made one after the other, and each is encoded: none may be taken for another."""
    host, size = Host(), 50
    join = Join(Limits(size, size))
    last = [host.act(str(number), 1, join) for number in range(size)][-1]
    told = {int(name): rank_of(answer) for name, answer in host.tick(0.0).items()}
    assert told == {number: number for number in range(size - 1)} and rank_of(last) == size - 1
    for number in range(size):
        host.end(str(number))
    host.expect_nothing_left()


def test_nodes_that_come_again_and_again_cost_the_same() -> None:
    host, sizes = Host(), set()
    join = Join(Limits(2, 2), {"batch": "16"})
    for number in range(1, 300, 3):
        assert isinstance(host.act("0", number, join), CallWaiter)
        scope = host.act("1", number, join).answer[2]
        assert isinstance(host.act("0", number + 1, rendezvous.Watch(scope)), CallWaiter)
        sizes.add(host.engine.size)
        host.engine.take()
    assert len(sizes) == 1 and all(len(held) == 2 for session, held in host.objects._calls.items() if session == "0")
    assert host.act("0", 1000, Leave(298)) == Done(1)
    assert host.act("1", 1000, Leave(298)) == Done(0)
    host.engine.take()
    host.expect_nothing_left()


def test_a_closed_run_is_remembered_though_nobody_is_here() -> None:
    host = Host()
    host.act("0", 1, Join(Limits()))
    host.act("0", 2, Close("done", "well"))
    host.end("0")
    assert host.engine.size == 0 and host.objects.statistics() == {"rendezvous": 1}
    assert host.act("1", 1, Join(Limits())) == Refused(
        "RunClosed", {"result": "done", "reason": "well", "waited": False}
    )
    assert host.objects.statistics() == {"rendezvous": 1}, "and not only once"
    host.end("1")


def test_a_run_that_was_opened_anew_is_remembered_too() -> None:
    """Else those of the one before would be taken for its nodes."""
    host = Host()
    run = host.act("0", 1, Join(Limits())).answer[0]
    host.act("0", 2, Close("done", "well"))
    host.end("0")
    assert host.act("1", 1, Open()) == Done(True)
    assert host.act("1", 2, Join(Limits(), run=run)).error == "RunClosed"
    assert host.act("1", 3, Join(Limits())).answer[0] > run


def test_nothing_is_counted_of_nodes_whose_run_was_closed_and_opened_again() -> None:
    host = Host()
    for session in "01":
        host.act(session, 1, Join(Limits(2, 2)))
    host.engine.take()
    host.act("0", 2, Close("done", "well"))
    assert host.engine.size > 0, "they are still here"
    host.act("0", 3, Open())
    assert host.engine.size == 0 and host.objects._calls == {}


def test_of_closed_runs_so_many_are_remembered_and_the_latest() -> None:
    host = Host()
    names = [f"/{number}".encode() for number in range(MAX_IDLE + 3)]
    for number, name in enumerate(names[:-1]):
        host.act("0", number, Close("done", "well"), name)
    assert host.act("0", 9_001, Look(), names[2]).answer["phase"] == "closed", "which makes it the latest"
    host.act("0", 9_002, Close("done", "well"), names[-1])
    assert host.objects.statistics() == {"rendezvous": MAX_IDLE} and len(host.objects._idle) == MAX_IDLE
    phases = [host.act("0", 9_003, Look(), name).answer["phase"] for name in names[:5]]
    assert phases == ["gathering", "gathering", "closed", "gathering", "closed"]
    assert host.engine.size == 0


def test_ranks_are_remembered_when_all_were_lost_and_settings_are_not() -> None:
    host = Host()
    join = Join(Limits(2, 2), {"batch": "x" * 1000})
    for session in "01":
        host.act(session, 1, join)
    for session in "10":
        host.end(session)
    host.engine.take()
    assert host.remembered().past == {"0": 0, "1": 1}
    host.expect_nothing_left()
    waits = host.act("1", 2, Join(Limits(2, 2), {"batch": "y"}))
    assert isinstance(waits, CallWaiter), "and nobody minds that it has other settings"
    assert rank_of(host.act("0", 2, Join(Limits(2, 2), {"batch": "y"}))) == 0


def test_no_ranks_are_remembered_of_a_run_that_is_over() -> None:
    host = Host()
    for session in "01":
        host.act(session, 1, Join(Limits(2, 2)))
    host.act("0", 2, Close("done", "well"))
    for session in "01":
        host.end(session)
    host.engine.take()
    assert host.remembered().past == {} and host.remembered().closed == ("done", "well")
    host.expect_nothing_left()


def lost_run(host: Host, name: bytes, nodes: list[str]) -> None:
    """Form a round of these nodes, in one session, and lose them."""
    join = Join(Limits(len(nodes), len(nodes)))
    for number, node in enumerate(nodes):
        host.call(Call(node, "s", number), join, "s", name, number)
    host.end("s")
    host.engine.take()


def test_what_is_remembered_of_all_runs_is_bounded_and_the_latest_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "MAX_IDLE_BYTES", 30_000)
    host = Host()
    for run in range(20):
        lost_run(host, b"/%d" % run, [f"{node:0250}" for node in range(10)])
        host.expect_nothing_left()
        assert host.objects._idle_bytes <= 30_000
    assert 2 < len(host.objects._idle) < 10 and (rendezvous.Rendezvous, b"/19") in host.objects._idle


def test_one_run_that_has_more_than_can_be_remembered_sheds_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not how many rounds and runs it has had."""
    monkeypatch.setattr(objects, "MAX_IDLE_BYTES", 10_000)
    host = Host()
    nodes = [f"{node:0250}" for node in range(100)]
    lost_run(host, b"/o", nodes)
    kept = host.remembered()
    assert kept.number == 1 and 5 < len(kept.past) < 40 and list(kept.past) == nodes[-len(kept.past) :]
    assert host.objects._idle_bytes <= 10_000
    host.expect_nothing_left()


def test_a_run_that_is_used_is_not_forgotten_for_those_that_are_not() -> None:
    host = Host()
    host.act("0", 1, Close("done", "well"))
    host.act("0", 2, Open())
    host.act("0", 3, Join(Limits()))
    for number in range(MAX_IDLE + 1):
        host.act("1", number, Close("done", "well"), f"/{number}".encode())
    assert host.act("0", 4, Look()).answer["phase"] == "formed"


# What a client says of a call that it takes back


def said(data: bytes) -> list[Op]:
    return [decode_request(payload) for payload in Frames(1 << 20).feed(data)]


@pytest.mark.parametrize("answered", [CONFIRM_EVERY - 1, CONFIRM_EVERY, 3 * CONFIRM_EVERY])
def test_no_confirm_before_a_drop_forgets_what_is_dropped(answered: int) -> None:
    """An item may have been taken for a call that was interrupted: confirmed first, it could not go back."""
    client = Client("test")
    client.ask(Pop(0, b"/q"))
    for number in range(2, answered + 2):
        client.ask(Add(0, b"/n", 1))
        (reply,) = client.receive(frame((number, Status.OK, 1)))
        client.settle(reply)
    client.forget(1)
    first, *others = said(client.ask(Drop(0, 1)))
    assert isinstance(first, Drop) and first.target == 1
    assert [type(other) for other in others] == ([Confirm] if answered >= CONFIRM_EVERY else [])


def test_a_confirm_goes_before_any_other_request() -> None:
    client = Client("test")
    client.ask(Pop(0, b"/q"))
    client.settle(Reply(1, Status.OK, b"an item, which is to be confirmed at once"))
    confirm, add = said(client.ask(Add(0, b"/n", 1)))
    assert (type(confirm), type(add)) == (Confirm, Add)
    assert isinstance(confirm, Confirm) and confirm.last == 1 and confirm.open == []


def test_a_rank_that_came_again_is_counted_while_it_is_held_and_has_the_place_after() -> None:
    host = Host()
    host.call(Call("0", "old", 1), Give(2, 0, b"old", "all_gather"), "old", number=1)
    held = host.call(Call("0", "new", 1), Give(2, 0, b"new", "all_gather"), "new", number=2)
    assert isinstance(host.act("1", 1, Give(2, 1, b"b", "all_gather")), CallWaiter)
    assert "0's earlier process of session old still holds the place" in host.look_away(held).reason
    held = host.call(Call("0", "new", 1), Give(2, 0, b"new", "all_gather"), "new", number=3)
    assert isinstance(held, CallWaiter) and host.answers() == []
    host.end("old")
    assert [(number, msgspec.msgpack.decode(answer.answer)) for number, answer in host.answers()] == [
        (1, [b"new", b"b"]),
        (3, [b"new", b"b"]),
    ]
    host.expect_nothing_left()


def test_a_call_that_a_later_one_of_its_session_replaces_is_refused_and_counted_no_more() -> None:
    host = Host()
    host.act("0", 1, Give(2, 0, b"a", "all_gather"))
    host.act("0", 2, Give(2, 0, b"b", "all_gather"))
    other = "0, by a later call of the same process"
    assert host.answers() == [(1, Refused("NameTaken", {"member": "0", "other": other}))]
    assert host.act("1", 3, Give(2, 1, b"c", "all_gather")) == Done([b"b", b"c"])
    assert [number for number, _ in host.answers()] == [2]
    host.expect_nothing_left()


# Refusals that are in doubt


def test_a_call_that_is_refused_for_the_sake_of_one_who_may_be_dead_waits_for_its_end() -> None:
    host = Host()
    host.act("0", 1, Arrive(3))
    host.objects.doubts.away("0")
    waiter = host.act("1", 2, Arrive(2))
    assert "0 is in the way" in host.look_away(waiter).reason
    assert isinstance(host.act("1", 2, Arrive(2)), CallWaiter)
    host.end("0")
    ((number, answer),) = host.answers()
    assert number == 2 and isinstance(answer, Waiting), "it is to look again"
    assert isinstance(host.act("1", 2, Arrive(2)), CallWaiter)
    assert host.act("0'", 3, Arrive(["1", "0'"])).error == "Disagreement"
    host.call(Call("0", "new", 4), Arrive(2), "new", number=4)
    assert host.answers() == [(2, Done())]
    host.expect_nothing_left()


def test_it_is_refused_when_the_other_one_comes_back() -> None:
    host = Host()
    host.act("0", 1, Arrive(3))
    host.objects.doubts.away("0")
    assert isinstance(host.act("1", 2, Arrive(2)), CallWaiter)
    assert isinstance(host.act("2", 3, Arrive(2)), CallWaiter)
    host.objects.back("0")
    assert [(number, type(answer)) for number, answer in host.answers()] == [(2, Waiting), (3, Waiting)]
    for session, number in (("1", 2), ("2", 3)):
        assert host.act(session, number, Arrive(2)).error == "Disagreement"
    host.act("0", 4, Withdraw(1))
    assert [number for number, _ in host.answers()] == [1]
    host.expect_nothing_left()


@pytest.mark.parametrize("how", ["undo", "end"])
def test_it_may_be_taken_back_or_end_meanwhile(how: str) -> None:
    host = Host()
    host.act("0", 1, Arrive(3))
    host.objects.doubts.away("0")
    host.act("1", 2, Arrive(2))
    if how == "undo":
        assert host.act("1", 3, Withdraw(2)) == Done()
        assert [number for number, _ in host.answers()] == [2]
    host.end("1")
    host.end("0")
    host.expect_nothing_left()


def test_one_that_asks_not_to_wait_is_refused_at_once() -> None:
    host = Host()
    host.act("0", 1, Arrive(3))
    host.objects.doubts.away("0")
    outcome = host.objects.act(b"/o", Call("1", "1", 2), Arrive(2), "1", 0.0, 2)
    assert isinstance(outcome, Refused) and outcome.error == "Disagreement"
    host.end("0")
    host.expect_nothing_left()


# Deadlines that pass at the same moment


@pytest.mark.parametrize("why_first", [True, False])
@pytest.mark.parametrize("kind", ["barrier", "exchange"])
def test_a_round_that_ends_in_the_moment_in_which_a_wait_for_it_does_is_not_forgotten(
    kind: str, why_first: bool
) -> None:
    """A server lets waits end by their deadlines and then sessions by their grace, before anybody can look again."""
    host = Host()
    commands = [Arrive(3) if kind == "barrier" else Give(3, rank, b"", "all_gather") for rank in range(2)]
    waiters = [host.act(str(rank), 1, command) for rank, command in enumerate(commands)]
    assert set(host.tick(9.0).values()) == {ENDED}
    if why_first:
        assert all(isinstance(host.objects.why(waiter), Waiting) for waiter in waiters)
    host.end("1")
    if not why_first:
        assert all(isinstance(host.objects.why(waiter), Waiting) for waiter in waiters)
    assert host.answers() == []
    assert host.act("0", 1, commands[0]) == Refused("MembersLost", {"lost": ["1"]})
    host.expect_nothing_left()
