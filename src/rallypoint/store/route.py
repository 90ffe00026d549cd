"""The way to a store that has one server or several: its addresses, those it was told of included, and where we are.

Several addresses are servers of one store: they have one identity, and a session that one of them carried is resumed
at any other. `search.py` has the rules by which they are tried. This module connects to nothing.

A server of a replicated store says where all its servers are: in its welcome, in notices, and in its answer while it
stands by. A route learns those, beside the addresses that it was given, so a client that was given one of them is not
lost with it. It never forgets those it was given, and knows no more than the last list it was told. What answers at an
address that was only learned may be anybody, such as another store's server: that ends no session.

Of a store in etcd no address is given, but `look`, which asks etcd for them: when there is none yet, and when nobody is
at those that were found before. So these may be anybody's, too, until etcd has been asked again.

Where the environment names a relay of the store (`relay_address.py`), sessions begin there. A session that has moved
from the relay to the store stays there; new ones begin at the relay again.

A server may also resume the session and hang up again and again. Then the pause before each attempt grows (`Cuts`): one
that recovers may be in a crash loop, and calls wait for as long as they would for its absence; any other is given up.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rallypoint import net
from rallypoint.deadline import Deadline
from rallypoint.errors import ConnectionLost
from rallypoint.store.relay_address import RelayAddress, relay_for

if TYPE_CHECKING:
    import asyncio

    from rallypoint.protocol.client import Client
    from rallypoint.store.relay_address import AnyProtocol

__all__ = ["MAX_ADDRESSES", "Address", "Cuts", "Look", "Route", "backoff_s"]

Address = net.Endpoint | RelayAddress
"""Where to connect."""

Look = Callable[[Deadline], Sequence[str]]
"""Returns the URLs of a store's servers, by a deadline; raises RallypointError."""

MAX_ADDRESSES = 16
"""How many addresses a route knows, unless more were given; of those that it is told of, the first."""

PAUSE_S, GROWTH = (0.01, 1.0), 1.5
"""How long to wait between rounds at most, the first time and in the end; chance takes up to half of it away."""

NOWHERE = net.Endpoint("", 0)
"""Where we are before an address is known."""

MENDS, IN_A_ROW_S = 5, 0.5
"""How many cuts in a row, each so soon after the last and with no answer in between, are taken for bad luck."""


class Route:
    """The addresses of a store, and where its client is now; `look` finds them, where none are given.

    `name` is how errors call the store, where that is not by its addresses.
    """

    def __init__(
        self, endpoints: net.Endpoints, relay: RelayAddress | None = None, name: str = "", look: Look | None = None
    ) -> None:
        for endpoint in endpoints:
            if not 1 <= endpoint.port <= 65535:
                raise ValueError(f"a port to connect to is 1 to 65535, not {endpoint.port}")
        self.endpoints = endpoints
        """The addresses that were given, or were found last."""

        self.name = name or str(endpoints)
        """How errors call the store."""

        self.look = look
        self._looked = False  # since we last were somewhere
        self.relay = relay
        self.relayed = relay is not None
        """Whether to begin at the relay; where we are, if there is a session."""

        self.at = endpoints[0] if endpoints else NOWHERE
        """Which of the store's own addresses we are at, or begin with."""

        self.identity = b""
        """What all of several servers must be, once one is known. A single one may come back as another."""

        self.replicated = False
        """Whether a server said that the store may have several."""

        self._learned: tuple[net.Endpoint, ...] = ()

    @classmethod
    def of(cls, endpoints: net.Endpoints) -> Route:
        """Return the way to a store, by its relay if the environment names one; raise ValueError for a bad variable."""
        return cls(endpoints, relay_for(endpoints))

    @property
    def addresses(self) -> tuple[net.Endpoint, ...]:
        """All addresses of the store that are known, those that were given first."""
        return (*self.endpoints, *self._learned)

    @property
    def several(self) -> bool:
        """Whether there is, or may be, more than one address."""
        return self.look is not None or len(self.endpoints) + len(self._learned) > 1

    @property
    def label(self) -> str:
        """The store's name as a URL."""
        return self.name if "://" in self.name else f"tcp://{self.name}"

    @property
    def here(self) -> Address:
        """Where we are, or begin."""
        return self.relay if self.relayed and self.relay is not None else self.at

    @property
    def doubted(self) -> bool:
        """Whether there may be somewhere else to go, if the server or the relay where we are hangs."""
        return self.several or self.relayed or self.replicated

    def begin(self) -> bytes:
        """Begin at the relay, if there is one, for a new session; return the identity that the server must have."""
        self.relayed = self.relay is not None
        return self.identity

    def learn(self, servers: Iterable[str]) -> None:
        """Take the addresses that a server said all servers of the store have, instead of those that were said before.

        One that is on loopback is of use only where we reach the store on loopback, too.
        """
        found = dict.fromkeys(endpoint for url in servers if (endpoint := read_server(url)) is not None)
        local = any(_is_loopback(endpoint.host) for endpoint in self.endpoints)
        new = [one for one in found if one not in self.endpoints and (local or not _is_loopback(one.host))]
        self._learned = tuple(new[: max(0, MAX_ADDRESSES - len(self.endpoints))])
        self.replicated = self.replicated or bool(found)

    def found(self, servers: Iterable[str]) -> bool:
        """Take the addresses that `look` has found, instead of all others; return whether there are any."""
        found = dict.fromkeys(endpoint for url in servers if (endpoint := read_server(url)) is not None)
        if found:
            self.endpoints, self._learned = net.Endpoints(found), ()
            self.at = self.endpoints[0]
            self._looked = self.replicated = True
        return bool(found)

    def is_given(self, address: Address) -> bool:
        """Return whether an address is one of those that were given, or have just been found, and no other's."""
        return address in self.endpoints and (self.look is None or self._looked)

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
        known = list(self.addresses)
        if self.at not in known:  # it was learned, and is none of the store's any more
            return known if self.at is NOWHERE else [self.at, *known]
        at = known.index(self.at)
        return [*known[at:], *known[:at]]

    def arrived(self, address: Address, core: Client) -> None:
        """Note who answered, and which servers there are."""
        self._looked = False
        self.relayed = isinstance(address, RelayAddress)
        if not isinstance(address, RelayAddress):
            self.at = address
        if core.servers:
            self.learn(core.servers)
        if self.several:
            self.identity = core.server

    def leave(self) -> None:
        """Begin with another address next time: this one answers, and then hangs up."""
        if self.relayed:
            self.relayed = False
        else:
            order = self.order() or [NOWHERE]
            self.at = order[1 % len(order)]

    def copy(self) -> Route:
        """Return the same route for another client."""
        route = Route(self.endpoints, self.relay, self.name, self.look)
        route.at, route.identity = self.at, self.identity
        route.replicated, route._learned = self.replicated, self._learned
        return route

    def peer(self, address: Address) -> str:
        """Return how errors call one of the addresses."""
        if isinstance(address, RelayAddress):
            return f"{self.name} by the relay at {address}"
        if self.look is not None or not self.is_given(address):
            return f"{address} (a server of {self.name})"
        return f"{address} (one of {self.name})" if len(self.endpoints) > 1 else str(address)


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
            raise ConnectionLost(peer=self._route.name, operation="reconnecting", why=why)
        self._mended_at = now + pause_s
        return pause_s

    def forgive(self) -> None:
        """Do not count the next cut as one of a row: it is our own."""
        self._mended_at = float("-inf")


def backoff_s(times: int) -> float:
    """Return how long to pause after so many pauses."""
    return min(PAUSE_S[0] * GROWTH ** min(times, 32), PAUSE_S[1]) * random.uniform(0.5, 1.0)


def read_server(url: str) -> net.Endpoint | None:
    """Return the address in a server's URL; None where nobody can connect to it."""
    with contextlib.suppress(ValueError):
        endpoint = net.parse_endpoint(url.removeprefix("tcp://"), 0)
        if endpoint.port:
            return endpoint
    return None


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
