"""The key-value engine: all store semantics, once, as plain calls on plain data.

Its methods are the operations. A call that can answer returns the answer. A call that must wait returns a `Waiter`,
and its answer comes out of `take()` later, as a pair (waiter, answer), in the order in which things came true.
Watch events come out of the same list as pairs (watch, event), so a host sees one ordered stream of what to
deliver and drains it after every call or batch of calls. There is no clock: `tick(now)` ends the waits whose
deadline has passed. There is no I/O: HashStore is this behind a lock, the server this behind sockets, FileStore this
replayed from a log.

Rules
- Keys and values are bytes. Queues are a namespace of their own; a queue exists while it holds an item. `check`
  and `wait` accept a queue where they look for a key; `get` wants the key itself.
- A wait ends only when what it waits for is true at that moment: a key deleted meanwhile counts as missing again.
- Waiters on one key are served in the order they came.
- An `owner` is whoever a host says it is (a connection, a session). Keys may be bound to one (a lease); any later
  write without an owner unbinds them. `end(owner)` drops its waits, watches and turns, and deletes its leased keys.
- `size` counts every byte held, waiting requests included; a write past `max_bytes` is refused before anything changes.

A *turn* is for PyTorch's clients, which pop in two steps (wait for the queue, then pop): of many that wait, one is told
per item, and nobody else is told of that item until it has popped, moved on, ended, or sat still for two sweeps.

Rejected: callbacks instead of `take()`. They run inside the operation, where a second write would see half a change.
"""

from __future__ import annotations

import heapq
import re
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from itertools import count

from rallypoint.core.records import Answer, Event, Statistics, Swap, TimedOut, Turn, Waiter, Want, Watch, show
from rallypoint.errors import NotAnInteger, StoreFull

__all__ = ["Engine", "number_in"]

ENTRY_BYTES = 120
"""What a key, a queue item or a waited-for key costs beside its own bytes; near enough for a limit."""

_INT64 = 1 << 63
_UNLIMITED = _INT64
_NEVER = float("inf")
_NUMBER = re.compile(rb"[ \t\n\v\f\r]*([+-]?[0-9]+)")


class Engine:
    """A linearizable map from keys to bytes, with queues, counters, leases, watches and waits."""

    def __init__(self, max_bytes: int = _UNLIMITED) -> None:
        self.max_bytes = max_bytes
        self.size = 0
        self.revision = 0
        self.earliest = _NEVER
        """When the first wait ends by its deadline: `tick` has to be called then."""

        self._values: dict[bytes, bytes] = {}
        self._queues: dict[bytes, deque[bytes]] = {}
        self._waiting: dict[bytes, dict[Waiter, None]] = {}
        self._gates: dict[bytes, dict[int, dict[Waiter, None]]] = {}
        self._turns: dict[bytes, dict[Turn, None]] = {}
        self._watches: dict[bytes, dict[Watch, None]] = {}
        self._lessee: dict[bytes, Hashable] = {}
        self._leased: dict[Hashable, dict[bytes, None]] = {}
        self._held: dict[Hashable, dict[Waiter | Watch | Turn, None]] = {}
        self._deadlines: list[tuple[float, int, Waiter]] = []
        self._timed = 0
        self._arrivals = count()
        self.outbox: list[tuple[Waiter | Watch, Answer]] = []

    # Keys

    def set(self, key: bytes, value: bytes, owner: Hashable = None) -> None:
        """Write a value; with an owner the key is leased and vanishes when the owner ends."""
        self._put(key, value, owner)

    def multi_set(self, pairs: Sequence[tuple[bytes, bytes]]) -> None:
        """Write all pairs as one change: either every one is written, or the store is full and none is."""
        changes = dict(pairs)
        grown = 0
        for key, value in changes.items():
            old = self._values.get(key)
            grown += len(value) - len(old) if old is not None else len(key) + len(value) + ENTRY_BYTES
        if changes:
            self._grow(pairs[0][0], grown)
        self._values.update(changes)
        for key, value in changes.items():
            self._changed(key, value, None)

    def get(self, key: bytes) -> bytes | None:
        """Return a value, or None where there is no such key."""
        return self._values.get(key)

    def multi_get(self, keys: Iterable[bytes]) -> list[bytes | None]:
        """Return the values of keys, None where there is no such key."""
        get = self._values.get
        return [get(key) for key in keys]

    def add(self, key: bytes, amount: int) -> int:
        """Add to a decimal counter (a missing key counts as 0) and return its new value, wrapped to 64 bits."""
        value = self._values.get(key)
        if value is None:
            total = amount
        elif len(value) < 19 and value.isdigit():
            total = int(value) + amount
            text = b"%d" % total
            if len(text) == len(value) and not (self._waiting or self._gates or self._watches or self._lessee):
                self._values[key] = text  # the common case, and the busiest: what `_put` would come to
                self.revision += 1
                return total
        else:
            total = number_in(key, value) + amount
        if not -_INT64 <= total < _INT64:
            total = (total + _INT64) % (2 * _INT64) - _INT64
        self._put(key, b"%d" % total)
        return total

    def append(self, key: bytes, value: bytes) -> None:
        """Add bytes to the end of a value; a missing key counts as empty."""
        old = self._values.get(key)
        self._put(key, value if old is None else old + value)

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        """Do as PyTorch does: an empty expectation may create; on a missing key any other is returned."""
        current = self._values.get(key)
        if current is None:
            if expected:
                return expected
        elif current != expected:
            return current
        self._put(key, desired)
        return desired

    def swap(self, key: bytes, expected: bytes | None, desired: bytes) -> Swap:
        """Write if the value is the expected one (None: if there is no such key); say whether it was."""
        current = self._values.get(key)
        if current != expected:
            return Swap(False, current)
        self._put(key, desired)
        return Swap(True, desired)

    def delete(self, key: bytes) -> bool:
        """Delete a key, and say whether it was there. Queues are not touched."""
        value = self._values.pop(key, None)
        if value is None:
            return False
        self.size -= len(key) + len(value) + ENTRY_BYTES
        self.revision += 1
        if key in self._lessee:
            self._unbind(key)
        if self._watches:
            self._publish(key, None)
        for waiter in [waiter for gate in self._gates.get(key, {}).values() for waiter in gate]:
            waiter.arrived = False  # whoever comes next counts from zero
        self._vanished(key)
        return True

    def delete_prefix(self, prefix: bytes) -> int:
        """Delete every key and queue whose name starts with a prefix, and return how many there were."""
        keys = self.list_keys(prefix)
        queues = [key for key in self._queues if key.startswith(prefix)]
        for key in keys:
            self.delete(key)
        for key in queues:
            self.size -= sum(len(key) + len(item) + ENTRY_BYTES for item in self._queues.pop(key))
            self.revision += 1
            self._vanished(key)
        return len(keys) + len(queues)

    def check(self, keys: Iterable[bytes]) -> bool:
        """Say whether every one of the keys exists now, as a key or as a queue."""
        for key in keys:  # noqa: SIM110 - a generator costs more than the look-up
            if key not in self._values and key not in self._queues:
                return False
        return True

    def num_keys(self, prefix: bytes = b"") -> int:
        """Count the keys that start with a prefix."""
        return len(self.list_keys(prefix)) if prefix else len(self._values)

    def list_keys(self, prefix: bytes = b"") -> list[bytes]:
        """List the keys that start with a prefix, oldest first."""
        return [key for key in self._values if key.startswith(prefix)] if prefix else list(self._values)

    # Queues

    def queue_push(self, key: bytes, value: bytes, front: bool = False) -> None:
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
        if front:
            queue.appendleft(value)
        else:
            queue.append(value)
        if key in self._waiting:
            self._wake(key)

    def queue_pop(self, key: bytes) -> bytes | None:
        """Take the first item of a queue, or return None where it is empty."""
        queue = self._queues.get(key)
        if queue is None:
            return None
        item = queue.popleft()
        self.size -= len(key) + len(item) + ENTRY_BYTES
        self.revision += 1
        if not queue:
            del self._queues[key]
            self._vanished(key)
        return item

    def queue_len(self, key: bytes) -> int:
        """Count the items of a queue."""
        queue = self._queues.get(key)
        return 0 if queue is None else len(queue)

    # Calls that may wait

    def wait(
        self, keys: Sequence[bytes], owner: Hashable, deadline: float | None = None, tag: object = None
    ) -> Waiter | None:
        """Wait until all the keys exist at once; None means that they do."""
        missing = [key for key in keys if key not in self._values and key not in self._queues]
        if not missing:
            return None
        return self._park(Waiter(Want.KEYS, keys, missing, owner, deadline, tag))

    def wait_values(
        self, keys: Sequence[bytes], owner: Hashable, deadline: float | None = None, tag: object = None
    ) -> Waiter | list[bytes]:
        """Wait until all the keys exist at once, and answer with their values of that moment."""
        missing = [key for key in keys if key not in self._values]
        if not missing:
            return [self._values[key] for key in keys]
        return self._park(Waiter(Want.VALUES, keys, missing, owner, deadline, tag))

    def wait_item(
        self, key: bytes, owner: Hashable, deadline: float | None = None, tag: object = None
    ) -> Waiter | bytes:
        """Wait in line for an item of a queue, and take it."""
        if self._spare(key):
            item = self.queue_pop(key)
            assert item is not None
            return item
        return self._park(Waiter(Want.ITEM, (key,), (key,), owner, deadline, tag))

    def wait_turn(self, key: bytes, owner: Hashable, tag: object = None) -> Waiter | Turn | None:
        """Wait until a key exists (None), or in line for the right to pop an item of that queue (a `Turn`)."""
        if key in self._values:
            return None
        if self._spare(key):
            return self._give_turn(key, owner)
        return self._park(Waiter(Want.TURN, (key,), (key,), owner, None, tag))

    def barrier(
        self, key: bytes, size: int, owner: Hashable, deadline: float | None = None, tag: object = None
    ) -> Waiter | None:
        """Count one arrival on an ordinary key and wait until it has reached `size`; None means that it has.

        An arrival that gives up, by its deadline or by `drop`, is taken back. One that was let through never is.
        """
        if self._count(key) + 1 < size:  # one that finds no room to wait has not arrived
            room = (len(key) + ENTRY_BYTES) * (1 if key in self._values else 2) + 1
            self._grow(key, room)
            self.size -= room
        if self.add(key, 1) >= size:
            return None
        return self._park(Waiter(Want.COUNT, (key,), (key,), owner, deadline, tag, size))

    def watch(self, prefix: bytes, owner: Hashable, tag: object = None) -> Watch:
        """Deliver every change of a key that starts with the prefix, from now on, until dropped."""
        self._grow(prefix, len(prefix) + ENTRY_BYTES)
        watch = Watch(prefix, owner, tag)
        self._watches.setdefault(prefix, {})[watch] = None
        self._hold(watch)
        return watch

    # For the shared objects of `core/objects.py`

    def park_call(self, name: bytes, owner: Hashable, deadline: float | None, tag: object) -> Waiter:
        """Let a call on a shared object wait."""
        return self._park(Waiter(Want.CALL, (name,), (), owner, deadline, tag))

    def answer_call(self, waiter: Waiter, answer: Answer) -> bool:
        """Answer a call that waits, unless it was given up or its time is over; say whether that was done."""
        if not self._release(waiter):
            return False
        self._unpark(waiter)
        self.outbox.append((waiter, answer))
        return True

    def charge(self, name: bytes, amount: int, spare: int = 0) -> None:
        """Count bytes that a shared object keeps, or no longer; refuse to if there is no room for these and more."""
        self._grow(name, amount + spare)
        self.size -= spare

    # What a host calls beside the operations

    def take(self) -> list[tuple[Waiter | Watch, Answer]]:
        """Return what is to be delivered since the last call, in order."""
        out, self.outbox = self.outbox, []
        return out

    def tick(self, now: float) -> float | None:
        """Answer the waits whose deadline has passed with what they miss; return the next deadline."""
        deadlines = self._deadlines
        while deadlines and (deadlines[0][0] <= now or deadlines[0][2].deadline is None):
            waiter = heapq.heappop(deadlines)[2]
            if waiter.deadline is not None:
                missing = tuple(waiter.missing)
                self.drop(waiter)
                self.outbox.append((waiter, TimedOut(missing)))
        self.earliest = deadlines[0][0] if deadlines else _NEVER
        return deadlines[0][0] if deadlines else None

    def drop(self, held: Waiter | Watch | Turn) -> None:
        """Forget a wait, a watch or a turn; harmless when it is over already."""
        if not self._release(held):
            return
        if isinstance(held, Waiter):
            self._unpark(held)
            if held.arrived:
                self._withdraw(held.keys[0])
        elif isinstance(held, Watch):
            self.size -= len(held.prefix) + ENTRY_BYTES
            self._watches[held.prefix].pop(held)
            if not self._watches[held.prefix]:
                del self._watches[held.prefix]
        else:
            self._turns[held.key].pop(held)
            if not self._turns[held.key]:
                del self._turns[held.key]
            if held.key in self._waiting:
                self._wake(held.key)

    def sweep_turns(self) -> bool:
        """Take back the turns that were already there at the last sweep; say whether any are left."""
        for turn in [turn for turns in self._turns.values() for turn in turns]:
            if turn.aged:
                self.drop(turn)
            turn.aged = True
        return bool(self._turns)

    def unlease(self, key: bytes, owner: Hashable) -> bool:
        """Delete a key if it is still leased by this owner; say whether it was."""
        return self._lessee.get(key) == owner and self.delete(key)

    def leases(self, owner: Hashable) -> list[bytes]:
        """List the keys that an owner leases."""
        return list(self._leased.get(owner, ()))

    def end(self, owner: Hashable) -> None:
        """Drop everything an owner holds: its waits, watches and turns unanswered, its leased keys deleted."""
        for held in sorted(self._held.get(owner, ()), key=lambda held: (Watch, Waiter, Turn).index(type(held))):
            self.drop(held)  # turns last, for they go to whoever waits next, and that is not this owner
        for key in list(self._leased.get(owner, ())):
            self.delete(key)

    def statistics(self) -> Statistics:
        """Count what is held now."""
        held = [thing for things in self._held.values() for thing in things]
        return Statistics(
            keys=len(self._values),
            queues=len(self._queues),
            waiters=sum(isinstance(thing, Waiter) for thing in held),
            watches=sum(isinstance(thing, Watch) for thing in held),
            leased_keys=len(self._lessee),
            size=self.size,
            revision=self.revision,
        )

    # Inside

    def _put(self, key: bytes, value: bytes, owner: Hashable = None) -> None:
        old = self._values.get(key)
        size = self.size + len(value) - len(old) if old is not None else self.size + len(key) + len(value) + ENTRY_BYTES
        if size > self.max_bytes and size > self.size:
            raise StoreFull(key=show(key), size=size, limit=self.max_bytes)
        self.size = size
        self._values[key] = value
        if owner is None and not (self._waiting or self._gates or self._watches or self._lessee):
            self.revision += 1  # nobody looks: nothing else can have changed
        else:
            self._changed(key, value, owner)

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
        for prefix, watches in self._watches.items():
            if key.startswith(prefix):
                self.outbox.extend((watch, event) for watch in watches)

    def _hold(self, held: Waiter | Watch | Turn) -> None:
        self._held.setdefault(held.owner, {})[held] = None

    def _release(self, held: Waiter | Watch | Turn) -> bool:
        """Take something off its owner's list; False when it was not there, that is, over already."""
        mine = self._held.get(held.owner)
        if mine is None or held not in mine:
            return False
        del mine[held]
        if not mine:
            del self._held[held.owner]
        return True

    def _park(self, waiter: Waiter) -> Waiter:
        self._grow(waiter.keys[0], sum(len(key) + ENTRY_BYTES for key in waiter.keys))
        if waiter.want is Want.COUNT:
            self._gates.setdefault(waiter.keys[0], {}).setdefault(waiter.need, {})[waiter] = None
        elif waiter.want is not Want.CALL:
            for key in waiter.keys:
                self._waiting.setdefault(key, {})[waiter] = None
        self._hold(waiter)
        if waiter.deadline is not None:
            self._timed += 1
            heapq.heappush(self._deadlines, (waiter.deadline, next(self._arrivals), waiter))
            self.earliest = self._deadlines[0][0]
            if len(self._deadlines) > 2 * self._timed + 64:  # mostly of waits that are over
                self._deadlines = [entry for entry in self._deadlines if entry[2].deadline is not None]
                heapq.heapify(self._deadlines)
        return waiter

    def _unpark(self, waiter: Waiter) -> None:
        self.size -= sum(len(key) + ENTRY_BYTES for key in waiter.keys)
        if waiter.want is Want.COUNT:
            gate = self._gates[waiter.keys[0]]
            gate[waiter.need].pop(waiter)
            if not gate[waiter.need]:
                del gate[waiter.need]
            if not gate:
                del self._gates[waiter.keys[0]]
        elif waiter.want is not Want.CALL:
            for key in dict.fromkeys(waiter.keys):
                waiters = self._waiting[key]
                del waiters[waiter]
                if not waiters:
                    del self._waiting[key]
        if waiter.deadline is not None:
            self._timed -= 1
            waiter.deadline = None

    def _answer(self, waiter: Waiter, answer: Answer) -> None:
        self._release(waiter)
        self._unpark(waiter)
        self.outbox.append((waiter, answer))

    def _wake(self, key: bytes) -> None:
        """After a key or queue has changed: answer, in order, those waiters for whom that was the last thing."""
        for waiter in tuple(self._waiting[key]):
            if waiter.want is Want.KEYS:
                if key in self._values or key in self._queues:
                    waiter.missing.pop(key, None)
                if not waiter.missing:
                    self._answer(waiter, None)
            elif waiter.want is Want.VALUES:
                if key in self._values:
                    waiter.missing.pop(key, None)
                if not waiter.missing:
                    self._answer(waiter, [self._values[key] for key in waiter.keys])
            elif waiter.want is Want.TURN and key in self._values:
                self._answer(waiter, None)
            elif self._spare(key):
                turn = waiter.want is Want.TURN
                self._answer(waiter, self._give_turn(key, waiter.owner) if turn else self.queue_pop(key))

    def _open(self, key: bytes) -> None:
        """After a barrier's count has changed: let through those for whom it is enough."""
        here = self._count(key)
        for need in [need for need in self._gates[key] if need <= here]:
            for waiter in tuple(self._gates[key][need]):
                self._answer(waiter, None)

    def _vanished(self, key: bytes) -> None:
        """After a key or queue has gone: those who had it count it as missing again."""
        for waiter in self._waiting.get(key, ()):
            if key not in self._values and (waiter.want is Want.VALUES or key not in self._queues):
                waiter.missing[key] = None

    def _spare(self, key: bytes) -> bool:
        """Say whether a queue holds more items than turns were given for."""
        return key in self._queues and len(self._queues[key]) > len(self._turns.get(key, ()))

    def _give_turn(self, key: bytes, owner: Hashable) -> Turn:
        turn = Turn(key, owner)
        self._turns.setdefault(key, {})[turn] = None
        self._hold(turn)
        return turn

    def _count(self, key: bytes) -> int:
        """Return a barrier's count; what is no number counts as nobody."""
        try:
            return number_in(key, self._values.get(key, b"0"))
        except NotAnInteger:
            return 0

    def _withdraw(self, key: bytes) -> None:
        if self._count(key) > 0:
            self.add(key, -1)


def number_in(key: bytes, value: bytes) -> int:
    """Read a number as C's strtoll does: leading blanks, a sign, and anything after the digits are accepted."""
    match = _NUMBER.match(value)
    number = int(match[1]) if match and len(match[1]) <= 4096 else None
    if number is None or not -_INT64 <= number < _INT64:
        raise NotAnInteger(key=show(key), value=value)
    return number
