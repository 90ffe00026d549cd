"""One connection to a server that speaks PyTorch's protocol, used by one call at a time.

Every step has a deadline, and every failure is `ConnectionLost` with the operation that failed. The protocol has no
timeout for a wait: the client cancels it, and reads on until it knows which came first, the cancellation or the key.
"""

from __future__ import annotations

import contextlib
import socket

from rallypoint import net
from rallypoint.deadline import Deadline
from rallypoint.errors import ConnectFailed, ConnectionLost
from rallypoint.liveness import VANISHED_S, PauseDetector, silence_s
from rallypoint.protocol.c10d import Opcode, encode, hello
from rallypoint.security.client_security import ClientSecurity

__all__ = ["PING", "TorchConnection"]

SLICE_S = 0.5
"""The longest single blocking read; after it, the liveness of the server's host is checked (`liveness.py`)."""

LONGEST_S = 1e6
"""The longest timeout to set on a socket; it does not accept infinity."""

_NONCE = 0x52414C4C

PING = encode(Opcode.PING, _NONCE)
"""Sent after a write, which has no reply of its own: see `TorchConnection.read_pong`."""


class TorchConnection:
    """One connection, used by one call at a time."""

    def __init__(self, host: str, port: int, deadline: Deadline, security: ClientSecurity) -> None:
        """Connect and greet; raise AuthenticationFailed if such a server may not be used with these credentials."""
        self._peer = str(net.Endpoint(host, port))
        self._socket = net.connect(host, port, deadline)
        self._buffer = bytearray()
        self._pauses = PauseDetector()
        try:
            self.send(hello(_NONCE), "connect", deadline)
            self.read_pong("connect", deadline)
            security.check_foreign(self._socket, self._peer)
        except ConnectionLost as error:
            self.close()
            raise ConnectFailed(
                peer=self._peer, timeout_s=deadline.timeout_s, tried={self._peer: f"not a store: {error.why}"}
            ) from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def shutdown(self) -> None:
        """Wake the call that reads, if any: it finds the connection lost."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def send(self, request: bytes, operation: str, deadline: Deadline) -> None:
        """Send a request, or several."""
        try:
            self._socket.settimeout(min(max(deadline.remaining(), 0.001), LONGEST_S))
            self._socket.sendall(request)
        except OSError as error:
            raise self._connection_lost(operation, error, deadline) from error

    def read_exactly(self, size: int, operation: str, deadline: Deadline) -> bytes:
        """Read exactly `size` bytes of a reply; bytes received before a timeout are kept for the next call."""
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
            raise self._connection_lost(operation, error, deadline) from error
        data = bytes(buffer[:size])
        del buffer[:size]
        return data

    def _some(self, most: int, operation: str, deadline: Deadline) -> bytes:
        """Read the next bytes; raise TimeoutError at the deadline, ConnectionLost if the server's host is gone."""
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

    def read_integer(self, operation: str, deadline: Deadline) -> int:
        """Read an integer of a reply."""
        return int.from_bytes(self.read_exactly(8, operation, deadline), "little", signed=True)

    def read_string(self, operation: str, deadline: Deadline) -> bytes:
        """Read a key or value of a reply."""
        return self.read_exactly(self.read_integer(operation, deadline), operation, deadline)

    def read_pong(self, operation: str, deadline: Deadline) -> None:
        """Read the reply to `PING`, which proves that everything sent before it was executed."""
        answer = self.read_exactly(4, operation, deadline)
        if int.from_bytes(answer, "little") != _NONCE:
            raise ConnectionLost(peer=self._peer, operation=operation, why=f"it replied {answer!r} to a ping")

    def read_wait_result(self, operation: str, deadline: Deadline, patience: Deadline) -> bool:
        """Return whether the condition of a wait came true; at the deadline, cancel the wait, within `patience`."""
        try:
            return self.read_exactly(1, operation, deadline) == b"\0"
        except ConnectionLost as error:
            if not isinstance(error.__cause__, TimeoutError):
                raise
        self.send(encode(Opcode.CANCEL_WAIT), operation, patience)
        if self.read_exactly(1, operation, patience) == b"\1":
            return False
        self.read_exactly(1, operation, patience)  # came true just before; this byte replies to the cancellation
        return True

    def _connection_lost(self, operation: str, error: OSError, deadline: Deadline) -> ConnectionLost:
        mute = isinstance(error, TimeoutError)
        why = f"no answer within {deadline.timeout_s:g} s" if mute else error.strerror or str(error)
        return ConnectionLost(peer=self._peer, operation=operation, why=why)
