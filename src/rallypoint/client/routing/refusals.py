"""Which refusals are final: those of a server and a client of which one does not accept the credentials of the other.

A client that opens a session fails at once: somebody must change a setting. One that reconnects belongs to a job that
was healthy a moment ago. If its server cannot come back (a server in memory has died), a refusal is final as well. But
a server with a data directory, a replicated server, or an agent's server may be about to return, while another server
has its port for a moment. Then a refusal is final if every given address has refused, and still does `REFUSED_S`
later, without any other sign of a server in between.

Rejected: to try until the session's own deadline, as in an outage. A job with a new token would hang for minutes, and
its log would not say why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable

from rallypoint.errors import AuthenticationFailed
from rallypoint.protocol import BadMessage

__all__ = ["REFUSED_S", "Refusals"]

REFUSED_S = 3.0
"""How long an address must refuse before that is final, for a client that reconnects to a server that may return."""


class Refusals:
    """The refusals of one search, by address; with `confirms`, they must last."""

    def __init__(self, confirms: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._confirms, self._clock = confirms, clock
        self._since: dict[Hashable, float] = {}
        self._lasted: dict[Hashable, AuthenticationFailed] = {}

    def note(self, address: Hashable, error: Exception) -> None:
        """Note why an attempt at an address failed; a timeout says nothing, as refusals may be answered late."""
        if isinstance(error, AuthenticationFailed):
            now = self._clock()
            if now - self._since.setdefault(address, now) >= REFUSED_S or not self._confirms:
                self._lasted[address] = error
        elif isinstance(error, (ConnectionError, BadMessage)):
            self._since.pop(address, None)
            self._lasted.pop(address, None)

    def final(self, addresses: Collection[Hashable]) -> AuthenticationFailed | None:
        """Return the refusal that ends the search, of all these addresses if it must be confirmed; None to go on."""
        if not self._lasted or (self._confirms and not self._lasted.keys() >= set(addresses)):
            return None
        return next(iter(self._lasted.values()))

    def ends(self, error: Exception) -> bool:
        """Note why an attempt at the only server failed; return whether that is final."""
        self.note("", error)
        return self.final([""]) is not None
