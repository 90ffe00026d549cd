"""`StoreServer`: a state, and its log, if there is one; the application behind a `Listener`.

Without a storage, requests run on the state at once: `log` is None, and that is the whole difference. With a storage,
changes go through a `CommitQueue` and run once they are durable. `clock.py` handles deadlines, `housekeeping.py` the
work of every second, and `retries.py` the server's own entries (a client has left, a grace period is over) that found
the disk full.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rallypoint.core import entries
from rallypoint.core.costs import SESSION_BYTES
from rallypoint.core.engine import Engine
from rallypoint.core.entries import CloseNamespace, DetachOwner, EndSession, Entry, OpenNamespace, StartServer
from rallypoint.core.session import Session
from rallypoint.core.snapshot import read, write
from rallypoint.core.state import OtherVersion, State
from rallypoint.errors import StoreError
from rallypoint.protocol import BadMessage
from rallypoint.protocol.native import read_standby
from rallypoint.server.admission import Admission
from rallypoint.server.clock import RETURN_S, Clock
from rallypoint.server.commit import CommitQueue
from rallypoint.server.connections.c10d_connection import C10dConnection
from rallypoint.server.connections.connection import Connection, ProtocolHandler
from rallypoint.server.connections.greeting import PeerProtocol, Redirect
from rallypoint.server.connections.limits import RESERVE_BYTES
from rallypoint.server.connections.multiplexed import MultiplexedConnection
from rallypoint.server.connections.native_connection import NativeConnection
from rallypoint.server.housekeeping import Housekeeping
from rallypoint.server.http_site import HttpSite, ServerStatistics, about, statistics
from rallypoint.server.listener import Listener
from rallypoint.server.replication.notices import Notices
from rallypoint.server.retries import Retries
from rallypoint.server.round_namespaces import RoundNamespaces, holdings
from rallypoint.server.settings import DEFAULT_RECOVERY_S, Settings
from rallypoint.server.status.store_status import StoreStatus
from rallypoint.storage.errors import Deposed, StoreGone

__all__ = ["StoreServer"]

log = logging.getLogger("rallypoint.server")

MAX_REFUSALS = 1024
"""Requests of one session remembered as refused by a full disk."""

MAX_ENDED = 16_384
"""Ids of ended sessions that are remembered."""

SLICE_ENTRIES = 256
"""Entries that the server replays at its start in one turn of the event loop."""

CLOSE_S = 5.0
"""How long a clean stop waits for commits in flight, and for replies to be sent."""


class StoreServer:
    """A state, its log, and the listener through which clients reach it; `monotonic` is the clock of its deadlines."""

    def __init__(
        self,
        settings: Settings,
        storage: Any = None,
        admission: Admission | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.listener = Listener(settings, self, admission or Admission())
        self.turns = self.listener.turns
        self.elsewhere = b""
        """The reply to a native preface while another server leads (`native.standby`); empty while this one leads."""

        self.state = State()
        self.clock: Clock = Clock(self, monotonic)
        self.storage = storage
        self.log: CommitQueue | None = None
        self.recovery_s = 0.0
        self.rounds = RoundNamespaces(self)
        self.status = StoreStatus(self)
        self.site = HttpSite(
            about, self.health, self.statistics, None, self.rounds.close, lambda: not self.elsewhere, self.status.source
        )
        self.notices = Notices(self.listener.handlers)
        self.listener.admission.denied.on_new = self.notices.tell_denied
        self.housekeeping = Housekeeping(self)
        self.retries = Retries(self)
        self.failed: BaseException | None = None
        """The error after which the storage cannot be trusted."""

        self.on_failure: Callable[[], None] = lambda: None
        self.refusals: dict[int, dict[int, None]] = {}
        """By session: the requests refused by a full disk, which the client may repeat."""

        self.openings: dict[bytes, list[Callable[[], None]]] = {}
        """Client-chosen session ids being opened, each with the hellos that wait to open the same one."""

        self.ended: dict[bytes, None] = {}
        """Ids of the sessions that ended last: a late hello must not open them again."""

        self.refused_sessions = 0
        """Number of sessions over the limit so far."""

        self._starting: asyncio.Future[None] | None = None
        self._connection_owners = 0

    # Start and stop

    async def open(self, sockets: Sequence[socket.socket]) -> None:
        """Recover the state if there is a storage, then start to serve on bound, listening sockets."""
        if self.storage is None:
            self.state.apply(self._start)
        else:
            await self._recover()
        await self._listen(sockets)

    async def _listen(self, sockets: Sequence[socket.socket]) -> None:
        await self.listener.open(sockets)
        self.housekeeping.start()

    @property
    def _start(self) -> StartServer:
        """The entry with which a server starts its part of the log."""
        settings = self.settings
        sessions = min(settings.max_sessions, self._reserve // 2 // SESSION_BYTES)
        limits = (settings.max_memory, settings.max_connection_memory, self._reserve, sessions)
        return StartServer(entries.VERSION, secrets.token_bytes(16), *limits)

    @property
    def _reserve(self) -> int:
        return max(self.settings.max_memory // 4, RESERVE_BYTES)

    async def stand_by(self, sockets: Sequence[socket.socket], elsewhere: bytes) -> None:
        """Follow the log of the leader (`apply_record`), and reply to clients with `elsewhere`, which names it."""
        self.elsewhere = elsewhere
        await self._listen(sockets)

    def restore(self, chunks: Iterable[bytes]) -> None:
        """Replace the state by a snapshot."""
        self.state = read(chunks)

    def apply_record(self, record: bytes) -> None:
        """Apply an entry of the log."""
        self.state.apply(entries.decode(record))
        self.state.outputs.clear()

    async def abandon(self) -> None:
        """Close all connections and answer nothing more: another server may lead."""
        self.clock.stop()
        if self.storage is not None:
            self.storage.close()
        await self.listener.close()

    async def _recover(self) -> None:
        """Replay the log, then begin to write it."""
        try:
            await self._replay()
        except OtherVersion as error:
            raise OtherVersion(
                f"cannot start: {self.settings.data_dir} was written by another version of rallypoint ({error}). "
                f"Finish its jobs with that version, or choose another data directory (serve --data-dir)"
            ) from None
        await self.begin()

    async def begin(self, back_s: float = RETURN_S) -> None:
        """Begin to write the log that was replayed or followed so far; its first entry is `StartServer`.

        Clients have `back_s` to resume their sessions.
        """
        told_s = self.settings.recovery_s
        self.recovery_s = DEFAULT_RECOVERY_S if told_s is None else told_s
        self.storage.attach(asyncio.get_running_loop())
        self.log = CommitQueue(self.storage, self._storage_failed, self._reserve, self.turns)
        self._starting = asyncio.get_running_loop().create_future()
        self.submit(self._start, self._starting.set_result, self._cannot_start)
        await asyncio.shield(self._starting)
        self.clock.start(back_s)
        for namespace in self.state.namespaces.values():
            self.housekeeping.continue_change(namespace)

    async def _replay(self) -> None:
        chunks, records = self.storage.recover()
        if chunks is not None:
            self.restore(chunks)
        for count, record in enumerate(records, 1):
            self.apply_record(record)
            if not count % SLICE_ENTRIES:
                await asyncio.sleep(0)  # let a signal stop the server

    def _cannot_start(self, error: StoreError) -> None:
        if self._starting is not None:
            failure = StoreError(f"cannot start: {error}")
            failure.__cause__ = error
            self._starting.set_exception(failure)

    async def close(self) -> None:
        """Stop listening and reading, answer pending requests, close all connections, and save a snapshot."""
        ends_at = time.monotonic() + CLOSE_S
        self.listener.stop()
        await self._finish(ends_at)
        await self.listener.close()
        if self.storage is not None:
            if await self._finish(ends_at, gone=True):
                self._save()
            self.storage.close()

    async def _finish(self, ends_at: float, gone: bool = False) -> bool:
        """Wait for commits in flight, and with `gone` for all connections to close; return whether the log is idle.

        Give up at `ends_at`: a disk or a peer may hang.
        """
        while self.log is not None and self.failed is None and time.monotonic() < ends_at:
            if self.log.idle and not (gone and self.listener.connections):
                return True
            await asyncio.sleep(0.001)
        return self.log is not None and self.failed is None and self.log.idle

    def _save(self) -> None:
        try:
            self.storage.save(write(self.state))
        except StoreError as error:
            log.warning("cannot write a snapshot; the next start takes longer: %s", error)

    def _storage_failed(self, error: BaseException) -> None:
        if not isinstance(error, (Deposed, StoreGone)):
            log.critical("storage failed; the server stops: %s", error)
        self.failed = error
        if self._starting is not None and not self._starting.done():
            self._starting.set_exception(error)
        self.on_failure()

    # Called by the listener

    def handler(self, protocol: PeerProtocol, connection: Connection) -> ProtocolHandler | Redirect:
        """Return the handler of a new connection; a standby sends native clients to the leader."""
        if self.elsewhere:
            if protocol is PeerProtocol.TORCH:
                raise BadMessage(_no_torch_clients(self.elsewhere))
            return Redirect(self.elsewhere)
        if protocol is PeerProtocol.TORCH:
            return self.torch_handler(connection)
        if protocol is PeerProtocol.NATIVE:
            return self.native_handler(connection)
        return MultiplexedConnection(self, connection)

    def torch_handler(self, connection: Connection) -> C10dConnection:
        """Return a handler of PyTorch's protocol."""
        return C10dConnection(self, connection, self.state.namespaces[0])

    def native_handler(self, connection: Connection) -> NativeConnection:
        """Return a handler of the native protocol."""
        return NativeConnection(self, connection, self.state.namespaces[0])

    def held_bytes(self) -> int:
        """Return the size of the state in bytes, and of what waits to become part of it."""
        held = self.state.memory.total + SESSION_BYTES * len(self.state.sessions)
        return held if self.log is None else held + self.log.bytes

    # Called by handlers

    def new_connection_owner(self) -> int:
        """Return a serial for a connection without a session, unique since the server started."""
        self._connection_owners -= 1
        return self._connection_owners

    # Changes

    def submit(
        self,
        entry: Entry,
        done: Callable[[Any], None] | None = None,
        refuse: Callable[[StoreError], None] | None = None,
    ) -> None:
        """Apply an entry, at once or once it is committed; then call `done` with its result.

        If the disk is full, call `refuse` with the error; without `refuse`, retry the entry.
        """
        if self.log is None:
            self._apply(entry, done)
        else:
            self.log.submit(entries.encode(entry), self, (entry, done, refuse))

    def committed(self, work: Any, size: int) -> None:
        """Apply a committed entry."""
        entry, done, _ = work
        self._apply(entry, done)

    def refuse(self, work: Any, size: int, error: StoreError, last: bool) -> bool:
        """Refuse an entry that found no room in the log, if a client waits for it; otherwise retry it later."""
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
                if session.handler is not None:
                    session.handler.session_ended()
        for namespace in self.state.namespaces.values():
            if namespace.objects.changed_timers:
                self.clock.arm_timers(namespace)
            if namespace.engine.clearing or namespace.engine.read_work:
                self.housekeeping.continue_change(namespace)
        self.deliver()
        if done is not None:
            done(answer)

    def _may_end(self, entry: Entry) -> list[Session]:
        """Return the sessions that an entry may end."""
        sessions = self.state.sessions
        if isinstance(entry, (OpenNamespace, CloseNamespace)):
            return [session for session in sessions.values() if session.namespace]
        serial = (
            entry.session if isinstance(entry, EndSession) else entry.owner if isinstance(entry, DetachOwner) else 0
        )
        return [sessions[serial]] if serial in sessions else []

    def settle(self, engine: Engine) -> None:
        """Send the replies that an engine has for waiting clients."""
        self.state.settle(engine)
        self.deliver()
        if engine.clearing or engine.read_work:
            for namespace in self.state.namespaces.values():
                self.housekeeping.continue_change(namespace)

    def deliver(self) -> None:
        """Send the replies and pushes that the state has for clients."""
        while self.state.outputs:
            for owner, number, answer in self.state.take_outputs():
                if number:
                    self.clock.deadlines.drop((owner.serial, number))
                if owner.handler is not None:
                    owner.handler.deliver(number, answer)

    def confirmed(self, do: Callable[[], None]) -> None:
        """Run a read: at once, or once it is confirmed that no other server has taken over the log."""
        if self.log is None or not self.log.confirms:
            do()
        else:
            self.log.confirm(do)

    def detach(self, session: Session) -> None:
        """Note that a session has lost its connection: its grace period begins."""
        self.clock.detached(session)
        if session.over:  # its end may take long, and many may end at once
            self.turns.resume(lambda: self.submit(DetachOwner(session.serial)))
        else:
            self.submit(DetachOwner(session.serial))

    def note_refusal(self, session: Session, number: int) -> None:
        """Remember that a request was not executed: by its number it would look like an executed one."""
        refusals = self.refusals.setdefault(session.serial, {})
        refusals[number] = None
        if len(refusals) > MAX_REFUSALS:
            del refusals[next(iter(refusals))]

    # Shown over HTTP

    def health(self, in_full: bool = True) -> str:
        """Return the reply to a health check, which has no addresses anyway."""
        full = self.log is not None and self.log.disk_full
        return "ok, but the disk is full: changes are refused" if full else "ok"

    def statistics(self) -> ServerStatistics:
        """Return counts and sizes, and the clients and sessions."""
        held = {
            **holdings(self.state.namespaces[0]),
            "namespaces": self.rounds.statistics(),
            "rounds": len(self.state.namespaces) - 1,
            **({} if self.storage is None or self.elsewhere else {"storage": self._storage_statistics()}),
        }
        sessions = list(self.state.sessions.values())
        return statistics(self.listener, about(), held, sessions, self.refused_sessions)

    def _storage_statistics(self) -> dict[str, Any]:
        return {**self.storage.statistics(), "disk_full": self.log is not None and self.log.disk_full}


def _no_torch_clients(elsewhere: bytes) -> str:
    """Return why a standby drops a PyTorch client: its protocol has no reply that names the leader."""
    told = read_standby(elsewhere)
    leader = told.leader if told is not None else ""
    where = f"the leader is at {leader}: connect there, or" if leader else "no server leads now: connect"
    return f"this server is a standby and cannot serve PyTorch clients; {where} to a relay, which follows the leader"
