"""A state as a sequence of byte chunks, and back: `write(state)`, `read(chunks)`, `fold(chunks, records)`.

Rules
- A restored state goes on exactly as the original: the same entries bring the same answers, and the same snapshot, byte
  for byte. So every order that decides something later is written down (who waits first in a queue, which lease
  of a session ends first), and every order that decides nothing is written sorted: a live server has reads under
  way, which a replay has not, and both must write the same.
- Reads that wait are left out, for clients repeat them; so is everything that a clock or a connection gave.
- A chunk is about a megabyte at most, unless a single value is longer: a large state is never in memory twice.
- Sizes are written, not counted anew: what an answer is counted with may depend on how it was made.

Rejected: a snapshot as the entries that would make the state. Turns, half-done deletions and the numbers of shared
objects have histories of their own, which no few entries can tell.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from rallypoint.core import entries
from rallypoint.core.engine import Engine
from rallypoint.core.key_index import KeyIndex
from rallypoint.core.machine import Call, Done, Machine, Refused
from rallypoint.core.objects import Objects, Pending
from rallypoint.core.ops import Commands
from rallypoint.core.records import Event, Packed, Push, Shared, Turn, Waiter, Want, Watch, pack
from rallypoint.core.session import Session, Visitor
from rallypoint.core.state import MACHINES, Limits, Namespace, OtherVersion, State

__all__ = ["CHUNK_BYTES", "fold", "read", "write"]

CHUNK_BYTES = 1024 * 1024
"""About how large a chunk is."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode
_machine_of: dict[str, Callable[[bytes], Machine]] = {
    kind: msgspec.msgpack.Decoder(machine).decode for kind, machine in MACHINES.items()
}


def fold(chunks: Iterable[bytes] | None, records: Iterable[bytes]) -> Iterator[bytes]:
    """Return the snapshot of what records make of a snapshot (None: of nothing)."""
    state = State() if chunks is None else read(chunks)
    for record in records:
        state.apply(entries.decode(record))
        state.outputs.clear()
    return write(state)


# Writing


def write(state: State) -> Iterator[bytes]:
    """Yield a state, chunk by chunk."""
    limits = state.limits
    yield _encode(
        (
            "state",
            entries.VERSION,
            state.identity,
            (limits.max_bytes, limits.max_answer_bytes, limits.max_kept_bytes, limits.max_sessions),
            (state.opened, state.last_namespace),
        )
    )
    for namespace in state.namespaces.values():
        yield from _write_namespace(namespace)
    shared: dict[int, int] = {}
    for session in state.sessions.values():
        yield from _write_session(session, shared)
    for _, visitor in sorted(state.visitors.items()):
        yield _encode(("visitor", visitor.serial, visitor.namespace))
    for namespace in state.namespaces.values():
        yield _encode(("held", namespace.id, *_held(namespace.engine)))
        yield from _write_objects(namespace.id, namespace.objects)
    yield _encode(("end",))


def _write_namespace(namespace: Namespace) -> Iterator[bytes]:
    engine = namespace.engine
    head = (namespace.id, namespace.name, namespace.scope, namespace.number, namespace.port)
    yield _encode(("namespace", *head, engine.revision, engine.size))
    values, queues = engine._values, engine._queues
    pairs = ((key, values[key]) for key in engine._index.keys(b""))
    yield from _chunks("values", namespace.id, pairs, lambda pair: len(pair[0]) + len(pair[1]))
    items = ((key, item) for key in engine._queue_index.keys(b"") for item in queues[key])
    yield from _chunks("items", namespace.id, items, lambda pair: len(pair[0]) + len(pair[1]))


def _chunks(kind: str, owner: int, parts: Iterable[Any], size_of: Callable[[Any], int]) -> Iterator[bytes]:
    """Yield chunks of a kind, each of as many parts as fit."""
    chunk: list[Any] = []
    size = 0
    for part in parts:
        chunk.append(part)
        size += size_of(part) + 16
        if size >= CHUNK_BYTES:
            yield _encode((kind, owner, chunk))
            chunk, size = [], 0
    if chunk:
        yield _encode((kind, owner, chunk))


def _write_session(session: Session, shared: dict[int, int]) -> Iterator[bytes]:
    yield _encode(
        (
            "session",
            session.serial,
            session.id,
            session.name,
            session.namespace,
            session.former,
            (session.attached, session.restarts, session.over, session.late),
            (session.highest, session.pushed),
            list(session.suspended),
            [(number, *taken) for number, taken in session.taken.items()],
            list(session.ttls.items()),
        )
    )
    for number, (answer, size) in session.kept.items():
        if answer.__class__ is Done and answer.answer.__class__ is Shared:
            body = answer.answer
            if id(body) not in shared:
                shared[id(body)] = len(shared)
                yield _encode(("shared", shared[id(body)], body.data))
            yield _encode(("kept shared", session.serial, number, size, shared[id(body)]))
        else:
            yield _encode(("kept", session.serial, number, size, pack(answer)))
    for push in session.pushes:
        yield _encode(("push", session.serial, push.push, push.watch, push.event))


def _held(engine: Engine) -> tuple[Any, ...]:
    """Return what owners hold in an engine, and all orders in which they hold it."""
    holding = sorted((owner.serial, handles) for owner, handles in engine._held.items())  # type: ignore[attr-defined]
    held = [(serial, [_handle(one) for one in handles if not _reads(one)]) for serial, handles in holding]
    return (
        [(serial, handles) for serial, handles in held if handles],
        [(key, line) for key, waiters in sorted(engine._waiting.items()) if (line := _refs(waiters))],
        [(key, need, _refs(waiters)) for key, gate in sorted(engine._gates.items()) for need, waiters in gate.items()],
        [(key, _refs(turns)) for key, turns in sorted(engine._turns.items())],
        [(prefix, _refs(watches)) for prefix, watches in sorted(engine._watches.items())],
        _refs(engine.clearing),
        sorted((owner.serial, list(keys)) for owner, keys in engine._leased.items()),  # type: ignore[attr-defined]
    )


def _reads(handle: Waiter | Watch | Turn) -> bool:
    return isinstance(handle, Waiter) and handle.reads


def _refs(handles: Iterable[Any]) -> list[tuple[int, int]]:
    return [(handle.owner.serial, handle.number) for handle in handles if not _reads(handle)]


def _handle(handle: Waiter | Watch | Turn) -> tuple[Any, ...]:
    if isinstance(handle, Watch):
        return ("watch", handle.number, handle.prefix)
    if isinstance(handle, Turn):
        return ("turn", handle.number, handle.key)
    return (handle.want.name, handle.number, handle.keys[0], handle.need, handle.arrived, handle.done)


def _write_objects(namespace: int, objects: Objects) -> Iterator[bytes]:
    for (machine, name), state in sorted(objects._machines.items(), key=lambda item: (item[0][0].kind, item[0][1])):
        yield _encode(("machine", namespace, machine.kind, name, _encode(state)))
    for ((machine, name), call_id), pending in sorted(objects._pending.items(), key=lambda item: _place_key(item[0])):
        waiter: Any = pending.waiter
        parts = (waiter.owner.serial, waiter.number, _encode(pending.call), _encode(pending.command))
        yield _encode(("pending", namespace, machine.kind, name, call_id, *parts))
    yield _encode(
        (
            "objects",
            namespace,
            [
                (session, [(*_held_ref(held), size) for held, size in held.items()])
                for session, held in _by(objects._held)
            ],
            [
                (place[0].kind, place[1], sorted(late.calls), late.round, late.size)
                for place, late in sorted(objects._late.items(), key=lambda item: (item[0][0].kind, item[0][1]))
            ],
            [(session, [_held_ref(held) for held in calls]) for session, calls in _by(objects._latecomers)],
            [(place[0].kind, place[1], size) for place, size in objects._idle.items()],
            sorted((place[0].kind, place[1], *timer) for place, timer in objects.timers.items()),
            sorted(objects.doubts._away),
            [(*_held_ref(held), *refusal) for held, refusal in objects.doubts._calls.items()],
        )
    )


def _by(sessions: dict[str, Any]) -> list[tuple[str, Any]]:
    return sorted(sessions.items())


def _place_key(held: Any) -> tuple[str, bytes, str]:
    (machine, name), call_id = held
    return machine.kind, name, call_id


def _held_ref(held: Any) -> tuple[str, bytes, str]:
    return _place_key(held)


# Reading


def read(chunks: Iterable[bytes]) -> State:
    """Return the state that chunks describe; raises OtherVersion, or ValueError where they are no whole snapshot."""
    reader = _Reader()
    for chunk in chunks:
        kind, *facts = _decode(chunk)
        getattr(reader, f"_{kind.replace(' ', '_')}")(*facts)
    if not reader.ended:
        raise ValueError("the snapshot has no end")
    return reader.state


class _Reader:
    """Makes a state of the chunks of a snapshot, in their order."""

    def __init__(self) -> None:
        self.state = State()
        self.ended = False
        self._bodies: list[Shared] = []
        self._handles: dict[tuple[int, int], Any] = {}
        self._visitors: dict[int, Visitor] = {}

    def _state(self, version: int, identity: bytes, limits: list[int], counters: list[int]) -> None:
        if version != entries.VERSION:
            raise OtherVersion(f"a snapshot of version {version}, and this is version {entries.VERSION}")
        self.state.identity = identity
        self.state.set_limits(Limits(*limits))
        self.state.opened, self.state.last_namespace = counters

    def _namespace(
        self, identity: int, name: str, scope: int, number: int | None, port: int, revision: int, size: int
    ) -> None:
        namespace = self.state.add_namespace(Namespace(identity, name, scope, number, port))
        namespace.engine.revision, namespace.engine.size = revision, size

    def _values(self, namespace: int, pairs: list[tuple[bytes, bytes]]) -> None:
        self.state.namespaces[namespace].engine._values.update(pairs)

    def _items(self, namespace: int, items: list[tuple[bytes, bytes]]) -> None:
        queues = self.state.namespaces[namespace].engine._queues
        for key, item in items:
            queues.setdefault(key, deque()).append(item)

    def _session(
        self,
        serial: int,
        identity: bytes,
        name: str,
        namespace: int,
        former: list[str],
        flags: list[Any],
        counters: list[int],
        suspended: list[int],
        taken: list[Any],
        ttls: list[Any],
    ) -> None:
        session = self.state.new_session(identity, serial, name, self.state.namespaces[namespace])
        session.former = tuple(former)
        session.attached, session.restarts, session.over, session.late = flags
        session.highest, session.pushed = counters
        session.suspended = dict.fromkeys(suspended)
        session.taken = {number: (key, item) for number, key, item in taken}
        session.ttls = dict(ttls)

    def _shared(self, index: int, data: bytes) -> None:
        self._bodies.append(Shared(data))

    def _kept_shared(self, serial: int, number: int, size: int, index: int) -> None:
        self._keep(serial, number, size, Done(self._bodies[index]))

    def _kept(self, serial: int, number: int, size: int, packed: list[Any]) -> None:
        self._keep(serial, number, size, Packed(*packed))

    def _keep(self, serial: int, number: int, size: int, answer: Any) -> None:
        session = self.state.sessions[serial]
        late = session.late
        session.keep(number, answer, size)
        session.late = late

    def _push(self, serial: int, push: int, watch: int, event: list[Any]) -> None:
        self.state.sessions[serial].keep_push(Push(push, watch, Event(*event)))

    def _visitor(self, serial: int, namespace: int) -> None:
        engine = self.state.namespaces[namespace].engine
        self.state.visitors[serial] = Visitor(serial, namespace, engine)

    def _held(
        self,
        namespace: int,
        held: list[Any],
        lines: list[Any],
        gates: list[Any],
        turns: list[Any],
        watches: list[Any],
        clearing: list[Any],
        leases: list[Any],
    ) -> None:
        engine = self.state.namespaces[namespace].engine
        engine._index, engine._queue_index = KeyIndex(engine._values), KeyIndex(engine._queues)
        for serial, handles in held:
            for kind, number, *facts in handles:
                self._hold(engine, serial, kind, number, facts)
        for key, line in lines:
            engine._waiting[key] = self._all(line)
        for key, need, line in gates:
            engine._gates.setdefault(key, {})[need] = self._all(line)
        for key, line in turns:
            engine._turns[key] = self._all(line)
        for prefix, line in watches:
            engine._watches[prefix] = self._all(line)
            engine.count_watched(len(prefix))
        engine.clearing = self._all(clearing)
        for serial, keys in leases:
            owner = self.state.owner(serial)
            engine._leased[owner] = dict.fromkeys(keys)
            engine._lessee.update((key, owner) for key in keys)

    def _all(self, refs: list[Any]) -> dict[Any, None]:
        return {self._handles[serial, number]: None for serial, number in refs}

    def _hold(self, engine: Engine, serial: int, kind: str, number: int, facts: list[Any]) -> None:
        owner: Any = self.state.owner(serial)
        handle: Any
        if kind == "watch":
            handle = owner.watches[number] = Watch(facts[0], owner, number)
        elif kind == "turn":
            handle = Turn(facts[0], owner, number)
            if isinstance(owner, Visitor):
                owner.turn = handle
            else:
                owner.turns[number] = handle
        else:
            key, need, arrived, done = facts
            handle = Waiter(Want[kind], (key,), owner, number)
            handle.need, handle.arrived, handle.done = need, arrived, done
            if isinstance(owner, Visitor):
                owner.waiter = handle
            else:
                owner.waiting[number] = handle
        self._handles[serial, number] = handle
        engine._held.setdefault(owner, {})[handle] = None

    def _machine(self, namespace: int, kind: str, name: bytes, state: bytes) -> None:
        objects = self.state.namespaces[namespace].objects
        objects._machines[MACHINES[kind], name] = _machine_of[kind](state)

    def _pending(
        self,
        namespace: int,
        kind: str,
        name: bytes,
        call_id: str,
        serial: int,
        number: int,
        call: bytes,
        command: bytes,
    ) -> None:
        objects = self.state.namespaces[namespace].objects
        waiter = self._handles[serial, number]
        pending = Pending(_decode_call(call), _decode_command(command), waiter)
        objects._pending[(MACHINES[kind], name), call_id] = waiter.call = pending

    def _objects(
        self,
        namespace: int,
        held: list[Any],
        late: list[Any],
        latecomers: list[Any],
        idle: list[Any],
        timers: list[Any],
        away: list[str],
        doubts: list[Any],
    ) -> None:
        objects = self.state.namespaces[namespace].objects
        for session, calls in held:
            objects._held[session] = {((MACHINES[kind], name), call): size for kind, name, call, size in calls}
        for kind, name, calls, round_bytes, size in late:
            objects.restore_late((MACHINES[kind], name), calls, round_bytes, size)
        for session, calls in latecomers:
            objects._latecomers[session] = {((MACHINES[kind], name), call): None for kind, name, call in calls}
        for kind, name, size in idle:
            objects._idle[MACHINES[kind], name] = size
            objects._idle_bytes += size
        for kind, name, number, duration_s in timers:
            objects.timers[MACHINES[kind], name] = (number, duration_s)
        objects.doubts._away = dict.fromkeys(away)
        for kind, name, call, error, fields in doubts:
            objects.doubts._calls[(MACHINES[kind], name), call] = Refused(error, fields)

    def _end(self) -> None:
        self.ended = True


_decode_call = msgspec.msgpack.Decoder(Call).decode
_decode_command = msgspec.msgpack.Decoder(Commands).decode
