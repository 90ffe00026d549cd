"""A replayed engine: the records of a FileStore's log, applied in order, produce the same engine in every process.

A record is an *effect*: the decision made under the file's lock, not the request. A successful `compare_set` is a
`SetEffect`, a failed one has no record; an `add` is a `SetEffect` of the sum. An effect applied to equal replicas
leaves them equal, and never fails: its writer checked that before.

Waits for keys and watches belong to one process and stay out of the log. The log has two things of an owner, so that
they can be undone when it ends: its leased keys, and its arrivals at barriers. An arrival is a waiter of the engine in
every replica; one that is no longer in `arrivals` was released, or withdrawn by its owner, or has ended with it.

`snapshot` expresses the whole state in few effects. It restores an arrival with a count so low that it must wait.

Rejected: effects as dicts with an "op" field; a typed record is checked when it is read, and documents itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from rallypoint.core import ops
from rallypoint.core.engine import Engine
from rallypoint.core.records import Answer, Event, Waiter, WaitKind, WatchHandle

__all__ = [
    "Effect",
    "SetEffect",
    "SetManyEffect",
    "AppendEffect",
    "DeleteEffect",
    "DeletePrefixEffect",
    "PushEffect",
    "PopEffect",
    "UnleaseEffect",
    "ArriveEffect",
    "WithdrawEffect",
    "EndOwnerEffect",
    "SealEffect",
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

    def take(self) -> list[tuple[Waiter | WatchHandle, Answer]]:
        """Return the answers to deliver in this process; released arrivals are only removed."""
        out = super().take()
        for handle, _ in out:
            if isinstance(handle, Waiter) and handle.want is WaitKind.COUNT:
                self.arrivals.pop((handle.owner, handle.number), None)  # type: ignore[arg-type]
        return [pair for pair in out if isinstance(pair[0], WatchHandle) or pair[0].want is not WaitKind.COUNT]

    def has_item(self, key: bytes) -> bool:
        """Return whether a queue holds an item."""
        return key in self._queues

    def value(self, key: bytes) -> bytes | None:
        """Return the value of a key, or None if it is missing."""
        return self._values.get(key)

    def values(self) -> dict[bytes, bytes]:
        """Return a copy of the keys and values."""
        return dict(self._values)

    def snapshot(self) -> Iterator[Effect]:
        """Yield the effects that turn an empty replica into an equal one."""
        counted: dict[bytes, list[Effect]] = {}
        for (owner, number), waiter in self.arrivals.items():
            key = waiter.keys[0]
            arrival = (SetEffect(key, _NOBODY), ArriveEffect(key, waiter.need, owner, number))
            if waiter.arrived:
                counted.setdefault(key, []).extend(arrival)
            else:  # the key was deleted since, and no longer counts it
                yield from (*arrival, DeleteEffect(key))
        for key, value in self._values.items():
            yield from counted.get(key, ())
            lessee = self._lease_owner.get(key)
            assert lessee is None or isinstance(lessee, int)
            yield SetEffect(key, value, lessee)
        for key, items in self._queues.items():
            yield from (PushEffect(key, item) for item in items)
        yield SealEffect(self.revision, list(self.owners))


class Effect(msgspec.Struct, frozen=True, array_like=True):
    """One record of the log."""

    def apply(self, to: Replica) -> int | bytes | None:
        """Apply the effect, and return the engine's result."""
        raise NotImplementedError


class SetEffect(Effect, frozen=True, tag=0):
    """A key was written; with an owner, leased."""

    key: bytes
    value: bytes
    owner: int | None = None

    def apply(self, to: Replica) -> None:
        if self.owner is not None:
            to.owners[self.owner] = None
        to.put(self.key, self.value, self.owner)


class SetManyEffect(Effect, frozen=True, tag=1):
    """Several keys were written atomically."""

    pairs: list[tuple[bytes, bytes]]

    def apply(self, to: Replica) -> None:
        to.put_all(self.pairs)


class AppendEffect(Effect, frozen=True, tag=2):
    """Bytes were appended to a value."""

    key: bytes
    value: bytes

    def apply(self, to: Replica) -> None:
        to.execute(ops.Append(0, self.key, self.value))


class DeleteEffect(Effect, frozen=True, tag=3):
    """A key was deleted."""

    key: bytes

    def apply(self, to: Replica) -> bool:
        return to.remove(self.key)


class DeletePrefixEffect(Effect, frozen=True, tag=4):
    """All keys and queues under a prefix were deleted."""

    prefix: bytes

    def apply(self, to: Replica) -> int:
        return int(to.execute(ops.DeletePrefix(0, self.prefix)))


class PushEffect(Effect, frozen=True, tag=5):
    """An item was appended to a queue."""

    key: bytes
    value: bytes

    def apply(self, to: Replica) -> None:
        to.push(self.key, self.value)


class PopEffect(Effect, frozen=True, tag=6):
    """The first item of a queue was popped."""

    key: bytes

    def apply(self, to: Replica) -> bytes | None:
        return to.pop(self.key)


class UnleaseEffect(Effect, frozen=True, tag=7):
    """A lease was released, if its owner still held the key."""

    key: bytes
    owner: int

    def apply(self, to: Replica) -> bool:
        return to.unlease(self.key, self.owner)


class ArriveEffect(Effect, frozen=True, tag=8):
    """A caller arrived at a barrier; `number` distinguishes the arrivals of an owner."""

    key: bytes
    size: int
    owner: int
    number: int

    def apply(self, to: Replica) -> None:
        waiter = to.arrive(self.key, self.size, self.owner, self.number)
        to.owners[self.owner] = None
        if waiter is not None:
            to.arrivals[self.owner, self.number] = waiter


class WithdrawEffect(Effect, frozen=True, tag=9):
    """An arrival was withdrawn."""

    owner: int
    number: int

    def apply(self, to: Replica) -> None:
        waiter = to.arrivals.pop((self.owner, self.number), None)
        if waiter is not None:
            to.drop(waiter)


class EndOwnerEffect(Effect, frozen=True, tag=10):
    """An owner is gone: its leased keys are deleted, its arrivals withdrawn."""

    owner: int

    def apply(self, to: Replica) -> None:
        to.owners.pop(self.owner, None)
        for ticket in [ticket for ticket in to.arrivals if ticket[0] == self.owner]:
            del to.arrivals[ticket]
        to.end(self.owner)


class SealEffect(Effect, frozen=True, tag=11):
    """The end of a snapshot: its revision and its owners."""

    revision: int
    owners: list[int]

    def apply(self, to: Replica) -> None:
        to.revision = self.revision
        to.owners = dict.fromkeys(self.owners)


_decoder = msgspec.msgpack.Decoder(
    SetEffect
    | SetManyEffect
    | AppendEffect
    | DeleteEffect
    | DeletePrefixEffect
    | PushEffect
    | PopEffect
    | UnleaseEffect
    | ArriveEffect
    | WithdrawEffect
    | EndOwnerEffect
    | SealEffect
)
_encoder = msgspec.msgpack.Encoder()


def encode(effect: Effect) -> bytes:
    """Encode an effect as a record."""
    return _encoder.encode(effect)


def decode(record: bytes) -> Effect:
    """Decode an effect; raise ValueError if the record is not one."""
    effect: Effect = _decoder.decode(record)
    return effect


def changes(old: Mapping[bytes, bytes], new: Mapping[bytes, bytes], revision: int) -> list[Event]:
    """Return the events that turn one content into the other, at most one for each key."""
    gone = [Event(revision, key, None) for key in old if key not in new]
    return gone + [Event(revision, key, value) for key, value in new.items() if old.get(key) != value]
