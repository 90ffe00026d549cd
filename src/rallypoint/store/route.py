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

Where the environment names a relay of the store (`relay_address.py`), sessions begin there. A relay that is not there,
is silent, or is not this store's, is passed over for the addresses of the store. One that is there and has no
connection to its server is tried again before those, for a while: when the server is back, so is the relay within a
second, and if all its clients went to the server instead, there would be no use in a relay. One that stops answering
is left like a server that hangs. A session that has moved from the relay to the store stays there; new ones begin at
the relay again.

A server may also resume the session and hang up again and again. Then the pause before each attempt grows (`Cuts`): one
that recovers may be in a crash loop, and calls wait for as long as they would for its absence; any other is given up.

Rejected: to call all at once. The session would be taken from one gateway by the next, and each takes a write in etcd.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rallypoint import net
from rallypoint.deadline import Deadline
from rallypoint.errors import ConnectFailed, ConnectionLost, RallypointError, ServerRestarted
from rallypoint.store.relay_address import RelayAddress, relay_for

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from rallypoint.protocol.client import Client
    from rallypoint.store.relay_address import AnyProtocol

__all__ = ["NO_GATEWAY", "Address", "Cuts", "Route", "Search", "Unwelcome", "backoff_s"]

Address = net.Endpoint | RelayAddress
"""Where to connect."""

PATIENCE_S = (1.0, 30.0)
"""How long one of several addresses may be silent at most: in the first round, and after doubling each round."""

RESUMING_S = (1.0, 3.0)
"""The same for a single address where a session is resumed. A server that was restarted waits `RETURN_S` for its
sessions: an attempt that began before, the pause after it and another attempt must fit into that."""

RELAY_S = 5.0
"""How long a relay may be silent, or without its server, when a session is opened; half the time, where that is less.
When one is resumed, that is the limit for one without its server; a silent one has as long as a single address."""

LEAST_S = 0.1
"""What each of them gets, however little time is left."""

PAUSE_S, GROWTH = (0.01, 1.0), 1.5
"""How long to wait between rounds at most, the first time and in the end; chance takes up to half of it away."""

MENDS, IN_A_ROW_S = 5, 0.5
"""How many cuts in a row, each so soon after the last and with no answer in between, are taken for bad luck."""

NO_GATEWAY = "a plain PyTorch server, which cannot be one of several"
"""What is said of an address in a list where PyTorch's server answers."""


class Unwelcome(ConnectionError):
    """Our preface was accepted, and then the connection was closed before we were welcome."""


class Route:
    """The addresses of a store, and where its client is now."""

    def __init__(self, endpoints: net.Endpoints, relay: RelayAddress | None = None) -> None:
        for endpoint in endpoints:
            if not 1 <= endpoint.port <= 65535:
                raise ValueError(f"a port to connect to is 1 to 65535, not {endpoint.port}")
        self.endpoints = endpoints
        self.relay = relay
        self.relayed = relay is not None
        """Whether to begin at the relay; where we are, if there is a session."""

        self.at = endpoints[0]
        """Which of the store's own addresses we are at, or begin with."""

        self.identity = b""
        """What all of several servers must be, once one is known. A single one may come back as another."""

    @classmethod
    def of(cls, endpoints: net.Endpoints) -> Route:
        """Return the way to a store, by its relay if the environment names one; raise ValueError for a bad variable."""
        return cls(endpoints, relay_for(endpoints))

    @property
    def several(self) -> bool:
        """Whether there is more than one address."""
        return len(self.endpoints) > 1

    @property
    def here(self) -> Address:
        """Where we are, or begin."""
        return self.relay if self.relayed and self.relay is not None else self.at

    @property
    def doubted(self) -> bool:
        """Whether there is somewhere else to go, if the server or the relay where we are hangs."""
        return self.several or self.relayed

    def begin(self) -> bytes:
        """Begin at the relay, if there is one, for a new session; return the identity that the server must have."""
        self.relayed = self.relay is not None
        return self.identity

    @contextlib.contextmanager
    def expecting(self, address: Address, core: Client) -> Iterator[None]:
        """Greet a server in this block: only one that is as the relay's address says will do."""
        known = core.server
        if isinstance(address, RelayAddress):
            core.server = known or address.identity
        try:
            yield
        except BaseException:
            core.server = known
            raise

    async def open(
        self, address: Address, protocol: Callable[[], AnyProtocol]
    ) -> tuple[asyncio.Transport, AnyProtocol]:
        """Connect on the running event loop; return the transport and the protocol."""
        from asyncio import get_running_loop  # which the blocking client does not import

        loop = get_running_loop()
        if isinstance(address, RelayAddress):
            return await address.open(loop, protocol)
        return await loop.create_connection(protocol, *address)

    def order(self) -> list[net.Endpoint]:
        """Return the store's addresses as they are to be tried: the one where we are, and those that follow, around."""
        at = self.endpoints.index(self.at)
        return [*self.endpoints[at:], *self.endpoints[:at]]

    def arrived(self, address: Address, identity: bytes) -> None:
        """Note who answered."""
        self.relayed = isinstance(address, RelayAddress)
        if not isinstance(address, RelayAddress):
            self.at = address
        if self.several:
            self.identity = identity

    def leave(self) -> None:
        """Begin with another address next time: this one answers, and then hangs up."""
        if self.relayed:
            self.relayed = False
        else:
            self.at = self.order()[1 % len(self.endpoints)]

    def copy(self) -> Route:
        """Return the same route for another client."""
        route = Route(self.endpoints, self.relay)
        route.at, route.identity = self.at, self.identity
        return route

    def peer(self, address: Address) -> str:
        """Return how errors call one of the addresses."""
        if isinstance(address, RelayAddress):
            return f"{self.endpoints} by the relay at {address}"
        return f"{address} (one of {self.endpoints})" if self.several else str(address)


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
        self._failed: dict[Address, Mapping[str, str]] = {}
        self._useless = 0
        self._patience_s, self._longest_s = PATIENCE_S if route.several else RESUMING_S
        self._relay_waits = False
        self._relay_s = Deadline(min(RELAY_S, deadline.remaining() / 2))
        self._rounds = 0

    def round(self) -> Iterator[tuple[Address, Deadline]]:
        """Yield each address to try, and by when it must have answered; those not tried yet even when time is up.

        There is nothing behind a relay that waits for its server.
        """
        self._useless = 0
        if self._route.relayed and self._route.relay is not None:
            self._relay_waits = False
            limit_s = RESUMING_S[0] if self._resumes else RELAY_S
            yield self._route.relay, Deadline(max(min(limit_s, self._deadline.remaining() / 2), LEAST_S))
            if self._relay_waits and not self._relay_s.expired():
                return
        addresses = self._route.order()
        for index, endpoint in enumerate(addresses):
            if not self._route.several and not self._resumes:
                yield endpoint, self._deadline
            elif endpoint not in self._failed or not self._deadline.expired():
                share_s = self._deadline.remaining() / (len(addresses) - index)
                yield endpoint, Deadline(max(min(share_s, self._patience_s), LEAST_S))

    def failed(
        self, address: Address, why: str | Mapping[str, str], useless: bool = False, unwelcome: bool = False
    ) -> None:
        """Note what happened at an address; whether it answered that it is of no use, or took the preface and hung up.

        The latter is what a relay does that has no connection to its server.
        """
        self._failed[address] = {str(address): why} if isinstance(why, str) else why
        if isinstance(address, RelayAddress):
            self._relay_waits = unwelcome
        else:
            self._useless += useless and not self._resumes

    def ends(self, address: Address, error: Exception) -> bool:
        """Return whether an error ends the search for good: that of another server does not, if that is no relay."""
        elsewhere = isinstance(address, RelayAddress) and isinstance(error, ServerRestarted)
        return isinstance(error, RallypointError) and not elsewhere

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
