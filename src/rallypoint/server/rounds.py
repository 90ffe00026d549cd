"""Rounds: namespaces of one server, each with an engine of its own, for one round of one run.

PyTorch's workers use their store without a prefix, and cannot be told one. So the relay of a node has a port for each
round (`relay/rounds.py`), and names the round in its hello: the first hello creates the namespace, and that of a later
round closes the one before, with its sessions. The last namespace of a run is closed by whoever leaves it last, over
HTTP; where all have died, it stays until the server needs the room.

Rejected: a port of the server for each round. Firewalls would have to let them all pass, and after a restart of the
server PyTorch's clients would be gone whatever listens there.
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

__all__ = ["Rounds", "holdings"]

MAX_ROUNDS = 1024


def holdings(namespace: Namespace) -> dict[str, Any]:
    """Return what a namespace holds, in numbers."""
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


class Rounds:
    """The namespaces of one server, beside the one that is everybody's."""

    def __init__(self, server: StoreServer) -> None:
        self._server = server
        self._opening: Counter[str] = Counter()  # runs that have no namespace yet, by how many hellos want one
        self._closing: set[int] = set()  # namespaces that make room

    def create(self, name: str, scope: int, number: int | None, done: Callable[[Namespace | Exception], None]) -> None:
        """Create the namespace of a round, whose number is for people; call `done` with it, or with why not."""
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
        """Close a run's round, unless it is of a later scope; call `done` with whether there was one."""
        found = self._server.state.namespace_of(name)
        if found is None or (scope is not None and found.scope > scope):
            done(False)
        else:
            self._server.submit(CloseNamespace(found.id), done)

    def statistics(self) -> dict[str, Any]:
        """Return what each round holds, and how many sessions are in it."""
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
        """Where there are too many rounds, close the oldest that has no session."""
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
