"""Parse option strings and endpoints, and recognize this host, as in `torch.distributed.elastic.rendezvous.utils`.

    k1=v1,k2=v2    spaces around keys and values are ignored; the last of duplicate keys wins; a value may contain =
    host[:port]    a name, an IPv4 address, or an IPv6 address, which needs brackets only before a port

`net` decides whether a host is this one, for all of rallypoint.
"""

from __future__ import annotations

from rallypoint import net

__all__ = ["parse_rendezvous_endpoint", "_matches_machine_hostname", "_parse_rendezvous_config", "_try_parse_port"]


def parse_rendezvous_endpoint(endpoint: str | None, default_port: int) -> tuple[str, int]:
    """Parse `host[:port]`; empty means localhost. Raises ValueError, with the endpoint, for a bad host or port."""
    host, port = net.parse_endpoint(endpoint, default_port)
    return host, port


def _parse_rendezvous_config(config_str: str) -> dict[str, str]:
    """Parse `k1=v1,k2=v2`. Raises ValueError for a missing key or value."""
    config: dict[str, str] = {}
    for option in config_str.split(",") if config_str.strip() else ():
        key, _, value = (part.strip() for part in option.partition("="))
        if not key:
            raise ValueError(f"{option!r} has no key: the rendezvous options {config_str!r} must be k1=v1,k2=v2")
        if not value:
            raise ValueError(f"the rendezvous option {key!r} has no value in {config_str!r}")
        config[key] = value
    return config


def _try_parse_port(port_str: str) -> int | None:
    """Return a port number, of any size, or None if the text is not only ASCII digits."""
    return int(port_str) if port_str and port_str.isascii() and port_str.isdecimal() else None


def _matches_machine_hostname(host: str) -> bool:
    """Return whether a name or address is this machine's: ultimately, whether it can be bound."""
    return net.is_this_host(host)
