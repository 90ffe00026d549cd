"""Namespaces of rounds: each round of a run has an engine of its own.

PyTorch's workers use their store without a prefix, and cannot be given one. So the relay of a node has a port for each
round (`relay/round_ports.py`) and names the round in its hello. The first hello creates the namespace; the hello of a
later round closes the earlier namespace and its sessions. The last node to leave a run closes its namespace over HTTP;
if all nodes have died, the namespace stays until the server needs the room.

Rejected: a port of the server for each round. Firewalls would have to admit them all, and a restart of the server would
disconnect PyTorch's clients for good.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rallypoint.core.entries import CloseNamespace, OpenNamespace
from rallypoint.core.state import Namespace
from rallypoint.errors import StoreError
from rallypoint.server.round_errors import TooLate, TooMany

if TYPE_CHECKING:
    from rallypoint.server.server import StoreServer

__all__ = ["RoundNamespaces", "holdings"]

MAX_ROUNDS = 1024


def holdings(namespace: Namespace) -> dict[str, Any]:
    """Return counts of the objects in a namespace."""
    engine = namespace.engine.statistics()
    return {
        "keys": engine.keys,
        "queues": engine.queues,
        "waiting": engine.waiters + namespace.objects.waiting,
        "watches": engine.watches,
        "leased_keys": engine.leased_keys,
        "objects": namespace.objects.statistics(),
        "revision": engine.revision,
    }


class RoundNamespaces:
    """The namespaces of one server, except the default one."""

    def __init__(self, server: StoreServer) -> None:
        self._server = server
        self._opening: Counter[str] = Counter()  # runs without a namespace, by the number of hellos that create one
        self._closing: set[int] = set()  # namespaces being closed to make room

    def create(self, name: str, scope: int, number: int | None, done: Callable[[Namespace | Exception], None]) -> None:
        """Create the namespace of a round; call `done` with it, or with the error. `number` is for display only."""
        found = self._server.state.namespace_of(name)
        if found is not None and found.scope > scope:
            done(_too_late(name))
            return
        more = int(found is None)
        try:
            if more and name not in self._opening:
                self._make_room()
        except TooMany as error:
            done(error)
            return
        self._count(name, more)

        def created(namespace: Namespace | None) -> None:
            self._count(name, -more)
            done(_too_late(name) if namespace is None else namespace)

        def refused(error: StoreError) -> None:
            self._count(name, -more)
            done(error)

        self._server.submit(OpenNamespace(name, scope, number), created, refused)

    def _count(self, name: str, more: int) -> None:
        self._opening[name] += more
        if not self._opening[name]:
            del self._opening[name]

    def close(self, name: str, scope: int | None, done: Callable[[bool], None]) -> None:
        """Close the round of a run unless its scope is later; call `done` with whether there was one."""
        found = self._server.state.namespace_of(name)
        if found is None or (scope is not None and found.scope > scope):
            done(False)
        else:
            self._server.submit(CloseNamespace(found.id), done)

    def statistics(self) -> dict[str, Any]:
        """Return the counts of keys and sessions of each round."""
        state = self._server.state
        sessions = Counter(session.namespace for session in state.sessions.values())
        return {
            one.name: {
                "round": one.number,
                "scope": one.scope,
                "sessions": sessions[one.id],
                "keys": one.engine.statistics().keys,
            }
            for one in state.namespaces.values()
            if one.id
        }

    def _make_room(self) -> None:
        """Close the oldest round without a session if the limit is reached; raise TooMany if all have sessions."""
        state = self._server.state
        if len(state.namespaces) - 1 - len(self._closing) + len(self._opening) < MAX_ROUNDS:
            return
        used = {0} | self._closing | {session.namespace for session in state.sessions.values()}
        empty = next((identity for identity in state.namespaces if identity not in used), None)
        if empty is None:
            raise TooMany(f"too many rounds: {MAX_ROUNDS} are open, with sessions in each")
        self._closing.add(empty)
        self._server.submit(CloseNamespace(empty), lambda _: self._closing.discard(empty))


def _too_late(name: str) -> TooLate:
    return TooLate(f"a later round of {name!r} has begun, and this one is over")
