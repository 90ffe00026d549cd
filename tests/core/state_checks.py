"""What must be true of a `State` at any moment, counted from scratch."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rallypoint.core.call_waiter import CallWaiter
from rallypoint.core.engine import ENTRY_BYTES, Engine
from rallypoint.core.machine import Done
from rallypoint.core.objects import Objects
from rallypoint.core.records import Shared, Turn, Waiter, Want, Watch
from rallypoint.core.session import PUSH_BYTES, Session
from rallypoint.core.state import Namespace, State
from rallypoint.core.visitor import Visitor

__all__ = ["check_state"]


def check_state(state: State) -> None:
    """Check all that a state keeps twice, counts as it goes, or must not keep."""
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
    for serial, visitor in state.visitors.items():
        assert visitor.serial == serial and visitor.holds and visitor.namespace in state.namespaces
    check_budget(state)


def check_engine(namespace: Namespace) -> None:
    engine = namespace.engine
    assert not engine.outbox
    held = held_in(engine)
    waiters = [one for one in held if isinstance(one, Waiter)]
    size = (
        sum(len(key) + len(value) + ENTRY_BYTES for key, value in engine._values.items())
        + sum(len(key) + len(item) + ENTRY_BYTES for key, queue in engine._queues.items() for item in queue)
        + sum(len(one.prefix) + ENTRY_BYTES for one in held if isinstance(one, Watch))
        + sum(one.size + ENTRY_BYTES * len(one.keys) for one in waiters if not one.reads)
        + sum(one.size for calls in namespace.objects._calls.values() for one in calls.values())
        + sum(late.size for late in namespace.objects.late.values())
    )
    assert engine.size == size, f"{engine.size} bytes are counted, and it has {size}"
    assert engine.parked == sum(one.size + ENTRY_BYTES * len(one.keys) for one in waiters if one.reads)
    shelves: list[dict[Any, Any]] = [engine._queues, engine._waiting, engine._gates, *engine._gates.values()]
    shelves += [engine._turns, engine._watches, engine._leased, engine._held]
    assert all(entry for shelf in shelves for entry in shelf.values()), "something empty is kept"
    assert engine._index.keys(b"") == sorted(engine._values)
    assert engine._queue_index.keys(b"") == sorted(engine._queues)
    assert engine._lessee == {key: owner for owner, keys in engine._leased.items() for key in keys}
    assert set(engine._lessee) <= set(engine._values)
    check_registered(engine, held)


def held_in(engine: Engine) -> list[Any]:
    return [one for mine in engine._held.values() for one in mine]


def check_registered(engine: Engine, held: list[Any]) -> None:
    """Check that all that is held is where it is looked for, and nothing else is."""
    waiters = [one for one in held if isinstance(one, Waiter)]
    in_line = {(key, waiter) for key, line in engine._waiting.items() for waiter in line}
    elsewhere = (Want.COUNT, Want.CLEARED)
    assert in_line == {(one.key, one) for one in waiters if one.want not in elsewhere}
    gates = {(key, need, one) for key, gate in engine._gates.items() for need, line in gate.items() for one in line}
    assert gates == {(one.keys[0], one.need, one) for one in waiters if one.want is Want.COUNT}
    clearing = {one for one in waiters if one.want is Want.CLEARED}
    assert {one for one in engine.clearing if isinstance(one, Waiter)} == clearing
    turns = {(key, turn) for key, turns in engine._turns.items() for turn in turns}
    assert turns == {(one.key, one) for one in held if isinstance(one, Turn)}
    watches = {(prefix, watch) for prefix, line in engine._watches.items() for watch in line}
    assert watches == {(one.prefix, one) for one in held if isinstance(one, Watch)}
    assert engine._watches._of_length == Counter(map(len, engine._watches))
    assert engine._watches.lengths == sorted(engine._watches._of_length)
    seen = engine.statistics()
    assert (seen.waiters, seen.watches) == (len(waiters), len(watches))
    for waiter in waiters:
        check_waits(engine, waiter)


def check_waits(engine: Engine, waiter: Waiter) -> None:
    """Check that nobody waits for what is true."""
    key = waiter.key
    if waiter.want is Want.KEYS:
        assert not engine.exists(key)
    elif waiter.want is Want.VALUES:
        assert not engine.holds(key)
    elif waiter.want is Want.COUNT:
        assert engine._count_of(key) < waiter.need or not engine.holds(key)  # deleting wakes nobody
    elif waiter.want in (Want.ITEM, Want.TURN):
        assert len(engine._queues.get(key, ())) <= len(engine._turns.get(key, ()))
        assert waiter.want is Want.ITEM or not engine.holds(key)


def check_objects(objects: Objects) -> None:
    shelves: list[dict[Any, Any]] = [objects._calls, objects.late.by_session]
    assert all(entry for shelf in shelves for entry in shelf.values())
    assert all(late.calls for late in objects.late.values())
    calls = {held: waiter for theirs in objects._calls.values() for held, waiter in theirs.items()}
    for ((machine, name), call_id), waiter in calls.items():
        assert (call_id, name) == (waiter.call.id, waiter.name)
        assert isinstance(waiter.command, tuple(_commands(machine))) and waiter.owner.tag == waiter.call.session
        assert waiter.waits == (waiter.owner.waiting.get(waiter.number) is waiter), "each call waits once"
    assert all(calls[held].waits for held in objects.doubts._calls)
    latecomers = {held for calls in objects.late.by_session.values() for held in calls}
    assert latecomers == {(place, call) for place, late in objects.late.items() for call in late.calls}
    for place, machine in objects._machines.items():
        assert objects.timers.get(place) == machine.alarm
        assert not machine.idle or place in objects._idle or place in objects.late
    assert set(objects.timers) <= set(objects._machines) and set(objects._idle) <= set(objects._machines)
    assert objects._idle_bytes == sum(objects._idle.values())


def _commands(machine: type[Any]) -> list[type[Any]]:
    from rallypoint.core.ops import Commands

    return [kind for kind in Commands.__args__ if kind.machine is machine]


def check_holders(state: State, namespace: Namespace) -> None:
    """Check that those who hold something in a namespace are in the state, and know what they hold."""
    engine = namespace.engine
    for owner, mine in engine._held.items():
        if isinstance(owner, Session):
            assert state.sessions.get(owner.serial) is owner and owner.namespace == namespace.id
            known = [*owner.waiting.values(), *owner.watches.values(), *owner.turns.values()]
            known = [one for one in known if not isinstance(one, CallWaiter)]
            assert Counter(list(mine)) == Counter(known)
        else:
            assert isinstance(owner, Visitor) and set(mine) == {one for one in (owner.waiter, owner.turn) if one}
            assert not owner.holds or state.visitors.get(owner.serial) is owner
    ended = {owner for owner in engine.clearing if not isinstance(owner, Waiter)}
    assert all(state.sessions.get(owner.serial) is owner for owner in set(engine._leased) - ended)  # type: ignore[attr-defined]
    assert not any(owner.serial in state.sessions for owner in ended)  # type: ignore[attr-defined]
    tags = {session.tag for session in state.sessions.values() if session.namespace == namespace.id}
    away = {session.tag for session in state.sessions.values() if session.tag in tags and not session.attached}
    objects = namespace.objects
    assert set(objects._calls) <= tags and set(objects.late.by_session) <= tags
    assert set(objects.doubts._away) == away
    assert {tag for machine in objects._machines.values() for tag in machine.sessions()} <= tags, "the dead are in it"


def check_session(session: Session) -> None:
    for shelf in (session.waiting, session.watches, session.turns):
        for number, handle in shelf.items():
            assert handle.number == number and handle.owner is session
            if not isinstance(handle, CallWaiter):
                assert handle in session._engine._held[session]
            else:
                assert handle in session._objects._calls[session.tag].values()
    assert not session.suspended.keys() & {number for number, one in session.waiting.items() if not one.reads}
    assert set(session.taken) <= set(session.kept)
    numbers = [push.push for push in session.pushes]
    assert numbers == list(range(session.pushed - len(numbers) + 1, session.pushed + 1))


def check_budget(state: State) -> None:
    """Check what is counted for answers and pushes that are kept: for each session, and for all."""
    kept = 0
    holders: Counter[Shared] = Counter()
    for session in state.sessions.values():
        mine = sum(size for _, size in session.kept.values())
        mine += sum(PUSH_BYTES + len(one.event.key) + len(one.event.value or b"") for one in session.pushes)
        assert session._kept_bytes == mine
        kept += mine
        holders.update(
            answer.answer
            for answer, _ in session.kept.values()
            if isinstance(answer, Done) and isinstance(answer.answer, Shared)
        )
    assert all(shared.holders == count for shared, count in holders.items())
    assert state.budget.kept == kept - sum((count - 1) * len(shared.data) for shared, count in holders.items())
