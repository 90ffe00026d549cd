"""Counters of a relay's traffic with its server, for the statistics and the hang detector.

One record covers all successive connections of a relay, so that the numbers never decrease. Rejected: counters per
connection, added up. The counts of closed connections would have to be kept elsewhere.
"""

from __future__ import annotations

__all__ = ["Traffic"]


class Traffic:
    """The traffic of a relay's connections so far."""

    __slots__ = ("bytes_received", "bytes_sent", "channels_opened", "frames_received", "frames_sent")

    def __init__(self) -> None:
        self.frames_sent = self.frames_received = 0
        self.bytes_sent = self.bytes_received = 0
        self.channels_opened = 0
