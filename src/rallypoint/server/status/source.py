"""`StatusSource`: the models of one server, for everybody who asks.

A model is built once for all who ask at about the same time, in slices of a few milliseconds between which the event
loop runs. `EventStreams` (`event_streams.py`) sends them to those who watch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Generator, Hashable, Iterator
from typing import NamedTuple

from rallypoint.server.status.event_streams import EventStreams
from rallypoint.server.status.model import ServerStatus, encode_status

__all__ = ["BuiltStatus", "OnBuilt", "StatusSource"]

log = logging.getLogger("rallypoint.server")

FRESH_S = 0.1
"""A model of this age is good enough for the next who asks."""

SLICE_S = 0.004
"""Time in which the event loop waits for a model."""


class BuiltStatus(NamedTuple):
    """A model, its JSON, and when it was built."""

    status: ServerStatus
    json: bytes
    at: float


OnBuilt = Callable[["BuiltStatus | None"], None]
"""Called with a model; with None if it cannot be built."""


class StatusSource:
    """Builds models, and hands them to those who wait for them."""

    def __init__(
        self,
        build: Callable[[], Generator[None, None, ServerStatus]],
        version: Callable[[], Hashable],
        observe: Callable[[], Iterator[None]] | None = None,
    ) -> None:
        """`version` changes when the model may have changed; `observe` is run once a second, in slices."""
        self.version = version
        self.streams = EventStreams(self)
        self._build, self._observe = build, observe
        self._last: BuiltStatus | None = None
        self._waiting: list[OnBuilt] = []
        self._steps: Generator[None, None, ServerStatus] | None = None
        self._observing: Iterator[None] | None = None

    def get(self, done: OnBuilt) -> None:
        """Call `done` with a fresh model, now or soon; with None if it cannot be built."""
        if self._last is not None and time.monotonic() - self._last.at < FRESH_S:
            done(self._last)
            return
        self._waiting.append(done)
        if self._steps is None:
            self._steps = self._build()
            self._go_on()

    def observe(self) -> None:
        """Bring the history up to date; called once a second."""
        if self._observe is not None and self._observing is None:
            self._observing = self._observe()
            self._observe_on()

    def _go_on(self) -> None:
        """Do the next slice of the model, and the rest in later turns of the event loop."""
        built: BuiltStatus | None = None
        try:
            ends_at = time.monotonic() + SLICE_S
            assert self._steps is not None
            while time.monotonic() < ends_at:
                next(self._steps)
            asyncio.get_running_loop().call_soon(self._go_on)
            return
        except StopIteration as end:
            status: ServerStatus = end.value
            status.watchers = len(self.streams)
            built = self._last = BuiltStatus(status, encode_status(status), time.monotonic())
        except Exception:  # a bug here must not disturb the clients of the store
            log.exception("bug: cannot build the status")
        self._steps = None
        waiting, self._waiting = self._waiting, []
        for done in waiting:
            done(built)

    def _observe_on(self) -> None:
        try:
            ends_at = time.monotonic() + SLICE_S
            assert self._observing is not None
            while time.monotonic() < ends_at:
                next(self._observing)
            asyncio.get_running_loop().call_soon(self._observe_on)
            return
        except StopIteration:
            pass
        except Exception:
            log.exception("bug: cannot follow the runs")
        self._observing = None
