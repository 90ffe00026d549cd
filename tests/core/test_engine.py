"""The engine under a storm of random operations by several owners, and what must be true after each of them.

What each operation does, step by step, is told in tests/histories. Here is what no sequence of them may break: every
byte is accounted for, nothing empty is kept, nobody waits for what is true, every item and every arrival counts once.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rallypoint.core.engine import ENTRY_BYTES, Engine
from rallypoint.core.records import Event, TimedOut, Turn, Waiter, Want, Watch
from rallypoint.errors import NotAnInteger, StoreFull

OWNERS = st.sampled_from(["ann", "bob", "cyd"])
KEYS = st.sampled_from([b"", b"a", b"b", b"a/x", b"a/y", b"q"])
QUEUES = st.sampled_from([b"a", b"q"])
GATES = st.sampled_from([b"gate/1", b"gate/2"])
VALUES = st.one_of(st.sampled_from([b"", b"0", b"7", b" 12abc", b"-1", b"x"]), st.binary(max_size=40))
LISTS = st.lists(KEYS, max_size=4)
DURATIONS = st.one_of(st.none(), st.floats(0, 10))


def count_bytes(engine: Engine) -> int:
    """Count from scratch what the engine keeps account of as it goes."""
    waiters = [held for mine in engine._held.values() for held in mine if isinstance(held, Waiter)]
    watches = [held for mine in engine._held.values() for held in mine if isinstance(held, Watch)]
    return (
        sum(len(key) + len(value) + ENTRY_BYTES for key, value in engine._values.items())
        + sum(len(key) + len(item) + ENTRY_BYTES for key, queue in engine._queues.items() for item in queue)
        + sum(len(key) + ENTRY_BYTES for waiter in waiters for key in waiter.keys)
        + sum(len(watch.prefix) + ENTRY_BYTES for watch in watches)
    )


class Storm(RuleBasedStateMachine):
    """Random calls on a bare engine. Items are numbered, so that each can be followed; gates are only arrived at."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine()
        self.now = 0.0
        self.waiters: list[Waiter] = []
        self.watches: list[Watch] = []
        self.turns: list[Turn] = []
        self.pushed = 0
        self.given_back = 0
        self.taken: Counter[bytes] = Counter()
        self.arrivals: Counter[bytes] = Counter()
        self.ended: set[str] = set()
        self.revision = 0

    @initialize(limit=st.sampled_from([None, 700, 1500]))
    def start(self, limit: int | None) -> None:
        if limit is not None:
            self.engine = Engine(limit)

    def call(self, operation: Any, *arguments: Any) -> Any:
        """Make a call that may be refused; when it is, it must have changed nothing."""
        before = self.picture()
        try:
            result = operation(*arguments)
        except (StoreFull, NotAnInteger):
            assert self.picture() == before
            assert not self.engine.take()
            return None
        self.deliver()
        return result

    def picture(self) -> object:
        engine = self.engine
        queues = {key: list(queue) for key, queue in engine._queues.items()}
        held = [(owner, list(mine)) for owner, mine in engine._held.items()]
        return dict(engine._values), queues, held, dict(engine._lessee), engine.size, engine.revision

    def deliver(self) -> None:
        for handle, answer in self.engine.take():
            assert handle.owner not in self.ended, f"{handle.owner} has ended, and is told {answer}"
            if isinstance(handle, Watch):
                assert isinstance(answer, Event)
                assert handle in self.watches and answer.key.startswith(handle.prefix)
                assert answer.revision <= self.engine.revision
                continue
            self.waiters.remove(handle)  # answered once, and only one that waits
            if handle.want is Want.ITEM and not isinstance(answer, TimedOut):
                self.taken[answer] += 1
            if handle.want is Want.COUNT and isinstance(answer, TimedOut):
                self.arrivals[handle.keys[0]] -= handle.arrived
            if isinstance(answer, Turn):
                self.turns.append(answer)

    def park(self, outcome: Any) -> None:
        if isinstance(outcome, Waiter):
            self.waiters.append(outcome)
        elif isinstance(outcome, Turn):
            self.turns.append(outcome)

    # Writes

    @rule(key=KEYS, value=VALUES)
    def set(self, key: bytes, value: bytes) -> None:
        self.call(self.engine.set, key, value)

    @rule(key=KEYS, value=VALUES, owner=OWNERS)
    def lease(self, key: bytes, value: bytes, owner: str) -> None:
        self.call(self.engine.set, key, value, owner)

    @rule(key=KEYS, owner=OWNERS)
    def unlease(self, key: bytes, owner: str) -> None:
        was_ours = self.engine._lessee.get(key) == owner
        assert self.call(self.engine.unlease, key, owner) == was_ours

    @rule(key=KEYS, amount=st.integers(-10, 10))
    def add(self, key: bytes, amount: int) -> None:
        self.call(self.engine.add, key, amount)

    @rule(key=KEYS, value=VALUES)
    def append(self, key: bytes, value: bytes) -> None:
        self.call(self.engine.append, key, value)

    @rule(key=KEYS, expected=VALUES, desired=VALUES)
    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> None:
        self.call(self.engine.compare_set, key, expected, desired)

    @rule(key=KEYS, expected=st.one_of(st.none(), VALUES), desired=VALUES)
    def swap(self, key: bytes, expected: bytes | None, desired: bytes) -> None:
        self.call(self.engine.swap, key, expected, desired)

    @rule(pairs=st.lists(st.tuples(KEYS, VALUES), max_size=5))
    def multi_set(self, pairs: list[tuple[bytes, bytes]]) -> None:
        self.call(self.engine.multi_set, pairs)

    @rule(key=st.one_of(KEYS, GATES))
    def delete(self, key: bytes) -> None:
        was_there = key in self.engine.list_keys()
        assert self.call(self.engine.delete, key) == was_there
        self.arrivals.pop(key, None)

    @rule(prefix=st.sampled_from([b"a", b"a/", b"q", b"gate/"]))
    def delete_prefix(self, prefix: bytes) -> None:
        for key in [key for key in self.engine._queues if key.startswith(prefix)]:
            self.taken.update(self.engine._queues[key])
        for key in [key for key in self.arrivals if key.startswith(prefix)]:
            del self.arrivals[key]
        self.call(self.engine.delete_prefix, prefix)

    # Queues

    @rule(key=QUEUES, front=st.booleans())
    def push(self, key: bytes, front: bool) -> None:
        self.pushed += 1
        revision = self.engine.revision
        self.call(self.engine.queue_push, key, b"item %d" % self.pushed, front)
        if front:  # it may go past the limit, for it must not be lost
            assert self.engine.revision > revision
            self.given_back += len(key) + len(b"item %d" % self.pushed) + ENTRY_BYTES
        if self.engine.revision == revision:  # refused: the store is full
            self.taken[b"item %d" % self.pushed] += 1

    @rule(key=QUEUES)
    def pop(self, key: bytes) -> None:
        item = self.call(self.engine.queue_pop, key)
        if item is not None:
            self.taken[item] += 1

    # Waits

    @rule(keys=LISTS, owner=OWNERS, duration=DURATIONS)
    def wait(self, keys: list[bytes], owner: str, duration: float | None) -> None:
        self.ended.discard(owner)
        self.park(self.call(self.engine.wait, keys, owner, self.until(duration)))

    @rule(keys=LISTS, owner=OWNERS, duration=DURATIONS)
    def wait_values(self, keys: list[bytes], owner: str, duration: float | None) -> None:
        self.ended.discard(owner)
        self.park(self.call(self.engine.wait_values, keys, owner, self.until(duration)))

    @rule(key=QUEUES, owner=OWNERS, duration=DURATIONS)
    def wait_item(self, key: bytes, owner: str, duration: float | None) -> None:
        self.ended.discard(owner)
        outcome = self.call(self.engine.wait_item, key, owner, self.until(duration))
        if isinstance(outcome, bytes):
            self.taken[outcome] += 1
        self.park(outcome)

    @rule(key=QUEUES, owner=OWNERS)
    def wait_turn(self, key: bytes, owner: str) -> None:
        self.ended.discard(owner)
        self.park(self.call(self.engine.wait_turn, key, owner))

    @rule(key=GATES, size=st.integers(0, 5), owner=OWNERS, duration=DURATIONS)
    def barrier(self, key: bytes, size: int, owner: str, duration: float | None) -> None:
        self.ended.discard(owner)
        revision = self.engine.revision
        self.park(self.call(self.engine.barrier, key, size, owner, self.until(duration)))
        self.arrivals[key] += self.engine.revision > revision

    @rule(prefix=st.sampled_from([b"", b"a", b"a/", b"gate"]), owner=OWNERS)
    def watch(self, prefix: bytes, owner: str) -> None:
        self.ended.discard(owner)
        watch = self.call(self.engine.watch, prefix, owner)
        if watch is not None:
            self.watches.append(watch)

    def until(self, duration: float | None) -> float | None:
        return None if duration is None else self.now + duration

    # What ends waits

    @rule(passed=st.floats(0, 12))
    def tick(self, passed: float) -> None:
        self.now += passed
        following = self.engine.tick(self.now)
        self.deliver()
        left = [waiter.deadline for waiter in self.waiters if waiter.deadline is not None]
        assert following == min(left, default=None)
        assert following is None or following > self.now

    @precondition(lambda self: self.waiters)
    @rule(data=st.data())
    def drop_waiter(self, data: st.DataObject) -> None:
        waiter = self.waiters.pop(data.draw(st.integers(0, len(self.waiters) - 1)))
        self.arrivals[waiter.keys[0]] -= waiter.arrived
        self.call(self.engine.drop, waiter)
        self.call(self.engine.drop, waiter)  # harmless

    @precondition(lambda self: self.watches)
    @rule(data=st.data())
    def drop_watch(self, data: st.DataObject) -> None:
        watch = self.watches.pop(data.draw(st.integers(0, len(self.watches) - 1)))
        self.call(self.engine.drop, watch)

    @precondition(lambda self: self.turns)
    @rule(data=st.data(), pops=st.booleans())
    def use_turn(self, data: st.DataObject, pops: bool) -> None:
        turn = self.turns.pop(data.draw(st.integers(0, len(self.turns) - 1)))
        if pops:
            self.pop(turn.key)
        self.call(self.engine.drop, turn)

    @rule()
    def sweep(self) -> None:
        aged = {turn for turn in self.turns if turn.aged}
        self.turns = [turn for turn in self.turns if turn not in aged]
        left = self.call(self.engine.sweep_turns)
        assert left == bool(self.engine._turns)

    @rule(owner=OWNERS)
    def end(self, owner: str) -> None:
        for waiter in self.waiters:
            if waiter.owner == owner:
                self.arrivals[waiter.keys[0]] -= waiter.arrived
        self.waiters = [waiter for waiter in self.waiters if waiter.owner != owner]
        self.watches = [watch for watch in self.watches if watch.owner != owner]
        self.turns = [turn for turn in self.turns if turn.owner != owner]
        self.ended.add(owner)
        self.call(self.engine.end, owner)
        assert owner not in self.engine._held
        assert owner not in self.engine._leased

    # What must hold after each of them

    @invariant()
    def every_byte_is_accounted_for(self) -> None:
        assert self.engine.size == count_bytes(self.engine)
        assert self.engine.size <= self.engine.max_bytes + self.given_back

    @invariant()
    def nothing_empty_is_kept(self) -> None:
        engine = self.engine
        shelves: list[dict[Any, Any]] = [engine._queues, engine._waiting, engine._gates, *engine._gates.values()]
        shelves += [engine._turns, engine._watches, engine._leased, engine._held]
        assert all(entry for shelf in shelves for entry in shelf.values())

    @invariant()
    def everything_held_is_where_it_is_looked_for(self) -> None:
        engine = self.engine
        held = {thing for mine in engine._held.values() for thing in mine}
        assert held == {*self.waiters, *self.watches, *self.turns}
        parked = {(key, waiter) for key, waiters in engine._waiting.items() for waiter in waiters}
        assert parked == {
            (key, waiter) for waiter in self.waiters if waiter.want is not Want.COUNT for key in waiter.keys
        }
        gates = {w for gate in engine._gates.values() for waiters in gate.values() for w in waiters}
        assert gates == {waiter for waiter in self.waiters if waiter.want is Want.COUNT}
        assert {turn for turns in engine._turns.values() for turn in turns} == set(self.turns)
        assert {watch for watches in engine._watches.values() for watch in watches} == set(self.watches)

    @invariant()
    def leases_are_the_same_from_both_sides(self) -> None:
        engine = self.engine
        assert engine._lessee == {key: owner for owner, keys in engine._leased.items() for key in keys}
        assert set(engine._lessee) <= set(engine._values)

    @invariant()
    def deadlines_are_kept_for_those_who_wait(self) -> None:
        timed = {waiter for waiter in self.waiters if waiter.deadline is not None}
        assert self.engine._timed == len(timed)
        assert {entry[2] for entry in self.engine._deadlines if entry[2].deadline is not None} == timed

    @invariant()
    def nobody_waits_for_what_is_true(self) -> None:
        engine = self.engine
        values, names = set(engine._values), {*engine._values, *engine._queues}
        for waiter in self.waiters:
            key = waiter.keys[0]
            spare = engine.queue_len(key) > len(engine._turns.get(key, ()))
            if waiter.want is Want.KEYS:
                assert set(waiter.missing) == set(waiter.keys) - names != set()
            elif waiter.want is Want.VALUES:
                assert set(waiter.missing) == set(waiter.keys) - values != set()
            elif waiter.want is Want.COUNT:
                assert int(engine.get(key) or 0) < waiter.need
            else:
                assert not spare
                assert waiter.want is Want.ITEM or key not in values

    @invariant()
    def every_item_is_in_one_place(self) -> None:
        there = Counter(item for queue in self.engine._queues.values() for item in queue) + self.taken
        assert there == Counter(b"item %d" % number for number in range(1, self.pushed + 1))

    @invariant()
    def a_gate_counts_those_who_came_and_did_not_give_up(self) -> None:
        for key in (b"gate/1", b"gate/2"):
            assert int(self.engine.get(key) or 0) == self.arrivals[key]

    @invariant()
    def statistics_count_the_same(self) -> None:
        seen = self.engine.statistics()
        assert (seen.waiters, seen.watches, seen.size) == (len(self.waiters), len(self.watches), self.engine.size)
        assert (seen.keys, seen.queues) == (len(self.engine._values), len(self.engine._queues))
        assert seen.leased_keys == len(self.engine._lessee)
        assert seen.revision >= self.revision
        self.revision = seen.revision

    def teardown(self) -> None:
        for owner in ("ann", "bob", "cyd"):
            self.engine.end(owner)
        self.engine.delete_prefix(b"")
        assert self.engine.size == 0
        assert self.engine.statistics().waiters == self.engine.statistics().watches == 0


TestStorm = Storm.TestCase
TestStorm.settings = settings(max_examples=300, stateful_step_count=50)


def test_waits_that_are_over_do_not_pile_up_behind_their_deadlines() -> None:
    engine = Engine()
    for _ in range(10_000):
        waiter = engine.wait([b"never"], "ann", 1e9)
        assert isinstance(waiter, Waiter)
        engine.drop(waiter)
    assert len(engine._deadlines) < 100
    assert engine.tick(0.0) is None


def test_deadlines_survive_the_clearing_of_those_that_are_over() -> None:
    engine = Engine()
    kept = [engine.wait([b"never"], "ann", float(at), at) for at in range(200, 100, -1)]
    for _ in range(1_000):
        engine.wait([b"never"], "bob", 150.5)
        engine.end("bob")
    assert engine.tick(150.0) == 151.0
    assert [handle.tag for handle, _ in engine.take()] == list(range(101, 151))
    assert engine.statistics().waiters == len(kept) - 50


def test_a_waiter_of_very_many_keys_is_answered_once_by_the_last() -> None:
    engine = Engine()
    keys = [b"%d" % number for number in range(10_000)]
    waiter = engine.wait(keys, "ann")
    for key in keys[:-1]:
        engine.set(key, b"")
        assert not engine.take()
    engine.set(keys[-1], b"")
    assert engine.take() == [(waiter, None)]


def test_take_gives_everything_once() -> None:
    engine = Engine()
    watch = engine.watch(b"", "ann")
    engine.set(b"k", b"1")
    engine.set(b"k", b"2")
    assert engine.take() == [(watch, Event(1, b"k", b"1")), (watch, Event(2, b"k", b"2"))]
    assert engine.take() == []


@pytest.mark.parametrize("owner", ["", 0, (), frozenset()])
def test_an_owner_may_be_false_but_not_none(owner: Any) -> None:
    engine = Engine()
    engine.set(b"k", b"", owner)
    assert engine.statistics().leased_keys == 1
    engine.end(owner)
    assert engine.get(b"k") is None
