"""Servers and relays with every kind of credentials, as children of the test, and what they hold."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tests.security.certs import certificate, node
from tests.security.strangers import KEY, VALUE

import rallypoint
from rallypoint.security.credentials import Credentials

__all__ = ["KINDS", "TOKEN", "Protected", "credentials_of", "protected", "started"]

TOKEN = "token-of-the-tests-0123456789abcdef"
KINDS = ("token", "tls", "token and tls", "mutual tls", "token and mutual tls")
"""The ways to protect a server."""

_HELD = (
    "keys", "queues", "waiting", "watches", "leased_keys", "objects", "revision", "namespaces", "rounds", "sessions",
    "refused_sessions", "refused_connections",
)  # fmt: skip
_RELAYED = (
    "channels", "channels_opened", "frames_sent", "bytes_sent", "torch_clients", "requests_asked", "requests_sent",
    "rounds", "round_ports", "upstream_connections",
)  # fmt: skip


Inside = Callable[[], contextlib.AbstractContextManager[object]]


class Protected(NamedTuple):
    """A server, a relay of it, and a client of the server that may do everything."""

    kind: str
    credentials: Credentials
    server: rallypoint.Server
    relay: rallypoint.Relay
    store: rallypoint.Store
    inside: Inside
    """Enters the network that they are in."""

    def held(self) -> dict[str, Any]:
        """Return what an authenticated client sees: the state of the server, and what the relay has forwarded."""
        with self.inside():
            server, relay = self.server.statistics(), self.relay.statistics()
        return {
            "values": {key: self.store.get(key) for key in self.store.list_keys()},
            "queue": self.store.queue_len("queue"),
            **{name: server[name] for name in _HELD},
            "relay": {name: relay[name] for name in _RELAYED},
        }

    def connections(self) -> tuple[int, int]:
        """Return how many connections the server and the relay have."""
        with self.inside():
            server, relay = self.server.statistics(), self.relay.statistics()
        return server["connections"], relay["connections"]

    def secrets(self) -> list[bytes]:
        """Return what no stranger may see: values, keys, versions, process ids, addresses."""
        told = [TOKEN, KEY, rallypoint.__version__, str(self.server.pid), str(self.relay.pid), str(self.server.port)]
        return [VALUE, *(word.encode() for word in told)]


def credentials_of(kind: str, place: Path) -> Credentials:
    """Return credentials with the certificate in a directory, for servers and for clients that may use them."""
    token = TOKEN if "token" in kind else ""
    if "tls" not in kind:
        return Credentials(token=token)
    return node(place, place if "mutual" in kind else None, token)


@contextlib.contextmanager
def protected(kind: str, place: Path, host: str, inside: Inside = contextlib.nullcontext) -> Iterator[Protected]:
    """Start a server and its relay; the caller is `inside`."""
    known = credentials_of(kind, place)
    with contextlib.ExitStack() as undo:
        server = undo.enter_context(rallypoint.Server(host, credentials=known))
        relay = undo.enter_context(rallypoint.Relay(server.url, host, credentials=known))
        store = undo.enter_context(rallypoint.connect(server.url, credentials=known))
        store.set(KEY, VALUE)
        store.queue_push("queue", b"item")
        with rallypoint.connect(relay.url, credentials=known) as through:
            assert through.get(KEY) == VALUE, "the relay is connected, and lets those in who may"
        yield Protected(kind, known, server, relay, store, inside)


@contextlib.contextmanager
def started(place: Path, host: str, inside: Inside = contextlib.nullcontext) -> Iterator[dict[str, Protected]]:
    """Start servers and relays of all kinds on a host, at once; `inside` is where their processes are started."""
    certificates = certificate(place / "tls", host, "localhost")

    def start(kind: str) -> tuple[contextlib.ExitStack, Protected]:
        with inside(), contextlib.ExitStack() as undo:
            found = undo.enter_context(protected(kind, certificates, host, inside))
            return undo.pop_all(), found

    with contextlib.ExitStack() as undo, ThreadPoolExecutor(len(KINDS)) as pool:
        begun = [pool.submit(start, kind) for kind in KINDS]
        for one in begun:
            undo.push(one.result()[0])
        yield {kind: one.result()[1] for kind, one in zip(KINDS, begun, strict=True)}
