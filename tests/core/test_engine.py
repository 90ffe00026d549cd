"""Random operations of several owners on the engine, with invariants checked after each of them.

tests/histories shows each operation step by step. These invariants hold for every sequence: all bytes are counted, no
empty entry is kept, no waiter's condition holds, every item and every arrival counts once.
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
from rallypoint.core.costs import ITEM_BYTES, KEY_BYTES, LEASE_BYTES, QUEUE_BYTES, WAIT_BYTES, WATCH_BYTES
from rallypoint.core.deadlines import Deadlines
from rallypoint.core.engine import Engine
from rallypoint.core.records import Event, PopResult, TimedOut, Turn, Waiter, WaitKind, WatchHandle
from rallypoint.errors import NotAnInteger, StoreFull

OWNERS = st.sampled_from(["ann", "bob", "cyd"])
KEYS = st.sampled_from([b"", b"a", b"b", b"a/x", b"a/y", b"q"])
QUEUES = st.sampled_from([b"a", b"q"])
GATES = st.sampled_from([b"gate/1", b"gate/2"])
VALUES = st.one_of(st.sampled_from([b"", b"0", b"7", b" 12abc", b"-1", b"x"]), st.binary(max_size=40))
LISTS = st.lists(KEYS, max_size=4)
DURATIONS = st.one_of(st.just(ops.MAX_WAIT_S), st.floats(0, 10))


def held_by(engine: Engine, kind: type[Any]) -> list[Any]:
    tables = (engine._held, engine._reading)
    return [held for table in tables for mine in table.values() for held in mine if isinstance(held, kind)]


def count_bytes(engine: Engine) -> tuple[int, int]:
    """Count from scratch what the engine counts incrementally: the bytes of its state, and of waiting reads."""
    costs = {True: 0, False: 0}
    for waiter in held_by(engine, Waiter):
        costs[waiter.reads] += waiter.cost
    size = (
        sum(len(key) + len(value) + KEY_BYTES for key, value in engine._values.items())
        + LEASE_BYTES * len(engine._lease_owner)
        + sum(len(key) + QUEUE_BYTES for key in engine._queues)
        + sum(len(item) + ITEM_BYTES for queue in engine._queues.values() for item in queue)
        + sum(len(watch.prefix) + WATCH_BYTES for watch in held_by(engine, WatchHandle))
        + sum(len(turn.key) + WAIT_BYTES for turn in held_by(engine, Turn))
    )
    return size + costs[False], costs[True]


def value_of(engine: Engine, key: bytes) -> bytes | None:
    value: bytes | None = engine.execute(ops.Peek(0, key))
    return value


class RandomOperations(RuleBasedStateMachine):
    """Random operations on a bare engine. Items are numbered to be traced; gates are keys used only by barriers."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine()
        self.now = 0.0
        self.deadlines = Deadlines()
        self.number = 0
        self.waiters: list[Waiter] = []
        self.watches: list[WatchHandle] = []
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
        self.engine.memory.limit = limit or 1 << 62

    def call(self, operation: Callable[..., Any], *arguments: Any) -> Any:
        """Make a call; if it is refused, it must not have changed anything."""
        before = self.content()
        try:
            result = operation(*arguments)
        except (StoreFull, NotAnInteger):
            assert self.content() == before
            assert not self.engine.take()
            return None
        self.deliver()
        return result

    def do(self, kind: type[ops.Op], *arguments: Any, owner: str | None = None) -> Any:
        """Execute an operation, and record the waiter or turn that it leaves."""
        if owner is not None:
            self.ended.discard(owner)
        self.number += 1
        outcome = self.call(self.engine.execute, kind(self.number, *arguments), owner)
        if isinstance(outcome, Waiter):
            assert (outcome.owner, outcome.number) == (owner, self.number)
            self.waiters.append(outcome)
            if (
                kind in (ops.Wait, ops.MultiGet, ops.Get, ops.BlockingPop, ops.Arrive)
                and arguments[-1] < ops.MAX_WAIT_S
            ):
                self.deadlines.set(outcome, self.now + arguments[-1])
        elif isinstance(outcome, Turn):
            assert (outcome.owner, outcome.number) == (owner, self.number)
            self.turns.append(outcome)
        return outcome

    def content(self) -> object:
        engine = self.engine
        queues = {key: list(queue) for key, queue in engine._queues.items()}
        held = [(owner, list(mine)) for table in (engine._held, engine._reading) for owner, mine in table.items()]
        sizes = engine.size, engine.memory.parked, engine.revision, list(engine.clearing)
        return dict(engine._values), queues, held, dict(engine._lease_owner), sizes

    def deliver(self) -> None:
        for handle, answer in self.engine.take():
            assert handle.owner not in self.ended, f"{handle.owner} has ended, and gets {answer!r}"
            if isinstance(handle, WatchHandle):
                assert isinstance(answer, Event)
                assert handle in self.watches and answer.key.startswith(handle.prefix)
                assert answer.revision <= self.engine.revision
                continue
            self.waiters.remove(handle)  # answered once, while it waits
            self.deadlines.drop(handle)
            if handle.want is WaitKind.ITEM:
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
        self.do(ops.SetLease, key, value, 0.0, owner=owner)

    @rule(key=KEYS, owner=OWNERS)
    def unlease(self, key: bytes, owner: str) -> None:
        was_ours = self.engine._lease_owner.get(key) == owner
        assert self.do(ops.ReleaseLease, key, owner=owner) == was_ours

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
        self.do(ops.CompareSwap, key, expected, desired)

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
        self.clear(lambda: self.call(self.engine.continue_delete))

    @precondition(lambda self: self.engine.read_work)
    @rule()
    def answer_reads(self) -> None:
        self.call(self.engine.continue_reads)

    def clear(self, delete: Callable[[], Any]) -> None:
        """Delete some keys and items, and update the counts."""
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
        if front:  # a returned item may exceed the limit: it must not be lost
            self.call(self.engine.push, key, item, True)
            assert self.engine.revision > revision
            self.given_back += len(key) + QUEUE_BYTES + len(item) + ITEM_BYTES
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
        drawn = self.do(ops.TurnPop, key)
        assert isinstance(drawn, PopResult) and drawn.length == length and (drawn.item is not None) == bool(length)
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
        outcome = self.do(ops.BlockingPop, key, duration, owner=owner)
        if isinstance(outcome, bytes):
            self.taken[outcome] += 1

    @rule(key=QUEUES, owner=OWNERS)
    def wait_turn(self, key: bytes, owner: str) -> None:
        self.do(ops.WaitOrTurn, key, owner=owner)

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

    # Ends of waits

    @rule(passed=st.floats(0, 12))
    def tick(self, passed: float) -> None:
        self.now += passed
        for waiter in self.deadlines.due(self.now):
            assert isinstance(waiter, Waiter)
            missing, arrived = self.engine.missing(waiter), waiter.arrived
            if not self.engine._is_registered(waiter) and not (len(waiter.keys) > 1 and missing):
                assert self.call(self.engine.expire, waiter) is None, "it is over, and its answer follows"
                continue
            assert self.call(self.engine.expire, waiter) == TimedOut(missing) and missing
            self.waiters.remove(waiter)
            self.arrivals[waiter.keys[0]] -= arrived
            assert self.engine.expire(waiter) is None, "it has expired already"
        assert self.deadlines.earliest > self.now

    @precondition(lambda self: self.waiters)
    @rule(data=st.data())
    def drop_waiter(self, data: st.DataObject) -> None:
        waiter = self.waiters.pop(data.draw(st.integers(0, len(self.waiters) - 1)))
        self.arrivals[waiter.keys[0]] -= self.engine._is_registered(waiter) and waiter.arrived
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
                self.arrivals[waiter.keys[0]] -= self.engine._is_registered(waiter) and waiter.arrived
                self.deadlines.drop(waiter)
        self.waiters = [waiter for waiter in self.waiters if waiter.owner != owner]
        self.watches = [watch for watch in self.watches if watch.owner != owner]
        self.turns = [turn for turn in self.turns if turn.owner != owner]
        self.ended.add(owner)
        self.call(self.engine.end, owner)
        while owner in self.engine.clearing:  # unlike a session, this owner may return
            self.go_on()
        while self.engine.read_work:
            self.call(self.engine.continue_reads)
        assert owner not in self.engine._held and owner not in self.engine._reading
        assert owner not in self.engine._leased

    # Invariants

    @property
    def registered(self) -> list[Waiter]:
        """The waiters that are not over."""
        return [waiter for waiter in self.waiters if self.engine._is_registered(waiter)]

    @invariant()
    def all_bytes_are_counted(self) -> None:
        assert (self.engine.size, self.engine.memory.parked) == count_bytes(self.engine)
        accepted = sum(len(turn.key) + WAIT_BYTES for turn in held_by(self.engine, Turn))  # never refused
        accepted += sum(one.cost for one in held_by(self.engine, Waiter) if one.want is WaitKind.CLEARED)
        assert self.engine.size <= self.engine.memory.limit + self.given_back + accepted

    @invariant()
    def no_empty_entry_is_kept(self) -> None:
        engine = self.engine
        tables: list[dict[Any, Any]] = [engine._queues, engine._waiting, engine._barriers, *engine._barriers.values()]
        tables += [engine._turns, engine._watches, engine._leased, engine._held, engine._reading, engine._reads]
        assert all(entry for table in tables for entry in table.values())

    @invariant()
    def indexes_contain_everything_held(self) -> None:
        engine = self.engine
        tables, lines = (engine._held, engine._reading), (engine._waiting, engine._reads)
        held = {thing for table in tables for mine in table.values() for thing in mine}
        assert held == {*self.waiters, *self.watches, *self.turns}
        parked = {(key, waiter) for table in lines for key, waiters in table.items() for waiter in waiters}
        elsewhere = (WaitKind.COUNT, WaitKind.CLEARED)
        assert parked == {(w.key, w) for w in self.registered if w.want not in elsewhere}, "under one missing key"
        gates = {w for gate in engine._barriers.values() for waiters in gate.values() for w in waiters}
        assert gates == {waiter for waiter in self.registered if waiter.want is WaitKind.COUNT}
        over = [waiter for waiter in self.waiters if waiter not in self.registered]
        assert not over or engine.clearing or engine.read_work, "their answers follow"
        clearing = {waiter for waiter in self.waiters if waiter.want is WaitKind.CLEARED}
        assert {one for one in engine.clearing if isinstance(one, Waiter)} == clearing
        assert {turn for turns in engine._turns.values() for turn in turns} == set(self.turns)
        assert {watch for watches in engine._watches.values() for watch in watches} == set(self.watches)
        assert engine._watches._of_length == Counter(map(len, engine._watches))
        assert engine._watches.lengths == sorted(engine._watches._of_length)

    @invariant()
    def leases_and_owners_agree(self) -> None:
        engine = self.engine
        assert engine._lease_owner == {key: owner for owner, keys in engine._leased.items() for key in keys}
        assert set(engine._lease_owner) <= set(engine._values)

    @invariant()
    def key_indexes_contain_all_keys(self) -> None:
        engine = self.engine
        assert engine._index.keys(b"") == sorted(engine._values)
        assert engine._queue_index.keys(b"") == sorted(engine._queues)

    @invariant()
    def no_waiter_has_a_condition_that_holds(self) -> None:
        engine = self.engine
        values, names = set(engine._values), {*engine._values, *engine._queues}
        for waiter in self.registered:
            key = waiter.keys[0]
            spare = len(engine._queues.get(key, ())) > len(engine._turns.get(key, ()))
            if waiter.reads:
                missing = set(waiter.keys) - (names if waiter.want is WaitKind.KEYS else values)
                assert set(engine.missing(waiter)) == missing != set()
                assert waiter.key in missing, "it is registered under a missing key"
            elif waiter.want is WaitKind.COUNT:
                assert int(value_of(engine, key) or 0) < waiter.need
            elif waiter.want is not WaitKind.CLEARED:
                assert not spare
                assert waiter.want is WaitKind.ITEM or key not in values

    @invariant()
    def every_item_is_in_one_place(self) -> None:
        there = Counter(item for queue in self.engine._queues.values() for item in queue) + self.taken
        assert there == Counter(b"item %d" % number for number in range(1, self.pushed + 1))

    @invariant()
    def a_gate_counts_arrivals_that_were_not_withdrawn(self) -> None:
        for key in (b"gate/1", b"gate/2"):
            assert int(value_of(self.engine, key) or 0) == self.arrivals[key]

    @invariant()
    def statistics_count_the_same(self) -> None:
        seen = self.engine.statistics()
        assert (seen.waiters, seen.watches) == (len(self.waiters), len(self.watches))
        assert seen.size == self.engine.size
        assert (seen.keys, seen.queues) == (len(self.engine._values), len(self.engine._queues))
        assert seen.leased_keys == len(self.engine._lease_owner)
        assert seen.revision >= self.revision
        self.revision = seen.revision

    def teardown(self) -> None:
        self.engine.slice_keys = 1 << 62
        for owner in ("ann", "bob", "cyd"):
            self.engine.end(owner)
        while self.engine.clearing or self.engine.read_work:
            self.engine.continue_delete()
            self.engine.continue_reads()
        self.engine.execute(ops.DeletePrefix(0, b""))
        assert self.engine.size == self.engine.memory.parked == 0 and not self.engine.clearing
        assert self.engine.statistics().waiters == self.engine.statistics().watches == 0


TestRandomOperations = RandomOperations.TestCase
TestRandomOperations.settings = settings(max_examples=300, stateful_step_count=50)


def test_a_wait_for_many_keys_is_answered_by_the_last_one() -> None:
    engine = Engine()
    keys = [b"%d" % number for number in range(10_000)]
    waiter = engine.execute(ops.Wait(1, keys, 9.0), "ann")
    for key in keys[:-1]:
        engine.put(key, b"")
        assert not engine.take()
    engine.put(keys[-1], b"")
    assert engine.take() == [(waiter, None)]


class Counted(bytes):
    """A key that counts its lookups."""

    looks = 0

    def __hash__(self) -> int:
        Counted.looks += 1
        return super().__hash__()


@pytest.mark.parametrize("kind", [ops.Wait, ops.MultiGet])
def test_a_wait_for_many_keys_rechecks_only_the_new_key(kind: type[Any]) -> None:
    engine = Engine()
    engine.put_all([(b"%d" % number, b"") for number in range(1000)])
    waiter = engine.execute(kind(1, [b"first", *(Counted(b"%d" % number) for number in range(1000)), b"last"], 9.0))
    Counted.looks = 0
    engine.put(b"first", b"")
    assert Counted.looks == 0 and not engine.take()
    engine.put(b"last", b"")
    assert Counted.looks == (1000 if kind is ops.MultiGet else 0), "only to read the values"
    assert [handle for handle, _ in engine.take()] == [waiter]


@pytest.mark.parametrize("kind", [ops.Wait, ops.MultiGet])
def test_a_wait_for_many_keys_rechecks_all_after_a_deletion(kind: type[Any]) -> None:
    engine = Engine()
    engine.put(b"there", b"")
    engine.execute(kind(1, [b"first", b"there", b"last"], 9.0))
    engine.remove(b"there")
    engine.put(b"first", b"")
    engine.put(b"last", b"")
    assert not engine.take(), "a key that existed was deleted"
    engine.put(b"there", b"")
    assert len(engine.take()) == 1


def test_an_emptied_queue_is_missing_again_for_a_wait() -> None:
    engine = Engine()
    engine.push(b"queue", b"item")
    engine.execute(ops.Wait(1, [b"first", b"queue"], 9.0))
    engine.pop(b"queue")
    engine.put(b"first", b"")
    assert not engine.take()
    engine.push(b"queue", b"item")
    assert len(engine.take()) == 1


def test_take_returns_every_output_once() -> None:
    engine = Engine()
    watch = engine.watch(b"", "ann", 1)
    engine.put(b"k", b"1")
    engine.put(b"k", b"2")
    assert engine.take() == [(watch, Event(1, b"k", b"1")), (watch, Event(2, b"k", b"2"))]
    assert engine.take() == []


@pytest.mark.parametrize("owner", ["", 0, (), frozenset()])
def test_an_owner_may_be_any_falsy_value_except_none(owner: Any) -> None:
    engine = Engine()
    engine.execute(ops.SetLease(1, b"k", b"", 0.0), owner)
    assert engine.statistics().leased_keys == 1
    engine.end(owner)
    assert value_of(engine, b"k") is None


def test_a_wait_returns_the_value_if_it_is_within_the_limit() -> None:
    engine = Engine()
    engine.put(b"/a", b"1234")
    assert engine.execute(ops.WaitOrTurn(1, b"/a", 4), "me") == b"1234"
    assert engine.execute(ops.WaitOrTurn(2, b"/a", 3), "me") is None
    assert engine.execute(ops.WaitOrTurn(3, b"/a"), "me") is None
    for number, limit in ((4, 2), (5, 1), (6, 0)):
        engine.execute(ops.WaitOrTurn(number, b"/b", limit), "me")
    engine.put(b"/b", b"12")
    assert [(handle.number, answer) for handle, answer in engine.take()] == [(4, b"12"), (5, None), (6, None)]
