"""Counts of what went over a relay's connections to its server, for the statistics and for whoever watches for a hang.

One record for all connections of a relay, one after the other, so that the numbers only grow. Rejected: counters of
each connection, added up. What a connection that ended had counted would have to be kept elsewhere.
"""

from __future__ import annotations

__all__ = ["Traffic"]


class Traffic:
    """What went over a relay's connections so far."""

    __slots__ = ("bytes_received", "bytes_sent", "channels_opened", "frames_received", "frames_sent")

    def __init__(self) -> None:
        self.frames_sent = self.frames_received = 0
        self.bytes_sent = self.bytes_received = 0
        self.channels_opened = 0
