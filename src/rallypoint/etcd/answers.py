"""What etcd answers, read into tuples; unknown fields are skipped, as protobuf wants it."""

from __future__ import annotations

from typing import Any, NamedTuple

from rallypoint.etcd.messages import OP_RANGE
from rallypoint.etcd.protobuf import fields

__all__ = [
    "KV", "Change", "Found", "Result", "WatchAnswer",
    "read_lease", "read_range", "read_status", "read_token", "read_txn", "read_watch",
]  # fmt: skip


class KV(NamedTuple):
    """A key as etcd has it: its value, and the revisions at which it was made and last written."""

    key: bytes
    value: bytes
    created: int
    modified: int
    lease: int


class Found(NamedTuple):
    """The answer to a range: its keys, how many there are in all, and as of which revision."""

    kvs: list[KV]
    total: int
    revision: int


class Result(NamedTuple):
    """The answer to a transaction: whether its comparisons were true, and what the reads of its branch found."""

    succeeded: bool
    answers: list[Found]
    revision: int


class Change(NamedTuple):
    """One change of a watched key."""

    key: bytes
    value: bytes | None
    revision: int


class WatchAnswer(NamedTuple):
    """What comes on a watch stream."""

    watch: int
    created: bool
    cancelled: bool
    compacted: int
    why: str
    revision: int
    changes: list[Change]


def read_range(data: bytes) -> Found:
    """Read the answer to a range."""
    kvs: list[KV] = []
    total = revision = 0
    for field, value in fields(data):
        if field == 2:
            kvs.append(_kv(value))
        elif field == 4:
            total = value
        elif field == 1:
            revision = _revision(value)
    return Found(kvs, total, revision)


def read_txn(data: bytes) -> Result:
    """Read the answer to a transaction."""
    succeeded, revision = False, 0
    answers: list[Found] = []
    for field, value in fields(data):
        if field == 3:
            answers += [read_range(body) for kind, body in fields(value) if kind == OP_RANGE]
        elif field == 2:
            succeeded = bool(value)
        elif field == 1:
            revision = _revision(value)
    return Result(succeeded, answers, revision)


def read_lease(data: bytes) -> tuple[int, int]:
    """Read a lease that was granted or kept alive: its id, and its time to live, 0 where there is none."""
    found = dict(fields(data))
    return found.get(2, 0), found.get(3, 0)


def read_token(data: bytes) -> str:
    """Read the answer to `authenticate`."""
    return str(dict(fields(data)).get(2, b""), "utf-8")


def read_status(data: bytes) -> tuple[int, int, int]:
    """Read a member's status: its cluster, its id, and the id of the leader (0: there is none)."""
    found = dict(fields(data))
    header = dict(fields(found.get(1, b"")))
    return header.get(1, 0), header.get(2, 0), found.get(4, 0)


def read_watch(data: bytes) -> WatchAnswer:
    """Read what came on a watch stream."""
    found: dict[int, Any] = {}
    changes: list[Change] = []
    for field, value in fields(data):
        if field == 11:
            event = dict(fields(value))
            kv = _kv(event.get(2, b""))
            changes.append(Change(kv.key, None if event.get(1) else kv.value, kv.modified))
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
