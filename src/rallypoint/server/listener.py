"""`Listener`: listening sockets and the connections accepted on them, in one asyncio process.

A listener is given the application that it serves (`connections/greeting.py`): a store, a relay, or one round of a
relay. It knows which peers are connected, and nothing of protocols or state. Connections over the limit are refused;
those that do not complete their greeting in time are dropped, by a sweep once a second, which also logs refusals and
lost peers, at most one line a second.

Every connection passes through `Listener.admit`, once, when its peer is known and before the first byte is read.

Rejected: a base class of all servers. Each of them overrode a few of a dozen methods, and inherited the rest.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from rallypoint.server.admission import Admission
from rallypoint.server.connections.connection import Connection, ProtocolHandler
from rallypoint.server.connections.greeting import Application, Greeting
from rallypoint.server.connections.limits import ConnectionLimit, ConnectionMemory
from rallypoint.server.settings import Settings
from rallypoint.server.turn_budget import TurnBudget
from rallypoint.text import printable

__all__ = ["ERRORS_KEPT", "Listener", "PeerLog"]

log = logging.getLogger("rallypoint.server")

BACKLOG = 4096
"""Length of the accept queue; the kernel applies a limit of its own as well."""

SWEEP_S = 1.0

LISTED_VANISHED = 10
"""Vanished peers named in one log line."""

ERRORS_KEPT = 1024
"""Peer addresses remembered so that protocol errors are logged once per address."""


class Listener:
    """Listening sockets, and the connections accepted on them."""

    def __init__(
        self,
        settings: Settings,
        application: Application,
        admission: Admission,
        limit: ConnectionLimit | None = None,
        memory: ConnectionMemory | None = None,
    ) -> None:
        """Serve an application; `limit` and `memory` are shared with the other listeners of the process, if any."""
        self.settings = settings
        self.admission = admission
        self.limit = limit or ConnectionLimit(settings.max_connections)
        self.memory = memory or ConnectionMemory(settings.max_memory, application.held_bytes)
        self.peer_log = PeerLog()
        self.turns = TurnBudget()
        self.started_at = time.monotonic()
        self.refused = 0
        """Number of connections over the limit so far."""

        self.sockets: list[socket.socket] = []
        self.closed = False
        self.on_idle: Callable[[], None] = lambda: None
        """Called when no client has been connected for `settings.alone_s`."""

        self._application = application
        self._servers: list[asyncio.AbstractServer] = []
        self._connections: set[Connection] = set()
        self._unidentified: dict[Connection, float] = {}
        self._logged = 0  # refused connections as of the last log line
        self._idle_since: float | None = None

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._connections)

    def handlers(self) -> list[ProtocolHandler]:
        """Return the handlers of all connections."""
        return [one.handler for one in self._connections]

    def clients(self, listed: int) -> Iterator[dict[str, Any]]:
        """Return the entries of the first `listed` connections in the statistics, each made when it is asked for."""
        first = list(islice(self._connections, listed))
        return (connection.describe() for connection in first)

    async def open(self, sockets: Sequence[socket.socket]) -> None:
        """Start to serve on bound, listening sockets, TCP or Unix."""
        loop = asyncio.get_running_loop()
        for sock in sockets:
            sock.setblocking(False)
            create: Any = loop.create_unix_server if sock.family == socket.AF_UNIX else loop.create_server
            self._servers.append(await create(lambda: Connection(self), sock=sock, backlog=BACKLOG))
        self.sockets = list(sockets)
        loop.call_later(SWEEP_S, self._tick)

    def stop(self) -> None:
        """Stop listening and reading; replies are still sent."""
        self.closed = True
        for server in self._servers:
            server.close()
        for connection in self._connections:
            connection.stop()

    async def close(self) -> None:
        """Stop listening and close all connections."""
        self.stop()
        self.cut()
        await asyncio.sleep(0)

    def cut(self) -> None:
        """Close all connections; unless the listener is closed, their peers may connect again."""
        for connection in list(self._connections):
            connection.close()

    # Called by connections

    def admit(self, connection: Connection) -> None:
        """Admit a new connection, to begin with its greeting; refuse it over the limit, or when closed."""
        if not self.limit.has_room:
            self.refused += 1
            connection.close()
        elif self.closed:  # accepted before the socket was closed
            connection.close()
        else:
            self.limit.connections += 1
            self._connections.add(connection)
            self._unidentified[connection] = time.monotonic()
            connection.handler = Greeting(self._application, connection, self.admission)

    def left(self, connection: Connection) -> None:
        """Forget a connection."""
        if connection in self._connections:
            self.limit.connections -= 1
            self._connections.remove(connection)
        self._unidentified.pop(connection, None)

    # Once a second

    def _tick(self) -> None:
        if not self.closed:
            asyncio.get_running_loop().call_later(SWEEP_S, self._tick)
            self.sweep()

    def sweep(self) -> None:
        """Drop connections whose greeting is overdue, and log refusals and lost peers."""
        now = time.monotonic()
        self._end_when_idle(now)
        self.memory.check()  # values that unsent replies share may have been replaced
        for connection, since in list(self._unidentified.items()):
            if now - since < self.settings.greeting_s:
                break  # the rest connected later
            del self._unidentified[connection]
            if not connection.handler.greeted:
                connection.drop(f"no complete greeting within {self.settings.greeting_s:g} s")
        self._log_refusals()
        self.peer_log.report_vanished()

    def _end_when_idle(self, now: float) -> None:
        if self.limit.connections:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        elif self.settings.alone_s is not None and now - self._idle_since >= self.settings.alone_s:
            self.on_idle()

    def _log_refusals(self) -> None:
        more, self._logged = self.refused - self._logged, self.refused
        if more:
            advice = "allow more with --max-connections, within the limit on open files (ulimit -n)"
            log.warning("refused %d connections: the limit of %s is reached; %s", more, self.limit.limit, advice)


class PeerLog:
    """What a listener logs about its peers: their errors, once per address, and those whose hosts are unreachable."""

    def __init__(self) -> None:
        self._errors: dict[str, int] = {}
        self._vanished: list[tuple[str, float]] = []  # since the last report: peers, and how long each was silent

    def protocol_error(self, host: str, peer: str, why: str) -> None:
        """Log the protocol error of a peer, once per host; count further ones."""
        if host not in self._errors:
            if len(self._errors) == ERRORS_KEPT:
                return  # this many addresses are an attack, and must not grow the log
            log.warning("dropped %s: %s (further errors from this address are not logged)", peer, printable(why))
        self._errors[host] = self._errors.get(host, 0) + 1

    def vanished(self, peer: str, silent_s: float) -> None:
        """Note that the host of a peer is unreachable, for the next report."""
        self._vanished.append((peer, silent_s))

    def report_vanished(self) -> None:
        """Log the peers that vanished since the last report, in one line."""
        gone, self._vanished = self._vanished, []
        if gone:
            some = ", ".join(peer for peer, _ in gone[:LISTED_VANISHED])
            more = f" and {len(gone) - LISTED_VANISHED} more" if len(gone) > LISTED_VANISHED else ""
            why = "the host or the network is down"
            log.warning("dropped %s%s: nothing received for %.1f s; %s", some, more, gone[0][1], why)
