"""One deadline for a whole call: read once from the monotonic clock, passed through every step.

Public calls accept seconds or a `timedelta`; internally, a duration is float seconds and an instant is a value of
`time.monotonic()`. A deadline never crosses a process boundary; the remaining duration does.
"""

from __future__ import annotations

import math
import time
from datetime import timedelta

__all__ = ["Deadline", "Timeout", "seconds"]

Timeout = float | timedelta
"""A duration as public calls accept it: seconds, or a `timedelta`."""


def seconds(timeout: Timeout, what: str = "timeout") -> float:
    """Return a duration in seconds; raise TypeError or ValueError, which names `what`, if it is invalid."""
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"{what} must be seconds or a timedelta, not {timeout!r}")
    if math.isnan(timeout) or timeout < 0:
        raise ValueError(f"{what} must not be negative, got {timeout!r} s")
    return float(timeout)


class Deadline:
    """The instant by which a call must end, and the timeout it was computed from."""

    __slots__ = ("at", "timeout_s")

    def __init__(self, timeout: Timeout) -> None:
        self.timeout_s = timeout if timeout.__class__ is float and timeout >= 0.0 else seconds(timeout)
        self.at = time.monotonic() + self.timeout_s

    def remaining(self) -> float:
        """Return the seconds left, never less than zero."""
        left_s = self.at - time.monotonic()
        return left_s if left_s > 0.0 else 0.0

    def expired(self) -> bool:
        """Return whether no time is left."""
        return time.monotonic() >= self.at
