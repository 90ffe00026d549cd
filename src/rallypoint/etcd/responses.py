"""Decodes etcd's responses into tuples; unknown fields are skipped, as protobuf requires."""

from __future__ import annotations

from typing import Any, NamedTuple

from rallypoint.etcd.protobuf import fields
from rallypoint.etcd.requests import OP_RANGE

__all__ = [
    "KV", "KeyChange", "RangeResult", "TxnResult", "WatchAnswer",
    "read_lease", "read_range", "read_status", "read_token", "read_txn", "read_watch",
]  # fmt: skip


class KV(NamedTuple):
    """A key in etcd: its value, the revisions of its creation and last write, and its lease."""

    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int


class RangeResult(NamedTuple):
    """The response to a range request: its keys, and the total number of keys in the range."""

    kvs: list[KV]
    total: int


class TxnResult(NamedTuple):
    """The response to a transaction: whether its comparisons held, and the results of its reads."""

    succeeded: bool
    answers: list[RangeResult]
    header: bytes

    @property
    def revision(self) -> int:
        """etcd's revision after the transaction."""
        return _revision(self.header)


class KeyChange(NamedTuple):
    """One change of a watched key; the value is None for a deletion."""

    key: bytes
    value: bytes | None
    revision: int


class WatchAnswer(NamedTuple):
    """One response on a watch stream."""

    watch_id: int
    created: bool
    cancelled: bool
    compact_revision: int
    cancel_reason: str
    revision: int
    changes: list[KeyChange]


def read_range(data: bytes) -> RangeResult:
    """Decode the response to a range request."""
    kvs: list[KV] = []
    total = 0
    for field, value in fields(data):
        if field == 2:
            kvs.append(_kv(value))
        elif field == 4:
            total = value
    return RangeResult(kvs, total)


def read_txn(data: bytes) -> TxnResult:
    """Decode the response to a transaction."""
    succeeded, header = False, b""
    answers: list[RangeResult] = []
    for field, value in fields(data):
        if field == 3:
            answers += [read_range(body) for kind, body in fields(value) if kind == OP_RANGE]
        elif field == 2:
            succeeded = bool(value)
        elif field == 1:
            header = value
    return TxnResult(succeeded, answers, header)


def read_lease(data: bytes) -> tuple[int, int]:
    """Decode a granted or renewed lease: its id and its time to live, 0 if it does not exist."""
    found = dict(fields(data))
    return found.get(2, 0), found.get(3, 0)


def read_token(data: bytes) -> str:
    """Decode the token in the response to `authenticate`."""
    return str(dict(fields(data)).get(2, b""), "utf-8")


def read_status(data: bytes) -> tuple[int, int, int]:
    """Decode a member's status: the ids of its cluster, of itself, and of the leader (0: none)."""
    found = dict(fields(data))
    header = dict(fields(found.get(1, b"")))
    return header.get(1, 0), header.get(2, 0), found.get(4, 0)


def read_watch(data: bytes) -> WatchAnswer:
    """Decode a response on a watch stream."""
    found: dict[int, Any] = {}
    changes: list[KeyChange] = []
    for field, value in fields(data):
        if field == 11:
            event = dict(fields(value))
            kv = _kv(event.get(2, b""))
            changes.append(KeyChange(kv.key, None if event.get(1) else kv.value, kv.mod_revision))
        else:
            found[field] = value
    return WatchAnswer(
        found.get(2, 0),
        bool(found.get(3)),
        bool(found.get(4)),
        found.get(5, 0),
        str(found.get(6, b""), "utf-8", "replace"),
        _revision(found.get(1, b"")),
        changes,
    )


def _kv(data: bytes) -> KV:
    found = dict(fields(data))
    get = found.get
    return KV(get(1, b""), get(5, b""), get(2, 0), get(3, 0), get(6, 0))


def _revision(header: bytes) -> int:
    return int(dict(fields(header)).get(3, 0))
