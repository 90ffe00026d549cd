"""The settings of a relay: its upstream server, its listening addresses, and the limits of every server.

The command line and `Relay` both create them.
"""

from __future__ import annotations

from typing import NamedTuple

from rallypoint import net
from rallypoint.client.routing.relay_address import RelayAddress
from rallypoint.etcd.address import Address
from rallypoint.server.settings import Settings
from rallypoint.store.url import parse_url

__all__ = ["RelaySettings", "UpstreamStore", "upstream_store"]


class RelaySettings(Settings, frozen=True, kw_only=True):
    """A relay's settings; `hosts` may be empty if there is a Unix socket."""

    upstream: str
    """The server, as `tcp://host:port`; several servers of one store, separated by commas; or a store in etcd."""

    port: int = 0

    unix: str | None = None
    """The path of a Unix socket to listen on as well; it may be among `fds`, already bound."""


class UpstreamStore(NamedTuple):
    """The relayed store: the addresses of its servers; for a store in etcd, its address and etcd's endpoints."""

    endpoints: net.Endpoints
    etcd: Address | None = None
    tls: bool = False
    """Whether its URL asks for TLS."""

    @property
    def label(self) -> str:
        """Its URL for messages, without secrets."""
        return f"tcp{'s' * self.tls}://{self.endpoints}" if self.etcd is None else self.etcd.name

    def relay_address(self, url: str) -> RelayAddress:
        """Return the relay address that clients receive for a relay at `url`."""
        return RelayAddress(url, self.endpoints, store="" if self.etcd is None else self.etcd.space)


def upstream_store(url: str) -> UpstreamStore:
    """Return the store to relay; raise ValueError that quotes the URL if it names no store."""
    parsed = parse_url(url)
    if parsed.scheme == "etcd" and not parsed.prefix:
        address = parsed.etcd()
        return UpstreamStore(net.parse_endpoints(",".join(address.endpoints), 0), address)
    if parsed.scheme not in ("tcp", "tcps") or parsed.prefix or "?" in url:
        example = "use tcp://host:port, tcps://host:port, tcp://host:port,host:port, or etcd://host:2379/name"
        raise ValueError(f"upstream {str(parsed)!r} is not a server: {example}")
    endpoints = parsed.endpoints()
    for endpoint in endpoints:
        if not endpoint.port:
            raise ValueError(f"upstream {url!r} has port 0; give the port on which the server listens")
    return UpstreamStore(endpoints, tls=parsed.scheme == "tcps")
