"""RALLYPOINT_RELAY: where the relay of this node is, and whose relay it is.

    tcp://127.0.0.1:PORT?upstream=HOST:PORT[,HOST:PORT]      or      unix:///PATH?upstream=HOST:PORT
    tcp://127.0.0.1:PORT?upstream=etcd://HOST:PORT[,HOST:PORT]/NAME

The launcher sets it for its workers. A client uses the relay only for a store of which one address is among those of
`upstream`, spelled alike; for any other it is as if there were none. So programs that use a second store, or the URL
of the relay itself, go on as before. Of a store in etcd these are the addresses of etcd's members, and the name must be
the same; how to be let in is not part of it. With `&identity=HEX`, what answers there must also be that store, or the
client goes to the store directly: after the relay's end its port may be anybody's.

Rejected: to ask the relay for its upstream. That is a question more for every session, and one that whoever has taken
the relay's port may answer, too.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from rallypoint import net, unix_socket
from rallypoint.deadline import Deadline
from rallypoint.etcd.address import DEFAULT_PORT as ETCD_PORT

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Callable

    AnyProtocol = TypeVar("AnyProtocol", bound=asyncio.BaseProtocol)

__all__ = ["VARIABLE", "RelayAddress", "relay_for"]

VARIABLE = "RALLYPOINT_RELAY"
"""The environment variable that names the relay of this node."""

DEFAULT_PORT = 29400
"""The port of an upstream server that is given without one, as in store URLs."""

_TCP, _ETCD = "tcp://", "etcd://"
_EXAMPLE = "tcp://127.0.0.1:4711?upstream=head-node:29400"


class RelayAddress(NamedTuple):
    """A relay: its place (`tcp://host:port` or `unix:///path`), the store it serves, and that store's identity.

    `upstream` are servers, or with `store`, the name of one in etcd, the members of etcd.
    """

    place: str
    upstream: net.Endpoints
    identity: bytes = b""
    store: str = ""

    def __str__(self) -> str:
        return self.place

    @property
    def variable(self) -> str:
        """What the environment variable says of this relay."""
        from urllib.parse import quote

        told = f"&identity={self.identity.hex()}" if self.identity else ""
        place = self.place if self.place.startswith(_TCP) else quote(self.place, safe=":/")
        upstream = f"{_ETCD}{self.upstream}/{quote(self.store)}" if self.store else str(self.upstream)
        return f"{place}?upstream={upstream}{told}"

    @property
    def _endpoint(self) -> net.Endpoint:
        return net.parse_endpoint(self.place.removeprefix(_TCP), 0)

    def connect(self, deadline: Deadline) -> socket.socket:
        """Return a connected socket, or raise ConnectFailed; there is one attempt."""
        if self.place.startswith(_TCP):
            return net.connect(*self._endpoint, deadline, once=True)
        return unix_socket.connect(self.place.removeprefix(unix_socket.SCHEME), deadline)

    async def open(
        self, loop: asyncio.AbstractEventLoop, protocol: Callable[[], AnyProtocol]
    ) -> tuple[asyncio.Transport, AnyProtocol]:
        """Connect on an event loop; return the transport and the protocol."""
        if self.place.startswith(_TCP):
            return await loop.create_connection(protocol, *self._endpoint)
        path = self.place.removeprefix(unix_socket.SCHEME)
        return await loop.create_unix_connection(protocol, path)


def relay_for(endpoints: net.Endpoints, store: str = "") -> RelayAddress | None:
    """Return the relay that the environment names, if it serves the store at these addresses, or of this name there.

    Raises ValueError, which quotes the variable, where that makes no sense.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return None
    try:
        relay = _parse(text)
    except ValueError as error:
        raise ValueError(f"{VARIABLE}={text!r}: {error}") from None
    served = {_spelled(endpoint) for endpoint in relay.upstream}
    return relay if relay.store == store and served.intersection(map(_spelled, endpoints)) else None


def _spelled(endpoint: net.Endpoint) -> net.Endpoint:
    return net.Endpoint(endpoint.host.rstrip(".").lower(), endpoint.port)


def _parse(text: str) -> RelayAddress:
    from urllib.parse import parse_qsl, unquote

    place, _, query = text.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
    upstream, identity = options.pop("upstream", ""), options.pop("identity", "")
    if options:
        raise ValueError(f"{next(iter(options))!r} is not an option; there are upstream and identity")
    if not upstream:
        raise ValueError(f"it does not say whose relay that is: give ?upstream=host:port, as in {_EXAMPLE}")
    members, store = _store(upstream)
    return RelayAddress(_place(unquote(place)), members, bytes.fromhex(identity), store)


def _store(upstream: str) -> tuple[net.Endpoints, str]:
    """Return the addresses in an upstream, and the name of the store where they are etcd's."""
    if not upstream.startswith(_ETCD):
        return net.parse_endpoints(upstream, DEFAULT_PORT), ""
    members, _, store = upstream.removeprefix(_ETCD).partition("/")
    if not store:
        raise ValueError("the name of the store in etcd is missing: give upstream=etcd://host:2379/name")
    return net.parse_endpoints(members, ETCD_PORT), store


def _place(place: str) -> str:
    if place.startswith(unix_socket.SCHEME + "/"):
        return unix_socket.SCHEME + unix_socket.checked(place.removeprefix(unix_socket.SCHEME))
    if not place.startswith(_TCP) or not place.removeprefix(_TCP):
        raise ValueError(f"a relay is at tcp://host:port or unix:///path, as in {_EXAMPLE}")
    endpoint = net.parse_endpoint(place.removeprefix(_TCP), 0)
    if not endpoint.port:
        raise ValueError(f"the relay's port is missing, as in {_EXAMPLE}")
    return f"{_TCP}{endpoint}"
