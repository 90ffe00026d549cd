"""Housekeeping of a store server: its work once a second, and long work that it does in slices.

Once a second the server takes back unused turns, logs what went wrong, compacts the log if that is due, and notes the
rounds and failures of runs (`status/history.py`). A standby
does none of this: only the log may change its state.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from rallypoint.core.entries import ContinueDelete, TimeOutRequest
from rallypoint.core.records import Turn
from rallypoint.core.state import Namespace

if TYPE_CHECKING:
    from rallypoint.server.server import StoreServer

__all__ = ["Housekeeping"]

log = logging.getLogger("rallypoint.server")

SWEEP_S = 1.0

SLICE_ENTRIES = 256
"""Entries submitted in one turn of the event loop."""


class Housekeeping:
    """Recurring and long work of one server."""

    def __init__(self, server: StoreServer) -> None:
        self._server = server
        self._clearing: dict[int, None] = {}  # namespaces with a large change in progress
        self._reading: dict[int, None] = {}  # namespaces with reads to answer or to drop
        self._logged = 0  # refused sessions as of the last log line

    def start(self) -> None:
        """Begin to sweep once a second, until the server is closed."""
        asyncio.get_running_loop().call_later(SWEEP_S, self._tick)

    def _tick(self) -> None:
        if not self._server.listener.closed:
            self.start()
            self.sweep()

    def sweep(self) -> None:
        """Take back unused turns, log bugs and refusals, and compact the log if due."""
        server = self._server
        self._log_refusals()
        if server.elsewhere:
            return
        server.clock.now()
        for namespace in server.state.namespaces.values():
            self._release_turns(namespace.engine.idle_turns())
            while namespace.engine.bugs:
                log.error("%s", namespace.engine.bugs.popleft())
        if server.storage is not None:
            server.storage.compact_if_due()
        server.status.observe()

    def continue_change(self, namespace: Namespace) -> None:
        """Continue the large change in progress, and the answers of reads, if there are any."""
        if namespace.engine.clearing and namespace.id not in self._clearing:
            self._clearing[namespace.id] = None
            self._server.turns.resume(partial(self._change_slice, namespace))
        if namespace.engine.read_work and namespace.id not in self._reading:
            self._reading[namespace.id] = None
            self._server.turns.resume(partial(self._read_slice, namespace))

    def _change_slice(self, namespace: Namespace) -> None:
        def done(_: object) -> None:
            self._clearing.pop(namespace.id, None)
            self.continue_change(namespace)  # which ends when a round is closed: nothing is left to change in it

        self._server.submit(ContinueDelete(namespace.id), done)

    def _read_slice(self, namespace: Namespace) -> None:
        self._reading.pop(namespace.id, None)
        namespace.engine.continue_reads()
        self._server.settle(namespace.engine)
        self.continue_change(namespace)

    def _release_turns(self, turns: list[Turn]) -> None:
        for turn in turns[:SLICE_ENTRIES]:
            owner: Any = turn.owner
            self._server.submit(TimeOutRequest(owner.serial, turn.number))
        if len(turns) > SLICE_ENTRIES:
            asyncio.get_running_loop().call_soon(self._release_turns, turns[SLICE_ENTRIES:])

    def _log_refusals(self) -> None:
        more, self._logged = self._server.refused_sessions - self._logged, self._server.refused_sessions
        if more:
            limit = self._server.state.limits.max_sessions
            advice = "allow more with --max-sessions, or with --max-memory"
            log.warning("refused %d sessions: the limit of %d is reached; %s", more, limit, advice)
