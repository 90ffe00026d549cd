"""What is true of every machine, whatever is asked of it: the rules of `core/machine.py`, on made-up histories."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.core import barrier, rendezvous
from rallypoint.core.barrier import Arrive, Barrier, Withdraw
from rallypoint.core.exchange import Exchange, Give, TakeBack
from rallypoint.core.gathering import Limits
from rallypoint.core.lock import Acquire, Lock, Release
from rallypoint.core.machine import WAIT, Call, Command, Done, Machine, Refused, Step, Undo
from rallypoint.core.roster import Join, Leave, Look, Roster, Watch

SIZE = 3
ranks = st.integers(0, SIZE - 1)
limits = st.sampled_from([Limits(1, 2, 5.0)] * 4 + [Limits(2, 3, 5.0)] * 4 + [Limits(2, 2, 0.0), Limits(1, 3, 0.0)])
rank_wishes = st.sampled_from([-1, -1, 0, 1])
maps = st.dictionaries(
    st.sampled_from("012"), st.dictionaries(st.sampled_from("xy"), st.sampled_from("xy")), max_size=2
)
COMMANDS: dict[type[Machine], tuple[st.SearchStrategy[Any], type[Undo]]] = {
    Barrier: (
        st.one_of(
            st.builds(Arrive, st.sampled_from([SIZE, SIZE, SIZE, 2, ["0", "1"]])),
            *[st.builds(Arrive, st.sampled_from([SIZE, 2, 2]), st.sampled_from("0001"))] * 2,
            *[st.builds(barrier.Leave, st.integers(0, 20))] * 2,
        ),
        Withdraw,
    ),
    Exchange: (
        st.builds(
            Give,
            st.just(SIZE),
            ranks,
            st.sampled_from([b"x", b"x", b"y", b"z"]),
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
    rendezvous.Rendezvous: (
        st.one_of(
            *[st.builds(rendezvous.Join, limits, rank=rank_wishes, run=st.sampled_from([-1, -1, 0]))] * 4,
            st.builds(rendezvous.Watch, st.integers(1, 12)),
            st.builds(rendezvous.Close, st.just("done"), st.just("well")),
            st.builds(rendezvous.Open),
            st.builds(rendezvous.Look, st.integers(0, 12)),
        ),
        rendezvous.Leave,
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
            st.tuples(st.just("ring")),
        ),
        max_size=30,
    )


class Hosted:
    """A machine, and what its host knows: which calls wait, and which have got something that they keep."""

    def __init__(self, kind: type[Machine]) -> None:
        self.machine = kind()
        self.undoing = COMMANDS[kind][1]
        self.stamp = 0
        self.calls: list[tuple[Call, Command]] = []
        self.waiting: dict[str, tuple[Call, Command]] = {}

    def kept(self) -> set[str]:
        """Return the ids of the calls of which the machine keeps something."""
        return {call.id for call, _ in self.calls if self.machine.keeps(call.id)}

    def did(self, step: Any, gone: set[str]) -> Any:
        """Write the state down and read it, as text and as bytes; let those who are woken look.

        The host has to hear of every call that is `gone` from the state and that it has not taken out itself.
        """
        state = self.machine
        gone = gone - self.kept() - {call.id for call in (*step.woken, *step.dropped)}
        assert not gone, f"nobody says that {gone} are no more"
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
        before, kept = msgspec.json.encode(self.machine), self.kept()
        step = self.did(self.machine.apply(call, command, self.stamp + 1), kept)
        assert step.changed == (msgspec.json.encode(self.machine) != before)
        if step.outcome is WAIT:
            self.waiting[call.id] = call, command
            assert self.machine.why(call).reason
        again = self.machine.apply(call, command, self.stamp + 1)
        assert not again.changed
        if not isinstance(command, (rendezvous.Close, rendezvous.Open)):  # these answer whether they changed anything
            assert again.outcome == step.outcome or isinstance(step.outcome, Refused)

    def undo(self, number: int) -> None:
        if not self.calls:
            return
        call, command = self.calls[number % len(self.calls)]
        undoing = barrier.Stay if isinstance(command, barrier.Leave) else self.undoing
        self.waiting.pop(call.id, None)
        taken_back = Call(call.member, call.session, 1000 + self.stamp)
        kept = self.kept() - {call.id}
        step = self.did(self.machine.apply(taken_back, undoing(call.number), self.stamp + 1), kept)
        assert isinstance(step.outcome, (Done, Refused))
        assert not self.machine.keeps(call.id)
        assert not self.machine.apply(taken_back, undoing(call.number), self.stamp + 1).changed

    def lost(self, session: str) -> None:
        kept = self.kept()
        for call, _ in self.calls:
            if call.session == session:
                self.waiting.pop(call.id, None)
                kept.discard(call.id)
        self.did(self.machine.lost(session, self.stamp + 1), kept)
        assert session not in self.machine.sessions()
        assert not self.machine.lost(session, self.stamp + 1).changed

    def ring(self) -> None:
        alarm = self.machine.alarm
        if alarm is None:
            return
        assert not self.machine.ring(alarm[0] + 1, self.stamp + 1).changed, "that is another's"
        self.did(self.machine.ring(alarm[0], self.stamp + 1), self.kept())
        assert self.machine.alarm is None or self.machine.alarm[0] != alarm[0]
        assert not self.machine.ring(alarm[0], self.stamp + 1).changed, "it has rung"

    def check(self) -> None:
        """What waits waits, and nobody else was woken or forgotten."""
        assert all(self.machine.keeps(call) for call in self.waiting)
        assert {call.session for call, _ in self.waiting.values()} <= self.machine.sessions()
        assert self.machine.idle == (not self.kept())
        assert self.machine.alarm is None or not self.machine.idle
        for call, command in self.waiting.values():
            step = self.machine.apply(call, command, self.stamp + 1)
            assert step.outcome is WAIT and not step.changed, f"{call} was not woken"


@pytest.mark.parametrize("kind", COMMANDS, ids=lambda kind: kind.kind)
@given(data=st.data())
def test_a_machine_keeps_the_rules(kind: type[Machine], data: st.DataObject) -> None:
    hosted = Hosted(kind)
    for what, *words in data.draw(steps(kind)):
        getattr(hosted, what)(*words)
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
