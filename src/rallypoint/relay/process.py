"""The process of a relay: take the sockets, relay, and say every ten seconds if the server cannot be reached.

It listens before it is connected, and goes on listening when it is not any more: whoever comes meanwhile waits, or is
turned away, as `relay/server.py` has it. Its Unix socket's file goes when it ends in order; one that was killed leaves
it, and the next relay there replaces it (`unix_socket.py`).
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
from rallypoint.server.base import ServerBase
from rallypoint.server.running import limited, run, run_child

__all__ = ["main", "serve"]

log = logging.getLogger("rallypoint.relay")

SAY_S = 10.0
"""How often a relay says that it has no server."""

WELL = "ok"
"""What a relay says of its health while it is connected."""


def main() -> None:
    """Run as the child of a `Relay`, told what to do by JSON on standard input."""
    run_child(RelaySettings, serve, "relay")


def serve(settings: RelaySettings, ready: Callable[[str], None] = lambda url: None) -> None:
    """Relay until SIGTERM, SIGINT, or the end of the parent; call `ready` with the URL once it listens.

    Raises AddressTaken where it cannot listen, and ValueError where the upstream is none, or is this relay itself.
    """
    settings = limited(settings)
    store = upstream_store(settings.upstream)
    sockets = _sockets(settings)
    own = {net.Endpoint(*sock.getsockname()[:2]) for sock in sockets if sock.family != socket.AF_UNIX}
    if own.intersection(store.endpoints):
        raise ValueError(f"upstream {store.label!r} is the address of the relay itself")
    run(lambda stop: _relay(settings, store), settings, sockets, ready)


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
def _relay(settings: RelaySettings, store: UpstreamStore) -> Iterator[ServerBase]:
    """Make the relay, on the event loop; in the end, remove the file of its Unix socket."""
    file = None if settings.unix is None else unix_socket.where(settings.unix)
    server = _server(settings, store)
    telling = asyncio.ensure_future(_tell(server))
    try:
        yield server
    finally:
        telling.cancel()
        if settings.unix is not None and file is not None:
            unix_socket.remove(settings.unix, file)


def _server(settings: RelaySettings, store: UpstreamStore) -> RelayServer:
    if store.etcd is None:
        return RelayServer(settings, store.endpoints)
    from rallypoint.store.etcd import Finder

    return RelayServer(settings, net.Endpoints(), store.label, Finder(store.etcd, starts=False))


async def _tell(server: ServerBase) -> None:
    while True:
        await asyncio.sleep(SAY_S)
        health = server.health()
        if health != WELL:
            log.warning("%s", health)
