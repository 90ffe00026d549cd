"""The store's server: the state behind the connections, and the log where there is one.

Without a data directory, requests run at once on the state: `log` is None, and that is the whole difference. With one,
changes go through a `CommitQueue`, and run when they are durable. What the time brings is `clock.py`'s.

Entries that nobody waits for (a client is gone, a grace is over) and that find the disk full are `retries.py`'s.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rallypoint.core import entries, ops
from rallypoint.core.engine import Engine
from rallypoint.core.entries import CloseNamespace, Detach, End, Entry, GoOn, OpenNamespace, Start, TimeOut
from rallypoint.core.records import Turn
from rallypoint.core.session import Session
from rallypoint.core.snapshot import read, write
from rallypoint.core.state import Namespace, OtherVersion, State
from rallypoint.errors import StoreError
from rallypoint.server.base import RESERVE_BYTES, ServerBase
from rallypoint.server.c10d_connection import C10dConnection
from rallypoint.server.clock import RETURN_S, Clock
from rallypoint.server.commit import CommitQueue
from rallypoint.server.connection import Connection
from rallypoint.server.multiplexed import MultiplexedConnection
from rallypoint.server.native_connection import NativeConnection
from rallypoint.server.notices import Notices
from rallypoint.server.retries import Retries
from rallypoint.server.rounds import Rounds, holdings
from rallypoint.server.settings import DEFAULT_RECOVERY_S, Settings
from rallypoint.storage.errors import Deposed, StoreGone

__all__ = ["StoreServer"]

log = logging.getLogger("rallypoint.server")

FREEZE_KEYS = 50_000
"""From how many keys on the garbage collector is told to leave them alone, and again each time they have doubled."""

MAX_REFUSALS = 1024
"""How many requests of one session are remembered that found the disk full."""

MAX_ENDED = 16_384
"""How many ids of sessions that ended are remembered."""

SLICE_ENTRIES = 256
"""How many entries of its own the server submits, or replays when it starts, in one turn of the event loop."""

CLOSE_S = 5.0
"""How long a clean stop waits for commits that are under way, and for replies to be sent."""


class StoreServer(ServerBase):
    """A state, and everybody who is connected to it."""

    def __init__(self, settings: Settings, storage: Any = None) -> None:
        super().__init__(settings)
        self.state = State()
        self.clock = Clock(self)
        self.storage = storage
        self.log: CommitQueue | None = None
        self.recovery_s = 0.0
        self.rounds = Rounds(self)
        self.notices = Notices(self)
        self.retries = Retries(self)
        self.failed: BaseException | None = None
        """Why the storage cannot be trusted any more, if so."""

        self.on_failure: Callable[[], None] = lambda: None
        self.refusals: dict[int, dict[int, None]] = {}
        """Of sessions, by their serials: the requests that found the disk full, and may come again."""

        self.openings: dict[bytes, list[Callable[[], None]]] = {}
        """Sessions with ids that clients chose and that are being opened: who wants the same one next."""

        self.ended: dict[bytes, None] = {}
        """The ids of the last sessions that ended: a hello that comes late must not open them again."""

        self._starting: asyncio.Future[None] | None = None
        self._visitors = 0
        self._clearing: dict[int, None] = {}
        self._frozen_keys = FREEZE_KEYS

    # Beginning and end

    async def open(self, sockets: Sequence[socket.socket]) -> None:
        """Recover the state where there is a storage, then start to serve on bound, listening sockets."""
        if self.storage is None:
            self.state.apply(self._start)
        else:
            await self._recover()
        await super().open(sockets)

    @property
    def _start(self) -> Start:
        """What a server says in the log when it starts."""
        settings = self.settings
        limits = (settings.max_memory, settings.max_connection_memory, self._reserve, settings.max_sessions)
        return Start(entries.VERSION, secrets.token_bytes(16), *limits)

    @property
    def _reserve(self) -> int:
        return max(self.settings.max_memory // 4, RESERVE_BYTES)

    async def stand_by(self, sockets: Sequence[socket.socket], elsewhere: bytes) -> None:
        """Serve nobody yet: follow the log of another server (`apply_record`), and tell clients where that is."""
        self.elsewhere = elsewhere
        await super().open(sockets)

    def restore(self, chunks: Iterable[bytes]) -> None:
        """Begin with a snapshot of the state."""
        self.state = read(chunks)

    def apply_record(self, record: bytes) -> None:
        """Apply an entry that is in the log already."""
        self.state.apply(entries.decode(record))
        self.state.outputs.clear()

    async def abandon(self) -> None:
        """Answer nothing more, for another server may lead: hang up on everybody."""
        self.clock.stop()
        if self.storage is not None:
            self.storage.close()
        await super().close()

    async def _recover(self) -> None:
        """Replay the log, and go on with it."""
        try:
            await self._replay()
        except OtherVersion as error:
            raise OtherVersion(
                f"cannot start: {self.settings.data_dir} was written by another version of rallypoint ({error}). "
                f"Finish its jobs with that version, or choose another data directory (serve --data-dir)"
            ) from None
        await self.begin()

    async def begin(self, back_s: float = RETURN_S) -> None:
        """Begin to write the log, whose state this is: note in it that the server starts.

        `back_s` is how long clients have to come back to their sessions.
        """
        told_s = self.settings.recovery_s
        self.recovery_s = DEFAULT_RECOVERY_S if told_s is None else told_s
        self.storage.attach(asyncio.get_running_loop())
        self.log = CommitQueue(self.storage, self._storage_failed, self._reserve)
        self._starting = asyncio.get_running_loop().create_future()
        self.submit(self._start, self._starting.set_result, self._cannot_start)
        await asyncio.shield(self._starting)
        self.clock.start(back_s)
        for namespace in self.state.namespaces.values():
            self.go_on_clearing(namespace)

    async def _replay(self) -> None:
        chunks, records = self.storage.recover()
        if chunks is not None:
            self.restore(chunks)
        for count, record in enumerate(records, 1):
            self.apply_record(record)
            if not count % SLICE_ENTRIES:
                await asyncio.sleep(0)  # it may be told to end

    def _cannot_start(self, error: StoreError) -> None:
        if self._starting is not None:
            failure = StoreError(f"cannot start: {error}")
            failure.__cause__ = error
            self._starting.set_exception(failure)

    async def close(self) -> None:
        """Stop listening and reading, answer what was asked, hang up, and write the state down."""
        ends_at = time.monotonic() + CLOSE_S
        self.stop()
        await self._finish(ends_at)
        await super().close()
        if self.storage is not None:
            if await self._finish(ends_at, gone=True):
                self._save()
            self.storage.close()

    async def _finish(self, ends_at: float, gone: bool = False) -> bool:
        """Wait for the log, and until all connections are gone; return whether there is nothing left to wait for.

        Not for ever: a disk or a peer may hang.
        """
        while self.log is not None and self.failed is None and time.monotonic() < ends_at:
            if self.log.idle and not (gone and self.connections):
                return True
            await asyncio.sleep(0.001)
        return self.log is not None and self.failed is None and self.log.idle

    def _save(self) -> None:
        try:
            self.storage.save(write(self.state))
        except StoreError as error:
            log.warning("no snapshot was written, so the next start takes longer: %s", error)

    def _storage_failed(self, error: BaseException) -> None:
        if not isinstance(error, (Deposed, StoreGone)):
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

    def multiplexed_handler(self, connection: Connection) -> MultiplexedConnection:
        return MultiplexedConnection(self, connection)

    def new_visitor(self) -> int:
        """Return a serial for a visitor, which no other has since the server started."""
        self._visitors -= 1
        return self._visitors

    # Changes

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

    def refuse(self, work: Any, size: int, error: StoreError, last: bool) -> bool:
        """Refuse an entry that could not be written to the log, if somebody asked for it; else try it again later."""
        entry, done, refuse = work
        if not last and not isinstance(entry, OpenNamespace):
            return False
        if refuse is not None:
            refuse(error)
        else:
            self.retries.add(entry, done)
        return True

    def _apply(self, entry: Entry, done: Callable[[Any], None] | None) -> None:
        may_end = [(session, [*session.waiting, *session.suspended]) for session in self._may_end(entry)]
        answer = self.state.apply(entry)
        for session, waits in may_end:
            if session.serial not in self.state.sessions:
                self.refusals.pop(session.serial, None)
                self.clock.forget(session, waits)
                self.ended[session.id] = None
                if len(self.ended) > MAX_ENDED:
                    del self.ended[next(iter(self.ended))]
                if session.link is not None:
                    session.link.session_ended()
        for namespace in self.state.namespaces.values():
            if namespace.objects.changed_timers:
                self.clock.arm_timers(namespace)
            if namespace.engine.clearing:
                self.go_on_clearing(namespace)
        self.deliver()
        if done is not None:
            done(answer)

    def _may_end(self, entry: Entry) -> list[Session]:
        """Return the sessions that an entry may end."""
        sessions = self.state.sessions
        if isinstance(entry, (OpenNamespace, CloseNamespace)):
            return [session for session in sessions.values() if session.namespace]
        serial = entry.session if isinstance(entry, End) else entry.owner if isinstance(entry, Detach) else 0
        return [sessions[serial]] if serial in sessions else []

    def settle(self, engine: Engine) -> None:
        """Send what an engine has for waiting clients."""
        self.state.settle(engine)
        self.deliver()

    def deliver(self) -> None:
        """Send what the state has for clients."""
        while self.state.outputs:
            for owner, number, answer in self.state.take_outputs():
                if number:
                    self.clock.deadlines.drop((owner.serial, number))
                if owner.link is not None:
                    owner.link.deliver(number, answer)

    def confirmed(self, do: Callable[[], None]) -> None:
        """Do something that only reads: at once, or once it is known that no other server has taken over the log."""
        if self.log is None or not self.log.confirms:
            do()
        else:
            self.log.confirm(do)

    def detach(self, session: Session) -> None:
        """Note that a session has lost its connection: its grace begins."""
        self.clock.detached(session)
        self.submit(Detach(session.serial))

    def note_refusal(self, session: Session, number: int) -> None:
        """Remember that a request was not carried out, for it has a number that looks as if it had been."""
        refusals = self.refusals.setdefault(session.serial, {})
        refusals[number] = None
        if len(refusals) > MAX_REFUSALS:
            del refusals[next(iter(refusals))]

    # What is done a slice at a time, with others in between

    def go_on_clearing(self, namespace: Namespace) -> None:
        """Go on with a deletion that is under way, if there is one."""
        if namespace.engine.clearing and namespace.id not in self._clearing:
            self._clearing[namespace.id] = None
            asyncio.get_running_loop().call_soon(self._clear_slice, namespace)

    def _clear_slice(self, namespace: Namespace) -> None:
        def cleared(_: object) -> None:
            self._clearing.pop(namespace.id, None)
            self.go_on_clearing(namespace)

        self.submit(GoOn(namespace.id), cleared)

    def sweep(self) -> None:
        """Take back the turns that nobody used, log bugs, and see to the storage; not while another server leads."""
        if self.elsewhere:
            return
        self.clock.now()
        for namespace in self.state.namespaces.values():
            self._take_back(namespace.engine.idle_turns())
            while namespace.engine.bugs:
                log.error("%s", namespace.engine.bugs.popleft())
        if self.storage is not None:
            self.storage.compact_if_due()
        keys: int = sum(one.engine.execute(ops.Count(0, b"")) for one in self.state.namespaces.values())
        if keys > 2 * self._frozen_keys:  # a collection looks at the index of all keys, for 30 ms a million
            gc.freeze()
            self._frozen_keys = keys

    def _take_back(self, turns: list[Turn]) -> None:
        for turn in turns[:SLICE_ENTRIES]:
            owner: Any = turn.owner
            self.submit(TimeOut(owner.serial, turn.number))
        if len(turns) > SLICE_ENTRIES:
            asyncio.get_running_loop().call_soon(self._take_back, turns[SLICE_ENTRIES:])

    # Rounds

    def close_round(self, name: str, scope: int | None, done: Callable[[bool], None]) -> None:
        self.rounds.close(name, scope, done)

    # For the statistics

    def health(self) -> str:
        full = self.log is not None and self.log.disk_full
        return "ok, but the disk is full: changes are refused" if full else "ok"

    def holdings(self) -> dict[str, Any]:
        return {
            **holdings(self.state.namespaces[0]),
            "namespaces": self.rounds.statistics(),
            "rounds": len(self.state.namespaces) - 1,
            **({"storage": self._storage_statistics()} if self.storage is not None else {}),
        }

    def _storage_statistics(self) -> dict[str, Any]:
        return {**self.storage.statistics(), "disk_full": self.log is not None and self.log.disk_full}

    def held_bytes(self) -> int:
        spaces = self.state.namespaces.values()
        held = sum(one.engine.size + one.engine.parked for one in spaces) + self.state.budget.kept
        return held if self.log is None else held + self.log.bytes

    def describe_sessions(self) -> Sequence[Any]:
        return list(self.state.sessions.values())
