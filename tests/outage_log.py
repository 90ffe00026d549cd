"""Helpers for tests of outages: take a server down, and wait until its client has noticed and logged it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import pytest

import rallypoint
from rallypoint.client import outage
from rallypoint.deadline import Deadline
from rallypoint.testing import REFUSES, CuttingProxy

DEADLINE_S = 60
DOWN_S = 0.3


def until(true: Callable[[], bool], what: str) -> None:
    """Poll until a condition is true."""
    deadline = Deadline(DEADLINE_S)
    while not true():
        assert not deadline.expired(), f"not within {DEADLINE_S} s: {what}"


def await_waiting(server: rallypoint.Server, number: int) -> None:
    """Return when this many requests wait at the server."""
    until(lambda: server.statistics()["waiting"] == number, f"{number} requests wait")


class LogRecorder(logging.Handler):
    """Records log messages, and waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self._said = threading.Condition()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        with self._said:
            self.lines.append(record.getMessage())
            self._said.notify_all()

    def until(self, words: str, times: int = 1) -> None:
        """Return when lines with these words have been logged `times` times."""
        with self._said:
            assert self._said.wait_for(lambda: self.count(words) >= times, DEADLINE_S), (words, self.lines)

    def count(self, words: str) -> int:
        return sum(words in line for line in self.lines)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[LogRecorder]:
    """The log of the client, which considers a server down sooner than usual."""
    monkeypatch.setattr(outage, "DOWN_S", DOWN_S)
    handler, log = LogRecorder(), logging.getLogger("rallypoint.client")
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)


def go_down(cutter: CuttingProxy, told: LogRecorder, how: str = REFUSES) -> None:
    """Take the server down, and return when the client has logged it."""
    before = told.count("is down")
    cutter.go_down(how)
    told.until("is down", before + 1)
