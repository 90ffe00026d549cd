"""Peers that failed to authenticate: counted, logged once for each host, reported to the clients, and slowed down.

The first failures of a host are answered at once, so that a node with a wrong token learns it without delay. Further
ones are answered later and later, up to `MAX_DELAY_S`, and their connections read nothing meanwhile. Only failures are
delayed: other processes behind the same address connect as fast as ever. A host that has not failed for `FORGET_S`
starts again, and is logged again. More than `MAX_REPORTS` hosts in that time are an attack, by somebody with many
addresses: the rest is counted, and neither fills the log nor is told to every client.

Rejected: to refuse all connections of a host after some failures. A cluster behind one address would lock itself out
by one misconfigured process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from rallypoint.text import printable

__all__ = ["DeniedPeers"]

log = logging.getLogger("rallypoint.server")

PROMPT, FIRST_DELAY_S, MAX_DELAY_S = 3, 0.1, 1.5
"""How many failures of a host are answered at once; the delay of the next one, which then doubles; and the longest.

The longest is less than a client that reconnects waits for an answer: it must learn that it is refused."""

MAX_DELAYED = 256
"""Connections whose answer is delayed; beyond that, failures are answered by closing the connection at once."""

MAX_HOSTS, FORGET_S = 1024, 60.0
"""Hosts that are remembered, the latest ones, and for how long after their last failure."""

MAX_REPORTS = 32
"""Hosts that are logged, and reported to the clients, within `FORGET_S`."""


class DeniedPeers:
    """The hosts that failed to authenticate lately."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = 0
        """How many attempts were denied."""

        self.on_new: Callable[[str], object] = lambda who: None
        """Called with a description of each host that failed for the first time."""

        self._clock = clock
        self._reports, self._reports_since = 0, clock()
        self._hosts: dict[str, tuple[int, float]] = {}  # failures and the time of the last, least recent host first
        self._delayed = 0

    def deny(self, host: str, why: str, answer: Callable[[], None], close: Callable[[], None]) -> None:
        """Count a failure, and call `answer` when it is due; or `close`, if too many wait for their answer."""
        self.total += 1
        delay_s = self._count(host, why)
        if not delay_s:
            answer()
        elif self._delayed >= MAX_DELAYED:
            close()
        else:
            self._delayed += 1
            asyncio.get_running_loop().call_later(delay_s, self._answer, answer)

    def note(self, host: str, why: str) -> None:
        """Count a failure of a peer that waits for no answer."""
        self.total += 1
        self._count(host, why)

    def _answer(self, answer: Callable[[], None]) -> None:
        self._delayed -= 1
        answer()

    def _count(self, host: str, why: str) -> float:
        """Count a failure of a host; return how long to delay the answer."""
        now = self._clock()
        failures, last_at = self._hosts.pop(host, (0, now))
        failures = 1 if now - last_at > FORGET_S else failures + 1
        if len(self._hosts) >= MAX_HOSTS:
            del self._hosts[next(iter(self._hosts))]
        self._hosts[host] = failures, now
        if failures == 1:
            self._report(printable(f"{host} ({why})"), now)
        return 0.0 if failures <= PROMPT else min(FIRST_DELAY_S * 2.0 ** min(failures - PROMPT - 1, 10), MAX_DELAY_S)

    def _report(self, told: str, now: float) -> None:
        """Log a host, and report it to the clients, unless there were too many lately."""
        if now - self._reports_since > FORGET_S:
            self._reports, self._reports_since = 0, now
        self._reports += 1
        if self._reports <= MAX_REPORTS:
            log.warning("denied %s; further failures of this host are counted, not logged", told)
            self.on_new(told)
        elif self._reports == MAX_REPORTS + 1:
            words = "denied more than %d hosts within %.0f s; further hosts are counted, not logged (/statistics)"
            log.warning(words, MAX_REPORTS, now - self._reports_since)
