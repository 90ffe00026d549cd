"""A server outage as seen by a relay's session: logged once, ended once, and limited by a deadline.

The rules and messages are those of every client (`client/outage.py`); the timers are the event loop's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rallypoint.client.outage import DOWN_S, Outage
from rallypoint.relay.upstream.connection import Upstream

__all__ = ["UpstreamOutage"]


class UpstreamOutage:
    """The current outage, if any, and its deadline; at the deadline, `on_lost` is called with the reason."""

    def __init__(self, upstream: Upstream, on_lost: Callable[[str], None]) -> None:
        self._upstream = upstream
        self._on_lost = on_lost
        self._outage: Outage | None = None
        self._down_timer: asyncio.TimerHandle | None = None
        self._deadline_timer: asyncio.TimerHandle | None = None

    def begin(self, patience_s: float, why: str = "") -> None:
        """Begin an outage, unless one has begun; update its reason."""
        if self._outage is None:
            loop = asyncio.get_running_loop()
            self._outage = Outage(self._upstream.peer, patience_s, 0)
            self._down_timer = loop.call_later(DOWN_S, self._log_down)
            self._deadline_timer = loop.call_later(patience_s, self._give_up, patience_s)
        self._outage.why = why or self._upstream.why

    def end(self) -> None:
        """End the outage: the session has resumed."""
        if self._outage is not None:
            self._outage.end()
        self.forget()

    def forget(self) -> None:
        """Discard the outage and cancel its timers."""
        self._outage = None
        for timer in (self._down_timer, self._deadline_timer):
            if timer is not None:
                timer.cancel()

    def _log_down(self) -> None:
        """Log that the server is down, once the outage is long enough."""
        outage = self._outage
        if outage is not None:
            outage.why = self._upstream.why or outage.why
            if not outage.check_down() and not outage.down:  # the timer was early
                self._down_timer = asyncio.get_running_loop().call_later(DOWN_S / 10, self._log_down)

    def _give_up(self, patience_s: float) -> None:
        outage = self._outage
        if outage is not None:
            because = self._upstream.why or outage.why
            peer = self._upstream.peer
            self._on_lost(f"no answer from the server at {peer} for {patience_s:g} s{because and f' ({because})'}")
