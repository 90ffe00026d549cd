"""What a relay can be told: which server it relays, where it listens, and the limits that every server has.

The command line and `Relay` both fill this in.
"""

from __future__ import annotations

from rallypoint import net
from rallypoint.server.settings import Settings
from rallypoint.store.url import parse_url

__all__ = ["RelaySettings", "upstream_endpoints"]


class RelaySettings(Settings, frozen=True, kw_only=True):
    """A relay's settings; `hosts` may be empty where there is a Unix socket."""

    upstream: str
    """The server, as `tcp://host:port`, or several that are one store, with commas in between."""

    port: int = 0

    unix: str | None = None
    """The path of a Unix socket to listen on, too; `fds` may have it, bound already."""


def upstream_endpoints(url: str) -> net.Endpoints:
    """Return the addresses of the server to relay; raise ValueError that quotes the URL where it names none."""
    parsed = parse_url(url)
    if parsed.scheme != "tcp" or parsed.prefix or "?" in url:
        raise ValueError(f"upstream {url!r} is not a server: give tcp://host:port, or tcp://host:port,host:port")
    endpoints = parsed.endpoints()
    for endpoint in endpoints:
        if not endpoint.port:
            raise ValueError(f"upstream {url!r} has port 0; give the number that the server has taken")
    return endpoints
