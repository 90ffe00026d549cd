"""TLS contexts for servers and clients: TLS 1.2 or later, from the standard library.

A server reads its certificate again when one of the files has changed, so a renewed certificate needs no restart. If
the new files are unusable, for example half-written, it keeps the old context, logs that once, and tries again when
the files change.
A client verifies the server's certificate and its name: against `tls_ca`, or else the CAs of the system. Clients
of one process with the same files share a context until a file changes: reading a CA takes longer than a handshake.

`ssl` costs 10 ms to import, so nothing here imports it before TLS is used.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import TYPE_CHECKING

from rallypoint.security.credentials import Credentials

if TYPE_CHECKING:
    import ssl

__all__ = [
    "CLIENT_REFUSED",
    "PLAIN_SERVER",
    "ServerTls",
    "check_files",
    "client_context",
    "reason",
    "shared_client_context",
    "tls_error",
]

log = logging.getLogger("rallypoint.server")

Stamp = tuple[tuple[int, int, int], ...]
"""Size, time and inode of each file, to detect changes."""

PLAIN_SERVER = "the server does not speak TLS"
"""The error for a server that does not answer a TLS handshake with TLS."""

_NONE_GIVEN = "the server requires a certificate of its clients (--tls-cert)"
_OTHER_GIVEN = "the server refused the certificate of this client"
CLIENT_REFUSED = (_NONE_GIVEN, _OTHER_GIVEN)
"""Prefixes of the errors whose cause is the client's certificate."""

_UNKNOWN_CA = (18, 19, 20, 21)
"""OpenSSL's error codes for a chain that does not end in a trusted CA."""

_NOT_TLS = ("wrong version number", "record layer failure", "packet length too long", "http request")
_NO_CERTIFICATE = ("certificate required", "handshake failure")
"""Suffixes of the reasons with which a server refuses a client without a certificate."""


class ServerTls:
    """The TLS context of a server, for new connections; it follows changes of the files."""

    def __init__(self, credentials: Credentials) -> None:
        """Read the files; raise ValueError, which names the file, if one is unusable."""
        self._files = credentials
        self._stamp = self._look()
        self._context = _server_context(credentials)

    def context(self) -> ssl.SSLContext:
        """Return the context for the current files or, if those are unusable, for the last usable ones."""
        stamp = self._look()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._context = _server_context(self._files)
                log.info("TLS certificate %s has changed, and is in use", self._files.tls_cert)
            except ValueError as error:
                log.error("cannot use the changed TLS files, continuing with the old ones: %s", error)
        return self._context

    def _look(self) -> Stamp:
        return _stamp(self._files.tls_cert, self._files.tls_key, self._files.tls_client_ca)


def _stamp(*paths: str) -> Stamp:
    found = []
    for path in paths:
        try:
            status = os.stat(path)
            found.append((status.st_size, status.st_mtime_ns, status.st_ino))
        except OSError:
            found.append((0, 0, 0))
    return tuple(found)


def _server_context(files: Credentials) -> ssl.SSLContext:
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.num_tickets = 0  # our clients do not resume TLS sessions
    _load_certificate(context, files)
    if files.tls_client_ca:
        _load_ca(context, files.tls_client_ca, "tls-client-ca")
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(credentials: Credentials) -> ssl.SSLContext:
    """Return a new client context; raise ValueError, which names the file, if one is unusable."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    if credentials.tls_ca:
        _load_ca(context, credentials.tls_ca, "tls-ca")
    else:
        context.load_default_certs()
    if credentials.tls_cert:
        _load_certificate(context, credentials)
    return context


def shared_client_context(credentials: Credentials) -> ssl.SSLContext:
    """Return the context that clients with these files share; raise ValueError as `client_context` does."""
    files = credentials.tls_ca, credentials.tls_cert, credentials.tls_key
    watched = files if credentials.tls_ca else (*_system_places(), *files)
    return _context_of(*files, _stamp(*watched))


@functools.lru_cache(maxsize=8)
def _context_of(ca: str, cert: str, key: str, stamp: Stamp) -> ssl.SSLContext:
    """Return the context for files with this stamp."""
    return client_context(Credentials(tls_ca=ca, tls_cert=cert, tls_key=key))


def _system_places() -> tuple[str, ...]:
    """Return the paths of the system's CAs."""
    import ssl

    places = ssl.get_default_verify_paths()
    return tuple(place for place in (places.cafile, places.capath) if place)


def check_files(credentials: Credentials) -> None:
    """Raise ValueError, which names the file, if one is unusable."""
    if credentials.dials_tls:
        client_context(credentials)
    if credentials.serves_tls:
        _server_context(credentials)


def _load_certificate(context: ssl.SSLContext, files: Credentials) -> None:
    """Load a certificate and its key; a key with a passphrase is refused, because asking for it would block."""

    def refuse() -> str:
        raise ValueError(f"--tls-key {files.tls_key} has a passphrase; give a key without one, readable by you alone")

    _check_readable(files.tls_cert, "tls-cert")
    _check_readable(files.tls_key, "tls-key")
    try:
        context.load_cert_chain(files.tls_cert, files.tls_key, password=refuse)
    except OSError as error:  # every ssl.SSLError is one
        both = f"--tls-cert {files.tls_cert} and --tls-key {files.tls_key}"
        raise ValueError(f"cannot use {both}: {reason(error)}") from None


def _load_ca(context: ssl.SSLContext, path: str, option: str) -> None:
    _check_readable(path, option)
    try:
        context.load_verify_locations(path)
    except OSError as error:
        raise ValueError(f"cannot use --{option} {path}: {reason(error)}") from None


def _check_readable(path: str, option: str) -> None:
    """Raise ValueError if a file cannot be opened: OpenSSL does not say which of two files it could not open."""
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ValueError(f"cannot read --{option} {path}: {error.strerror}") from None


def tls_error(error: Exception) -> str:
    """Return a description, for a client, of why TLS failed; "" if the error is not a TLS error."""
    import ssl

    if isinstance(error, ssl.SSLCertVerificationError):
        unknown_ca = error.verify_code in _UNKNOWN_CA
        advice = "; if it should be, give the certificate of its CA (--tls-ca)" if unknown_ca else ""
        return f"the server's certificate is not valid here: {error.verify_message.rstrip('.')}{advice}"
    if not isinstance(error, ssl.SSLError):
        return ""
    why = reason(error)
    if why in _NOT_TLS:
        return PLAIN_SERVER
    if why.endswith(_NO_CERTIFICATE):
        return f"{_NONE_GIVEN}: {why}"
    refused = "alert" in why and any(word in why for word in ("certificate", "unknown ca"))
    return f"{_OTHER_GIVEN}: {why}" if refused else f"TLS failed: {why}"


def reason(error: OSError) -> str:
    """Return a description of the reason for a TLS error."""
    if invalid := getattr(error, "verify_message", ""):
        return f"invalid certificate: {invalid.rstrip('.')}"
    named: str | None = getattr(error, "reason", None)
    if named == "NO_START_LINE":
        return "it is not in PEM format"
    return named.replace("_", " ").lower() if named else error.strerror or str(error)
