"""A state as a sequence of byte chunks, and back: `write(state)`, `read(chunks)`, `fold(chunks, records)`.

Rules
- A restored state continues exactly as the original: the same entries produce the same answers, and the same snapshot,
  byte for byte. So every order that has a later effect is written as it is (the waiters of a queue, the leases of a
  session), and every order without effect is written sorted: a live server has reads in progress, which a replay has
  not, and both must write the same bytes.
- Waiting reads are left out, because clients repeat them; so is everything that came from a clock or a connection.
- A chunk is at most about a megabyte, unless a single value or machine is longer: a large state is never in memory
  twice. So every large collection is a section: chunks of one kind, each with as many rows as fit.
- Sizes are written, not recomputed: the size charged for an answer may depend on how it was made.

Rejected: a snapshot as entries that recreate the state. Turns, half-done deletions and the numbers of shared objects
have histories of their own, which a few entries cannot express.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from rallypoint.core import entries
from rallypoint.core.calls.call_waiter import CallWaiter
from rallypoint.core.connection_owner import ConnectionOwner, EndedOwner
from rallypoint.core.ended_waits import Released
from rallypoint.core.engine import Engine
from rallypoint.core.index.key_index import KeyIndex
from rallypoint.core.long_value import LongValue
from rallypoint.core.machines.machine import Call, Done, Machine, Refused
from rallypoint.core.objects import Objects
from rallypoint.core.ops import Commands
from rallypoint.core.records import Event, Packed, PushedEvent, SharedAnswer, Turn, Waiter, WaitKind, WatchHandle, pack
from rallypoint.core.session import Session
from rallypoint.core.state import MACHINES, Namespace, OtherVersion, State, StateLimits

__all__ = ["CHUNK_BYTES", "fold", "read", "write"]

CHUNK_BYTES = 1024 * 1024
"""The approximate size of a chunk."""


def _join(value: Any) -> bytes:
    """Encode a value in parts as any other."""
    if not isinstance(value, LongValue):
        raise TypeError(f"cannot encode {type(value).__name__}")
    return bytes(value)


_encode = msgspec.msgpack.Encoder(enc_hook=_join).encode
_decode = msgspec.msgpack.Decoder().decode
_machine_of: dict[str, Callable[[bytes], Machine]] = {
    kind: msgspec.msgpack.Decoder(machine).decode for kind, machine in MACHINES.items()
}


def fold(chunks: Iterable[bytes] | None, records: Iterable[bytes]) -> Iterator[bytes]:
    """Return the snapshot that results from applying records to a snapshot (None: to an empty state)."""
    state = State() if chunks is None else read(chunks)
    for record in records:
        state.apply(entries.decode(record))
        state.outputs.clear()
    return write(state)


# Writing


def write(state: State) -> Iterator[bytes]:
    """Yield a state, chunk by chunk."""
    counters = (state.opened, state.last_namespace)
    yield _encode(("state", entries.VERSION, state.identity, state.limits, counters))
    for namespace in state.namespaces.values():
        yield from _write_namespace(namespace)
    shared: dict[int, int] = {}
    for session in state.sessions.values():
        yield from _write_session(session, shared)
    for _, connection in sorted(state.connection_owners.items()):
        yield _encode(("visitor", connection.serial, connection.namespace))
    for namespace in state.namespaces.values():
        yield from _write_held(namespace.id, namespace.engine)
        yield from _write_objects(namespace.id, namespace.objects)
    yield _encode(("end",))


def _write_namespace(namespace: Namespace) -> Iterator[bytes]:
    engine = namespace.engine
    head = (namespace.id, namespace.name, namespace.scope, namespace.number)
    yield _encode(("namespace", *head, engine.revision, engine.size))
    values, queues = engine._values, engine._queues
    pairs = ((key, values[key]) for key in engine._index.keys(b""))
    yield from _chunks("values", namespace.id, pairs, lambda pair: len(pair[0]) + len(pair[1]))
    items = ((key, item) for key in engine._queue_index.keys(b"") for item in queues[key])
    yield from _chunks("items", namespace.id, items, lambda pair: len(pair[0]) + len(pair[1]))


def _text_in(row: Iterable[Any]) -> int:
    return sum(len(part) for part in row if part.__class__ is bytes or part.__class__ is str)


def _chunks(kind: str, owner: int, rows: Iterable[Any], size_of: Callable[[Any], int] = _text_in) -> Iterator[bytes]:
    """Yield a section: chunks of one kind, each with as many rows as fit."""
    chunk: list[Any] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += size_of(row) + 16
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
        )
    )
    yield from _chunks("suspended", session.serial, ((number,) for number in session.suspended))
    yield from _chunks("taken", session.serial, ((number, *taken) for number, taken in session.taken.items()))
    yield from _chunks("ttls", session.serial, ((key, *ttl) for key, ttl in session.ttls.items()))
    for number, (answer, size) in session.kept.items():
        if answer.__class__ is Done and answer.answer.__class__ is SharedAnswer:
            body = answer.answer
            if id(body) not in shared:
                shared[id(body)] = len(shared)
                yield _encode(("shared", shared[id(body)], body.data))
            yield _encode(("kept shared", session.serial, number, size, shared[id(body)]))
        else:
            yield _encode(("kept", session.serial, number, size, pack(answer)))
    pushes = ((push.push, push.watch, *push.event) for push in session.pushes)
    yield from _chunks("pushes", session.serial, pushes)


def _write_held(namespace: int, engine: Engine) -> Iterator[bytes]:
    """Yield what owners hold in an engine, and every order in which they hold it."""
    owners = _by_serial(engine._held)
    held = ((owner.serial, *_handle(one)) for owner, mine in owners for one in mine if not _reads(one))
    yield from _chunks("held", namespace, held)
    for kind, lines in ("waiting", engine._waiting), ("turns", engine._turns), ("watches", engine._watches):
        in_order: Any = sorted(lines.items())
        yield from _chunks(kind, namespace, ((key, *ref) for key, line in in_order for ref in _refs(line)))
    gates = (
        (key, need, *ref)
        for key, gate in sorted(engine._barriers.items())
        for need in gate
        for ref in _refs(gate[need])
    )
    yield from _chunks("gates", namespace, gates)
    leases = ((owner.serial, key) for owner, keys in _by_serial(engine._leased) for key in keys)
    yield from _chunks("leases", namespace, leases)
    jobs = [job for job in engine.clearing if isinstance(job, Released)]
    released = ((at, *ref) for at, job in enumerate(jobs) for ref in _refs(_still_held(engine, job)))
    yield from _chunks("released", namespace, released)
    yield from _chunks("clearing", namespace, (_change(job, jobs) for job in engine.clearing))


def _by_serial(owners: Any) -> list[tuple[Any, Any]]:
    return sorted(owners.items(), key=lambda item: int(item[0].serial))


def _change(job: Any, released: list[Released]) -> tuple[int, int | None, bytes | None]:
    """Return the reference of a large change in progress: a request, the end of a session, or waits that are over."""
    if isinstance(job, Released):
        return 0, released.index(job), job.value
    return (job.serial, None, None) if not isinstance(job, Waiter) else (*_refs((job,))[0], None)


def _still_held(engine: Engine, released: Released) -> list[Waiter]:
    return [waiter for waiter in released.waiters if waiter in engine._held.get(waiter.owner, ())]


def _reads(handle: Waiter | WatchHandle | Turn) -> bool:
    return isinstance(handle, Waiter) and handle.reads


def _refs(handles: Iterable[Any]) -> list[tuple[int, int]]:
    return [(handle.owner.serial, handle.number) for handle in handles if not _reads(handle)]


def _handle(handle: Waiter | WatchHandle | Turn) -> tuple[Any, ...]:
    if isinstance(handle, WatchHandle):
        return ("watch", handle.number, handle.prefix)
    if isinstance(handle, Turn):
        return ("turn", handle.number, handle.key)
    return (handle.want.name, handle.number, handle.keys[0], handle.need, handle.arrived, handle.done)


def _write_objects(namespace: int, objects: Objects) -> Iterator[bytes]:
    for (machine, name), state in sorted(objects.machines.items(), key=lambda item: (item[0][0].kind, item[0][1])):
        small = msgspec.structs.replace(state, **{section: {} for section in machine.sections})
        yield _encode(("machine", namespace, machine.kind, name, _encode(small)))
        sections = ((section, getattr(state, section).items()) for section in machine.sections)
        items = ((machine.kind, name, part, _encode({key: row})) for part, rows in sections for key, row in rows)
        yield from _chunks("machine rows", namespace, items)
    calls = (
        (waiter.owner.serial, waiter.number, _encode(waiter.call), _encode(waiter.command), waiter.name, *rest)
        for _, theirs in sorted(objects._calls.items())
        for waiter in theirs.values()
        for rest in [(waiter.size, waiter.waits)]
    )
    yield from _chunks("calls", namespace, calls)
    late = sorted((place[0].kind, place[1], one.round, one.size) for place, one in objects.late.items())
    yield from _chunks("late", namespace, late)
    latecomers = sorted(objects.late.by_session.items())
    rows = ((session, *_place_key(held)) for session, calls in latecomers for held in calls)
    yield from _chunks("latecomers", namespace, rows)
    idle = ((place[0].kind, place[1], size) for place, size in objects._idle.items())
    yield from _chunks("idle", namespace, idle)
    timers = sorted((place[0].kind, place[1], *timer) for place, timer in objects.timers.items())
    yield from _chunks("timers", namespace, timers)
    yield from _chunks("away", namespace, ((session,) for session in sorted(objects.contested._detached)))
    doubts = ((*_place_key(held), *refusal) for held, refusal in objects.contested._calls.items())
    yield from _chunks("doubts", namespace, doubts)


def _place_key(held: Any) -> tuple[str, bytes, str]:
    (machine, name), call_id = held
    return machine.kind, name, call_id


# Reading


def read(chunks: Iterable[bytes]) -> State:
    """Return the state that chunks describe; raise OtherVersion, or ValueError if the snapshot is incomplete."""
    reader = _Reader()
    for chunk in chunks:
        kind, *facts = _decode(chunk)
        getattr(reader, f"_{kind.replace(' ', '_')}")(*facts)
    if not reader.ended:
        raise ValueError("incomplete snapshot: the end is missing")
    return reader.state


class _Reader:
    """Builds a state from the chunks of a snapshot, in order."""

    def __init__(self) -> None:
        self.state = State()
        self.ended = False
        self._bodies: list[SharedAnswer] = []
        self._handles: dict[tuple[int, int], Any] = {}
        self._ended: dict[int, EndedOwner] = {}
        self._over: dict[tuple[int, int], dict[Waiter, None]] = {}

    def _state(self, version: int, identity: bytes, limits: list[int], counters: list[int]) -> None:
        if version != entries.VERSION:
            raise OtherVersion(f"snapshot of version {version}; this server reads version {entries.VERSION}")
        self.state.identity = identity
        self.state.set_limits(StateLimits(*limits))
        self.state.opened, self.state.last_namespace = counters

    def _namespace(self, identity: int, name: str, scope: int, number: int | None, revision: int, size: int) -> None:
        namespace = self.state.add_namespace(Namespace(self.state.memory, identity, name, scope, number))
        namespace.engine.revision, namespace.engine.size = revision, size
        self.state.memory.size += size

    def _values(self, namespace: int, pairs: list[tuple[bytes, bytes]]) -> None:
        engine = self._engine(namespace)
        engine._values.update(pairs)
        for key, value in pairs:
            if len(value) > engine.long_bytes:
                engine.hold_long(key, LongValue(value))

    def _items(self, namespace: int, items: list[tuple[bytes, bytes]]) -> None:
        queues = self._engine(namespace)._queues
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
    ) -> None:
        session = self.state.new_session(identity, serial, name, self.state.namespaces[namespace])
        session.former = tuple(former)
        session.attached, session.restarts, session.over, session.late = flags
        session.highest, session.pushed = counters

    def _suspended(self, serial: int, rows: list[Any]) -> None:
        for (number,) in rows:
            self.state.sessions[serial].suspend(number)

    def _taken(self, serial: int, rows: list[Any]) -> None:
        self.state.sessions[serial].taken.update((number, (key, item)) for number, key, item in rows)

    def _ttls(self, serial: int, rows: list[Any]) -> None:
        self.state.sessions[serial].ttls.update((key, (ttl_s, number)) for key, ttl_s, number in rows)

    def _shared(self, index: int, data: bytes) -> None:
        self._bodies.append(SharedAnswer(data))

    def _kept_shared(self, serial: int, number: int, size: int, index: int) -> None:
        self._keep(serial, number, size, Done(self._bodies[index]))

    def _kept(self, serial: int, number: int, size: int, packed: list[Any]) -> None:
        self._keep(serial, number, size, Packed(*packed))

    def _keep(self, serial: int, number: int, size: int, answer: Any) -> None:
        session = self.state.sessions[serial]
        late = session.late
        session.keep(number, answer, size)
        session.late = late

    def _pushes(self, serial: int, rows: list[Any]) -> None:
        for push, watch, *event in rows:
            self.state.sessions[serial].keep_push(PushedEvent(push, watch, Event(*event)))

    def _visitor(self, serial: int, namespace: int) -> None:
        self.state.connection_owners[serial] = ConnectionOwner(serial, namespace, self._engine(namespace))

    def _engine(self, namespace: int) -> Engine:
        return self.state.namespaces[namespace].engine

    def _held(self, namespace: int, rows: list[Any]) -> None:
        for serial, kind, number, *facts in rows:
            self._hold(self._engine(namespace), serial, kind, number, facts)

    def _waiting(self, namespace: int, rows: list[Any]) -> None:
        engine = self._engine(namespace)
        self._line_up(engine._waiting, rows)
        for key, serial, number in rows:
            if self._handles[serial, number].want is WaitKind.ITEM:
                engine.item_lines[key] = None

    def _turns(self, namespace: int, rows: list[Any]) -> None:
        self._line_up(self._engine(namespace)._turns, rows)

    def _watches(self, namespace: int, rows: list[Any]) -> None:
        for _, serial, number in rows:
            self._engine(namespace)._watches.add(self._handles[serial, number])

    def _gates(self, namespace: int, rows: list[Any]) -> None:
        for key, need, serial, number in rows:
            self._line_up(self._engine(namespace)._barriers.setdefault(key, {}), [(need, serial, number)])

    def _line_up(self, lines: dict[Any, dict[Any, None]], rows: list[Any]) -> None:
        for key, serial, number in rows:
            lines.setdefault(key, {})[self._handles[serial, number]] = None

    def _leases(self, namespace: int, rows: list[Any]) -> None:
        engine = self._engine(namespace)
        for serial, key in rows:
            owner = self.state.owner(serial) or self._ended.setdefault(serial, EndedOwner(serial))
            engine._lease_owner[key] = owner
            engine._leased.setdefault(owner, {})[key] = None

    def _released(self, namespace: int, rows: list[Any]) -> None:
        for at, serial, number in rows:
            self._over.setdefault((namespace, at), {})[self._handles[serial, number]] = None

    def _clearing(self, namespace: int, rows: list[Any]) -> None:
        for serial, number, value in rows:
            one: Any
            if not serial:
                one = Released(self._over.get((namespace, number), {}), value)
            elif number is None:  # others may have deleted the last of its leases
                one = self._ended.setdefault(serial, EndedOwner(serial))
            else:
                one = self._handles[serial, number]
            self._engine(namespace).clearing[one] = None

    def _hold(self, engine: Engine, serial: int, kind: str, number: int, facts: list[Any]) -> None:
        owner: Any = self.state.owner(serial)
        handle: Any
        if kind == "watch":
            handle = owner.watches[number] = WatchHandle(facts[0], owner, number)
        elif kind == "turn":
            handle = Turn(facts[0], owner, number)
            if isinstance(owner, ConnectionOwner):
                owner.turn = handle
            else:
                owner.turns[number] = handle
        else:
            key, need, arrived, done = facts
            handle = Waiter(WaitKind[kind], (key,), owner, number)
            handle.need, handle.arrived, handle.done = need, arrived, done
            if isinstance(owner, ConnectionOwner):
                owner.waiter = handle
            else:
                owner.waiting[number] = handle
        self._handles[serial, number] = handle
        engine._held.setdefault(owner, {})[handle] = None

    def _machine(self, namespace: int, kind: str, name: bytes, state: bytes) -> None:
        self._objects(namespace).machines[MACHINES[kind], name] = _machine_of[kind](state)

    def _machine_rows(self, namespace: int, rows: list[Any]) -> None:
        for kind, name, section, row in rows:
            self._objects(namespace).machines[MACHINES[kind], name].restore(section, row)

    def _calls(self, namespace: int, rows: list[Any]) -> None:
        table = self._objects(namespace)._calls
        for serial, number, call_data, command_data, name, size, waits in rows:
            owner, call, command = self.state.sessions[serial], _decode_call(call_data), _decode_command(command_data)
            waiter = CallWaiter(owner, number, call, command, name, size, waits)
            table.setdefault(owner.tag, {})[(command.machine, name), call.id] = waiter
            if waits:
                owner.waiting[number] = waiter

    def _objects(self, namespace: int) -> Objects:
        return self.state.namespaces[namespace].objects

    def _late(self, namespace: int, rows: list[Any]) -> None:
        for kind, name, round_bytes, size in rows:
            self._objects(namespace).late.restore((MACHINES[kind], name), round_bytes, size)

    def _latecomers(self, namespace: int, rows: list[Any]) -> None:
        for session, kind, name, call in rows:
            self._objects(namespace).late.add(((MACHINES[kind], name), call), session)

    def _idle(self, namespace: int, rows: list[Any]) -> None:
        objects = self._objects(namespace)
        for kind, name, size in rows:
            objects._idle[MACHINES[kind], name] = size
            objects._idle_bytes += size

    def _timers(self, namespace: int, rows: list[Any]) -> None:
        for kind, name, number, duration_s in rows:
            self._objects(namespace).timers[MACHINES[kind], name] = (number, duration_s)

    def _away(self, namespace: int, rows: list[Any]) -> None:
        for (session,) in rows:
            self._objects(namespace).contested.session_detached(session)

    def _doubts(self, namespace: int, rows: list[Any]) -> None:
        for kind, name, call, *refusal in rows:
            self._objects(namespace).contested._calls[(MACHINES[kind], name), call] = Refused(*refusal)

    def _end(self) -> None:
        for namespace in self.state.namespaces.values():
            engine = namespace.engine
            engine._index, engine._queue_index = KeyIndex(engine._values), KeyIndex(engine._queues)
        self.ended = True


_decode_call = msgspec.msgpack.Decoder(Call).decode
_decode_command = msgspec.msgpack.Decoder(Commands).decode
