"""A relay's round ports: clients of a port, of both protocols, use the namespace of one round of one run.

PyTorch workers use their store without a prefix and cannot be given one, so every round of a run gets a port. It is
opened on the relay's own hosts, or on all interfaces if workers of other nodes use it too. Opening the port of a later
round closes the earlier one with its connections. The last node to leave a run closes its last port; if all nodes have
died, the port stays open until the limit on rounds requires its eviction.

The server keeps the namespace: the first hello that names it creates it (`protocol/native.py`), a later round replaces
it, and closing a round here also closes it at the server, over HTTP.

Rejected: open the port only after the server has agreed. No round could begin during an outage.
"""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.parse
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from rallypoint import net
from rallypoint.client.side_connection import side_connection
from rallypoint.errors import AddressTaken
from rallypoint.protocol.challenge import HTTP_PREFACE
from rallypoint.protocol.native import ACCEPTED
from rallypoint.relay.native_forward import RoundPortName
from rallypoint.relay.port import RelayPort
from rallypoint.relay.torch.session import TorchSession
from rallypoint.security.client_security import ClientSecurity
from rallypoint.server.http_site import HttpSite, ServerStatistics, about, statistics
from rallypoint.server.round_errors import TooLate, TooMany

if TYPE_CHECKING:
    from rallypoint.relay.server import RelayServer

__all__ = ["RelayRound", "RelayRounds", "close_at_server"]

MAX_ROUNDS = 1024
LOOPBACK = "127.0.0.1"
EVERYWHERE = ("0.0.0.0", "::")
MAX_ANSWER_BYTES = 65_536


class RelayRound:
    """The port of one round, and its connections."""

    def __init__(self, relay: RelayServer, name: RoundPortName, sockets: list[socket.socket]) -> None:
        self.name = name
        self.sockets = sockets
        self.opening: asyncio.Task[None] | None = None
        site = HttpSite(about, relay.health, self._statistics, status=relay.status)
        shared = relay.listener
        port = RelayPort(relay.settings, relay.upstream, site, shared.admission, name, shared.limit, shared.memory)
        self.listener, self.session = port.listener, port.session
        self._upstream = relay.upstream

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return int(self.sockets[0].getsockname()[1])

    @property
    def requests(self) -> dict[str, int]:
        """The numbers of requests of its PyTorch clients."""
        return {"requests_asked": self.session.asked, "requests_sent": self.session.sent}

    async def close(self) -> None:
        """Stop listening, once that has begun, disconnect all clients, and end the session of the PyTorch clients."""
        if self.opening is not None:
            await asyncio.wait((self.opening,))
        await self.listener.close()
        self.session.close(f"round {self.name.scope} of {self.name.run!r} was closed at this relay")

    def _statistics(self) -> ServerStatistics:
        return statistics(self.listener, about(), {**self._upstream.statistics(), **self.requests})


class RelayRounds:
    """The open rounds of one relay, by the names of their runs."""

    def __init__(self, relay: RelayServer) -> None:
        self._relay = relay
        self._rounds: dict[str, RelayRound] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, name: RoundPortName, port: int = 0, everywhere: bool = False) -> int:
        """Open a port for a round, on `port` if that is free, and return it; return the port of an open round.

        With `everywhere`, listen on all interfaces.

        Raises TooLate, TooMany, and AddressTaken if no port is available.
        """
        found = self._rounds.get(name.run)
        if found is not None and found.name.scope > name.scope:
            raise TooLate(f"a later round of {name.run!r} has begun, and this one is over")
        if found is not None and found.name.scope == name.scope:
            return found.port
        if found is None and len(self._rounds) >= MAX_ROUNDS:
            self._make_room()
        sockets = _listen_everywhere(port) if everywhere else _listen(_hosts(self._relay.listener.sockets), port)
        self.close(name.run)
        opened = self._rounds[name.run] = RelayRound(self._relay, name, sockets)
        self._relay.listener.limit.round_sockets += len(sockets)
        opened.opening = self.run(opened.listener.open(sockets))
        return opened.port

    def close(self, run: str, scope: int | None = None) -> bool:
        """Close the port of a run, unless its round is later than `scope`; return whether it was closed."""
        found = self._rounds.get(run)
        if found is None or (scope is not None and found.name.scope > scope):
            return False
        del self._rounds[run]
        self._relay.listener.limit.round_sockets -= len(found.sockets)
        self.run(found.close())
        return True

    def is_later(self, run: str, scope: int | None) -> bool:
        """Return whether the open round of a run is later than this one."""
        found = self._rounds.get(run)
        return found is not None and scope is not None and found.name.scope > scope

    @property
    def sessions(self) -> list[TorchSession]:
        """The sessions of the PyTorch clients of all rounds."""
        return [one.session for one in self._rounds.values()]

    async def close_all(self) -> None:
        """Close all ports; the server keeps the namespaces."""
        for run in list(self._rounds):
            self.close(run)
        await asyncio.gather(*self._tasks)

    def statistics(self) -> dict[str, Any]:
        """Return the number, port and counters of each round, by run."""
        return {
            one.name.run: {
                "round": one.name.number,
                "scope": one.name.scope,
                "port": one.port,
                "connections": one.listener.connections,
                **one.requests,
            }
            for one in self._rounds.values()
        }

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a background task that `close_all` awaits."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _make_room(self) -> None:
        """Close the oldest round without connections."""
        empty = next((run for run, one in self._rounds.items() if not one.listener.connections), None)
        if empty is None:
            raise TooMany(f"too many rounds: {MAX_ROUNDS} are open, with connections at each")
        self.close(empty)


def _hosts(sockets: list[socket.socket]) -> list[str]:
    """Return the hosts for round ports: those of the TCP sockets; loopback for a relay with only a Unix socket."""
    return [sock.getsockname()[0] for sock in sockets if sock.family != socket.AF_UNIX] or [LOOPBACK]


def _listen_everywhere(port: int) -> list[socket.socket]:
    try:
        return _listen(EVERYWHERE, port)
    except AddressTaken:  # a machine without IPv6
        return _listen(EVERYWHERE[:1], port)


def _listen(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """Listen on a port, or on a free port if that is taken."""
    if port:
        try:
            return net.listen(hosts, port)
        except AddressTaken:
            pass
    return net.listen(hosts, 0)


async def close_at_server(server: net.Endpoint, security: ClientSecurity, run: str, scope: int | None) -> bool:
    """Close a round's namespace at the server; return whether it existed. Raises OSError, ValueError and Denied."""
    path = f"/rounds/{urllib.parse.quote(run, safe='')}" + ("" if scope is None else f"/{scope}")
    async with side_connection(server, security, HTTP_PREFACE) as (reader, writer, greeting):
        greeting.require(ACCEPTED)
        writer.write(f"DELETE {path} HTTP/1.1\r\nhost: {server}\r\nconnection: close\r\n\r\n".encode())
        answer = await reader.read(MAX_ANSWER_BYTES)
        while piece := await reader.read(MAX_ANSWER_BYTES):
            answer += piece
            if len(answer) > MAX_ANSWER_BYTES:
                raise ValueError(f"a reply of more than {MAX_ANSWER_BYTES} bytes")
    head, _, body = answer.partition(b"\r\n\r\n")
    if head.split(b" ")[1:2] != [b"200"]:
        raise ValueError(f"unexpected reply: {head.splitlines()[:1]!r}")
    return bool(json.loads(body)["closed"])
