"""A TLS connection for the blocking client: one thread reads while others write.

`ssl.SSLSocket` cannot do that: it releases the interpreter lock within OpenSSL, whose connections are not thread-safe.
Here TLS runs in memory (`ssl.MemoryBIO`): a lock guards each step, which never blocks, and the socket is used without
that lock. Writers take turns (`_writer`), so records are sent in the order of their numbers. The reader sends nothing:
it could wait for a writer, which waits for the server, which waits for the reader. A reply to a key update is sent with
the next write.

It has the methods of a socket that the client uses, with these differences:
- `recv` returns everything that the received records contain, even if that is more than requested: `poll` on the
  descriptor does not see bytes that are left in memory.
- `recv` without a timeout raises BlockingIOError if a part of a record has arrived, as if SO_RCVTIMEO had expired.
- `send` sends everything. With MSG_DONTWAIT it raises BlockingIOError if the socket accepts nothing now; the unsent
  rest of a record is sent before the next record.
- `close` sends no close_notify: our protocol has a goodbye of its own.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import ssl
import threading
from collections.abc import Iterable
from typing import Any

from rallypoint.deadline import Deadline

__all__ = ["TlsSocket", "wrap"]

PIECE_BYTES = 256 * 1024
"""How much is encrypted at once; the socket must accept it before the next piece."""

READ_BYTES = 65536
RECORD_BYTES = 16 * 1024
"""The longest content of a record, and so the most that is decrypted at once."""

LEAST_S = 0.1
"""The shortest timeout of a step of the handshake, however little time is left."""


class TlsSocket:
    """A connected socket with TLS; `wrap` makes one."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, server_name: str) -> None:
        self._socket = sock
        self._received, self._sealed = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._sealed, server_hostname=server_name)
        self._lock, self._writer = threading.Lock(), threading.Lock()
        self._early = b""  # decrypted with the end of the handshake
        self._ended = False  # by the peer's close_notify
        self._unsent = b""  # the rest of the last record of a non-blocking `send`
        self.fileno = sock.fileno
        self.close = sock.close
        self.shutdown = sock.shutdown
        self.settimeout = sock.settimeout
        self.gettimeout = sock.gettimeout
        self.setsockopt = sock.setsockopt
        self.getsockopt = sock.getsockopt
        self.getpeername = sock.getpeername
        self.getsockname = sock.getsockname

    @property
    def family(self) -> int:
        """The address family of the socket."""
        return self._socket.family

    def handshake(self, deadline: Deadline) -> None:
        """Agree on keys and verify the server; raise ssl.SSLError, TimeoutError or ConnectionError."""
        while True:
            self._socket.settimeout(max(deadline.remaining(), LEAST_S))
            try:
                self._tls.do_handshake()
                self._early = self._decrypt()
                self._socket.sendall(self._sealed.read())
                return
            except ssl.SSLWantReadError:
                self._socket.sendall(self._sealed.read())
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    self._socket.sendall(self._sealed.read())  # tell the server why
                raise
            if deadline.expired():
                raise TimeoutError(f"the TLS handshake took longer than {deadline.timeout_s:g} s")
            data = self._socket.recv(READ_BYTES)
            if not data:
                raise ConnectionError("the server closed it during the TLS handshake")
            self._received.write(data)

    def send(self, data: bytes, flags: int = 0) -> int:
        """Send all of the data; with MSG_DONTWAIT, the only flag, nothing if the socket is full: BlockingIOError."""
        if not flags:
            self.sendall(data)
            return len(data)
        if not self._writer.acquire(blocking=False):
            raise BlockingIOError(errno.EAGAIN, "another thread is sending")
        try:
            self._send_now(data)
        finally:
            self._writer.release()
        return len(data)

    def _send_now(self, data: bytes) -> None:
        """Encrypt and send data, if the socket accepts the start of it now; keep the rest."""
        poller = select.poll()
        poller.register(self._socket, select.POLLOUT)
        if self._unsent:
            self._unsent = self._unsent[self._socket.send(self._unsent, socket.MSG_DONTWAIT) :]
        if self._unsent or not poller.poll(0):
            raise BlockingIOError(errno.EAGAIN, "the socket is full")
        self._unsent = self._seal(data)
        with contextlib.suppress(BlockingIOError):
            self._unsent = self._unsent[self._socket.send(self._unsent, socket.MSG_DONTWAIT) :]

    def sendall(self, data: bytes) -> None:
        """Send all of the data."""
        if 0 < len(data) <= PIECE_BYTES:
            pieces: Iterable[bytes | memoryview] = (data,)
        else:
            plain = memoryview(data)
            pieces = (plain[start : start + PIECE_BYTES] for start in range(0, len(plain), PIECE_BYTES))
        with self._writer:
            for piece in pieces:
                sealed = self._unsent + self._seal(piece)
                self._unsent = b""
                self._socket.sendall(sealed)

    def _seal(self, data: bytes | memoryview) -> bytes:
        with self._lock:
            self._tls.write(data)
            return self._sealed.read()

    def recv(self, most: int) -> bytes:
        """Return decrypted data, b"" at the end; raises the errors of the socket's `recv`, and ssl.SSLError."""
        if self._early:
            plain, self._early = self._early, b""
            return plain
        timeout_s = self._socket.gettimeout()
        deadline = Deadline(timeout_s) if timeout_s is not None else None
        while not self._ended and (data := self._socket.recv(max(most, READ_BYTES))):
            with self._lock:
                self._received.write(data)
                plain = self._decrypt()
            if plain or self._ended:
                return plain
            if deadline is None:
                raise BlockingIOError(errno.EAGAIN, "the received record is incomplete")
            if deadline.expired():
                raise TimeoutError("timed out within a record")
        return b""

    def _decrypt(self) -> bytes:
        """Return what can be decrypted, and note whether the peer has ended the stream."""
        parts = []
        try:
            while part := self._tls.read(RECORD_BYTES):
                parts.append(part)
                if not self._received.pending:  # asking for the next record would cost an exception
                    return b"".join(parts)
            self._ended = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self._ended = True
        return b"".join(parts)

    def __enter__(self) -> TlsSocket:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def wrap(sock: socket.socket, context: ssl.SSLContext, server_name: str, deadline: Deadline) -> TlsSocket:
    """Start TLS on a connected socket; close it, and raise ssl.SSLError, OSError or ValueError, if that fails."""
    try:
        wrapped = TlsSocket(sock, context, server_name)
        wrapped.handshake(deadline)
        sock.settimeout(None)
    except BaseException:
        sock.close()
        raise
    return wrapped
