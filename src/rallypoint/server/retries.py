"""Retries of the server's own entries that found the disk full and its reserve exhausted.

A client has left, a grace period is over, replies were confirmed: there is no client to refuse. Retries may reorder
such entries, so each must be valid by itself: the end of a connection is dropped if another connection carries the
session by then, and only the last confirmation of each session is kept.

Rejected: leaving them in the commit queue. All clients would wait behind them, readers included.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from itertools import islice
from typing import TYPE_CHECKING, Any

from rallypoint.core import entries
from rallypoint.core.entries import DetachOwner, EndSession, Entry, SessionRequest

if TYPE_CHECKING:
    from rallypoint.server.server import StoreServer

__all__ = ["Retries"]

RETRY_S = 0.5
"""Pause between retries while the disk is full."""

SLICE_ENTRIES = 256
"""Entries retried in one turn of the event loop."""


class Retries:
    """The entries of one server that wait for a retry."""

    def __init__(self, server: StoreServer) -> None:
        self._server = server
        self._entries: dict[Hashable, tuple[Entry, Callable[[Any], None] | None]] = {}

    def __len__(self) -> int:
        """Return the number of waiting entries."""
        return len(self._entries)

    def add(self, entry: Entry, done: Callable[[Any], None] | None = None) -> None:
        """Retry an entry once the disk may have room; keep only the last confirmation of a session."""
        if not self._entries:
            asyncio.get_running_loop().call_later(RETRY_S, self._retry)
        key: Hashable = object() if done is not None else entries.encode(entry)
        if isinstance(entry, SessionRequest):
            confirm: Any = entry.op
            key = entry.session
            before: Any = self._entries.get(key)
            if before is not None and before[0].op.last > confirm.last:
                return
        self._entries[key] = (entry, done)

    def _retry(self) -> None:
        server = self._server
        for key in list(islice(self._entries, SLICE_ENTRIES)):
            entry, done = self._entries.pop(key)
            serial = (
                entry.owner if isinstance(entry, DetachOwner) else entry.session if isinstance(entry, EndSession) else 0
            )
            session = server.state.sessions.get(serial)
            if session is None:
                server.submit(entry, done)
            elif session.handler is None:  # otherwise the client has reconnected
                server.detach(session)
        if self._entries:
            delay_s = RETRY_S if server.log is not None and server.log.disk_full else 0.0
            asyncio.get_running_loop().call_later(delay_s, self._retry)
