"""The store's server: the state behind the connections, the clock that it has not, and the log where there is one.

Without a data directory, requests run at once on the state: `log` is None, and that is the whole difference. With one,
changes go through a `CommitQueue`, and run when they are durable.

The clock is here. Waits, sessions in their grace, leases that need heartbeats and timers of shared objects have their
deadlines in one heap. What is due is submitted as an entry, so that the log has it; only reads end without one. After a
restart every deadline counts from the moment of the restart.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from rallypoint.core import entries, ops
from rallypoint.core.deadlines import NEVER, Deadlines
from rallypoint.core.engine import Engine
from rallypoint.core.entries import (
    CloseNamespace,
    Detach,
    End,
    Entry,
    Fire,
    GoOn,
    Lapse,
    OpenNamespace,
    Start,
    TimeOut,
)
from rallypoint.core.objects import Objects
from rallypoint.core.session import Session
from rallypoint.core.snapshot import read, write
from rallypoint.core.state import InternalError, Namespace, State
from rallypoint.errors import StoreError
from rallypoint.server.base import RESERVE_BYTES, ServerBase
from rallypoint.server.c10d_connection import C10dConnection
from rallypoint.server.commit import CommitQueue
from rallypoint.server.connection import Connection
from rallypoint.server.native_connection import NativeConnection
from rallypoint.server.rounds import RoundListeners, holdings
from rallypoint.server.settings import DEFAULT_RECOVERY_S, Settings

__all__ = ["RETURN_S", "StoreServer"]

log = logging.getLogger("rallypoint.server")

FREEZE_KEYS = 50_000
"""From how many keys on the garbage collector is told to leave them alone, and again each time they have doubled."""

MAX_REFUSALS = 1024
"""How many requests of one session are remembered that found the disk full."""

RETURN_S = 5.0
"""How long clients have at least, after a restart, to come back to their sessions: a crowd takes a while."""


class StoreServer(ServerBase):
    """A state, and everybody who is connected to it."""

    FOLLOWED = frozenset((ops.Lease, ops.Unlease, ops.Act, ops.DeletePrefix, ops.Drop))
    """Operations after which `follow_up` has something to do, though they were answered."""

    def __init__(self, settings: Settings, storage: Any = None) -> None:
        super().__init__(settings)
        self.state = State()
        self.storage = storage
        self.log: CommitQueue | None = None
        self.recovery_s = 0.0
        self.rounds = RoundListeners(self)
        self.failed: BaseException | None = None
        """Why the storage cannot be trusted any more, if so."""

        self.on_failure: Callable[[], None] = lambda: None
        self._deadlines = Deadlines()
        self._ticks_at = NEVER
        self._timer: asyncio.TimerHandle | None = None
        self.refusals: dict[int, dict[int, None]] = {}
        """Of sessions, by their serials: the requests that found the disk full, and may come again."""

        self._starting: asyncio.Future[None] | None = None
        self._visitors = 0
        self._clearing: dict[int, None] = {}
        self._expected: dict[int, dict[bytes, None]] = {}  # the leases that have deadlines, by session
        self._frozen_keys = FREEZE_KEYS

    # Beginning and end

    async def open(self, sockets: Sequence[socket.socket]) -> None:
        """Recover the state where there is a storage, then start to serve on bound, listening sockets."""
        start = Start(
            entries.VERSION,
            secrets.token_bytes(16),
            self.settings.max_memory,
            self.settings.max_connection_memory,
            max(self.settings.max_memory // 4, RESERVE_BYTES),
            self.settings.max_sessions,
        )
        if self.storage is None:
            self.state.apply(start)
        else:
            await self._recover(start)
        await super().open(sockets)
        await self.rounds.reopen()

    async def _recover(self, start: Start) -> None:
        """Replay the log, and note in it that the server starts."""
        chunks, records = self.storage.recover()
        if chunks is not None:
            self.state = read(chunks)
        for record in records:
            self.state.apply(entries.decode(record))
            self.state.outputs.clear()
        told_s = self.settings.recovery_s
        self.recovery_s = DEFAULT_RECOVERY_S if told_s is None else told_s
        self.storage.attach(asyncio.get_running_loop())
        self.log = CommitQueue(self.storage, self._storage_failed, self._flush)
        self._starting = asyncio.get_running_loop().create_future()
        self.submit(start, self._starting.set_result)
        await self._starting
        now = time.monotonic()
        back_s = max(self.settings.grace_s, RETURN_S)
        for session in self.state.sessions.values():
            self._set(("session", session.serial), now + back_s)
            for key, ttl_s in session.live_ttls().items():
                self._set(("lease", session.serial, key), now + max(ttl_s, back_s))
        for namespace in self.state.namespaces.values():
            namespace.objects.changed_timers = list(namespace.objects.timers)
            self._arm_timers(namespace.id, namespace.objects)
            self._go_on_clearing(namespace)

    async def close(self) -> None:
        """Stop listening, hang up on everybody, and write the state down where there is a storage."""
        await self.rounds.close_all()
        await super().close()
        if self.storage is not None:
            while self.log is not None and not self.log.idle and not self.log.out_of_room and self.failed is None:
                await asyncio.sleep(0.001)
            if self.failed is None:
                self._save()
            self.storage.close()

    def _save(self) -> None:
        try:
            self.storage.save(write(self.state))
        except StoreError as error:
            log.warning("no snapshot was written, so the next start takes longer: %s", error)

    def _storage_failed(self, error: BaseException) -> None:
        log.critical("the storage failed, and the server ends: %s", error)
        self.failed = error
        if self._starting is not None and not self._starting.done():
            self._starting.set_exception(error)
        self.on_failure()

    # Handlers

    def torch_handler(self, connection: Connection) -> C10dConnection:
        return C10dConnection(self, connection, self.state.namespaces[0])

    def native_handler(self, connection: Connection) -> NativeConnection:
        return NativeConnection(self, connection, self.state.namespaces[0])

    def new_visitor(self) -> int:
        """Return a serial for a visitor, which no other has since the server started."""
        self._visitors -= 1
        return self._visitors

    # Changes

    def record(self, session: Session, payload: bytes) -> bytes:
        """Return the log's record of a request, of which we have the bytes: that of `entries.Request`."""
        return b"\x93\x00" + _encode_int(session.serial) + payload

    def submit(
        self,
        entry: Entry,
        done: Callable[[Any], None] | None = None,
        refuse: Callable[[StoreError], None] | None = None,
    ) -> None:
        """Have an entry applied, at once or once it is in the log; then call `done` with what came of it.

        Where the disk is full, `refuse` is called with the reason; without one, the entry is tried again.
        """
        if self.log is None:
            self._apply(entry, done)
        else:
            self.log.submit(entries.encode(entry), self, (entry, done, refuse))

    def committed(self, work: Any, size: int) -> None:
        """Apply an entry that is in the log now."""
        entry, done, _ = work
        self._apply(entry, done)

    def refuse(self, work: Any, size: int, error: StoreError) -> bool:
        """Refuse an entry that could not be written to the log, if somebody asked for it."""
        _, _, refuse = work
        if refuse is not None:
            refuse(error)
        return refuse is not None

    def _apply(self, entry: Entry, done: Callable[[Any], None] | None) -> None:
        may_end = [(session, [*session.waiting, *session.suspended]) for session in self._may_end(entry)]
        answer = self.state.apply(entry)
        for session, waits in may_end:
            if session.serial not in self.state.sessions:
                self._forget(session, waits)
        if isinstance(answer, InternalError):
            log.error("%s", answer)
        for namespace in self.state.namespaces.values():
            if namespace.objects.changed_timers:
                self._arm_timers(namespace.id, namespace.objects)
        self._deliver()
        if done is not None:
            done(answer)

    def _may_end(self, entry: Entry) -> list[Session]:
        """Return the sessions that an entry may end."""
        sessions = self.state.sessions
        if isinstance(entry, (OpenNamespace, CloseNamespace)):
            return [session for session in sessions.values() if session.namespace]
        serial = entry.session if isinstance(entry, End) else entry.owner if isinstance(entry, Detach) else 0
        return [sessions[serial]] if serial in sessions else []

    def _forget(self, session: Session, waits: list[int]) -> None:
        """Drop the deadlines of a session that has ended."""
        self.refusals.pop(session.serial, None)
        self._deadlines.drop(("session", session.serial))
        for number in waits:
            self._deadlines.drop((session.serial, number))
        for key in (*session.ttls, *self._expected.pop(session.serial, ())):
            self._deadlines.drop(("lease", session.serial, key))

    def settle(self, engine: Engine) -> None:
        """Send what an engine has for waiting clients."""
        self.state.settle(engine)
        self._deliver()

    def _deliver(self) -> None:
        while self.state.outputs:
            for owner, number, answer in self.state.take_outputs():
                if number:
                    self._deadlines.drop((owner.serial, number))
                if owner.link is not None:
                    owner.link.deliver(number, answer)

    def _flush(self) -> None:
        """After a commit: the clock may have something new to wait for."""
        if self._deadlines.earliest < self._ticks_at:
            self._arm()

    # What the handlers call after a request

    def waits(self, session: Session, op: ops.Op) -> None:
        """Note how long a request may wait; one that came again after a cut keeps its deadline."""
        timeout_s = getattr(op, "timeout_s", None)
        key = (session.serial, op.number)
        if timeout_s is not None and op.number in session.waiting and key not in self._deadlines:
            self._set(key, time.monotonic() + timeout_s)
        if op.__class__ in self.FOLLOWED:
            self.follow_up(session, op)

    def follow_up(self, session: Session, op: ops.Op) -> None:
        """Set the timers that a request has brought, and drop those that it has ended."""
        if isinstance(op, ops.Lease):
            if op.ttl_s and op.key in session.ttls:
                self._expect_beats(session, op.key, time.monotonic() + op.ttl_s)
        elif isinstance(op, ops.Unlease):
            self._deadlines.drop(("lease", session.serial, op.key))
        elif isinstance(op, ops.Drop):
            self._deadlines.drop((session.serial, op.target))
        elif isinstance(op, ops.DeletePrefix):
            self._go_on_clearing(self.state.namespaces[session.namespace])
        elif isinstance(op, ops.Act):
            objects = self.state.namespaces[session.namespace].objects
            if objects.changed_timers:
                self._arm_timers(session.namespace, objects)

    def _expect_beats(self, session: Session, key: bytes, until: float) -> None:
        """Set the deadline of a lease; those of leases that were deleted go when they are as many as the others."""
        expected = self._expected.setdefault(session.serial, {})
        expected[key] = None
        if len(expected) > 2 * len(session.ttls) + 64:
            for gone in [one for one in expected if one not in session.ttls]:
                del expected[gone]
                self._deadlines.drop(("lease", session.serial, gone))
        self._set(("lease", session.serial, key), until)

    def note_refusal(self, session: Session, number: int) -> None:
        """Remember that a request was not carried out, for it has a number that looks as if it had been."""
        refusals = self.refusals.setdefault(session.serial, {})
        refusals[number] = None
        if len(refusals) > MAX_REFUSALS:
            del refusals[next(iter(refusals))]

    def beat(self, session: Session) -> None:
        """Keep the leases of a session for another time to live."""
        now = time.monotonic()
        for key, ttl_s in session.live_ttls().items():
            self._set(("lease", session.serial, key), now + ttl_s)

    def attached(self, session: Session) -> None:
        """Note that a session has a connection."""
        self._deadlines.drop(("session", session.serial))

    def detach(self, session: Session) -> None:
        """Note that a session has lost its connection: its grace begins."""
        self._set(("session", session.serial), time.monotonic() + self.settings.grace_s)
        self.submit(Detach(session.serial))

    def _go_on_clearing(self, namespace: Namespace) -> None:
        """Go on with a deletion that is under way, a slice at a time, with others in between."""
        if namespace.engine.clearing and namespace.id not in self._clearing:
            self._clearing[namespace.id] = None
            asyncio.get_running_loop().call_soon(self._clear_slice, namespace)

    def _clear_slice(self, namespace: Namespace) -> None:
        def cleared(_: object) -> None:
            self._clearing.pop(namespace.id, None)
            self._go_on_clearing(namespace)

        self.submit(GoOn(namespace.id), cleared)

    # The clock

    def _set(self, key: Any, at: float) -> None:
        self._deadlines.set(key, at)
        if self._deadlines.earliest < self._ticks_at:
            self._arm()

    def _arm_timers(self, namespace: int, objects: Objects) -> None:
        changed, objects.changed_timers = objects.changed_timers, []
        now = time.monotonic()
        for place in changed:
            key = ("timer", namespace, place)
            timer = objects.timers.get(place)
            if timer is None:
                self._deadlines.drop(key)
            else:
                self._set(key, now + timer[1])

    def _arm(self) -> None:
        """Have `_tick` called when the next deadline passes."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._ticks_at = self._deadlines.earliest
        if self._ticks_at < NEVER:
            delay_s = max(0.0, self._ticks_at - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        """End what is due."""
        self._timer = None
        for key in self._deadlines.due(time.monotonic()):
            self._expire(key)
        self._arm()

    def _expire(self, key: Any) -> None:
        state = self.state
        if key[0] == "session":
            self.submit(End(key[1]))
        elif key[0] == "lease":
            self.submit(Lapse(key[1], key[2]))
        elif key[0] == "timer":
            _, namespace, place = key
            found = state.namespaces.get(namespace)
            timer = found.objects.timers.get(place) if found is not None else None
            if timer is not None:
                self.submit(Fire(namespace, place[0].kind, place[1], timer[0]))
        else:
            serial, number = key
            session = state.sessions.get(serial)
            waiter = session.waiting.get(number) if session is not None else None
            if session is not None and waiter is not None and waiter.reads:
                state.outputs.append((session, number, session.time_out(number)))
                self._deliver()
            elif waiter is not None:
                self.submit(TimeOut(serial, number))

    def sweep(self) -> None:
        """Take back the turns that nobody used, and see to the storage."""
        for namespace in self.state.namespaces.values():
            for turn in namespace.engine.idle_turns():
                owner: Any = turn.owner
                self.submit(TimeOut(owner.serial, turn.number))
        if self.storage is not None:
            self.storage.compact_if_due()
        keys: int = sum(one.engine.execute(ops.Count(0, b"")) for one in self.state.namespaces.values())
        if keys > 2 * self._frozen_keys:  # a collection looks at the index of all keys, for 30 ms a million
            gc.freeze()
            self._frozen_keys = keys

    # Rounds

    def open_round(self, name: str, scope: int, number: int | None, done: Callable[[int | Exception], None]) -> None:
        self.rounds.open(name, scope, number, done)

    def close_round(self, name: str, scope: int | None, done: Callable[[bool], None]) -> None:
        self.rounds.close(name, scope, done)

    @property
    def in_rounds(self) -> int:
        return self.rounds.connections

    # For the statistics

    def holdings(self) -> dict[str, Any]:
        return {
            **holdings(self.state.namespaces[0]),
            "doors": self.rounds.statistics(),
            **({"storage": self.storage.statistics()} if self.storage is not None else {}),
        }

    def held_bytes(self) -> int:
        spaces = self.state.namespaces.values()
        return sum(one.engine.size + one.engine.parked for one in spaces) + self.state.budget.kept

    def describe_sessions(self) -> Sequence[Any]:
        return [session for session in self.state.sessions.values() if not session.namespace]


def _encode_int(number: int) -> bytes:
    """Encode a positive integer as msgpack does."""
    if number < 128:
        return bytes((number,))
    if number < 1 << 8:
        return b"\xcc" + bytes((number,))
    if number < 1 << 16:
        return b"\xcd" + number.to_bytes(2, "big")
    return b"\xce" + number.to_bytes(4, "big") if number < 1 << 32 else b"\xcf" + number.to_bytes(8, "big")
