"""The requests of etcd's v3 API that rallypoint uses, encoded by hand, without a protobuf library.

Each function returns the bytes of a request, or a `TxnOp` for use in a transaction. `etcd/responses.py` decodes the
responses.

Rejected: generated stubs. Current stubs need the newest protobuf, and machine-learning environments pin older ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rallypoint.etcd.protobuf import chars, number

__all__ = [
    "OP_DELETE", "OP_PUT", "OP_RANGE", "Compare", "Method", "TxnOp", "Txn",
    "authenticate", "delete", "get", "lease", "lease_is", "next_after", "progress", "put", "value_is", "version_is",
    "watch",
]  # fmt: skip


class Method:
    """The gRPC methods in use."""

    RANGE = "/etcdserverpb.KV/Range"
    TXN = "/etcdserverpb.KV/Txn"
    LEASE_GRANT = "/etcdserverpb.Lease/LeaseGrant"
    LEASE_REVOKE = "/etcdserverpb.Lease/LeaseRevoke"
    KEEP_ALIVE = "/etcdserverpb.Lease/LeaseKeepAlive"
    WATCH = "/etcdserverpb.Watch/Watch"
    AUTHENTICATE = "/etcdserverpb.Auth/Authenticate"
    STATUS = "/etcdserverpb.Maintenance/Status"


_VERSION, _VALUE, _LEASE = 0, 3, 4
"""Targets of a comparison."""

OP_RANGE, OP_PUT, OP_DELETE = 1, 2, 3
"""Kinds of a request in a transaction."""


class TxnOp(NamedTuple):
    """One request of a transaction."""

    kind: int
    body: bytes


Compare = bytes
"""One comparison of a transaction."""


class Txn(NamedTuple):
    """A transaction: if all comparisons hold, execute `success`, else `failure`, atomically."""

    compares: Sequence[Compare]
    success: Sequence[TxnOp]
    failure: Sequence[TxnOp] = ()

    def encode(self) -> bytes:
        """Return the encoded request."""
        parts = [chars(1, compare) for compare in self.compares]
        parts += [chars(2, chars(op.kind, op.body)) for op in self.success]
        parts += [chars(3, chars(op.kind, op.body)) for op in self.failure]
        return b"".join(parts)


# Requests


def get(key: bytes, end: bytes = b"", limit: int = 0) -> TxnOp:
    """Return a read of a key, or of all keys from `key` to before `end`."""
    return TxnOp(OP_RANGE, chars(1, key) + (chars(2, end) if end else b"") + (number(3, limit) if limit else b""))


def put(key: bytes, value: bytes, lease: int = 0) -> TxnOp:
    """Return a write of a key, attached to a lease if one is given."""
    return TxnOp(OP_PUT, chars(1, key) + chars(2, value) + (number(3, lease) if lease else b""))


def delete(key: bytes, end: bytes = b"") -> TxnOp:
    """Return a deletion of a key, or of all keys from `key` to before `end`."""
    return TxnOp(OP_DELETE, chars(1, key) + (chars(2, end) if end else b""))


def version_is(key: bytes, version: int) -> Compare:
    """Compare: the key has this version, the number of writes since its creation; 0: it does not exist."""
    return number(2, _VERSION) + chars(3, key) + number(4, version)


def value_is(key: bytes, value: bytes) -> Compare:
    """Compare: the key exists and has this value."""
    return number(2, _VALUE) + chars(3, key) + chars(7, value)


def lease_is(key: bytes, lease: int) -> Compare:
    """Compare: the key is attached to this lease."""
    return number(2, _LEASE) + chars(3, key) + number(8, lease)


def lease(identity: int, ttl_s: int = 0) -> bytes:
    """Return a request to grant a lease (with `ttl_s`), or to revoke it or keep it alive (without)."""
    return (number(1, ttl_s) if ttl_s else b"") + number(2 if ttl_s else 1, identity)


def watch(mine: int, key: bytes, end: bytes, revision: int) -> bytes:
    """Return a request to watch a range from a revision on, with `mine` as the watch id."""
    body = chars(1, key) + (chars(2, end) if end else b"") + number(3, revision) + number(4, 1) + number(7, mine)
    return chars(1, body)


def progress() -> bytes:
    """Return a request for a progress notification on a watch stream."""
    return chars(3, b"")


def authenticate(user: str, password: str) -> bytes:
    """Return a request for an auth token."""
    return chars(1, user.encode()) + chars(2, password.encode())


def next_after(prefix: bytes) -> bytes:
    """Return the first key after all keys that start with a prefix; `b"\\0"` stands for the end of all keys."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes((stripped[-1] + 1,)) if stripped else b"\0"
