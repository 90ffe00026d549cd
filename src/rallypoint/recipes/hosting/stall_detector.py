"""Detects dead processes by counters that stand still: each process increments its own, and others read it.

The reader measures with its own monotonic clock how long it has seen a counter at the same value. Instants of two hosts
are never compared: the durations that several readers measured may be combined, because a counter never returns to a
value.

Rejected: a time in the heartbeat. The clocks of two hosts may differ by more than the grace period.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["CounterReading", "StallDetector"]


class CounterReading(NamedTuple):
    """The last reading of a counter: its value, since when it has that value, when it was read, when it last moved."""

    value: int
    since: float
    read_at: float
    moved_at: float


class StallDetector:
    """Detects counters that have not moved, by the reader's own clock; not thread-safe.

    A gap of more than `gap_s` between two readings means that the reader itself was stopped, or that no counter could
    move: the grace period starts over.
    """

    def __init__(self, gap_s: float = float("inf")) -> None:
        self._gap_s = gap_s
        self._readings: dict[str, CounterReading] = {}

    def stalled(self, counts: Mapping[str, int], now: float, grace_s: float) -> list[str]:
        """Record these counters, and forget all others; return those that have not moved for the grace period."""
        self._readings = {name: reading for name, reading in self._readings.items() if name in counts}
        return [name for name, count in counts.items() if self.read(name, count, now, grace_s)]

    def read(self, name: str, count: int, now: float, grace_s: float, still_s: float = 0.0) -> bool:
        """Record one counter; return whether it has not moved for the grace period.

        `still_s` is how long others have seen it at this value before this reader did.
        """
        last = self.last(name, now)
        if last is None:
            last = CounterReading(count, now, now, float("-inf"))
        elif last.value != count:
            last = CounterReading(count, now, now, last.read_at)
        self._readings[name] = reading = last._replace(since=min(last.since, now - still_s), read_at=now)
        return now - reading.since >= grace_s

    def last(self, name: str, now: float) -> CounterReading | None:
        """Return a counter's last reading, unless it is older than the gap."""
        reading = self._readings.get(name)
        return reading if reading is not None and now - reading.read_at <= self._gap_s else None

    def moved(self, name: str, now: float, within_s: float) -> bool:
        """Return whether a counter was seen to move in the last `within_s` seconds."""
        reading = self.last(name, now)
        return reading is not None and now - reading.moved_at <= within_s

    def forget(self, now: float) -> None:
        """Drop the readings that are older than the gap."""
        self._readings = {
            name: reading for name, reading in self._readings.items() if now - reading.read_at <= self._gap_s
        }
