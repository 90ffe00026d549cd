"""One port of a relay: its listener, and the upstream session that its PyTorch clients share.

A relay has one for all its own sockets, and one for each round (`round_ports.py`), whose clients use the namespace of
that round.
"""

from __future__ import annotations

from rallypoint.relay.native_forward import NativeForward, RoundPortName
from rallypoint.relay.torch.connection import TorchRelayConnection
from rallypoint.relay.torch.session import TorchSession
from rallypoint.relay.upstream.connection import Upstream
from rallypoint.server.admission import Admission
from rallypoint.server.connections.connection import Connection, ProtocolHandler
from rallypoint.server.connections.greeting import PeerProtocol
from rallypoint.server.connections.limits import ConnectionLimit, ConnectionMemory
from rallypoint.server.http_site import HttpSite
from rallypoint.server.listener import Listener
from rallypoint.server.settings import Settings

__all__ = ["RelayPort"]


class RelayPort:
    """The clients of one port; the application behind its listener."""

    def __init__(
        self,
        settings: Settings,
        upstream: Upstream,
        site: HttpSite,
        admission: Admission,
        round_name: RoundPortName | None = None,
        limit: ConnectionLimit | None = None,
        memory: ConnectionMemory | None = None,
    ) -> None:
        self.site = site
        self.session = TorchSession(upstream, *(round_name or ()))
        """The session of the PyTorch clients."""

        self.listener = Listener(settings, self, admission, limit, memory)
        self._upstream = upstream
        self._round_name = round_name
        self._max_bytes = settings.max_connection_memory

    def handler(self, protocol: PeerProtocol, connection: Connection) -> ProtocolHandler | None:
        """Return the handler of a new connection; a relay has no channels for other relays."""
        if protocol is PeerProtocol.TORCH:
            return TorchRelayConnection(self.session, connection, self._max_bytes)
        return NativeForward(connection, self._upstream, self._round_name) if protocol is PeerProtocol.NATIVE else None

    def held_bytes(self) -> int:
        """Return the size of the data that waits in the connection to the server."""
        return self._upstream.held_bytes
