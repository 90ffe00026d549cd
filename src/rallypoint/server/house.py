"""The server: one engine, its listening sockets, and everybody who is connected, in one asyncio process.

`House` is what connections share. It delivers what the engine has for others, adds up the memory that all of them hold,
and once a second sweeps: newcomers that did not say who they are, and turns that nobody used. Who comes when there are
as many as may be is turned away, and the sweep says so in the log: one line a second, however many come.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from rallypoint.core.c10d import Conversation
from rallypoint.core.caller import Caller, Sessions
from rallypoint.core.engine import Engine
from rallypoint.core.ledger import Ledger, Split
from rallypoint.core.objects import Objects
from rallypoint.core.session import Session
from rallypoint.server.connection import Connection, Face
from rallypoint.server.doors import Doors
from rallypoint.server.guests import Guests, describe
from rallypoint.server.settings import Settings
from rallypoint.text import printable

__all__ = ["House"]

log = logging.getLogger("rallypoint.server")

BACKLOG = 4096
"""How many connections may queue up to be accepted; the kernel has a limit of its own beside."""

RESERVE_BYTES = 32 * 1024 * 1024
"""What may be on its way in or out however full the store is: room for a few of the largest values."""

SWEEP_S = 1.0
LISTED = 10_000
"""How many clients, and how many sessions, the statistics list; the others they count."""

LISTED_VANISHED = 10
"""How many peers whose hosts are gone are named in a line of the log."""

COMPLAINTS_KEPT = 1024
"""How many peers' complaints are remembered, so that each is logged once."""


class House:
    """Everything one server process holds."""

    def __init__(self, settings: Settings, front: House | None = None) -> None:
        self.settings = settings
        self._front = front or self  # the one that this one is a door of
        self.crowd = 0
        """How many are connected, here and behind all doors, and how many doors there are: they share the limit."""

        self.engine = Engine(settings.max_memory)
        self.started_at = time.monotonic()
        self.sockets: list[socket.socket] = []
        self._servers: list[asyncio.AbstractServer] = []
        self._connections: set[Connection] = set()
        self._newcomers: dict[Connection, float] = {}
        self._complaints: dict[str, int] = {}
        self._holders: dict[Connection, None] = {}  # those for whom bytes are held, the longest first
        self._held = 0
        ledger = Ledger(settings.max_connection_memory, max(settings.max_memory // 4, RESERVE_BYTES))
        self.sessions: Guests = self.receive_guests(ledger)
        self.sessions.limit = settings.max_sessions
        self._refused = 0
        self._vanished: list[tuple[str, float]] = []  # since the last sweep: peers, and how long each was silent
        self._logged = (0, 0)  # how many connections and sessions were refused when that was last logged
        self.ticks_at = float("inf")
        """When `tick` will run next."""

        self._timer: asyncio.TimerHandle | None = None
        self.doors = Doors(self)
        self.on_alone: Callable[[], None] = lambda: None
        """Called when nobody has been here for as long as the settings say."""

        self._alone_since: float | None = None
        self._closed = False

    @property
    def connections(self) -> int:
        """How many are connected."""
        return len(self._connections)

    async def open(self, sockets: Sequence[socket.socket]) -> None:
        """Start to serve on bound, listening sockets."""
        loop = asyncio.get_running_loop()
        for sock in sockets:
            sock.setblocking(False)
            self._servers.append(await loop.create_server(lambda: Connection(self), sock=sock, backlog=BACKLOG))
        self.sockets = list(sockets)
        loop.call_later(SWEEP_S, self._sweep)

    async def close(self) -> None:
        """Stop listening and hang up on everybody."""
        self._closed = True
        await self.doors.close_all()
        for server in self._servers:
            server.close()
        for connection in list(self._connections):
            connection.close()
        await asyncio.sleep(0)

    def about(self) -> dict[str, Any]:
        """Return who this is, for whoever finds its port taken."""
        version = sys.modules["rallypoint"].__version__  # what stands there may not be imported from here
        return {"server": "rallypoint", "version": version, "pid": os.getpid()}

    def statistics(self, listed: int = LISTED) -> dict[str, Any]:
        """Return what the server holds now, by name: numbers, then who is connected, then who has a session.

        Of each, so many are listed, and `more_clients` and `more_sessions` count the rest.
        """
        return {
            **self.about(),
            "uptime_s": round(time.monotonic() - self.started_at, 1),
            "connections": len(self._connections),
            "refused_connections": self._refused,
            "refused_sessions": self.sessions.refused,
            **self.holdings(),
            "doors": self.doors.statistics(),
            "bytes": self.engine.size + self._held + self.sessions.ledger.kept,
            "max_bytes": self.settings.max_memory,
            "more_clients": max(0, len(self._connections) - listed),
            "more_sessions": max(0, len(self.sessions) - listed),
            "clients": [connection.describe() for connection in islice(self._connections, listed)],
            "sessions": [describe(session) for session in islice(self.sessions, listed)],
        }

    # What is other where the state is in etcd (`server/gateway.py`)

    def receive_guests(self, ledger: Ledger) -> Guests:
        """Return the sessions, none at first."""
        return Sessions(self.engine, secrets.token_bytes(16), self.settings.grace_s, ledger)

    def torch_face(self, connection: Connection) -> Face:
        """Return our end of PyTorch's protocol."""
        return Conversation(self.engine, self.settings.max_connection_memory, connection)

    def native_face(self, connection: Connection) -> Face:
        """Return our end of our own protocol."""
        assert isinstance(self.sessions, Sessions)
        return Caller(self.sessions, connection, self.settings.max_connection_memory, secrets.token_bytes(16))

    def behind(self, name: str, scope: int) -> House:
        """Return what is to be behind the door of a run's round."""
        return House(self.settings, self)

    def sweep_turns(self) -> None:
        """Take back the turns that nobody used."""
        self.engine.sweep_turns()

    def holdings(self) -> dict[str, Any]:
        """Return what is stored, in numbers."""
        assert isinstance(self.sessions, Sessions)
        engine = self.engine.statistics()
        return {
            "keys": engine.keys,
            "queues": engine.queues,
            "waiting": engine.waiters,
            "watches": engine.watches,
            "leased_keys": engine.leased_keys,
            "objects": self.sessions.objects.statistics(),
            "revision": engine.revision,
        }

    # What connections call

    def arrived(self, connection: Connection) -> None:
        """Count a new connection, which must soon say who calls; turn it away if there are as many as may be."""
        limit = self.settings.max_connections
        if limit is not None and self._front.crowd >= limit:
            self._refused += 1
            connection.close()
            return
        self._front.crowd += 1
        self._connections.add(connection)
        self._newcomers[connection] = time.monotonic()

    def left(self, connection: Connection) -> None:
        """Forget a connection."""
        if connection in self._connections:
            self._front.crowd -= 1
            self._connections.remove(connection)
        self._newcomers.pop(connection, None)
        self.deliver()
        if min(self.engine.earliest, self.sessions.next_end()) < self.ticks_at:
            self.tick()

    def vanished(self, connection: Connection, silent_s: float) -> None:
        """Note that the host of a peer is gone, for the sweep to log."""
        self._vanished.append((connection.who(), silent_s))

    def hold(self, connection: Connection, amount: int, grown: int) -> None:
        """Count what is held for a connection; past the limit, drop those first for whom it has been held longest.

        Rejected: to drop whoever asks for more. A few that sit on what they hold would shut out everybody else.
        """
        self._held += grown
        if amount:
            self._holders[connection] = None
        else:
            self._holders.pop(connection, None)
        if grown > 0:
            limit = self.settings.max_memory
            room = max(limit - self.engine.size, limit // 4, RESERVE_BYTES)
            while self._held > room:
                next(iter(self._holders)).drop(
                    "the server's memory limit is reached, and this one has held some the longest"
                )

    def deliver(self) -> None:
        """Send what the engine has for waiting clients."""
        while self.engine.outbox:  # an answer whose client is gone may be another's
            for handle, answer in self.engine.take():
                owner = handle.owner
                assert isinstance(owner, (Conversation, Session, Objects))
                data: bytes | Split = owner.answer(handle, answer)
                if isinstance(owner.link, Connection) and data:
                    owner.link.send(data)
                    if isinstance(owner, Session) and owner.over:
                        owner.link.drop(owner.overdue)

    def tick(self) -> None:
        """End what is due, waits by their deadlines and sessions by their grace, and run again when more is."""
        now = time.monotonic()
        self.engine.tick(now)
        self.sessions.expire(now)
        self.deliver()
        self.ticks_at = min(self.engine.earliest, self.sessions.next_end())
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.ticks_at < float("inf"):
            delay_s = max(0.0, self.ticks_at - now)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.tick)

    def complain(self, connection: Connection, why: str) -> None:
        """Log what a peer did wrong, once per peer address, then count."""
        peer = connection.who()
        host = peer.rpartition(":")[0]
        if host not in self._complaints:
            if len(self._complaints) == COMPLAINTS_KEPT:
                return  # so many addresses are an attack, and the log is not to grow with it
            log.warning("dropped %s: %s (further ones from this address are not logged)", peer, printable(why))
        self._complaints[host] = self._complaints.get(host, 0) + 1

    # Inside

    def _sweep(self) -> None:
        if self._closed:
            return
        asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)
        now = time.monotonic()
        self._end_when_alone(now)
        for connection, since in list(self._newcomers.items()):
            if now - since < self.settings.greeting_s:
                break  # the rest came later
            del self._newcomers[connection]
            if not connection.greeted():
                connection.drop(f"did not say who calls within {self.settings.greeting_s:g} s")
        self.sweep_turns()
        self.tick()
        self._log_refusals()
        self._log_vanished()

    def _end_when_alone(self, now: float) -> None:
        if self._connections or self.doors.connections:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        elif self.settings.alone_s is not None and now - self._alone_since >= self.settings.alone_s:
            self.on_alone()

    def _log_refusals(self) -> None:
        now, before = (self._refused, self.sessions.refused), self._logged
        if now[0] > before[0]:
            limit = self.settings.max_connections
            advice = "allow more with --max-connections, within the limit on open files (ulimit -n)"
            log.warning("refused %d connections: %s are open, the limit; %s", now[0] - before[0], limit, advice)
        if now[1] > before[1]:
            advice = "allow more with --max-sessions"
            log.warning("refused %d sessions: %d is the limit; %s", now[1] - before[1], self.sessions.limit, advice)
        self._logged = now

    def _log_vanished(self) -> None:
        gone, self._vanished = self._vanished, []
        if gone:
            some = ", ".join(peer for peer, _ in gone[:LISTED_VANISHED])
            more = f" and {len(gone) - LISTED_VANISHED} more" if len(gone) > LISTED_VANISHED else ""
            why = "their hosts are gone, or the network between"
            log.warning("dropped %s%s: nothing was received for %.1f s; %s", some, more, gone[0][1], why)
