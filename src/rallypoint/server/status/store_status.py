"""The status of a store server, created on the first status request, or when there are runs to observe.

Every server imports this module; it imports the rest of the package on first use.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from rallypoint.core.machines.rendezvous import RendezvousMachine

if TYPE_CHECKING:
    from rallypoint.core.state import Namespace
    from rallypoint.server.server import StoreServer
    from rallypoint.server.status.source import StatusSource
    from rallypoint.storage.etcd.layout import FollowerEntry

__all__ = ["RUN_KEYS", "StoreStatus"]

RUN_KEYS = b"/run:"
"""The prefix of the keys of all runs (`launch/run_state.py`), in a store without a prefix of its own."""

LOOKED_AT = 1000
"""Maximum number of shared objects searched for a rendezvous, once a second."""


class StoreStatus:
    """The models of one store server."""

    def __init__(self, server: StoreServer) -> None:
        self.followers: list[FollowerEntry] = []
        """The last reports of the standbys, if this server leads."""

        self._server = server
        self._source: StatusSource | None = None

    def source(self) -> StatusSource:
        """Return the source of the models; create it on first use."""
        if self._source is None:
            from rallypoint.server.status.builder import StatusBuilder
            from rallypoint.server.status.source import StatusSource

            builder = StatusBuilder(self._server)
            self._source = StatusSource(builder.build, builder.version, builder.observe)
        return self._source

    def observe(self) -> None:
        """Record the rounds and failures of runs, if there are runs; called once a second."""
        if self._source is not None or _has_runs(self._server.state.namespaces[0]):
            self.source().observe()


def _has_runs(namespace: Namespace) -> bool:
    if namespace.engine.first_keys(RUN_KEYS, 1):
        return True
    return any(kind is RendezvousMachine for kind, _ in islice(namespace.objects.machines, LOOKED_AT))
