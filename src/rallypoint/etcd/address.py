"""The address of a store in etcd: `etcd://HOST[:PORT],HOST[:PORT],…/NAME?ca=…&cert=…&key=…&user=…&password=…&host=…`.

`host` is the address on which a server that is started for the store listens; by default, this machine's address on
the route to etcd.
"""

from __future__ import annotations

from typing import NamedTuple

from rallypoint import net

__all__ = ["DEFAULT_PORT", "DEFAULT_SPACE", "OPTIONS", "Access", "Address", "parse"]

DEFAULT_PORT = 2379
"""etcd's default client port."""

DEFAULT_SPACE = "rallypoint"
"""The default name of a store, which is the prefix of all its keys."""


class Access(NamedTuple):
    """Credentials: the files of the CA, the client certificate and its key; user and password."""

    ca: str = ""
    cert: str = ""
    key: str = ""
    user: str = ""
    password: str = ""


OPTIONS = (*Access._fields, "host")
"""The query parameters of the URL."""


class Address(NamedTuple):
    """The endpoints of a cluster, the key prefix of a store, and credentials."""

    endpoints: tuple[str, ...]
    space: str
    access: Access
    host: str = ""
    """The address on which a server that is started for the store listens; "" for the default."""

    @property
    def name(self) -> str:
        """Its URL for messages, without secrets."""
        return f"etcd://{','.join(self.endpoints)}/{self.space}"

    @property
    def public_url(self) -> str:
        """The URL without user, password and `host`, for other processes on this machine."""
        return self._replace(access=self.access._replace(user="", password=""), host="").url

    @property
    def url(self) -> str:
        """The full URL, with secrets."""
        from urllib.parse import quote, urlencode

        given = {**self.access._asdict(), "host": self.host}
        options = urlencode({option: value for option, value in given.items() if value})
        return f"etcd://{','.join(self.endpoints)}/{quote(self.space)}{'?' if options else ''}{options}"


def parse(place: str, space: str, options: dict[str, str]) -> Address:
    """Parse an address from the parts of its URL; raise ValueError with the reason if it is invalid."""
    if not place or "@" in place:
        raise ValueError("write the endpoints as etcd://host:2379,host:2379/name, a user as ?user=NAME&password=WORD")
    endpoints = tuple(map(str, net.parse_endpoints(place, DEFAULT_PORT)))
    if bool(options.get("cert")) != bool(options.get("key")):
        raise ValueError("a certificate needs its key: give both cert= and key=")
    if bool(options.get("user")) != bool(options.get("password")):
        raise ValueError("give both user= and password=")
    access = Access(**{name: value for name, value in options.items() if name != "host"})
    return Address(endpoints, space.strip("/") or DEFAULT_SPACE, access, options.get("host", ""))
