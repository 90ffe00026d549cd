"""TLS for connections to etcd."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rallypoint.errors import NetworkError
from rallypoint.etcd.address import Access

if TYPE_CHECKING:
    import ssl

__all__ = ["tls_context"]


def tls_context(access: Access, protocol: str = "") -> ssl.SSLContext | None:
    """Return a TLS context, with `protocol` for ALPN if given; None if there is neither CA nor certificate."""
    if not (access.ca or access.cert):
        return None
    import ssl

    try:
        context = ssl.create_default_context(cafile=access.ca or None)
    except OSError as error:  # also every ssl.SSLError
        raise NetworkError(f"cannot use ca={access.ca} for etcd: {error.strerror or error}") from None
    try:
        if access.cert:
            context.load_cert_chain(access.cert, access.key)
    except OSError as error:
        files = f"cert={access.cert} and key={access.key}"
        raise NetworkError(f"cannot use {files} for etcd: {error.strerror or error}") from None
    if protocol:
        context.set_alpn_protocols([protocol])
    return context
