"""The state of a server: namespaces, the shared objects in them, and its clients' sessions. Pure and deterministic.

`apply(entry)` carries out one entry of the log and returns its answer; what it brings for others is in `outputs`. The
same entries in the same order make the same state, in any process: there is no clock, no chance and no iteration over a
set in core/, ids arrive in entries, and deadlines that have passed are entries. `core/snapshot.py` writes a state down;
restored, it goes on exactly as the original would have.

A namespace is an engine and its shared objects. Namespace 0 is the one that everybody sees. Each round of a run has one
of its own, because PyTorch's workers use their store without a prefix: the workers of another job, or of the round
before, would find each other's keys.

A host with a clock (the server) arms timers from what the state says (`Session.ttls`, `Objects.timers`, the operations'
own `timeout_s`) and submits entries when they are due. It may run reads and, where there is no log to wait for,
requests, on a session or visitor directly, if it calls `settle` after each: that is all that `apply` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from rallypoint.core import barrier, exchange, lock, rendezvous, roster
from rallypoint.core.arrivals import arrive_if_there, end_calls
from rallypoint.core.call_waiter import Woken
from rallypoint.core.engine import Engine
from rallypoint.core.entries import (
    VERSION,
    Arrivals,
    Attach,
    CloseNamespace,
    Detach,
    End,
    Entry,
    Fire,
    GoOn,
    Lapse,
    Open,
    OpenNamespace,
    Request,
    Start,
    TimeOut,
    Visit,
)
from rallypoint.core.machine import Machine
from rallypoint.core.objects import Objects
from rallypoint.core.records import LATER
from rallypoint.core.reply_budget import ReplyBudget
from rallypoint.core.session import Session
from rallypoint.core.visitor import Visitor

__all__ = ["MACHINES", "MAX_RESTARTS", "SLICE_KEYS", "UNKNOWN_SESSION", "Limits", "Namespace", "OtherVersion", "State"]

SLICE_KEYS = 1000
"""How many keys are deleted at a time: some milliseconds' worth."""

MAX_RESTARTS = 32
"""How many restarts of the server a session may miss in a row, so that a crash loop cannot keep the dead alive."""

MACHINES: dict[str, type[Machine]] = {
    machine.kind: machine
    for machine in (barrier.Barrier, exchange.Exchange, lock.Lock, roster.Roster, rendezvous.Rendezvous)
}
"""The kinds of shared objects, by name."""


UNKNOWN_SESSION = "unknown session: expired, or created by another server"
"""Why a client cannot resume."""


class OtherVersion(ValueError):
    """The log was written under another version of the semantics, and cannot be replayed by this one."""


class Namespace:
    """An engine, and the shared objects beside it."""

    __slots__ = ("engine", "id", "name", "number", "objects", "scope")

    def __init__(self, identity: int, name: str = "", scope: int = 0, number: int | None = None) -> None:
        self.id = identity
        self.name = name
        """The run that it belongs to."""

        self.scope = scope
        """The run's round: one of a later scope replaces it."""

        self.number = number
        """The round's number, as agents tell it to people; None where nobody said."""

        self.engine = Engine(SLICE_KEYS)
        self.objects = Objects(self.engine)


class Limits(NamedTuple):
    """What a state may hold, in bytes and in numbers."""

    max_bytes: int = 1 << 62
    """In each namespace: keys, values, and what waits."""

    max_answer_bytes: int = 1 << 62
    max_kept_bytes: int = 1 << 62
    """Answers and pushes that were not confirmed, of all sessions."""

    max_sessions: int = 1 << 62


class State:
    """Everything that one server holds for its clients."""

    def __init__(self) -> None:
        self.identity = b""
        self.limits = Limits()
        self.budget = ReplyBudget()
        self._outbox: list[Any] = []  # of all engines: it is empty between two entries
        self.namespaces: dict[int, Namespace] = {}
        self.sessions: dict[int, Session] = {}
        self.sessions_by_id: dict[bytes, Session] = {}
        self.visitors: dict[int, Visitor] = {}
        """Those of whom the state has something, by their serials."""

        self.opened = 0
        """How many sessions there have been."""

        self.last_namespace = 0
        self.outputs: list[tuple[Session | Visitor, int, Any]] = []
        """What there is for clients: whose, the number of its request or watch, and the answer or push."""

        self.add_namespace(Namespace(0))

    def apply(self, entry: Entry) -> Any:
        """Carry out an entry; return the answer of a request (`LATER` for none), or what the entry made.

        Never raises but for a log of another version: what raised once would raise at every replay, and the server
        would never start again.
        """
        try:
            answer = _APPLY[entry.__class__](self, entry)
        except (OtherVersion, MemoryError):
            raise
        except Exception as error:  # it is a bug; the same one at every replay, so the state is still the same
            answer = self.namespaces[0].engine.note_bug(error, entry.__class__.__name__)
        if self._outbox:
            self.settle(self.namespaces[0].engine)
        return answer

    def settle(self, engine: Engine) -> None:
        """Hand what an engine has for owners to them, and note in `outputs` what is to be sent."""
        while engine.outbox:  # an answer whose client is gone may be another's
            for handle, result in engine.take():
                if handle.__class__ is Woken:
                    self.outputs += end_calls(handle.waiters, result)
                    continue
                owner: Any = handle.owner
                try:
                    answer = owner.answer(handle, result)
                except Exception as error:
                    answer = engine.note_bug(error, "an answer")
                if owner.__class__ is Visitor:
                    self.register(owner)
                if answer is not LATER:
                    self.outputs.append((owner, handle.number, answer))

    def take_outputs(self) -> list[tuple[Session | Visitor, int, Any]]:
        """Return what is to be sent since the last call, in order."""
        outputs, self.outputs = self.outputs, []
        return outputs

    def owner(self, serial: int) -> Session | Visitor | None:
        """Return a session, or a visitor that holds something."""
        return self.visitors.get(serial) if serial < 0 else self.sessions.get(serial)

    def register(self, visitor: Visitor) -> None:
        """Remember a visitor for exactly as long as it holds something."""
        if visitor.holds:
            self.visitors[visitor.serial] = visitor
        else:
            self.visitors.pop(visitor.serial, None)

    def namespace_of(self, name: str) -> Namespace | None:
        """Return the namespace of a run's round."""
        return next((found for found in self.namespaces.values() if found.id and found.name == name), None)

    # Entries

    def _request(self, entry: Request) -> Any:
        session = self.sessions.get(entry.session)
        return LATER if session is None else session.execute(entry.op)

    def _arrivals(self, entry: Arrivals) -> list[Any]:
        return arrive_if_there(self, entry.sessions, entry.ops)

    def _visit(self, entry: Visit) -> Any:
        namespace = self.namespaces.get(entry.namespace)
        if namespace is None:
            return LATER
        visitor = self.visitors.get(entry.visitor)
        if visitor is None:
            visitor = Visitor(entry.visitor, entry.namespace, namespace.engine)
        answer = self.visit(visitor, entry.op)
        if visitor.waiter is not None and visitor.waiter.reads:  # its connection waits, and that is not here
            namespace.engine.drop(visitor.waiter)
            visitor.waiter = None
        return answer

    def visit(self, visitor: Visitor, op: Any) -> Any:
        """Carry out an operation of a visitor that changes the state."""
        answer = visitor.execute(op)
        self.register(visitor)
        return answer

    def _start(self, entry: Start) -> None:
        if entry.version != VERSION:
            raise OtherVersion(f"entries of version {entry.version}, and this is version {VERSION}")
        self.identity = self.identity or entry.identity
        self.set_limits(Limits(entry.max_bytes, entry.max_answer_bytes, entry.max_kept_bytes, entry.max_sessions))
        for serial in sorted(self.visitors):
            self._detach(Detach(serial))
        for session in list(self.sessions.values()):
            session.restarts += 1
            if session.attached:
                self._detach(Detach(session.serial))
            elif session.restarts > MAX_RESTARTS:
                self._end(End(session.serial))

    def set_limits(self, limits: Limits) -> None:
        """Change what the state may hold."""
        self.limits = limits
        self.budget.limit, self.budget.answer_limit = limits.max_kept_bytes, limits.max_answer_bytes
        for namespace in self.namespaces.values():
            self._limit(namespace)

    def _limit(self, namespace: Namespace) -> None:
        namespace.engine.max_bytes = self.limits.max_bytes
        namespace.engine.max_value_bytes = self.limits.max_answer_bytes

    def _open(self, entry: Open) -> Session | str:
        namespace = self.namespaces.get(entry.namespace)
        if namespace is None:
            return "the round that it belongs to is over"
        if entry.id in self.sessions_by_id:  # its client chose the id, and has not heard that it is open
            return self._attach(Attach(entry.id, entry.namespace, 0))
        if len(self.sessions) >= self.limits.max_sessions:
            return f"too many sessions: {len(self.sessions)} is the limit (serve --max-sessions)"
        self.opened += 1
        session = self.new_session(entry.id, self.opened, entry.name, namespace)
        former = (self.sessions_by_id.get(identity) for identity in entry.former)
        session.former = tuple(one.tag for one in former if one is not None)
        return session

    def new_session(self, identity: bytes, serial: int, name: str, namespace: Namespace) -> Session:
        """Add a session."""
        session = Session(identity, serial, name, namespace.id, namespace.engine, namespace.objects, self.budget)
        self.sessions[serial] = self.sessions_by_id[identity] = session
        return session

    def _attach(self, entry: Attach) -> Session | str:
        session = self.sessions_by_id.get(entry.id)
        if session is None or session.namespace != entry.namespace or session.over:
            return UNKNOWN_SESSION
        session.attach(entry.pushes_seen)
        self.namespaces[session.namespace].objects.back(session.tag)
        return session

    def _detach(self, entry: Detach) -> None:
        owner = self.owner(entry.owner)
        if isinstance(owner, Visitor):
            owner.end()
            del self.visitors[owner.serial]
        elif owner is not None and owner.over:
            self.end_session(owner)
        elif owner is not None and owner.attached:
            owner.detach()
            self.namespaces[owner.namespace].objects.doubts.away(owner.tag)

    def _end(self, entry: End) -> None:
        session = self.sessions.get(entry.session)
        if session is not None and not session.attached:  # it may have come back at the last moment
            self.end_session(session)

    def end_session(self, session: Session) -> None:
        """End a session: what it owned is gone, and those who depended on it learn of it."""
        del self.sessions[session.serial], self.sessions_by_id[session.id]
        session.end()
        self.namespaces[session.namespace].objects.end(session.tag)

    def _time_out(self, entry: TimeOut) -> None:
        owner = self.owner(entry.owner)
        if owner is None:
            return
        owner.take_back(entry.number)
        if isinstance(owner, Visitor):
            self.register(owner)
            return
        waiter = owner.waiting.get(entry.number)
        answer = LATER if waiter is None or waiter.reads else owner.time_out(entry.number)
        if answer is not LATER:
            self.outputs.append((owner, entry.number, answer))

    def _lapse(self, entry: Lapse) -> None:
        session = self.sessions.get(entry.session)
        if session is not None:
            session.lapse(entry.key, entry.number)

    def _fire(self, entry: Fire) -> None:
        namespace = self.namespaces.get(entry.namespace)
        if namespace is not None:
            namespace.objects.fire((MACHINES[entry.kind], entry.name), entry.timer)

    def _go_on(self, entry: GoOn) -> None:
        namespace = self.namespaces.get(entry.namespace)
        if namespace is not None:
            namespace.engine.go_on()

    def _open_namespace(self, entry: OpenNamespace) -> Namespace | None:
        """Return the namespace of a round, or None where a later round of that run has begun."""
        found = self.namespace_of(entry.name)
        if found is not None and found.scope == entry.scope:
            return found
        if found is not None and found.scope > entry.scope:
            return None
        if found is not None:
            self._close_namespace(CloseNamespace(found.id))
        self.last_namespace += 1
        return self.add_namespace(Namespace(self.last_namespace, entry.name, entry.scope, entry.number))

    def add_namespace(self, namespace: Namespace) -> Namespace:
        """Add a namespace."""
        self.namespaces[namespace.id] = namespace
        namespace.engine.outbox, namespace.engine.relieve = self._outbox, self.settle
        self._limit(namespace)
        return namespace

    def _close_namespace(self, entry: CloseNamespace) -> bool:
        """Drop a namespace, with its sessions and visitors; return whether there was one."""
        namespace = self.namespaces.get(entry.namespace)
        if namespace is None or not namespace.id:
            return False
        for serial in sorted(self.visitors):
            if self.visitors[serial].namespace == namespace.id:
                self._detach(Detach(serial))
        for session in [one for one in self.sessions.values() if one.namespace == namespace.id]:
            self.end_session(session)
        del self.namespaces[namespace.id]
        return True


_APPLY: dict[type[Entry], Callable[[State, Any], Any]] = {
    Request: State._request,
    Arrivals: State._arrivals,
    Visit: State._visit,
    Start: State._start,
    Open: State._open,
    Attach: State._attach,
    Detach: State._detach,
    End: State._end,
    TimeOut: State._time_out,
    Lapse: State._lapse,
    Fire: State._fire,
    GoOn: State._go_on,
    OpenNamespace: State._open_namespace,
    CloseNamespace: State._close_namespace,
}
