"""Entries that nobody waits for, and that even the reserve of a full disk had no room for: tried again until there is.

A client is gone, a grace is over, answers were confirmed: nobody can be told that this was refused. Tried again, such
entries may come in another order, so each must stand on its own: the end of a connection is dropped when another
connection carries the session by then, and of a session's confirmations only the last is kept.

Rejected: to leave them in the commit queue. Everybody would wait behind them, readers included.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from itertools import islice
from typing import TYPE_CHECKING, Any

from rallypoint.core import entries
from rallypoint.core.entries import Detach, End, Entry, Request

if TYPE_CHECKING:
    from rallypoint.server.server import StoreServer

__all__ = ["Retries"]

RETRY_S = 0.5
"""How long to wait, while the disk is full, before entries are tried again."""

SLICE_ENTRIES = 256
"""How many entries are submitted again in one turn of the event loop."""


class Retries:
    """The entries of one server that are to be tried again."""

    def __init__(self, server: StoreServer) -> None:
        self._server = server
        self._entries: dict[Hashable, tuple[Entry, Callable[[Any], None] | None]] = {}

    def __len__(self) -> int:
        """Return how many entries wait."""
        return len(self._entries)

    def add(self, entry: Entry, done: Callable[[Any], None] | None = None) -> None:
        """Submit an entry again, as soon as the disk may have room; of a session's confirmations only the last."""
        if not self._entries:
            asyncio.get_running_loop().call_later(RETRY_S, self._retry)
        key: Hashable = object() if done is not None else entries.encode(entry)
        if isinstance(entry, Request):
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
            serial = entry.owner if isinstance(entry, Detach) else entry.session if isinstance(entry, End) else 0
            session = server.state.sessions.get(serial)
            if session is None:
                server.submit(entry, done)
            elif session.link is None:  # else its client is back
                server.detach(session)
        if self._entries:
            delay_s = RETRY_S if server.log is not None and server.log.disk_full else 0.0
            asyncio.get_running_loop().call_later(delay_s, self._retry)
