"""A durable server in a thread, which records every request.

So a test can see which requests a client repeats, and with which timeouts.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from rallypoint.core import entries, ops
from rallypoint.core.state import StateLimits
from rallypoint.protocol.native import Frames, decode_request
from rallypoint.server.connections.connection import Connection, ProtocolHandler
from rallypoint.server.server import StoreServer
from rallypoint.testing import InProcessServer
from rallypoint.testing.memory_log import MemoryLog


class RecordingHandler:
    """The server's handler of our protocol, which also records the requests."""

    def __init__(self, handler: ProtocolHandler, requests: list[ops.Op]) -> None:
        self._handler, self._requests = handler, requests
        self._frames = Frames(1 << 24)
        self._greeted = False

    def receive(self, data: bytes) -> bytes:
        for payload in self._frames.feed(data):
            if self._greeted:
                self._requests.append(decode_request(payload))
            self._greeted = True
        return self._handler.receive(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)


class RecordingServer(StoreServer):
    """A server that records the requests of its native clients."""

    requests: list[ops.Op]

    def native_handler(self, connection: Connection) -> Any:
        return RecordingHandler(super().native_handler(connection), self.requests)


class RecoveringServer(InProcessServer):
    """A server that keeps its sessions when it is killed and started again."""

    def __init__(self, grace_s: float, recovery_s: float) -> None:
        self.requests: list[ops.Op] = []
        super().__init__(grace=grace_s, durable=True, recovery=recovery_s)

    def new_server(self, loop: asyncio.AbstractEventLoop) -> RecordingServer:
        if self._log is None or not self._log.records:
            self.forget(b"identity")
        server = RecordingServer(self._settings, self._log)
        server.requests = self.requests
        return server

    def recovers_within(self, recovery_s: float) -> None:
        """Announce another recovery time from the next start on."""
        self._settings = msgspec.structs.replace(self._settings, recovery_s=recovery_s)

    def forget(self, identity: bytes) -> None:
        """Lose all sessions and keys while it is down, and have this identity."""
        limits = StateLimits()
        start = entries.StartServer(
            entries.VERSION,
            identity,
            limits.max_bytes,
            limits.max_answer_bytes,
            limits.max_kept_bytes,
            limits.max_sessions,
        )
        self._log = MemoryLog([entries.encode(start)])

    def count(self, kind: type[ops.Op]) -> int:
        """Return how many requests of a kind were received."""
        return len(self.of(kind))

    def of(self, kind: type[ops.Op]) -> list[Any]:
        """Return all requests of a kind that were received, repeated ones included."""
        return [request for request in list(self.requests) if isinstance(request, kind)]
