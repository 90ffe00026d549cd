"""`connect(url)`: open a store by URL, for command lines and environment variables.

    memory://            a new store in this process
    memory://NAME        the store of that name in this process
    file:///PATH         a FileStore
    tcp://HOST[:PORT]    a TCPStore client; the default port is 29400
    tcp://HOST[:PORT],HOST[:PORT]    the same, for a store with several servers: the first that replies; if that is
                         lost, the session continues on another
    tcps://HOST[:PORT]   the same by TLS; options are ca (the CA of the server), cert and key (of this client)
    etcd://HOST[:PORT],HOST[:PORT]/NAME    an EtcdStore: the members of a cluster, and the name of the store
                         (docs/etcd.md); further options are ca, cert, key, user, password and host

If RALLYPOINT_RELAY names a relay of the store, sessions start there (`client/routing/relay_address.py`).
A key prefix is given as the path (`tcp://head:29400/job-7`), or for any store as `?prefix=job-7`.
`?timeout=SECONDS` sets the default timeout of blocking calls.
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
from rallypoint.security.client_security import ClientSecurity
from rallypoint.security.credentials import Credentials, resolve
from rallypoint.store.base import Store
from rallypoint.store.memory import HashStore
from rallypoint.store.prefix import PrefixStore
from rallypoint.store.tcp import reach
from rallypoint.store.view import DEFAULT_TIMEOUT_S

__all__ = ["StoreURL", "connect", "parse_url", "shown_url"]

DEFAULT_PORT = 29400
TLS_OPTIONS = ("ca", "cert", "key")
"""The query parameters of a tcps:// URL."""

_named: dict[str, HashStore] = {}
_named_lock = threading.Lock()


class StoreURL(NamedTuple):
    """A parsed store URL."""

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

    def security(self, credentials: Credentials | None = None) -> ClientSecurity:
        """Return how to connect to the servers: with these credentials, or those of the environment, and the URL's."""
        if self.scheme != "tcps":
            return ClientSecurity(credentials)
        files = {f"tls_{name}": self.options[name] for name in TLS_OPTIONS if name in self.options}
        try:
            given = resolve(None if credentials is None else credentials.environ(), **files)
        except ValueError as error:
            raise ValueError(f"store URL {shown_url(self.text)!r}: {error}") from None
        return ClientSecurity(given, tls=True)

    def endpoint(self) -> net.Endpoint:
        """Return the server of a tcp:// URL; raise ValueError if it names several."""
        first, *others = self.endpoints()
        if others:
            raise ValueError(f"store URL {shown_url(self.text)!r}: expected one server, got several: {self.place}")
        return first

    def endpoints(self) -> net.Endpoints:
        """Return the servers of a tcp:// URL, in order."""
        if not self.place or "@" in self.place:
            raise ValueError(f"store URL {shown_url(self.text)!r}: give the server as tcp://host:port")
        try:
            return net.parse_endpoints(self.place, DEFAULT_PORT)
        except ValueError as error:
            raise ValueError(f"store URL {shown_url(self.text)!r}: {error}") from None


def parse_url(url: str, timeout: Timeout | None = None) -> StoreURL:
    """Parse a store URL; raise ValueError, which quotes it, if it is invalid."""
    from urllib.parse import parse_qsl, unquote, urlsplit  # costs as much as the rest of `import rallypoint`

    scheme, slashes, rest = url.partition("://")
    place = re.split("[/?#]", rest, maxsplit=1)[0]  # urlsplit refuses a list with brackets
    parts = urlsplit(scheme + slashes + rest[len(place) :])
    if parts.scheme not in ("memory", "file", "tcp", "tcps", "etcd"):
        known = "valid schemes: memory, file, tcp, tcps, etcd" + "; a server is tcp://HOST:PORT" * (not slashes)
        raise ValueError(f"store URL {shown_url(url)!r}: unknown scheme {parts.scheme!r}; {known}")
    try:
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError:  # its message quotes the text, which may be a password
        raise ValueError(f"store URL {shown_url(url)!r}: options must be name=value, separated by &") from None
    prefix, wait = options.pop("prefix", ""), options.pop("timeout", None)
    known_options = ACCESS_OPTIONS if parts.scheme == "etcd" else TLS_OPTIONS if parts.scheme == "tcps" else ()
    unknown = [*(option for option in options if option not in known_options), *(["#"] if parts.fragment else [])]
    if unknown:
        valid = ", ".join([*known_options, "prefix", "timeout"])
        raise ValueError(f"store URL {shown_url(url)!r}: unknown option {unknown[0]!r}; valid options: {valid}")
    path = unquote(parts.path)
    if parts.scheme not in ("file", "etcd"):
        prefix = prefix or path.strip("/")
    wait_s = _timeout(url, wait) if timeout is None else seconds(timeout)
    return StoreURL(url, parts.scheme, place, path, prefix, wait_s, options)


def connect(url: str, timeout: Timeout | None = None, *, credentials: Credentials | None = None) -> Store:
    """Open the store that a URL names; `timeout` overrides the URL's, and limits connecting too.

    `credentials` are the token and the files for TLS of a tcp://, tcps:// or etcd:// store, by default those of the
    environment. Raises ValueError, which quotes an invalid URL, and the errors of the store (ConnectFailed,
    AuthenticationFailed, CorruptFile).
    """
    parsed = parse_url(url, timeout)
    store: Store
    if parsed.scheme == "file":
        store = _file(parsed)
    elif parsed.scheme == "memory":
        store = _memory(parsed.place, parsed.timeout_s)
    elif parsed.scheme == "etcd":
        store = _etcd(parsed, credentials)
    else:
        store = reach(parsed.endpoints(), parsed.timeout_s, parsed.security(credentials))
    return PrefixStore(parsed.prefix, store) if parsed.prefix else store


def shown_url(url: str) -> str:
    """Return a URL for display, without a password: the values of unknown options may be one, misspelled."""
    known = "ca|cert|key|user|host|prefix|timeout"
    hidden = re.sub(rf"([?&](?!(?:{known})=)[^=&#]*=)[^&#]*", r"\1…", url)
    return re.sub(r"(://[^/?#@]*:)[^/?#@]*@", r"\1…@", hidden)


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
        raise ValueError(f"store URL {shown_url(parsed.text)!r}: give a file as file:///absolute/path")
    from rallypoint.store.file import FileStore

    return FileStore(parsed.path, timeout=parsed.timeout_s)


def _etcd(parsed: StoreURL, credentials: Credentials | None) -> Store:
    address = parsed.etcd()
    from rallypoint.store.etcd import EtcdStore

    return EtcdStore.at(address, parsed.timeout_s, credentials)
