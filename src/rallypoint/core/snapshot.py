"""A state as a sequence of byte chunks, and back: `write(state)`, `read(chunks)`, `fold(chunks, records)`.

Rules
- A restored state goes on exactly as the original: the same entries bring the same answers, and the same snapshot, byte
  for byte. So every order that decides something later is written down (who waits first in a queue, which lease
  of a session ends first), and every order that decides nothing is written sorted: a live server has reads under
  way, which a replay has not, and both must write the same.
- Reads that wait are left out, for clients repeat them; so is everything that a clock or a connection gave.
- A chunk is about a megabyte at most, unless a single value or machine is longer: a large state is never in memory
  twice. So whatever there may be many of is a section: chunks of one kind, of as many rows as fit.
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
from rallypoint.core.call_waiter import CallWaiter
from rallypoint.core.engine import Engine
from rallypoint.core.key_index import KeyIndex
from rallypoint.core.machine import Call, Done, Machine, Refused
from rallypoint.core.objects import Objects
from rallypoint.core.ops import Commands
from rallypoint.core.records import Event, Packed, Push, Shared, Turn, Waiter, Want, Watch, pack
from rallypoint.core.session import Session
from rallypoint.core.state import MACHINES, Limits, Namespace, OtherVersion, State
from rallypoint.core.visitor import Visitor

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
    counters = (state.opened, state.last_namespace)
    yield _encode(("state", entries.VERSION, state.identity, state.limits, counters))
    for namespace in state.namespaces.values():
        yield from _write_namespace(namespace)
    shared: dict[int, int] = {}
    for session in state.sessions.values():
        yield from _write_session(session, shared)
    for _, visitor in sorted(state.visitors.items()):
        yield _encode(("visitor", visitor.serial, visitor.namespace))
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
    """Yield a section: chunks of a kind, each of as many rows as fit."""
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
        if answer.__class__ is Done and answer.answer.__class__ is Shared:
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
    """Yield what owners hold in an engine, and all orders in which they hold it."""
    owners = _by_serial(engine._held)
    held = ((owner.serial, *_handle(one)) for owner, mine in owners for one in mine if not _reads(one))
    yield from _chunks("held", namespace, held)
    for kind, lines in ("waiting", engine._waiting), ("turns", engine._turns), ("watches", engine._watches):
        in_order: Any = sorted(lines.items())
        yield from _chunks(kind, namespace, ((key, *ref) for key, line in in_order for ref in _refs(line)))
    gates = (
        (key, need, *ref) for key, gate in sorted(engine._gates.items()) for need in gate for ref in _refs(gate[need])
    )
    yield from _chunks("gates", namespace, gates)
    leases = ((owner.serial, key) for owner, keys in _by_serial(engine._leased) for key in keys)
    yield from _chunks("leases", namespace, leases)
    yield from _chunks("clearing", namespace, map(_deletion, engine.clearing))


def _by_serial(owners: Any) -> list[tuple[Any, Any]]:
    return sorted(owners.items(), key=lambda item: int(item[0].serial))


def _deletion(clearing: Any) -> tuple[int, int | None]:
    """Name a deletion under way: a request, or the end of a session."""
    return (clearing.serial, None) if not isinstance(clearing, Waiter) else _refs((clearing,))[0]


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
    yield from _chunks("away", namespace, ((session,) for session in sorted(objects.doubts._away)))
    doubts = ((*_place_key(held), *refusal) for held, refusal in objects.doubts._calls.items())
    yield from _chunks("doubts", namespace, doubts)


def _place_key(held: Any) -> tuple[str, bytes, str]:
    (machine, name), call_id = held
    return machine.kind, name, call_id


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


class Ended:
    """A session that has ended, and of whose leases some are still to be deleted."""

    def __init__(self, serial: int) -> None:
        self.serial = serial


class _Reader:
    """Makes a state of the chunks of a snapshot, in their order."""

    def __init__(self) -> None:
        self.state = State()
        self.ended = False
        self._bodies: list[Shared] = []
        self._handles: dict[tuple[int, int], Any] = {}
        self._ended: dict[int, Ended] = {}

    def _state(self, version: int, identity: bytes, limits: list[int], counters: list[int]) -> None:
        if version != entries.VERSION:
            raise OtherVersion(f"a snapshot of version {version}, and this is version {entries.VERSION}")
        self.state.identity = identity
        self.state.set_limits(Limits(*limits))
        self.state.opened, self.state.last_namespace = counters

    def _namespace(self, identity: int, name: str, scope: int, number: int | None, revision: int, size: int) -> None:
        namespace = self.state.add_namespace(Namespace(identity, name, scope, number))
        namespace.engine.revision, namespace.engine.size = revision, size

    def _values(self, namespace: int, pairs: list[tuple[bytes, bytes]]) -> None:
        self._engine(namespace)._values.update(pairs)

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
        self.state.sessions[serial].suspended.update((number, None) for (number,) in rows)

    def _taken(self, serial: int, rows: list[Any]) -> None:
        self.state.sessions[serial].taken.update((number, (key, item)) for number, key, item in rows)

    def _ttls(self, serial: int, rows: list[Any]) -> None:
        self.state.sessions[serial].ttls.update((key, (ttl_s, number)) for key, ttl_s, number in rows)

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

    def _pushes(self, serial: int, rows: list[Any]) -> None:
        for push, watch, *event in rows:
            self.state.sessions[serial].keep_push(Push(push, watch, Event(*event)))

    def _visitor(self, serial: int, namespace: int) -> None:
        self.state.visitors[serial] = Visitor(serial, namespace, self._engine(namespace))

    def _engine(self, namespace: int) -> Engine:
        return self.state.namespaces[namespace].engine

    def _held(self, namespace: int, rows: list[Any]) -> None:
        for serial, kind, number, *facts in rows:
            self._hold(self._engine(namespace), serial, kind, number, facts)

    def _waiting(self, namespace: int, rows: list[Any]) -> None:
        self._line_up(self._engine(namespace)._waiting, rows)

    def _turns(self, namespace: int, rows: list[Any]) -> None:
        self._line_up(self._engine(namespace)._turns, rows)

    def _watches(self, namespace: int, rows: list[Any]) -> None:
        for _, serial, number in rows:
            self._engine(namespace)._watches.add(self._handles[serial, number])

    def _gates(self, namespace: int, rows: list[Any]) -> None:
        for key, need, serial, number in rows:
            self._line_up(self._engine(namespace)._gates.setdefault(key, {}), [(need, serial, number)])

    def _line_up(self, lines: dict[Any, dict[Any, None]], rows: list[Any]) -> None:
        for key, serial, number in rows:
            lines.setdefault(key, {})[self._handles[serial, number]] = None

    def _leases(self, namespace: int, rows: list[Any]) -> None:
        engine = self._engine(namespace)
        for serial, key in rows:
            owner = self.state.owner(serial) or self._ended.setdefault(serial, Ended(serial))
            engine._lessee[key] = owner
            engine._leased.setdefault(owner, {})[key] = None

    def _clearing(self, namespace: int, rows: list[Any]) -> None:
        for serial, number in rows:
            ended = number is None  # and of its leases others may have deleted the last
            one: Any = self._ended.setdefault(serial, Ended(serial)) if ended else self._handles[serial, number]
            self._engine(namespace).clearing[one] = None

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
        self._objects(namespace)._machines[MACHINES[kind], name] = _machine_of[kind](state)

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
            self._objects(namespace).doubts.away(session)

    def _doubts(self, namespace: int, rows: list[Any]) -> None:
        for kind, name, call, *refusal in rows:
            self._objects(namespace).doubts._calls[(MACHINES[kind], name), call] = Refused(*refusal)

    def _end(self) -> None:
        for namespace in self.state.namespaces.values():
            engine = namespace.engine
            engine._index, engine._queue_index = KeyIndex(engine._values), KeyIndex(engine._queues)
        self.ended = True


_decode_call = msgspec.msgpack.Decoder(Call).decode
_decode_command = msgspec.msgpack.Decoder(Commands).decode
