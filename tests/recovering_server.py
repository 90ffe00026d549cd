"""A server, in a thread, that can be killed and restarted with all its state, like one with a data directory.

It is the real server, on a log in memory that outlives it. It records every request, so that a test can see which
requests a client repeats, and with which timeouts.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import Any

from tests.server.fake_log import FakeLog

from rallypoint.core import entries, ops
from rallypoint.core.state import StateLimits
from rallypoint.protocol.native import Frames, decode_request
from rallypoint.server.connections.connection import Connection, ProtocolHandler
from rallypoint.server.server import StoreServer
from rallypoint.server.settings import Settings

AMPLE_S = 60.0


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


class RecoveringServer:
    """A server on a fixed port of loopback, started at once; a context manager."""

    def __init__(self, grace_s: float, recovery_s: float) -> None:
        self._grace_s, self._recovery_s = grace_s, recovery_s
        self.requests: list[ops.Op] = []
        self.port = 0
        self._thread: threading.Thread | None = None
        self.forget(b"identity")
        self.start()

    def __enter__(self) -> RecoveringServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def forget(self, identity: bytes) -> None:
        """Lose all sessions and keys, and change identity, as a restarted server without a data directory does."""
        limits = StateLimits()
        start = entries.StartServer(
            entries.VERSION,
            identity,
            limits.max_bytes,
            limits.max_answer_bytes,
            limits.max_kept_bytes,
            limits.max_sessions,
        )
        self._log = FakeLog([entries.encode(start)])

    def start(self) -> None:
        """Listen; every earlier session may be resumed for a while."""
        assert self._thread is None
        listener = socket.create_server(("127.0.0.1", self.port), backlog=512)
        self.port = listener.getsockname()[1]
        self._killed, up = asyncio.Event(), threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=[listener, up], daemon=True)
        self._thread.start()
        assert up.wait(AMPLE_S)

    def kill(self) -> None:
        """Close all connections and the port at once; the log has no entry of that."""
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._killed.set)
            self._thread.join(AMPLE_S)
            self._thread = None

    def count(self, kind: type[ops.Op]) -> int:
        """Return how many requests of a kind were received."""
        return len(self.of(kind))

    def of(self, kind: type[ops.Op]) -> list[Any]:
        """Return all requests of a kind that were received, repeated ones included."""
        return [request for request in list(self.requests) if isinstance(request, kind)]

    def _run(self, listener: socket.socket, up: threading.Event) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve(listener, up))

    async def _serve(self, listener: socket.socket, up: threading.Event) -> None:
        server = RecordingServer(Settings(grace_s=self._grace_s, recovery_s=self._recovery_s), self._log)
        server.requests = self.requests
        await server.open([listener])
        up.set()
        await self._killed.wait()
        self._log = FakeLog(self._log.records)  # later commits are lost
        await server.close()
