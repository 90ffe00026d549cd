"""The rendezvous machine, rule by rule.

`Meeting` does what a host does: it numbers calls and changes, tells those who are woken, and after every step takes the
state through its written form and applies the call a second time, which must change nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import pytest

from rallypoint.core.gathering import Limits
from rallypoint.core.machine import WAIT, Call, Command, Done, Refused, Step, Undo
from rallypoint.core.rendezvous import Close, Join, Leave, Look, Open, Rendezvous, Watch, Withdraw


class Round(NamedTuple):
    """What a node is told of its round."""

    run: int
    number: int
    scope: int
    rank: int
    size: int
    first: Any
    before: int
    reason: str


class Meeting:
    """A rendezvous and its nodes; a node is in the session of its name unless another is given."""

    def __init__(self, least: int = 2, most: int = 4, last_call_s: float = 5.0) -> None:
        self.machine = Rendezvous()
        self.limits = Limits(least, most, last_call_s)
        self.stamp = self.number = 0
        self.calls: dict[str, tuple[Call, Command]] = {}
        self.told: dict[str, Any] = {}
        """What became of the last call of each node and watcher: a Round, a reason, a refusal, or WAIT."""

    def join(self, name: str, session: str = "", former: tuple[str, ...] = (), **card: Any) -> Any:
        card.setdefault("limits", self.limits)
        return self._do(name, session, Join(**card), former)

    def watch(self, name: str, scope: int | None = None) -> Any:
        return self._do(f"watch {name}", name, Watch(self.machine.scope if scope is None else scope))

    def close(self, result: str = "done", reason: str = "all epochs trained") -> Any:
        return self._do("closer", "", Close(result, reason))

    def open(self) -> Any:
        return self._do("opener", "", Open())

    def leave(self, name: str, undo: type[Undo] = Leave, **how: Any) -> Any:
        call, _ = self.calls[name]
        return self._apply(Call(name, call.session, self._next()), undo(call.number, **how))

    def lost(self, session: str) -> None:
        self._did(self.machine.lost(session, self.stamp + 1))

    def ring(self) -> None:
        assert self.machine.alarm is not None
        self._did(self.machine.ring(self.machine.alarm[0], self.stamp + 1))

    def why(self, name: str) -> Any:
        return self.machine.why(self.calls[name][0])

    def look(self, scope: int = 0) -> Any:
        outcome = self.machine.apply(Call("x", "x", 0), Look(scope), 0).outcome
        assert isinstance(outcome, Done)
        return outcome.answer

    def ranks(self) -> dict[str, int]:
        """Return the ranks of the round that stands, as its nodes were told."""
        assert self.look()["phase"] == "formed", self.look()
        told = {name: self.told[name] for name in self.machine.nodes}
        assert {one.scope for one in told.values()} == {self.machine.scope}
        return dict(sorted(((name, one.rank) for name, one in told.items()), key=lambda item: item[1]))

    def _next(self) -> int:
        self.number += 1
        return self.number

    def _do(self, name: str, session: str, command: Command, former: tuple[str, ...] = ()) -> Any:
        call = Call(name, session or name, self._next(), "host:1", former)
        self.calls[name] = call, command
        self.told[name] = self._apply(call, command)
        return self.told[name]

    def _apply(self, call: Call, command: Command) -> Any:
        step = self._did(self.machine.apply(call, command, self.stamp + 1))
        again = self.machine.apply(call, command, self.stamp + 1)
        assert not again.changed and not list(again.woken)
        if not isinstance(command, (Undo, Close, Open)) and not isinstance(step.outcome, Refused):
            assert again.outcome == step.outcome
        return _plain(step)

    def _did(self, step: Step) -> Step:
        for form in (msgspec.json, msgspec.msgpack):
            read = form.decode(form.encode(self.machine), type=Rendezvous)
            assert read == self.machine
            self.machine = read
        self.stamp += step.changed
        asked = {call.id: (name, call, command) for name, (call, command) in self.calls.items()}
        for woken in step.woken:
            name, call, command = asked[woken.id]
            assert self.told[name] is WAIT
            looked = self.machine.apply(call, command, self.stamp + 1)
            assert looked.outcome is not WAIT and not looked.changed
            self.told[name] = _plain(looked)
        for call in step.dropped:
            assert not self.machine.keeps(call.id)
        return step


def _plain(step: Step) -> Any:
    """Return what a call came to: an answer (a round as such), a refusal, or WAIT."""
    if not isinstance(step.outcome, Done):
        return step.outcome
    answer = step.outcome.answer
    return Round(*answer) if isinstance(answer, list) and len(answer) == 8 else answer


def meeting_of(names: str, least: int = 2, most: int = 4, last_call_s: float = 5.0) -> Meeting:
    """Return one in which a round of these nodes stands."""
    meeting = Meeting(least, most, last_call_s)
    for name in names.split():
        meeting.join(name)
    if meeting.machine.alarm is not None:
        meeting.ring()
    assert list(meeting.ranks()) == names.split()
    return meeting


# When a round is formed


def test_a_round_of_all_is_formed_at_once() -> None:
    meeting = Meeting(2, 3)
    assert meeting.join("a", address="10.0.0.1") is WAIT
    assert meeting.join("b") is WAIT
    told = meeting.join("c")
    assert told[1:2] + told[3:] == (1, 2, 3, ("a", "10.0.0.1"), 0, "all 3 nodes are here")
    assert meeting.ranks() == {"a": 0, "b": 1, "c": 2}
    assert meeting.machine.alarm is None


def test_last_call_begins_with_enough_and_is_one_however_many_come() -> None:
    meeting = Meeting(2, 4)
    meeting.join("a")
    assert meeting.machine.alarm is None
    meeting.join("b")
    alarm = meeting.machine.alarm
    assert alarm == (2, 5.0)
    meeting.join("c")
    assert meeting.machine.alarm == alarm, "who comes later does not make it longer"
    meeting.ring()
    assert list(meeting.ranks()) == ["a", "b", "c"] and meeting.machine.alarm is None


def test_last_call_stops_when_too_few_are_left_and_begins_anew() -> None:
    meeting = Meeting(2, 4)
    meeting.join("a")
    meeting.join("b")
    first = meeting.machine.alarm
    assert first is not None
    meeting.leave("b", Withdraw)
    assert meeting.machine.alarm is None
    meeting.join("b")
    assert meeting.machine.alarm is not None and meeting.machine.alarm[0] > first[0]
    assert not meeting.machine.ring(first[0], meeting.stamp + 1).changed, "that one was stopped"
    assert not meeting.machine.ring(0, meeting.stamp + 1).changed
    meeting.lost("a")
    assert meeting.machine.alarm is None


def test_an_alarm_that_rings_late_finds_the_round_formed() -> None:
    meeting = Meeting(2, 3)
    meeting.join("a")
    meeting.join("b")
    assert meeting.machine.alarm is not None
    number = meeting.machine.alarm[0]
    meeting.join("c")
    before = meeting.ranks()
    assert meeting.machine.ring(number, meeting.stamp + 1) == Step(Done())
    assert meeting.ranks() == before


def test_last_call_ends_when_everybody_of_the_last_round_is_back() -> None:
    meeting = meeting_of("a b c")
    meeting.lost("c")
    meeting.join("b")
    assert meeting.join("x") is WAIT and meeting.machine.alarm is not None
    assert "not back yet: a" in meeting.why("x").reason and meeting.why("x").missing == ("a",)
    told = meeting.join("a")
    assert told.reason == "everybody of the last round is back: 3 of at most 4 nodes"
    assert meeting.ranks() == {"a": 0, "b": 1, "x": 2}


def test_last_call_ends_when_the_last_one_who_was_expected_goes() -> None:
    meeting = meeting_of("a b c")
    meeting.join("a")
    meeting.join("b")
    assert meeting.told["b"] is WAIT
    meeting.lost("c")
    assert meeting.ranks() == {"a": 0, "b": 1}


def test_who_does_not_come_again_in_time_is_left_behind() -> None:
    meeting = meeting_of("a b c", most=3)
    watched = meeting.watch("c")
    meeting.join("a")
    meeting.join("b")
    meeting.ring()
    assert watched is WAIT and meeting.told["watch c"] == "a (host:1) came again"
    assert meeting.ranks() == {"a": 0, "b": 1}
    assert meeting.leave("c") == 2, "it was in no round any more, and leaves nothing behind"
    assert meeting.join("c") is WAIT


def test_newcomers_do_not_push_out_those_who_are_on_their_way() -> None:
    """Four come at once to a round of two: these need a moment to stop their work, and are in the next round."""
    meeting = meeting_of("a b")
    for name in "wxyz":
        assert meeting.join(name) is WAIT
    meeting.join("b")
    assert meeting.join("a").size == 4
    assert meeting.ranks() == {"a": 0, "b": 1, "w": 2, "x": 3}


def test_without_a_last_call_two_nodes_do_not_push_each_other_out_for_ever() -> None:
    meeting = Meeting(1, 2, 0.0)
    assert meeting.join("a").size == 1
    assert meeting.watch("a") is WAIT
    assert meeting.join("b") is WAIT
    assert meeting.told["watch a"] == "b (host:1) waits, and there is room for it"
    assert meeting.machine.alarm is not None and meeting.machine.alarm[1] == 3.0, "those of the last round get a while"
    assert meeting.join("a").size == 2
    assert meeting.ranks() == {"a": 0, "b": 1}


def test_when_all_have_gone_those_who_come_begin_with_a_last_call() -> None:
    """Also where the state is never forgotten; numbers go on, and who returns gets its rank back."""
    meeting = meeting_of("a b")
    meeting.lost("a")
    meeting.lost("b")
    assert meeting.join("b", "b2") is WAIT
    assert meeting.join("x") is WAIT and meeting.machine.alarm is not None
    meeting.ring()
    assert meeting.ranks() == {"x": 0, "b": 1}
    assert meeting.told["x"].number == 2


# Ranks


def test_a_rank_that_is_asked_for_is_given() -> None:
    meeting = Meeting(3, 3)
    meeting.join("a", rank=2)
    meeting.join("b")
    meeting.join("c", rank=0)
    assert meeting.ranks() == {"c": 0, "b": 1, "a": 2}


def test_a_later_one_that_asks_for_the_same_rank_is_refused_by_name() -> None:
    meeting = Meeting(2, 4)
    meeting.join("a", rank=1)
    taken = Refused("RankTaken", {"rank": 1, "member": "b", "other": "a (host:1)"})
    assert meeting.join("b", rank=1) == taken
    meeting.join("b", rank=0)
    meeting.ring()
    assert meeting.ranks() == {"b": 0, "a": 1}
    assert meeting.join("c", rank=1) == Refused("RankTaken", {**taken.fields, "member": "c"})
    meeting.lost("a")
    assert meeting.join("c", rank=1) is WAIT, "it is free again"


def test_a_node_that_comes_again_may_ask_for_its_own_rank_or_another() -> None:
    meeting = Meeting(2, 2)
    meeting.join("a", rank=0)
    meeting.join("b")
    meeting.join("a", rank=0)
    meeting.join("b")
    assert meeting.ranks() == {"a": 0, "b": 1}
    meeting.join("a", rank=1)
    meeting.join("b", rank=0)
    assert meeting.ranks() == {"b": 0, "a": 1}


def test_a_rank_that_no_round_has_is_refused() -> None:
    refused = Refused("NotAMember", {"member": "a as rank 4", "members": "ranks 0 to 3"})
    meeting = Meeting(2, 4)
    assert meeting.join("a", rank=4) == refused
    assert meeting.machine == Rendezvous()


def test_a_requested_rank_is_waited_for_in_last_call() -> None:
    meeting = meeting_of("a b c")
    meeting.lost("c")
    assert meeting.join("x", rank=3) is WAIT
    meeting.join("a")
    assert meeting.join("b") is WAIT
    assert meeting.why("b").reason.endswith("rank 3 is asked for; last joined b (host:1)")
    meeting.leave("x", Withdraw)
    assert meeting.ranks() == {"a": 0, "b": 1}, "nobody asks for it any more"


def test_a_node_that_returns_gets_its_rank_back() -> None:
    meeting = meeting_of("a b c", 2, 3)
    meeting.lost("a")
    meeting.join("c")
    meeting.join("b")
    assert meeting.ranks() == {"c": 0, "b": 1}
    assert meeting.join("a", "a2") is WAIT
    meeting.join("b")
    meeting.join("c")
    assert meeting.ranks() == {"c": 0, "b": 1, "a": 2}, "who stayed keeps its own"
    meeting.lost("b")
    meeting.join("x")
    meeting.join("a", "a2")
    meeting.join("c")
    assert meeting.ranks() == {"c": 0, "x": 1, "a": 2}
    meeting.lost("x")
    meeting.join("b", "b2")
    meeting.join("a", "a2")
    meeting.join("c")
    assert meeting.ranks() == {"c": 0, "b": 1, "a": 2}, "it was away for a round, and its own is free"


@pytest.mark.parametrize("rounds", range(1, 8))
def test_of_many_who_came_and_went_the_last_are_remembered(rounds: int) -> None:
    """`b` was in every round, from the first on: when it is lost at last, its rank is the newest memory."""
    meeting = meeting_of("a b", 2, 2)
    for number in range(rounds):
        meeting.lost("a" if not number else f"x{number}")
        meeting.join(f"x{number + 1}")
        meeting.join("b")
        assert meeting.ranks() == {f"x{number + 1}": 0, "b": 1}
    meeting.lost("b")
    meeting.join("y")
    meeting.join(f"x{rounds}")
    assert meeting.ranks() == {f"x{rounds}": 0, "y": 1}
    meeting.lost("y")
    meeting.lost(f"x{rounds}")
    meeting.join("b", "b2")
    meeting.join("z")
    assert meeting.ranks() == {"z": 0, "b": 1}


# Spares


def test_spares_stand_by_and_fill_gaps_in_the_order_in_which_they_came() -> None:
    meeting = meeting_of("a b", 2, 2)
    for name in "xyz":
        assert meeting.join(name) is WAIT
        why = meeting.why(name)
        assert why.stands_by and why.reason == "round 1 has all of its 2 nodes; this one is a spare"
    assert meeting.look()["spares"] == ["x", "y", "z"]
    assert meeting.look()["phase"] == "formed", "a full round is not over because others wait"
    meeting.lost("a")
    assert meeting.why("x").stands_by, "who was a spare once has no time-out any more"
    meeting.join("b")
    assert meeting.ranks() == {"x": 0, "b": 1}
    assert meeting.look()["spares"] == ["y", "z"] and meeting.why("y").stands_by


def test_a_spare_does_not_take_the_place_of_one_who_is_on_its_way() -> None:
    meeting = meeting_of("a b", 2, 2)
    meeting.join("x")
    assert meeting.join("b") is WAIT
    assert meeting.why("b").reason.startswith("2 nodes are here for 2 places: last call of 5 s; not back yet: a")
    meeting.join("a")
    assert meeting.ranks() == {"a": 0, "b": 1} and meeting.look()["spares"] == ["x"]


def test_a_spare_takes_the_place_of_one_who_does_not_come_again_in_time() -> None:
    meeting = meeting_of("a b", 2, 2)
    meeting.join("x")
    meeting.join("b")
    meeting.ring()
    assert meeting.ranks() == {"x": 0, "b": 1}


def test_spares_are_a_round_when_nobody_else_is_left() -> None:
    meeting = meeting_of("a", 1, 1)
    meeting.join("x")
    meeting.join("y")
    meeting.lost("a")
    assert meeting.ranks() == {"x": 0} and meeting.look()["spares"] == ["y"]


# A round that is over


def test_watchers_hear_who_was_lost() -> None:
    meeting = meeting_of("a b c")
    assert meeting.watch("a") is WAIT and meeting.watch("c") is WAIT
    assert meeting.why("watch a").reason.startswith("round 1 stands: ")
    meeting.lost("b")
    assert meeting.told["watch a"] == meeting.told["watch c"] == "lost b (host:1)"
    assert meeting.watch("c") == "lost b (host:1)", "also one that asks later"
    assert meeting.look()["over"] == "lost b (host:1)" and meeting.look()["phase"] == "gathering"


def test_watchers_hear_who_waits_where_there_is_room() -> None:
    meeting = meeting_of("a b")
    meeting.watch("a")
    meeting.join("c")
    assert meeting.told["watch a"] == "c (host:1) waits, and there is room for it"


def test_watchers_hear_who_left_and_leaving_closes_nothing() -> None:
    meeting = meeting_of("a b c")
    meeting.watch("a")
    assert meeting.leave("c") == 2
    assert meeting.told["watch a"] == "c (host:1) left"
    assert meeting.leave("c") == 2, "leaving twice is leaving once"
    meeting.join("a")
    meeting.join("b")
    assert meeting.ranks() == {"a": 0, "b": 1}
    assert meeting.leave("a") == 1 and meeting.leave("b") == 0
    assert meeting.machine.idle and meeting.look()["result"] is None
    meeting.join("d")
    meeting.join("e")
    meeting.ring()
    assert meeting.ranks() == {"d": 0, "e": 1}


def test_a_watch_of_a_round_before_is_over_at_once_and_one_that_is_given_up_hears_nothing() -> None:
    meeting = meeting_of("a b", 2, 2)
    scope = meeting.machine.scope
    meeting.watch("a")
    assert meeting.leave("watch a", Withdraw) is None
    meeting.join("a")
    assert meeting.told["watch a"] is WAIT
    meeting.join("b")
    assert meeting.watch("a", scope) == "round 2 has been formed"


def test_a_watcher_that_is_lost_ends_no_round() -> None:
    meeting = meeting_of("a b")
    meeting._do("w", "", Watch(meeting.machine.scope))
    meeting.lost("w")
    assert meeting.look()["phase"] == "formed" and "w" not in meeting.machine.sessions()


def test_a_newcomer_that_gives_up_leaves_a_round_to_be_formed_anew() -> None:
    meeting = meeting_of("a b")
    meeting.join("c")
    assert meeting.leave("c", Withdraw) == 2
    meeting.join("a")
    assert meeting.join("b").number == 2
    assert meeting.ranks() == {"a": 0, "b": 1}


def test_every_round_has_a_scope_of_its_own_and_knows_the_one_before() -> None:
    meeting, scopes = meeting_of("a b", 2, 2), [0]
    for number in range(1, 6):
        told = meeting.told["a"]
        assert told.number == number and told.before == scopes[-1] < told.scope
        scopes.append(told.scope)
        meeting.join("a")
        meeting.join("b")


def test_the_table_has_the_nodes_by_rank_also_those_who_went() -> None:
    meeting = Meeting(2, 2)
    meeting.join("a", rank=1, host="h1")
    meeting.join("b", host="h2")
    scope = meeting.machine.scope
    assert meeting.look(scope) == [["b", "h2", "host:1"], ["a", "h1", "host:1"]]
    meeting.lost("b")
    assert meeting.look(scope) == [["b", "", ""], ["a", "h1", "host:1"]]
    assert meeting.look(scope + 1) == []


# Taking back


def test_a_join_that_has_come_true_is_not_withdrawn_but_answered() -> None:
    meeting = meeting_of("a b", 2, 2)
    assert meeting.leave("a", Withdraw) == [list(meeting.told["a"])]
    assert meeting.look()["phase"] == "formed"
    assert meeting.leave("a") == 1
    assert meeting.look()["over"] == "a (host:1) left"


def test_a_join_that_waits_is_withdrawn() -> None:
    meeting = Meeting(2, 2)
    meeting.join("a")
    assert meeting.leave("a", Withdraw) == 0
    assert meeting.machine.idle and not meeting.machine.keeps(meeting.calls["a"][0].id)
    meeting.join("b")
    assert meeting.join("c").size == 2 and meeting.ranks() == {"b": 0, "c": 1}


# Leaving when done, and in failure


def test_a_node_that_is_done_leaves_and_the_round_stands() -> None:
    meeting = meeting_of("a b", 2, 2)
    meeting.watch("b")
    assert meeting.leave("a", done=True) == 1
    assert meeting.look()["phase"] == "formed" and meeting.told["watch b"] is WAIT
    assert meeting.join("x") is WAIT and meeting.look()["spares"] == ["x"], "the place of one that is done is not free"
    assert meeting.leave("b") == 1
    assert meeting.look()["over"] == "b (host:1) left"


def test_when_all_have_left_because_they_are_done_the_next_begin_anew() -> None:
    meeting = meeting_of("a b", 2, 2)
    for name in "ab":
        meeting.leave(name, done=True)
    assert meeting.join("c") is WAIT and meeting.join("d").size == 2


def test_a_node_that_leaves_in_failure_closes_a_run_that_cannot_go_on() -> None:
    meeting = meeting_of("a b", 2, 2)
    meeting.watch("a")
    assert meeting.leave("b", failed="rank 1 failed: exit code 3") == 1
    reason = "b (host:1) ended in failure, 1 of at least 2 nodes are left: rank 1 failed: exit code 3"
    assert meeting.told["watch a"] == f"the run was closed: failed: {reason}"
    assert meeting.join("a") == closed_with("failed", reason)


def test_a_node_that_fails_while_it_waits_closes_a_run_that_cannot_go_on() -> None:
    meeting = meeting_of("a b c", 2, 3)
    meeting.lost("c")
    meeting.join("a")
    meeting.leave("a", failed="why")
    assert meeting.look()["phase"] == "closed" and meeting.look()["result"] == "failed"


def test_a_failure_closes_nothing_where_enough_are_left_or_nobody_is() -> None:
    meeting = meeting_of("a b c", 2, 3)
    assert meeting.leave("a", failed="why") == 2 and meeting.look()["phase"] == "gathering"
    assert meeting.leave("b", failed="why") == 1 and meeting.look()["phase"] == "closed"
    alone = meeting_of("a", 1, 1)
    assert alone.leave("a", failed="why") == 0 and alone.look()["phase"] == "gathering"


# Nodes that are to be no spares


def full_with(*names: str, member: str = "x") -> Refused:
    return Refused("RunFull", {"member": member, "nodes": list(names)})


def test_who_is_to_be_no_spare_is_refused_where_all_places_are_taken() -> None:
    meeting = meeting_of("a b", 2, 2)
    assert meeting.join("x", spare=False) == full_with("a", "b")
    assert meeting.look()["waiting"] == [] and meeting.ranks() == {"a": 0, "b": 1}, "nobody has noticed"
    meeting.leave("a", done=True)
    assert meeting.join("x", spare=False) == full_with("a", "b"), "one that is done has its place still"
    meeting.lost("b")
    assert meeting.join("x", spare=False) is WAIT


def test_who_waits_is_refused_when_a_round_is_formed_without_it_unless_as_a_spare() -> None:
    meeting = meeting_of("a b", 2, 2)
    meeting.lost("b")
    assert meeting.join("x", spare=False) is WAIT
    assert meeting.join("y") is WAIT
    assert meeting.join("b", "b2") is WAIT
    meeting.join("a")
    assert set(meeting.ranks()) == {"a", "b"}, "those of the last round go first"
    call, command = meeting.calls["x"]
    assert meeting.machine.apply(call, command, 99).outcome == full_with("a", "b")
    assert meeting.look()["waiting"] == ["y"]


# A process that has lost its session, which the server has not noticed


def test_a_node_takes_its_own_place_whether_it_waits_or_is_in_a_round() -> None:
    meeting = Meeting(2, 2)
    meeting.join("a")
    assert meeting.join("a", "another") == Refused("NameTaken", {"member": "a", "other": "a (host:1)"})
    assert meeting.join("a", "a2", ("a",)) is WAIT and meeting.look()["waiting"] == ["a"]
    assert meeting.join("b").size == 2
    meeting.watch("b")
    assert meeting.join("a", "a3", ("a", "a2")) is WAIT
    assert meeting.told["watch b"] == "a (host:1) came again"
    for session in ("a", "a2"):
        meeting.lost(session)
    meeting.join("b")
    assert meeting.ranks() == {"a": 0, "b": 1}, "the end of the sessions that it has lost means nothing"


# The end of a run


def closed_with(result: str = "done", reason: str = "all epochs trained", waited: bool = False) -> Refused:
    return Refused("RunClosed", {"result": result, "reason": reason, "waited": waited})


def test_close_reaches_spares_and_watchers() -> None:
    meeting = meeting_of("a b", 2, 2)
    meeting.join("x")
    meeting.watch("a")
    assert meeting.close() is True
    assert meeting.told["x"] == closed_with(waited=True)
    assert meeting.told["watch a"] == "the run was closed: done: all epochs trained"
    assert meeting.watch("b") == "the run was closed: done: all epochs trained"


def test_close_reaches_those_who_wait_and_stops_last_call() -> None:
    meeting = Meeting(2, 4)
    meeting.join("a")
    meeting.join("b")
    assert meeting.machine.alarm is not None
    meeting.close("failed", "b ran out of memory")
    assert meeting.told["a"] == meeting.told["b"] == closed_with("failed", "b ran out of memory", waited=True)
    assert meeting.machine.alarm is None and meeting.machine.idle


def test_who_gives_up_when_the_run_has_just_been_closed_hears_that() -> None:
    """Its time is over before it has looked; to be told that somebody is missing would be wrong."""
    meeting = meeting_of("a b", 2, 2)
    meeting.join("spare")
    meeting.close()
    assert meeting.leave("spare", Withdraw) == closed_with(waited=True)
    assert meeting.leave("spare") == 2, "but whoever leaves, leaves"
    assert meeting.leave("a", Withdraw) == [list(meeting.told["a"])], "it was in a round"


def test_a_closed_run_refuses_its_members_and_those_who_come_late() -> None:
    meeting = meeting_of("a b", 2, 2)
    meeting.close()
    assert meeting.close("failed", "too late") is False
    assert meeting.look()["phase"] == "closed" and meeting.look()["result"] == "done"
    assert meeting.leave("a") == 1
    assert meeting.join("a", run=0) == meeting.join("b", run=0) == meeting.join("late") == closed_with()
    meeting.lost("b")
    assert meeting.machine.idle and meeting.machine.lasts
    assert meeting.join("late") == closed_with()


def test_a_loss_after_the_end_changes_nothing_of_the_result() -> None:
    meeting = meeting_of("a b", 2, 2)
    meeting.close()
    meeting.lost("b")
    assert meeting.watch("a") == "the run was closed: done: all epochs trained"
    assert meeting.join("b", "b2") == closed_with()


def test_open_begins_a_new_run_and_those_of_the_old_one_are_refused() -> None:
    meeting = meeting_of("a b", 2, 2)
    old = meeting.told["a"]
    assert meeting.open() is False, "it is open"
    meeting.close()
    assert meeting.open() is True
    assert not meeting.machine.sessions() and meeting.look()["phase"] == "gathering"
    meeting.join("x")
    told = meeting.join("y")
    assert told.run > old.run and told.scope > old.scope == told.before and told.number == 1
    refusal = meeting.join("a", run=old.run)
    assert isinstance(refusal, Refused) and refusal.error == "RunClosed"
    assert meeting.join("a") is WAIT, "as a new node it may wait in reserve"
    assert meeting.join("x", run=told.run) is WAIT


def test_a_run_that_was_opened_is_remembered_for_those_of_the_one_before() -> None:
    meeting = meeting_of("a b", 2, 2)
    meeting.close()
    meeting.lost("a")
    meeting.lost("b")
    meeting.open()
    assert meeting.machine.idle and meeting.machine.lasts
    refusal = meeting.join("a", "a2", run=0)
    assert isinstance(refusal, Refused) and refusal.error == "RunClosed"


def test_a_run_that_was_forgotten_goes_on_under_the_number_that_its_nodes_know() -> None:
    meeting = Meeting(2, 2)
    meeting.join("new")
    assert meeting.join("a", run=7).run == 7


def test_a_node_of_a_forgotten_run_does_not_shut_out_those_who_have_met_meanwhile() -> None:
    meeting = meeting_of("x y", 2, 3)
    assert meeting.join("a", run=7) is WAIT
    meeting.join("x", run=0)
    assert meeting.join("y", run=0).run == 0
    assert meeting.told["a"].run == 0


# Who may join


def test_settings_that_differ_are_refused_and_named() -> None:
    meeting = Meeting(2, 2)
    meeting.join("a", settings={"model": "m", "batch": "16"})
    differs = {"what": "batch", "mine": "8 (b (host:1))", "theirs": "16", "other": "a (host:1)"}
    assert meeting.join("b", settings={"model": "m", "batch": "8"}) == Refused("Disagreement", differs)
    missing = {"what": "batch", "mine": "not set (b (host:1))", "theirs": "16", "other": "a (host:1)"}
    assert meeting.join("b", settings={"model": "m"}) == Refused("Disagreement", missing)
    more = {"what": "seed", "mine": "1 (b (host:1))", "theirs": "not set", "other": "a (host:1)"}
    assert meeting.join("b", settings={"model": "m", "batch": "16", "seed": "1"}) == Refused("Disagreement", more)
    assert meeting.join("b", settings={"batch": "16", "model": "m"}).size == 2


@pytest.mark.parametrize(
    ("limits", "what", "mine", "theirs"),
    [
        (Limits(1, 4, 5.0), "min_nodes", "1", "2"),
        (Limits(2, 5, 5.0), "max_nodes", "5", "4"),
        (Limits(2, 4, 0.5), "last_call_s", "0.5", "5"),
    ],
)
def test_limits_that_differ_are_refused_and_named(limits: Limits, what: str, mine: str, theirs: str) -> None:
    meeting = Meeting(2, 4)
    meeting.join("a")
    fields = {"what": what, "mine": f"{mine} (b (host:1))", "theirs": theirs, "other": "a (host:1)"}
    assert meeting.join("b", limits=limits) == Refused("Disagreement", fields)


def test_limits_that_differ_by_less_than_one_can_see_are_the_same() -> None:
    meeting = Meeting(2, 4)
    meeting.join("a")
    assert meeting.join("b", limits=Limits(2, 4, 5.000000001)) is WAIT
    assert meeting.machine.limits.last_call_s == 5.0


def test_a_node_that_was_alone_and_came_again_is_still_the_one_to_agree_with() -> None:
    meeting = Meeting(1, 2, 0.0)
    meeting.join("a", settings={"batch": "16"})
    assert meeting.join("a", settings={"batch": "16"}).number == 2
    refusal = meeting.join("b", settings={"batch": "8"})
    assert isinstance(refusal, Refused) and refusal.fields["what"] == "batch"
    assert meeting.ranks() == {"a": 0}


def test_when_all_have_gone_there_is_nothing_to_agree_with() -> None:
    meeting = Meeting(1, 1)
    meeting.join("a", settings={"batch": "16"})
    meeting.leave("a")
    assert meeting.join("b", settings={"batch": "8"}, limits=Limits(1, 2, 0.0)).size == 1
    assert meeting.look()["max_nodes"] == 2


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (True, True)])
def test_a_loopback_endpoint_is_for_one_host(first: bool, second: bool) -> None:
    meeting = Meeting(2, 4)
    meeting.join("a", host="h1", loopback=first)
    refusal = meeting.join("b", host="h2", loopback=second)
    assert isinstance(refusal, Refused) and refusal.error == "Disagreement"
    words = ["network", "loopback"]
    assert refusal.fields == {
        "what": "endpoint (use an address that every node can reach, not localhost)",
        "mine": f"h2, {words[second]} (b (host:1))",
        "theirs": f"h1, {words[first]}",
        "other": "a (host:1)",
    }
    assert meeting.join("c", host="h1", loopback=True) is WAIT


def test_a_name_that_is_here_is_taken_until_its_session_ends() -> None:
    meeting = Meeting(2, 2)
    meeting.join("a")
    taken = Refused("NameTaken", {"member": "a", "other": "a (host:1)"})
    first = meeting.calls["a"]
    assert meeting.join("a", "other") == taken
    assert meeting.join("a") == taken, "not even by its own session, while it waits"
    meeting.calls["a"], meeting.told["a"] = first, WAIT
    meeting.join("b")
    assert meeting.ranks() == {"a": 0, "b": 1}
    assert meeting.join("a", "other") == taken and meeting.look()["phase"] == "formed"
    meeting.lost("a")
    assert meeting.join("a", "other") is WAIT


# Why


def test_a_wait_says_how_many_are_missing_and_who_came_last() -> None:
    meeting = Meeting(4, 8)
    for name in "abc":
        meeting.join(name)
    reason = "3 of at least 4 nodes: waiting for 1; last joined c (host:1)"
    assert meeting.why("a").reason == reason == meeting.look()["reason"]
    assert not meeting.why("a").stands_by


# What is remembered


def test_memory_does_not_grow_with_rounds_and_names() -> None:
    """The same four come again, every time with one whom nobody has seen before, and one that gives up."""
    meeting, sizes = Meeting(5, 5), []
    for number in range(1000):
        meeting.join("nobody")
        meeting.leave("nobody", Withdraw)
        for name in "abcd":
            meeting.join(name, rank="abcd".index(name) if name < "c" else -1)
        meeting.join(f"new {number:04}")
        assert len(meeting.ranks()) == 5
        meeting.watch("a")
        meeting.lost(f"new {number:04}")
        meeting.calls = {name: call for name, call in meeting.calls.items() if not name.startswith("new")}
        sizes.append(len(msgspec.json.encode(meeting.machine)))
    assert meeting.machine.number == 1000
    assert max(sizes[100:]) <= max(sizes[:100]) + 100, "but for digits"
    for name in "abcd":
        meeting.lost(name)
    assert meeting.machine.idle and not meeting.machine.calls and not meeting.machine.asked
