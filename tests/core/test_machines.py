"""What is true of every machine, whatever is asked of it: the rules of `core/machine.py`, on made-up histories."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.core.barrier import Arrive, Barrier, Withdraw
from rallypoint.core.exchange import Exchange, Give, TakeBack
from rallypoint.core.lock import Acquire, Lock, Release
from rallypoint.core.machine import WAIT, Call, Command, Done, Machine, Refused, Step, Undo
from rallypoint.core.roster import Join, Leave, Look, Roster, Watch

SIZE = 3
ranks = st.integers(0, SIZE - 1)
maps = st.dictionaries(
    st.sampled_from("012"), st.dictionaries(st.sampled_from("xy"), st.sampled_from("xy")), max_size=2
)
COMMANDS: dict[type[Machine], tuple[st.SearchStrategy[Any], type[Undo]]] = {
    Barrier: (
        st.builds(Arrive, st.sampled_from([SIZE, SIZE, SIZE, 2, ["0", "1"]]), st.sampled_from([True] * 4 + [False])),
        Withdraw,
    ),
    Exchange: (
        st.builds(
            Give,
            st.just(SIZE),
            ranks,
            st.just(b"x"),
            st.sampled_from(["all_gather"] * 3 + ["gather", "broadcast"]),
            ranks,
        ),
        TakeBack,
    ),
    Lock: (st.builds(Acquire), Release),
    Roster: (
        st.one_of(
            st.builds(Join, st.just(b""), st.lists(st.sampled_from("xy"), max_size=2), maps),
            st.builds(Watch, st.integers(0, 12)),
            st.builds(Look),
        ),
        Leave,
    ),
}
members = st.sampled_from("012")
sessions = st.sampled_from("abcd")
"""Fewer than there are calls, so that members share sessions and sessions have more than one member."""


def steps(kind: type[Machine]) -> st.SearchStrategy[list[tuple[Any, ...]]]:
    command, _ = COMMANDS[kind]
    return st.lists(
        st.one_of(
            st.tuples(st.just("call"), members, sessions, command),
            st.tuples(st.just("undo"), st.integers(0, 20)),
            st.tuples(st.just("lost"), sessions),
        ),
        max_size=30,
    )


class Hosted:
    """A machine, and what its host knows: which calls wait, and which have got something that they keep."""

    def __init__(self, kind: type[Machine]) -> None:
        self.machine = kind()
        self.undo = COMMANDS[kind][1]
        self.stamp = 0
        self.calls: list[tuple[Call, Command]] = []
        self.waiting: dict[str, tuple[Call, Command]] = {}

    def did(self, step: Any) -> Any:
        """Write the state down and read it, as text and as bytes; let those who are woken look."""
        state = self.machine
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
        if isinstance(command, Give):
            call = Call(str(command.rank), session, len(self.calls))
        self.calls.append((call, command))
        before = msgspec.json.encode(self.machine)
        step = self.did(self.machine.apply(call, command, self.stamp + 1))
        assert step.changed == (msgspec.json.encode(self.machine) != before)
        if step.outcome is WAIT:
            self.waiting[call.id] = call, command
            assert self.machine.why(call).reason
        again = self.machine.apply(call, command, self.stamp + 1)
        assert not again.changed and (again.outcome == step.outcome or isinstance(step.outcome, Refused))

    def undone(self, number: int) -> None:
        if not self.calls:
            return
        call, _ = self.calls[number % len(self.calls)]
        self.waiting.pop(call.id, None)
        taken_back = Call(call.member, call.session, 1000 + self.stamp)
        step = self.did(self.machine.apply(taken_back, self.undo(call.number), self.stamp + 1))
        assert isinstance(step.outcome, (Done, Refused))
        assert not self.machine.keeps(call.id)
        assert not self.machine.apply(taken_back, self.undo(call.number), self.stamp + 1).changed

    def lost(self, session: str) -> None:
        for call, _ in self.calls:
            if call.session == session:
                self.waiting.pop(call.id, None)
        self.did(self.machine.lost(session, self.stamp + 1))
        assert session not in self.machine.sessions()
        assert not self.machine.lost(session, self.stamp + 1).changed

    def check(self) -> None:
        """What waits waits, and nobody else was woken or forgotten."""
        assert all(self.machine.keeps(call) for call in self.waiting)
        assert {call.session for call, _ in self.waiting.values()} <= self.machine.sessions()
        kept = [call for call, _ in self.calls if self.machine.keeps(call.id)]
        passing = getattr(self.machine, "passing", {})  # those are remembered, and hang on no session
        assert self.machine.idle == (not kept and not passing)
        for call, command in self.waiting.values():
            step = self.machine.apply(call, command, self.stamp + 1)
            assert step.outcome is WAIT and not step.changed, f"{call} was not woken"


@pytest.mark.parametrize("kind", COMMANDS, ids=lambda kind: kind.kind)
@given(data=st.data())
def test_a_machine_keeps_the_rules(kind: type[Machine], data: st.DataObject) -> None:
    hosted = Hosted(kind)
    for what, *words in data.draw(steps(kind)):
        {"call": hosted.call, "undo": hosted.undone, "lost": hosted.lost}[what](*words)
        hosted.check()


@pytest.mark.parametrize("kind", COMMANDS, ids=lambda kind: kind.kind)
def test_a_session_that_is_not_here_is_no_loss(kind: type[Machine]) -> None:
    machine = kind()
    assert machine.idle and not machine.sessions() and not machine.keeps("a/1")
    assert machine.lost("a", 1) in (Step(Done()), Step(Done(False)))


def test_a_lock_serves_a_long_line_in_order() -> None:
    lock, calls = Lock(), [Call(str(number), f"s{number}", number) for number in range(100)]
    for stamp, call in enumerate(calls, 1):
        lock.apply(call, Acquire(), stamp)
    served = []
    for stamp, call in enumerate(calls, 1000):
        outcome = lock.apply(call, Acquire(), stamp).outcome
        assert isinstance(outcome, Done)
        served.append(outcome.answer)
        step = lock.apply(call, Release(call.number), stamp)
        assert list(step.woken) == [calls[call.number + 1]] if call is not calls[-1] else not list(step.woken)
    assert served == sorted(set(served)) and lock.idle
