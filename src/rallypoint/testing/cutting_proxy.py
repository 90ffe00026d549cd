"""A proxy that cuts connections on request: after a number of bytes in one direction, or all of them at once.

It can also be down for a while; to clients, that looks like a server that restarts with its sessions.

Bytes are forwarded as they arrive, up to exactly the byte of the cut; then both sides see the connection end. The
proxy runs in threads of the test's own process, on loopback.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Sequence
from typing import TypeVar

_Self = TypeVar("_Self", bound="CuttingProxy")

UP, DOWN = "up", "down"  # from the client to the server, and back

REFUSES, HANGS_UP, SILENT = "refuses", "hangs up", "silent"
"""How it may be down: nothing listens, or connections are accepted and closed, or accepted and never answered."""


class CuttingProxy:
    """A proxy in front of a port; a context manager."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = self._listener.getsockname()[1]
        self.silent = False
        self._lock = threading.Lock()
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._left: dict[str, int | None] = {UP: None, DOWN: None}
        self.passed = {UP: 0, DOWN: 0}
        self.refusing = False
        self.half_open = False
        """Whether a cut is hidden from the server, as when the network between fails."""

        self._open: list[socket.socket] = []
        self._stopped = False
        self.cut = threading.Event()
        self.connections = 0
        threading.Thread(target=self._accept, args=[self._listener], daemon=True).start()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Cut every connection, and refuse new ones, as after the death of a server."""
        self._close_listener()
        _end(self._open)
        self.half_open = False
        with self._lock:
            self._stopped = True
        self.cut_all()

    def _close_listener(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # otherwise it listens while a thread is in accept
        self._listener.close()

    def go_down(self, how: str = REFUSES) -> None:
        """Cut every connection, and forward nothing until `come_back`."""
        if how == REFUSES:
            self._close_listener()
        self.refusing, self.silent = how == HANGS_UP, how == SILENT
        self.cut_all()

    def come_back(self) -> None:
        """Forward again, on the same port; connections that were silent stay so."""
        self.refusing = self.silent = False
        if self._listener.fileno() < 0:
            self._listener = socket.create_server(("127.0.0.1", self.port), backlog=512)
            threading.Thread(target=self._accept, args=[self._listener], daemon=True).start()

    def arm(self, way: str, after: int) -> None:
        """Cut the connection once, when `after` more bytes have passed in this direction."""
        with self._lock:
            self._left[way] = after
            self.cut.clear()
        if after == 0 and way == UP:
            self.cut_all()

    def disarm(self) -> None:
        """Cancel a cut that was not reached."""
        with self._lock:
            self._left = {UP: None, DOWN: None}

    def redirect(self, port: int) -> None:
        """Send new connections to another port, and cut the existing ones."""
        self._target = port
        self.cut_all()

    def cut_all(self) -> None:
        """Cut every connection now."""
        with self._lock:
            self._left = {UP: None, DOWN: None}
            pairs, self._pairs = self._pairs, set()
        for pair in pairs:
            self._end(pair)
        self.cut.set()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            self.connections += 1
            if self.silent:
                self._open.append(client)
                continue
            try:
                if self.refusing:
                    raise ConnectionError
                server = socket.create_connection(("127.0.0.1", self._target), timeout=10)
            except OSError:
                client.close()
                continue
            for sock in (client, server):
                sock.settimeout(None)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pair = (client, server)
            with self._lock:
                self._pairs.add(pair)
                stopped = self._stopped
            if stopped:  # accepted just before `stop`
                self.cut_all()
                return
            threading.Thread(target=self._pump, args=(UP, client, server, pair), daemon=True).start()
            threading.Thread(target=self._pump, args=(DOWN, server, client, pair), daemon=True).start()

    def _pump(
        self, way: str, source: socket.socket, sink: socket.socket, pair: tuple[socket.socket, socket.socket]
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                with self._lock:
                    left = self._left[way]
                    last = left is not None and len(data) >= left
                    data = data[:left] if last else data
                    self.passed[way] += len(data)
                    if left is not None:
                        self._left[way] = None if last else left - len(data)
                    if last:
                        self._pairs.discard(pair)
                sink.sendall(data)
                if last:
                    break
        with self._lock:
            self._pairs.discard(pair)
        self._end(pair)
        if way:
            self.cut.set()

    def _end(self, pair: tuple[socket.socket, socket.socket]) -> None:
        """Close both sides after the forwarded bytes; with `half_open`, only the client's."""
        if self.half_open:
            self._open.append(pair[1])
            _end(pair[:1])
        else:
            _end(pair)


def _end(pair: Sequence[socket.socket]) -> None:
    for sock in pair:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
    for sock in pair:
        sock.close()


def reset(sock: socket.socket) -> None:
    """Close with a reset, as the kernel does for a dead process that left data unread."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
