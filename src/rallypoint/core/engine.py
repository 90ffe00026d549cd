"""The key-value engine: all store semantics, once, as operations on plain data.

`execute(op, owner)` runs an operation of `core/ops.py` and returns its answer. An operation that must wait returns a
`Waiter`; its answer comes out of `take()` later as a pair (waiter, answer), in the order of the events. Watch events
come out of the same list as pairs (watch, event), so a host drains one ordered stream of deliveries after every
operation. There is no clock: when a deadline passes, the host calls `expire(waiter)`. There is no I/O: HashStore is the
engine behind a lock, the server is the engine behind sockets and a log, FileStore is the engine replayed from a file.

Rules
- Keys and values are bytes. Queues are a namespace of their own; a queue exists while it holds an item. `Check` and
  `Wait` accept a queue in place of a key; `Get` requires the key itself.
- A wait ends only when its condition is true at that moment: a key deleted meanwhile counts as missing again.
- The host defines what an `owner` is (a connection, a session). A key may be bound to an owner (a lease); any later
  write without an owner unbinds it. `end(owner)` drops the owner's waits, watches and turns, and deletes its leased
  keys.
- Everything held is charged to a `MemoryBudget`, which all engines of a state share; a write past its limit is refused
  before anything changes. Waiting reads are not part of the state, because the log does not contain them: they are
  counted apart.
- A value that grows by appends is kept in parts (`core/long_value.py`), so an append costs what it adds.
- No operation costs more than what it names or returns: a wait is registered under one missing key, prefixes are looked
  up in an ordered index, watches by prefix length, of which there are few. `DeletePrefix` and the end of an owner
  delete keys `slice_keys` at a time, and a change that ends many waits answers as many; the host calls
  `continue_delete()` for the rest, and `continue_reads()` for waiting reads. A wait that is over stays so: the change
  that ended it decides, not the moment of its answer.
- The outbox is bounded: `on_pressure`, if the host sets it, is called when a change of many watched keys has filled it.

A *turn* is for PyTorch's clients, which pop in two steps (wait for the queue, then pop): each item wakes one of the
waiters, and no other until that one has popped, moved on, ended, or stayed idle for two sweeps.

Rejected: callbacks instead of `take()`. They run inside the operation, where a second write would see half a change.
Rejected: registering a wait under all of its keys. 100,000 keys took 60 ms, and most of them existed already.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from itertools import chain, filterfalse, islice
from typing import Any, cast

from rallypoint.core import ops
from rallypoint.core.calls.call_waiter import CallWaiter, Woken
from rallypoint.core.costs import (
    ITEM_BYTES,
    KEY_BYTES,
    LEASE_BYTES,
    QUEUE_BYTES,
    WAIT_BYTES,
    WAITED_KEY_BYTES,
    WATCH_BYTES,
)
from rallypoint.core.ended_waits import Released, WokenReads, fixed_value, short_value
from rallypoint.core.index.key_index import KeyIndex
from rallypoint.core.index.watch_table import WatchTable
from rallypoint.core.long_value import LongValue
from rallypoint.core.memory_budget import MemoryBudget
from rallypoint.core.records import (
    Answer,
    Event,
    InternalError,
    PopResult,
    Statistics,
    Swap,
    TimedOut,
    Turn,
    Waiter,
    WaitKind,
    WatchHandle,
    internal_error,
    show,
)
from rallypoint.errors import LimitExceeded, NotAnInteger, StoreFull

__all__ = ["EXECUTE", "Engine", "number_in"]

OUTBOX_EVENTS = 4096
"""How many events a change of many keys may leave in the outbox before `on_pressure` is called."""

FEW = 8
"""Up to this many keys, a plain loop is faster than `map`."""

MAX_BUGS = 64
"""How many bugs are remembered until the host logs them."""

NUMBER_BYTES = 64 * 1024
"""A number must end within this many bytes of its value, which may be blanks."""

_INT64 = 1 << 63
UNLIMITED = _INT64 - 1
_NUMBER = re.compile(rb"[ \t\n\v\f\r]*([+-]?[0-9]+)")

Handle = Waiter | WatchHandle | Turn
"""Everything that an owner can hold."""


class Engine:
    """A linearizable map from keys to bytes, with queues, counters, leases, watches and waits."""

    def __init__(
        self, slice_keys: int = UNLIMITED, long_bytes: int = UNLIMITED, memory: MemoryBudget | None = None
    ) -> None:
        self.memory = memory or MemoryBudget()
        """The memory of the whole state, of which this engine is a part."""

        self.slice_keys = slice_keys
        self.long_bytes = long_bytes
        """The size from which on a value that is appended to becomes a `LongValue`."""

        self.size = self.parked = 0
        """The parts of `memory.size` and `memory.parked` that are this engine's."""

        self.revision = 0
        self.outbox: list[tuple[Any, Answer]] = []
        """Pending deliveries: a wait or watch of this engine, or calls on shared objects, each with its answer."""

        self.on_pressure: Callable[[Engine], None] | None = None
        """If set, called in the middle of a large change to drain the outbox."""

        self.clearing: dict[Hashable, None] = {}
        """Large changes in progress, oldest first, that need `continue_delete`: deletions by prefix, owners that have
        ended, and waits that are over and have no answer yet."""

        self.bugs: deque[str] = deque(maxlen=MAX_BUGS)
        """Unexpected errors, for the host to log; not part of the state."""

        self._values: dict[bytes, Any] = {}  # bytes, or a `LongValue`
        self._has_long = False  # whether there may be a `LongValue`
        self._index = KeyIndex()
        self._queues: dict[bytes, deque[bytes]] = {}
        self._queue_index = KeyIndex()
        self._waiting: dict[bytes, dict[Waiter, None]] = {}
        self.item_lines: dict[bytes, None] = {}
        """The keys of `_waiting` with waits for an item, or that had some."""

        self._reads: dict[bytes, dict[Waiter, None]] = {}  # the same for reads, which are not part of the state
        self.read_work: deque[WokenReads | dict[Any, None]] = deque()  # for `continue_reads` to answer, or to drop
        self._barriers: dict[bytes, dict[int, dict[Waiter, None]]] = {}
        self._turns: dict[bytes, dict[Turn, None]] = {}
        self._watches = WatchTable()
        self._events = 0  # left in the outbox by a change of many keys
        self.removals = 0
        """How often a key or queue was deleted: while it is unchanged, nothing has vanished."""

        self._lease_owner: dict[bytes, Hashable] = {}
        self._leased: dict[Hashable, dict[bytes, None]] = {}
        self._held: dict[Hashable, dict[Handle, None]] = {}
        self._reading: dict[Hashable, dict[Handle, None]] = {}  # the reads among what owners hold

    def execute(self, op: ops.Op, owner: Hashable = None) -> Any:
        """Run an operation; return its answer, or a `Waiter` if the answer comes later.

        Raises StoreFull, NotAnInteger or LimitExceeded, and has then changed nothing.
        """
        return EXECUTE[op.__class__](self, op, owner)

    def missing(self, waiter: Waiter) -> tuple[bytes, ...]:
        """Return the keys that a wait still lacks, each once."""
        if not waiter.reads:
            return tuple(waiter.keys)
        missing = dict.fromkeys(filterfalse(self._values.__contains__, waiter.keys))
        return tuple(missing if waiter.want is WaitKind.VALUES else filterfalse(self._queues.__contains__, missing))

    def exists(self, key: bytes) -> bool:
        """Return whether there is a key or a queue of that name."""
        return key in self._values or key in self._queues

    def holds(self, key: bytes) -> bool:
        """Return whether there is a key of that name."""
        return key in self._values

    def part_of(self, key: bytes, index: int) -> bytes | None:
        """Return a part of the value of a key; a value that is not kept in parts has one. None if there is none."""
        value = self._values.get(key)
        if isinstance(value, LongValue):
            return value.part(index)
        return None if index else value

    # Keys

    def put(self, key: bytes, value: bytes, owner: Hashable = None) -> None:
        """Write a value; with an owner, the key is leased and vanishes when the owner ends."""
        old = self._values.get(key)
        grown = len(value) - len(old) if old is not None else len(key) + len(value) + KEY_BYTES
        if owner is not None and key not in self._lease_owner:
            self._check_room(key, grown + LEASE_BYTES)  # `_changed` charges for the lease
        if grown:
            memory = self.memory  # as in `_grow`
            size = memory.size + grown
            if size > memory.limit and grown > 0:
                raise StoreFull(key=show(key), size=size, limit=memory.limit)
            memory.size = size
            self.size += grown
        if old is None:
            self._index.add(key)
        self._values[key] = value
        if owner is None and not (self._reads or self._waiting or self._barriers or self._watches or self._lease_owner):
            self.revision += 1  # no waiters, watches or leases: nothing else to do
        else:
            self._changed(key, value, owner)

    def put_all(self, pairs: Sequence[tuple[bytes, bytes]]) -> None:
        """Write all pairs as one change: either all are written, or the store is full and none is."""
        changes = dict(pairs)
        values = self._values
        self._events = 0
        new = list(filterfalse(values.__contains__, changes))
        grown = sum(map(len, new)) + KEY_BYTES * len(new) + sum(map(len, changes.values()))
        if len(new) < len(changes):
            grown -= sum(map(len, map(values.__getitem__, filter(values.__contains__, changes))))
        if changes:
            self._grow(pairs[0][0], grown)
        self._index.add_all(new)
        values.update(changes)
        if self._watches:
            for key, value in changes.items():
                self._changed(key, value, None)
                self._under_pressure()
            return
        self.revision += len(changes)
        lessee, reads, waiting, gates = self._lease_owner, self._reads, self._waiting, self._barriers
        for key in changes if lessee or reads or waiting or gates else ():
            if key in lessee:
                self._unbind(key)
            if key in reads:
                self._wake_reads(key)
            if key in waiting:
                self._wake(key)
            if key in gates:
                self._open(key)

    def remove(self, key: bytes) -> bool:
        """Delete a key, and return whether it existed. Queues are not affected."""
        value = self._values.pop(key, None)
        if value is None:
            return False
        self._index.discard(key)
        self.removals += 1
        self._charge(-(len(key) + len(value) + KEY_BYTES))
        self.revision += 1
        if key in self._lease_owner:
            self._unbind(key)
        if self._watches:
            self._publish(key, None)
        for waiter in [waiter for gate in self._barriers.get(key, {}).values() for waiter in gate]:
            waiter.arrived = False  # the next arrival counts from zero
        return True

    def _set(self, op: ops.Set, owner: Hashable) -> None:
        self.put(op.key, op.value)

    def _lease(self, op: ops.SetLease, owner: Hashable) -> None:
        self.put(op.key, op.value, owner)

    def _multi_set(self, op: ops.MultiSet, owner: Hashable) -> None:
        self.put_all(op.pairs)

    def _add(self, op: ops.Add, owner: Hashable) -> int:
        """Add to a decimal counter (a missing key counts as 0) and return its new value, wrapped to 64 bits."""
        key = op.key
        value = self._values.get(key)
        if value is None:
            total = op.amount
        elif len(value) < 19 and value.isdigit():
            total = int(value) + op.amount
            text = b"%d" % total
            if len(text) == len(value) and not (
                self._reads or self._waiting or self._barriers or self._watches or self._lease_owner
            ):
                self._values[key] = text  # the hot path: the same effect as `put`
                self.revision += 1
                return total
        else:
            total = number_in(key, value) + op.amount
        return self._count_up(key, total)

    def _count_up(self, key: bytes, total: int) -> int:
        if not -_INT64 <= total < _INT64:
            total = (total + _INT64) % (2 * _INT64) - _INT64
        self.put(key, b"%d" % total)
        return total

    def _append(self, op: ops.Append, owner: Hashable) -> None:
        key, value = op.key, op.value
        old = self._values.get(key)
        if old is not None:
            size, limit = len(old) + len(value), self.memory.answer_limit
            if size > limit:  # it could not be read
                raise LimitExceeded(what="value", key=show(key), size=size, limit=limit)
            if len(old) >= self.long_bytes:
                self._append_long(key, old, value)
                return
            value = old + value
        self.put(key, value)

    def _append_long(self, key: bytes, old: bytes | LongValue, value: bytes) -> None:
        self._grow(key, len(value))
        grown = old if isinstance(old, LongValue) else LongValue(old)
        grown.append(value)
        self.hold_long(key, grown)
        self._changed(key, grown, None)

    def hold_long(self, key: bytes, value: LongValue) -> None:
        """Store a long value under a key that exists."""
        self._values[key] = value
        self._has_long = True

    def _compare_set(self, op: ops.CompareSet, owner: Hashable) -> bytes:
        current = self._values.get(op.key)
        if current is None:
            if op.expected:
                return op.expected
        elif current != op.expected:
            return cast(bytes, fixed_value(current))
        self.put(op.key, op.desired)
        return op.desired

    def _swap(self, op: ops.CompareSwap, owner: Hashable) -> Swap:
        current = self._values.get(op.key)
        if current != op.expected:
            return Swap(False, fixed_value(current))
        self.put(op.key, op.desired)
        return Swap(True, op.desired)

    def _delete(self, op: ops.Delete, owner: Hashable) -> bool:
        return self.remove(op.key)

    def _unlease(self, op: ops.ReleaseLease, owner: Hashable) -> bool:
        return self.unlease(op.key, owner)

    def unlease(self, key: bytes, owner: Hashable) -> bool:
        """Delete a key if this owner still leases it; return whether it did."""
        return self._lease_owner.get(key) == owner and self.remove(key)

    def leases(self, owner: Hashable, limit: int) -> list[bytes]:
        """Return the first `limit` keys that an owner leases."""
        return list(islice(self._leased.get(owner, ()), limit))

    def lease_owner(self, key: bytes) -> Hashable:
        """Return the owner of a key's lease, or None."""
        return self._lease_owner.get(key)

    def first_keys(self, prefix: bytes, limit: int) -> list[bytes]:
        """Return the first `limit` keys that start with a prefix."""
        return self._index.first(prefix, limit)

    def _check(self, op: ops.Check | ops.Wait, owner: Hashable) -> bool:
        return self.has_all(op.keys)

    def has_all(self, keys: Sequence[bytes]) -> bool:
        """Return whether there is a key or a queue of each name."""
        values, queues = self._values, self._queues
        if len(keys) > FEW:
            here = values.__contains__
            return all(map(here, keys)) or all(map(queues.__contains__, filterfalse(here, keys)))
        for key in keys:  # noqa: SIM110 - a generator costs more than the lookup
            if key not in values and key not in queues:
                return False
        return True

    def _count(self, op: ops.Count, owner: Hashable) -> int:
        return self._index.count(op.prefix) if op.prefix else len(self._values)

    def _list(self, op: ops.List, owner: Hashable) -> list[bytes]:
        return self._index.keys(op.prefix)

    def _peek(self, op: ops.Peek, owner: Hashable) -> bytes | None:
        value = self._values.get(op.key)
        return value if value.__class__ is bytes else fixed_value(value)

    def _multi_peek(self, op: ops.MultiPeek, owner: Hashable) -> list[bytes | None]:
        return self._all_fixed(list(map(self._values.get, op.keys)))

    def _all_fixed(self, values: list[Any]) -> list[Any]:
        return list(map(fixed_value, values)) if self._has_long else values

    def _ping(self, op: ops.Ping, owner: Hashable) -> None:
        return None

    # Queues

    def push(self, key: bytes, value: bytes, front: bool = False) -> None:
        """Append an item to a queue, or return it to the front if its taker could not be reached."""
        queue = self._queues.get(key)
        size = len(value) + ITEM_BYTES + (len(key) + QUEUE_BYTES if queue is None else 0)
        if front:
            self._charge(size)  # it was here a moment ago, and must not be lost for lack of room
        else:
            self._grow(key, size)
        self.revision += 1
        if queue is None:
            queue = self._queues[key] = deque()
            self._queue_index.add(key)
        if front:
            queue.appendleft(value)
        else:
            queue.append(value)
        if key in self._reads and key not in self._values:
            self._wake_reads(key)
        if key in self._waiting:
            self._wake(key)

    def pop(self, key: bytes) -> bytes | None:
        """Take the first item of a queue, or return None if it is empty."""
        queue = self._queues.get(key)
        if queue is None:
            return None
        item = queue.popleft()
        self._charge(-(len(item) + ITEM_BYTES))
        self.revision += 1
        if not queue:
            self._remove_queue(key)
        return item

    def _remove_queue(self, key: bytes) -> None:
        del self._queues[key]
        self._charge(-(len(key) + QUEUE_BYTES))
        self._queue_index.discard(key)
        self.removals += 1

    def _push(self, op: ops.Push, owner: Hashable) -> None:
        self.push(op.key, op.value)

    def _pop(self, op: ops.Pop, owner: Hashable) -> bytes | None:
        return self.pop(op.key)

    def _queue_len(self, op: ops.QueueLen, owner: Hashable) -> int:
        queue = self._queues.get(op.key)
        return 0 if queue is None else len(queue)

    def _turn_pop(self, op: ops.TurnPop, owner: Hashable) -> PopResult:
        queue = self._queues.get(op.key)
        return PopResult(0 if queue is None else len(queue), self.pop(op.key))

    # Operations that may wait

    def _get(self, op: ops.Get, owner: Hashable) -> Any:
        value = self._values.get(op.key)
        if value.__class__ is bytes:
            return (value,)
        if value is not None:
            return (fixed_value(value),)
        return self._wait(Waiter(WaitKind.VALUES, (op.key,), owner, op.number), op.timeout_s)

    def _multi_get(self, op: ops.MultiGet, owner: Hashable) -> Any:
        values, keys = self._values, op.keys
        found = list(map(values.get, keys))
        if all(found) or None not in found:
            return self._all_fixed(found)
        return self._wait(Waiter(WaitKind.VALUES, keys, owner, op.number), op.timeout_s)

    def _await_keys(self, op: ops.Wait, owner: Hashable) -> Any:
        if self._check(op, owner):
            return None
        return self._wait(Waiter(WaitKind.KEYS, op.keys, owner, op.number), op.timeout_s)

    def _blocking_pop(self, op: ops.BlockingPop, owner: Hashable) -> Any:
        if self._has_spare_item(op.key):
            return self.pop(op.key)
        return self._wait(Waiter(WaitKind.ITEM, (op.key,), owner, op.number), op.timeout_s)

    def _await_turn(self, op: ops.WaitOrTurn, owner: Hashable) -> Waiter | Turn | bytes | None:
        if op.key in self._values:
            return short_value(self._values[op.key], op.limit)
        if self._has_spare_item(op.key):
            return self._give_turn(op.key, owner, op.number)
        waiter = Waiter(WaitKind.TURN, (op.key,), owner, op.number)
        waiter.need = op.limit
        return self._park(waiter)

    def _arrive(self, op: ops.Arrive, owner: Hashable) -> Any:
        waiter = self.arrive(op.key, op.size, owner, op.number)
        return None if waiter is None else self._at_once(waiter, op.timeout_s)

    def arrive(self, key: bytes, size: int, owner: Hashable, number: int) -> Waiter | None:
        """Count one arrival on an ordinary key and wait until the count reaches `size`; None means that it has.

        An arrival that gives up, by its deadline or by `drop`, is taken back. One that was let through never is.
        """
        here = self._count_of(key)
        if here + 1 < size:  # without room to wait, it has not arrived
            room = len(key) + WAIT_BYTES + WAITED_KEY_BYTES + 1
            self._check_room(key, room if key in self._values else room + len(key) + KEY_BYTES)
        if self._add(ops.Add(0, key, 1), None) >= size:
            return None
        waiter = Waiter(WaitKind.COUNT, (key,), owner, number)
        waiter.need, waiter.arrived = size, True
        return self._park(waiter)

    def watch(self, prefix: bytes, owner: Hashable, number: int) -> WatchHandle:
        """Deliver every change of a key that starts with the prefix, from now on, until dropped."""
        self._watches.check_room(prefix)
        self._grow(prefix, len(prefix) + WATCH_BYTES)
        watch = WatchHandle(prefix, owner, number)
        self._watches.add(watch)
        self._hold(watch)
        return watch

    def _wait(self, waiter: Waiter, timeout_s: float) -> Waiter | TimedOut:
        """Start a wait without side effects, unless its timeout is 0."""
        return self._park(waiter) if timeout_s > 0 else TimedOut(self.missing(waiter))

    def _at_once(self, waiter: Waiter, timeout_s: float) -> Waiter | TimedOut:
        """Take back a started wait if its timeout is 0."""
        return waiter if timeout_s > 0 else self.expire(waiter) or TimedOut(())

    # Deleting by prefix

    def _delete_prefix(self, op: ops.DeletePrefix, owner: Hashable) -> Any:
        waiter = Waiter(WaitKind.CLEARED, (op.prefix,), owner, op.number)
        if self._clear_slice(waiter):
            return waiter.done
        self.clearing[waiter] = None
        return self._park(waiter)

    def continue_delete(self) -> None:
        """Do another slice of the oldest large change in progress."""
        first = next(iter(self.clearing), None)
        if isinstance(first, Released):
            if self._answer_slice(first):
                del self.clearing[first]
        elif isinstance(first, Waiter):
            if self._clear_slice(first):
                del self.clearing[first]
                self._answer(first, first.done)
        elif self.clearing and self._end_leases(first):
            del self.clearing[first]

    def _clear_slice(self, waiter: Waiter) -> bool:
        """Delete some keys and queues of a prefix; return whether none are left."""
        prefix, room = waiter.keys[0], self.slice_keys
        self._events = 0
        keys = self._index.first(prefix, room)
        for key in keys:
            self.remove(key)
            self._under_pressure()
        room -= len(keys)
        for key in self._queue_index.first(prefix, room):
            if room <= 0:
                break
            queue = self._queues[key]
            while queue and room > 0:
                self._charge(-(len(queue.popleft()) + ITEM_BYTES))
                room -= 1
            if not queue:
                self._remove_queue(key)
                self.revision += 1
                waiter.done += 1
        waiter.done += len(keys)
        return room > 0

    # For the shared objects of `core/objects.py`

    def answer_call(self, waiter: CallWaiter, answer: Answer) -> None:
        """Answer a call on a shared object."""
        self.outbox.append((waiter, answer))

    def answer_calls(self, waiters: list[CallWaiter], answer: Answer) -> None:
        """Give one answer to many calls on a shared object."""
        self.outbox.append((Woken(waiters), answer))

    def charge(self, name: bytes, amount: int) -> None:
        """Add or subtract bytes that a shared object keeps; raise StoreFull if there is no room."""
        self._grow(name, amount)

    def charge_held(self, amount: int) -> None:
        """Add or subtract bytes that are held already, so that refusing them is too late."""
        self._charge(amount)

    # Called by the host besides the operations

    def take(self) -> list[tuple[Any, Answer]]:
        """Return the deliveries since the last call, in order."""
        out = self.outbox.copy()
        self.outbox.clear()
        return out

    def expire(self, waiter: Waiter) -> TimedOut | None:
        """End a wait that timed out; return what it lacked, or None if it was over already."""
        mine = (self._reading if waiter.reads else self._held).get(waiter.owner)
        if mine is None or waiter not in mine:
            return None
        missing = self.missing(waiter)
        if not self._is_registered(waiter) and not (len(waiter.keys) > 1 and missing):
            return None  # it is over, and its answer follows
        self.drop(waiter)
        return TimedOut(missing)

    def drop(self, held: Handle) -> None:
        """Drop a wait, a watch or a turn; do nothing if it is over already."""
        if not self._release(held):
            return
        if isinstance(held, Waiter):
            let_through = not self._is_registered(held)
            self._unpark(held)
            if held.arrived and not let_through and self._count_of(held.keys[0]) > 0:
                self._add(ops.Add(0, held.keys[0], -1), None)
        elif isinstance(held, WatchHandle):
            self._charge(-(len(held.prefix) + WATCH_BYTES))
            self._watches.discard(held)
        else:
            self._charge(-(len(held.key) + WAIT_BYTES))
            self._turns[held.key].pop(held)
            if not self._turns[held.key]:
                del self._turns[held.key]
            if held.key in self._waiting:
                self._wake(held.key)

    def drop_all(self) -> None:
        """Drop the waits, watches and turns of all owners, without an answer."""
        for mine in list(self._held.values()):
            for held in list(mine):
                self.drop(held)

    def idle_turns(self) -> list[Turn]:
        """Return the turns that already existed at the last call, and so seem unused."""
        turns = [turn for turns in self._turns.values() for turn in turns]
        idle = [turn for turn in turns if turn.aged]
        for turn in turns:
            turn.aged = True
        return idle

    def end(self, owner: Hashable) -> None:
        """Drop everything an owner holds: its waits, watches and turns without an answer; its leased keys are deleted.

        If there are many keys, `continue_delete` deletes the rest; until then the owner keeps its lease on them. Many
        reads are dropped by `continue_reads`.
        """
        self.drop_reads(owner)
        for kind in (WatchHandle, Waiter, Turn):  # turns last: the next waiter gets them, and must not be this owner
            for held in [held for held in self._held.get(owner, ()) if held.__class__ is kind]:
                self.drop(held)
        if not self._end_leases(owner):
            self.clearing[owner] = None

    def lasting_waits(self, owner: Hashable) -> list[Waiter]:
        """Return the waits of an owner that are part of the state: all but its reads, of which there may be many."""
        return [held for held in self._held.get(owner, ()) if isinstance(held, Waiter)]

    def drop_reads(self, owner: Hashable) -> None:
        """Drop the waiting reads of an owner that has ended; `continue_reads` drops the rest if there are many."""
        reads = self._reading.pop(owner, None)
        if reads is not None and not self._read_slice(reads):
            self.read_work.append(reads)

    def continue_reads(self) -> None:
        """Answer or drop another slice of reads. They are not part of the state, so no log entry is needed."""
        if self.read_work and self._read_slice(self.read_work[0]):
            self.read_work.popleft()

    def _read_slice(self, work: WokenReads | dict[Any, None]) -> bool:
        """Answer or drop some reads, the last first; return whether none are left."""
        waiters = work.waiters if isinstance(work, WokenReads) else work
        for _ in range(min(self.slice_keys, len(waiters))):
            waiter, _ = waiters.popitem()
            if isinstance(work, WokenReads):
                self._wake_read(waiter, work)
            else:
                self._unpark(waiter)
        return not waiters

    def _end_leases(self, owner: Hashable) -> bool:
        """Delete some of the keys that an owner leases; return whether none are left."""
        self._events = 0
        for key in self.leases(owner, self.slice_keys):
            self.remove(key)
            self._under_pressure()
        return owner not in self._leased

    def note_bug(self, error: Exception, doing: str) -> InternalError:
        """Record an unexpected error for the host; return the answer for the client."""
        answer = internal_error(error, doing)
        self.bugs.append(f"{answer}: {error!r:.500}")
        return answer

    def statistics(self) -> Statistics:
        """Count what the engine holds now."""
        return Statistics(
            keys=len(self._values),
            queues=len(self._queues),
            waiters=sum(map(len, chain(self._held.values(), self._reading.values())))
            - self._watches.count
            - sum(map(len, self._turns.values())),
            watches=self._watches.count,
            leased_keys=len(self._lease_owner),
            size=self.size,
            revision=self.revision,
        )

    # Inside

    def _changed(self, key: bytes, value: bytes | LongValue, owner: Hashable) -> None:
        """After a write: bind or unbind the key, and notify its watches and waiters."""
        self.revision += 1
        if owner is not None or key in self._lease_owner:
            self._unbind(key)
            if owner is not None:
                self._charge(LEASE_BYTES)
                self._lease_owner[key] = owner
                self._leased.setdefault(owner, {})[key] = None
        if self._watches:
            self._publish(key, value)
        if key in self._reads:
            self._wake_reads(key)
        if key in self._waiting:
            self._wake(key)
        if key in self._barriers:
            self._open(key)

    def _grow(self, key: bytes, amount: int) -> None:
        self._check_room(key, amount)
        self._charge(amount)

    def _check_room(self, key: bytes, amount: int) -> None:
        memory = self.memory
        size = memory.size + amount
        if size > memory.limit and amount > 0:
            raise StoreFull(key=show(key), size=size, limit=memory.limit)

    def _charge(self, amount: int) -> None:
        self.size += amount
        self.memory.size += amount

    def _unbind(self, key: bytes) -> None:
        owner = self._lease_owner.pop(key, None)
        if owner is not None:
            self._charge(-LEASE_BYTES)
            self._leased[owner].pop(key)
            if not self._leased[owner]:
                del self._leased[owner]

    def _publish(self, key: bytes, value: bytes | LongValue | None) -> None:
        event = Event(self.revision, key, fixed_value(value))
        watches = self._watches.of(key)
        self._events += len(watches)
        self.outbox.extend([(watch, event) for watch in watches])

    def _under_pressure(self) -> None:
        """In the middle of a large change, have many pending events delivered."""
        if self._events > OUTBOX_EVENTS and self.on_pressure is not None:
            self._events = 0
            last = self.outbox.pop()  # it stays: the host delivers only if the outbox is not empty
            self.on_pressure(self)
            self.outbox.append(last)

    def _hold(self, held: Handle) -> None:
        table = self._reading if isinstance(held, Waiter) and held.reads else self._held
        table.setdefault(held.owner, {})[held] = None

    def _release(self, held: Handle) -> bool:
        """Remove a handle from its owner's list; return False if it is not there, that is, over already."""
        table = self._reading if isinstance(held, Waiter) and held.reads else self._held
        mine = table.get(held.owner)
        if mine is None or held not in mine:
            return False
        del mine[held]
        if not mine:
            del table[held.owner]
        return True

    def _park(self, waiter: Waiter) -> Waiter:
        cost, memory = waiter.cost, self.memory
        if waiter.reads:
            size = memory.kept + memory.parked + cost
            if size > memory.reserve:
                raise StoreFull(key=show(waiter.keys[0]), size=size, limit=memory.reserve)
            memory.parked += cost
            self.parked += cost
        elif waiter.want is WaitKind.CLEARED:
            self._charge(cost)  # it has freed memory, and refusing it now is too late
        else:
            self._grow(waiter.keys[0], cost)
        self._register(waiter)
        return waiter

    def _register(self, waiter: Waiter) -> None:
        if waiter.want is WaitKind.COUNT:
            self._barriers.setdefault(waiter.keys[0], {}).setdefault(waiter.need, {})[waiter] = None
        elif waiter.want is not WaitKind.CLEARED:
            if len(waiter.keys) > 1:
                missing = self._look(waiter)
                assert missing is not None, "a wait for keys that all exist"
                waiter.key = missing
            self._line_of(waiter).setdefault(waiter.key, {})[waiter] = None
            if waiter.want is WaitKind.ITEM:
                self.item_lines[waiter.key] = None
        self._hold(waiter)

    def _line_of(self, waiter: Waiter) -> dict[bytes, dict[Waiter, None]]:
        """Return the table in which a waiter for keys or items is registered."""
        return self._reads if waiter.reads else self._waiting

    def _is_registered(self, waiter: Waiter) -> bool:
        """Return whether a waiter still waits; if not, it is over, and its answer follows."""
        if waiter.want is WaitKind.COUNT:
            return waiter in self._barriers.get(waiter.keys[0], {}).get(waiter.need, ())
        return waiter.want is WaitKind.CLEARED or waiter in self._line_of(waiter).get(waiter.key, ())

    def _unpark(self, waiter: Waiter) -> None:
        if waiter.reads:
            self.memory.parked -= waiter.cost
            self.parked -= waiter.cost
        else:
            self._charge(-waiter.cost)
        if waiter.want is WaitKind.CLEARED:
            self.clearing.pop(waiter, None)
        elif self._is_registered(waiter):
            self._unregister(waiter)

    def _unregister(self, waiter: Waiter) -> None:
        table: dict[Any, dict[Waiter, None]] = self._line_of(waiter)
        key: bytes | int = waiter.key
        if waiter.want is WaitKind.COUNT:
            table, key = self._barriers[waiter.keys[0]], waiter.need
        line = table[key]
        del line[waiter]
        if line:
            return
        del table[key]
        if waiter.want is WaitKind.COUNT:
            if not table:
                del self._barriers[waiter.keys[0]]
        elif not waiter.reads:
            self.item_lines.pop(waiter.key, None)

    def _answer(self, waiter: Waiter, answer: Answer) -> None:
        if self._release(waiter):
            self._unpark(waiter)
            self.outbox.append((waiter, answer))

    def _wake_reads(self, key: bytes) -> None:
        """After a key or queue was created: answer, in order, the reads whose condition is now true.

        Those of one key are over now, whatever happens before their answers; `continue_reads` answers the rest if there
        are many.
        """
        line = self._reads[key]
        if key in self._values:
            found = list(line) if len(line) <= self.slice_keys else None
        else:  # a queue, which is not a value
            keys = WaitKind.KEYS
            found = [waiter for waiter in line if waiter.want is keys]
        woken = WokenReads(key, fixed_value(self._values.get(key)), line if found is None else dict.fromkeys(found))
        if found is not None and len(found) <= self.slice_keys:
            for waiter in found:
                self._wake_read(waiter, woken)
            return
        if found is None:
            del self._reads[key]
        else:
            for waiter in found:
                self._unregister(waiter)
        idle = not self.read_work
        self.read_work.append(woken)
        if idle:
            self.continue_reads()

    def _wake_read(self, waiter: Waiter, woken: WokenReads) -> None:
        if waiter not in self._reading.get(waiter.owner, ()):
            return  # it was dropped meanwhile, or is about to be
        values = waiter.want is WaitKind.VALUES
        if len(waiter.keys) == 1:
            self._answer(waiter, [woken.value] if values and woken.value is not None else None)
        elif not self._still_missing(waiter):
            found = self._all_fixed(list(map(self._values.__getitem__, waiter.keys))) if values else None
            self._answer(waiter, found)

    def _wake(self, key: bytes) -> None:
        """After a key or queue changed: answer, in order, the waiters for it and for its items."""
        line = self._waiting[key]
        value = self._values.get(key)
        if value is not None:
            turns = line
            if key in self.item_lines:
                turns = {waiter: None for waiter in line if waiter.want is WaitKind.TURN}
            if len(turns) <= self.slice_keys:
                for waiter in tuple(turns):
                    self._answer(waiter, short_value(value, waiter.need))
            else:
                if turns is line:
                    del self._waiting[key]
                    line = {}
                else:
                    for waiter in turns:
                        self._unregister(waiter)
                self._release_all(Released(turns, value))
        spare = len(self._queues.get(key, ())) - len(self._turns.get(key, ()))
        for waiter in list(islice(line, spare)) if spare > 0 else ():
            if waiter.want is WaitKind.TURN:
                self._answer(waiter, self._give_turn(key, waiter.owner, waiter.number))
            else:
                self._answer(waiter, self.pop(key))

    def _release_all(self, released: Released) -> None:
        """Answer the first of many waits that are over; `continue_delete` answers the rest."""
        if not self._answer_slice(released):
            self.clearing[released] = None

    def _answer_slice(self, released: Released) -> bool:
        """Answer some waits that are over; return whether none are left."""
        waiters, room = released.waiters, self.slice_keys
        while waiters:
            waiter, _ = waiters.popitem()
            if waiter not in self._held.get(waiter.owner, ()):
                continue  # it was dropped meanwhile
            if not room:
                waiters[waiter] = None
                return False
            self._answer(waiter, short_value(released.value, waiter.need) if waiter.want is WaitKind.TURN else None)
            room -= 1
        return True

    def _still_missing(self, waiter: Waiter) -> bool:
        """After the key that a read waits for has come: register the read under its next missing key, if any.

        The search continues behind the key that came. At the end of the list it restarts if any key may have vanished
        since.
        """
        key = self._next_missing(waiter)
        if key is None and waiter.removals != self.removals:
            key = self._look(waiter)
        if key is None:
            return False
        if self._is_registered(waiter):
            self._unregister(waiter)
        waiter.key = key
        self._reads.setdefault(key, {})[waiter] = None
        return True

    def _look(self, waiter: Waiter) -> bytes | None:
        """Check all keys that a read waits for, and return the first missing one.

        The other missing keys are collected now, so that existing ones are not checked again.
        """
        contains = self._values.__contains__
        waiter.removals = self.removals
        waiter.rest = filterfalse(contains, list(filterfalse(contains, waiter.keys)))
        return self._next_missing(waiter)

    def _next_missing(self, waiter: Waiter) -> bytes | None:
        queues: Any = () if waiter.want is WaitKind.VALUES else self._queues
        for key in waiter.rest:
            if key not in queues:
                return key
        return None

    def _open(self, key: bytes) -> None:
        """After a barrier's count changed: let through the waiters for whom it suffices."""
        here = self._count_of(key)
        gates = self._barriers[key]
        for need in [need for need in gates if need <= here]:
            if len(gates[need]) <= self.slice_keys:
                for waiter in tuple(gates[need]):
                    self._answer(waiter, None)
            else:  # all of them are through now, whatever happens to the count before their answers
                through = gates.pop(need)
                if not gates:
                    del self._barriers[key]
                self._release_all(Released(through))

    def _has_spare_item(self, key: bytes) -> bool:
        """Return whether a queue holds more items than turns were given for."""
        return key in self._queues and len(self._queues[key]) > len(self._turns.get(key, ()))

    def _give_turn(self, key: bytes, owner: Hashable, number: int) -> Turn:
        turn = Turn(key, owner, number)
        self._charge(len(key) + WAIT_BYTES)  # its item is here, so refusing it is too late
        self._turns.setdefault(key, {})[turn] = None
        self._hold(turn)
        return turn

    def _count_of(self, key: bytes) -> int:
        """Return a barrier's count; a value that is not a number counts as 0."""
        try:
            return number_in(key, self._values.get(key, b"0"))
        except NotAnInteger:
            return 0


def number_in(key: bytes, value: bytes | LongValue) -> int:
    """Read a number as C's strtoll does: leading blanks, a sign, and anything after the digits are accepted."""
    text = value.head(NUMBER_BYTES) if isinstance(value, LongValue) else value[:NUMBER_BYTES]
    match = _NUMBER.match(text)
    whole = match is not None and (match.end() < NUMBER_BYTES or len(value) <= NUMBER_BYTES)
    number = int(match[1]) if match and whole and len(match[1]) <= 4096 else None
    if number is None or not -_INT64 <= number < _INT64:
        raise NotAnInteger(key=show(key), value=text)
    return number


EXECUTE: dict[type[ops.Op], Callable[[Engine, Any, Hashable], Any]] = {
    ops.Set: Engine._set,
    ops.Get: Engine._get,
    ops.Add: Engine._add,
    ops.Check: Engine._check,
    ops.Wait: Engine._await_keys,
    ops.MultiGet: Engine._multi_get,
    ops.MultiSet: Engine._multi_set,
    ops.Append: Engine._append,
    ops.CompareSet: Engine._compare_set,
    ops.CompareSwap: Engine._swap,
    ops.Delete: Engine._delete,
    ops.DeletePrefix: Engine._delete_prefix,
    ops.Count: Engine._count,
    ops.List: Engine._list,
    ops.Push: Engine._push,
    ops.Pop: Engine._pop,
    ops.BlockingPop: Engine._blocking_pop,
    ops.QueueLen: Engine._queue_len,
    ops.Arrive: Engine._arrive,
    ops.SetLease: Engine._lease,
    ops.ReleaseLease: Engine._unlease,
    ops.WaitOrTurn: Engine._await_turn,
    ops.TurnPop: Engine._turn_pop,
    ops.Peek: Engine._peek,
    ops.MultiPeek: Engine._multi_peek,
    ops.Ping: Engine._ping,
}
"""The method of each operation; a faster `Engine.execute` for hot paths."""
