"""The status of a relay: what it is, where its server is, and whether it is connected. The server has the rest."""

from __future__ import annotations

from collections.abc import Generator, Hashable
from typing import TYPE_CHECKING

from rallypoint.server.status.builder import listener_status
from rallypoint.server.status.model import ServerStatus

if TYPE_CHECKING:
    from rallypoint.relay.server import RelayServer

__all__ = ["RelayStatus"]


class RelayStatus:
    """Builds the models of one relay."""

    def __init__(self, relay: RelayServer) -> None:
        self._relay = relay

    def build(self) -> Generator[None, None, ServerStatus]:
        """Build the model; it is small."""
        relay = self._relay
        status = listener_status(relay.listener, "relay")
        status.upstream = relay.upstream.label
        health = relay.health()
        status.trouble = "" if health == "ok" else health
        facts = relay.statistics().facts
        status.counters = {name: fact for name, fact in facts.items() if name in _COUNTERS}
        yield
        return status

    def version(self) -> Hashable:
        """Return what changes whenever the model may have changed."""
        relay = self._relay
        return relay.listener.connections, relay.upstream.connected, relay.upstream.why


_COUNTERS = ("torch_clients", "requests_asked", "requests_sent", "rounds")
