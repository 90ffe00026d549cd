"""`connect(url)`: one line of text that names a store, for command lines and environment variables.

    memory://            a new store in this process
    memory://NAME        the store of that name in this process
    file:///PATH         a FileStore
    tcp://HOST[:PORT]    a TCPStore client, port 29400 where none is given
    tcp://HOST[:PORT],HOST[:PORT]    the same, of a store that has several servers: the first that answers, and when
                         that is lost, another, with the same session
    etcd://HOST[:PORT],HOST[:PORT]/NAME    an EtcdStore: the members of a cluster, and the name of a store there
                         (docs/etcd.md); further options are ca, cert, key, user, password and host

Where RALLYPOINT_RELAY names a relay of the store, its sessions begin there (`store/relay_address.py`).
A key prefix follows as a path (`tcp://head:29400/job-7`), for files as `?prefix=job-7`, which works for all of them.
`?timeout=SECONDS` sets how long blocking calls wait.
"""

from __future__ import annotations

import re
import threading
from typing import NamedTuple

from rallypoint import net
from rallypoint.deadline import Timeout, seconds
from rallypoint.etcd.address import OPTIONS as ACCESS_OPTIONS
from rallypoint.etcd.address import Address
from rallypoint.etcd.address import parse as parse_address
from rallypoint.store.base import Store
from rallypoint.store.memory import HashStore
from rallypoint.store.prefix import PrefixStore
from rallypoint.store.tcp import reach
from rallypoint.store.view import DEFAULT_TIMEOUT_S

__all__ = ["StoreURL", "connect", "parse_url", "shown_url"]

DEFAULT_PORT = 29400

_named: dict[str, HashStore] = {}
_named_lock = threading.Lock()


class StoreURL(NamedTuple):
    """A store URL, taken apart."""

    text: str
    scheme: str
    place: str
    path: str
    prefix: str
    timeout_s: float
    options: dict[str, str]

    def __str__(self) -> str:
        return shown_url(self.text)

    def etcd(self) -> Address:
        """Return the address of an etcd:// URL."""
        try:
            return parse_address(self.place, self.path, self.options)
        except ValueError as error:
            raise ValueError(f"store URL {shown_url(self.text)!r}: {error}") from None

    def endpoint(self) -> net.Endpoint:
        """Return the server of a tcp:// URL, for those to whom only one is of use."""
        first, *others = self.endpoints()
        if others:
            raise ValueError(
                f"store URL {shown_url(self.text)!r}: only one server can be given here, and these are {self.place}"
            )
        return first

    def endpoints(self) -> net.Endpoints:
        """Return the servers of a tcp:// URL, in their order."""
        if not self.place or "@" in self.place:
            raise ValueError(f"store URL {shown_url(self.text)!r}: give the server as tcp://host:port")
        try:
            return net.parse_endpoints(self.place, DEFAULT_PORT)
        except ValueError as error:
            raise ValueError(f"store URL {shown_url(self.text)!r}: {error}") from None


def parse_url(url: str, timeout: Timeout | None = None) -> StoreURL:
    """Take a store URL apart; raise ValueError that quotes it where it makes no sense."""
    from urllib.parse import parse_qsl, unquote, urlsplit  # costs as much as all the rest of `import rallypoint`

    scheme, slashes, rest = url.partition("://")
    place = re.split("[/?#]", rest, maxsplit=1)[0]  # by ourselves: urlsplit refuses a list with brackets in it
    parts = urlsplit(scheme + slashes + rest[len(place) :])
    if parts.scheme not in ("memory", "file", "tcp", "etcd"):
        known = "there are memory, file, tcp and etcd"
        raise ValueError(f"store URL {shown_url(url)!r}: {parts.scheme!r} is no kind of store; {known}")
    try:
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError:  # which quotes what is wrong, and that may be a password
        raise ValueError(f"store URL {shown_url(url)!r}: options are name=value, with & in between") from None
    prefix, wait = options.pop("prefix", ""), options.pop("timeout", None)
    known_options = ACCESS_OPTIONS if parts.scheme == "etcd" else ()
    unknown = [*(option for option in options if option not in known_options), *(["#"] if parts.fragment else [])]
    if unknown:
        there_are = ", ".join([*known_options, "prefix and timeout"])
        raise ValueError(f"store URL {shown_url(url)!r}: {unknown[0]!r} is not an option; there are {there_are}")
    path = unquote(parts.path)
    if parts.scheme not in ("file", "etcd"):
        prefix = prefix or path.strip("/")
    wait_s = _timeout(url, wait) if timeout is None else seconds(timeout)
    return StoreURL(url, parts.scheme, place, path, prefix, wait_s, options)


def connect(url: str, timeout: Timeout | None = None) -> Store:
    """Open the store that a URL names; `timeout` overrides the URL's, and bounds connecting too.

    Raises ValueError that quotes a URL it cannot read, and what the store itself raises (ConnectFailed, CorruptFile).
    """
    parsed = parse_url(url, timeout)
    store: Store
    if parsed.scheme == "file":
        store = _file(parsed)
    elif parsed.scheme == "memory":
        store = _memory(parsed.place, parsed.timeout_s)
    elif parsed.scheme == "etcd":
        store = _etcd(parsed)
    else:
        store = reach(parsed.endpoints(), parsed.timeout_s)
    return PrefixStore(parsed.prefix, store) if parsed.prefix else store


def shown_url(url: str) -> str:
    """Return a URL for people, without its password, wherever that stands."""
    return re.sub(r"(://[^/?#@]*:)[^/?#@]*@", r"\1…@", re.sub(r"([?&]password=)[^&]*", r"\1…", url))


def _timeout(url: str, text: str | None) -> float:
    try:
        return DEFAULT_TIMEOUT_S if text is None else seconds(float(text))
    except ValueError:
        raise ValueError(f"store URL {shown_url(url)!r}: timeout must be seconds, not {text!r}") from None


def _memory(name: str, timeout_s: float) -> Store:
    if not name:
        return HashStore(timeout_s)
    with _named_lock:
        store = _named.setdefault(name, HashStore()).clone()
    store.set_timeout(timeout_s)
    return store


def _file(parsed: StoreURL) -> Store:
    if parsed.place not in ("", "localhost") or not parsed.path.strip("/"):
        raise ValueError(f"store URL {shown_url(parsed.text)!r}: a file is given as file:///absolute/path")
    from rallypoint.store.file import FileStore

    return FileStore(parsed.path, timeout=parsed.timeout_s)


def _etcd(parsed: StoreURL) -> Store:
    address = parsed.etcd()
    from rallypoint.store.etcd import EtcdStore

    return EtcdStore.at(address, parsed.timeout_s)
