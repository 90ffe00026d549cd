"""The relay of a node: a server without state of its own, which forwards to another server over one connection.

The PyTorch clients of a namespace share one upstream session (`relay/torch/session.py`); each native client has a
channel and a session of its own (`relay/native_forward.py`). The relay listens on TCP and Unix sockets, has the limits
and HTTP pages of every server, and opens a port for each round of a run (`relay/round_ports.py`).

While there is no upstream connection, PyTorch clients wait. Native clients wait for a few seconds and are then
disconnected, because a direct connection may work. `/healthz` reports how long the connection has been down, and why.

Rejected: stop listening during an outage. PyTorch clients cannot reconnect, so those that start during an outage would
fail.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rallypoint import net
from rallypoint.client.routing.route import Look
from rallypoint.deadline import Deadline
from rallypoint.errors import AddressTaken
from rallypoint.protocol import BadMessage
from rallypoint.protocol.challenge import Denied
from rallypoint.relay.native_forward import RoundPortName
from rallypoint.relay.port import RelayPort
from rallypoint.relay.round_ports import RelayRounds, close_at_server
from rallypoint.relay.upstream.connection import Upstream
from rallypoint.security.client_security import ClientSecurity
from rallypoint.security.credentials import OPEN, Credentials
from rallypoint.server.admission import Admission
from rallypoint.server.http_site import HttpSite, ServerStatistics, about, statistics
from rallypoint.server.round_errors import TooLate, TooMany
from rallypoint.server.settings import Settings
from rallypoint.within import within

if TYPE_CHECKING:
    from rallypoint.server.status.source import StatusSource

__all__ = ["RelayServer"]

log = logging.getLogger("rallypoint.relay")

CLOSE_S, RETRY_S = 5.0, 0.1
"""Timeout for closing a round at the server, and the pause between attempts."""

END_S = 0.5
"""The same timeout while the relay shuts down."""


class RelayServer:
    """Everything one relay holds: its clients, its rounds, and the connection to its server."""

    def __init__(
        self,
        settings: Settings,
        endpoints: net.Endpoints,
        name: str = "",
        look: Look | None = None,
        credentials: Credentials = OPEN,
        tls: bool = False,
    ) -> None:
        """Relay to the servers at `endpoints`, or those that `look` finds; with `tls`, by TLS even on loopback."""
        self.settings = settings
        self.upstream = Upstream(endpoints, name, look, ClientSecurity(credentials, tls))
        site = HttpSite(self.about, self.health, self.statistics, self.open_round, self.close_round, status=self.status)
        self.port = RelayPort(settings, self.upstream, site, Admission(credentials))
        """The clients outside of rounds."""

        self.listener = self.port.listener
        self.rounds = RelayRounds(self)
        self._closing: set[asyncio.Task[None]] = set()  # requests to the server to close rounds
        self._status: StatusSource | None = None

    async def open(self, sockets: Sequence[socket.socket]) -> None:
        """Start to serve on listening sockets, TCP or Unix; connect to the server in the background."""
        self.upstream.start()
        await self.listener.open(sockets)

    async def close(self) -> None:
        """Stop listening, disconnect all clients, release their state at the server, and disconnect."""
        await self._finish_closing()
        await self.rounds.close_all()
        await self.listener.close()
        self.port.session.close("the relay is shutting down")
        await asyncio.sleep(0)  # forwards the last bytes of native clients
        await self.upstream.close()

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
        """Open a port for a round, `port` if that is free; call `done` with the port, or with the error."""
        try:
            done(self.rounds.open(RoundPortName(name, scope, number), port, everywhere))
        except (TooLate, TooMany, AddressTaken) as error:
            done(error)

    def close_round(self, name: str, scope: int | None, done: Callable[[bool], None]) -> None:
        """Close a round, here and at the server, unless it is later; call `done` with whether there was one."""
        if self.rounds.is_later(name, scope):
            done(False)
        else:
            task = self.rounds.run(self._close_round(name, scope, self.rounds.close(name, scope), done))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _close_round(self, name: str, scope: int | None, here: bool, done: Callable[[bool], None]) -> None:
        """Close a round at the server too, to delete its namespace; if that fails, the next round replaces it."""
        there, deadline, route = False, Deadline(CLOSE_S), self.upstream.route
        while True:
            try:
                closing = close_at_server(route.at, route.security, name, scope)
                there = await within(deadline.remaining(), closing)
                break
            except (OSError, ValueError, KeyError, BadMessage, Denied, asyncio.TimeoutError) as error:
                if deadline.expired():
                    why = net.why_failed(error) or "no answer"
                    log.warning("could not close a round of %r at the server at %s: %s", name, self.upstream.peer, why)
                    break
            await asyncio.sleep(min(RETRY_S, deadline.remaining()))  # by then another server may be the leader
        done(here or there)

    async def _finish_closing(self) -> None:
        """Give pending requests to close rounds a little time, then cancel them."""
        closing = list(self._closing)
        if closing:
            await asyncio.wait(closing, timeout=END_S)
            for task in closing:
                task.cancel()
            await asyncio.wait(closing)

    def health(self, in_full: bool = True) -> str:
        """Return the reply to a health check: "ok", or how long there has been no connection to the server, and why."""
        upstream = self.upstream
        if upstream.connected:
            return "ok"
        if not in_full:
            return "no connection to the server"
        away_s = time.monotonic() - upstream.since
        return f"no connection to the server at {upstream.peer} for {away_s:.1f} s: {upstream.why}"

    def about(self) -> dict[str, Any]:
        """Return the identity of this relay, and of its server."""
        return {**about(), "relay_of": self.upstream.label}

    def status(self) -> StatusSource:
        """Return the models of this relay's status."""
        if self._status is None:
            from rallypoint.relay.status import RelayStatus  # imported on first use
            from rallypoint.server.status.source import StatusSource

            models = RelayStatus(self)
            self._status = StatusSource(models.build, models.version)
        return self._status

    def statistics(self) -> ServerStatistics:
        """Return the upstream store, the state of the connection, numbers of requests, and the clients."""
        sessions = [self.port.session, *self.rounds.sessions]
        facts = {
            "engine": self.upstream.label,
            "trouble": self.upstream.why,
            **self.upstream.statistics(),
            "torch_clients": sum(session.clients for session in sessions),
            "requests_asked": sum(session.asked for session in sessions),
            "requests_sent": sum(session.sent for session in sessions),
            "rounds": len(self.rounds.sessions),
            "round_ports": self.rounds.statistics(),
        }
        return statistics(self.listener, self.about(), facts)
