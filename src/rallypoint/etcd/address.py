"""The address of a store in etcd: `etcd://HOST[:PORT],HOST[:PORT],…/NAME?ca=…&cert=…&key=…&user=…&password=…&host=…`.

`host` is where a server listens that has to be started for the store; where it is not given, at this machine's own
address on the way to etcd.
"""

from __future__ import annotations

from typing import NamedTuple

from rallypoint import net

__all__ = ["DEFAULT_PORT", "DEFAULT_SPACE", "OPTIONS", "Access", "Address", "parse"]

DEFAULT_PORT = 2379
"""Where etcd listens where nobody says."""

DEFAULT_SPACE = "rallypoint"
"""The name of the store, which is the prefix of all its keys, where nobody says."""


class Access(NamedTuple):
    """How to be let in: files with the authority, our certificate and its key; a user and a password."""

    ca: str = ""
    cert: str = ""
    key: str = ""
    user: str = ""
    password: str = ""


OPTIONS = (*Access._fields, "host")
"""What can be said after the question mark."""


class Address(NamedTuple):
    """The endpoints of a cluster, the prefix of all keys of a store, and how to be let in."""

    endpoints: tuple[str, ...]
    space: str
    access: Access
    host: str = ""
    """Where a server that is started for the store listens; empty: to be found out."""

    @property
    def name(self) -> str:
        """How errors call it, without what is secret."""
        return f"etcd://{','.join(self.endpoints)}/{self.space}"

    @property
    def public_url(self) -> str:
        """The URL for others on this machine: without the user, and where a server of ours would listen."""
        return self._replace(access=self.access._replace(user="", password=""), host="").url

    @property
    def url(self) -> str:
        """The whole of it as a URL, with what is secret."""
        from urllib.parse import quote, urlencode

        given = {**self.access._asdict(), "host": self.host}
        options = urlencode({option: value for option, value in given.items() if value})
        return f"etcd://{','.join(self.endpoints)}/{quote(self.space)}{'?' if options else ''}{options}"


def parse(place: str, space: str, options: dict[str, str]) -> Address:
    """Read an address from its parts; raise ValueError that says what is wrong."""
    if not place or "@" in place:
        raise ValueError("give the members as etcd://host:2379,host:2379/name, a user as ?user=NAME&password=WORD")
    endpoints = tuple(map(str, net.parse_endpoints(place, DEFAULT_PORT)))
    if bool(options.get("cert")) != bool(options.get("key")):
        raise ValueError("a certificate and its key come together: give both cert= and key=")
    if bool(options.get("user")) != bool(options.get("password")):
        raise ValueError("give both user= and password=")
    access = Access(**{name: value for name, value in options.items() if name != "host"})
    return Address(endpoints, space.strip("/") or DEFAULT_SPACE, access, options.get("host", ""))
