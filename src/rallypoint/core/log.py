"""The bytes of a FileStore's log: a header, then records in frames that tell how long they are and if they are whole.

    header   magic and version, generation, start, cut, checksum
    frame    length of the payload, checksum of the payload, checksum of these two

`start` is where the records begin; a compaction writes them anew elsewhere in the file, then moves `start` and counts
the generation up. Every checksum is seeded with the generation, so that what an earlier generation left in the file is
never taken for a record. `cut`, when not 0, is where the file is still to be cut off after a compaction.

What a writer that was killed leaves is a beginning of its frame, at the end of the file: that is *torn*, and no fault.
Anything else that does not check is a *flaw*: the length has its own checksum, so a damaged length in the middle of a
log cannot pass for a torn end. A payload that begins with 0xC1, as no MessagePack value does, is skipped: it carries
the copy that a compaction makes.

Rejected: the length of the log in the header. It would settle where the log ends, for the price of a second write.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

__all__ = ["HEADER_BYTES", "MAGIC", "PADDING", "Header", "Scan", "frame", "scan"]

MAGIC = b"rallyp\x00\x01"
"""The first bytes of every log; the last of them is the version."""

PADDING = b"\xc1"
"""What the payload of a frame that is to be skipped begins with."""

_HEADER = struct.Struct("<8sQQQ")
_FRAME = struct.Struct("<QI")
_CHECK = struct.Struct("<I")
_FRAME_BYTES = _FRAME.size + _CHECK.size

HEADER_BYTES = _HEADER.size + _CHECK.size
"""The length of a header, and so the lowest `start`."""


class Header(NamedTuple):
    """What the first bytes of a log say."""

    generation: int
    start: int = HEADER_BYTES
    cut: int = 0

    def pack(self) -> bytes:
        """Return the header as bytes."""
        body = _HEADER.pack(MAGIC, *self)
        return body + _CHECK.pack(zlib.crc32(body))

    @classmethod
    def unpack(cls, data: bytes) -> Header | None:
        """Read a header; None when it is not one, or not whole."""
        body, check = data[: _HEADER.size], data[_HEADER.size : HEADER_BYTES]
        if len(data) < HEADER_BYTES or not body.startswith(MAGIC) or check != _CHECK.pack(zlib.crc32(body)):
            return None
        return cls(*_HEADER.unpack(body)[1:])


class Scan(NamedTuple):
    """What a stretch of a log holds: its payloads, how many bytes they took, and what is wrong after them."""

    payloads: list[bytes]
    used: int
    flaw: str


def frame(payload: bytes, generation: int) -> bytes:
    """Put one record in a frame."""
    seed = generation & 0xFFFFFFFF
    head = _FRAME.pack(len(payload), zlib.crc32(payload, seed))
    return b"".join((head, _CHECK.pack(zlib.crc32(head, seed)), payload))


def scan(data: bytes, generation: int) -> Scan:
    """Take the whole frames off the beginning of `data`, which reaches to the end of the file.

    A torn end is left alone: `used` is then less than there is, and `flaw` is empty.
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
