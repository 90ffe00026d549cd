"""The engine under a storm of random operations by several owners, and what must be true after each of them.

What each operation does, step by step, is told in tests/histories. Here is what no sequence of them may break: every
byte is accounted for, nothing empty is kept, nobody waits for what is true, every item and every arrival counts once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rallypoint.core import ops
from rallypoint.core.deadlines import Deadlines
from rallypoint.core.engine import ENTRY_BYTES, Engine
from rallypoint.core.records import Drawn, Event, TimedOut, Turn, Waiter, Want, Watch
from rallypoint.errors import NotAnInteger, StoreFull

OWNERS = st.sampled_from(["ann", "bob", "cyd"])
KEYS = st.sampled_from([b"", b"a", b"b", b"a/x", b"a/y", b"q"])
QUEUES = st.sampled_from([b"a", b"q"])
GATES = st.sampled_from([b"gate/1", b"gate/2"])
VALUES = st.one_of(st.sampled_from([b"", b"0", b"7", b" 12abc", b"-1", b"x"]), st.binary(max_size=40))
LISTS = st.lists(KEYS, max_size=4)
DURATIONS = st.one_of(st.just(ops.MAX_WAIT_S), st.floats(0, 10))


def held_by(engine: Engine, kind: type[Any]) -> list[Any]:
    return [held for mine in engine._held.values() for held in mine if isinstance(held, kind)]


def count_bytes(engine: Engine) -> tuple[int, int]:
    """Count from scratch what the engine keeps account of as it goes: its state, and the reads that wait."""
    costs = {True: 0, False: 0}
    for waiter in held_by(engine, Waiter):
        costs[waiter.reads] += sum(len(key) + ENTRY_BYTES for key in waiter.keys)
    size = (
        sum(len(key) + len(value) + ENTRY_BYTES for key, value in engine._values.items())
        + sum(len(key) + len(item) + ENTRY_BYTES for key, queue in engine._queues.items() for item in queue)
        + sum(len(watch.prefix) + ENTRY_BYTES for watch in held_by(engine, Watch))
    )
    return size + costs[False], costs[True]


def value_of(engine: Engine, key: bytes) -> bytes | None:
    value: bytes | None = engine.execute(ops.Peek(0, key))
    return value


class Storm(RuleBasedStateMachine):
    """Random operations on a bare engine. Items are numbered, so that each can be followed; gates only arrived at."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine()
        self.now = 0.0
        self.deadlines = Deadlines()
        self.number = 0
        self.waiters: list[Waiter] = []
        self.watches: list[Watch] = []
        self.turns: list[Turn] = []
        self.pushed = 0
        self.given_back = 0
        self.taken: Counter[bytes] = Counter()
        self.arrivals: Counter[bytes] = Counter()
        self.ended: set[str] = set()
        self.revision = 0

    @initialize(limit=st.sampled_from([None, 700, 1500]), slice_keys=st.sampled_from([None, 1, 3]))
    def start(self, limit: int | None, slice_keys: int | None) -> None:
        self.engine = Engine(slice_keys or 1 << 62)
        self.engine.max_bytes = limit or 1 << 62

    def call(self, operation: Callable[..., Any], *arguments: Any) -> Any:
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

    def do(self, kind: type[ops.Op], *arguments: Any, owner: str | None = None) -> Any:
        """Execute an operation, and take note of what it leaves behind."""
        if owner is not None:
            self.ended.discard(owner)
        self.number += 1
        outcome = self.call(self.engine.execute, kind(self.number, *arguments), owner)
        if isinstance(outcome, Waiter):
            assert (outcome.owner, outcome.number) == (owner, self.number)
            self.waiters.append(outcome)
            if kind in (ops.Wait, ops.MultiGet, ops.Get, ops.Take, ops.Arrive) and arguments[-1] < ops.MAX_WAIT_S:
                self.deadlines.set(outcome, self.now + arguments[-1])
        elif isinstance(outcome, Turn):
            assert (outcome.owner, outcome.number) == (owner, self.number)
            self.turns.append(outcome)
        return outcome

    def picture(self) -> object:
        engine = self.engine
        queues = {key: list(queue) for key, queue in engine._queues.items()}
        held = [(owner, list(mine)) for owner, mine in engine._held.items()]
        sizes = engine.size, engine.parked, engine.revision, list(engine.clearing)
        return dict(engine._values), queues, held, dict(engine._lessee), sizes

    def deliver(self) -> None:
        for handle, answer in self.engine.take():
            assert handle.owner not in self.ended, f"{handle.owner} has ended, and is told {answer}"
            if isinstance(handle, Watch):
                assert isinstance(answer, Event)
                assert handle in self.watches and answer.key.startswith(handle.prefix)
                assert answer.revision <= self.engine.revision
                continue
            self.waiters.remove(handle)  # answered once, and only one that waits
            self.deadlines.drop(handle)
            if handle.want is Want.ITEM:
                assert isinstance(answer, bytes)
                self.taken[answer] += 1
            if isinstance(answer, Turn):
                self.turns.append(answer)

    # Writes

    @rule(key=KEYS, value=VALUES)
    def set(self, key: bytes, value: bytes) -> None:
        self.do(ops.Set, key, value)

    @rule(key=KEYS, value=VALUES, owner=OWNERS)
    def lease(self, key: bytes, value: bytes, owner: str) -> None:
        self.do(ops.Lease, key, value, 0.0, owner=owner)

    @rule(key=KEYS, owner=OWNERS)
    def unlease(self, key: bytes, owner: str) -> None:
        was_ours = self.engine._lessee.get(key) == owner
        assert self.do(ops.Unlease, key, owner=owner) == was_ours

    @rule(key=KEYS, amount=st.integers(-10, 10))
    def add(self, key: bytes, amount: int) -> None:
        self.do(ops.Add, key, amount)

    @rule(key=KEYS, value=VALUES)
    def append(self, key: bytes, value: bytes) -> None:
        self.do(ops.Append, key, value)

    @rule(key=KEYS, expected=VALUES, desired=VALUES)
    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> None:
        self.do(ops.CompareSet, key, expected, desired)

    @rule(key=KEYS, expected=st.one_of(st.none(), VALUES), desired=VALUES)
    def swap(self, key: bytes, expected: bytes | None, desired: bytes) -> None:
        self.do(ops.Swap, key, expected, desired)

    @rule(pairs=st.lists(st.tuples(KEYS, VALUES), max_size=5))
    def multi_set(self, pairs: list[tuple[bytes, bytes]]) -> None:
        self.do(ops.MultiSet, pairs)

    @rule(key=st.one_of(KEYS, GATES))
    def delete(self, key: bytes) -> None:
        was_there = key in self.engine.execute(ops.List(0, b""))
        assert self.do(ops.Delete, key) == was_there
        self.arrivals.pop(key, None)

    @rule(prefix=st.sampled_from([b"a", b"a/", b"q", b"gate/"]), owner=OWNERS)
    def delete_prefix(self, prefix: bytes, owner: str) -> None:
        self.clear(lambda: self.do(ops.DeletePrefix, prefix, owner=owner))

    @precondition(lambda self: self.engine.clearing)
    @rule()
    def go_on(self) -> None:
        self.clear(lambda: self.call(self.engine.go_on))

    def clear(self, delete: Callable[[], Any]) -> None:
        """Delete some keys and items, and forget what was known of them."""
        before = Counter(item for queue in self.engine._queues.values() for item in queue)
        delete()
        self.taken += before - Counter(item for queue in self.engine._queues.values() for item in queue)
        self.arrivals = Counter({key: n for key, n in self.arrivals.items() if key in self.engine._values})

    # Queues

    @rule(key=QUEUES, front=st.booleans())
    def push(self, key: bytes, front: bool) -> None:
        self.pushed += 1
        item = b"item %d" % self.pushed
        revision = self.engine.revision
        if front:  # it may go past the limit, for it must not be lost
            self.call(self.engine.push, key, item, True)
            assert self.engine.revision > revision
            self.given_back += len(key) + len(item) + ENTRY_BYTES
        else:
            self.do(ops.Push, key, item)
        if self.engine.revision == revision:  # refused: the store is full
            self.taken[item] += 1

    @rule(key=QUEUES)
    def pop(self, key: bytes) -> None:
        item = self.do(ops.Pop, key)
        if item is not None:
            self.taken[item] += 1

    @rule(key=QUEUES)
    def draw(self, key: bytes) -> None:
        length = self.engine.execute(ops.QueueLen(0, key))
        drawn = self.do(ops.Draw, key)
        assert isinstance(drawn, Drawn) and drawn.length == length and (drawn.item is not None) == bool(length)
        if drawn.item is not None:
            self.taken[drawn.item] += 1

    # Waits

    @rule(keys=LISTS, owner=OWNERS, duration=DURATIONS)
    def wait(self, keys: list[bytes], owner: str, duration: float) -> None:
        self.do(ops.Wait, keys, duration, owner=owner)

    @rule(keys=LISTS, owner=OWNERS, duration=DURATIONS)
    def wait_values(self, keys: list[bytes], owner: str, duration: float) -> None:
        self.do(ops.MultiGet, keys, duration, owner=owner)

    @rule(key=KEYS, owner=OWNERS, duration=DURATIONS)
    def wait_value(self, key: bytes, owner: str, duration: float) -> None:
        self.do(ops.Get, key, duration, owner=owner)

    @rule(key=QUEUES, owner=OWNERS, duration=DURATIONS)
    def wait_item(self, key: bytes, owner: str, duration: float) -> None:
        outcome = self.do(ops.Take, key, duration, owner=owner)
        if isinstance(outcome, bytes):
            self.taken[outcome] += 1

    @rule(key=QUEUES, owner=OWNERS)
    def wait_turn(self, key: bytes, owner: str) -> None:
        self.do(ops.Await, key, owner=owner)

    @rule(key=GATES, size=st.integers(0, 5), owner=OWNERS, duration=DURATIONS)
    def barrier(self, key: bytes, size: int, owner: str, duration: float) -> None:
        revision = self.engine.revision
        outcome = self.do(ops.Arrive, key, size, duration, owner=owner)
        self.arrivals[key] += self.engine.revision > revision and not isinstance(outcome, TimedOut)

    @rule(prefix=st.sampled_from([b"", b"a", b"a/", b"gate"]), owner=OWNERS)
    def watch(self, prefix: bytes, owner: str) -> None:
        self.ended.discard(owner)
        self.number += 1
        watch = self.call(self.engine.watch, prefix, owner, self.number)
        if watch is not None:
            assert (watch.owner, watch.number) == (owner, self.number)
            self.watches.append(watch)

    # What ends waits

    @rule(passed=st.floats(0, 12))
    def tick(self, passed: float) -> None:
        self.now += passed
        for waiter in self.deadlines.due(self.now):
            assert isinstance(waiter, Waiter)
            missing, arrived = self.engine.missing(waiter), waiter.arrived
            assert self.call(self.engine.expire, waiter) == TimedOut(missing) and missing
            self.waiters.remove(waiter)
            self.arrivals[waiter.keys[0]] -= arrived
            assert self.engine.expire(waiter) is None, "it is over"
        assert self.deadlines.earliest > self.now

    @precondition(lambda self: self.waiters)
    @rule(data=st.data())
    def drop_waiter(self, data: st.DataObject) -> None:
        waiter = self.waiters.pop(data.draw(st.integers(0, len(self.waiters) - 1)))
        self.arrivals[waiter.keys[0]] -= waiter.arrived
        self.deadlines.drop(waiter)
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
        aged = [turn for turn in self.turns if turn.aged]
        idle = self.engine.idle_turns()
        assert set(idle) == set(aged) and all(turn.aged for turn in self.turns)
        for turn in idle:
            self.turns.remove(turn)
            self.call(self.engine.drop, turn)

    @rule(owner=OWNERS)
    def end(self, owner: str) -> None:
        for waiter in self.waiters:
            if waiter.owner == owner:
                self.arrivals[waiter.keys[0]] -= waiter.arrived
                self.deadlines.drop(waiter)
        self.waiters = [waiter for waiter in self.waiters if waiter.owner != owner]
        self.watches = [watch for watch in self.watches if watch.owner != owner]
        self.turns = [turn for turn in self.turns if turn.owner != owner]
        self.ended.add(owner)
        self.call(self.engine.end, owner)
        while owner in self.engine.clearing:  # it may come back, as no session does
            self.go_on()
        assert owner not in self.engine._held
        assert owner not in self.engine._leased

    # What must hold after each of them

    @invariant()
    def every_byte_is_accounted_for(self) -> None:
        assert (self.engine.size, self.engine.parked) == count_bytes(self.engine)
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
        elsewhere = (Want.COUNT, Want.CLEARED)
        assert parked == {(w.key, w) for w in self.waiters if w.want not in elsewhere}, "under one missing key"
        gates = {w for gate in engine._gates.values() for waiters in gate.values() for w in waiters}
        assert gates == {waiter for waiter in self.waiters if waiter.want is Want.COUNT}
        clearing = {waiter for waiter in self.waiters if waiter.want is Want.CLEARED}
        assert {one for one in engine.clearing if isinstance(one, Waiter)} == clearing
        assert {turn for turns in engine._turns.values() for turn in turns} == set(self.turns)
        assert {watch for watches in engine._watches.values() for watch in watches} == set(self.watches)
        assert engine._watches._of_length == Counter(map(len, engine._watches))
        assert engine._watches.lengths == sorted(engine._watches._of_length)

    @invariant()
    def leases_are_the_same_from_both_sides(self) -> None:
        engine = self.engine
        assert engine._lessee == {key: owner for owner, keys in engine._leased.items() for key in keys}
        assert set(engine._lessee) <= set(engine._values)

    @invariant()
    def the_indexes_have_what_there_is(self) -> None:
        engine = self.engine
        assert engine._index.keys(b"") == sorted(engine._values)
        assert engine._queue_index.keys(b"") == sorted(engine._queues)

    @invariant()
    def nobody_waits_for_what_is_true(self) -> None:
        engine = self.engine
        values, names = set(engine._values), {*engine._values, *engine._queues}
        for waiter in self.waiters:
            key = waiter.keys[0]
            spare = len(engine._queues.get(key, ())) > len(engine._turns.get(key, ()))
            if waiter.reads:
                missing = set(waiter.keys) - (names if waiter.want is Want.KEYS else values)
                assert set(engine.missing(waiter)) == missing != set()
                assert waiter.key in missing, "it is registered under one that is"
            elif waiter.want is Want.COUNT:
                assert int(value_of(engine, key) or 0) < waiter.need
            elif waiter.want is not Want.CLEARED:
                assert not spare
                assert waiter.want is Want.ITEM or key not in values

    @invariant()
    def every_item_is_in_one_place(self) -> None:
        there = Counter(item for queue in self.engine._queues.values() for item in queue) + self.taken
        assert there == Counter(b"item %d" % number for number in range(1, self.pushed + 1))

    @invariant()
    def a_gate_counts_those_who_came_and_did_not_give_up(self) -> None:
        for key in (b"gate/1", b"gate/2"):
            assert int(value_of(self.engine, key) or 0) == self.arrivals[key]

    @invariant()
    def statistics_count_the_same(self) -> None:
        seen = self.engine.statistics()
        assert (seen.waiters, seen.watches) == (len(self.waiters), len(self.watches))
        assert seen.size == self.engine.size + self.engine.parked
        assert (seen.keys, seen.queues) == (len(self.engine._values), len(self.engine._queues))
        assert seen.leased_keys == len(self.engine._lessee)
        assert seen.revision >= self.revision
        self.revision = seen.revision

    def teardown(self) -> None:
        self.engine.slice_keys = 1 << 62
        for owner in ("ann", "bob", "cyd"):
            self.engine.end(owner)
        while self.engine.clearing:
            self.engine.go_on()
        self.engine.execute(ops.DeletePrefix(0, b""))
        assert self.engine.size == self.engine.parked == 0 and not self.engine.clearing
        assert self.engine.statistics().waiters == self.engine.statistics().watches == 0


TestStorm = Storm.TestCase
TestStorm.settings = settings(max_examples=300, stateful_step_count=50)


def test_a_waiter_of_very_many_keys_is_answered_once_by_the_last() -> None:
    engine = Engine()
    keys = [b"%d" % number for number in range(10_000)]
    waiter = engine.execute(ops.Wait(1, keys, 9.0), "ann")
    for key in keys[:-1]:
        engine.put(key, b"")
        assert not engine.take()
    engine.put(keys[-1], b"")
    assert engine.take() == [(waiter, None)]


class Counted(bytes):
    """A key that counts how often it is looked up."""

    looks = 0

    def __hash__(self) -> int:
        Counted.looks += 1
        return super().__hash__()


@pytest.mark.parametrize("kind", [ops.Wait, ops.MultiGet])
def test_a_key_that_comes_is_all_that_a_wait_of_many_keys_looks_at(kind: type[Any]) -> None:
    engine = Engine()
    engine.put_all([(b"%d" % number, b"") for number in range(1000)])
    waiter = engine.execute(kind(1, [b"first", *(Counted(b"%d" % number) for number in range(1000)), b"last"], 9.0))
    Counted.looks = 0
    engine.put(b"first", b"")
    assert Counted.looks == 0 and not engine.take()
    engine.put(b"last", b"")
    assert Counted.looks == (1000 if kind is ops.MultiGet else 0), "but for the values"
    assert [handle for handle, _ in engine.take()] == [waiter]


@pytest.mark.parametrize("kind", [ops.Wait, ops.MultiGet])
def test_a_wait_of_many_keys_looks_again_where_one_may_have_gone(kind: type[Any]) -> None:
    engine = Engine()
    engine.put(b"there", b"")
    engine.execute(kind(1, [b"first", b"there", b"last"], 9.0))
    engine.remove(b"there")
    engine.put(b"first", b"")
    engine.put(b"last", b"")
    assert not engine.take(), "one that was there has gone"
    engine.put(b"there", b"")
    assert len(engine.take()) == 1


def test_a_queue_that_has_gone_is_waited_for_again() -> None:
    engine = Engine()
    engine.push(b"queue", b"item")
    engine.execute(ops.Wait(1, [b"first", b"queue"], 9.0))
    engine.pop(b"queue")
    engine.put(b"first", b"")
    assert not engine.take()
    engine.push(b"queue", b"item")
    assert len(engine.take()) == 1


def test_take_gives_everything_once() -> None:
    engine = Engine()
    watch = engine.watch(b"", "ann", 1)
    engine.put(b"k", b"1")
    engine.put(b"k", b"2")
    assert engine.take() == [(watch, Event(1, b"k", b"1")), (watch, Event(2, b"k", b"2"))]
    assert engine.take() == []


@pytest.mark.parametrize("owner", ["", 0, (), frozenset()])
def test_an_owner_may_be_false_but_not_none(owner: Any) -> None:
    engine = Engine()
    engine.execute(ops.Lease(1, b"k", b"", 0.0), owner)
    assert engine.statistics().leased_keys == 1
    engine.end(owner)
    assert value_of(engine, b"k") is None


def test_a_wait_with_a_limit_is_answered_by_the_value_if_that_is_no_longer() -> None:
    engine = Engine()
    engine.put(b"/a", b"1234")
    assert engine.execute(ops.Await(1, b"/a", 4), "me") == b"1234"
    assert engine.execute(ops.Await(2, b"/a", 3), "me") is None
    assert engine.execute(ops.Await(3, b"/a"), "me") is None
    for number, limit in ((4, 2), (5, 1), (6, 0)):
        engine.execute(ops.Await(number, b"/b", limit), "me")
    engine.put(b"/b", b"12")
    assert [(handle.number, answer) for handle, answer in engine.take()] == [(4, b"12"), (5, None), (6, None)]
