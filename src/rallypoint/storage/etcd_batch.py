"""Batches of records as values of etcd: one value as a rule, several where it would be too large for one; pure.

A value is a byte of flags, and then the records, each behind its length in four bytes. A batch that is longer than
`MAX_BYTES` is cut into parts that fill consecutive places of the log; it counts when the last of them is there. A
leader may die before that. What the next leader appends begins a batch, so the parts without an end are passed over.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

__all__ = ["MAX_BYTES", "Assembler", "pack"]

MAX_BYTES = 1024 * 1024
"""How long a value may be: etcd takes 1.5 MiB in a request."""

_FIRST, _LAST = 1, 2
_LENGTH = struct.Struct("<I")


def pack(records: Sequence[bytes]) -> list[bytes]:
    """Return a batch as the values of as many places of the log as it needs."""
    size = _LENGTH.pack
    body = b"".join([piece for record in records for piece in (size(len(record)), record)])
    room = MAX_BYTES - 1
    if len(body) <= room:
        return [b"\x03" + body]
    cuts = range(0, len(body), room)
    flags = [(_FIRST if at == 0 else 0) | (_LAST if at + room >= len(body) else 0) for at in cuts]
    return [bytes((flag,)) + body[at : at + room] for flag, at in zip(flags, cuts, strict=True)]


class Assembler:
    """Puts batches together again from the values of the log, in their order."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    @property
    def inside(self) -> bool:
        """Whether the values so far end within a batch."""
        return bool(self._parts)

    def take(self, value: bytes) -> list[bytes]:
        """Take the next value; return the records of the batch that it completes, or none. ValueError: it is none."""
        flags = value[0] if value else 0xFF
        if flags > (_FIRST | _LAST) or (not flags & _FIRST and not self._parts):
            raise ValueError(f"not a part of a batch: it begins with {value[:8]!r}")
        if flags & _FIRST:
            self._parts.clear()
        self._parts.append(value[1:])
        if not flags & _LAST:
            return []
        body = b"".join(self._parts)
        self._parts.clear()
        return _unpack(body)


def _unpack(body: bytes) -> list[bytes]:
    records, at, end = [], 0, len(body)
    while at < end:
        start = at + _LENGTH.size
        if start > end:
            raise ValueError("a batch ends within the length of a record")
        at = start + _LENGTH.unpack_from(body, at)[0]
        if at > end:
            raise ValueError("a batch ends within a record")
        records.append(body[start:at])
    return records
