"""Server-sent events, for the live page of a server: whoever watches gets each new model.

    event: status
    data: the model (`status/model.py`), as JSON in one line

A new watcher gets the model at once; then all get it when it may have changed, at most twice a second, and every
`RESYNC_S` in any case, so that durations stay true and a dead connection is noticed. It is built and encoded once for
all of them. The number of watchers is bounded; one that does not read is skipped, and disconnected after `SLOW_S`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rallypoint.server.connections.connection import Connection
    from rallypoint.server.status.source import BuiltStatus, StatusSource

__all__ = ["MAX_WATCHERS", "EventStreams", "Watcher"]

MAX_WATCHERS = 64
"""Watchers of one server; more are refused."""

RETRY = b"retry: 1000\n\n"
"""The first bytes of a stream: a browser that loses it tries again after a second."""

PERIOD_S = 0.5
RESYNC_S = 5.0
SLOW_S = 15.0
"""How long a watcher may read nothing."""


class Watcher:
    """One connection that receives events."""

    __slots__ = ("_streams", "connection", "slow_since", "write")

    def __init__(self, streams: EventStreams, connection: Connection, write: Callable[[bytes], None]) -> None:
        self.connection, self.write = connection, write
        self.slow_since: float | None = None
        self._streams = streams

    def start(self) -> None:
        """Begin: the first event comes soon."""
        self.write(RETRY)
        self._streams.add(self)

    def stop(self) -> None:
        """Send no more: the connection is gone."""
        self._streams.remove(self)


class EventStreams:
    """The watchers of one server."""

    def __init__(self, source: StatusSource) -> None:
        self._source = source
        self._watchers: dict[Watcher, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._version: Hashable = None
        self._sent_at = 0.0

    def __len__(self) -> int:
        return len(self._watchers)

    @property
    def full(self) -> bool:
        """Whether there are too many watchers for another."""
        return len(self._watchers) >= MAX_WATCHERS

    def add(self, watcher: Watcher) -> None:
        """Send events to a watcher, the first one soon."""
        self._watchers[watcher] = None
        self._source.get(lambda built: self._send_to(watcher, built))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._tick)

    def remove(self, watcher: Watcher) -> None:
        """Forget a watcher, whose connection is gone."""
        self._watchers.pop(watcher, None)

    def _tick(self) -> None:
        """Send the model to all watchers if it is time."""
        self._timer = None
        if not self._watchers:
            return
        self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._tick)
        now, version = time.monotonic(), self._source.version()
        if version != self._version or now - self._sent_at >= RESYNC_S:
            self._version, self._sent_at = version, now
            self._source.get(self._send)

    def _send(self, built: BuiltStatus | None) -> None:
        for watcher in list(self._watchers):
            self._send_to(watcher, built)

    def _send_to(self, watcher: Watcher, built: BuiltStatus | None) -> None:
        connection, now = watcher.connection, time.monotonic()
        if built is None or connection.closing or watcher not in self._watchers:
            return
        if not connection.paused:
            watcher.slow_since = None
            watcher.write(b"event: status\ndata: " + built.json + b"\n\n")
            return
        if watcher.slow_since is None:
            watcher.slow_since = now
        if now - watcher.slow_since > SLOW_S:
            connection.drop(f"read no events for {SLOW_S:g} s")
