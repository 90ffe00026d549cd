"""The route to a store with one server or several: its given and learned addresses, and the current one.

Several addresses are servers of one store: they have one identity, and any of them can resume a session of another.
`search.py` has the rules for trying them. This module opens no connections by itself.

A server of a replicated store reports the addresses of all its servers: in its welcome, in notices, and in its reply
while it is a standby. A route learns those in addition to the given addresses, so a client that was given only one does
not depend on it. It keeps the given addresses for ever, and of the learned ones only the last list. A learned address
may since belong to another program, such as another store's server: a reply from there ends no session.

For a store in etcd no address is given, but a function, `look`, which asks etcd for them: when none is known yet, and
when no server is reachable at the known ones. So known addresses may belong to other programs until etcd is asked
again. If the environment names a relay of such a store, it may name servers as well: they are tried first, and must
have the store's identity.

If the environment names a relay of the store (`relay_address.py`), sessions start there. A session that has moved from
the relay to the store stays there; new sessions start at the relay again.

A server may resume the session and hang up, again and again. Then the pause before each attempt grows (`CutCounter`).
If the server recovers its sessions, it may be in a crash loop, and calls wait as in any outage; any other server is
given up.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rallypoint import net
from rallypoint.client.routing.relay_address import RelayAddress, relay_for
from rallypoint.deadline import Deadline
from rallypoint.errors import ConnectionLost
from rallypoint.security.client_security import ClientSecurity

if TYPE_CHECKING:
    import asyncio

    from rallypoint.client.routing.relay_address import AnyProtocol
    from rallypoint.protocol.native_client import ClientProtocol

__all__ = ["MAX_ADDRESSES", "NOWHERE", "Address", "CutCounter", "Look", "Route", "backoff_s"]

Address = net.Endpoint | RelayAddress
"""Where to connect."""

Look = Callable[[Deadline], Sequence[str]]
"""Returns the URLs of a store's servers, by a deadline; raises RallypointError."""

MAX_ADDRESSES = 16
"""The limit on known addresses, unless more were given; of the learned addresses, the first ones are kept."""

PAUSE_S, GROWTH = (0.01, 1.0), 1.5
"""The first and the longest pause between rounds, and its growth; jitter removes up to half of a pause."""

NOWHERE = net.Endpoint("", 0)
"""The current address before any is known."""

MAX_CUTS, IN_A_ROW_S = 5, 0.5
"""How many cuts in a row are tolerated: each within `IN_A_ROW_S` of the last, without a reply in between."""


class Route:
    """The addresses of a store, and the current one; if none are given, `look` finds them.

    `name` is the store's name in errors, if that is not its addresses; `security` says how to connect, by default with
    the credentials of the environment.
    """

    def __init__(
        self,
        endpoints: net.Endpoints,
        relay: RelayAddress | None = None,
        name: str = "",
        look: Look | None = None,
        security: ClientSecurity | None = None,
    ) -> None:
        for endpoint in endpoints:
            if not 1 <= endpoint.port <= 65535:
                raise ValueError(f"the port to connect to must be from 1 to 65535, not {endpoint.port}")
        self.endpoints = endpoints
        """The given addresses, or those that `look` found last."""

        self.security = security or ClientSecurity()
        self.name = name or str(endpoints)
        """The name of the store in errors."""

        self.look = look
        self._looked = False  # since the last connection
        self.relay = relay if relay is not None and self.security.allows_plain(relay.host) else None
        self.relayed = self.relay is not None
        """Whether the current address, or the first one to try, is the relay."""

        self.at = endpoints[0] if endpoints else NOWHERE
        """The current address of the store, or the first one to try."""

        self.hung: net.Endpoint | None = None
        """The last address that was left because it hung, until a search has noted it."""

        self.identity = b""
        """The identity that all of several servers must have, once known. A single server may return with another."""

        self.replicated = False
        """Whether a server reported that the store may have several servers."""

        self._learned: tuple[net.Endpoint, ...] = ()

    @classmethod
    def of(cls, endpoints: net.Endpoints, security: ClientSecurity | None = None) -> Route:
        """Return the route to a store, via the relay that the environment names, if any; raise ValueError if bad."""
        return cls(endpoints, relay_for(endpoints), security=security)

    @property
    def addresses(self) -> tuple[net.Endpoint, ...]:
        """All known addresses of the store, the given ones first."""
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
    def current_address(self) -> Address:
        """The current address, or the first one to try."""
        return self.relay if self.relayed and self.relay is not None else self.at

    @property
    def has_alternative(self) -> bool:
        """Whether there may be another address to use, if the current server or relay hangs."""
        return self.several or self.relayed or self.replicated

    def begin(self) -> bytes:
        """Start a new session at the relay, if there is one; return the identity that the server must have."""
        self.relayed = self.relay is not None
        return self.identity

    def update_servers(self, servers: Iterable[str]) -> None:
        """Replace the learned addresses by those that a server reported for all servers of the store.

        A loopback address is used only if a given address of the store is on loopback, too.
        """
        found = dict.fromkeys(endpoint for url in servers if (endpoint := read_server(url)) is not None)
        local = any(net.is_loopback(endpoint.host) for endpoint in self.endpoints)
        new = [one for one in found if one not in self.endpoints and (local or not net.is_loopback(one.host))]
        self._learned = tuple(new[: max(0, MAX_ADDRESSES - len(self.endpoints))])
        self.replicated = self.replicated or bool(found)

    def learn_servers(self, core: ClientProtocol) -> None:
        """Learn the addresses that the server of a session has reported, if any."""
        if core.servers:
            self.update_servers(core.servers)

    def found(self, servers: Iterable[str]) -> bool:
        """Replace all addresses by those that `look` has found; return whether there are any."""
        found = dict.fromkeys(endpoint for url in servers if (endpoint := read_server(url)) is not None)
        if found:
            self.endpoints, self._learned = net.Endpoints(found), ()
            self.at = self.endpoints[0]
            self._looked = self.replicated = True
        return bool(found)

    def is_given(self, address: Address) -> bool:
        """Return whether an address was given, or just found by `look`, and so belongs to the store."""
        return address in self.endpoints and (self.look is None or self._looked)

    @contextlib.contextmanager
    def expecting_identity(self, address: Address, core: ClientProtocol) -> Iterator[None]:
        """Within this block, require the server to have the identity in the relay's address, unless etcd named it."""
        known = core.server
        named = isinstance(address, RelayAddress) or (self.look is not None and not self._looked)
        if self.relay is not None and named:
            core.server = known or self.relay.identity
        try:
            yield
        except BaseException:
            core.server = known
            raise

    async def open(
        self, address: Address, protocol: Callable[[], AnyProtocol]
    ) -> tuple[asyncio.Transport, AnyProtocol]:
        """Connect on the running event loop; return the transport and the protocol."""
        from asyncio import get_running_loop  # the blocking client does not import it

        loop = get_running_loop()
        if isinstance(address, RelayAddress):
            return await address.open(loop, protocol)
        return await loop.create_connection(protocol, *address, ssl=self.security.context_for(address.host))

    def order(self) -> list[net.Endpoint]:
        """Return the store's addresses in the order to try them: cyclic, starting with the current one."""
        known = list(self.addresses)
        if self.at not in known:  # it was learned, and is no longer listed
            return known if self.at is NOWHERE else [self.at, *known]
        at = known.index(self.at)
        return [*known[at:], *known[:at]]

    def arrived(self, address: Address, core: ClientProtocol) -> None:
        """Note the address that replied, and the servers it reported."""
        self._looked = False
        self.relayed = isinstance(address, RelayAddress)
        if not isinstance(address, RelayAddress):
            self.at = address
        self.learn_servers(core)
        if self.several:
            self.identity = core.server

    def leave(self, hangs: bool = False) -> None:
        """Start with another address next time: this one hangs, or replies and then hangs up."""
        if self.relayed:
            self.relayed = False
        else:
            self.hung = self.at if hangs else None
            order = self.order() or [NOWHERE]
            self.at = order[1 % len(order)]

    def copy(self) -> Route:
        """Return the same route for another client."""
        route = Route(self.endpoints, self.relay, self.name, self.look, self.security)
        route.at, route.identity = self.at, self.identity
        route.replicated, route._learned = self.replicated, self._learned
        return route

    def peer(self, address: Address) -> str:
        """Return the name of an address in errors."""
        if isinstance(address, RelayAddress):
            return f"{self.name} via the relay at {address}"
        if self.look is not None or not self.is_given(address):
            return f"{address} (a server of {self.name})"
        return f"{address} (one of {self.name})" if len(self.endpoints) > 1 else str(address)


class CutCounter:
    """Counts cuts in a row on a route: each soon after the last reconnect (or attempt), without a reply in between."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self.in_a_row = 0
        """Set to 0 whenever a reply arrives."""

        self._reconnected_at = float("-inf")

    def count(self, recovers: bool) -> float:
        """Count a cut; return the pause before the session is resumed.

        Raises ConnectionLost after too many cuts in a row, unless the server recovers its sessions.
        """
        now = time.monotonic()
        self.in_a_row = self.in_a_row + 1 if now < self._reconnected_at + IN_A_ROW_S else 1
        pause_s = 0.0
        if self.in_a_row > 1:
            self._route.leave()
            pause_s = backoff_s(self.in_a_row - 2)
        if self.in_a_row > MAX_CUTS and not recovers:
            why = f"it was cut {MAX_CUTS} times in a row, without a reply in between"
            raise ConnectionLost(peer=self._route.name, operation="reconnecting", why=why)
        self._reconnected_at = now + pause_s
        return pause_s

    def uncount(self) -> None:
        """Let the count start over with the next cut, which is our own."""
        self._reconnected_at = float("-inf")


def backoff_s(times: int) -> float:
    """Return the next pause after `times` pauses."""
    return min(PAUSE_S[0] * GROWTH ** min(times, 32), PAUSE_S[1]) * random.uniform(0.5, 1.0)


def read_server(url: str) -> net.Endpoint | None:
    """Return the address in a server's URL; None if it is invalid or has no port."""
    with contextlib.suppress(ValueError):
        endpoint = net.parse_endpoint(url.removeprefix("tcps://").removeprefix("tcp://"), 0)
        if endpoint.port:
            return endpoint
    return None
