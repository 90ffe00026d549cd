"""The relay of one node: a server whose state is another server's, reached by one connection.

PyTorch's clients share one session upstream (`relay/torch_session.py`), one for each namespace; native clients have a
channel and a session each (`relay/native_forward.py`). It listens on TCP and Unix sockets, has the limits and pages of
every server, and a port for each round of a run (`relay/rounds.py`).

While there is no connection upstream, PyTorch's clients wait, and native clients do for a few seconds, before they are
hung up on: their own addresses may be better then. `/healthz` says since when there is none, and why.

Rejected: to stop listening while the server is away. PyTorch's clients cannot connect again, so those that start
during an outage would fail.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from rallypoint import net
from rallypoint.deadline import Deadline
from rallypoint.errors import AddressTaken
from rallypoint.relay.native_forward import NativeForward, RoundName
from rallypoint.relay.rounds import RelayRounds, close_at_server
from rallypoint.relay.torch_connection import TorchRelayConnection
from rallypoint.relay.torch_session import TorchSession
from rallypoint.relay.upstream import Upstream
from rallypoint.server.base import BACKLOG, ServerBase
from rallypoint.server.connection import Connection, ProtocolHandler
from rallypoint.server.round_errors import TooLate, TooMany
from rallypoint.server.settings import Settings
from rallypoint.store.route import Look
from rallypoint.within import within

__all__ = ["RelayServer"]

log = logging.getLogger("rallypoint.relay")

ASK_S, AGAIN_S = 5.0, 0.1
"""How long the server may take to close a round, and how long to wait before it is asked again."""


class RelayServer(ServerBase):
    """Everything one relay holds: its clients, its rounds, and the way to its server."""

    def __init__(self, settings: Settings, endpoints: net.Endpoints, name: str = "", look: Look | None = None) -> None:
        super().__init__(settings)
        self.upstream = Upstream(endpoints, name, look)
        self.session = TorchSession(self.upstream)
        """That of the PyTorch clients which are in no round."""

        self.rounds = RelayRounds(self)

    async def open(self, sockets: Sequence[socket.socket]) -> None:
        """Start to serve on listening sockets, TCP or Unix; the connection to the server is made meanwhile."""
        self.upstream.start()
        loop = asyncio.get_running_loop()
        for sock in sockets:
            if sock.family == socket.AF_UNIX:
                sock.setblocking(False)
                self._servers.append(
                    await loop.create_unix_server(lambda: Connection(self), sock=sock, backlog=BACKLOG)
                )
        await super().open([sock for sock in sockets if sock.family != socket.AF_UNIX])
        self.sockets = list(sockets)

    async def close(self) -> None:
        """Stop listening, hang up on everybody, tell the server who has gone, and leave."""
        await self.rounds.close_all()
        await super().close()
        self.session.close("the relay ends")
        await asyncio.sleep(0)  # for what native clients sent last
        await self.upstream.close()

    def torch_handler(self, connection: Connection) -> ProtocolHandler:
        return TorchRelayConnection(self.session, connection, self.settings.max_connection_memory)

    def native_handler(self, connection: Connection) -> ProtocolHandler:
        return NativeForward(connection, self.upstream)

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
        try:
            done(self.rounds.open(RoundName(name, scope, number), port, everywhere))
        except (TooLate, TooMany, AddressTaken) as error:
            done(error)

    def close_round(self, name: str, scope: int | None, done: Callable[[bool], None]) -> None:
        if self.rounds.is_later(name, scope):
            done(False)
        else:
            self.rounds.run(self._close_round(name, scope, self.rounds.close(name, scope), done))

    async def _close_round(self, name: str, scope: int | None, here: bool, done: Callable[[bool], None]) -> None:
        """Close a round at the server, too, so that its namespace goes; where that fails, it goes with the next one."""
        there, deadline = False, Deadline(ASK_S)
        while True:
            try:
                there = await within(deadline.remaining(), close_at_server(self.upstream.endpoint, name, scope))
                break
            except (OSError, ValueError, KeyError, asyncio.TimeoutError) as error:
                if deadline.expired():
                    why = net.why_failed(error) or "no answer"
                    log.warning("a round of %r was not closed at the server at %s: %s", name, self.upstream.peer, why)
                    break
            await asyncio.sleep(min(AGAIN_S, deadline.remaining()))  # another server may lead by then
        done(here or there)

    @property
    def in_rounds(self) -> int:
        return self.rounds.connections

    def health(self) -> str:
        upstream = self.upstream
        if upstream.connected:
            return "ok"
        away_s = time.monotonic() - upstream.since
        return f"no connection to the server at {upstream.peer} for {away_s:.1f} s: {upstream.why}"

    def about(self) -> dict[str, Any]:
        return {**super().about(), "relay_of": self.upstream.label}

    def holdings(self) -> dict[str, Any]:
        """Return where the state is, whether it can be reached, and how much was asked and sent on."""
        sessions = [self.session, *self.rounds.sessions]
        return {
            "engine": self.upstream.label,
            "trouble": self.upstream.why,
            **self.upstream.statistics(),
            "torch_clients": sum(session.clients for session in sessions),
            "requests_asked": sum(session.asked for session in sessions),
            "requests_sent": sum(session.sent for session in sessions),
            "rounds": len(self.rounds.sessions),
            "round_ports": self.rounds.statistics(),
        }

    def held_bytes(self) -> int:
        return self.upstream.held_bytes
