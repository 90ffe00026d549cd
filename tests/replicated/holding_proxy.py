"""`HoldingProxy`: a proxy that can hold back the replies of a server, and release them later; nothing is lost."""

from __future__ import annotations

import socket
import threading
from typing import Any

from tests.cutting_proxy import DOWN, CuttingProxy


class HoldingProxy(CuttingProxy):
    """A proxy in front of a port; a context manager."""

    def __init__(self, port: int) -> None:
        self._open_gate = threading.Event()
        self._open_gate.set()
        self.holding = threading.Event()
        """Set once a reply is held back."""

        super().__init__(port)

    def hold(self) -> None:
        """Hold back every reply from now on."""
        self.holding.clear()
        self._open_gate.clear()

    def release(self) -> None:
        """Forward the held replies, and all that follow."""
        self._open_gate.set()

    def stop(self) -> None:
        self.release()
        super().stop()

    def _pump(
        self, way: str, source: socket.socket, sink: socket.socket, pair: tuple[socket.socket, socket.socket]
    ) -> None:
        gated: Any = _Gated(sink, self) if way == DOWN else sink
        super()._pump(way, source, gated, pair)

    def _wait(self) -> None:
        if not self._open_gate.is_set():
            self.holding.set()
            self._open_gate.wait()


class _Gated:
    """A socket whose writes wait while the proxy holds."""

    def __init__(self, sink: socket.socket, holder: HoldingProxy) -> None:
        self._sink, self._holder = sink, holder

    def sendall(self, data: bytes) -> None:
        self._holder._wait()
        self._sink.sendall(data)
