"""Replicas: equal effects make equal replicas, even through a snapshot at any point."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rallypoint.core.records import Event
from rallypoint.filestore.replica import (
    AppendEffect,
    ArriveEffect,
    DeleteEffect,
    DeletePrefixEffect,
    Effect,
    EndOwnerEffect,
    PopEffect,
    PushEffect,
    Replica,
    SetEffect,
    SetManyEffect,
    UnleaseEffect,
    WithdrawEffect,
    changes,
    decode,
    encode,
)

KEYS = st.sampled_from([b"", b"a", b"a/x", b"b", b"\xff\x00"])
GATES = st.sampled_from([b"gate", b"a/gate"])
VALUES = st.binary(max_size=8)
OWNERS = st.sampled_from([1, 2, 2**56 - 1])
NUMBERS = st.integers(1, 6)
EFFECTS = st.one_of(
    st.builds(SetEffect, KEYS, VALUES, st.none() | OWNERS),
    st.builds(SetEffect, GATES, st.sampled_from([b"0", b"2", b"-7"])),
    st.builds(SetManyEffect, st.lists(st.tuples(KEYS, VALUES), max_size=3)),
    st.builds(AppendEffect, KEYS, VALUES),
    st.builds(DeleteEffect, KEYS | GATES),
    st.builds(DeletePrefixEffect, st.sampled_from([b"a/", b"", b"none"])),
    st.builds(PushEffect, KEYS, VALUES),
    st.builds(PopEffect, KEYS),
    st.builds(UnleaseEffect, KEYS, OWNERS),
    st.builds(ArriveEffect, GATES, st.integers(-1, 4), OWNERS, NUMBERS),
    st.builds(WithdrawEffect, OWNERS, NUMBERS),
    st.builds(EndOwnerEffect, OWNERS),
)


def replayed(effects: list[Effect], onto: Replica | None = None) -> Replica:
    replica = onto or Replica()
    for effect in effects:
        if (
            not isinstance(effect, ArriveEffect) or (effect.owner, effect.number) not in replica.arrivals
        ):  # tickets are unique
            decode(encode(effect)).apply(replica)
            replica.take()
    return replica


def state(replica: Replica) -> dict[str, Any]:
    arrivals = {ticket: (waiter.keys[0], waiter.need, waiter.arrived) for ticket, waiter in replica.arrivals.items()}
    queues = {key: list(queue) for key, queue in replica._queues.items()}
    return {
        "values": list(replica.values().items()),
        "queues": queues,
        "leases": dict(replica._lease_owner),
        "arrivals": arrivals,
        "owners": set(replica.owners),
        "revision": replica.revision,
        "size": replica.size,
    }


@settings(max_examples=300)
@given(st.lists(EFFECTS), st.lists(EFFECTS, max_size=6))
@example([ArriveEffect(b"gate", 2, 1, 1)], [EndOwnerEffect(1)])
@example([ArriveEffect(b"gate", 2, 1, 1), DeleteEffect(b"gate")], [ArriveEffect(b"gate", 2, 1, 2), EndOwnerEffect(1)])
@example(
    [ArriveEffect(b"gate", 9, 1, 1), DeleteEffect(b"gate"), ArriveEffect(b"gate", 9, 1, 2), SetEffect(b"a", b"")],
    [EndOwnerEffect(1)],
)
def test_a_replica_from_a_snapshot_is_equal_and_stays_equal(before: list[Effect], after: list[Effect]) -> None:
    replica = replayed(before)
    copy = replayed(list(replica.snapshot()))
    assert state(copy) == state(replica)
    assert state(replayed(after, copy)) == state(replayed(after, replica))


@given(st.lists(EFFECTS))
def test_arrivals_and_waiters_of_the_engine_agree(effects: list[Effect]) -> None:
    replica = replayed(effects)
    assert replica.statistics().waiters == len(replica.arrivals)
    assert {ticket[0] for ticket in replica.arrivals} <= set(replica.owners)


@given(st.lists(EFFECTS), st.lists(EFFECTS))
def test_changes_transform_one_content_into_the_other(one: list[Effect], two: list[Effect]) -> None:
    old, new = replayed(one).values(), replayed(two).values()
    events = changes(old, new, 7)
    assert len({event.key for event in events}) == len(events)
    for event in events:
        assert old.get(event.key) != event.value and event.revision == 7
        if event.value is None:
            del old[event.key]
        else:
            old[event.key] = event.value
    assert old == new


def test_an_arrival_ends_by_release_withdrawal_or_the_end_of_its_owner() -> None:
    replica = replayed([ArriveEffect(b"gate", 2, 1, 1), ArriveEffect(b"gate", 3, 1, 2), ArriveEffect(b"gate", 9, 2, 1)])
    assert set(replica.arrivals) == {(2, 1)} and replica.value(b"gate") == b"3"
    replayed([ArriveEffect(b"gate", 9, 1, 3), WithdrawEffect(1, 3)], replica)
    assert set(replica.arrivals) == {(2, 1)} and replica.value(b"gate") == b"3"
    replayed([EndOwnerEffect(2)], replica)
    assert not replica.arrivals and replica.value(b"gate") == b"2" and set(replica.owners) == {1}


def test_take_returns_events_of_watches_and_no_barriers() -> None:
    replica = Replica()
    watch = replica.watch(b"", "me", 1)
    ArriveEffect(b"gate", 2, 1, 1).apply(replica)
    ArriveEffect(b"gate", 2, 1, 2).apply(replica)
    assert replica.take() == [(watch, Event(1, b"gate", b"1")), (watch, Event(2, b"gate", b"2"))]


@pytest.mark.parametrize("record", [b"", b"\x00", b"\x92\x63\xc4\x00", b"\x91\x00", b"not msgpack"])
def test_an_invalid_effect_is_refused(record: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - msgspec's errors are ValueErrors of many kinds
        decode(record)
