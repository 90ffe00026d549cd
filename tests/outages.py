"""What tests of outages share: to let a server be away, and to know when its client has found it down."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import pytest
from tests.cutter import REFUSES, Cutter

from rallypoint.deadline import Deadline
from rallypoint.store import outage

DEADLINE_S = 60
DOWN_S = 0.3


def until(true: Callable[[], bool], what: str) -> None:
    """Look until something is so."""
    deadline = Deadline(DEADLINE_S)
    while not true():
        assert not deadline.expired(), f"not within {DEADLINE_S} s: {what}"


class Told(logging.Handler):
    """What the log says of outages, as it is said."""

    def __init__(self) -> None:
        super().__init__()
        self._said = threading.Condition()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        with self._said:
            self.lines.append(record.getMessage())
            self._said.notify_all()

    def until(self, words: str, times: int = 1) -> None:
        """Return when a line with these words has been said so many times."""
        with self._said:
            assert self._said.wait_for(lambda: self.count(words) >= times, DEADLINE_S), (words, self.lines)

    def count(self, words: str) -> int:
        return sum(words in line for line in self.lines)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    """Note what is said of outages, and find a server down sooner than usual."""
    monkeypatch.setattr(outage, "DOWN_S", DOWN_S)
    handler, log = Told(), logging.getLogger("rallypoint.client")
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)


def go_down(cutter: Cutter, told: Told, how: str = REFUSES) -> None:
    """Let the server be away, and return when the client finds it down."""
    before = told.count("is down")
    cutter.go_down(how)
    told.until("is down", before + 1)
