"""The membership machine beyond its histories: dropped events, weights, and views built once for all watchers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rallypoint.core.machines.machine import WAIT, Call, Done, Refused, Step
from rallypoint.core.machines.membership import (
    MAX_EVENTS,
    MembershipJoin,
    MembershipLeave,
    MembershipMachine,
    MembershipQuery,
    MembershipWatch,
)


def joined(*names: str) -> MembershipMachine:
    group = MembershipMachine()
    for stamp, name in enumerate(names, 1):
        assert isinstance(group.apply(Call(name, name, 1), MembershipJoin(), stamp).outcome, Done)
    return group


def since(group: MembershipMachine, epoch: int) -> Any:
    outcome = group.apply(Call("w", "w", 1), MembershipWatch(epoch), 0).outcome
    assert isinstance(outcome, Done)
    return outcome.answer


def test_kept_events_are_limited_and_a_watch_learns_that_some_are_missing() -> None:
    group = joined()
    for stamp in range(1, 2 * MAX_EVENTS, 2):
        group.apply(Call("a", "a", stamp), MembershipJoin(), stamp)
        group.apply(Call("a", "a", stamp + 1), MembershipLeave(stamp), stamp + 1)
    assert len(since(group, 0)[1]) == len(group.events) == MAX_EVENTS
    assert since(group, 0)[2] is False and since(group, MAX_EVENTS - 10)[2] is False
    _, events, every = since(group, MAX_EVENTS + 4)
    assert every is True and [event[3] for event in events] == list(range(MAX_EVENTS + 5, 2 * MAX_EVENTS + 1))


def test_all_watchers_of_one_epoch_share_one_answer() -> None:
    group = joined("a", "b")
    calls = [Call(str(number), str(number), 1) for number in range(10)]
    assert all(group.apply(call, MembershipWatch(2), 3).outcome is WAIT for call in calls)
    step = group.apply(Call("c", "c", 1), MembershipJoin(), 3)
    assert list(step.woken) == calls
    answers = [group.apply(call, MembershipWatch(2), 4).outcome for call in calls]
    assert all(isinstance(one, Done) and one.answer is answers[0].answer for one in answers)  # type: ignore[union-attr]
    assert step.outcome == Done(answers[0].answer[0])  # type: ignore[union-attr]


def test_a_view_is_plain_data_and_does_not_change() -> None:
    group = MembershipMachine()
    group.apply(Call("a", "s", 1, "host:7"), MembershipJoin(b"\x00", ["x"], {"b": {"x": "y"}}), 5)
    outcome = group.apply(Call("z", "z", 1), MembershipQuery(), 6).outcome
    assert isinstance(outcome, Done)
    here = {"id": 5, "where": "host:7", "info": b"\x00", "devices": ["x"]}
    maps = {"device_maps": {"b": {"x": "y"}}, "reverse_maps": {}}
    assert outcome.answer == {"epoch": 5, "members": {"a": {**here, **maps}}}
    before = msgspec.json.encode(outcome.answer)
    group.apply(Call("b", "s", 2), MembershipJoin(b"", ["y"], {"a": {"y": "x"}, "b": {"y": "y"}}), 6)
    group.session_ended("s", 7)
    assert msgspec.json.encode(outcome.answer) == before


def test_a_query_leaves_the_machine_idle() -> None:
    group = joined()
    assert group.apply(Call("z", "z", 1), MembershipQuery(), 1) == Step(Done({"epoch": 0, "members": {}}))
    assert group.idle


def test_device_maps_of_a_refused_member_are_discarded() -> None:
    group = joined("a")
    wrong = MembershipJoin(b"", ["x"], {"b": {"x": "y"}, "a": {"x": "nothing"}})
    assert isinstance(group.apply(Call("c", "c", 1), wrong, 2).outcome, Refused)
    assert not group.reverse and group.epoch == 1


def test_the_weight_of_a_join_is_the_size_of_its_data() -> None:
    assert MembershipJoin().weight == 0
    assert MembershipJoin(b"12345", ["xy"], {"b": {"xy": "z"}}).weight == 5 + 2 + 2 * (1 + 2 + 1)


@pytest.mark.parametrize(
    "command",
    [
        MembershipJoin(b"", ["x"] * 1025),
        MembershipJoin(b"", ["x" * 257]),
        MembershipJoin(b"", [], {"b": {str(n): "y" for n in range(1025)}}),
        MembershipWatch(-1),
    ],
    ids=["devices", "a long name", "a long map", "an epoch below 0"],
)
def test_commands_over_a_limit_are_refused(command: MembershipJoin | MembershipWatch) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(command), type=type(command))


def test_a_large_group_joins_with_full_maps() -> None:
    """All of 200 members map to all others: the reverse maps exist, and vanish with the members."""
    group, size = MembershipMachine(), 200
    for stamp in range(size):
        maps = {str(peer): {"x": "x"} for peer in range(size) if peer != stamp}
        assert isinstance(
            group.apply(Call(str(stamp), f"s{stamp}", 1), MembershipJoin(b"", ["x"], maps), stamp + 1).outcome, Done
        )
    assert {name: len(back) for name, back in group.reverse.items()} == {str(n): size - 1 for n in range(size)}
    for stamp in range(size):
        group.session_ended(f"s{stamp}", size + stamp + 1)
    assert group.idle and not group.reverse and not group.joins
