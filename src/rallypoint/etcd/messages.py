"""The few requests of etcd's v3 API that we use, as bytes; protobuf by hand, without a protobuf library.

A request is built as bytes at once. What may stand in a transaction is an `Op`. What comes back is in
`etcd/answers.py`.

Rejected: generated stubs. Those of today import only under the newest protobuf, and machine-learning users have
theirs pinned by others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rallypoint.etcd.protobuf import chars, number

__all__ = [
    "OP_DELETE", "OP_PUT", "OP_RANGE", "Compare", "Method", "Op", "Txn",
    "authenticate", "delete", "get", "lease", "lease_is", "next_after", "progress", "put", "value_is", "version_is",
    "watch",
]  # fmt: skip


class Method:
    """The calls that we make."""

    RANGE = "/etcdserverpb.KV/Range"
    TXN = "/etcdserverpb.KV/Txn"
    LEASE_GRANT = "/etcdserverpb.Lease/LeaseGrant"
    LEASE_REVOKE = "/etcdserverpb.Lease/LeaseRevoke"
    KEEP_ALIVE = "/etcdserverpb.Lease/LeaseKeepAlive"
    WATCH = "/etcdserverpb.Watch/Watch"
    AUTHENTICATE = "/etcdserverpb.Auth/Authenticate"
    STATUS = "/etcdserverpb.Maintenance/Status"


_VERSION, _VALUE, _LEASE = 0, 3, 4
"""What is compared in a transaction."""

OP_RANGE, OP_PUT, OP_DELETE = 1, 2, 3
"""What a request in a transaction can be."""


class Op(NamedTuple):
    """One request of a transaction."""

    kind: int
    body: bytes


Compare = bytes
"""One comparison of a transaction."""


class Txn(NamedTuple):
    """If all comparisons hold, do the one, else the other; all of it at one moment."""

    compares: Sequence[Compare]
    success: Sequence[Op]
    failure: Sequence[Op] = ()

    def encode(self) -> bytes:
        """Return the request."""
        parts = [chars(1, compare) for compare in self.compares]
        parts += [chars(2, chars(op.kind, op.body)) for op in self.success]
        parts += [chars(3, chars(op.kind, op.body)) for op in self.failure]
        return b"".join(parts)


# Requests


def get(key: bytes, end: bytes = b"", limit: int = 0) -> Op:
    """Read a key, or all from a key up to another."""
    return Op(OP_RANGE, chars(1, key) + (chars(2, end) if end else b"") + (number(3, limit) if limit else b""))


def put(key: bytes, value: bytes, lease: int = 0) -> Op:
    """Write a key, on a lease if one is given."""
    return Op(OP_PUT, chars(1, key) + chars(2, value) + (number(3, lease) if lease else b""))


def delete(key: bytes, end: bytes = b"") -> Op:
    """Delete a key, or all from a key up to another."""
    return Op(OP_DELETE, chars(1, key) + (chars(2, end) if end else b""))


def version_is(key: bytes, version: int) -> Compare:
    """Compare: the key was written so many times since it was made; 0: there is none."""
    return number(2, _VERSION) + chars(3, key) + number(4, version)


def value_is(key: bytes, value: bytes) -> Compare:
    """Compare: the key is there and has that value."""
    return number(2, _VALUE) + chars(3, key) + chars(7, value)


def lease_is(key: bytes, lease: int) -> Compare:
    """Compare: the key hangs on that lease."""
    return number(2, _LEASE) + chars(3, key) + number(8, lease)


def lease(identity: int, ttl_s: int = 0) -> bytes:
    """Ask for a lease to be granted (of some time to live), to be revoked, or kept alive: the last two take its id."""
    return (number(1, ttl_s) if ttl_s else b"") + number(2 if ttl_s else 1, identity)


def watch(mine: int, key: bytes, end: bytes, revision: int) -> bytes:
    """Ask for the changes from a revision on, under a number of ours."""
    body = chars(1, key) + (chars(2, end) if end else b"") + number(3, revision) + number(4, 1) + number(7, mine)
    return chars(1, body)


def progress() -> bytes:
    """Ask a watch stream to say something."""
    return chars(3, b"")


def authenticate(user: str, password: str) -> bytes:
    """Ask for a token."""
    return chars(1, user.encode()) + chars(2, password.encode())


def next_after(prefix: bytes) -> bytes:
    """Return the first key after all that start with a prefix; `b"\\0"` means the end of all keys."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes((stripped[-1] + 1,)) if stripped else b"\0"
