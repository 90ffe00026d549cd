"""The answer to a native request that cannot be decoded, such as one of a later version.

A request has a number, and its client waits for an answer under that number. So only as much is decoded as is needed to
find the number: the rest may be anything, and has already failed in msgspec.

Rejected: closing the connection. A newer client would lose its session by trying a request that an older server does
not know.
"""

from __future__ import annotations

from rallypoint.core.records import ReplyStatus
from rallypoint.protocol import BadMessage
from rallypoint.protocol.native import frame

__all__ = ["misunderstood"]


def misunderstood(payload: bytes, error: Exception) -> bytes:
    """Refuse a request that cannot be decoded; raise BadMessage if it has no number to answer under."""
    number = _number_in(payload)
    if not number:
        raise BadMessage(f"not a request: {error}")
    return frame((number, ReplyStatus.ERROR, ("Misunderstood", {"why": str(error)})))


def _number_in(payload: bytes) -> int:
    """Return the second element of a msgpack array if it is a positive integer, ignoring the rest; else 0."""
    at = {0xDC: 3, 0xDD: 5}.get(payload[0] if payload else 0, 1 if payload[:1] and 0x92 <= payload[0] <= 0x9F else 0)
    if not at:
        return 0
    number = 0
    for _ in range(2):
        head = payload[at] if at < len(payload) else 0xC1
        width = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}.get(head, 0)
        if head >= 0x80 and not width:
            return 0
        number = int.from_bytes(payload[at + 1 : at + 1 + width], "big") if width else head
        at += 1 + width
    return number
