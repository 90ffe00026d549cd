"""One connection to a server that speaks PyTorch's protocol, used by one call at a time.

Every step has a deadline, and every failure is `ConnectionLost` with the operation it broke. The protocol's own time-
out of a wait is the client's: it cancels, and reads on until it knows which came first, the cancellation or the key.
"""

from __future__ import annotations

import contextlib
import socket

from rallypoint import net
from rallypoint.deadline import Deadline
from rallypoint.errors import ConnectFailed, ConnectionLost
from rallypoint.liveness import VANISHED_S, PauseDetector, silence_s
from rallypoint.protocol.c10d import Opcode, encode, hello

__all__ = ["PING", "Link"]

SLICE_S = 0.5
"""How long one blocking read lasts at most: then the server's host is looked after (`liveness.py`)."""

LONGEST_S = 1e6
"""The longest time-out that is asked of a socket; none takes an endless one."""

_NONCE = 0x52414C4C

PING = encode(Opcode.PING, _NONCE)
"""Sent behind a write, which has no answer of its own: see `Link.pong`."""


class Link:
    """One connection, used by one call at a time."""

    def __init__(self, host: str, port: int, deadline: Deadline) -> None:
        self._peer = str(net.Endpoint(host, port))
        self._socket = net.connect(host, port, deadline)
        self._buffer = bytearray()
        self._pauses = PauseDetector()
        try:
            self.send(hello(_NONCE), "connect", deadline)
            self.pong("connect", deadline)
        except ConnectionLost as error:
            self.close()
            raise ConnectFailed(
                peer=self._peer, timeout_s=deadline.timeout_s, tried={self._peer: f"not a store: {error.why}"}
            ) from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the connection."""
        self._socket.close()

    def shut(self) -> None:
        """Wake the call that reads, if there is one: it finds the connection lost."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def send(self, request: bytes, operation: str, deadline: Deadline) -> None:
        """Send a request, or several."""
        try:
            self._socket.settimeout(min(max(deadline.remaining(), 0.001), LONGEST_S))
            self._socket.sendall(request)
        except OSError as error:
            raise self._lost(operation, error, deadline) from error

    def take(self, size: int, operation: str, deadline: Deadline) -> bytes:
        """Read exactly so many bytes of an answer; what came of it before a time-out is kept for the next call."""
        buffer = self._buffer
        try:
            while len(buffer) < size:
                piece = self._some(max(65536, min(size - len(buffer), 1 << 20)), operation, deadline)
                if not piece:
                    raise ConnectionLost(peer=self._peer, operation=operation, why="the server closed it")
                buffer += piece
        except ConnectionLost:
            raise
        except OSError as error:
            raise self._lost(operation, error, deadline) from error
        data = bytes(buffer[:size])
        del buffer[:size]
        return data

    def _some(self, most: int, operation: str, deadline: Deadline) -> bytes:
        """Read what comes next; raise TimeoutError at the deadline, ConnectionLost if the server's host is gone."""
        while True:
            self._socket.settimeout(min(max(deadline.remaining(), 0.001), SLICE_S))
            self._pauses.plan(SLICE_S)
            try:
                return self._socket.recv(most)
            except TimeoutError:
                if deadline.expired():
                    raise
            silent_s = silence_s(self._socket) or 0.0
            if silent_s >= VANISHED_S and not self._pauses.paused():
                why = f"its host has been silent for {silent_s:.1f} s"
                raise ConnectionLost(peer=self._peer, operation=operation, why=why)

    def integer(self, operation: str, deadline: Deadline) -> int:
        """Read a number of an answer."""
        return int.from_bytes(self.take(8, operation, deadline), "little", signed=True)

    def string(self, operation: str, deadline: Deadline) -> bytes:
        """Read a key or value of an answer."""
        return self.take(self.integer(operation, deadline), operation, deadline)

    def pong(self, operation: str, deadline: Deadline) -> None:
        """Read the answer to `PING`, which shows that everything sent before it was carried out."""
        answer = self.take(4, operation, deadline)
        if int.from_bytes(answer, "little") != _NONCE:
            raise ConnectionLost(peer=self._peer, operation=operation, why=f"it answered a ping with {answer!r}")

    def waited(self, operation: str, deadline: Deadline, patience: Deadline) -> bool:
        """Say whether a wait ended because it came true; at the deadline it is cancelled, within `patience`."""
        try:
            return self.take(1, operation, deadline) == b"\0"
        except ConnectionLost as error:
            if not isinstance(error.__cause__, TimeoutError):
                raise
        self.send(encode(Opcode.CANCEL_WAIT), operation, patience)
        if self.take(1, operation, patience) == b"\1":
            return False
        self.take(1, operation, patience)  # it came true just before; this byte is for the cancellation
        return True

    def _lost(self, operation: str, error: OSError, deadline: Deadline) -> ConnectionLost:
        mute = isinstance(error, TimeoutError)
        why = f"no answer within {deadline.timeout_s:g} s" if mute else error.strerror or str(error)
        return ConnectionLost(peer=self._peer, operation=operation, why=why)
