"""The rules of `core/machines/machine.py`, which hold for every machine and every history, on random histories."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.core.machines import barrier, rendezvous
from rallypoint.core.machines.barrier import BarrierArrive, BarrierMachine, BarrierWithdraw
from rallypoint.core.machines.exchange import ExchangeGive, ExchangeMachine, ExchangeWithdraw
from rallypoint.core.machines.lock import LockAcquire, LockMachine, LockRelease
from rallypoint.core.machines.machine import WAIT, Call, Command, Done, Machine, Refused, Step, Undo
from rallypoint.core.machines.membership import (
    MembershipJoin,
    MembershipLeave,
    MembershipMachine,
    MembershipQuery,
    MembershipWatch,
)
from rallypoint.core.policy.round_policy import NodeLimits

SIZE = 3
ranks = st.integers(0, SIZE - 1)
limits = st.sampled_from(
    [NodeLimits(1, 2, 5.0)] * 4 + [NodeLimits(2, 3, 5.0)] * 4 + [NodeLimits(2, 2, 0.0), NodeLimits(1, 3, 0.0)]
)
rank_wishes = st.sampled_from([-1, -1, 0, 1])
maps = st.dictionaries(
    st.sampled_from("012"), st.dictionaries(st.sampled_from("xy"), st.sampled_from("xy")), max_size=2
)
COMMANDS: dict[type[Machine], tuple[st.SearchStrategy[Any], type[Undo]]] = {
    BarrierMachine: (
        st.one_of(
            st.builds(BarrierArrive, st.sampled_from([SIZE, SIZE, SIZE, 2, ["0", "1"]])),
            *[st.builds(BarrierArrive, st.sampled_from([SIZE, 2, 2]), st.sampled_from("0001"))] * 2,
            *[st.builds(barrier.BarrierLeave, st.integers(0, 20))] * 2,
        ),
        BarrierWithdraw,
    ),
    ExchangeMachine: (
        st.builds(
            ExchangeGive,
            st.just(SIZE),
            ranks,
            st.sampled_from([b"x", b"x", b"y", b"z"]),
            st.sampled_from(["all_gather"] * 3 + ["gather", "broadcast"]),
            ranks,
        ),
        ExchangeWithdraw,
    ),
    LockMachine: (st.builds(LockAcquire), LockRelease),
    MembershipMachine: (
        st.one_of(
            st.builds(MembershipJoin, st.just(b""), st.lists(st.sampled_from("xy"), max_size=2), maps),
            st.builds(MembershipWatch, st.integers(0, 12)),
            st.builds(MembershipQuery),
        ),
        MembershipLeave,
    ),
    rendezvous.RendezvousMachine: (
        st.one_of(
            *[st.builds(rendezvous.RendezvousJoin, limits, rank=rank_wishes, run=st.sampled_from([-1, -1, 0]))] * 4,
            st.builds(rendezvous.RendezvousWatch, st.integers(1, 12)),
            st.builds(rendezvous.RendezvousClose, st.just("done"), st.just("well")),
            st.builds(rendezvous.RendezvousReopen, st.booleans()),
            st.builds(rendezvous.RendezvousQuery, st.integers(0, 12)),
            st.builds(rendezvous.RendezvousEvict, st.integers(0, 12), st.sampled_from("012"), st.just("silent")),
        ),
        rendezvous.RendezvousLeave,
    ),
}
members = st.sampled_from("012")
sessions = st.sampled_from("abcd")
"""Fewer sessions than calls, so that members share sessions and sessions have several members."""


def steps(kind: type[Machine]) -> st.SearchStrategy[list[tuple[Any, ...]]]:
    command, _ = COMMANDS[kind]
    return st.lists(
        st.one_of(
            st.tuples(st.just("call"), members, sessions, command),
            st.tuples(st.just("undo"), st.integers(0, 20)),
            st.tuples(st.just("end_session"), sessions),
            st.tuples(st.just("fire_timer")),
        ),
        max_size=30,
    )


class Hosted:
    """A machine and the knowledge of its host: all calls, and those that wait."""

    def __init__(self, kind: type[Machine]) -> None:
        self.machine = kind()
        self.undoing = COMMANDS[kind][1]
        self.stamp = 0
        self.calls: list[tuple[Call, Command]] = []
        self.waiting: dict[str, tuple[Call, Command]] = {}

    def kept(self) -> set[str]:
        """Return the ids of the calls that the machine holds."""
        return {call.id for call, _ in self.calls if self.machine.holds(call.id)}

    def did(self, step: Any, gone: set[str]) -> Any:
        """Encode and decode the state as text and as bytes; let woken calls recheck.

        The step must name every call in `gone` that is not held any more.
        """
        state = self.machine
        gone = gone - self.kept() - {call.id for call in (*step.woken, *step.dropped)}
        assert not gone, f"calls {gone} are gone without notice"
        for form in (msgspec.json, msgspec.msgpack):
            self.machine = form.decode(form.encode(state), type=type(state))
            assert self.machine == state
        assert step.changed or not list(step.woken)
        self.stamp += step.changed
        for call in step.woken:
            asked = self.waiting.pop(call.id)
            looked = self.machine.apply(*asked, self.stamp + 1)
            assert looked.outcome is not WAIT and not looked.changed, "woken for nothing"
        return step

    def call(self, member: str, session: str, command: Any) -> None:
        call = Call(member, session, len(self.calls))
        if isinstance(command, ExchangeGive):
            call = Call(str(command.rank), session, len(self.calls))
        self.calls.append((call, command))
        before, kept = msgspec.json.encode(self.machine), self.kept()
        step = self.did(self.machine.apply(call, command, self.stamp + 1), kept)
        assert step.changed == (msgspec.json.encode(self.machine) != before)
        if step.outcome is WAIT:
            self.waiting[call.id] = call, command
            assert self.machine.explain(call).reason
        again = self.machine.apply(call, command, self.stamp + 1)
        assert not again.changed
        if not isinstance(
            command, (rendezvous.RendezvousClose, rendezvous.RendezvousReopen)
        ):  # their answer says whether they changed anything
            assert again.outcome == step.outcome or isinstance(step.outcome, Refused)

    def undo(self, number: int) -> None:
        if not self.calls:
            return
        call, command = self.calls[number % len(self.calls)]
        undoing = barrier.BarrierUndoLeave if isinstance(command, barrier.BarrierLeave) else self.undoing
        self.waiting.pop(call.id, None)
        taken_back = Call(call.member, call.session, 1000 + self.stamp)
        kept = self.kept() - {call.id}
        step = self.did(self.machine.apply(taken_back, undoing(call.number), self.stamp + 1), kept)
        assert isinstance(step.outcome, (Done, Refused))
        assert not self.machine.holds(call.id)
        assert not self.machine.apply(taken_back, undoing(call.number), self.stamp + 1).changed

    def end_session(self, session: str) -> None:
        kept = self.kept()
        for call, _ in self.calls:
            if call.session == session:
                self.waiting.pop(call.id, None)
                kept.discard(call.id)
        self.did(self.machine.session_ended(session, self.stamp + 1), kept)
        assert session not in self.machine.sessions()
        assert not self.machine.session_ended(session, self.stamp + 1).changed

    def fire_timer(self) -> None:
        timer = self.machine.timer
        if timer is None:
            return
        assert not self.machine.on_timer(timer[0] + 1, self.stamp + 1).changed, "the number of another timer"
        self.did(self.machine.on_timer(timer[0], self.stamp + 1), self.kept())
        assert self.machine.timer is None or self.machine.timer[0] != timer[0]
        assert not self.machine.on_timer(timer[0], self.stamp + 1).changed, "it has fired"

    def check(self) -> None:
        """Check that every waiting call still waits, and that none was forgotten."""
        assert all(self.machine.holds(call) for call in self.waiting)
        assert {call.session for call, _ in self.waiting.values()} <= self.machine.sessions()
        assert self.machine.idle == (not self.kept())
        assert self.machine.timer is None or not self.machine.idle
        for call, command in self.waiting.values():
            step = self.machine.apply(call, command, self.stamp + 1)
            assert step.outcome is WAIT and not step.changed, f"{call} was not woken"


@pytest.mark.parametrize("kind", COMMANDS, ids=lambda kind: kind.kind)
@given(data=st.data())
def test_every_machine_obeys_the_rules_of_machines(kind: type[Machine], data: st.DataObject) -> None:
    hosted = Hosted(kind)
    for what, *words in data.draw(steps(kind)):
        getattr(hosted, what)(*words)
        hosted.check()


@pytest.mark.parametrize("kind", COMMANDS, ids=lambda kind: kind.kind)
def test_the_end_of_an_unknown_session_changes_nothing(kind: type[Machine]) -> None:
    machine = kind()
    assert machine.idle and not machine.sessions() and not machine.holds("a/1")
    assert machine.session_ended("a", 1) in (Step(Done()), Step(Done(False)))


def test_a_lock_serves_a_long_line_in_order() -> None:
    lock, calls = LockMachine(), [Call(str(number), f"s{number}", number) for number in range(100)]
    for stamp, call in enumerate(calls, 1):
        lock.apply(call, LockAcquire(), stamp)
    served = []
    for stamp, call in enumerate(calls, 1000):
        outcome = lock.apply(call, LockAcquire(), stamp).outcome
        assert isinstance(outcome, Done)
        served.append(outcome.answer)
        step = lock.apply(call, LockRelease(call.number), stamp)
        assert list(step.woken) == [calls[call.number + 1]] if call is not calls[-1] else not list(step.woken)
    assert served == sorted(set(served)) and lock.idle
