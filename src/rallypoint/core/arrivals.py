"""Arrivals of several sessions at one shared object, received in one message and executed together.

Simultaneous requests of a node's processes reach the server as one message from their relay, and become one log entry.
The result is exactly that of the single requests in order: the same answers, the same state. Usually all of them are
new and wait; the machine then admits them together (`Machine.admit_all`), at a third of the cost. If one of them is
repeated, rechecks its wait, is refused or ends the round, they run one by one.

When a round ends, all of its waiters get one answer, which is encoded, measured and bounded once (`end_calls`).

`GATHERS` lists the commands for which this pays: many members come to one object and wait.

Rejected: one wait shared by the members of a group. Each member may time out, lose its connection, die or reconnect
alone: a group that loses members one by one is more complex than its members.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rallypoint.core import session as session_module
from rallypoint.core.calls.call_waiter import CallWaiter, call_bytes, object_bytes
from rallypoint.core.costs import KEPT_BYTES
from rallypoint.core.machines import barrier, exchange
from rallypoint.core.machines.machine import Call
from rallypoint.core.ops import Act
from rallypoint.core.records import LATER, size_of
from rallypoint.core.session import Session

if TYPE_CHECKING:
    from rallypoint.core.state import Namespace, State

__all__ = ["GATHERS", "arrive", "arrive_if_there", "end_calls"]

GATHERS = frozenset((barrier.BarrierArrive, exchange.ExchangeGive))
"""The commands that are arrivals."""

Requests = Sequence[tuple[Session, Act]]


def arrive(namespace: Namespace, requests: Requests) -> list[Any]:
    """Execute arrivals at one object in order; return the answer of each, or `LATER`. Never raises."""
    engine, many = namespace.engine, len(requests)
    sizes = (many, many - 1)  # the last of them may end the round
    waiting = next((size for size in sizes if size > 1 and _all_wait(namespace, requests[:size])), 0)
    answers: list[Any] = [LATER] * waiting
    for session, op in requests[waiting:]:
        answers.append(session.execute(op))
        if engine.outbox and engine.on_pressure is not None:
            engine.on_pressure(engine)
    return answers


def arrive_if_there(state: State, sessions: Sequence[int], ops: Sequence[Act]) -> list[Any]:
    """Execute arrivals of sessions of one namespace, by serial; `LATER` for sessions that have ended."""
    found = [state.sessions.get(serial) for serial in sessions]
    requests = [(session, op) for session, op in zip(found, ops, strict=True) if session is not None]
    answers = iter(arrive(state.namespaces[requests[0][0].namespace], requests) if requests else ())
    return [LATER if session is None else next(answers) for session in found]


def _all_wait(namespace: Namespace, requests: Requests) -> bool:
    """Execute arrivals if all of them are new and wait; otherwise change nothing and return False."""
    objects, engine = namespace.objects, namespace.engine
    name, kind, table = requests[0][1].name, requests[0][1].command.machine, objects._calls
    place = (kind, name)
    calls: dict[str, Call] = {}
    for session, op in requests:
        tag, number = session.tag, op.number
        call_id = f"{tag}/{op.call}"
        if number <= session.highest or number in session.waiting or op.timeout_s <= 0:
            return False
        if tag in table and (place, call_id) in table[tag]:
            return False
        calls[call_id] = Call(op.member, tag, op.call, session.name, session.former)
    sizes = [call_bytes(name, op.member, op.command) for _, op in requests]
    grown = sum(sizes) + (0 if place in objects.machines else object_bytes(name))
    if len(calls) < len(requests) or objects.late or engine.memory.size + grown > engine.memory.limit:
        return False
    machine = objects.machines.get(place) or kind()
    if not machine.admit_all(calls, [op.command for _, op in requests]):
        return False
    objects.machines[place] = machine
    engine.revision += len(requests)
    engine.charge_held(grown)
    for (session, op), (call_id, call), size in zip(requests, calls.items(), sizes, strict=True):
        number = session.highest = op.number
        session.waiting[number] = waiter = CallWaiter(session, number, call, op.command, name, size)
        tag = session.tag
        if tag in table:
            table[tag][place, call_id] = waiter
        else:
            table[tag] = {(place, call_id): waiter}
    return True


def end_calls(waiters: list[CallWaiter], answer: Any) -> list[tuple[Session, int, Any]]:
    """Give one answer to calls of many sessions; return (session, request number, answer to send) for each."""
    ended: list[tuple[Session, int, Any]] = []
    session: Any = waiters[0].owner
    memory = session._memory
    if answer.__class__ in session_module.LONG:
        answer = session.bounded(answer, None, waiters[0].keys[0])
    size = KEPT_BYTES + size_of(answer)
    kept = (answer, size)
    for waiter in waiters:
        session, number = waiter.owner, waiter.number
        if session.waiting.pop(number, None) is None:  # dropped
            continue
        session.kept[number] = kept
        session._kept_bytes += size
        memory.hold(answer, size)
        if memory.kept > memory.reserve or len(session.kept) > session_module.MAX_KEPT:
            session.late = True
        ended.append((session, number, answer))
    return ended
