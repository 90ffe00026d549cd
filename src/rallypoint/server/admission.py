"""Who may use a server: what a connection must show, by its protocol, once the server has a token or a certificate.

    native, channels    the proof of the token (`protocol/challenge.py`); TLS, if the server has it, unless local
    PyTorch's           local, and a process of this user or of root: the protocol has no place for a token
    HTTP                the token or a login (`http_access.py`); TLS, if the server has it, unless local or /healthz

Local means from this machine (`security/local_peer.py`). A server with TLS and without a token takes local plain
connections of native clients like PyTorch's. A server without credentials takes all connections.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from typing import TYPE_CHECKING

from rallypoint.protocol.challenge import NONCE_BYTES, ServerChallenge
from rallypoint.security.credentials import OPEN, Credentials
from rallypoint.security.local_peer import is_local, may_use, peer_uid
from rallypoint.security.tls import ServerTls
from rallypoint.server.denied_peers import DeniedPeers
from rallypoint.server.http_access import HttpAccess
from rallypoint.server.tls_queue import TlsQueue

if TYPE_CHECKING:
    from rallypoint.server.connections.connection import Connection

__all__ = ["NEEDS_TLS", "Admission"]

NEEDS_TLS = "this server requires TLS from other machines, and from other users (tcps://)"
"""What such a client is told, whichever it is."""


class Admission:
    """The rules of one process; raises ValueError, which names the file, if a certificate is unusable."""

    def __init__(self, credentials: Credentials = OPEN) -> None:
        self.protects = credentials.protects
        """Whether there are any rules."""

        self.token = credentials.token.encode()
        self.tls = ServerTls(credentials) if credentials.serves_tls else None
        self.tls_queue = TlsQueue()
        self.demands_certificate = bool(credentials.serves_tls and credentials.tls_client_ca)
        self.http = HttpAccess(self.token)
        self.denied = DeniedPeers()

    def challenge(self, preface: bytes) -> ServerChallenge | None:
        """Return the challenge for a client that sent a preface; None if there is no token."""
        return ServerChallenge(self.token, preface, secrets.token_bytes(NONCE_BYTES)) if self.token else None

    def tls_peer(self, connection: Connection) -> str:
        """Return for whom a connection begins TLS: its host; another user of this machine has many addresses."""
        host = connection.peer.host or "unix socket"
        if connection.is_local:
            with contextlib.suppress(OSError):
                uid = peer_uid(connection.socket)
                if uid not in (None, 0, os.geteuid()):
                    return f"user {uid}"
        return host

    def why_not_torch(self, sock: socket.socket) -> str:
        """Return why a PyTorch client is refused; "" if it is not. By TLS it is no less a stranger."""
        return may_use(sock) if self.protects else ""

    def why_not_native(self, sock: socket.socket, over_tls: bool) -> str:
        """Return why a native or HTTP client is refused whatever it knows; "" if it is not."""
        if self.tls is None or over_tls:
            return ""
        if not is_local(sock.getsockname(), sock.getpeername()):
            return NEEDS_TLS
        return "" if self.token else may_use(sock)
