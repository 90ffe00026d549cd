"""Rebuild, at the client, the errors that a server answers with: a name and fields become one of our classes.

Only the classes listed here are built from a peer's data. Rejected: looking the name up among all errors. Some report
what the client itself observed, and a server must not claim that.
"""

from __future__ import annotations

from rallypoint.core.records import InternalError
from rallypoint.errors import (
    DiskFull,
    EtcdRefused,
    LimitExceeded,
    NoQuorum,
    NotAnInteger,
    RallypointError,
    StoreError,
    StoreFull,
    Unsupported,
)
from rallypoint.protocol.native_client import Reply

__all__ = ["error_of"]


def error_of(reply: Reply, store: str) -> RallypointError:
    """Return the error that a server answered with."""
    try:
        kind, fields = reply.result
        if "key" in fields:
            fields["key"] = fields["key"].removeprefix("/")
        return _ERRORS[kind](**fields)
    except (KeyError, TypeError, ValueError, AttributeError):
        return StoreError(f"{store} refused: {reply.result}")


_ERRORS: dict[str, type[RallypointError]] = {
    kind.__name__: kind
    for kind in (DiskFull, EtcdRefused, InternalError, LimitExceeded, NoQuorum, NotAnInteger, StoreFull, Unsupported)
}
