"""Arrivals of several sessions at one shared object that came in one message, carried out in one go.

What the processes of a node ask at the same moment comes as one message of their relay, and is one entry of the log.
It comes to exactly what its requests would, one after the other: the same answers, and the same state. Mostly all of
them are new, and wait; then the machine takes them in together (`Machine.take_in`), which costs a third. Where that
cannot be, for one of them is repeated, looks again, is refused, or ends the round, they are carried out one by one.

`GATHERS` are the commands for which this pays: those by which many come to one object and wait.

Rejected: one wait that the members of a group share. Each of them may give up, be cut off, die, or go on by another
connection, alone: a group that loses its members one by one is more than the sum of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rallypoint.core import barrier, exchange
from rallypoint.core.machine import Call
from rallypoint.core.objects import call_bytes
from rallypoint.core.ops import Act
from rallypoint.core.records import LATER, CallWaiter

if TYPE_CHECKING:
    from rallypoint.core.session import Session
    from rallypoint.core.state import Namespace

__all__ = ["GATHERS", "arrive"]

GATHERS = frozenset((barrier.Arrive, exchange.Give))
"""The commands of arrivals."""

Requests = Sequence[tuple["Session", Act]]


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
    if len(calls) < len(requests) or objects._late or engine.size + sum(sizes) > engine.max_bytes:
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
