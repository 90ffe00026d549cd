"""A relay's ports for rounds: behind each, clients of both protocols are in the namespace of one round of one run.

PyTorch's workers use their store without a prefix, and cannot be told one, so every round of a run gets a port here, at
the hosts where the relay itself listens, or on all interfaces where workers of other nodes use it, too. Opening that of
a later round closes the one before, with its connections. A run's last port is closed by whoever leaves it last; where
all have died, it stays until the room is needed.

The namespace is the server's: the first hello that names it creates it (`protocol/native.py`), a later round's replaces
it, and closing a round here closes it there, too, by the server's own HTTP.

Rejected: to ask the server first, and to open the port when it has agreed. While it is away, no round could begin.
"""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.parse
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from rallypoint import net
from rallypoint.errors import AddressTaken
from rallypoint.relay.native_forward import NativeForward, RoundName
from rallypoint.relay.torch_connection import TorchRelayConnection
from rallypoint.relay.torch_session import TorchSession
from rallypoint.server.base import ServerBase
from rallypoint.server.connection import Connection, ProtocolHandler
from rallypoint.server.round_errors import TooLate, TooMany

if TYPE_CHECKING:
    from rallypoint.relay.server import RelayServer

__all__ = ["RelayRound", "RelayRounds", "close_at_server"]

MAX_ROUNDS = 1024
LOOPBACK = "127.0.0.1"
EVERYWHERE = ("0.0.0.0", "::")
MAX_ANSWER_BYTES = 65_536


class RelayRound(ServerBase):
    """The port of one round, and everybody who is connected there."""

    def __init__(self, relay: RelayServer, name: RoundName, sockets: list[socket.socket]) -> None:
        super().__init__(relay.settings, relay)
        self.name = name
        self.sockets = sockets
        self.opening: asyncio.Task[None] | None = None
        self._relay = relay
        self.session = TorchSession(relay.upstream, name.run, name.scope, name.number)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening, once that has begun, hang up on everybody, and end the session of PyTorch's clients."""
        if self.opening is not None:
            await asyncio.wait((self.opening,))
        await super().close()
        self.session.close(f"round {self.name.scope} of {self.name.run!r} is over at this relay")

    def torch_handler(self, connection: Connection) -> ProtocolHandler:
        return TorchRelayConnection(self.session, connection, self.settings.max_connection_memory)

    def native_handler(self, connection: Connection) -> ProtocolHandler:
        return NativeForward(connection, self._relay.upstream, self.name)

    def health(self) -> str:
        return self._relay.health()

    def holdings(self) -> dict[str, Any]:
        return {
            **self._relay.upstream.statistics(),
            "requests_asked": self.session.asked,
            "requests_sent": self.session.sent,
        }

    def held_bytes(self) -> int:
        return self._relay.held_bytes()


class RelayRounds:
    """The open rounds of one relay, by the names of their runs."""

    def __init__(self, relay: RelayServer) -> None:
        self._relay = relay
        self._rounds: dict[str, RelayRound] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def connections(self) -> int:
        """How many are connected at all of them."""
        return sum(one.connections for one in self._rounds.values())

    def open(self, name: RoundName, port: int = 0, everywhere: bool = False) -> int:
        """Open the port of a round, this one where it can be had, and return it; it may be open already.

        `everywhere` is on all interfaces.

        Raises TooLate, TooMany, and AddressTaken where no port can be had.
        """
        found = self._rounds.get(name.run)
        if found is not None and found.name.scope > name.scope:
            raise TooLate(f"a later round of {name.run!r} has begun, and this one is over")
        if found is not None and found.name.scope == name.scope:
            return found.port
        if found is None and len(self._rounds) >= MAX_ROUNDS:
            self._make_room()
        sockets = _listen_everywhere(port) if everywhere else _listen(_hosts(self._relay.sockets), port)
        self.close(name.run)
        opened = self._rounds[name.run] = RelayRound(self._relay, name, sockets)
        self._relay.crowd += len(sockets)  # descriptors, too
        opened.opening = self.run(opened.open(sockets))
        return opened.port

    def close(self, run: str, scope: int | None = None) -> bool:
        """Close the port of a run, unless it is that of a round later than `scope`; return whether it was closed."""
        found = self._rounds.get(run)
        if found is None or (scope is not None and found.name.scope > scope):
            return False
        del self._rounds[run]
        self._relay.crowd -= len(found.sockets)
        self.run(found.close())
        return True

    def is_later(self, run: str, scope: int | None) -> bool:
        """Return whether the open round of a run is later than this one."""
        found = self._rounds.get(run)
        return found is not None and scope is not None and found.name.scope > scope

    @property
    def sessions(self) -> list[TorchSession]:
        """The sessions of their PyTorch clients."""
        return [one.session for one in self._rounds.values()]

    async def close_all(self) -> None:
        """Close all ports; the namespaces stay at the server."""
        for run in list(self._rounds):
            self.close(run)
        await asyncio.gather(*self._tasks)

    def statistics(self) -> dict[str, Any]:
        """Return what each round is, and how many are connected there."""
        return {
            one.name.run: {
                "round": one.name.number,
                "scope": one.name.scope,
                "port": one.port,
                "connections": one.connections,
                "requests_asked": one.session.asked,
                "requests_sent": one.session.sent,
            }
            for one in self._rounds.values()
        }

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Let something go on beside."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _make_room(self) -> None:
        """Close the oldest round that nobody is connected to."""
        empty = next((run for run, one in self._rounds.items() if not one.connections), None)
        if empty is None:
            raise TooMany(f"too many rounds: {MAX_ROUNDS} are open, with connections at each")
        self.close(empty)


def _hosts(sockets: list[socket.socket]) -> list[str]:
    """Return where to listen for rounds: PyTorch's clients have only TCP, so beside a Unix socket it is loopback."""
    return [sock.getsockname()[0] for sock in sockets if sock.family != socket.AF_UNIX] or [LOOPBACK]


def _listen_everywhere(port: int) -> list[socket.socket]:
    try:
        return _listen(EVERYWHERE, port)
    except AddressTaken:  # a machine without IPv6
        return _listen(EVERYWHERE[:1], port)


def _listen(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """Listen on a port, or on a free one where that is taken."""
    if port:
        try:
            return net.listen(hosts, port)
        except AddressTaken:
            pass
    return net.listen(hosts, 0)


async def close_at_server(server: net.Endpoint, run: str, scope: int | None) -> bool:
    """Close a round's namespace at the server; return whether there was one. Raises OSError and ValueError."""
    path = f"/rounds/{urllib.parse.quote(run, safe='')}" + ("" if scope is None else f"/{scope}")
    reader, writer = await asyncio.open_connection(*server)
    try:
        writer.write(f"DELETE {path} HTTP/1.1\r\nhost: {server}\r\nconnection: close\r\n\r\n".encode())
        answer = await reader.read(MAX_ANSWER_BYTES)
        while piece := await reader.read(MAX_ANSWER_BYTES):
            answer += piece
            if len(answer) > MAX_ANSWER_BYTES:
                raise ValueError("an answer without end")
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    if head.split(b" ")[1:2] != [b"200"]:
        raise ValueError(f"it answered {head.splitlines()[:1]!r}")
    return bool(json.loads(body)["closed"])
