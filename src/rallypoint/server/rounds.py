"""Round listeners: ports of one server behind which there is a namespace of its own, for one round of one run.

PyTorch's workers use their store without a prefix, and cannot be told one, so every round of a run gets a port.
Opening that of a later round closes the one before: its connections are closed, and its namespace is dropped. A run's
last port is closed by whoever leaves it last; where all have died, it stays until the server needs the room. After a
restart, rounds that the log has get their ports back.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from rallypoint import net
from rallypoint.core.entries import CloseNamespace, OpenNamespace
from rallypoint.core.state import Namespace
from rallypoint.errors import AddressTaken, StoreError
from rallypoint.server.base import ServerBase
from rallypoint.server.c10d_connection import C10dConnection
from rallypoint.server.connection import Connection
from rallypoint.server.doors import TooLate, TooMany
from rallypoint.server.native_connection import NativeConnection

if TYPE_CHECKING:
    from rallypoint.server.server import StoreServer

__all__ = ["RoundListener", "RoundListeners"]

log = logging.getLogger("rallypoint.server")

MAX_ROUNDS = 1024


class RoundListener(ServerBase):
    """The port of one round, and everybody who is connected there."""

    def __init__(self, server: StoreServer, namespace: Namespace) -> None:
        super().__init__(server.settings, server)
        self.namespace = namespace
        self.opening: asyncio.Task[None] | None = None
        self._server = server

    @property
    def port(self) -> int:
        """Where it listens; after a restart that may be another port than the log has."""
        return int(self.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening, once that has begun, and hang up on everybody."""
        if self.opening is not None:
            await asyncio.wait((self.opening,))
        await super().close()

    def torch_handler(self, connection: Connection) -> C10dConnection:
        return C10dConnection(self._server, connection, self.namespace)

    def native_handler(self, connection: Connection) -> NativeConnection:
        return NativeConnection(self._server, connection, self.namespace)

    def open_round(self, name: str, scope: int, number: int | None, done: Callable[[int | Exception], None]) -> None:
        done(TooMany("a round has no rounds of its own"))

    def close_round(self, name: str, scope: int | None, done: Callable[[bool], None]) -> None:
        done(False)

    def holdings(self) -> dict[str, Any]:
        return holdings(self.namespace)

    def held_bytes(self) -> int:
        return self._server.held_bytes()

    def describe_sessions(self) -> Sequence[Any]:
        sessions = self._server.state.sessions.values()
        return [session for session in sessions if session.namespace == self.namespace.id]


def holdings(namespace: Namespace) -> dict[str, Any]:
    """Return what a namespace holds, in numbers."""
    engine = namespace.engine.statistics()
    return {
        "keys": engine.keys,
        "queues": engine.queues,
        "waiting": engine.waiters,
        "watches": engine.watches,
        "leased_keys": engine.leased_keys,
        "objects": namespace.objects.statistics(),
        "revision": engine.revision,
    }


class RoundListeners:
    """The open rounds of one server, by the ids of their namespaces."""

    def __init__(self, server: StoreServer) -> None:
        self._server = server
        self._listeners: dict[int, RoundListener] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def connections(self) -> int:
        """How many are connected at all of them."""
        return sum(listener.connections for listener in self._listeners.values())

    def open(self, name: str, scope: int, number: int | None, done: Callable[[int | Exception], None]) -> None:
        """Open the port of a round, whose number is for people; call `done` with it, or with why there is none."""
        found = self._server.state.namespace_of(name)
        if found is not None and found.scope > scope:
            done(_too_late(name))
            return
        if found is not None and found.scope == scope and found.id in self._listeners:
            done(self._listeners[found.id].port)
            return
        try:
            if found is None:
                self._make_room()
            sockets = net.listen([sock.getsockname()[0] for sock in self._server.sockets], 0)
        except (AddressTaken, TooMany) as error:
            done(error)
            return
        entry = OpenNamespace(name, scope, number, sockets[0].getsockname()[1])
        opened = functools.partial(self._opened, name, sockets, done)
        self._server.submit(entry, opened, functools.partial(_refuse, sockets, done))

    def _opened(
        self,
        name: str,
        sockets: list[socket.socket],
        done: Callable[[int | Exception], None],
        namespace: Namespace | None,
    ) -> None:
        self._close_ended()
        if namespace is not None and namespace.id not in self._listeners:
            self._listen(namespace, sockets)
        else:
            for sock in sockets:  # somebody else was faster
                sock.close()
        done(_too_late(name) if namespace is None else self._listeners[namespace.id].port)

    def _listen(self, namespace: Namespace, sockets: list[socket.socket]) -> None:
        listener = self._listeners[namespace.id] = RoundListener(self._server, namespace)
        listener.sockets = sockets
        self._server.crowd += len(sockets)  # descriptors, too
        listener.opening = self._run(listener.open(sockets))

    def create(self, name: str, scope: int, number: int | None, done: Callable[[Namespace | Exception], None]) -> None:
        """Create the namespace of a round for clients that can name it; call `done` with it, or with why not."""
        found = self._server.state.namespace_of(name)
        if found is not None and found.scope > scope:
            done(_too_late(name))
            return
        try:
            if found is None:
                self._make_room()
        except TooMany as error:
            done(error)
            return

        def created(namespace: Namespace | None) -> None:
            self._close_ended()
            done(_too_late(name) if namespace is None else namespace)

        self._server.submit(OpenNamespace(name, scope, number, 0), created, done)

    def close(self, name: str, scope: int | None, done: Callable[[bool], None]) -> None:
        """Close a run's round, unless it is of a later scope; call `done` with whether there was one."""
        found = self._server.state.namespace_of(name)
        if found is None or (scope is not None and found.scope > scope):
            done(False)
            return

        def closed(answer: bool) -> None:
            self._close_ended()
            done(answer)

        self._server.submit(CloseNamespace(found.id), closed)

    async def reopen(self) -> None:
        """After a restart: listen again for the rounds that the log has."""
        hosts = [sock.getsockname()[0] for sock in self._server.sockets]
        for namespace in list(self._server.state.namespaces.values()):
            if namespace.port:
                try:
                    self._listen(namespace, net.listen(hosts, namespace.port))
                except AddressTaken as error:
                    log.warning("a round of %r has lost its port: %s", namespace.name, error)
        await asyncio.gather(*self._tasks)

    def stop(self) -> None:
        """Stop listening and reading; replies are still sent."""
        for listener in self._listeners.values():
            listener.stop()

    async def close_all(self) -> None:
        """Stop listening for all rounds; their namespaces stay."""
        for identity in list(self._listeners):
            self._close(identity)
        await asyncio.gather(*self._tasks)

    def statistics(self) -> dict[str, Any]:
        """Return what each round with a port holds."""
        return {
            listener.namespace.name: {
                "round": listener.namespace.number,
                "scope": listener.namespace.scope,
                "port": listener.port,
                "connections": listener.connections,
                "keys": listener.namespace.engine.statistics().keys,
            }
            for listener in self._listeners.values()
        }

    def _make_room(self) -> None:
        """Where there are too many rounds, close the oldest that nobody is connected to."""
        state = self._server.state
        if len(state.namespaces) <= MAX_ROUNDS:  # one of them is everybody's
            return
        used = {0} | {identity for identity, one in self._listeners.items() if one.connections}
        used |= {session.namespace for session in state.sessions.values()}
        empty = next((identity for identity in state.namespaces if identity not in used), None)
        if empty is None:
            raise TooMany(f"too many rounds: {MAX_ROUNDS} are open, with connections at each")
        self._server.submit(CloseNamespace(empty), lambda _: self._close_ended())

    def _close_ended(self) -> None:
        """Close the listeners whose namespaces are gone."""
        for identity in [one for one in self._listeners if one not in self._server.state.namespaces]:
            self._close(identity)

    def _close(self, identity: int) -> None:
        listener = self._listeners.pop(identity)
        self._server.crowd -= len(listener.sockets)
        self._run(listener.close())

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _too_late(name: str) -> TooLate:
    return TooLate(f"a later round of {name!r} has begun, and this one is over")


def _refuse(sockets: list[socket.socket], done: Callable[[int | Exception], None], error: StoreError) -> None:
    for sock in sockets:
        sock.close()
    done(error)
