"""TLS on an accepted connection: between the socket's transport and the `Connection`, which sees plain bytes.

A client that speaks TLS begins with byte 22. By then the event loop has read the first bytes, and asyncio's `start_tls`
cannot take them back. So TLS runs in memory here (`ssl.MemoryBIO`). `TlsTransport` is the transport of the `Connection`
and the protocol of the socket's transport.

It encrypts no more than the socket takes: a reply of hundreds of megabytes waits as plain bytes, is encrypted in pieces
while the peer reads, and counts in `get_write_buffer_size` until then.

A peer may end its stream by close_notify, or just by closing the socket: our protocols know themselves whether a
message is complete. Either way the replies so far are sent before the connection is closed, with a close_notify.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from rallypoint.security.tls import reason

__all__ = ["TlsTransport"]

PIECE_BYTES = 256 * 1024
"""How much is encrypted before the socket must have taken it."""

TURN_BYTES = 1024 * 1024
"""How much is encrypted in one turn of the event loop, however fast the peer reads: about a millisecond's work."""

RECORD_BYTES = 16 * 1024
"""The longest content of a record, and so the most that one read returns; room for more would only be allocated."""


class TlsUser(Protocol):
    """The plain side: see `Connection`."""

    def data_received(self, data: bytes) -> None:
        """Take decrypted bytes."""

    def pause_writing(self) -> None:
        """Stop writing."""

    def resume_writing(self) -> None:
        """Write again."""

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is gone."""

    def drop(self, why: str) -> None:
        """Abort the connection because of the peer's error."""


class TlsTransport(asyncio.Protocol):
    """One TLS connection of the server."""

    def __init__(
        self,
        transport: asyncio.Transport,
        user: TlsUser,
        context: ssl.SSLContext,
        on_failed: Callable[[str], None] | None = None,
    ) -> None:
        """Begin on an accepted socket; if the handshake fails, `on_failed` is called instead of the user's `drop`."""
        self._transport, self._user, self._on_failed = transport, user, on_failed or user.drop
        self._received, self._sealed = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._sealed, server_side=True)
        self._plain: deque[memoryview] = deque()
        self._plain_bytes = 0
        self._shaken = self._closing = False
        self._full = False  # the socket takes no more now
        self._yields = False  # enough was encrypted in this turn of the event loop
        self._paused = False  # the user was told to wait
        transport.set_protocol(self)

    # Called by the socket's transport

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        self._received.write(data)
        try:
            plain, ended = self._decrypt()
        except ssl.SSLError as error:
            self._flush()  # the alert, which tells the client why
            end = self._user.drop if self._shaken else self._on_failed
            end(f"TLS failed: {reason(error)}")
            return
        self._flush()
        if self._plain:
            self._pump()  # what was written before the handshake
        if plain:
            self._user.data_received(plain)
        if ended:
            self.close()

    def eof_received(self) -> bool | None:
        self.close()
        return True  # `close` closes the transport, once the replies are sent

    def pause_writing(self) -> None:
        self._full = True
        self._tell()

    def resume_writing(self) -> None:
        # Not within this call: asyncio would report the end of the connection twice if it were closed here.
        asyncio.get_running_loop().call_soon(self._resume)

    def connection_lost(self, error: Exception | None) -> None:
        self._plain.clear()
        self._plain_bytes = 0
        self._full = self._yields = self._paused = False  # so the user is told nothing more
        self._user.connection_lost(error)

    # The transport of the connection

    def write(self, data: bytes) -> None:
        """Encrypt and send data, or keep it until the socket takes more."""
        if self._plain or not self._shaken or self._must_wait or not 0 < len(data) <= PIECE_BYTES or self.is_closing():
            self.writelines((data,))
        else:  # nearly always
            self._tls.write(data)
            self._transport.write(self._sealed.read())

    def writelines(self, parts: Iterable[bytes]) -> None:
        """Do so for several pieces."""
        for part in parts:
            if part:
                self._plain.append(memoryview(part))
                self._plain_bytes += len(part)
        self._pump()

    def get_write_buffer_size(self) -> int:
        """Return how many bytes were written and not sent."""
        return self._transport.get_write_buffer_size() + self._plain_bytes

    def is_closing(self) -> bool:
        """Return whether the connection is closed, or about to be."""
        return self._closing or self._transport.is_closing()

    def close(self) -> None:
        """Close the connection once everything is sent."""
        self._closing = True
        self._pump()

    def abort(self) -> None:
        """Close the connection at once."""
        self._closing = True
        self._transport.abort()

    def pause_reading(self) -> None:
        """Stop reading from the socket."""
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read from the socket again."""
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return what the socket's transport knows; "ssl_object" is the TLS connection."""
        return self._tls if name == "ssl_object" else self._transport.get_extra_info(name, default)

    # Private

    def _decrypt(self) -> tuple[bytes, bool]:
        """Return what can be decrypted, after the handshake, and whether the peer has ended the stream."""
        parts = []
        try:
            if not self._shaken:
                self._tls.do_handshake()
                self._shaken = True
            while part := self._tls.read(RECORD_BYTES):
                parts.append(part)
                if not self._received.pending:  # asking for the next record would cost an exception
                    return b"".join(parts), False
        except ssl.SSLWantReadError:
            return b"".join(parts), False
        except ssl.SSLZeroReturnError:
            pass
        return b"".join(parts), True

    def _resume(self) -> None:
        self._full = False
        self._pump()

    def _next_turn(self) -> None:
        self._yields = False
        self._pump()

    def _pump(self) -> None:
        """Encrypt waiting bytes while the socket takes them, but not for long, then close if that is due."""
        until = self._plain_bytes - TURN_BYTES
        while self._plain and self._shaken and not self._must_wait and not self._transport.is_closing():
            data = self._plain.popleft()
            if len(data) > PIECE_BYTES:
                self._plain.appendleft(data[PIECE_BYTES:])
                data = data[:PIECE_BYTES]
            self._plain_bytes -= len(data)
            self._tls.write(data)
            self._flush()
            if 0 < self._plain_bytes <= until:
                self._yields = True
                asyncio.get_running_loop().call_soon(self._next_turn)
        if self._closing and not (self._plain and self._shaken) and not self._transport.is_closing():
            self._end()
        self._tell()

    @property
    def _must_wait(self) -> bool:
        return self._full or self._yields

    def _end(self) -> None:
        """Send a close_notify, and close the socket."""
        with contextlib.suppress(ssl.SSLError):  # it would wait for the peer's; or there was no handshake
            self._tls.unwrap()
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._sealed.pending and not self._transport.is_closing():
            self._transport.write(self._sealed.read())

    def _tell(self) -> None:
        """Tell the connection whether it may write, if that has changed."""
        if self._must_wait and not self._paused:
            self._paused = True
            self._user.pause_writing()
        elif self._paused and not self._must_wait and not self._plain:
            self._paused = False
            self._user.resume_writing()
