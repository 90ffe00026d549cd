"""How a client connects to a server: with or without TLS, and with which token.

A client uses TLS if its credentials have a CA or a certificate, except on loopback, where a server with TLS accepts
plain connections too; a tcps:// URL requires TLS everywhere. A server must prove that it knows the client's token. With
the token of a run (`run_token`), which a launcher gives to its workers, a client answers a server's challenge, but it
also accepts a server that sends none: workers use other stores as well.

A PyTorch server can prove nothing. A client with a token or TLS accepts it only on this machine, run by this user.
"""

from __future__ import annotations

import functools
import os
import socket
from typing import TYPE_CHECKING, Protocol

from rallypoint.deadline import Deadline
from rallypoint.errors import AuthenticationFailed
from rallypoint.net import Endpoint, is_loopback
from rallypoint.protocol import challenge
from rallypoint.protocol.challenge import ClientGreeting, Denied
from rallypoint.security.credentials import Credentials, resolve
from rallypoint.security.local_peer import may_use

if TYPE_CHECKING:
    import ssl

__all__ = ["LEAST_S", "ByteStream", "ClientSecurity"]

LEAST_S = 0.1
"""The shortest timeout of each step of a greeting, however little time is left."""

READ_BYTES = 4096

TOKEN_ADVICE = "Set RALLYPOINT_TOKEN, or RALLYPOINT_TOKEN_FILE, to the same token on all nodes"
TLS_ADVICE = "Set RALLYPOINT_TLS_CA to the file of the CA that signed the server's certificate, or use tcps://"
PLAIN_ADVICE = "Give the server a certificate (--tls-cert), or use tcp:// and unset RALLYPOINT_TLS_CA"
CLIENT_ADVICE = "Set RALLYPOINT_TLS_CERT and RALLYPOINT_TLS_KEY to a certificate of the CA that the server accepts"
CERTIFICATE_ADVICE = "Is it the right address? Are RALLYPOINT_TLS_CA and the certificate's host names right?"


class ByteStream(Protocol):
    """A connected socket, with TLS or without."""

    def recv(self, most: int, /) -> bytes:
        """Return received bytes; b"" at the end."""

    def sendall(self, data: bytes, /) -> None:
        """Send all bytes."""

    def settimeout(self, timeout_s: float | None, /) -> None:
        """Limit the time of each call."""


class ClientSecurity:
    """The credentials of a client; with `tls`, the client uses TLS on loopback, too."""

    def __init__(self, credentials: Credentials | None = None, tls: bool = False) -> None:
        """Use these credentials, or those of the environment; raise ValueError if they are unusable."""
        self.credentials = resolve() if credentials is None else credentials
        self._tls = tls

    @property
    def demands(self) -> bool:
        """Whether a server must prove something."""
        return bool(self.credentials.token or self.credentials.dials_tls or self._tls)

    def context_for(self, host: str) -> ssl.SSLContext | None:
        """Return the TLS context for a host; None to connect without TLS."""
        if self._tls or (self.credentials.dials_tls and not is_loopback(host)):
            return self._context
        return None

    def allows_plain(self, host: str) -> bool:
        """Return whether a relay at a host, "" for a Unix socket, may be used: a client connects to it without TLS."""
        return not host or is_loopback(host) or not (self._tls or self.credentials.dials_tls)

    def url_of(self, endpoint: Endpoint, files: bool = False) -> str:
        """Return the URL of a server for other processes; `files` adds the paths of TLS files, which are no secret."""
        if self.context_for(endpoint.host) is None:
            return f"tcp://{endpoint}"
        from urllib.parse import urlencode

        known = self.credentials
        given = {"ca": known.tls_ca, "cert": known.tls_cert, "key": known.tls_key}
        options = urlencode({name: os.path.abspath(path) for name, path in given.items() if path})
        return f"tcps://{endpoint}" + (f"?{options}" if files and options else "")

    @functools.cached_property
    def _context(self) -> ssl.SSLContext:
        from rallypoint.security.tls import shared_client_context

        return shared_client_context(self.credentials)

    def new_greeting(self, preface: bytes) -> ClientGreeting:
        """Return the client's part of a greeting."""
        own, run = self.credentials.token, self.credentials.run_token
        return ClientGreeting(preface, (own or run).encode(), os.urandom, demands=bool(own))

    def greet(self, stream: ByteStream, preface: bytes, deadline: Deadline) -> ClientGreeting:
        """Greet a server, until its answer is known; raise Denied, BadMessage, OSError and TimeoutError."""
        greeting = self.new_greeting(preface)
        stream.settimeout(max(deadline.remaining(), LEAST_S))
        stream.sendall(preface)
        while not greeting.answer:
            stream.settimeout(max(deadline.remaining(), LEAST_S))
            if deadline.expired():
                raise TimeoutError(f"the greeting took longer than {deadline.timeout_s:g} s")
            data = stream.recv(READ_BYTES)
            if not data:
                raise ConnectionError("the server closed it")
            if reply := greeting.feed(data):
                stream.sendall(reply)
        return greeting

    def check_foreign(self, sock: socket.socket, peer: str) -> None:
        """Raise AuthenticationFailed if a PyTorch server may not be used with these credentials."""
        if self.demands and (why := may_use(sock)):
            raise AuthenticationFailed(
                peer=peer,
                why=f"a PyTorch server answered, which cannot prove who it is, and {why}",
                advice="Is it the right address? Unset RALLYPOINT_TOKEN and RALLYPOINT_TLS_CA to use such a server",
            )

    def failure(self, error: Exception, peer: str) -> AuthenticationFailed | None:
        """Return the error for a greeting that failed because one side cannot authenticate; None for other errors."""
        if isinstance(error, Denied):
            advice = TLS_ADVICE if str(error) == challenge.TLS_REQUIRED else TOKEN_ADVICE
            return AuthenticationFailed(peer=peer, why=str(error), advice=advice)
        if not isinstance(error, OSError) or not (self._tls or self.credentials.dials_tls):
            return None
        from rallypoint.security.tls import CLIENT_REFUSED, PLAIN_SERVER, tls_error

        why = tls_error(error)
        ours = CLIENT_ADVICE if why.startswith(CLIENT_REFUSED) else CERTIFICATE_ADVICE
        advice = PLAIN_ADVICE if why == PLAIN_SERVER else ours
        return AuthenticationFailed(peer=peer, why=why, advice=advice) if why else None
