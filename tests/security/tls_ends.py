"""One end of a TLS connection in memory, so that a test decides which bytes arrive when."""

from __future__ import annotations

import contextlib
import ssl

__all__ = ["MemoryEnd", "connect"]


class MemoryEnd:
    """One end: `take` received bytes, `give` those to send, `seal` and `open` data in between."""

    def __init__(self, context: ssl.SSLContext, server_name: str | None = None) -> None:
        self._received, self._sealed = ssl.MemoryBIO(), ssl.MemoryBIO()
        side = server_name is None
        self.tls = context.wrap_bio(self._received, self._sealed, server_side=side, server_hostname=server_name)
        self.shaken = False
        self.error: ssl.SSLError | None = None
        self.data = b""
        self.ended = False  # by the peer's close_notify

    def take(self, data: bytes) -> None:
        """Take received bytes: go on with the handshake, then decrypt."""
        self._received.write(data)
        self.go_on()

    def go_on(self) -> None:
        """Do what is possible now."""
        try:
            if not self.shaken:
                self.tls.do_handshake()
                self.shaken = True
            while part := self.tls.read(65536):
                self.data += part
            self.ended = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self.error = self.error or error

    def give(self) -> bytes:
        """Return the bytes to send."""
        return self._sealed.read()

    def seal(self, data: bytes) -> bytes:
        """Encrypt data, and return all bytes to send."""
        self.tls.write(data)
        return self.give()

    def end(self) -> bytes:
        """Return a close_notify."""
        with contextlib.suppress(ssl.SSLError):
            self.tls.unwrap()
        return self.give()


def connect(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> tuple[MemoryEnd, MemoryEnd]:
    """Let a server and a client shake hands, until neither has anything to say; then each has an error or none."""
    ends = MemoryEnd(server), MemoryEnd(client, name)
    ends[1].go_on()
    while any(said := (ends[1].give(), ends[0].give())):
        for end, data in zip(ends, said, strict=True):
            if data:
                end.take(data)
    return ends
