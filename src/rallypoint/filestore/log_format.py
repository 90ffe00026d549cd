"""The format of a FileStore's log: a header, then records in frames with a length and checksums.

    header   magic and version, generation, start, cut, checksum
    frame    length of the payload, checksum of the payload, checksum of these two

`start` is the offset of the first record; a compaction rewrites the records elsewhere in the file, then moves `start`
and increments the generation. Every checksum is seeded with the generation, so that leftovers of an earlier generation
are never read as records. `cut`, if not 0, is where the file must still be truncated after a compaction.

A writer that was killed leaves the beginning of a frame at the end of the file: that is *torn*, and not an error.
Anything else that fails its checksum is a *flaw*: the length has its own checksum, so a damaged length in the middle of
a log is not mistaken for a torn end. A payload that starts with 0xC1, which no MessagePack value does, is skipped: it
holds the copy that a compaction makes.

Rejected: the length of the log in the header. It would define the end of the log, at the cost of a second write.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

__all__ = ["HEADER_BYTES", "MAGIC", "PADDING", "Header", "Scan", "frame", "scan"]

MAGIC = b"rallyp\x00\x01"
"""The first bytes of every log; the last of them is the version."""

PADDING = b"\xc1"
"""The first byte of a payload to be skipped."""

_HEADER = struct.Struct("<8sQQQ")
_FRAME = struct.Struct("<QI")
_CHECK = struct.Struct("<I")
_FRAME_BYTES = _FRAME.size + _CHECK.size

HEADER_BYTES = _HEADER.size + _CHECK.size
"""The length of a header, and so the lowest `start`."""


class Header(NamedTuple):
    """The header of a log."""

    generation: int
    start: int = HEADER_BYTES
    cut: int = 0

    def pack(self) -> bytes:
        """Return the header as bytes."""
        body = _HEADER.pack(MAGIC, *self)
        return body + _CHECK.pack(zlib.crc32(body))

    @classmethod
    def unpack(cls, data: bytes) -> Header | None:
        """Parse a header; None if it is invalid or incomplete."""
        body, check = data[: _HEADER.size], data[_HEADER.size : HEADER_BYTES]
        if len(data) < HEADER_BYTES or not body.startswith(MAGIC) or check != _CHECK.pack(zlib.crc32(body)):
            return None
        return cls(*_HEADER.unpack(body)[1:])


class Scan(NamedTuple):
    """The content of a part of a log: its payloads, the bytes they used, and the flaw after them, if any."""

    payloads: list[bytes]
    used: int
    flaw: str


def frame(payload: bytes, generation: int) -> bytes:
    """Put one record in a frame."""
    seed = generation & 0xFFFFFFFF
    head = _FRAME.pack(len(payload), zlib.crc32(payload, seed))
    return b"".join((head, _CHECK.pack(zlib.crc32(head, seed)), payload))


def scan(data: bytes, generation: int) -> Scan:
    """Parse the complete frames of `data`, which reaches to the end of the file.

    A torn end is ignored: `used` is then less than the size of `data`, and `flaw` is empty.
    """
    payloads: list[bytes] = []
    seed, at, size = generation & 0xFFFFFFFF, 0, len(data)
    while size - at >= _FRAME_BYTES:
        body = at + _FRAME_BYTES
        if _CHECK.pack(zlib.crc32(data[at : at + _FRAME.size], seed)) != data[at + _FRAME.size : body]:
            return Scan(payloads, at, "the length of a record does not match its checksum")
        length, check = _FRAME.unpack_from(data, at)
        if body + length > size:
            break
        payload = data[body : body + length]
        if zlib.crc32(payload, seed) != check:
            torn = body + length == size
            return Scan(payloads, at, "" if torn else "a record does not match its checksum")
        if not payload.startswith(PADDING):
            payloads.append(payload)
        at = body + length
    return Scan(payloads, at, "")
