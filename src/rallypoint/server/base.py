"""What every server has: listening sockets, connections, and limits on both, in one asyncio process.

It adds up the memory that connections hold, and sweeps once a second: connections that have not said who they are are
dropped, and refusals are logged, one line a second, however many there are. Connections over the limit are refused.
`StoreServer` (`server.py`) adds the state, `RelayServer` (`relay/server.py`) the way to another server.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from rallypoint.core.records import show
from rallypoint.server.carrier import Carrier
from rallypoint.server.connection import Connection, ProtocolHandler
from rallypoint.server.round_errors import NoPorts
from rallypoint.server.settings import Settings
from rallypoint.text import printable

__all__ = ["RESERVE_BYTES", "ServerBase"]

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

SHOWN = 100
"""How many keys of one client the statistics name."""

COMPLAINTS_KEPT = 1024
"""How many peers' complaints are remembered, so that each is logged once."""


class ServerBase:
    """Sockets, connections and limits of one server process."""

    def __init__(self, settings: Settings, front: ServerBase | None = None) -> None:
        self.settings = settings
        self._front = front or self  # of a relay's round: the relay itself
        self.crowd = 0
        """How many connections there are, those of rounds included, and how many round listeners."""

        self.elsewhere = b""
        """What native clients are told instead of a greeting while another server leads (`native.standby`)."""

        self.started_at = time.monotonic()
        self.sockets: list[socket.socket] = []
        self._servers: list[asyncio.AbstractServer] = []
        self._connections: set[Connection] = set()
        self._newcomers: dict[Connection, float] = {}
        self._complaints: dict[str, int] = {}
        self._holders: dict[Connection, None] = {}  # those for whom bytes are held, the longest first
        self._held = self.refused_sessions = self._refused = 0
        self._vanished: list[tuple[str, float]] = []  # since the last sweep: peers, and how long each was silent
        self._logged = (0, 0)  # how many connections and sessions were refused when that was last logged
        self.on_alone: Callable[[], None] = lambda: None
        """Called when nobody has been here for as long as the settings say."""

        self._alone_since: float | None = None
        self._closed = False

    @property
    def connections(self) -> int:
        """How many are connected, other than at the ports of rounds."""
        return len(self._connections)

    def handlers(self) -> list[ProtocolHandler]:
        """Return the protocols' ends of all connections that have said who calls."""
        return [one.handler for one in self._connections if one.handler is not None]

    async def open(self, sockets: Sequence[socket.socket]) -> None:
        """Start to serve on bound, listening sockets."""
        loop = asyncio.get_running_loop()
        for sock in sockets:
            sock.setblocking(False)
            self._servers.append(await loop.create_server(lambda: Connection(self), sock=sock, backlog=BACKLOG))
        self.sockets = list(sockets)
        loop.call_later(SWEEP_S, self._sweep)

    def stop(self) -> None:
        """Stop listening and reading; replies are still sent."""
        self._closed = True
        for server in self._servers:
            server.close()
        for connection in self._connections:
            connection.stop()

    async def close(self) -> None:
        """Stop listening and hang up on everybody."""
        self.stop()
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
        sessions = self.describe_sessions()
        return {
            **self.about(),
            "uptime_s": round(time.monotonic() - self.started_at, 1),
            "connections": len(self._connections),
            "refused_connections": self._refused,
            "refused_sessions": self.refused_sessions,
            **self.holdings(),
            "bytes": self.held_bytes() + self._held,
            "max_bytes": self.settings.max_memory,
            "more_clients": max(0, len(self._connections) - listed),
            "more_sessions": max(0, len(sessions) - listed),
            "clients": [connection.describe() for connection in islice(self._connections, listed)],
            "sessions": [describe(session) for session in islice(sessions, listed)],
        }

    # What depends on where the state is

    def torch_handler(self, connection: Connection) -> ProtocolHandler:
        """Return the server's end of PyTorch's protocol."""
        raise NotImplementedError

    def native_handler(self, connection: Connection) -> ProtocolHandler:
        """Return the server's end of our own protocol."""
        raise NotImplementedError

    def multiplexed_handler(self, connection: Connection) -> ProtocolHandler | None:
        """Return the server's end of a connection with channels; None: it is answered as PyTorch's ping."""
        return None

    def open_round(
        self,
        name: str,
        scope: int,
        number: int | None,
        done: Callable[[int | Exception], None],
        *,
        port: int = 0,
        everywhere: bool = False,
    ) -> None:
        """Open the port of a run's round; call `done` with it, or with why there is none.

        It is `port` where that is free, and on all interfaces with `everywhere`; only relays let their clients choose.
        """
        done(NoPorts("rounds have no ports here: a relay of this server opens them (rallypoint relay)"))

    def close_round(self, name: str, scope: int | None, done: Callable[[bool], None]) -> None:
        """Close a run's round, unless it is of a later scope; call `done` with whether there was one."""
        done(False)

    def sweep(self) -> None:
        """Do what is due once a second."""

    def health(self) -> str:
        """Return what to answer who asks whether the server is well."""
        return "ok"

    def holdings(self) -> dict[str, Any]:
        """Return what is stored, in numbers."""
        raise NotImplementedError

    def held_bytes(self) -> int:
        """Return how many bytes the state takes."""
        return 0

    def describe_sessions(self) -> Sequence[Any]:
        """Return the sessions, for the statistics."""
        return ()

    @property
    def in_rounds(self) -> int:
        """How many are connected at the ports of rounds."""
        return 0

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
            room = max(limit - self.held_bytes(), limit // 4, RESERVE_BYTES)
            why = "the server's memory limit is reached, and this one has held some the longest"
            while self._held > room:
                next(iter(self._holders)).drop(why)

    def complain(self, connection: Carrier, why: str) -> None:
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
        self.sweep()
        self._log_refusals()
        self._log_vanished()

    def _end_when_alone(self, now: float) -> None:
        if self._connections or self.in_rounds:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        elif self.settings.alone_s is not None and now - self._alone_since >= self.settings.alone_s:
            self.on_alone()

    def _log_refusals(self) -> None:
        now, before = (self._refused, self.refused_sessions), self._logged
        if now[0] > before[0]:
            limit = self.settings.max_connections
            advice = "allow more with --max-connections, within the limit on open files (ulimit -n)"
            log.warning("refused %d connections: %s are open, the limit; %s", now[0] - before[0], limit, advice)
        if now[1] > before[1]:
            more, limit = now[1] - before[1], self.settings.max_sessions
            log.warning("refused %d sessions: %d is the limit; allow more with --max-sessions", more, limit)
        self._logged = now

    def _log_vanished(self) -> None:
        gone, self._vanished = self._vanished, []
        if gone:
            some = ", ".join(peer for peer, _ in gone[:LISTED_VANISHED])
            more = f" and {len(gone) - LISTED_VANISHED} more" if len(gone) > LISTED_VANISHED else ""
            why = "their hosts are gone, or the network between"
            log.warning("dropped %s%s: nothing was received for %.1f s; %s", some, more, gone[0][1], why)


def describe(session: Any) -> dict[str, Any]:
    """Return what the statistics say of a session."""
    return {
        "name": session.name,
        "here": session.link is not None,
        "waits_for": [show(key) for key in session.waits_for[:SHOWN]],
        "leases": [show(key) for key in session.leases[:SHOWN]],
    }
