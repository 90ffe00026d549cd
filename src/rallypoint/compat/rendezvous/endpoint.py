"""Configuration strings, endpoints and "is this host me?", as in `torch.distributed.elastic.rendezvous.utils`.

    k1=v1,k2=v2    spaces around keys and values do not count; of a key given twice the later counts; a value may have =
    host[:port]    a name, an IPv4 address, or an IPv6 address, which needs brackets only before a port

Whether a host is this one is decided by `net`, for all of rallypoint alike.
"""

from __future__ import annotations

from rallypoint import net

__all__ = ["parse_rendezvous_endpoint", "_matches_machine_hostname", "_parse_rendezvous_config", "_try_parse_port"]


def parse_rendezvous_endpoint(endpoint: str | None, default_port: int) -> tuple[str, int]:
    """Read `host[:port]`; nothing is localhost, and a bad host or port a ValueError that quotes the endpoint."""
    host, port = net.parse_endpoint(endpoint, default_port)
    return host, port


def _parse_rendezvous_config(config_str: str) -> dict[str, str]:
    """Read `k1=v1,k2=v2`; a missing key or value raises ValueError."""
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
    """Return a port number, of any size, or None where the text is not ASCII digits alone."""
    return int(port_str) if port_str and port_str.isascii() and port_str.isdecimal() else None


def _matches_machine_hostname(host: str) -> bool:
    """Say whether a name or an address is this machine's: in the end, whether it can be bound."""
    return net.is_this_host(host)
