"""A replica that follows a log: what others wrote is taken in, what is decided here is written down.

Writing: hold the mutex, `sync`, and `execute`: decide on the replica, and `commit` an effect, that is, append it to the
log, then apply it.
Reading: `look`, and only where that is not enough, hold the mutex and `sync`. Whoever waits for an answer sits on a
`Seat`, which is here because a replica is built anew when the log was compacted, and the seats then move on to the new
one. A watch gets, for every key that differs, its last value: what was in between is gone, and nothing is told twice.

An owner of leases or arrivals whose byte in the file is free is dead. Whoever notices says so in the log, and it ends
everywhere. A look tests only a few owners, in turn: it costs the same in a large job, where more are looking.

A Ctrl-C between any two lines does no harm: a replica that may not be `_whole` is built anew.

There are no threads here: `filehub` has the lock under which all this runs.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable
from typing import Any

from rallypoint.core import ops
from rallypoint.core import replica as effects
from rallypoint.core.engine import Engine
from rallypoint.core.records import Event, Waiter, Watch
from rallypoint.core.replica import Arrive, Effect, End, Replica, Withdraw, changes, decode, encode
from rallypoint.errors import CorruptFile
from rallypoint.store.filelog import LogFile, Tail

__all__ = ["Follower", "Seat", "new_number"]

OWNERS_PER_LOOK = 8
COMPACT_BYTES, COMPACT_RATIO = 64 * 1024, 4


def new_number() -> int:
    """Return a number that no other member, and no other log, has."""
    return int.from_bytes(os.urandom(7), "little")


class Seat:
    """Where answers come to, with the read or the watch, to be asked again of a replica that was built anew."""

    def __init__(self, holder: object, op: ops.Op) -> None:
        self.holder = holder
        self.op = op
        self.answers: deque[Any] = deque()
        self.held: Waiter | Watch | None = None

    def ask(self, engine: Engine) -> None:
        """Execute the operation, and keep the answer or what stands for it."""
        op = self.op
        outcome = engine.watch(op.prefix, self, 0) if isinstance(op, ops.Watch) else engine.execute(op, self)
        if isinstance(outcome, Waiter | Watch):
            self.held = outcome
        else:
            self.answers.append(outcome)

    def resume(self, engine: Engine, events: list[Event]) -> None:
        """Go on with another engine, which differs by these events."""
        if isinstance(self.held, Watch):
            prefix = self.held.prefix
            self.answers.extend(event for event in events if event.key.startswith(prefix))
            self.ask(engine)
        elif not self.answers:
            self.ask(engine)


class Follower:
    """The replica of one log. `tell` is called whenever it has changed."""

    def __init__(self, log: LogFile, tell: Callable[[], None]) -> None:
        self.log = log
        self.replica = Replica()
        self.members: set[int] = set()
        self._tell = tell
        self._presence = new_number()
        self._seats: dict[Seat, None] = {}
        self._whole = True
        self._next_owner = 0
        self._compact_at = COMPACT_BYTES

    # Members of this process

    def enter(self) -> None:
        """Begin to follow, and hold the log alive from now on. Needs the mutex, as `sync` does."""
        self.log.enter(new_number())
        self.log.claim(self._presence)
        self.sync()

    def admit(self) -> int:
        """Add a member."""
        member = new_number()
        self.log.claim(member)
        self.members.add(member)
        return member

    def dismiss(self, member: int) -> None:
        """Take a member off, and the hold on the log with the last one."""
        self.members.discard(member)
        self.log.leave(member)
        if not self.members:
            self.log.leave(self._presence)

    # Reading

    def look(self) -> bool:
        """Take in what others appended; False when it takes a `sync`."""
        self.log.renew(self._presence)
        tail = self.log.peek() if self._whole else None
        if tail is not None:
            self._advance(tail)
        return tail is not None

    def dead(self) -> list[int]:
        """Return those of the next few owners in other processes who are gone."""
        others = [owner for owner in self.replica.owners if owner not in self.members]
        first = self._next_owner % len(others) if len(others) > OWNERS_PER_LOOK else 0
        dead = [owner for owner in (others[first:] + others[:first])[:OWNERS_PER_LOOK] if self.log.is_free(owner)]
        if not dead:
            self._next_owner = first + OWNERS_PER_LOOK
        return dead

    def sync(self) -> None:
        """Take in all that others did, and bury the dead. Needs the mutex."""
        if not self._whole:
            self.log.forget()
        self._advance(self.log.read())
        with contextlib.suppress(OSError):  # no room on the disk: later, then
            for owner in self.dead():
                self.commit(End(owner))

    # Writing, which needs the mutex, and to be in sync

    def commit(self, effect: Effect) -> Any:
        """Write an effect down, apply it, and return what the engine says. If it cannot be written, nothing is done."""
        end = self.log.append(encode(effect))
        self._whole = False
        result = effect.apply(self.replica)
        self.log.end = end
        self._deliver()
        self._whole = True
        return result

    def execute(self, op: ops.Op, member: int) -> Any:
        """Carry out an operation of a member that changes something and does not wait."""
        return _EXECUTE[op.__class__](self, op, member)

    def end(self, member: int) -> None:
        """Say that a member of this process is gone, and take it off."""
        if member in self.replica.owners:
            self.commit(End(member))
        self.dismiss(member)

    def arrive(self, arrival: Arrive) -> None:
        """Count an arrival at a barrier; raises NotAnInteger, and then it is not counted."""
        self._trial(arrival.key).execute(ops.Add(0, arrival.key, 1))
        self.commit(arrival)

    def withdraw(self, ticket: tuple[int, int]) -> bool:
        """Take an arrival back, and say whether it was still waiting."""
        waiting = ticket in self.replica.arrivals
        if waiting:
            self.commit(Withdraw(*ticket))
        return waiting

    def _trial(self, key: bytes) -> Replica:
        """Return a replica that holds only this key, to find out what an operation would do."""
        trial, value = Replica(), self.replica.value(key)
        if value is not None:
            trial.put(key, value)
        return trial

    def rewrite(self, op: ops.Add | ops.CompareSet | ops.Swap) -> Any:
        """Try an operation, and commit what it would write."""
        trial = self._trial(op.key)
        before = trial.revision
        result = trial.execute(op)
        written = trial.value(op.key)
        if trial.revision != before and written is not None:
            self.commit(effects.Set(op.key, written))
        return result

    def compact(self) -> None:
        """Rewrite the log if most of it is garbage."""
        if self.log.end < max(self._compact_at, COMPACT_RATIO * self.replica.size):
            return
        self._compact_at = 2 * self.log.end  # in case it comes to nothing
        try:
            self.log.compact(encode(effect) for effect in self.replica.snapshot())
        except OSError:
            pass  # it was only to save room

    # Seats

    def sit(self, seat: Seat) -> None:
        """Execute a seat's operation, unless it sits here already."""
        if seat not in self._seats:
            self._seats[seat] = None
            seat.ask(self.replica)

    def rise(self, seat: Seat) -> None:
        """Take a seat away."""
        self._seats.pop(seat, None)
        if seat.held is not None:
            self.replica.drop(seat.held)

    def rise_all(self, holder: object) -> None:
        """Take all seats of a holder away."""
        for seat in [seat for seat in self._seats if seat.holder is holder]:
            self.rise(seat)

    # Inside

    def _advance(self, tail: Tail) -> None:
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
        for seat in self._seats:
            seat.resume(replica, events)

    def _deliver(self) -> None:
        for handle, answer in self.replica.take():
            assert isinstance(handle.owner, Seat)
            handle.owner.answers.append(answer)
        self._tell()


_EXECUTE: dict[type[ops.Op], Callable[[Follower, Any, int], Any]] = {
    ops.Set: lambda log, op, _: log.commit(effects.Set(op.key, op.value)),
    ops.MultiSet: lambda log, op, _: log.commit(effects.SetMany(op.pairs)),
    ops.Append: lambda log, op, _: log.commit(effects.Append(op.key, op.value)),
    ops.Add: lambda log, op, _: log.rewrite(op),
    ops.CompareSet: lambda log, op, _: log.rewrite(op),
    ops.Swap: lambda log, op, _: log.rewrite(op),
    ops.Delete: lambda log, op, _: log.replica.holds(op.key) and log.commit(effects.Delete(op.key)),
    ops.DeletePrefix: lambda log, op, _: log.commit(effects.DeletePrefix(op.prefix)),
    ops.Push: lambda log, op, _: log.commit(effects.Push(op.key, op.value)),
    ops.Pop: lambda log, op, _: log.commit(effects.Pop(op.key)) if log.replica.has_item(op.key) else None,
    ops.Lease: lambda log, op, member: log.commit(effects.Set(op.key, op.value, member)),
    ops.Unlease: lambda log, op, member: log.commit(effects.Unlease(op.key, member)),
}
