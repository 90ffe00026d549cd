"""What a relay can be told: which server it relays, where it listens, and the limits that every server has.

The command line and `Relay` both fill this in.
"""

from __future__ import annotations

from typing import NamedTuple

from rallypoint import net
from rallypoint.etcd.address import Address
from rallypoint.server.settings import Settings
from rallypoint.store.relay_address import RelayAddress
from rallypoint.store.url import parse_url

__all__ = ["RelaySettings", "UpstreamStore", "upstream_store"]


class RelaySettings(Settings, frozen=True, kw_only=True):
    """A relay's settings; `hosts` may be empty where there is a Unix socket."""

    upstream: str
    """The server, as `tcp://host:port`, or several that are one store, with commas in between; or a store in etcd."""

    port: int = 0

    unix: str | None = None
    """The path of a Unix socket to listen on, too; `fds` may have it, bound already."""


class UpstreamStore(NamedTuple):
    """The store that is relayed: the addresses of its servers, or where it is in etcd, and then those of etcd."""

    endpoints: net.Endpoints
    etcd: Address | None = None

    @property
    def label(self) -> str:
        """How messages call it, as a URL, without what is secret."""
        return f"tcp://{self.endpoints}" if self.etcd is None else self.etcd.name

    def relay_address(self, place: str) -> RelayAddress:
        """Return what clients are told of a relay at some place."""
        return RelayAddress(place, self.endpoints, store="" if self.etcd is None else self.etcd.space)


def upstream_store(url: str) -> UpstreamStore:
    """Return the store to relay; raise ValueError that quotes the URL where it names none."""
    parsed = parse_url(url)
    if parsed.scheme == "etcd" and not parsed.prefix:
        address = parsed.etcd()
        return UpstreamStore(net.parse_endpoints(",".join(address.endpoints), 0), address)
    if parsed.scheme != "tcp" or parsed.prefix or "?" in url:
        example = "give tcp://host:port, tcp://host:port,host:port, or etcd://host:2379/name"
        raise ValueError(f"upstream {str(parsed)!r} is not a server: {example}")
    endpoints = parsed.endpoints()
    for endpoint in endpoints:
        if not endpoint.port:
            raise ValueError(f"upstream {url!r} has port 0; give the number that the server has taken")
    return UpstreamStore(endpoints)
