"""The roster beyond its histories: what it forgets, what it counts, and that a view is made once for all."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rallypoint.core.machine import WAIT, Call, Done, Refused, Step
from rallypoint.core.roster import KEPT, Join, Leave, Look, Roster, Watch


def joined(*names: str) -> Roster:
    roster = Roster()
    for stamp, name in enumerate(names, 1):
        assert isinstance(roster.apply(Call(name, name, 1), Join(), stamp).outcome, Done)
    return roster


def since(roster: Roster, epoch: int) -> Any:
    outcome = roster.apply(Call("w", "w", 1), Watch(epoch), 0).outcome
    assert isinstance(outcome, Done)
    return outcome.answer


def test_only_so_many_events_are_kept_and_a_reader_is_told_that_some_are_missing() -> None:
    roster = joined()
    for stamp in range(1, 2 * KEPT, 2):
        roster.apply(Call("a", "a", stamp), Join(), stamp)
        roster.apply(Call("a", "a", stamp + 1), Leave(stamp), stamp + 1)
    assert len(since(roster, 0)[1]) == len(roster.events) == KEPT
    assert since(roster, 0)[2] is False and since(roster, KEPT - 10)[2] is False
    _, events, every = since(roster, KEPT + 4)
    assert every is True and [event[3] for event in events] == list(range(KEPT + 5, 2 * KEPT + 1))


def test_all_who_watch_from_one_epoch_get_one_answer() -> None:
    roster = joined("a", "b")
    calls = [Call(str(number), str(number), 1) for number in range(10)]
    assert all(roster.apply(call, Watch(2), 3).outcome is WAIT for call in calls)
    step = roster.apply(Call("c", "c", 1), Join(), 3)
    assert list(step.woken) == calls
    answers = [roster.apply(call, Watch(2), 4).outcome for call in calls]
    assert all(isinstance(one, Done) and one.answer is answers[0].answer for one in answers)  # type: ignore[union-attr]
    assert step.outcome == Done(answers[0].answer[0])  # type: ignore[union-attr]


def test_a_view_is_plain_data_and_stays_as_it_was() -> None:
    roster = Roster()
    roster.apply(Call("a", "s", 1, "host:7"), Join(b"\x00", ["x"], {"b": {"x": "y"}}), 5)
    outcome = roster.apply(Call("z", "z", 1), Look(), 6).outcome
    assert isinstance(outcome, Done)
    here = {"id": 5, "where": "host:7", "info": b"\x00", "devices": ["x"]}
    maps = {"device_maps": {"b": {"x": "y"}}, "reverse_maps": {}}
    assert outcome.answer == {"epoch": 5, "members": {"a": {**here, **maps}}}
    before = msgspec.json.encode(outcome.answer)
    roster.apply(Call("b", "s", 2), Join(b"", ["y"], {"a": {"y": "x"}, "b": {"y": "y"}}), 6)
    roster.lost("s", 7)
    assert msgspec.json.encode(outcome.answer) == before


def test_who_looks_leaves_nothing_behind() -> None:
    roster = joined()
    assert roster.apply(Call("z", "z", 1), Look(), 1) == Step(Done({"epoch": 0, "members": {}}))
    assert roster.idle


def test_maps_that_a_refused_member_brought_are_forgotten() -> None:
    roster = joined("a")
    wrong = Join(b"", ["x"], {"b": {"x": "y"}, "a": {"x": "nothing"}})
    assert isinstance(roster.apply(Call("c", "c", 1), wrong, 2).outcome, Refused)
    assert not roster.reverse and roster.epoch == 1


def test_the_weight_of_a_join_is_what_it_brings() -> None:
    assert Join().weight == 0
    assert Join(b"12345", ["xy"], {"b": {"xy": "z"}}).weight == 5 + 2 + 2 * (1 + 2 + 1)


@pytest.mark.parametrize(
    "command",
    [
        Join(b"", ["x"] * 1025),
        Join(b"", ["x" * 257]),
        Join(b"", [], {"b": {str(n): "y" for n in range(1025)}}),
        Watch(-1),
    ],
    ids=["devices", "a long name", "a long map", "an epoch below 0"],
)
def test_there_is_a_limit_on_everything(command: Join | Watch) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(command), type=type(command))


def test_a_large_group_joins_with_full_maps() -> None:
    """Every one of 200 maps to all others: the ways back are there, and the last join looks at its own maps only."""
    roster, size = Roster(), 200
    for stamp in range(size):
        maps = {str(peer): {"x": "x"} for peer in range(size) if peer != stamp}
        assert isinstance(
            roster.apply(Call(str(stamp), f"s{stamp}", 1), Join(b"", ["x"], maps), stamp + 1).outcome, Done
        )
    assert {name: len(back) for name, back in roster.reverse.items()} == {str(n): size - 1 for n in range(size)}
    for stamp in range(size):
        roster.lost(f"s{stamp}", size + stamp + 1)
    assert roster.idle and not roster.reverse and not roster.joins
