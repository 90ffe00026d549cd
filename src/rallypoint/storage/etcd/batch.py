"""Batches of records as etcd values: usually one value, several if the batch is too large for one. Pure.

A value is a byte of flags, then the records, each preceded by its length in four bytes. A batch longer than `MAX_BYTES`
is split into parts at consecutive log indexes, and is complete when the last part is written. If a leader dies before
that, the next leader begins a new batch, and readers skip the incomplete one.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

__all__ = ["MAX_BYTES", "Assembler", "pack"]

MAX_BYTES = 1024 * 1024
"""Size of a value at most: etcd accepts requests of up to 1.5 MiB."""

_FIRST, _LAST = 1, 2
_LENGTH = struct.Struct("<I")


def pack(records: Sequence[bytes]) -> list[bytes]:
    """Return the values of a batch, one for each log index that it needs."""
    size = _LENGTH.pack
    body = b"".join([piece for record in records for piece in (size(len(record)), record)])
    room = MAX_BYTES - 1
    if len(body) <= room:
        return [b"\x03" + body]
    cuts = range(0, len(body), room)
    flags = [(_FIRST if at == 0 else 0) | (_LAST if at + room >= len(body) else 0) for at in cuts]
    return [bytes((flag,)) + body[at : at + room] for flag, at in zip(flags, cuts, strict=True)]


class Assembler:
    """Reassembles batches from the values of the log, in order."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    @property
    def inside(self) -> bool:
        """Whether the last batch is still incomplete."""
        return bool(self._parts)

    def take(self, value: bytes) -> list[bytes]:
        """Take the next value; return the records of the batch that it completes, if any. ValueError: malformed."""
        flags = value[0] if value else 0xFF
        if flags > (_FIRST | _LAST) or (not flags & _FIRST and not self._parts):
            raise ValueError(f"malformed part of a batch; first bytes: {value[:8]!r}")
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
            raise ValueError("malformed batch: truncated length of a record")
        at = start + _LENGTH.unpack_from(body, at)[0]
        if at > end:
            raise ValueError("malformed batch: truncated record")
        records.append(body[start:at])
    return records
