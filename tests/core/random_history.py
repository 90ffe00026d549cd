"""A server with random clients and a random clock: a live `State`, and the log of everything that changed it.

A history does everything that a server may do: requests of sessions and of PyTorch's connections in several namespaces,
waiting reads, which are not logged, disconnects, resumed and ended sessions, timeouts, expired leases, timers, slices
of deletions, ended turns, and restarts from a snapshot or from the log. Some requests only a broken client sends:
repeated numbers, calls made twice. Limits are so small that histories reach all of them. Nothing here depends on the
order of a set, so one seed is one history, in every process.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rallypoint.core import engine, entries, objects, ops, session, snapshot
from rallypoint.core import state as state_module
from rallypoint.core.calls import shared_answer
from rallypoint.core.connection_owner import ConnectionOwner
from rallypoint.core.index import watch_table
from rallypoint.core.machines import exchange, membership
from rallypoint.core.machines.machine import Done, Refused, Waiting
from rallypoint.core.records import LATER, InternalError, PushedEvent
from rallypoint.core.session import Session
from rallypoint.core.snapshot import read, write
from rallypoint.core.state import MACHINES, Namespace, State
from rallypoint.errors import StoreError
from rallypoint.protocol.native import encode_answer

from .random_commands import MEMBERS, Commands

__all__ = ["History", "replay", "small_limits", "encode_results"]

KEYS = (b"", b"a", b"b", b"p/1", b"p/2", b"p/3", b"q")
QUEUES = (b"q", b"p/q")
PREFIXES = (b"", b"p/", b"p/1", b"q")
GATES = (b"g", b"p/g", b"a")
VALUES = (b"", b"1", b"7", b"-3", b"word", b"x" * 30)
NAMES = (b"/o", b"/n")
LONG_S = 9.0
ANSWERS = (Done, Refused, Waiting, StoreError)
"""Answers to calls on shared objects; the answer to `Arrivals` is a list of them."""

SMALL: tuple[tuple[Any, str, int], ...] = (
    (session, "MAX_KEPT", 8),
    (session, "MAX_PUSHES", 8),
    (session, "MAX_WATCHES", 3),
    (watch_table, "MAX_LENGTHS", 3),
    (engine, "OUTBOX_EVENTS", 3),
    (state_module, "SLICE_KEYS", 2),
    (state_module, "MAX_RESTARTS", 1),
    (snapshot, "CHUNK_BYTES", 200),
    (objects, "MAX_IDLE", 2),
    (objects, "MAX_IDLE_BYTES", 900),
    (shared_answer, "SHARED_BYTES", 40),
    (exchange, "REPLACED", 2),
    (membership, "MAX_EVENTS", 3),
)
"""Limits of core that no entry sets, and their values in histories."""


@contextmanager
def small_limits() -> Iterator[None]:
    """Lower the limits that no entry sets."""
    before = [(module, name, getattr(module, name)) for module, name, _ in SMALL]
    for module, name, value in SMALL:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def encode_results(
    answer: Any, outputs: Iterable[tuple[Any, int, Any]], skip: frozenset[tuple[int, int]] = frozenset()
) -> bytes:
    """Encode the results of an entry, for its client and for others, as bytes to compare."""
    parts = [_plain(0, answer)]
    for owner, number, later in outputs:
        if (owner.serial, number) not in skip or isinstance(later, PushedEvent):
            parts += [b"%d:" % owner.serial, _plain(number, later)]
    return b" ".join(parts)


def _plain(number: int, answer: Any) -> bytes:
    if isinstance(answer, Session):
        return b"session %d" % answer.serial
    if isinstance(answer, Namespace):
        return b"namespace %d" % answer.id
    if isinstance(answer, str):
        return answer.encode()
    if isinstance(answer, list) and all(one is LATER or isinstance(one, ANSWERS) for one in answer):
        return b" ".join(_plain(number, one) for one in answer)
    return b"later" if answer is LATER else bytes(encode_answer(number, answer))


def replay(records: Iterable[bytes], state: State | None = None) -> tuple[State, list[bytes]]:
    """Apply records to a state, by default an empty one; return it, and the encoded results of each record."""
    state = State() if state is None else state
    results = []
    for record in records:
        entry = entries.decode(record)
        answer = state.apply(entry)
        assert not isinstance(answer, InternalError), str(answer)
        reads = isinstance(entry, entries.ConnectionRequest) and not entry.op.changes  # it may find another value
        results.append(encode_results(LATER if reads else answer, state.take_outputs()))
    return state, results


class Client:
    """One native client: its request numbers and its calls."""

    def __init__(self, identity: bytes, serial: int) -> None:
        self.id = identity
        self.serial = serial
        self.number = 1
        self.sent: dict[int, ops.Op] = {}
        self.calls: list[tuple[bytes, str, int, Any]] = []


class History:
    """The history of one seed: the final state and the log."""

    def __init__(self, seed: int, steps: int = 140) -> None:
        self.chance = random.Random(seed)
        self.state = State()
        self.records: list[bytes] = []
        self.results: list[bytes] = []
        """Results of each record on the live state, without reads."""

        self.snapshots: dict[int, list[bytes]] = {}
        """Snapshots of the live state, by number of records."""

        self.clients: dict[int, Client] = {}
        self.lost: list[bytes] = []
        self.connection_owners: list[ConnectionOwner] = []
        self.connections_made = 0
        self._commands = Commands(self.chance)
        self._start()
        actions, weights = zip(*self._actions(), strict=True)
        for action in self.chance.choices(actions, weights, k=steps):
            action()
            self._detach_ended()
            if self.chance.random() < 0.02:
                self.save()
        self.save()
        self._start()  # the restart detaches the remaining owners, in an order that must be deterministic
        self.save()
        for namespace in self.state.namespaces.values():
            while namespace.engine.read_work:
                namespace.engine.continue_reads()
            self.state.settle(namespace.engine)
        self.state.outputs.clear()

    def save(self) -> None:
        """Take a snapshot of the live state."""
        self.snapshots[len(self.records)] = list(write(self.state))

    def _actions(self) -> list[tuple[Callable[[], None], float]]:
        return [
            (self._session_op, 34.0),
            (self._act, self.chance.choice((4.0, 20.0, 80.0))),
            (self._arrivals, self.chance.choice((1.0, 8.0, 40.0))),
            (self._session_read, 10.0),
            (self._connection_op, self.chance.choice((8.0, 16.0, 60.0))),
            (self._open, 4.0),
            (self._disconnect, 4.0),
            (self._resume, 4.0),
            (self._end, 2.0),
            (self._time_out, 5.0),
            (self._expire_lease, 2.0),
            (self._fire_timer, 3.0),
            (self._continue_delete, 3.0),
            (self._end_idle_turns, 2.0),
            (self._open_namespace, 1.5),
            (self._close_namespace, 0.5),
            (self._restart, self.chance.choice((0.0, 0.0, 0.7, 4.0))),
        ]

    # Entries

    def apply(self, entry: entries.Entry) -> Any:
        """Log an entry and apply it."""
        return self._log(entry, self.state.apply)

    def _log(self, entry: entries.Entry, run: Callable[[Any], Any]) -> Any:
        record = entries.encode(entry)
        self.records.append(record)
        reads = self._reads()
        answer = run(entries.decode(record))
        assert not isinstance(answer, InternalError), str(answer)
        shown = LATER if isinstance(entry, entries.ConnectionRequest) and not entry.op.changes else answer
        self.results.append(encode_results(shown, self.state.take_outputs(), reads))
        return answer

    def _reads(self) -> frozenset[tuple[int, int]]:
        """Return the waiting reads, which no replay has."""
        waiters: list[Any] = [waiter for one in self.state.sessions.values() for waiter in one.waiting.values()]
        waiters += [
            connection_owner.waiter
            for connection_owner in self.connection_owners
            if connection_owner.waiter is not None
        ]
        return frozenset((waiter.owner.serial, waiter.number) for waiter in waiters if waiter.reads)

    def _start(self) -> None:
        chance = self.chance
        max_bytes = chance.choice((1 << 62, 1 << 62, 5000, 2500, 1200))
        max_answer = chance.choice((1 << 62, 1 << 62, 150, 40))
        max_kept = chance.choice((1 << 62, 1 << 62, 1500, 300))
        for connection_owner in self.connection_owners:
            self._drop_read(connection_owner)
        self.connection_owners.clear()
        self.apply(
            entries.StartServer(
                entries.VERSION, chance.randbytes(4), max_bytes, max_answer, max_kept, chance.choice((3, 6))
            )
        )

    def _restart(self) -> None:
        """Restart from the whole log, or from a snapshot and the rest of the log."""
        self.save()
        at = self.chance.choice(list(self.snapshots))
        if self.chance.random() < 0.5:
            self.state, _ = replay(self.records[at:], read(self.snapshots[at]))
        else:
            self.state, _ = replay(self.records)
        self.state.outputs.clear()
        assert list(write(self.state)) == self.snapshots[len(self.records)], "the log produces another state"
        self._start()

    # Sessions

    def _any_client(self) -> tuple[Client, Session] | None:
        attached = [one for one in self.clients.values() if self.state.sessions[one.serial].attached]
        if not attached:
            self.chance.choice((self._open, self._resume))()
            return None
        client = self.chance.choice(attached)
        return client, self.state.sessions[client.serial]

    def _open(self) -> None:
        chance, identity = self.chance, self.chance.randbytes(4)
        namespace = chance.choice(list(self.state.namespaces))
        known = [client.id for client in self.clients.values()] + self.lost
        former = chance.sample(known, min(len(known), chance.choice((0, 0, 1, 2))))
        found = self.apply(entries.OpenSession(identity, chance.choice(("", "host")), namespace, former))
        if isinstance(found, Session):
            self.clients[found.serial] = Client(identity, found.serial)

    def _disconnect(self) -> None:
        serials = [*self.clients, *(connection_owner.serial for connection_owner in self.connection_owners)]
        if not serials:
            return
        serial = self.chance.choice(serials)
        if serial > 0:
            self.apply(entries.DetachOwner(serial))
        else:
            self._close_connection(
                next(
                    connection_owner for connection_owner in self.connection_owners if connection_owner.serial == serial
                )
            )

    def _resume(self) -> None:
        away = [one for one in self.clients.values() if not self.state.sessions[one.serial].attached]
        known = away if away and self.chance.random() < 0.8 else list(self.clients.values())
        if not known:
            return
        client = self.chance.choice(known)
        session = self.state.sessions[client.serial]
        seen = self.chance.randint(0, session.pushed)
        self.apply(entries.AttachSession(client.id, session.namespace, seen))
        for number in list(client.sent):
            if client.serial not in self.state.sessions:
                break
            if session.knows(number) and self.chance.random() < 0.7:
                self._request(client, session, client.sent[number])

    def _end(self) -> None:
        if self.clients:
            self.apply(entries.DetachOwner(self.chance.choice(list(self.clients))))
            self.apply(entries.EndSession(self.chance.choice([*self.clients, 999])))

    def _detach_ended(self) -> None:
        """Detach sessions that are over, and forget the clients of those that have ended."""
        for one in list(self.state.sessions.values()):
            if one.over and one.attached and self.chance.random() < 0.7:
                self.apply(entries.DetachOwner(one.serial))
        for serial in [serial for serial in self.clients if serial not in self.state.sessions]:
            self.lost.append(self.clients.pop(serial).id)
        self.connection_owners = [one for one in self.connection_owners if one.namespace in self.state.namespaces]

    def _request(self, client: Client, session: Session, op: ops.Op) -> None:
        """Execute a request as a server does, or drop the connection."""
        number, kind = op.number, op.__class__
        if session.late and session.overdue and kind is not ops.Confirm:
            self.apply(entries.DetachOwner(session.serial))
            return
        if not kind.changes:
            session.execute(op)
            self.state.settle(self.state.namespaces[session.namespace].engine)
            self.state.outputs.clear()
            return
        over = kind is not ops.Confirm and number <= session.highest and not session.knows(number)
        if over and self.chance.random() < 0.8:
            return  # otherwise the server may not know yet that it was confirmed
        if kind is not ops.Confirm:
            client.sent[number] = op
        entry = entries.SessionRequest(session.serial, op)  # type: ignore[arg-type]
        if self.chance.random() < 0.5:
            self.apply(entry)
        else:
            self._log(entry, self._directly)

    def _directly(self, entry: entries.SessionRequest) -> Any:
        """Execute a request without `apply`, as a server without a log does."""
        session = self.state.sessions[entry.session]
        answer = session.execute(entry.op)
        self.state.settle(self.state.namespaces[session.namespace].engine)
        return answer

    def _session_op(self) -> None:
        found = self._any_client()
        if found is None:
            return
        client, session = found
        number = self._number(client, session)
        sent = client.sent.get(number)
        if sent is not None and self.chance.random() < 0.8:
            self._request(client, session, sent)
        else:
            self._request(client, session, self._make_op(client, session, number))

    def _number(self, client: Client, session: Session) -> int:
        """Return the next number; sometimes a used one, or that of a waiting read."""
        if client.sent and self.chance.random() < 0.08:
            return self.chance.choice([*client.sent, *session.waiting])
        client.number += 1
        return client.number - 1

    def _session_read(self) -> None:
        found = self._any_client()
        if found is None:
            return
        client, session = found
        if session.waiting and self.chance.random() < 0.15:
            number = self.chance.choice(list(session.waiting))
            if session.waiting[number].reads:
                session.time_out(number)
                return
        chance, number = self.chance, self._number(client, session)
        keys, time_s = self._some_keys(), chance.choice((0.0, LONG_S, LONG_S))
        op = chance.choice(
            (
                ops.Get(number, chance.choice(KEYS), time_s),
                ops.Wait(number, keys, time_s),
                ops.MultiGet(number, keys, time_s),
                ops.Check(number, keys),
                ops.Count(number, chance.choice(PREFIXES)),
                ops.List(number, chance.choice(PREFIXES)),
                ops.QueueLen(number, chance.choice(QUEUES)),
                ops.Peek(number, chance.choice(KEYS)),
                ops.MultiPeek(number, keys),
                ops.Ping(number),
                ops.SessionHeartbeat(0),
            )
        )
        self._request(client, session, op)

    def _some_keys(self) -> list[bytes]:
        return self.chance.choices(KEYS, k=self.chance.choice((1, 2, 2, 3)))

    def _make_op(self, client: Client, session: Session, number: int) -> ops.Op:
        chance = self.chance
        key, queue, value = chance.choice(KEYS), chance.choice(QUEUES), chance.choice(VALUES)
        time_s = chance.choice((0.0, LONG_S, LONG_S))
        held = [*session.waiting, *session.watches, *session.turns, *session.taken, 0]
        makers: tuple[tuple[Callable[[], ops.Op], int], ...] = (
            (lambda: ops.Set(number, key, value), 4),
            (lambda: ops.Add(number, chance.choice((b"g", b"a", b"b")), chance.randint(-3, 3)), 2),
            (lambda: ops.MultiSet(number, [(one, value) for one in self._some_keys()]), 2),
            (lambda: ops.Append(number, key, value), 2),
            (lambda: ops.CompareSet(number, key, chance.choice(VALUES), value), 1),
            (lambda: ops.CompareSwap(number, key, chance.choice((None, *VALUES)), value), 2),
            (lambda: ops.Delete(number, key), 3),
            (lambda: ops.DeletePrefix(number, chance.choice(PREFIXES)), 3),
            (lambda: ops.Push(number, queue, b"item %d" % number), 7),
            (lambda: ops.Pop(number, queue), 2),
            (lambda: ops.BlockingPop(number, queue, time_s), 6),
            (lambda: ops.WaitOrTurn(number, chance.choice((*QUEUES, key)), chance.choice((0, 8))), 4),
            (lambda: ops.TurnPop(number, queue, chance.choice((0, *session.turns))), 3),
            (lambda: ops.Arrive(number, chance.choice(GATES), chance.randint(0, 4), time_s), 5),
            (lambda: ops.SetLease(number, key, value, chance.choice((0.0, 3.0))), 4),
            (lambda: ops.ReleaseLease(number, key), 1),
            (lambda: ops.WatchPrefix(number, chance.choice(PREFIXES)), 4),
            (lambda: ops.Drop(number, chance.choice(held)), 5),
            (lambda: self._confirm(session), 6),
            (lambda: ops.Bye(number), 1),
        )
        make, weights = zip(*makers, strict=True)
        op: ops.Op = chance.choices(make, weights)[0]()
        return op

    def _confirm(self, session: Session) -> ops.Confirm:
        chance = self.chance
        still = [number for number in session.kept if chance.random() < 0.3]
        last = chance.choice((session.highest, chance.randint(0, session.highest)))
        return ops.Confirm(0, last, still, chance.randint(0, session.pushed))

    # Shared objects

    def _act(self) -> None:
        """Make a call on a shared object, withdraw one, or repeat one; a broken client does so while it waits."""
        found = self._any_client()
        if found is None:
            return
        client, session = found
        chance, what = self.chance, self.chance.random()
        if client.calls and what < 0.25:
            name, member, call, command = chance.choice(client.calls)
        else:
            kind, call = chance.choice(self._commands.kinds), len(client.calls) + 1
            name = chance.choice((NAMES[0], NAMES[0], NAMES[0], NAMES[1]))
            member = self._mostly_own(client)
            if client.calls and what < 0.5:
                name, member, earlier, made = chance.choice(client.calls)
                command = self._commands.undo(made.machine.kind, earlier)
            else:
                machine = self.state.namespaces[session.namespace].objects.machines.get((MACHINES[kind], name))
                command = self._commands.make(kind, machine or MACHINES[kind](), member)
            if client.calls and chance.random() < 0.08:  # by mistake: the number of another call
                call = chance.randint(1, len(client.calls))
            client.calls.append((name, member, call, command))
        time_s = chance.choice((0.0, LONG_S, LONG_S, LONG_S))
        self._request(client, session, ops.Act(self._number(client, session), name, member, call, command, time_s))

    def _arrivals(self) -> None:
        """Let several clients arrive at one object in one message; some again, some with a timeout of zero."""
        chance = self.chance
        kind, name = chance.choice(("barrier", "exchange")), chance.choice(NAMES)
        number = chance.choice(list(self.state.namespaces))
        sessions = [self.state.sessions[one] for one in self.clients]
        here = [one for one in sessions if one.attached and one.namespace == number and not one.over and not one.late]
        machine = self.state.namespaces[number].objects.machines.get((MACHINES[kind], name)) or MACHINES[kind]()
        made = []
        for one in chance.sample(here, min(len(here), chance.choice((1, 2, 3, 4)))):
            client = self.clients[one.serial]
            member = self._mostly_own(client)
            call, command = len(client.calls) + 1, self._commands.make(kind, machine, member)
            if client.calls and chance.random() < 0.1:
                call = chance.randint(1, len(client.calls))
            client.calls.append((name, member, call, command))
            client.number += 1
            op = ops.Act(client.number - 1, name, member, call, command, chance.choice((0.0, *(LONG_S,) * 9)))
            client.sent[op.number] = op
            made.append((one.serial, op))
        if made:
            self.apply(entries.Arrivals([serial for serial, _ in made], [op for _, op in made]))

    def _mostly_own(self, client: Client) -> str:
        return self.chance.choice((*(MEMBERS[client.serial % len(MEMBERS)],) * 5, *MEMBERS))

    # PyTorch's clients

    def _connection_op(self) -> None:
        chance = self.chance
        if not self.connection_owners or (len(self.connection_owners) < 4 and chance.random() < 0.2):
            self.connections_made += 1
            namespace = self.state.namespaces[chance.choice(list(self.state.namespaces))]
            self.connection_owners.append(ConnectionOwner(-self.connections_made, namespace.id, namespace.engine))
        connection_owner = chance.choice(self.connection_owners)
        op = self._make_connection_op(connection_owner)
        if connection_owner.changes(op):
            entry = entries.ConnectionRequest(connection_owner.serial, connection_owner.namespace, op)  # type: ignore[arg-type]
            answer = self._log(entry, lambda entry: self._execute_for(connection_owner, entry.op))
        else:
            answer = self._execute_for(connection_owner, op)
            self.state.outputs.clear()
        if isinstance(answer, StoreError):
            self._close_connection(connection_owner)

    def _execute_for(self, connection_owner: ConnectionOwner, op: ops.Op) -> Any:
        answer = self.state.execute_for(connection_owner, op)
        self.state.settle(self.state.namespaces[connection_owner.namespace].engine)
        return answer

    def _close_connection(self, connection_owner: ConnectionOwner) -> None:
        """Close a PyTorch client's connection, as seen by the server."""
        self.connection_owners.remove(connection_owner)
        self._drop_read(connection_owner)
        if connection_owner.holds:
            self.apply(entries.DetachOwner(connection_owner.serial))

    def _drop_read(self, connection_owner: ConnectionOwner) -> None:
        if connection_owner.waiter is not None and connection_owner.waiter.reads:
            self.state.namespaces[connection_owner.namespace].engine.drop(connection_owner.waiter)
            connection_owner.waiter = None

    def _make_connection_op(self, connection_owner: ConnectionOwner) -> ops.Op:
        chance = self.chance
        key, queue, value = chance.choice(KEYS), chance.choice(QUEUES), chance.choice(VALUES)
        number = len(self.records) + 1  # larger than every number in use
        makers: tuple[tuple[Callable[[], ops.Op], int], ...] = (
            (lambda: ops.Set(0, key, value), 2),
            (lambda: ops.Add(0, b"g", 1), 1),
            (lambda: ops.MultiSet(0, [(one, value) for one in self._some_keys()]), 1),
            (lambda: ops.Delete(0, key), 1),
            (lambda: ops.Push(0, queue, b"visit %d" % number), 4),
            (lambda: ops.TurnPop(0, queue), 4),
            (lambda: ops.WaitOrTurn(number, chance.choice((*QUEUES, *QUEUES, key))), 8),
            (lambda: ops.Wait(number, chance.choices(KEYS, k=chance.choice((0, 2, 3))), ops.MAX_WAIT_S), 3),
            (lambda: ops.Arrive(number, chance.choice(GATES), chance.randint(0, 4), ops.MAX_WAIT_S), 4),
            (lambda: ops.Drop(0, 0), 3),
            (lambda: ops.Peek(0, key), 1),
            (lambda: ops.Check(0, [key]), 1),
            (lambda: ops.Ping(7), 1),
        )
        make, weights = zip(*makers, strict=True)
        op: ops.Op = chance.choices(make, weights)[0]()
        return op

    # The clock, and namespaces

    def _time_out(self) -> None:
        waiting = [
            (one.serial, number)
            for one in self.state.sessions.values()
            for number, waiter in one.waiting.items()
            if not waiter.reads
        ]
        if waiting and self.chance.random() < 0.9:
            self.apply(entries.TimeOutRequest(*self.chance.choice(waiting)))
        else:  # one that was overtaken
            self.apply(entries.TimeOutRequest(self.chance.choice([*self.clients, 999, -1]), self.chance.randint(1, 9)))

    def _expire_lease(self) -> None:
        leases = [
            (one.serial, key, number) for one in self.state.sessions.values() for key, (_, number) in one.ttls.items()
        ]
        if leases:
            serial, key, number = self.chance.choice(leases)
            self.apply(entries.ExpireLease(serial, key, number - (self.chance.random() < 0.2)))  # some were overtaken

    def _fire_timer(self) -> None:
        timers = [
            (one.id, place[0].kind, place[1], timer[0])
            for one in self.state.namespaces.values()
            for place, timer in one.objects.timers.items()
        ]
        if timers:
            namespace, kind, name, number = self.chance.choice(timers)
            self.apply(entries.FireTimer(namespace, kind, name, number - (self.chance.random() < 0.1)))

    def _continue_delete(self) -> None:
        clearing = [one.id for one in self.state.namespaces.values() if one.engine.clearing]
        if clearing or self.chance.random() < 0.1:
            self.apply(entries.ContinueDelete(self.chance.choice(clearing or [0, 999])))

    def _end_idle_turns(self) -> None:
        for namespace in list(self.state.namespaces.values()):
            for turn in namespace.engine.idle_turns():
                owner: Any = turn.owner
                self.apply(entries.TimeOutRequest(owner.serial, turn.number))

    def _open_namespace(self) -> None:
        chance = self.chance
        self.apply(entries.OpenNamespace(chance.choice(("run", "job")), chance.randint(1, 4), chance.choice((None, 1))))

    def _close_namespace(self) -> None:
        self.apply(entries.CloseNamespace(self.chance.choice([*self.state.namespaces, 999])))
