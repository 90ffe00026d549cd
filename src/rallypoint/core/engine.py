"""The key-value engine: all store semantics, once, as operations on plain data.

`execute(op, owner)` carries out an operation of `core/ops.py` and returns its answer. An operation that must wait
returns a `Waiter`, and its answer comes out of `take()` later, as a pair (waiter, answer), in the order in which things
came true. Watch events come out of the same list as pairs (watch, event), so a host sees one ordered stream of what to
deliver and drains it after every operation. There is no clock: a host that sees a deadline pass calls `expire(waiter)`.
There is no I/O: HashStore is this behind a lock, the server this behind sockets and a log, FileStore this replayed
from a file.

Rules
- Keys and values are bytes. Queues are a namespace of their own; a queue exists while it holds an item. `Check`
  and `Wait` accept a queue where they look for a key; `Get` wants the key itself.
- A wait ends only when what it waits for is true at that moment: a key deleted meanwhile counts as missing again.
- An `owner` is whoever a host says it is (a connection, a session). Keys may be bound to one (a lease); any later
  write without an owner unbinds them. `end(owner)` drops its waits, watches and turns, and deletes its leased keys.
- `size` counts every byte of the state; a write past `max_bytes` is refused before anything changes. Reads that wait
  are no part of the state: a log does not have them, so `parked` counts them apart.
- No operation costs more than what it names or returns: a wait is registered under one missing key, prefixes are
  looked up in an ordered index, watches by the lengths of their prefixes, of which there are not many. `DeletePrefix`
  and the leases of an owner that ends are deleted `slice_keys` at a time: the host calls `go_on()` for the rest.
- What there is to deliver is bounded: a host that sets `relieve` is called when a change of many keys, under many
  watches, has filled the outbox.

A *turn* is for PyTorch's clients, which pop in two steps (wait for the queue, then pop): of many that wait, one is told
per item, and nobody else is told of that item until it has popped, moved on, ended, or sat still for two sweeps.

Rejected: callbacks instead of `take()`. They run inside the operation, where a second write would see half a change.
Rejected: to register a wait under all of its keys. 100,000 keys took 60 ms, and most of them were there already.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from itertools import filterfalse, islice
from typing import Any

from rallypoint.core import ops
from rallypoint.core.call_waiter import CallWaiter, Woken
from rallypoint.core.key_index import KeyIndex
from rallypoint.core.records import (
    Answer,
    Drawn,
    Event,
    InternalError,
    Statistics,
    Swap,
    TimedOut,
    Turn,
    Waiter,
    Want,
    Watch,
    internal_error,
    show,
)
from rallypoint.core.watch_table import WatchTable
from rallypoint.errors import LimitExceeded, NotAnInteger, StoreFull

__all__ = ["ENTRY_BYTES", "EXECUTE", "Engine", "number_in"]

ENTRY_BYTES = 120
"""What a key, a queue item or a waited-for key costs beside its own bytes; near enough for a limit."""

OUTBOX_EVENTS = 4096
"""How many events a change of many keys may leave in the outbox before `relieve` is called."""

FEW = 8
"""Up to how many keys a plain loop over them is faster than `map`."""

MAX_BUGS = 64
"""How many bugs are remembered until the host has logged them."""

_INT64 = 1 << 63
UNLIMITED = _INT64 - 1
_NUMBER = re.compile(rb"[ \t\n\v\f\r]*([+-]?[0-9]+)")

Handle = Waiter | Watch | Turn
"""What an owner can hold."""


class Engine:
    """A linearizable map from keys to bytes, with queues, counters, leases, watches and waits."""

    def __init__(self, slice_keys: int = UNLIMITED) -> None:
        self.max_bytes = UNLIMITED
        self.max_value_bytes = UNLIMITED
        """How far `Append` may grow a value."""

        self.slice_keys = slice_keys
        self.size = 0
        self.parked = 0
        self.revision = 0
        self.outbox: list[tuple[Any, Answer]] = []
        """What is to be delivered: a wait or a watch of this engine, or calls on shared objects, and the answer."""

        self.relieve: Callable[[Engine], None] | None = None
        """Called to empty the outbox in the middle of a large change, where a host has set it."""

        self.clearing: dict[Hashable, None] = {}
        """Deletions under way, the first first, for which `go_on` has to be called: waiters, and owners that ended."""

        self.bugs: deque[str] = deque(maxlen=MAX_BUGS)
        """Errors that should not have happened, for the host to log; no part of the state."""

        self._values: dict[bytes, bytes] = {}
        self._index = KeyIndex()
        self._queues: dict[bytes, deque[bytes]] = {}
        self._queue_index = KeyIndex()
        self._waiting: dict[bytes, dict[Waiter, None]] = {}
        self._gates: dict[bytes, dict[int, dict[Waiter, None]]] = {}
        self._turns: dict[bytes, dict[Turn, None]] = {}
        self._watches = WatchTable()
        self._events = 0  # how many a change of many keys has left in the outbox
        self.removals = 0
        """How often a key or queue was deleted: while it stays the same, what was there is there."""

        self._lessee: dict[bytes, Hashable] = {}
        self._leased: dict[Hashable, dict[bytes, None]] = {}
        self._held: dict[Hashable, dict[Handle, None]] = {}

    def execute(self, op: ops.Op, owner: Hashable = None) -> Any:
        """Carry out an operation; return its answer, or a `Waiter` if that comes later.

        Raises StoreFull, NotAnInteger or LimitExceeded, and has then changed nothing.
        """
        return EXECUTE[op.__class__](self, op, owner)

    def missing(self, waiter: Waiter) -> tuple[bytes, ...]:
        """Return the keys that a wait still misses, each once."""
        if not waiter.reads:
            return tuple(waiter.keys)
        missing = dict.fromkeys(filterfalse(self._values.__contains__, waiter.keys))
        return tuple(missing if waiter.want is Want.VALUES else filterfalse(self._queues.__contains__, missing))

    def exists(self, key: bytes) -> bool:
        """Return whether there is a key or a queue of that name."""
        return key in self._values or key in self._queues

    def holds(self, key: bytes) -> bool:
        """Return whether there is a key of that name."""
        return key in self._values

    # Keys

    def put(self, key: bytes, value: bytes, owner: Hashable = None) -> None:
        """Write a value; with an owner the key is leased, and vanishes when the owner ends."""
        old = self._values.get(key)
        size = self.size + len(value) - len(old) if old is not None else self.size + len(key) + len(value) + ENTRY_BYTES
        if size > self.max_bytes and size > self.size:
            raise StoreFull(key=show(key), size=size, limit=self.max_bytes)
        self.size = size
        if old is None:
            self._index.add(key)
        self._values[key] = value
        if owner is None and not (self._waiting or self._gates or self._watches or self._lessee):
            self.revision += 1  # nobody looks: nothing else can have changed
        else:
            self._changed(key, value, owner)

    def put_all(self, pairs: Sequence[tuple[bytes, bytes]]) -> None:
        """Write all pairs as one change: either every one is written, or the store is full and none is."""
        changes = dict(pairs)
        values = self._values
        self._events = 0
        new = list(filterfalse(values.__contains__, changes))
        grown = sum(map(len, new)) + ENTRY_BYTES * len(new) + sum(map(len, changes.values()))
        if len(new) < len(changes):
            grown -= sum(map(len, map(values.__getitem__, filter(values.__contains__, changes))))
        if changes:
            self._grow(pairs[0][0], grown)
        self._index.add_all(new)
        values.update(changes)
        if self._watches:
            for key, value in changes.items():
                self._changed(key, value, None)
                self._relieve()
            return
        self.revision += len(changes)
        lessee, waiting, gates = self._lessee, self._waiting, self._gates
        for key in changes if lessee or waiting or gates else ():
            if key in lessee:
                self._unbind(key)
            if key in waiting:
                self._wake(key)
            if key in gates:
                self._open(key)

    def remove(self, key: bytes) -> bool:
        """Delete a key, and return whether it was there. Queues are not touched."""
        value = self._values.pop(key, None)
        if value is None:
            return False
        self._index.discard(key)
        self.removals += 1
        self.size -= len(key) + len(value) + ENTRY_BYTES
        self.revision += 1
        if key in self._lessee:
            self._unbind(key)
        if self._watches:
            self._publish(key, None)
        for waiter in [waiter for gate in self._gates.get(key, {}).values() for waiter in gate]:
            waiter.arrived = False  # whoever comes next counts from zero
        return True

    def _set(self, op: ops.Set, owner: Hashable) -> None:
        self.put(op.key, op.value)

    def _lease(self, op: ops.Lease, owner: Hashable) -> None:
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
            if len(text) == len(value) and not (self._waiting or self._gates or self._watches or self._lessee):
                self._values[key] = text  # the common case, and the busiest: what `put` would come to
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
            if len(old) + len(value) > self.max_value_bytes:  # nobody could read it
                size = len(old) + len(value)
                raise LimitExceeded(what="value", key=show(key), size=size, limit=self.max_value_bytes)
            value = old + value
        self.put(key, value)

    def _compare_set(self, op: ops.CompareSet, owner: Hashable) -> bytes:
        current = self._values.get(op.key)
        if current is None:
            if op.expected:
                return op.expected
        elif current != op.expected:
            return current
        self.put(op.key, op.desired)
        return op.desired

    def _swap(self, op: ops.Swap, owner: Hashable) -> Swap:
        current = self._values.get(op.key)
        if current != op.expected:
            return Swap(False, current)
        self.put(op.key, op.desired)
        return Swap(True, op.desired)

    def _delete(self, op: ops.Delete, owner: Hashable) -> bool:
        return self.remove(op.key)

    def _unlease(self, op: ops.Unlease, owner: Hashable) -> bool:
        return self.unlease(op.key, owner)

    def unlease(self, key: bytes, owner: Hashable) -> bool:
        """Delete a key if it is still leased by this owner; return whether it was."""
        return self._lessee.get(key) == owner and self.remove(key)

    def leases(self, owner: Hashable, limit: int) -> list[bytes]:
        """List the first keys that an owner leases."""
        return list(islice(self._leased.get(owner, ()), limit))

    def lessee(self, key: bytes) -> Hashable:
        """Return who leases a key, or None."""
        return self._lessee.get(key)

    def _check(self, op: ops.Check | ops.Wait, owner: Hashable) -> bool:
        return self.has_all(op.keys)

    def has_all(self, keys: Sequence[bytes]) -> bool:
        """Return whether there is a key or a queue of each name."""
        values, queues = self._values, self._queues
        if len(keys) > FEW:
            here = values.__contains__
            return all(map(here, keys)) or all(map(queues.__contains__, filterfalse(here, keys)))
        for key in keys:  # noqa: SIM110 - a generator costs more than the look-up
            if key not in values and key not in queues:
                return False
        return True

    def _count(self, op: ops.Count, owner: Hashable) -> int:
        return self._index.count(op.prefix) if op.prefix else len(self._values)

    def _list(self, op: ops.List, owner: Hashable) -> list[bytes]:
        return self._index.keys(op.prefix)

    def _peek(self, op: ops.Peek, owner: Hashable) -> bytes | None:
        return self._values.get(op.key)

    def _multi_peek(self, op: ops.MultiPeek, owner: Hashable) -> list[bytes | None]:
        return list(map(self._values.get, op.keys))

    def _ping(self, op: ops.Ping, owner: Hashable) -> None:
        return None

    # Queues

    def push(self, key: bytes, value: bytes, front: bool = False) -> None:
        """Put an item at the end of a queue, or back at its front when its taker could not be reached."""
        size = len(key) + len(value) + ENTRY_BYTES
        if front:
            self.size += size  # it was here a moment ago, and must not be lost for want of room
        else:
            self._grow(key, size)
        self.revision += 1
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = deque()
            self._queue_index.add(key)
        if front:
            queue.appendleft(value)
        else:
            queue.append(value)
        if key in self._waiting:
            self._wake(key)

    def pop(self, key: bytes) -> bytes | None:
        """Take the first item of a queue, or return None where it is empty."""
        queue = self._queues.get(key)
        if queue is None:
            return None
        item = queue.popleft()
        self.size -= len(key) + len(item) + ENTRY_BYTES
        self.revision += 1
        if not queue:
            self._remove_queue(key)
        return item

    def _remove_queue(self, key: bytes) -> None:
        del self._queues[key]
        self._queue_index.discard(key)
        self.removals += 1

    def _push(self, op: ops.Push, owner: Hashable) -> None:
        self.push(op.key, op.value)

    def _pop(self, op: ops.Pop, owner: Hashable) -> bytes | None:
        return self.pop(op.key)

    def _queue_len(self, op: ops.QueueLen, owner: Hashable) -> int:
        queue = self._queues.get(op.key)
        return 0 if queue is None else len(queue)

    def _draw(self, op: ops.Draw, owner: Hashable) -> Drawn:
        queue = self._queues.get(op.key)
        return Drawn(0 if queue is None else len(queue), self.pop(op.key))

    # Operations that may wait

    def _get(self, op: ops.Get, owner: Hashable) -> Any:
        value = self._values.get(op.key)
        if value is not None:
            return (value,)
        return self._wait(Waiter(Want.VALUES, (op.key,), owner, op.number), op.timeout_s)

    def _multi_get(self, op: ops.MultiGet, owner: Hashable) -> Any:
        values, keys = self._values, op.keys
        found = list(map(values.get, keys))
        if all(found) or None not in found:
            return found
        return self._wait(Waiter(Want.VALUES, keys, owner, op.number), op.timeout_s)

    def _await_keys(self, op: ops.Wait, owner: Hashable) -> Any:
        if self._check(op, owner):
            return None
        return self._wait(Waiter(Want.KEYS, op.keys, owner, op.number), op.timeout_s)

    def _take(self, op: ops.Take, owner: Hashable) -> Any:
        if self._spare(op.key):
            return self.pop(op.key)
        return self._wait(Waiter(Want.ITEM, (op.key,), owner, op.number), op.timeout_s)

    def _await_turn(self, op: ops.Await, owner: Hashable) -> Waiter | Turn | bytes | None:
        if op.key in self._values:
            return self._short(op.key, op.limit)
        if self._spare(op.key):
            return self._give_turn(op.key, owner, op.number)
        waiter = Waiter(Want.TURN, (op.key,), owner, op.number)
        waiter.need = op.limit
        return self._park(waiter)

    def _short(self, key: bytes, limit: int) -> bytes | None:
        """Return the value of a key, if that was asked for and is no longer than it may be."""
        if not limit:
            return None
        value = self._values[key]
        return value if len(value) <= limit else None

    def _arrive(self, op: ops.Arrive, owner: Hashable) -> Any:
        waiter = self.arrive(op.key, op.size, owner, op.number)
        return None if waiter is None else self._at_once(waiter, op.timeout_s)

    def arrive(self, key: bytes, size: int, owner: Hashable, number: int) -> Waiter | None:
        """Count one arrival on an ordinary key and wait until it has reached `size`; None means that it has.

        An arrival that gives up, by its deadline or by `drop`, is taken back. One that was let through never is.
        """
        here = self._count_of(key)
        if here + 1 < size:  # one that finds no room to wait has not arrived
            room = (len(key) + ENTRY_BYTES) * (1 if key in self._values else 2) + 1
            self._grow(key, room)
            self.size -= room
        if self._add(ops.Add(0, key, 1), None) >= size:
            return None
        waiter = Waiter(Want.COUNT, (key,), owner, number)
        waiter.need, waiter.arrived = size, True
        return self._park(waiter)

    def watch(self, prefix: bytes, owner: Hashable, number: int) -> Watch:
        """Deliver every change of a key that starts with the prefix, from now on, until dropped."""
        self._watches.check_room(prefix)
        self._grow(prefix, len(prefix) + ENTRY_BYTES)
        watch = Watch(prefix, owner, number)
        self._watches.add(watch)
        self._hold(watch)
        return watch

    def _wait(self, waiter: Waiter, timeout_s: float) -> Waiter | TimedOut:
        """Let a wait without effects begin, unless it has no time."""
        return self._park(waiter) if timeout_s > 0 else TimedOut(self.missing(waiter))

    def _at_once(self, waiter: Waiter, timeout_s: float) -> Waiter | TimedOut:
        """Take back a wait that has begun if it has no time."""
        return waiter if timeout_s > 0 else self.expire(waiter) or TimedOut(())

    # Deleting by prefix

    def _delete_prefix(self, op: ops.DeletePrefix, owner: Hashable) -> Any:
        waiter = Waiter(Want.CLEARED, (op.prefix,), owner, op.number)
        if self._clear_slice(waiter):
            return waiter.done
        self.clearing[waiter] = None
        return self._park(waiter)

    def go_on(self) -> None:
        """Delete another slice for the first deletion under way."""
        first = next(iter(self.clearing), None)
        if isinstance(first, Waiter):
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
            self._relieve()
        room -= len(keys)
        for key in self._queue_index.first(prefix, room):
            if room <= 0:
                break
            queue = self._queues[key]
            while queue and room > 0:
                self.size -= len(key) + len(queue.popleft()) + ENTRY_BYTES
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
        """Give one answer to many calls."""
        self.outbox.append((Woken(waiters), answer))

    def charge(self, name: bytes, amount: int) -> None:
        """Count bytes that a shared object keeps, or no longer; refuse to if there is no room for them."""
        self._grow(name, amount)

    # What a host calls beside the operations

    def take(self) -> list[tuple[Any, Answer]]:
        """Return what is to be delivered since the last call, in order."""
        out = self.outbox.copy()
        self.outbox.clear()
        return out

    def expire(self, waiter: Waiter) -> TimedOut | None:
        """End a wait whose time is over; return what it missed, or None if it was over already."""
        mine = self._held.get(waiter.owner)
        if mine is None or waiter not in mine:
            return None
        missing = self.missing(waiter)
        self.drop(waiter)
        return TimedOut(missing)

    def drop(self, held: Handle) -> None:
        """Forget a wait, a watch or a turn; harmless when it is over already."""
        if not self._release(held):
            return
        if isinstance(held, Waiter):
            self._unpark(held)
            if held.arrived and self._count_of(held.keys[0]) > 0:
                self._add(ops.Add(0, held.keys[0], -1), None)
        elif isinstance(held, Watch):
            self.size -= len(held.prefix) + ENTRY_BYTES
            self._watches.discard(held)
        else:
            self._turns[held.key].pop(held)
            if not self._turns[held.key]:
                del self._turns[held.key]
            if held.key in self._waiting:
                self._wake(held.key)

    def idle_turns(self) -> list[Turn]:
        """Return the turns that were already there at the last call, which nobody seems to use."""
        turns = [turn for turns in self._turns.values() for turn in turns]
        idle = [turn for turn in turns if turn.aged]
        for turn in turns:
            turn.aged = True
        return idle

    def end(self, owner: Hashable) -> None:
        """Drop everything an owner holds: its waits, watches and turns unanswered, its leased keys deleted.

        Where the keys are many, the rest of them is deleted by `go_on`; until then they stay leased by the owner.
        """
        for kind in (Watch, Waiter, Turn):  # turns last: they go to whoever waits next, and that is not this owner
            for held in [held for held in self._held.get(owner, ()) if held.__class__ is kind]:
                self.drop(held)
        if not self._end_leases(owner):
            self.clearing[owner] = None

    def _end_leases(self, owner: Hashable) -> bool:
        """Delete some of the keys that an owner leases; return whether none are left."""
        self._events = 0
        for key in self.leases(owner, self.slice_keys):
            self.remove(key)
            self._relieve()
        return owner not in self._leased

    def note_bug(self, error: Exception, doing: str) -> InternalError:
        """Remember an error that should not have happened, for the host; return what to tell the client."""
        answer = internal_error(error, doing)
        self.bugs.append(f"{answer}: {error!r:.500}")
        return answer

    def statistics(self) -> Statistics:
        """Count what is held now."""
        return Statistics(
            keys=len(self._values),
            queues=len(self._queues),
            waiters=sum(map(len, self._held.values())) - self._watches.count - sum(map(len, self._turns.values())),
            watches=self._watches.count,
            leased_keys=len(self._lessee),
            size=self.size + self.parked,
            revision=self.revision,
        )

    # Inside

    def _changed(self, key: bytes, value: bytes, owner: Hashable) -> None:
        """After a key was written: bind or unbind it, and tell those who watch it or wait for it."""
        self.revision += 1
        if owner is not None or key in self._lessee:
            self._unbind(key)
            if owner is not None:
                self._lessee[key] = owner
                self._leased.setdefault(owner, {})[key] = None
        if self._watches:
            self._publish(key, value)
        if key in self._waiting:
            self._wake(key)
        if key in self._gates:
            self._open(key)

    def _grow(self, key: bytes, amount: int) -> None:
        size = self.size + amount
        if size > self.max_bytes and amount > 0:
            raise StoreFull(key=show(key), size=size, limit=self.max_bytes)
        self.size = size

    def _unbind(self, key: bytes) -> None:
        owner = self._lessee.pop(key, None)
        if owner is not None:
            self._leased[owner].pop(key)
            if not self._leased[owner]:
                del self._leased[owner]

    def _publish(self, key: bytes, value: bytes | None) -> None:
        event = Event(self.revision, key, value)
        watches = self._watches.of(key)
        self._events += len(watches)
        self.outbox.extend([(watch, event) for watch in watches])

    def _relieve(self) -> None:
        """In the middle of a large change, have its events delivered where they are many."""
        if self._events > OUTBOX_EVENTS and self.relieve is not None:
            self._events = 0
            last = self.outbox.pop()  # it stays, so that the host, which looks at the outbox after a change, delivers
            self.relieve(self)
            self.outbox.append(last)

    def _hold(self, held: Handle) -> None:
        self._held.setdefault(held.owner, {})[held] = None

    def _release(self, held: Handle) -> bool:
        """Take something off its owner's list; False when it was not there, that is, over already."""
        mine = self._held.get(held.owner)
        if mine is None or held not in mine:
            return False
        del mine[held]
        if not mine:
            del self._held[held.owner]
        return True

    def _park(self, waiter: Waiter) -> Waiter:
        cost = waiter.size + ENTRY_BYTES * len(waiter.keys)
        if waiter.reads:
            if self.size + self.parked + cost > self.max_bytes:
                size = self.size + self.parked + cost
                raise StoreFull(key=show(waiter.keys[0]), size=size, limit=self.max_bytes)
            self.parked += cost
        elif waiter.want is Want.CLEARED:
            self.size += cost  # it has made room before, and it is too late to refuse it
        else:
            self._grow(waiter.keys[0], cost)
        self._register(waiter)
        return waiter

    def _register(self, waiter: Waiter) -> None:
        if waiter.want is Want.COUNT:
            self._gates.setdefault(waiter.keys[0], {}).setdefault(waiter.need, {})[waiter] = None
        elif waiter.want is not Want.CLEARED:
            if len(waiter.keys) > 1:
                missing = self._look(waiter)
                assert missing is not None, "nobody waits for what is there"
                waiter.key = missing
            self._waiting.setdefault(waiter.key, {})[waiter] = None
        self._hold(waiter)

    def _unpark(self, waiter: Waiter) -> None:
        cost = waiter.size + ENTRY_BYTES * len(waiter.keys)
        if waiter.reads:
            self.parked -= cost
        else:
            self.size -= cost
        if waiter.want is Want.COUNT:
            gate = self._gates[waiter.keys[0]]
            gate[waiter.need].pop(waiter)
            if not gate[waiter.need]:
                del gate[waiter.need]
            if not gate:
                del self._gates[waiter.keys[0]]
        elif waiter.want is Want.CLEARED:
            self.clearing.pop(waiter, None)
        else:
            self._unregister(waiter)

    def _unregister(self, waiter: Waiter) -> None:
        waiters = self._waiting[waiter.key]
        del waiters[waiter]
        if not waiters:
            del self._waiting[waiter.key]

    def _answer(self, waiter: Waiter, answer: Answer) -> None:
        self._release(waiter)
        self._unpark(waiter)
        self.outbox.append((waiter, answer))

    def _wake(self, key: bytes) -> None:
        """After a key or queue has changed: answer, in order, those waiters for whom that was the last thing."""
        for waiter in tuple(self._waiting[key]):
            if waiter.want is Want.KEYS or waiter.want is Want.VALUES:
                if waiter.want is Want.VALUES and key not in self._values:
                    continue
                if self._still_missing(waiter):
                    continue
                found = map(self._values.__getitem__, waiter.keys)
                self._answer(waiter, list(found) if waiter.want is Want.VALUES else None)
            elif waiter.want is Want.TURN and key in self._values:
                self._answer(waiter, self._short(key, waiter.need))
            elif self._spare(key):
                if waiter.want is Want.TURN:
                    self._answer(waiter, self._give_turn(key, waiter.owner, waiter.number))
                else:
                    self._answer(waiter, self.pop(key))

    def _still_missing(self, waiter: Waiter) -> bool:
        """After the key that a read waits for has come: register it under another that is missing, if there is one.

        Goes on behind the key that came. At the end of the list it looks at all again, if one may have vanished since.
        """
        key = self._next_missing(waiter)
        if key is None and waiter.removals != self.removals:
            key = self._look(waiter)
        if key is None:
            return False
        self._unregister(waiter)
        waiter.key = key
        self._waiting.setdefault(key, {})[waiter] = None
        return True

    def _look(self, waiter: Waiter) -> bytes | None:
        """Look at all keys that a read waits for, and return the first that is missing.

        The others that are missing are gathered now, so that those that are here are not looked at again.
        """
        contains = self._values.__contains__
        waiter.removals = self.removals
        waiter.rest = filterfalse(contains, list(filterfalse(contains, waiter.keys)))
        return self._next_missing(waiter)

    def _next_missing(self, waiter: Waiter) -> bytes | None:
        queues: Any = () if waiter.want is Want.VALUES else self._queues
        for key in waiter.rest:
            if key not in queues:
                return key
        return None

    def _open(self, key: bytes) -> None:
        """After a barrier's count has changed: let through those for whom it is enough."""
        here = self._count_of(key)
        for need in [need for need in self._gates[key] if need <= here]:
            for waiter in tuple(self._gates[key][need]):
                self._answer(waiter, None)

    def _spare(self, key: bytes) -> bool:
        """Return whether a queue holds more items than turns were given for."""
        return key in self._queues and len(self._queues[key]) > len(self._turns.get(key, ()))

    def _give_turn(self, key: bytes, owner: Hashable, number: int) -> Turn:
        turn = Turn(key, owner, number)
        self._turns.setdefault(key, {})[turn] = None
        self._hold(turn)
        return turn

    def _count_of(self, key: bytes) -> int:
        """Return a barrier's count; what is no number counts as nobody."""
        try:
            return number_in(key, self._values.get(key, b"0"))
        except NotAnInteger:
            return 0


def number_in(key: bytes, value: bytes) -> int:
    """Read a number as C's strtoll does: leading blanks, a sign, and anything after the digits are accepted."""
    match = _NUMBER.match(value)
    number = int(match[1]) if match and len(match[1]) <= 4096 else None
    if number is None or not -_INT64 <= number < _INT64:
        raise NotAnInteger(key=show(key), value=value)
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
    ops.Swap: Engine._swap,
    ops.Delete: Engine._delete,
    ops.DeletePrefix: Engine._delete_prefix,
    ops.Count: Engine._count,
    ops.List: Engine._list,
    ops.Push: Engine._push,
    ops.Pop: Engine._pop,
    ops.Take: Engine._take,
    ops.QueueLen: Engine._queue_len,
    ops.Arrive: Engine._arrive,
    ops.Lease: Engine._lease,
    ops.Unlease: Engine._unlease,
    ops.Await: Engine._await_turn,
    ops.Draw: Engine._draw,
    ops.Peek: Engine._peek,
    ops.MultiPeek: Engine._multi_peek,
    ops.Ping: Engine._ping,
}
"""What carries out each operation; `Engine.execute` for those in a hurry."""
