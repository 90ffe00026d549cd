"""The absence of the server as a relay's session lives through it: said once, ended once, and over at its deadline.

The rules and the words are those of every client (`store/outage.py`); the timers are the event loop's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rallypoint.relay.upstream import Upstream
from rallypoint.store.outage import DOWN_S, Outage

__all__ = ["Absence"]


class Absence:
    """Whether the server is away, and for how long it may be. `on_lost` is called with the reason when that is over."""

    def __init__(self, upstream: Upstream, on_lost: Callable[[str], None]) -> None:
        self._upstream = upstream
        self._on_lost = on_lost
        self._outage: Outage | None = None
        self._noticing: asyncio.TimerHandle | None = None
        self._ending: asyncio.TimerHandle | None = None

    def begin(self, patience_s: float, why: str = "") -> None:
        """Note that there is no session for now, unless that is known."""
        if self._outage is None:
            loop = asyncio.get_running_loop()
            self._outage = Outage(self._upstream.peer, patience_s, 0)
            self._noticing = loop.call_later(DOWN_S, self._notice)
            self._ending = loop.call_later(patience_s, self._give_up, patience_s)
        self._outage.why = why or self._upstream.why

    def over(self) -> None:
        """Note that the session is back."""
        if self._outage is not None:
            self._outage.over()
        self.forget()

    def forget(self) -> None:
        """Wait for it no more."""
        self._outage = None
        for timer in (self._noticing, self._ending):
            if timer is not None:
                timer.cancel()

    def _notice(self) -> None:
        """Say that the server is down, once it has been away for long enough."""
        outage = self._outage
        if outage is not None:
            outage.why = self._upstream.why or outage.why
            if not outage.look() and not outage.down:  # the timer was early
                self._noticing = asyncio.get_running_loop().call_later(DOWN_S / 10, self._notice)

    def _give_up(self, patience_s: float) -> None:
        outage = self._outage
        if outage is not None:
            because = self._upstream.why or outage.why
            peer = self._upstream.peer
            self._on_lost(f"no answer from the server at {peer} for {patience_s:g} s{because and f' ({because})'}")
