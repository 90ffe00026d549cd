"""A replica that follows a log: it applies the records of other processes, and appends its own.

Writing: hold the mutex, `sync`, then `execute`, which decides on the replica and commits an effect: it appends the
effect to the log, then applies it.
Reading: `look`; only if that fails, hold the mutex and `sync`. A `ReplicaWaiter` holds the pending read or
watch of a caller: after a compaction of the log the replica is rebuilt, and the waiters move to the new one. A watch
then gets one event for every key that differs, with its last value: intermediate values are lost, no event is repeated.

An owner of leases or arrivals whose lock on the file is free is dead. The process that notices commits the owner's end
to the log, and so to every replica. Each look checks only a few owners, in turn, so its cost does not grow with the
job; in a large job more processes look.

Ctrl-C between any two lines is harmless: a replica that may be incomplete (not `_whole`) is rebuilt.

There are no threads here: `SharedFile` has the lock under which all this runs.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable
from typing import Any

from rallypoint.core import ops
from rallypoint.core.engine import Engine
from rallypoint.core.records import Event, Waiter, WatchHandle
from rallypoint.errors import CorruptFile
from rallypoint.filestore import replica as effects
from rallypoint.filestore.log_file import LogFile, LogTail
from rallypoint.filestore.replica import (
    ArriveEffect,
    Effect,
    EndOwnerEffect,
    Replica,
    WithdrawEffect,
    changes,
    decode,
    encode,
)

__all__ = ["ReplicaFollower", "ReplicaWaiter", "new_number"]

OWNERS_PER_LOOK = 8
COMPACT_BYTES, COMPACT_RATIO = 64 * 1024, 4


def new_number() -> int:
    """Return a random number, unique among members and logs."""
    return int.from_bytes(os.urandom(7), "little")


class ReplicaWaiter:
    """A pending read or watch and its answers; it is executed again when the replica is rebuilt."""

    def __init__(self, holder: object, op: ops.Op) -> None:
        self.owner = holder
        self.op = op
        self.answers: deque[Any] = deque()
        self.handle: Waiter | WatchHandle | None = None

    def ask(self, engine: Engine) -> None:
        """Execute the operation, and keep its answer or its handle."""
        op = self.op
        outcome = engine.watch(op.prefix, self, 0) if isinstance(op, ops.WatchPrefix) else engine.execute(op, self)
        if isinstance(outcome, Waiter | WatchHandle):
            self.handle = outcome
        else:
            self.answers.append(outcome)

    def resume(self, engine: Engine, events: list[Event]) -> None:
        """Continue on another engine, which differs by these events."""
        if isinstance(self.handle, WatchHandle):
            prefix = self.handle.prefix
            self.answers.extend(event for event in events if event.key.startswith(prefix))
            self.ask(engine)
        elif not self.answers:
            self.ask(engine)


class ReplicaFollower:
    """The replica of one log. Calls `on_change` after every change."""

    def __init__(self, log: LogFile, on_change: Callable[[], None]) -> None:
        self.log = log
        self.replica = Replica()
        self.members: set[int] = set()
        self._on_change = on_change
        self._presence = new_number()
        self._waiters: dict[ReplicaWaiter, None] = {}
        self._whole = True
        self._next_owner = 0
        self._compact_at = COMPACT_BYTES

    # Members of this process

    def enter(self) -> None:
        """Start to follow the log, and mark it as in use by this process. Needs the mutex, as `sync` does."""
        self.log.enter(new_number())
        self.log.claim(self._presence)
        self.sync()

    def add_member(self) -> int:
        """Add a member of this process and return its number."""
        member = new_number()
        self.log.claim(member)
        self.members.add(member)
        return member

    def remove_member(self, member: int) -> None:
        """Remove a member; after the last one, the log is no longer in use by this process."""
        self.members.discard(member)
        self.log.leave(member)
        if not self.members:
            self.log.leave(self._presence)

    # Reading

    def look(self) -> bool:
        """Apply the records that others appended; return False if that needs a `sync`."""
        self.log.renew(self._presence)
        tail = self.log.peek() if self._whole else None
        if tail is not None:
            self._advance(tail)
        return tail is not None

    def dead(self) -> list[int]:
        """Return the dead among the next few owners in other processes."""
        others = [owner for owner in self.replica.owners if owner not in self.members]
        first = self._next_owner % len(others) if len(others) > OWNERS_PER_LOOK else 0
        dead = [owner for owner in (others[first:] + others[:first])[:OWNERS_PER_LOOK] if self.log.is_free(owner)]
        if not dead:
            self._next_owner = first + OWNERS_PER_LOOK
        return dead

    def sync(self) -> None:
        """Apply all records of others, and end dead owners. Needs the mutex."""
        if not self._whole:
            self.log.forget()
        self._advance(self.log.read())
        with contextlib.suppress(OSError):  # disk full: try again later
            for owner in self.dead():
                self.commit(EndOwnerEffect(owner))

    # Writing: needs the mutex, after a `sync`

    def commit(self, effect: Effect) -> Any:
        """Append an effect to the log, apply it, and return the engine's result. If the append fails, do nothing."""
        end = self.log.append(encode(effect))
        self._whole = False
        result = effect.apply(self.replica)
        self.log.end = end
        self._deliver()
        self._whole = True
        return result

    def execute(self, op: ops.Op, member: int) -> Any:
        """Execute a member's write operation that does not wait."""
        return _EXECUTE[op.__class__](self, op, member)

    def end(self, member: int) -> None:
        """Commit the end of a member of this process, and remove it."""
        if member in self.replica.owners:
            self.commit(EndOwnerEffect(member))
        self.remove_member(member)

    def arrive(self, arrival: ArriveEffect) -> None:
        """Count an arrival at a barrier; raise NotAnInteger, without counting it, if the key is not a number."""
        self._trial(arrival.key).execute(ops.Add(0, arrival.key, 1))
        self.commit(arrival)

    def withdraw(self, ticket: tuple[int, int]) -> bool:
        """Withdraw an arrival; return whether it was still waiting."""
        waiting = ticket in self.replica.arrivals
        if waiting:
            self.commit(WithdrawEffect(*ticket))
        return waiting

    def _trial(self, key: bytes) -> Replica:
        """Return a replica that has only this key, for trying an operation."""
        trial, value = Replica(), self.replica.value(key)
        if value is not None:
            trial.put(key, value)
        return trial

    def rewrite(self, op: ops.Add | ops.CompareSet | ops.CompareSwap) -> Any:
        """Try an operation, and commit the value that it writes, if any."""
        trial = self._trial(op.key)
        before = trial.revision
        result = trial.execute(op)
        written = trial.value(op.key)
        if trial.revision != before and written is not None:
            self.commit(effects.SetEffect(op.key, written))
        return result

    def compact(self) -> None:
        """Rewrite the log if most of it is garbage."""
        if self.log.end < max(self._compact_at, COMPACT_RATIO * self.replica.size):
            return
        self._compact_at = 2 * self.log.end  # in case the compaction fails
        try:
            self.log.compact(encode(effect) for effect in self.replica.snapshot())
        except OSError:
            pass  # compaction only saves space

    # Waiters

    def add_waiter(self, waiter: ReplicaWaiter) -> None:
        """Add a waiter and execute its operation, unless it was added before."""
        if waiter not in self._waiters:
            self._waiters[waiter] = None
            waiter.ask(self.replica)

    def remove_waiter(self, waiter: ReplicaWaiter) -> None:
        """Remove a waiter."""
        self._waiters.pop(waiter, None)
        if waiter.handle is not None:
            self.replica.drop(waiter.handle)

    def remove_waiters_of(self, holder: object) -> None:
        """Remove all waiters of a holder."""
        for waiter in [waiter for waiter in self._waiters if waiter.owner is holder]:
            self.remove_waiter(waiter)

    # Internals

    def _advance(self, tail: LogTail) -> None:
        if tail.end == self.log.end and not tail.anew:
            return
        try:
            effects = [decode(payload) for payload in tail.payloads]
        except ValueError:
            raise CorruptFile(path=self.log.path, offset=self.log.end, why="a record of unknown kind") from None
        self._whole = False
        if tail.anew:
            self._rebuild(effects)
        for effect in () if tail.anew else effects:
            effect.apply(self.replica)
        self.log.adopt(tail)
        self._deliver()
        self._whole = True

    def _rebuild(self, effects: list[Effect]) -> None:
        replica = Replica()
        for effect in effects:
            effect.apply(replica)
        replica.take()
        events = changes(self.replica.values(), replica.values(), replica.revision)
        self.replica = replica
        self._compact_at = COMPACT_BYTES
        for waiter in self._waiters:
            waiter.resume(replica, events)

    def _deliver(self) -> None:
        for handle, answer in self.replica.take():
            assert isinstance(handle.owner, ReplicaWaiter)
            handle.owner.answers.append(answer)
        self._on_change()


_EXECUTE: dict[type[ops.Op], Callable[[ReplicaFollower, Any, int], Any]] = {
    ops.Set: lambda log, op, _: log.commit(effects.SetEffect(op.key, op.value)),
    ops.MultiSet: lambda log, op, _: log.commit(effects.SetManyEffect(op.pairs)),
    ops.Append: lambda log, op, _: log.commit(effects.AppendEffect(op.key, op.value)),
    ops.Add: lambda log, op, _: log.rewrite(op),
    ops.CompareSet: lambda log, op, _: log.rewrite(op),
    ops.CompareSwap: lambda log, op, _: log.rewrite(op),
    ops.Delete: lambda log, op, _: log.replica.holds(op.key) and log.commit(effects.DeleteEffect(op.key)),
    ops.DeletePrefix: lambda log, op, _: log.commit(effects.DeletePrefixEffect(op.prefix)),
    ops.Push: lambda log, op, _: log.commit(effects.PushEffect(op.key, op.value)),
    ops.Pop: lambda log, op, _: log.commit(effects.PopEffect(op.key)) if log.replica.has_item(op.key) else None,
    ops.SetLease: lambda log, op, member: log.commit(effects.SetEffect(op.key, op.value, member)),
    ops.ReleaseLease: lambda log, op, member: log.commit(effects.UnleaseEffect(op.key, member)),
}
