"""The few requests of etcd's v3 API that we use, as bytes; protobuf by hand, without a protobuf library.

A request is built as bytes at once. What may stand in a transaction is an `Op`, which also knows the range of keys it
writes, so that transactions can be put together (`etcd/batch.py`). What comes back is in `etcd/answers.py`.

Rejected: generated stubs. Those of today import only under the newest protobuf, and machine-learning users have
theirs pinned by others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rallypoint.etcd.protobuf import chars, number

__all__ = [
    "OP_DELETE", "OP_PUT", "OP_RANGE", "OP_TXN", "Compare", "Method", "Op", "Txn",
    "as_of", "authenticate", "cancel_watch", "delete", "get", "lease", "next_after", "progress", "put", "tally",
    "watch",
    "exists", "lease_is", "modified_at", "none_in", "value_below", "value_is", "version_is",
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


_EQUAL, _GREATER, _LESS = range(3)
_VERSION, _CREATE, _MOD, _VALUE, _LEASE = range(5)
_ASCEND, _BY_CREATE = 1, 2
OP_RANGE, OP_PUT, OP_DELETE, OP_TXN = 1, 2, 3, 4
"""What a request in a transaction can be."""


class Op(NamedTuple):
    """One request of a transaction; between `first` and `end` is all that it writes (empty where it only reads)."""

    kind: int
    body: bytes
    first: bytes = b""
    end: bytes = b""


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

    def as_op(self) -> Op:
        """Return it as one request of another transaction."""
        spans = list(self.writes())
        first, end = min((span[0] for span in spans), default=b""), max((span[1] for span in spans), default=b"")
        return Op(OP_TXN, self.encode(), first, end)

    def writes(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the ranges of keys that it writes, if all goes well."""
        return ((op.first, op.end) for op in self.success if op.first)


# Requests


def get(key: bytes, end: bytes = b"", limit: int = 0, names_only: bool = False, oldest_first: bool = False) -> Op:
    """Read a key, or all from a key up to another."""
    body = chars(1, key)
    if end:
        body += chars(2, end)
    if limit:
        body += number(3, limit)
    if oldest_first:
        body += number(5, _ASCEND) + number(6, _BY_CREATE)
    if names_only:
        body += number(8, 1)
    return Op(OP_RANGE, body)


def as_of(op: Op, revision: int) -> Op:
    """Read the same as it was at a revision."""
    return op._replace(body=op.body + number(4, revision))


def tally(key: bytes, end: bytes) -> Op:
    """Count the keys from one up to another."""
    return Op(OP_RANGE, chars(1, key) + chars(2, end) + number(9, 1))


def put(key: bytes, value: bytes, lease: int = 0, keep_value: bool = False, keep_lease: bool = False) -> Op:
    """Write a key; it may keep the value or the lease that it has."""
    body = chars(1, key)
    if not keep_value:
        body += chars(2, value)
    if lease:
        body += number(3, lease)
    if keep_value:
        body += number(5, 1)
    if keep_lease:
        body += number(6, 1)
    return Op(OP_PUT, body, key, key + b"\0")


def delete(key: bytes, end: bytes = b"") -> Op:
    """Delete a key, or all from a key up to another."""
    return Op(OP_DELETE, chars(1, key) + (chars(2, end) if end else b""), key, end or key + b"\0")


def exists(key: bytes) -> Compare:
    """Compare: there is such a key."""
    return number(1, _GREATER) + number(2, _VERSION) + chars(3, key) + number(4, 0)


def version_is(key: bytes, version: int) -> Compare:
    """Compare: the key was written so many times since it was made; 0: there is none."""
    return number(2, _VERSION) + chars(3, key) + number(4, version)


def none_in(first: bytes, end: bytes) -> Compare:
    """Compare: there is no key from one up to another."""
    return version_is(first, 0) + chars(64, end)


def modified_at(key: bytes, revision: int) -> Compare:
    """Compare: the key was last written at that revision; 0: there is none."""
    return number(2, _MOD) + chars(3, key) + number(6, revision)


def value_is(key: bytes, value: bytes) -> Compare:
    """Compare: the key is there and has that value."""
    return number(2, _VALUE) + chars(3, key) + chars(7, value)


def value_below(key: bytes, value: bytes) -> Compare:
    """Compare: the key is there, and its value comes before another."""
    return number(1, _LESS) + number(2, _VALUE) + chars(3, key) + chars(7, value)


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


def cancel_watch(mine: int) -> bytes:
    """Ask for no more of a watch."""
    return chars(2, number(1, mine))


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
