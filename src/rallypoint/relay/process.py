"""The process of a relay: adopt the sockets, relay, and log every ten seconds while the server is unreachable.

It listens before it is connected, and keeps listening when the connection is lost: new clients then wait or are
refused, by the rules of `relay/server.py`. On an orderly exit it removes the file of its Unix socket. A killed relay
leaves the file, and the next relay at that path replaces it (`unix_socket.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator

from rallypoint import net, unix_socket
from rallypoint.relay.server import RelayServer
from rallypoint.relay.settings import RelaySettings, UpstreamStore, upstream_store
from rallypoint.security.credentials import OPEN, Credentials
from rallypoint.server.event_loop import limited, run, run_child

__all__ = ["main", "serve"]

log = logging.getLogger("rallypoint.relay")

LOG_INTERVAL_S = 10.0
"""How often a relay logs that it has no connection to its server."""

HEALTHY = "ok"
"""The health of a relay while it is connected."""


def main() -> None:
    """Run as the child of a `Relay`, with settings as JSON on standard input."""
    run_child(RelaySettings, serve, "relay")


def serve(
    settings: RelaySettings, credentials: Credentials = OPEN, ready: Callable[[str], None] = lambda url: None
) -> None:
    """Relay until SIGTERM, SIGINT, or the end of the parent; call `ready` with the URL once it listens.

    Raises AddressTaken if it cannot listen, and ValueError if a certificate or the upstream is invalid, or if the
    upstream is this relay.
    """
    settings = limited(settings)
    store = upstream_store(settings.upstream)
    sockets = _sockets(settings)
    own = {net.Endpoint(*sock.getsockname()[:2]) for sock in sockets if sock.family != socket.AF_UNIX}
    if own.intersection(store.endpoints):
        raise ValueError(f"upstream {store.label!r} is the address of the relay itself")
    run(lambda stop: _relay(settings, store, credentials, stop), settings, sockets, ready, credentials)


def _sockets(settings: RelaySettings) -> list[socket.socket]:
    """Return the sockets to listen on, TCP first."""
    if settings.fds:
        return [_adopted(fd) for fd in settings.fds]
    sockets = net.listen(settings.hosts, settings.port) if settings.hosts else []
    return sockets if settings.unix is None else [*sockets, unix_socket.listen(settings.unix)]


def _adopted(fd: int) -> socket.socket:
    with contextlib.suppress(OSError):
        sock = socket.socket(fileno=fd)
        if sock.family == socket.AF_UNIX and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            sock.set_inheritable(False)
            return sock
        sock.detach()
    return net.adopt(fd)


@contextlib.contextmanager
def _relay(
    settings: RelaySettings, store: UpstreamStore, credentials: Credentials, stop: Callable[[], None]
) -> Iterator[RelayServer]:
    """Create the relay on the event loop; at the end, remove the file of its Unix socket."""
    file = None if settings.unix is None else unix_socket.where(settings.unix)
    server = _server(settings, store, credentials)
    server.listener.on_idle = stop
    logging_task = asyncio.ensure_future(_log_outage(server))
    try:
        yield server
    finally:
        logging_task.cancel()
        if settings.unix is not None and file is not None:
            unix_socket.remove(settings.unix, file)


def _server(settings: RelaySettings, store: UpstreamStore, credentials: Credentials) -> RelayServer:
    if store.etcd is None:
        return RelayServer(settings, store.endpoints, credentials=credentials, tls=store.tls)
    from rallypoint.store.etcd import ServerLookup

    lookup = ServerLookup(store.etcd, starts=False)
    return RelayServer(settings, net.Endpoints(), store.label, lookup, credentials)


async def _log_outage(server: RelayServer) -> None:
    while True:
        await asyncio.sleep(LOG_INTERVAL_S)
        health = server.health()
        if health != HEALTHY:
            log.warning("%s", health)
