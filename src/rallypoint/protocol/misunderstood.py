"""The answer to a request of our protocol that makes no sense here, such as one of a later version.

A request has a number, and whoever made it waits for an answer under that number. So as little is read as is needed to
find it: what follows may be anything, and made msgspec give up already.

Rejected: to close the connection. A newer client would lose its session by trying what an older server does not know.
"""

from __future__ import annotations

from rallypoint.core.records import Status
from rallypoint.protocol import BadMessage
from rallypoint.protocol.native import frame

__all__ = ["misunderstood"]


def misunderstood(payload: bytes, error: Exception) -> bytes:
    """Refuse a request that makes no sense here, if it has a number; without one there is nobody to answer."""
    number = _number_in(payload)
    if not number:
        raise BadMessage(f"not a request: {error}")
    return frame((number, Status.ERROR, ("Misunderstood", {"why": str(error)})))


def _number_in(payload: bytes) -> int:
    """Read the second element of a msgpack array, if it is a positive integer, and nothing of what follows; else 0."""
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
