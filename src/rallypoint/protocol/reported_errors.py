"""The errors that a server answers with, made anew at the client: a name and fields, which become one of our classes.

Only the classes named here are made of what a peer says. Rejected: to look the name up among all errors. Some say what
the client itself found out, and a server has no business to claim that.
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
from rallypoint.protocol.client import Reply

__all__ = ["error_of"]


def error_of(reply: Reply, store: str) -> RallypointError:
    """Make the error that a server answered with."""
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
