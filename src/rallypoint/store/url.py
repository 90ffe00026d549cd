"""`connect(url)`: one line of text that names a store, for command lines and environment variables.

    memory://            a new store in this process
    memory://NAME        the store of that name in this process
    file:///PATH         a FileStore
    tcp://HOST[:PORT]    a TCPStore client, port 29400 where none is given

A key prefix follows as a path (`tcp://head:29400/job-7`), for files as `?prefix=job-7`, which works for all of them.
`?timeout=SECONDS` sets how long blocking calls wait.
"""

from __future__ import annotations

import threading

from rallypoint import net
from rallypoint.deadline import Timeout, seconds
from rallypoint.store.base import DEFAULT_TIMEOUT_S, Store
from rallypoint.store.memory import HashStore
from rallypoint.store.prefix import PrefixStore
from rallypoint.store.tcp import TCPStore

__all__ = ["connect"]

DEFAULT_PORT = 29400

_named: dict[str, HashStore] = {}
_named_lock = threading.Lock()


def connect(url: str, timeout: Timeout | None = None) -> Store:
    """Open the store that a URL names; `timeout` overrides the URL's, and bounds connecting too.

    Raises ValueError that quotes a URL it cannot read, and what the store itself raises (ConnectFailed, CorruptFile).
    """
    from urllib.parse import parse_qsl, unquote, urlsplit  # costs as much as all the rest of `import rallypoint`

    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    prefix = options.pop("prefix", "")
    wait_s = _timeout(url, options.pop("timeout", None)) if timeout is None else seconds(timeout)
    if options or parts.fragment:
        unknown = next(iter(options), "#" + parts.fragment)
        raise ValueError(f"store URL {url!r}: {unknown!r} is not an option; there are prefix and timeout")
    path = unquote(parts.path)
    if parts.scheme == "file":
        store = _file(url, parts.netloc, path, wait_s)
    else:
        store = (
            _memory(parts.netloc, wait_s) if parts.scheme == "memory" else _tcp(url, parts.scheme, parts.netloc, wait_s)
        )
        prefix = prefix or path.strip("/")
    return PrefixStore(prefix, store) if prefix else store


def _timeout(url: str, text: str | None) -> float:
    try:
        return DEFAULT_TIMEOUT_S if text is None else seconds(float(text))
    except ValueError:
        raise ValueError(f"store URL {url!r}: timeout must be seconds, not {text!r}") from None


def _memory(name: str, timeout_s: float) -> Store:
    if not name:
        return HashStore(timeout_s)
    with _named_lock:
        store = _named.setdefault(name, HashStore()).clone()
    store.set_timeout(timeout_s)
    return store


def _file(url: str, host: str, path: str, timeout_s: float) -> Store:
    if host not in ("", "localhost") or not path.strip("/"):
        raise ValueError(f"store URL {url!r}: a file is given as file:///absolute/path")
    from rallypoint.store.file import FileStore

    return FileStore(path, timeout=timeout_s)


def _tcp(url: str, scheme: str, place: str, timeout_s: float) -> Store:
    if scheme != "tcp":
        raise ValueError(f"store URL {url!r}: {scheme!r} is no kind of store; there are memory, file and tcp")
    if not place or "@" in place:
        raise ValueError(f"store URL {url!r}: give the server as tcp://host:port")
    try:
        host, port = net.parse_endpoint(place, DEFAULT_PORT)
    except ValueError as error:
        raise ValueError(f"store URL {url!r}: {error}") from None
    return TCPStore(host, port, timeout=timeout_s)
