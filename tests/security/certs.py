"""Certificates for the tests, made as `rallypoint tls new` makes them."""

from __future__ import annotations

import shutil
from pathlib import Path

from cryptography import x509

from rallypoint.security.certificates import make_certificates
from rallypoint.security.credentials import Credentials

__all__ = ["HOSTS", "alternative_names", "certificate", "node"]

HOSTS = ("localhost", "127.0.0.1", "::1")


def certificate(place: Path, *hosts: str, ca: Path | None = None, days: int = 30) -> Path:
    """Make a certificate, of the CA in the directory `ca` if given, and return its directory."""
    place.mkdir(parents=True)
    if ca is not None:
        for name in ("ca.pem", "ca.key"):
            shutil.copy(ca / name, place / name)
    make_certificates(place, hosts or HOSTS, days)
    return place


def node(place: Path, client_ca: Path | None = None, token: str = "") -> Credentials:
    """Return the credentials of a node with the certificate in a directory, which trusts servers of its CA."""
    return Credentials(
        token=token,
        tls_cert=str(place / "node.pem"),
        tls_key=str(place / "node.key"),
        tls_ca=str(place / "ca.pem"),
        tls_client_ca=str(client_ca / "ca.pem") if client_ca else "",
    )


def alternative_names(path: Path) -> list[str]:
    """Return the hosts for which a certificate is valid."""
    found = x509.load_pem_x509_certificate(path.read_bytes()).extensions
    return [str(name.value) for name in found.get_extension_for_class(x509.SubjectAlternativeName).value]
