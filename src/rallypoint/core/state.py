"""The state of a server: namespaces, their shared objects, and client sessions. Pure and deterministic.

`apply(entry)` applies one log entry and returns its answer; results for other clients are in `outputs`. The same
entries in the same order produce the same state in any process: core/ has no clock, no randomness and no iteration over
a set, ids arrive in entries, and passed deadlines are entries. `core/snapshot.py` serializes a state; a restored state
continues exactly as the original would have.

A namespace is an engine and its shared objects. Namespace 0 is visible to all clients. Each round of a run has its own,
because PyTorch's workers use their store without a prefix: they would find the keys of another job, or of the round
before.

A host with a clock (the server) sets timers from the state (`Session.ttls`, `Objects.timers`, the operations' own
`timeout_s`) and submits entries when they are due. It may run reads, and requests if there is no log to wait for,
directly on a session or connection owner, if it calls `settle` after each: `apply` does no more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from rallypoint.core.arrivals import arrive_if_there, end_calls
from rallypoint.core.calls.call_waiter import Woken
from rallypoint.core.connection_owner import ConnectionOwner
from rallypoint.core.engine import Engine
from rallypoint.core.entries import (
    VERSION,
    Arrivals,
    AttachSession,
    CloseNamespace,
    ConnectionRequest,
    ContinueDelete,
    DetachOwner,
    EndSession,
    Entry,
    ExpireLease,
    FireTimer,
    OpenNamespace,
    OpenSession,
    SessionRequest,
    StartServer,
    TimeOutRequest,
)
from rallypoint.core.long_value import LONG_BYTES
from rallypoint.core.machines import barrier, exchange, lock, membership, rendezvous, work_queue
from rallypoint.core.machines.machine import Machine
from rallypoint.core.memory_budget import MemoryBudget
from rallypoint.core.objects import Objects
from rallypoint.core.records import LATER
from rallypoint.core.session import Session

__all__ = [
    "MACHINES",
    "MAX_RESTARTS",
    "SLICE_KEYS",
    "UNKNOWN_SESSION",
    "StateLimits",
    "Namespace",
    "OtherVersion",
    "State",
]

SLICE_KEYS = 1000
"""How many keys are deleted at a time: a few milliseconds of work."""

MAX_RESTARTS = 32
"""How many server restarts in a row a session may miss, so that a crash loop cannot keep dead sessions alive."""

MACHINES: dict[str, type[Machine]] = {
    machine.kind: machine
    for machine in (
        barrier.BarrierMachine,
        exchange.ExchangeMachine,
        lock.LockMachine,
        membership.MembershipMachine,
        rendezvous.RendezvousMachine,
        work_queue.WorkQueueMachine,
    )
}
"""The kinds of shared objects, by name."""


UNKNOWN_SESSION = "unknown session: expired, or created by another server"
"""Why a client cannot resume."""


class OtherVersion(ValueError):
    """The log was written under another version of the semantics and cannot be replayed."""


class Namespace:
    """An engine and its shared objects."""

    __slots__ = ("engine", "id", "name", "number", "objects", "scope")

    def __init__(
        self, memory: MemoryBudget, identity: int, name: str = "", scope: int = 0, number: int | None = None
    ) -> None:
        self.id = identity
        self.name = name
        """The run that it belongs to."""

        self.scope = scope
        """The scope of the run's round: a round of a later scope replaces it."""

        self.number = number
        """The round's number, for people; None if unknown."""

        self.engine = Engine(SLICE_KEYS, LONG_BYTES, memory)
        self.objects = Objects(self.engine)


class StateLimits(NamedTuple):
    """The limits of a state, in bytes and counts."""

    max_bytes: int = 1 << 62
    """Of all namespaces, sessions and shared objects together."""

    max_answer_bytes: int = 1 << 62
    max_kept_bytes: int = 1 << 62
    """Unconfirmed answers and pushes of all sessions, and waiting reads."""

    max_sessions: int = 1 << 62


class State:
    """Everything that one server holds for its clients."""

    def __init__(self) -> None:
        self.identity = b""
        self.limits = StateLimits()
        self.memory = MemoryBudget()
        self._outbox: list[Any] = []  # shared by all engines; empty between two entries
        self.namespaces: dict[int, Namespace] = {}
        self.sessions: dict[int, Session] = {}
        self.sessions_by_id: dict[bytes, Session] = {}
        self.connection_owners: dict[int, ConnectionOwner] = {}
        """The connection owners that hold something, by serial."""

        self.opened = 0
        """How many sessions were ever opened."""

        self.last_namespace = 0
        self.outputs: list[tuple[Session | ConnectionOwner, int, Any]] = []
        """Results for clients: the owner, the number of its request or watch, and the answer or push."""

        self.add_namespace(Namespace(self.memory, 0))

    def apply(self, entry: Entry) -> Any:
        """Apply an entry; return the answer of a request (`LATER` for none), or the object that the entry created.

        Raises only for a log of another version: any other exception would recur at every replay, and the server would
        never start again.
        """
        try:
            answer = _APPLY[entry.__class__](self, entry)
        except (OtherVersion, MemoryError):
            raise
        except Exception as error:  # a bug, but the same one at every replay: the state stays deterministic
            answer = self.namespaces[0].engine.note_bug(error, entry.__class__.__name__)
        if self._outbox:
            self.settle(self.namespaces[0].engine)
        return answer

    def settle(self, engine: Engine) -> None:
        """Pass an engine's deliveries to their owners, and add what is to be sent to `outputs`."""
        while engine.outbox:  # an item whose taker is gone may answer another wait
            for handle, result in engine.take():
                if handle.__class__ is Woken:
                    self.outputs += end_calls(handle.waiters, result)
                    continue
                owner: Any = handle.owner
                try:
                    answer = owner.answer(handle, result)
                except Exception as error:
                    answer = engine.note_bug(error, "an answer")
                if owner.__class__ is ConnectionOwner:
                    self.register(owner)
                if answer is not LATER:
                    self.outputs.append((owner, handle.number, answer))

    def take_outputs(self) -> list[tuple[Session | ConnectionOwner, int, Any]]:
        """Return what is to be sent since the last call, in order."""
        outputs, self.outputs = self.outputs, []
        return outputs

    def owner(self, serial: int) -> Session | ConnectionOwner | None:
        """Return a session, or a connection owner that holds something."""
        return self.connection_owners.get(serial) if serial < 0 else self.sessions.get(serial)

    def register(self, owner: ConnectionOwner) -> None:
        """Remember a connection owner exactly as long as it holds something."""
        if owner.holds:
            self.connection_owners[owner.serial] = owner
        else:
            self.connection_owners.pop(owner.serial, None)

    def namespace_of(self, name: str) -> Namespace | None:
        """Return the namespace of a run's round."""
        return next((found for found in self.namespaces.values() if found.id and found.name == name), None)

    # Entries

    def _request(self, entry: SessionRequest) -> Any:
        session = self.sessions.get(entry.session)
        return LATER if session is None else session.execute(entry.op)

    def _arrivals(self, entry: Arrivals) -> list[Any]:
        return arrive_if_there(self, entry.sessions, entry.ops)

    def _connection_request(self, entry: ConnectionRequest) -> Any:
        namespace = self.namespaces.get(entry.namespace)
        if namespace is None:
            return LATER
        owner = self.connection_owners.get(entry.owner)
        if owner is None:
            owner = ConnectionOwner(entry.owner, entry.namespace, namespace.engine)
        answer = self.execute_for(owner, entry.op)
        if owner.waiter is not None and owner.waiter.reads:  # waiting reads belong to the connection, not to the state
            namespace.engine.drop(owner.waiter)
            owner.waiter = None
        return answer

    def execute_for(self, owner: ConnectionOwner, op: Any) -> Any:
        """Run an operation of a connection owner that changes the state."""
        answer = owner.execute(op)
        self.register(owner)
        return answer

    def _start(self, entry: StartServer) -> None:
        if entry.version != VERSION:
            raise OtherVersion(f"log entries of version {entry.version}; this server reads version {VERSION}")
        self.identity = self.identity or entry.identity
        self.set_limits(StateLimits(entry.max_bytes, entry.max_answer_bytes, entry.max_kept_bytes, entry.max_sessions))
        for serial in sorted(self.connection_owners):
            self._detach(DetachOwner(serial))
        for session in list(self.sessions.values()):
            session.restarts += 1
            if session.attached:
                self._detach(DetachOwner(session.serial))
            elif session.restarts > MAX_RESTARTS:
                self._end(EndSession(session.serial))

    def set_limits(self, limits: StateLimits) -> None:
        """Change the limits."""
        self.limits = limits
        self.memory.limit, self.memory.reserve = limits.max_bytes, limits.max_kept_bytes
        self.memory.answer_limit = limits.max_answer_bytes

    def _open(self, entry: OpenSession) -> Session | str:
        namespace = self.namespaces.get(entry.namespace)
        if namespace is None:
            return "the round of this session is over"
        if entry.id in self.sessions_by_id:  # its client chose the id, and missed the first welcome
            return self._attach(AttachSession(entry.id, entry.namespace, 0))
        if len(self.sessions) >= self.limits.max_sessions:
            return f"too many sessions: {len(self.sessions)} is the limit (serve --max-sessions, --max-memory)"
        self.opened += 1
        session = self.new_session(entry.id, self.opened, entry.name, namespace)
        former = (self.sessions_by_id.get(identity) for identity in entry.former)
        session.former = tuple(one.tag for one in former if one is not None)
        return session

    def new_session(self, identity: bytes, serial: int, name: str, namespace: Namespace) -> Session:
        """Add a session."""
        session = Session(identity, serial, name, namespace.id, namespace.engine, namespace.objects, self.memory)
        self.sessions[serial] = self.sessions_by_id[identity] = session
        return session

    def _attach(self, entry: AttachSession) -> Session | str:
        session = self.sessions_by_id.get(entry.id)
        if session is None or session.namespace != entry.namespace or session.over:
            return UNKNOWN_SESSION
        session.attach(entry.pushes_seen)
        self.namespaces[session.namespace].objects.session_settled(session.tag)
        return session

    def _detach(self, entry: DetachOwner) -> None:
        owner = self.owner(entry.owner)
        if isinstance(owner, ConnectionOwner):
            owner.end()
            del self.connection_owners[owner.serial]
        elif owner is not None and owner.over:
            self.end_session(owner)
        elif owner is not None and owner.attached:
            owner.detach()
            self.namespaces[owner.namespace].objects.contested.session_detached(owner.tag)

    def _end(self, entry: EndSession) -> None:
        session = self.sessions.get(entry.session)
        if session is not None and not session.attached:  # it may have reconnected at the last moment
            self.end_session(session)

    def end_session(self, session: Session) -> None:
        """End a session: what it owned is gone, and its dependents are notified."""
        del self.sessions[session.serial], self.sessions_by_id[session.id]
        session.end()
        self.namespaces[session.namespace].objects.end(session.tag)

    def _time_out(self, entry: TimeOutRequest) -> None:
        owner = self.owner(entry.owner)
        if owner is None:
            return
        owner.take_back(entry.number)
        if isinstance(owner, ConnectionOwner):
            self.register(owner)
            return
        waiter = owner.waiting.get(entry.number)
        answer = LATER if waiter is None or waiter.reads else owner.time_out(entry.number)
        if answer is not LATER:
            self.outputs.append((owner, entry.number, answer))

    def _expire_lease(self, entry: ExpireLease) -> None:
        session = self.sessions.get(entry.session)
        if session is not None:
            session.expire_lease(entry.key, entry.number)

    def _fire_timer(self, entry: FireTimer) -> None:
        namespace = self.namespaces.get(entry.namespace)
        if namespace is not None:
            namespace.objects.fire((MACHINES[entry.kind], entry.name), entry.timer)

    def _continue_delete(self, entry: ContinueDelete) -> None:
        namespace = self.namespaces.get(entry.namespace)
        if namespace is not None:
            namespace.engine.continue_delete()

    def _open_namespace(self, entry: OpenNamespace) -> Namespace | None:
        """Return the namespace of a round, or None if a later round of that run has begun."""
        found = self.namespace_of(entry.name)
        if found is not None and found.scope == entry.scope:
            return found
        if found is not None and found.scope > entry.scope:
            return None
        if found is not None:
            self._close_namespace(CloseNamespace(found.id))
        self.last_namespace += 1
        return self.add_namespace(Namespace(self.memory, self.last_namespace, entry.name, entry.scope, entry.number))

    def add_namespace(self, namespace: Namespace) -> Namespace:
        """Add a namespace."""
        self.namespaces[namespace.id] = namespace
        namespace.engine.outbox, namespace.engine.on_pressure = self._outbox, self.settle
        return namespace

    def _close_namespace(self, entry: CloseNamespace) -> bool:
        """Drop a namespace with its sessions and connection owners; return whether it existed."""
        namespace = self.namespaces.get(entry.namespace)
        if namespace is None or not namespace.id:
            return False
        for serial in sorted(self.connection_owners):
            if self.connection_owners[serial].namespace == namespace.id:
                self._detach(DetachOwner(serial))
        for session in [one for one in self.sessions.values() if one.namespace == namespace.id]:
            self.end_session(session)
        del self.namespaces[namespace.id]
        namespace.engine.drop_all()
        namespace.engine.clearing.clear()
        self.memory.size -= namespace.engine.size
        self.memory.parked -= namespace.engine.parked
        namespace.engine.memory = MemoryBudget()  # whatever still refers to it changes nothing here
        return True


_APPLY: dict[type[Entry], Callable[[State, Any], Any]] = {
    SessionRequest: State._request,
    Arrivals: State._arrivals,
    ConnectionRequest: State._connection_request,
    StartServer: State._start,
    OpenSession: State._open,
    AttachSession: State._attach,
    DetachOwner: State._detach,
    EndSession: State._end,
    TimeOutRequest: State._time_out,
    ExpireLease: State._expire_lease,
    FireTimer: State._fire_timer,
    ContinueDelete: State._continue_delete,
    OpenNamespace: State._open_namespace,
    CloseNamespace: State._close_namespace,
}
