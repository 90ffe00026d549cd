"""RALLYPOINT_RELAY: the address of this node's relay, and the store it serves.

    tcp://127.0.0.1:PORT?upstream=HOST:PORT[,HOST:PORT]      or      unix:///PATH?upstream=HOST:PORT
    tcp://127.0.0.1:PORT?upstream=etcd://HOST:PORT[,HOST:PORT]/NAME[&servers=HOST:PORT[,HOST:PORT]]

The launcher sets it for its workers. A client uses the relay only for a store that has an address in `upstream`,
compared as text and not resolved; for any other store the variable has no effect. So programs that use a second store,
or the URL of the relay itself, are not affected. For a store in etcd, `upstream` has the addresses of etcd's members,
and the name of the store must be the same; credentials are not compared. With `&identity=HEX`, the server behind the
relay must have that identity, or the client connects to the store directly: after the relay has ended, another program
may have its port. `servers` are the servers of a store in etcd when the launcher started the client: if the relay
fails, they are tried before etcd is asked, which may refuse a client without a password. They, too, must have the
identity.

Rejected: asking the relay for its upstream. That is one more request per session, and a program that has taken the
relay's port could answer it as well.
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
"""The default port of an upstream server, as in store URLs."""

_TCP, _ETCD = "tcp://", "etcd://"
_EXAMPLE = "tcp://127.0.0.1:4711?upstream=head-node:29400"


class RelayAddress(NamedTuple):
    """A relay: its address (`tcp://host:port` or `unix:///path`), the store it serves, and that store's identity.

    `upstream` are servers; for a store in etcd, `store` is its name, `upstream` are members of etcd, and `servers` are
    the store's servers.
    """

    place: str
    upstream: net.Endpoints
    identity: bytes = b""
    store: str = ""
    servers: net.Endpoints = net.Endpoints()

    def __str__(self) -> str:
        return self.place

    @property
    def variable(self) -> str:
        """The value of the environment variable for this relay."""
        from urllib.parse import quote

        told = f"&identity={self.identity.hex()}" if self.identity else ""
        told += f"&servers={self.servers}" if self.servers else ""
        place = self.place if self.place.startswith(_TCP) else quote(self.place, safe=":/")
        upstream = f"{_ETCD}{self.upstream}/{quote(self.store)}" if self.store else str(self.upstream)
        return f"{place}?upstream={upstream}{told}"

    @property
    def host(self) -> str:
        """The host of the relay; empty for a Unix socket."""
        return self._endpoint.host if self.place.startswith(_TCP) else ""

    @property
    def _endpoint(self) -> net.Endpoint:
        return net.parse_endpoint(self.place.removeprefix(_TCP), 0)

    def connect(self, deadline: Deadline) -> socket.socket:
        """Connect in one attempt and return the socket; raise ConnectFailed."""
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
    """Return the relay that the environment names, if it serves the store at these addresses (in etcd: of this name).

    Raises ValueError, which quotes the variable, if it is invalid.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return None
    try:
        relay = _parse(text)
    except ValueError as error:
        raise ValueError(f"{VARIABLE}={text!r}: {error}") from None
    served = {_normalized(endpoint) for endpoint in relay.upstream}
    return relay if relay.store == store and served.intersection(map(_normalized, endpoints)) else None


def _normalized(endpoint: net.Endpoint) -> net.Endpoint:
    return net.Endpoint(endpoint.host.rstrip(".").lower(), endpoint.port)


def _parse(text: str) -> RelayAddress:
    from urllib.parse import parse_qsl, unquote

    place, _, query = text.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
    upstream, identity, servers = (options.pop(name, "") for name in ("upstream", "identity", "servers"))
    if options:
        raise ValueError(f"unknown option {next(iter(options))!r}; valid options: upstream, identity, servers")
    if not upstream:
        raise ValueError(f"the store of the relay is missing: add ?upstream=host:port, as in {_EXAMPLE}")
    members, store = _store(upstream)
    if servers and not (identity and store):
        raise ValueError("servers need a store in etcd and its identity: give upstream=etcd://… and identity, too")
    known = net.parse_endpoints(servers, DEFAULT_PORT) if servers else net.Endpoints()
    return RelayAddress(_place(unquote(place)), members, bytes.fromhex(identity), store, known)


def _store(upstream: str) -> tuple[net.Endpoints, str]:
    """Return the addresses in an upstream, and the name of the store if they are etcd's."""
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
        raise ValueError(f"a relay's address is tcp://host:port or unix:///path, as in {_EXAMPLE}")
    endpoint = net.parse_endpoint(place.removeprefix(_TCP), 0)
    if not endpoint.port:
        raise ValueError(f"the relay's port is missing, as in {_EXAMPLE}")
    return f"{_TCP}{endpoint}"
