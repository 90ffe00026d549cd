"""Durations and deadlines: accepted and refused arguments, and remaining time."""

from __future__ import annotations

import math
import time
from datetime import timedelta
from decimal import Decimal

import pytest

from rallypoint.deadline import Deadline, seconds


class Clock:
    """A monotonic clock that stands still until it is moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (0, 0.0),
        (3, 3.0),
        (0.25, 0.25),
        (math.inf, math.inf),
        (timedelta(0), 0.0),
        (timedelta(milliseconds=1500), 1.5),
        (timedelta(days=1), 86400.0),
    ],
)
def test_seconds_accepts_numbers_and_timedeltas(given: float | timedelta, expected: float) -> None:
    assert seconds(given) == expected
    assert type(seconds(given)) is float


@pytest.mark.parametrize("given", [-1, -0.001, math.nan, -math.inf, timedelta(microseconds=-1)])
def test_seconds_refuses_negative_durations_by_name(given: float | timedelta) -> None:
    with pytest.raises(ValueError, match=r"^grace must not be negative, got .* s$"):
        seconds(given, "grace")


@pytest.mark.parametrize("given", [None, "5", True, False, b"5", Decimal(5), [5], 1j])
def test_seconds_refuses_other_types_by_name(given: object) -> None:
    with pytest.raises(TypeError, match=r"^grace must be seconds or a timedelta, not ") as caught:
        seconds(given, "grace")  # type: ignore[arg-type]
    assert repr(given) in str(caught.value)


def test_the_default_name_of_a_duration_is_timeout() -> None:
    with pytest.raises(ValueError, match=r"^timeout must not be negative"):
        Deadline(-1)


def test_the_clock_is_read_once(clock: Clock) -> None:
    deadline = Deadline(timedelta(seconds=5))
    assert (deadline.timeout_s, deadline.at) == (5.0, 1005.0)
    clock.now = 1002.0
    assert (deadline.timeout_s, deadline.at, deadline.remaining()) == (5.0, 1005.0, 3.0)


@pytest.mark.parametrize(
    ("now", "remaining", "expired"),
    [(1000.0, 5.0, False), (1004.5, 0.5, False), (1005.0, 0.0, True), (2000.0, 0.0, True)],
)
def test_a_deadline_runs_out_and_stays_out(clock: Clock, now: float, remaining: float, expired: bool) -> None:
    deadline = Deadline(5)
    clock.now = now
    assert (deadline.remaining(), deadline.expired()) == (remaining, expired)


def test_a_deadline_of_zero_has_expired_at_once(clock: Clock) -> None:
    deadline = Deadline(0)
    assert (deadline.remaining(), deadline.expired()) == (0.0, True)


def test_an_endless_deadline_never_expires(clock: Clock) -> None:
    deadline = Deadline(math.inf)
    clock.now = 1e12
    assert (deadline.remaining(), deadline.expired()) == (math.inf, False)
