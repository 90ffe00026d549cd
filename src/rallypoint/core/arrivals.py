"""Arrivals of several sessions at one shared object that came in one message, carried out in one go.

What the processes of a node ask at the same moment comes as one message of their relay, and is one entry of the log.
It comes to exactly what its requests would, one after the other: the same answers, and the same state. Mostly all of
them are new, and wait; then the machine takes them in together (`Machine.take_in`), which costs a third. Where that
cannot be, for one of them is repeated, looks again, is refused, or ends the round, they are carried out one by one.

When a round ends, all who waited for it get one answer, which is encoded, weighed and bounded once (`end_calls`).

`GATHERS` are the commands for which this pays: those by which many come to one object and wait.

Rejected: one wait that the members of a group share. Each of them may give up, be cut off, die, or go on by another
connection, alone: a group that loses its members one by one is more than the sum of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rallypoint.core import barrier, exchange
from rallypoint.core import session as session_module
from rallypoint.core.call_waiter import CallWaiter
from rallypoint.core.machine import Call
from rallypoint.core.objects import call_bytes
from rallypoint.core.ops import Act
from rallypoint.core.records import LATER, weigh
from rallypoint.core.session import Session

if TYPE_CHECKING:
    from rallypoint.core.state import Namespace, State

__all__ = ["GATHERS", "arrive", "arrive_if_there", "end_calls"]

GATHERS = frozenset((barrier.Arrive, exchange.Give))
"""The commands of arrivals."""

Requests = Sequence[tuple[Session, Act]]


def arrive(namespace: Namespace, requests: Requests) -> list[Any]:
    """Carry out arrivals at one object, in their order; return the answer of each, or `LATER`. Never raises."""
    engine, many = namespace.engine, len(requests)
    sizes = (many, many - 1)  # the last of them may end the round
    waiting = next((size for size in sizes if size > 1 and _all_wait(namespace, requests[:size])), 0)
    answers: list[Any] = [LATER] * waiting
    for session, op in requests[waiting:]:
        answers.append(session.execute(op))
        if engine.outbox and engine.relieve is not None:
            engine.relieve(engine)
    return answers


def arrive_if_there(state: State, sessions: Sequence[int], ops: Sequence[Act]) -> list[Any]:
    """Carry out arrivals of sessions of one namespace, by their serials; `LATER` for those that have ended."""
    found = [state.sessions.get(serial) for serial in sessions]
    requests = [(session, op) for session, op in zip(found, ops, strict=True) if session is not None]
    answers = iter(arrive(state.namespaces[requests[0][0].namespace], requests) if requests else ())
    return [LATER if session is None else next(answers) for session in found]


def _all_wait(namespace: Namespace, requests: Requests) -> bool:
    """Carry out arrivals that are all new, and all wait; return False, and change nothing, where that is not so."""
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
    if len(calls) < len(requests) or objects.late or engine.size + sum(sizes) > engine.max_bytes:
        return False
    machine = objects._machines.get(place) or kind()
    if not machine.take_in(calls, [op.command for _, op in requests]):
        return False
    objects._machines[place] = machine
    engine.revision += len(requests)
    engine.size += sum(sizes)
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
    """Give one answer to calls on a shared object of many sessions; return whose, by which number, and what to send."""
    ended: list[tuple[Session, int, Any]] = []
    session: Any = waiters[0].owner
    budget = session._budget
    if answer.__class__ in session_module.LONG:
        answer = session.bounded(answer, None, waiters[0].keys[0])
    size = weigh(answer)
    kept = (answer, size)
    for waiter in waiters:
        session, number = waiter.owner, waiter.number
        if session.waiting.pop(number, None) is None:  # dropped
            continue
        session.kept[number] = kept
        session._kept_bytes += size
        budget.hold(answer, size)
        if budget.kept > budget.limit or len(session.kept) > session_module.MAX_KEPT:
            session.late = True
        ended.append((session, number, answer))
    return ended
