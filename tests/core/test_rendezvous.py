"""The rendezvous machine, rule by rule.

`RendezvousHarness` acts as a host: it numbers calls and changes, and rechecks woken calls. After every step it encodes
and decodes the state, and applies the call a second time, which must change nothing.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.core.round_answer import Round

from rallypoint.core.machines.machine import WAIT, Call, Command, Done, Refused, Step, Undo
from rallypoint.core.machines.rendezvous import (
    RendezvousClose,
    RendezvousJoin,
    RendezvousLeave,
    RendezvousMachine,
    RendezvousQuery,
    RendezvousReopen,
    RendezvousWatch,
    RendezvousWithdraw,
)
from rallypoint.core.policy.round_policy import NodeLimits


class RendezvousHarness:
    """A rendezvous and its nodes; by default, the session of a node has the node's name."""

    def __init__(self, least: int = 2, most: int = 4, last_call_s: float = 5.0) -> None:
        self.machine = RendezvousMachine()
        self.limits = NodeLimits(least, most, last_call_s)
        self.stamp = self.number = 0
        self.calls: dict[str, tuple[Call, Command]] = {}
        self.results: dict[str, Any] = {}
        """The result of the last call of each node and watcher: a Round, a reason, a refusal, or WAIT."""

    def join(self, name: str, session: str = "", former: tuple[str, ...] = (), **join_args: Any) -> Any:
        join_args.setdefault("limits", self.limits)
        return self._do(name, session, RendezvousJoin(**join_args), former)

    def join_all(self, names: str) -> None:
        for name in names.split():
            self.join(name)

    def watch(self, name: str, scope: int | None = None) -> Any:
        return self._do(f"watch {name}", name, RendezvousWatch(self.machine.scope if scope is None else scope))

    def close(self, result: str = "done", reason: str = "all epochs trained") -> Any:
        return self._do("closer", "", RendezvousClose(result, reason))

    def reopen(self, if_left: bool = False) -> Any:
        return self._do("opener", "", RendezvousReopen(if_left))

    def leave(self, name: str, undo: type[Undo] = RendezvousLeave, **how: Any) -> Any:
        call, _ = self.calls[name]
        return self._apply(Call(name, call.session, self._next()), undo(call.number, **how))

    def end_session(self, session: str) -> None:
        self._did(self.machine.session_ended(session, self.stamp + 1))

    def fire_timer(self) -> None:
        assert self.machine.timer is not None
        self._did(self.machine.on_timer(self.machine.timer[0], self.stamp + 1))

    def explain(self, name: str) -> Any:
        return self.machine.explain(self.calls[name][0])

    def query(self, scope: int = 0) -> Any:
        outcome = self.machine.apply(Call("x", "x", 0), RendezvousQuery(scope), 0).outcome
        assert isinstance(outcome, Done)
        return outcome.answer

    def ranks(self) -> dict[str, int]:
        """Return the ranks of the current round, from the results of its nodes."""
        assert self.query()["phase"] == "formed", self.query()
        result = {name: self.results[name] for name in self.machine.nodes}
        assert {one.scope for one in result.values()} == {self.machine.scope}
        return dict(sorted(((name, one.rank) for name, one in result.items()), key=lambda item: item[1]))

    def _next(self) -> int:
        self.number += 1
        return self.number

    def _do(self, name: str, session: str, command: Command, former: tuple[str, ...] = ()) -> Any:
        call = Call(name, session or name, self._next(), "host:1", former)
        self.calls[name] = call, command
        self.results[name] = self._apply(call, command)
        return self.results[name]

    def _apply(self, call: Call, command: Command) -> Any:
        step = self._did(self.machine.apply(call, command, self.stamp + 1))
        again = self.machine.apply(call, command, self.stamp + 1)
        assert not again.changed and not list(again.woken)
        if not isinstance(command, (Undo, RendezvousClose, RendezvousReopen)) and not isinstance(step.outcome, Refused):
            assert again.outcome == step.outcome
        return _plain(step)

    def _did(self, step: Step) -> Step:
        for form in (msgspec.json, msgspec.msgpack):
            read = form.decode(form.encode(self.machine), type=RendezvousMachine)
            assert read == self.machine
            self.machine = read
        self.stamp += step.changed
        asked = {call.id: (name, call, command) for name, (call, command) in self.calls.items()}
        for woken in step.woken:
            name, call, command = asked[woken.id]
            assert self.results[name] is WAIT
            looked = self.machine.apply(call, command, self.stamp + 1)
            assert looked.outcome is not WAIT and not looked.changed
            self.results[name] = _plain(looked)
        for call in step.dropped:
            assert not self.machine.holds(call.id)
        return step


def _plain(step: Step) -> Any:
    """Return the result of a call: an answer (a round as a Round), a refusal, or WAIT."""
    if not isinstance(step.outcome, Done):
        return step.outcome
    answer = step.outcome.answer
    return Round(*answer) if isinstance(answer, list) and len(answer) == 8 else answer


def harness_of(names: str, least: int = 2, most: int = 4, last_call_s: float = 5.0) -> RendezvousHarness:
    """Return a harness in which these nodes have formed a round."""
    harness = RendezvousHarness(least, most, last_call_s)
    harness.join_all(names)
    if harness.machine.timer is not None:
        harness.fire_timer()
    assert list(harness.ranks()) == names.split()
    return harness


# When a round is formed


def test_a_full_round_is_formed_at_once() -> None:
    harness = RendezvousHarness(2, 3)
    assert harness.join("a", address="10.0.0.1") is WAIT
    assert harness.join("b") is WAIT
    result = harness.join("c")
    assert result[1:2] + result[3:] == (1, 2, 3, ("a", "10.0.0.1"), 0, "all 3 nodes joined")
    assert harness.ranks() == {"a": 0, "b": 1, "c": 2}
    assert harness.machine.timer is None


def test_last_call_begins_with_min_nodes_and_is_not_extended() -> None:
    harness = RendezvousHarness(2, 4)
    harness.join("a")
    assert harness.machine.timer is None
    harness.join("b")
    timer = harness.machine.timer
    assert timer == (2, 5.0)
    harness.join("c")
    assert harness.machine.timer == timer, "later nodes do not extend it"
    harness.fire_timer()
    assert list(harness.ranks()) == ["a", "b", "c"] and harness.machine.timer is None


def test_last_call_stops_when_too_few_are_left_and_restarts() -> None:
    harness = RendezvousHarness(2, 4)
    harness.join_all("a b")
    first = harness.machine.timer
    assert first is not None
    harness.leave("b", RendezvousWithdraw)
    assert harness.machine.timer is None
    harness.join("b")
    assert harness.machine.timer is not None and harness.machine.timer[0] > first[0]
    assert not harness.machine.on_timer(first[0], harness.stamp + 1).changed, "that timer was stopped"
    assert not harness.machine.on_timer(0, harness.stamp + 1).changed
    harness.end_session("a")
    assert harness.machine.timer is None


def test_a_late_timer_does_not_change_a_formed_round() -> None:
    harness = RendezvousHarness(2, 3)
    harness.join_all("a b")
    assert harness.machine.timer is not None
    number = harness.machine.timer[0]
    harness.join("c")
    before = harness.ranks()
    assert harness.machine.on_timer(number, harness.stamp + 1) == Step(Done())
    assert harness.ranks() == before


def test_last_call_ends_when_all_nodes_of_the_last_round_are_back() -> None:
    harness = harness_of("a b c")
    harness.end_session("c")
    harness.join("b")
    assert harness.join("x") is WAIT and harness.machine.timer is not None
    assert "not back yet: a" in harness.explain("x").reason and harness.explain("x").missing == ("a",)
    result = harness.join("a")
    assert result.reason == "all nodes of the last round are back: 3 of at most 4 nodes"
    assert harness.ranks() == {"a": 0, "b": 1, "x": 2}


def test_last_call_ends_when_the_last_missing_node_is_lost() -> None:
    harness = harness_of("a b c")
    harness.join_all("a b")
    assert harness.results["b"] is WAIT
    harness.end_session("c")
    assert harness.ranks() == {"a": 0, "b": 1}


def test_a_node_that_does_not_rejoin_in_time_is_left_out() -> None:
    harness = harness_of("a b c", most=3)
    watched = harness.watch("c")
    harness.join_all("a b")
    harness.fire_timer()
    assert watched is WAIT and harness.results["watch c"] == "a (host:1) rejoined"
    assert harness.ranks() == {"a": 0, "b": 1}
    assert harness.leave("c") == 2, "it was not in the new round"
    assert harness.join("c") is WAIT


def test_newcomers_do_not_displace_nodes_that_are_rejoining() -> None:
    """Four nodes join a round of two: the two need a moment to stop their workers, and are in the next round."""
    harness = harness_of("a b")
    for name in "wxyz":
        assert harness.join(name) is WAIT
    harness.join("b")
    assert harness.join("a").size == 4
    assert harness.ranks() == {"a": 0, "b": 1, "w": 2, "x": 3}


def test_without_a_last_call_two_nodes_do_not_displace_each_other_forever() -> None:
    harness = RendezvousHarness(1, 2, 0.0)
    assert harness.join("a").size == 1
    assert harness.watch("a") is WAIT
    assert harness.join("b") is WAIT
    assert harness.results["watch a"] == "b (host:1) is waiting, and the round has a free place"
    assert harness.machine.timer is not None and harness.machine.timer[1] == 3.0, (
        "nodes of the last round get time to rejoin"
    )
    assert harness.join("a").size == 2
    assert harness.ranks() == {"a": 0, "b": 1}


def test_the_first_round_after_all_nodes_were_lost_has_a_last_call() -> None:
    """Even if the state is never dropped; numbers continue, and a node that returns gets its rank back."""
    harness = harness_of("a b")
    harness.end_session("a")
    harness.end_session("b")
    assert harness.join("b", "b2") is WAIT
    assert harness.join("x") is WAIT and harness.machine.timer is not None
    harness.fire_timer()
    assert harness.ranks() == {"x": 0, "b": 1}
    assert harness.results["x"].number == 2


# Ranks


def test_a_requested_rank_is_assigned() -> None:
    harness = RendezvousHarness(3, 3)
    harness.join("a", rank=2)
    harness.join("b")
    harness.join("c", rank=0)
    assert harness.ranks() == {"c": 0, "b": 1, "a": 2}


def test_a_second_request_for_a_rank_is_refused_with_the_holder_s_name() -> None:
    harness = RendezvousHarness(2, 4)
    harness.join("a", rank=1)
    taken = Refused("RankTaken", {"rank": 1, "member": "b", "other": "a (host:1)"})
    assert harness.join("b", rank=1) == taken
    harness.join("b", rank=0)
    harness.fire_timer()
    assert harness.ranks() == {"b": 0, "a": 1}
    assert harness.join("c", rank=1) == Refused("RankTaken", {**taken.fields, "member": "c"})
    harness.end_session("a")
    assert harness.join("c", rank=1) is WAIT, "the rank is free again"


def test_a_rejoining_node_may_request_its_own_rank_or_another() -> None:
    harness = RendezvousHarness(2, 2)
    harness.join("a", rank=0)
    harness.join("b")
    harness.join("a", rank=0)
    harness.join("b")
    assert harness.ranks() == {"a": 0, "b": 1}
    harness.join("a", rank=1)
    harness.join("b", rank=0)
    assert harness.ranks() == {"b": 0, "a": 1}


def test_a_rank_over_max_nodes_is_refused() -> None:
    refused = Refused("NotAMember", {"member": "a as rank 4", "members": "ranks 0 to 3"})
    harness = RendezvousHarness(2, 4)
    assert harness.join("a", rank=4) == refused
    assert harness.machine == RendezvousMachine()


def test_last_call_waits_for_a_requested_rank() -> None:
    harness = harness_of("a b c")
    harness.end_session("c")
    assert harness.join("x", rank=3) is WAIT
    harness.join("a")
    assert harness.join("b") is WAIT
    assert harness.explain("b").reason.endswith("rank 3 was requested; last joined b (host:1)")
    harness.leave("x", RendezvousWithdraw)
    assert harness.ranks() == {"a": 0, "b": 1}, "rank 3 is not requested any more"


def test_a_node_that_returns_gets_its_rank_back() -> None:
    harness = harness_of("a b c", 2, 3)
    harness.end_session("a")
    harness.join_all("c b")
    assert harness.ranks() == {"c": 0, "b": 1}
    assert harness.join("a", "a2") is WAIT
    harness.join_all("b c")
    assert harness.ranks() == {"c": 0, "b": 1, "a": 2}, "nodes that stayed keep their ranks"
    harness.end_session("b")
    harness.join("x")
    harness.join("a", "a2")
    harness.join("c")
    assert harness.ranks() == {"c": 0, "x": 1, "a": 2}
    harness.end_session("x")
    harness.join("b", "b2")
    harness.join("a", "a2")
    harness.join("c")
    assert harness.ranks() == {"c": 0, "b": 1, "a": 2}, "b missed one round, and its rank is free"


@pytest.mark.parametrize("rounds", range(1, 8))
def test_the_ranks_of_the_last_lost_nodes_are_remembered(rounds: int) -> None:
    """`b` was in every round: when it is lost at last, its rank is the most recent one remembered."""
    harness = harness_of("a b", 2, 2)
    for number in range(rounds):
        harness.end_session("a" if not number else f"x{number}")
        harness.join(f"x{number + 1}")
        harness.join("b")
        assert harness.ranks() == {f"x{number + 1}": 0, "b": 1}
    harness.end_session("b")
    harness.join("y")
    harness.join(f"x{rounds}")
    assert harness.ranks() == {f"x{rounds}": 0, "y": 1}
    harness.end_session("y")
    harness.end_session(f"x{rounds}")
    harness.join("b", "b2")
    harness.join("z")
    assert harness.ranks() == {"z": 0, "b": 1}


# Spares


def test_spares_fill_gaps_in_the_order_in_which_they_joined() -> None:
    harness = harness_of("a b", 2, 2)
    for name in "xyz":
        assert harness.join(name) is WAIT
        why = harness.explain(name)
        assert why.is_spare and why.reason == "round 1 is full with 2 nodes; this node is a spare"
    assert harness.query()["spares"] == ["x", "y", "z"]
    assert harness.query()["phase"] == "formed", "waiting nodes do not end a full round"
    harness.end_session("a")
    assert harness.explain("x").is_spare, "a spare stays a spare, and does not time out"
    harness.join("b")
    assert harness.ranks() == {"x": 0, "b": 1}
    assert harness.query()["spares"] == ["y", "z"] and harness.explain("y").is_spare


def test_a_spare_does_not_replace_a_node_that_is_rejoining() -> None:
    harness = harness_of("a b", 2, 2)
    harness.join("x")
    assert harness.join("b") is WAIT
    assert harness.explain("b").reason.startswith("2 nodes joined for 2 places: last call of 5 s; not back yet: a")
    harness.join("a")
    assert harness.ranks() == {"a": 0, "b": 1} and harness.query()["spares"] == ["x"]


def test_a_spare_replaces_a_node_that_does_not_rejoin_in_time() -> None:
    harness = harness_of("a b", 2, 2)
    harness.join_all("x b")
    harness.fire_timer()
    assert harness.ranks() == {"x": 0, "b": 1}


def test_spares_form_a_round_when_no_other_node_is_left() -> None:
    harness = harness_of("a", 1, 1)
    harness.join_all("x y")
    harness.end_session("a")
    assert harness.ranks() == {"x": 0} and harness.query()["spares"] == ["y"]


# A round that is over


def test_a_watch_names_the_lost_node() -> None:
    harness = harness_of("a b c")
    assert harness.watch("a") is WAIT and harness.watch("c") is WAIT
    assert harness.explain("watch a").reason.startswith("round 1 stands: ")
    harness.end_session("b")
    assert harness.results["watch a"] == harness.results["watch c"] == "lost b (host:1)"
    assert harness.watch("c") == "lost b (host:1)", "a later watch gets the same reason"
    assert harness.query()["over"] == "lost b (host:1)" and harness.query()["phase"] == "gathering"


def test_a_watch_names_the_waiting_node_if_there_is_room() -> None:
    harness = harness_of("a b")
    harness.watch("a")
    harness.join("c")
    assert harness.results["watch a"] == "c (host:1) is waiting, and the round has a free place"


def test_a_watch_names_the_node_that_left_and_leaving_does_not_close_the_run() -> None:
    harness = harness_of("a b c")
    harness.watch("a")
    assert harness.leave("c") == 2
    assert harness.results["watch a"] == "c (host:1) left"
    assert harness.leave("c") == 2, "leaving twice is leaving once"
    harness.join_all("a b")
    assert harness.ranks() == {"a": 0, "b": 1}
    assert harness.leave("a") == 1 and harness.leave("b") == 0
    assert harness.machine.idle and harness.query()["result"] is None
    harness.join_all("d e")
    harness.fire_timer()
    assert harness.ranks() == {"d": 0, "e": 1}


def test_a_watch_of_an_earlier_round_ends_at_once_and_a_withdrawn_watch_is_not_answered() -> None:
    harness = harness_of("a b", 2, 2)
    scope = harness.machine.scope
    harness.watch("a")
    assert harness.leave("watch a", RendezvousWithdraw) is None
    harness.join("a")
    assert harness.results["watch a"] is WAIT
    harness.join("b")
    assert harness.watch("a", scope) == "round 2 has been formed"


def test_a_lost_watcher_does_not_end_the_round() -> None:
    harness = harness_of("a b")
    harness._do("w", "", RendezvousWatch(harness.machine.scope))
    harness.end_session("w")
    assert harness.query()["phase"] == "formed" and "w" not in harness.machine.sessions()


def test_a_round_is_formed_again_after_a_newcomer_gave_up() -> None:
    harness = harness_of("a b")
    harness.join("c")
    assert harness.leave("c", RendezvousWithdraw) == 2
    harness.join("a")
    assert harness.join("b").number == 2
    assert harness.ranks() == {"a": 0, "b": 1}


def test_every_round_has_its_own_scope_and_names_the_previous_one() -> None:
    harness, scopes = harness_of("a b", 2, 2), [0]
    for number in range(1, 6):
        result = harness.results["a"]
        assert result.number == number and result.before == scopes[-1] < result.scope
        scopes.append(result.scope)
        harness.join("a")
        harness.join("b")


def test_the_node_table_is_in_order_of_rank_and_includes_lost_nodes() -> None:
    harness = RendezvousHarness(2, 2)
    harness.join("a", rank=1, host="h1")
    harness.join("b", host="h2")
    scope = harness.machine.scope
    assert harness.query(scope) == [["b", "h2", "host:1"], ["a", "h1", "host:1"]]
    harness.end_session("b")
    assert harness.query(scope) == [["b", "", ""], ["a", "h1", "host:1"]]
    assert harness.query(scope + 1) == []


# Withdrawing


def test_withdrawing_a_completed_join_returns_its_round() -> None:
    harness = harness_of("a b", 2, 2)
    assert harness.leave("a", RendezvousWithdraw) == [list(harness.results["a"])]
    assert harness.query()["phase"] == "formed"
    assert harness.leave("a") == 1
    assert harness.query()["over"] == "a (host:1) left"


def test_a_waiting_join_can_be_withdrawn() -> None:
    harness = RendezvousHarness(2, 2)
    harness.join("a")
    assert harness.leave("a", RendezvousWithdraw) == 0
    assert harness.machine.idle and not harness.machine.holds(harness.calls["a"][0].id)
    harness.join("b")
    assert harness.join("c").size == 2 and harness.ranks() == {"b": 0, "c": 1}


# Leaving when done, and in failure


def test_a_node_that_leaves_when_done_does_not_end_the_round() -> None:
    harness = harness_of("a b", 2, 2)
    harness.watch("b")
    assert harness.leave("a", done=True) == 1
    assert harness.query()["phase"] == "formed" and harness.results["watch b"] is WAIT
    assert harness.join("x") is WAIT and harness.query()["spares"] == ["x"], "a node that is done keeps its place"
    assert harness.leave("b") == 1
    assert harness.query()["over"] == "b (host:1) left"


def test_a_new_round_forms_after_all_nodes_have_left_as_done() -> None:
    harness = harness_of("a b", 2, 2)
    for name in "ab":
        harness.leave(name, done=True)
    assert harness.join("c") is WAIT and harness.join("d").size == 2


def test_a_failed_node_closes_a_run_that_has_too_few_nodes_left() -> None:
    harness = harness_of("a b", 2, 2)
    harness.watch("a")
    assert harness.leave("b", failed="rank 1 failed: exit code 3") == 1
    reason = "b (host:1) ended in failure, 1 of at least 2 nodes are left: rank 1 failed: exit code 3"
    assert harness.results["watch a"] == f"the run was closed: failed: {reason}"
    assert harness.join("a") == closed_with("failed", reason)


def test_a_node_that_fails_while_it_waits_closes_a_run_with_too_few_nodes() -> None:
    harness = harness_of("a b c", 2, 3)
    harness.end_session("c")
    harness.join("a")
    harness.leave("a", failed="why")
    assert harness.query()["phase"] == "closed" and harness.query()["result"] == "failed"


def test_a_failed_node_does_not_close_a_run_with_enough_nodes_or_none() -> None:
    harness = harness_of("a b c", 2, 3)
    assert harness.leave("a", failed="why") == 2 and harness.query()["phase"] == "gathering"
    assert harness.leave("b", failed="why") == 1 and harness.query()["phase"] == "closed"
    alone = harness_of("a", 1, 1)
    assert alone.leave("a", failed="why") == 0 and alone.query()["phase"] == "gathering"


# Nodes that refuse to be spares


def full_with(*names: str, member: str = "x") -> Refused:
    return Refused("RunFull", {"member": member, "nodes": list(names)})


def test_a_node_that_refuses_to_be_a_spare_is_refused_by_a_full_round() -> None:
    harness = harness_of("a b", 2, 2)
    assert harness.join("x", spare=False) == full_with("a", "b")
    assert harness.query()["waiting"] == [] and harness.ranks() == {"a": 0, "b": 1}, "the round is not disturbed"
    harness.leave("a", done=True)
    assert harness.join("x", spare=False) == full_with("a", "b"), "a node that is done keeps its place"
    harness.end_session("b")
    assert harness.join("x", spare=False) is WAIT


def test_a_waiting_node_that_refuses_to_be_a_spare_is_refused_when_left_out() -> None:
    harness = harness_of("a b", 2, 2)
    harness.end_session("b")
    assert harness.join("x", spare=False) is WAIT
    assert harness.join("y") is WAIT
    assert harness.join("b", "b2") is WAIT
    harness.join("a")
    assert set(harness.ranks()) == {"a", "b"}, "nodes of the last round have precedence"
    call, command = harness.calls["x"]
    assert harness.machine.apply(call, command, 99).outcome == full_with("a", "b")
    assert harness.query()["waiting"] == ["y"]


# A process that has lost its session, before the server has ended it


def test_a_node_with_a_new_session_replaces_its_old_self() -> None:
    harness = RendezvousHarness(2, 2)
    harness.join("a")
    assert harness.join("a", "another") == Refused("NameTaken", {"member": "a", "other": "a (host:1)"})
    assert harness.join("a", "a2", ("a",)) is WAIT and harness.query()["waiting"] == ["a"]
    assert harness.join("b").size == 2
    harness.watch("b")
    assert harness.join("a", "a3", ("a", "a2")) is WAIT
    assert harness.results["watch b"] == "a (host:1) rejoined"
    for session in ("a", "a2"):
        harness.end_session(session)
    harness.join("b")
    assert harness.ranks() == {"a": 0, "b": 1}, "the end of its old sessions has no effect"


# The end of a run


def closed_with(result: str = "done", reason: str = "all epochs trained", waited: bool = False) -> Refused:
    return Refused("RunClosed", {"result": result, "reason": reason, "waited": waited})


def test_close_reaches_spares_and_watchers() -> None:
    harness = harness_of("a b", 2, 2)
    harness.join("x")
    harness.watch("a")
    assert harness.close() is True
    assert harness.results["x"] == closed_with(waited=True)
    assert harness.results["watch a"] == "the run was closed: done: all epochs trained"
    assert harness.watch("b") == "the run was closed: done: all epochs trained"


def test_close_reaches_waiting_nodes_and_stops_last_call() -> None:
    harness = RendezvousHarness(2, 4)
    harness.join_all("a b")
    assert harness.machine.timer is not None
    harness.close("failed", "b ran out of memory")
    assert harness.results["a"] == harness.results["b"] == closed_with("failed", "b ran out of memory", waited=True)
    assert harness.machine.timer is None and harness.machine.idle


def test_a_node_that_gives_up_after_the_close_gets_run_closed() -> None:
    """It times out before it has rechecked; an error about missing nodes would be wrong."""
    harness = harness_of("a b", 2, 2)
    harness.join("spare")
    harness.close()
    assert harness.leave("spare", RendezvousWithdraw) == closed_with(waited=True)
    assert harness.leave("spare") == 2, "leaving still works"
    assert harness.leave("a", RendezvousWithdraw) == [list(harness.results["a"])], "it was in a round"


def test_a_closed_run_refuses_its_nodes_and_newcomers() -> None:
    harness = harness_of("a b", 2, 2)
    harness.close()
    assert harness.close("failed", "too late") is False
    assert harness.query()["phase"] == "closed" and harness.query()["result"] == "done"
    assert harness.leave("a") == 1
    assert harness.join("a", run=0) == harness.join("b", run=0) == harness.join("late") == closed_with()
    harness.end_session("b")
    assert harness.machine.idle and harness.machine.persists_idle
    assert harness.join("late") == closed_with()


def test_a_loss_after_the_close_does_not_change_the_result() -> None:
    harness = harness_of("a b", 2, 2)
    harness.close()
    harness.end_session("b")
    assert harness.watch("a") == "the run was closed: done: all epochs trained"
    assert harness.join("b", "b2") == closed_with()


def test_reopening_begins_a_new_run_and_refuses_nodes_of_the_old_one() -> None:
    harness = harness_of("a b", 2, 2)
    old = harness.results["a"]
    assert harness.reopen() is False, "the run is open already"
    harness.close()
    assert harness.reopen() is True
    assert not harness.machine.sessions() and harness.query()["phase"] == "gathering"
    harness.join("x")
    result = harness.join("y")
    assert result.run > old.run and result.scope > old.scope == result.before and result.number == 1
    refusal = harness.join("a", run=old.run)
    assert isinstance(refusal, Refused) and refusal.error == "RunClosed"
    assert harness.join("a") is WAIT, "as a new node it may be a spare"
    assert harness.join("x", run=result.run) is WAIT


def test_a_reopened_run_refuses_nodes_of_the_previous_run_even_when_idle() -> None:
    harness = harness_of("a b", 2, 2)
    harness.close()
    harness.end_session("a")
    harness.end_session("b")
    harness.reopen()
    assert harness.machine.idle and harness.machine.persists_idle
    refusal = harness.join("a", "a2", run=0)
    assert isinstance(refusal, Refused) and refusal.error == "RunClosed"


def test_a_run_that_nodes_have_not_left_may_be_kept_closed() -> None:
    """A late node of the run must learn its result, and a spare may be the last node to leave."""
    harness = harness_of("a b", 2, 2)
    assert harness.reopen(if_left=True) is False, "the run is open"
    harness.close()
    harness.leave("a")
    assert harness.reopen(if_left=True) is False and harness.join("new") == closed_with()
    harness.end_session("b")
    assert harness.reopen(if_left=True) is True
    assert harness.join("new") is WAIT


def test_a_forgotten_run_continues_under_the_number_of_its_nodes() -> None:
    harness = RendezvousHarness(2, 2)
    harness.join("new")
    assert harness.join("a", run=7).run == 7


def test_a_node_of_a_forgotten_run_joins_the_run_formed_meanwhile() -> None:
    harness = harness_of("x y", 2, 3)
    assert harness.join("a", run=7) is WAIT
    harness.join("x", run=0)
    assert harness.join("y", run=0).run == 0
    assert harness.results["a"].run == 0


# Refused nodes


def test_settings_that_differ_are_refused_and_named() -> None:
    harness = RendezvousHarness(2, 2)
    harness.join("a", settings={"model": "m", "batch": "16"})
    differs = {"what": "batch", "mine": "8 (b (host:1))", "theirs": "16", "other": "a (host:1)"}
    assert harness.join("b", settings={"model": "m", "batch": "8"}) == Refused("Disagreement", differs)
    missing = {"what": "batch", "mine": "not set (b (host:1))", "theirs": "16", "other": "a (host:1)"}
    assert harness.join("b", settings={"model": "m"}) == Refused("Disagreement", missing)
    more = {"what": "seed", "mine": "1 (b (host:1))", "theirs": "not set", "other": "a (host:1)"}
    assert harness.join("b", settings={"model": "m", "batch": "16", "seed": "1"}) == Refused("Disagreement", more)
    assert harness.join("b", settings={"batch": "16", "model": "m"}).size == 2


@pytest.mark.parametrize(
    ("limits", "what", "mine", "theirs"),
    [
        (NodeLimits(1, 4, 5.0), "min_nodes", "1", "2"),
        (NodeLimits(2, 5, 5.0), "max_nodes", "5", "4"),
        (NodeLimits(2, 4, 0.5), "last_call_s", "0.5", "5"),
    ],
)
def test_limits_that_differ_are_refused_and_named(limits: NodeLimits, what: str, mine: str, theirs: str) -> None:
    harness = RendezvousHarness(2, 4)
    harness.join("a")
    fields = {"what": what, "mine": f"{mine} (b (host:1))", "theirs": theirs, "other": "a (host:1)"}
    assert harness.join("b", limits=limits) == Refused("Disagreement", fields)


def test_limits_that_print_alike_are_equal() -> None:
    harness = RendezvousHarness(2, 4)
    harness.join("a")
    assert harness.join("b", limits=NodeLimits(2, 4, 5.000000001)) is WAIT
    assert harness.machine.limits.last_call_s == 5.0


def test_newcomers_must_agree_with_the_settings_of_a_rejoined_node() -> None:
    harness = RendezvousHarness(1, 2, 0.0)
    harness.join("a", settings={"batch": "16"})
    assert harness.join("a", settings={"batch": "16"}).number == 2
    refusal = harness.join("b", settings={"batch": "8"})
    assert isinstance(refusal, Refused) and refusal.fields["what"] == "batch"
    assert harness.ranks() == {"a": 0}


def test_settings_are_forgotten_when_all_nodes_have_left() -> None:
    harness = RendezvousHarness(1, 1)
    harness.join("a", settings={"batch": "16"})
    harness.leave("a")
    assert harness.join("b", settings={"batch": "8"}, limits=NodeLimits(1, 2, 0.0)).size == 1
    assert harness.query()["max_nodes"] == 2


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (True, True)])
def test_a_loopback_endpoint_is_for_one_host(first: bool, second: bool) -> None:
    harness = RendezvousHarness(2, 4)
    harness.join("a", host="h1", loopback=first)
    refusal = harness.join("b", host="h2", loopback=second)
    assert isinstance(refusal, Refused) and refusal.error == "Disagreement"
    words = ["network", "loopback"]
    assert refusal.fields == {
        "what": "endpoint (use an address that every node can reach, not localhost)",
        "mine": f"h2, {words[second]} (b (host:1))",
        "theirs": f"h1, {words[first]}",
        "other": "a (host:1)",
    }
    assert harness.join("c", host="h1", loopback=True) is WAIT


def test_a_name_is_taken_until_its_session_ends() -> None:
    harness = RendezvousHarness(2, 2)
    harness.join("a")
    taken = Refused("NameTaken", {"member": "a", "other": "a (host:1)"})
    first = harness.calls["a"]
    assert harness.join("a", "other") == taken
    assert harness.join("a") == taken, "even for its own session, while it waits"
    harness.calls["a"], harness.results["a"] = first, WAIT
    harness.join("b")
    assert harness.ranks() == {"a": 0, "b": 1}
    assert harness.join("a", "other") == taken and harness.query()["phase"] == "formed"
    harness.end_session("a")
    assert harness.join("a", "other") is WAIT


# Reasons


def test_the_reason_of_a_wait_counts_the_missing_and_names_the_last_node() -> None:
    harness = RendezvousHarness(4, 8)
    for name in "abc":
        harness.join(name)
    reason = "3 of at least 4 nodes: waiting for 1; last joined c (host:1)"
    assert harness.explain("a").reason == reason == harness.query()["reason"]
    assert not harness.explain("a").is_spare


# Memory


def test_memory_does_not_grow_with_rounds_and_names() -> None:
    """The same four nodes rejoin, each time with a new node and one that gives up."""
    harness, sizes = RendezvousHarness(5, 5), []
    for number in range(1000):
        harness.join("nobody")
        harness.leave("nobody", RendezvousWithdraw)
        for name in "abcd":
            harness.join(name, rank="abcd".index(name) if name < "c" else -1)
        harness.join(f"new {number:04}")
        assert len(harness.ranks()) == 5
        harness.watch("a")
        harness.end_session(f"new {number:04}")
        harness.calls = {name: call for name, call in harness.calls.items() if not name.startswith("new")}
        sizes.append(len(msgspec.json.encode(harness.machine)))
    assert harness.machine.number == 1000
    assert max(sizes[100:]) <= max(sizes[:100]) + 100, "except for longer numbers"
    for name in "abcd":
        harness.end_session(name)
    assert harness.machine.idle and not harness.machine.calls and not harness.machine.asked
