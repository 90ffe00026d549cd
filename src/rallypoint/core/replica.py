"""An engine that is replayed: what a FileStore's log says happened, applied in order, makes the same engine everywhere.

A record is an *effect*: what was decided under the file's lock, not what was asked. A won `compare_set` is a `Set`, a
lost one is nothing; an `add` is a `Set` of its sum. An effect applied to equal replicas leaves them equal, and it never
fails: whoever wrote it had found out that it would not.

Waits for keys and watches belong to one process and stay out of the log. Two things of an owner are in it, so that
they can be undone when it ends: its leased keys, and its arrivals at barriers. An arrival is the engine's own waiter in
every replica; one that is no longer in `arrivals` was let through, or withdrawn by its owner, or has ended with it.

`snapshot` says the whole state in few effects. An arrival is put back by way of a count so low that it must wait.

Rejected: effects as dicts with an "op" field; a typed record is checked when it is read, and says what it does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from rallypoint.core import ops
from rallypoint.core.engine import Engine
from rallypoint.core.records import Answer, Event, Waiter, Want, Watch

__all__ = [
    "Effect",
    "Set",
    "SetMany",
    "Append",
    "Delete",
    "DeletePrefix",
    "Push",
    "Pop",
    "Unlease",
    "Arrive",
    "Withdraw",
    "End",
    "Seal",
    "Replica",
    "changes",
    "decode",
    "encode",
]

_NOBODY = b"%d" % -(2**63)


class Replica(Engine):
    """An engine with its owners, and their arrivals at barriers by (owner, number)."""

    def __init__(self) -> None:
        super().__init__()
        self.owners: dict[int, None] = {}
        self.arrivals: dict[tuple[int, int], Waiter] = {}

    def take(self) -> list[tuple[Waiter | Watch, Answer]]:
        """Return what is to be delivered in this process; arrivals that were let through are only crossed out."""
        out = super().take()
        for handle, _ in out:
            if isinstance(handle, Waiter) and handle.want is Want.COUNT:
                self.arrivals.pop((handle.owner, handle.number), None)  # type: ignore[arg-type]
        return [pair for pair in out if isinstance(pair[0], Watch) or pair[0].want is not Want.COUNT]

    def has_item(self, key: bytes) -> bool:
        """Return whether a queue holds an item."""
        return key in self._queues

    def value(self, key: bytes) -> bytes | None:
        """Return the value of a key, or None where there is none."""
        return self._values.get(key)

    def values(self) -> dict[bytes, bytes]:
        """Copy the keys and their values."""
        return dict(self._values)

    def snapshot(self) -> Iterator[Effect]:
        """Yield the effects that make an equal replica of an empty one."""
        counted: dict[bytes, list[Effect]] = {}
        for (owner, number), waiter in self.arrivals.items():
            key = waiter.keys[0]
            arrival = (Set(key, _NOBODY), Arrive(key, waiter.need, owner, number))
            if waiter.arrived:
                counted.setdefault(key, []).extend(arrival)
            else:  # the key was deleted since, and counts it no more
                yield from (*arrival, Delete(key))
        for key, value in self._values.items():
            yield from counted.get(key, ())
            lessee = self._lessee.get(key)
            assert lessee is None or isinstance(lessee, int)
            yield Set(key, value, lessee)
        for key, items in self._queues.items():
            yield from (Push(key, item) for item in items)
        yield Seal(self.revision, list(self.owners))


class Effect(msgspec.Struct, frozen=True, array_like=True):
    """One record of the log."""

    def apply(self, to: Replica) -> int | bytes | None:
        """Do it, and return what the engine said."""
        raise NotImplementedError


class Set(Effect, frozen=True, tag=0):
    """A key was written; with an owner, leased."""

    key: bytes
    value: bytes
    owner: int | None = None

    def apply(self, to: Replica) -> None:
        if self.owner is not None:
            to.owners[self.owner] = None
        to.put(self.key, self.value, self.owner)


class SetMany(Effect, frozen=True, tag=1):
    """Several keys were written as one change."""

    pairs: list[tuple[bytes, bytes]]

    def apply(self, to: Replica) -> None:
        to.put_all(self.pairs)


class Append(Effect, frozen=True, tag=2):
    """Bytes were added to the end of a value."""

    key: bytes
    value: bytes

    def apply(self, to: Replica) -> None:
        to.execute(ops.Append(0, self.key, self.value))


class Delete(Effect, frozen=True, tag=3):
    """A key was deleted."""

    key: bytes

    def apply(self, to: Replica) -> bool:
        return to.remove(self.key)


class DeletePrefix(Effect, frozen=True, tag=4):
    """All keys and queues under a prefix were deleted."""

    prefix: bytes

    def apply(self, to: Replica) -> int:
        return int(to.execute(ops.DeletePrefix(0, self.prefix)))


class Push(Effect, frozen=True, tag=5):
    """An item was put at the end of a queue."""

    key: bytes
    value: bytes

    def apply(self, to: Replica) -> None:
        to.push(self.key, self.value)


class Pop(Effect, frozen=True, tag=6):
    """The first item of a queue was taken."""

    key: bytes

    def apply(self, to: Replica) -> bytes | None:
        return to.pop(self.key)


class Unlease(Effect, frozen=True, tag=7):
    """A key was given up, if its owner still had it."""

    key: bytes
    owner: int

    def apply(self, to: Replica) -> bool:
        return to.unlease(self.key, self.owner)


class Arrive(Effect, frozen=True, tag=8):
    """One more came to a barrier; `number` tells the arrivals of an owner apart."""

    key: bytes
    size: int
    owner: int
    number: int

    def apply(self, to: Replica) -> None:
        waiter = to.arrive(self.key, self.size, self.owner, self.number)
        to.owners[self.owner] = None
        if waiter is not None:
            to.arrivals[self.owner, self.number] = waiter


class Withdraw(Effect, frozen=True, tag=9):
    """An arrival gave up waiting."""

    owner: int
    number: int

    def apply(self, to: Replica) -> None:
        waiter = to.arrivals.pop((self.owner, self.number), None)
        if waiter is not None:
            to.drop(waiter)


class End(Effect, frozen=True, tag=10):
    """An owner is gone: its leased keys vanish, its arrivals are taken back."""

    owner: int

    def apply(self, to: Replica) -> None:
        to.owners.pop(self.owner, None)
        for ticket in [ticket for ticket in to.arrivals if ticket[0] == self.owner]:
            del to.arrivals[ticket]
        to.end(self.owner)


class Seal(Effect, frozen=True, tag=11):
    """The end of a snapshot: the revision it stands for, and who was an owner then."""

    revision: int
    owners: list[int]

    def apply(self, to: Replica) -> None:
        to.revision = self.revision
        to.owners = dict.fromkeys(self.owners)


_decoder = msgspec.msgpack.Decoder(
    Set | SetMany | Append | Delete | DeletePrefix | Push | Pop | Unlease | Arrive | Withdraw | End | Seal
)
_encoder = msgspec.msgpack.Encoder()


def encode(effect: Effect) -> bytes:
    """Return an effect as a record."""
    return _encoder.encode(effect)


def decode(record: bytes) -> Effect:
    """Read an effect; raises ValueError on what is not one."""
    effect: Effect = _decoder.decode(record)
    return effect


def changes(old: Mapping[bytes, bytes], new: Mapping[bytes, bytes], revision: int) -> list[Event]:
    """Return the events that lead from one content to another, at most one for each key."""
    gone = [Event(revision, key, None) for key in old if key not in new]
    return gone + [Event(revision, key, value) for key, value in new.items() if old.get(key) != value]
