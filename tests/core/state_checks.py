"""Invariants of a `State`, counted from scratch."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rallypoint.core.calls.call_waiter import CallWaiter, object_bytes
from rallypoint.core.connection_owner import ConnectionOwner
from rallypoint.core.costs import (
    ITEM_BYTES,
    KEPT_BYTES,
    KEY_BYTES,
    LEASE_BYTES,
    PUSH_BYTES,
    QUEUE_BYTES,
    WAIT_BYTES,
    WATCH_BYTES,
)
from rallypoint.core.ended_waits import Released
from rallypoint.core.engine import Engine
from rallypoint.core.machines.machine import Done
from rallypoint.core.machines.work_queue import WorkQueueMachine
from rallypoint.core.objects import Objects
from rallypoint.core.records import SharedAnswer, Turn, Waiter, WaitKind, WatchHandle
from rallypoint.core.session import Session
from rallypoint.core.state import Namespace, State

__all__ = ["check_state"]


def check_state(state: State) -> None:
    """Check everything that a state keeps twice, counts incrementally, or must not keep."""
    assert not state.outputs
    assert state.sessions_by_id == {one.id: one for one in state.sessions.values()}
    assert list(state.sessions) == sorted(state.sessions) and max(state.sessions, default=0) <= state.opened
    assert list(state.namespaces) == sorted(state.namespaces) and max(state.namespaces) <= state.last_namespace
    for namespace in state.namespaces.values():
        check_engine(namespace)
        check_objects(namespace.objects)
        check_holders(state, namespace)
    for session in state.sessions.values():
        check_session(session)
    for serial, connection_owner in state.connection_owners.items():
        assert (
            connection_owner.serial == serial
            and connection_owner.holds
            and connection_owner.namespace in state.namespaces
        )
    check_budget(state)


def check_engine(namespace: Namespace) -> None:
    engine = namespace.engine
    assert not engine.outbox
    held = held_in(engine)
    waiters = [one for one in held if isinstance(one, Waiter)]
    objects = namespace.objects
    size = (
        sum(len(key) + len(value) + KEY_BYTES for key, value in engine._values.items())
        + LEASE_BYTES * len(engine._lease_owner)
        + sum(len(key) + QUEUE_BYTES for key in engine._queues)
        + sum(len(item) + ITEM_BYTES for queue in engine._queues.values() for item in queue)
        + sum(len(one.prefix) + WATCH_BYTES for one in held if isinstance(one, WatchHandle))
        + sum(len(one.key) + WAIT_BYTES for one in held if isinstance(one, Turn))
        + sum(one.cost for one in waiters if not one.reads)
        + sum(one.size for calls in objects._calls.values() for one in calls.values())
        + sum(late.size for late in objects.late.values())
        + sum(object_bytes(name) for _, name in objects.machines)
        + sum(objects._idle.values())
        + sum(work_bytes(machine) for machine in objects.machines.values() if isinstance(machine, WorkQueueMachine))
    )
    assert engine.size == size, f"{engine.size} bytes counted, {size} held"
    tables: list[dict[Any, Any]] = [engine._queues, engine._waiting, engine._barriers, *engine._barriers.values()]
    tables += [engine._turns, engine._watches, engine._leased, engine._held, engine._reading, engine._reads]
    assert all(entry for table in tables for entry in table.values()), "an empty entry is kept"
    assert engine._index.keys(b"") == sorted(engine._values)
    assert engine._queue_index.keys(b"") == sorted(engine._queues)
    assert engine._lease_owner == {key: owner for owner, keys in engine._leased.items() for key in keys}
    assert set(engine._lease_owner) <= set(engine._values)
    check_registered(engine, held)


def work_bytes(machine: WorkQueueMachine) -> int:
    items = [*machine.ready.values(), *machine.dead.values(), *(taken.item for taken in machine.taken.values())]
    assert len(items) + machine.done <= machine.made and not (machine.ready and machine.waiting)
    assert set(machine.ready) == set(range(machine.head, machine.head + len(machine.ready)))
    assert all(item.deliveries <= item.limit for item in items)
    return sum(item.cost for item in items)


def held_in(engine: Engine) -> list[Any]:
    return [one for table in (engine._held, engine._reading) for mine in table.values() for one in mine]


def check_registered(engine: Engine, held: list[Any]) -> None:
    """Check that the engine's indexes contain everything that is held, and nothing else."""
    every = [one for one in held if isinstance(one, Waiter)]
    waiters = [one for one in every if engine._is_registered(one)]
    over = {one for job in engine.clearing if isinstance(job, Released) for one in job.waiters}
    assert all(one in over for one in every if not (one.reads or one in waiters))
    lines = (engine._waiting, engine._reads)
    in_line = {(key, waiter) for table in lines for key, line in table.items() for waiter in line}
    elsewhere = (WaitKind.COUNT, WaitKind.CLEARED)
    assert in_line == {(one.key, one) for one in waiters if one.want not in elsewhere}
    gates = {(key, need, one) for key, gate in engine._barriers.items() for need, line in gate.items() for one in line}
    assert gates == {(one.keys[0], one.need, one) for one in waiters if one.want is WaitKind.COUNT}
    clearing = {one for one in waiters if one.want is WaitKind.CLEARED}
    assert {one for one in engine.clearing if isinstance(one, Waiter)} == clearing
    turns = {(key, turn) for key, turns in engine._turns.items() for turn in turns}
    assert turns == {(one.key, one) for one in held if isinstance(one, Turn)}
    watches = {(prefix, watch) for prefix, line in engine._watches.items() for watch in line}
    assert watches == {(one.prefix, one) for one in held if isinstance(one, WatchHandle)}
    assert engine._watches._of_length == Counter(map(len, engine._watches))
    assert engine._watches.lengths == sorted(engine._watches._of_length)
    seen = engine.statistics()
    assert (seen.waiters, seen.watches) == (len(every), len(watches))
    for waiter in waiters:
        check_waits(engine, waiter)


def check_waits(engine: Engine, waiter: Waiter) -> None:
    """Check that no waiter's condition holds."""
    key = waiter.key
    if waiter.want is WaitKind.KEYS:
        assert not engine.exists(key)
    elif waiter.want is WaitKind.VALUES:
        assert not engine.holds(key)
    elif waiter.want is WaitKind.COUNT:
        assert engine._count_of(key) < waiter.need or not engine.holds(key)  # deleting wakes nobody
    elif waiter.want in (WaitKind.ITEM, WaitKind.TURN):
        assert len(engine._queues.get(key, ())) <= len(engine._turns.get(key, ()))
        assert waiter.want is WaitKind.ITEM or not engine.holds(key)


def check_objects(objects: Objects) -> None:
    tables: list[dict[Any, Any]] = [objects._calls, objects.late.by_session]
    assert all(entry for table in tables for entry in table.values())
    assert all(late.calls for late in objects.late.values())
    calls = {held: waiter for theirs in objects._calls.values() for held, waiter in theirs.items()}
    for ((kind, name), call_id), waiter in calls.items():
        assert (call_id, name) == (waiter.call.id, waiter.name)
        assert isinstance(waiter.command, tuple(_commands(kind))) and waiter.owner.tag == waiter.call.session
        assert waiter.waits == (waiter.owner.waiting.get(waiter.number) is waiter), "each call waits once"
    assert all(calls[held].waits for held in objects.contested._calls)
    latecomers = {held for calls in objects.late.by_session.values() for held in calls}
    assert latecomers == {(place, call) for place, late in objects.late.items() for call in late.calls}
    for place, machine in objects.machines.items():
        assert objects.timers.get(place) == machine.timer
        assert not machine.idle or place in objects._idle or place in objects.late
    assert set(objects.timers) <= set(objects.machines) and set(objects._idle) <= set(objects.machines)
    assert objects._idle_bytes == sum(objects._idle.values())


def _commands(machine: type[Any]) -> list[type[Any]]:
    from rallypoint.core.ops import Commands

    return [kind for kind in Commands.__args__ if kind.machine is machine]


def check_holders(state: State, namespace: Namespace) -> None:
    """Check that the owners of everything in a namespace are in the state, and know what they hold."""
    engine = namespace.engine
    for owner in dict.fromkeys([*engine._held, *engine._reading]):
        mine = [*engine._held.get(owner, ()), *engine._reading.get(owner, ())]
        if isinstance(owner, Session):
            assert state.sessions.get(owner.serial) is owner and owner.namespace == namespace.id
            known = [*owner.waiting.values(), *owner.watches.values(), *owner.turns.values()]
            known = [one for one in known if not isinstance(one, CallWaiter)]
            assert Counter(list(mine)) == Counter(known)
        else:
            assert isinstance(owner, ConnectionOwner) and set(mine) == {
                one for one in (owner.waiter, owner.turn) if one
            }
            assert not owner.holds or state.connection_owners.get(owner.serial) is owner
    ended = {owner for owner in engine.clearing if not isinstance(owner, Waiter)}
    assert all(state.sessions.get(owner.serial) is owner for owner in set(engine._leased) - ended)  # type: ignore[attr-defined]
    assert not any(owner.serial in state.sessions for owner in ended)  # type: ignore[attr-defined]
    tags = {session.tag for session in state.sessions.values() if session.namespace == namespace.id}
    away = {session.tag for session in state.sessions.values() if session.tag in tags and not session.attached}
    objects = namespace.objects
    assert set(objects._calls) <= tags and set(objects.late.by_session) <= tags
    assert set(objects.contested._detached) == away
    assert {tag for machine in objects.machines.values() for tag in machine.sessions()} <= tags, (
        "a machine has ended sessions"
    )


def check_session(session: Session) -> None:
    for handles in (session.waiting, session.watches, session.turns):
        for number, handle in handles.items():
            assert handle.number == number and handle.owner is session
            if not isinstance(handle, CallWaiter):
                assert handle in held_in(session._engine)
            else:
                assert handle in session._objects._calls[session.tag].values()
    assert not session.suspended.keys() & {number for number, one in session.waiting.items() if not one.reads}
    assert set(session.taken) <= set(session.kept)
    numbers = [push.push for push in session.pushes]
    assert numbers == list(range(session.pushed - len(numbers) + 1, session.pushed + 1))


def check_budget(state: State) -> None:
    """Check the byte counts: of the whole state, of its waiting reads, and of kept answers and pushes."""
    engines = [namespace.engine for namespace in state.namespaces.values()]
    assert state.memory.size == sum(engine.size for engine in engines)
    reads = [one for engine in engines for one in held_in(engine) if isinstance(one, Waiter) and one.reads]
    assert state.memory.parked == sum(engine.parked for engine in engines) == sum(one.cost for one in reads)
    kept = 0
    holders: Counter[SharedAnswer] = Counter()
    for session in state.sessions.values():
        mine = sum(size for _, size in session.kept.values())
        mine += KEPT_BYTES * len(session.suspended)
        mine += sum(PUSH_BYTES + len(one.event.key) + len(one.event.value or b"") for one in session.pushes)
        assert session._kept_bytes == mine
        kept += mine
        holders.update(
            answer.answer
            for answer, _ in session.kept.values()
            if isinstance(answer, Done) and isinstance(answer.answer, SharedAnswer)
        )
    assert all(shared.holders == count for shared, count in holders.items())
    assert state.memory.kept == kept - sum((count - 1) * len(shared.data) for shared, count in holders.items())
