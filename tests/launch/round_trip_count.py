"""Counts the round trips of an agent: how often its thread waits for a server's reply, one wait after the other.

A logical clock, in trips, and no time: a reply arrives one trip after its request was sent, and whoever waits for it
goes on at the later of then and now. So requests that are sent together take one trip, and the count is the same on
every machine. Requests of other threads delay nobody, and are not counted.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from rallypoint.client.blocking.sent_batch import SentBatch
from rallypoint.client.blocking.session import ClientSession
from rallypoint.core import ops
from rallypoint.launch.stores.node_relay import NodeRelay

CONNECT = 2
"""The trips of opening a session: the greeting, and the hello."""

CLOSE_ROUND = 2
"""The trips of a relay that closes a round at the server: the greeting of its connection, and the request."""


class TripClock:
    """The trips that the agent's thread has waited for so far."""

    def __init__(self) -> None:
        self.now = 0
        self._agent = threading.current_thread()
        self._inside = False  # a counted call

    @contextlib.contextmanager
    def waiting(self, trips: int = 1) -> Iterator[None]:
        """Count the trips of a call, unless it is a part of another one, or of another thread."""
        if self._inside or not self._is_agent:
            yield
            return
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            self.now += trips

    def wait_until(self, trips: int) -> None:
        """Wait for what was begun earlier, and is there after so many trips."""
        if self._is_agent:
            self.now = max(self.now, trips)

    @property
    def _is_agent(self) -> bool:
        return threading.current_thread() is self._agent

    def later(self, sent: SentBatch) -> SentBatch:
        """Return a batch whose collection waits for the trip that began when it was sent."""
        there_at, collect = self.now + 1, sent.results

        def results() -> list[Any]:
            self.wait_until(there_at)
            return collect()

        sent.results = results  # type: ignore[method-assign]
        return sent


def count_trips(monkeypatch: pytest.MonkeyPatch) -> TripClock:
    """Count the trips of the calling thread from now on, in every session that is opened, and at every relay."""
    clock = TripClock()

    class CountedSession(ClientSession):
        """A session that counts."""

        def __init__(self, *arguments: Any) -> None:
            with clock.waiting(CONNECT):
                super().__init__(*arguments)

        def ask(self, op: ops.Op, wait_s: float | None = None, left: int | None = None) -> Any:
            with clock.waiting():
                return super().ask(op, wait_s, left)

        def begin(self, batch: Sequence[ops.Op]) -> SentBatch:
            return clock.later(super().begin(batch))

        def act(self, op: ops.Act) -> Any:
            with clock.waiting():
                return super().act(op)

        def close(self) -> None:
            with clock.waiting():
                super().close()

    class CountedRelay(NodeRelay):
        """A relay that counts."""

        closed_at = 0

        def close_round(self, run: str, scope: int | None, timeout_s: float) -> threading.Thread:
            self.closed_at = clock.now + CLOSE_ROUND
            return super().close_round(run, scope, timeout_s)

        def close(self) -> None:
            super().close()
            clock.wait_until(self.closed_at)

    monkeypatch.setattr("rallypoint.store.native_backend.ClientSession", CountedSession)
    monkeypatch.setattr("rallypoint.launch.stores.store_provider.NodeRelay", CountedRelay)
    return clock
