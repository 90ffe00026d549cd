"""The way to a store that has one server or several: which address to try next, for how long, and when to give up.

Several addresses are gateways of one store: they have one identity, and a session that one of them carried is resumed
at any other. Whoever looks for a server tries them in turn, the one where it was first: each for its share of the time
that is left and not longer than a moment, which doubles every round, so that a host that is silent costs about a second
and one that refuses costs nothing. When all of them answered that they are of no use, there is no other round.

The blocking client and the asyncio one search by the same rules, which are here; this module connects to nothing. A
single address keeps the whole time when a session is opened. When one is resumed, it is tried again and again, as
several are: its server may be restarted behind a proxy or a listener that outlives it, and never answer what came
before. Another program may have the port meanwhile, so then no answer ends the search but one of ours.

Pauses grow from 10 ms, for a server that comes back does so within a second as a rule, and each is cut by chance: the
clients of a server that died have all been cut at the same moment, and must not all come back at the same moment.

A server may also resume the session and hang up again and again. Then the pause before each attempt grows (`Cuts`): one
that recovers may be in a crash loop, and calls wait for as long as they would for its absence; any other is given up.

Rejected: to call all at once. The session would be taken from one gateway by the next, and each takes a write in etcd.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping

from rallypoint import net
from rallypoint.deadline import Deadline
from rallypoint.errors import ConnectFailed, ConnectionLost

__all__ = ["NO_GATEWAY", "Cuts", "Route", "Search", "backoff_s"]

PATIENCE_S = (1.0, 30.0)
"""How long one of several addresses may be silent at most: in the first round, and after doubling each round."""

RESUMING_S = (1.0, 3.0)
"""The same for a single address where a session is resumed. A server that was restarted waits `RETURN_S` for its
sessions: an attempt that began before, the pause after it and another attempt must fit into that."""

LEAST_S = 0.1
"""What each of them gets, however little time is left."""

PAUSE_S, GROWTH = (0.01, 1.0), 1.5
"""How long to wait between rounds at most, the first time and in the end; chance takes up to half of it away."""

MENDS, IN_A_ROW_S = 5, 0.5
"""How many cuts in a row, each so soon after the last and with no answer in between, are taken for bad luck."""

NO_GATEWAY = "a plain PyTorch server, which cannot be one of several"
"""What is said of an address in a list where PyTorch's server answers."""


class Route:
    """The addresses of a store, and where its client is now."""

    def __init__(self, endpoints: net.Endpoints) -> None:
        for endpoint in endpoints:
            if not 1 <= endpoint.port <= 65535:
                raise ValueError(f"a port to connect to is 1 to 65535, not {endpoint.port}")
        self.endpoints = endpoints
        self.at = endpoints[0]
        self.identity = b""
        """What all of several servers must be, once one is known. A single one may come back as another."""

    @property
    def several(self) -> bool:
        """Whether there is more than one address."""
        return len(self.endpoints) > 1

    def order(self) -> list[net.Endpoint]:
        """Return the addresses as they are to be tried: the one where we are, and those that follow it, around."""
        at = self.endpoints.index(self.at)
        return [*self.endpoints[at:], *self.endpoints[:at]]

    def arrived(self, endpoint: net.Endpoint, identity: bytes) -> None:
        """Note who answered."""
        self.at = endpoint
        if self.several:
            self.identity = identity

    def leave(self) -> None:
        """Begin with another address next time: this one answers, and then hangs up."""
        self.at = self.order()[1 % len(self.endpoints)]

    def copy(self) -> Route:
        """Return the same route for another client."""
        route = Route(self.endpoints)
        route.at, route.identity = self.at, self.identity
        return route

    def peer(self, endpoint: net.Endpoint) -> str:
        """Return how errors call one of the addresses."""
        return f"{endpoint} (one of {self.endpoints})" if self.several else str(endpoint)


class Cuts:
    """Cuts in a row along a route: each soon after the last was, or could have been, mended; no answer in between."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self.in_a_row = 0
        """To be set to 0 whenever an answer comes."""

        self._mended_at = float("-inf")

    def count(self, recovers: bool) -> float:
        """Count a cut; return how long to pause before the session is resumed.

        Raises ConnectionLost where that is in vain, unless the server is one that recovers.
        """
        now = time.monotonic()
        self.in_a_row = self.in_a_row + 1 if now < self._mended_at + IN_A_ROW_S else 1
        pause_s = 0.0
        if self.in_a_row > 1:
            self._route.leave()
            pause_s = backoff_s(self.in_a_row - 2)
        if self.in_a_row > MENDS and not recovers:
            why = f"it was cut {MENDS} times in a row, without an answer in between"
            raise ConnectionLost(peer=str(self._route.endpoints), operation="reconnecting", why=why)
        self._mended_at = now + pause_s
        return pause_s

    def forgive(self) -> None:
        """Do not count the next cut as one of a row: it is our own."""
        self._mended_at = float("-inf")


class Search:
    """One search along a route, until a deadline; for a server to open a session at, or to resume one (`resumes`)."""

    def __init__(self, route: Route, deadline: Deadline, resumes: bool = False) -> None:
        self._route = route
        self._deadline = deadline
        self._resumes = resumes
        self._failed: dict[net.Endpoint, Mapping[str, str]] = {}
        self._useless = 0
        self._patience_s, self._longest_s = PATIENCE_S if route.several else RESUMING_S
        self._rounds = 0

    def round(self) -> Iterator[tuple[net.Endpoint, Deadline]]:
        """Yield each address to try, and by when it must have answered; those not tried yet even when time is up."""
        self._useless = 0
        addresses = self._route.order()
        for index, endpoint in enumerate(addresses):
            if not self._route.several and not self._resumes:
                yield endpoint, self._deadline
            elif endpoint not in self._failed or not self._deadline.expired():
                share_s = self._deadline.remaining() / (len(addresses) - index)
                yield endpoint, Deadline(max(min(share_s, self._patience_s), LEAST_S))

    def failed(self, endpoint: net.Endpoint, why: str | Mapping[str, str], useless: bool = False) -> None:
        """Note what happened at an address, and whether it answered that it is of no use."""
        self._failed[endpoint] = {str(endpoint): why} if isinstance(why, str) else why
        self._useless += useless and not self._resumes

    @property
    def why(self) -> str:
        """What happened last at each address, in words; where there is only one, without it."""
        each = list(self._failed.values())
        if len(each) == 1 and len(each[0]) == 1:
            return next(iter(each[0].values()))
        return "; ".join(f"{where}: {why}" for failed in each for where, why in failed.items())

    def pause_s(self) -> float:
        """Return how long to wait before the next round; raise ConnectFailed where there is to be none."""
        if self._useless == len(self._route.endpoints) or self._deadline.expired():
            tried = {where: why for each in self._failed.values() for where, why in each.items()}
            raise ConnectFailed(peer=str(self._route.endpoints), timeout_s=self._deadline.timeout_s, tried=tried)
        pause_s = min(backoff_s(self._rounds), self._deadline.remaining())
        self._rounds += 1
        self._patience_s = min(2 * self._patience_s, self._longest_s)
        return pause_s


def backoff_s(times: int) -> float:
    """Return how long to pause after so many pauses."""
    return min(PAUSE_S[0] * GROWTH ** min(times, 32), PAUSE_S[1]) * random.uniform(0.5, 1.0)
