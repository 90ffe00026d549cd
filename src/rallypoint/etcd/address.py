"""The address of a store in etcd: `etcd://HOST[:PORT],HOST[:PORT],…/SPACE?ca=…&cert=…&key=…&user=…&password=…&run=…`."""

from __future__ import annotations

from typing import NamedTuple

from rallypoint import net

__all__ = ["DEFAULT_PORT", "DEFAULT_SPACE", "OPTIONS", "Access", "Address", "parse"]

DEFAULT_PORT = 2379
"""Where etcd listens where nobody says."""

DEFAULT_SPACE = "rallypoint"
"""The prefix of all keys where nobody says."""


class Access(NamedTuple):
    """How to be let in: files with the authority, our certificate and its key; a user and a password."""

    ca: str = ""
    cert: str = ""
    key: str = ""
    user: str = ""
    password: str = ""


OPTIONS = (*Access._fields, "run")
"""What can be said after the question mark."""


class Address(NamedTuple):
    """The endpoints of a cluster, the prefix of all keys of a store, and how to be let in."""

    endpoints: tuple[str, ...]
    space: str
    access: Access
    run: str = ""
    """The run that this is part of: what is stored is gone when nobody of it is left (`etcd/run.py`)."""

    @property
    def name(self) -> str:
        """How errors call it, without what is secret."""
        return f"etcd://{','.join(self.endpoints)}/{self.space}"


def parse(place: str, space: str, options: dict[str, str]) -> Address:
    """Read an address from its parts; raise ValueError that says what is wrong."""
    if not place or "@" in place:
        raise ValueError("give the members as etcd://host:2379,host:2379/space, a user as ?user=NAME&password=WORD")
    endpoints = tuple(map(str, net.parse_endpoints(place, DEFAULT_PORT)))
    if bool(options.get("cert")) != bool(options.get("key")):
        raise ValueError("a certificate and its key come together: give both cert= and key=")
    if bool(options.get("user")) != bool(options.get("password")):
        raise ValueError("give both user= and password=")
    access = Access(**{name: value for name, value in options.items() if name != "run"})
    return Address(endpoints, space.strip("/") or DEFAULT_SPACE, access, options.get("run", ""))
