"""The process of a store server: open the sockets, create the server that the settings ask for, and run it.

The state is in memory, in a data directory, or in etcd; the code for each is imported only when needed.
`event_loop.py` runs the server, and knows when it ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rallypoint import net
from rallypoint.errors import RallypointError
from rallypoint.etcd.address import Address
from rallypoint.security.client_security import ClientSecurity
from rallypoint.security.credentials import OPEN, Credentials
from rallypoint.server.admission import Admission
from rallypoint.server.event_loop import Served, Serving, limited, run, run_child
from rallypoint.server.server import StoreServer
from rallypoint.server.settings import Settings
from rallypoint.store.url import parse_url

__all__ = ["main", "serve"]

log = logging.getLogger("rallypoint.server")

SWITCH_S = 0.0005
"""Interval at which the event loop yields the interpreter to the log's thread; Python's default of 5 ms is as long as
dozens of commits."""


def main() -> None:
    """Run as the child of a `Server`, with settings in JSON on standard input."""
    run_child(Settings, serve, "server")


def serve(settings: Settings, credentials: Credentials = OPEN, ready: Callable[[str], None] = lambda url: None) -> None:
    """Serve until SIGTERM, SIGINT, or the end of the parent; call `ready` with the URL once clients can connect.

    Raises AddressTaken or ValueError if the sockets, the data directory or a certificate cannot be used, NoQuorum if
    the storage is etcd and does not answer, and StorageFailed once the data directory cannot be written any more.
    """
    settings = limited(settings)
    if settings.data_dir is not None:
        sys.setswitchinterval(SWITCH_S)
    make = _serving(settings, credentials)
    sockets = [net.adopt(fd) for fd in settings.fds] or net.listen(settings.hosts, settings.port)
    if settings.storage is not None:
        _check_reachable(_address(settings.storage), [str(sock.getsockname()[0]) for sock in sockets])
    run(make, settings, sockets, ready, credentials)


def _serving(settings: Settings, credentials: Credentials) -> Serving:
    """Return the factory of the server; raise ValueError if the storage URL or a certificate is invalid."""
    admission = Admission(credentials)
    if settings.storage is None:
        return lambda stop: _store_server(settings, admission, stop)
    address, security = _address(settings.storage), ClientSecurity(credentials)
    return lambda stop: _replicated_server(settings, address, admission, security, stop)


def _check_reachable(address: Address, hosts: list[str]) -> None:
    """Raise ValueError if the server listens on loopback only, but etcd runs on other machines."""
    members = [net.parse_endpoint(member, 0).host for member in address.endpoints]
    if all(map(net.is_loopback, hosts)) and not all(map(net.is_loopback, members)):
        raise ValueError(
            f"a server of {address.name} is listed in etcd for other machines, but listens on {hosts[0]}, which they "
            f"cannot reach: give an address that they can (serve --host)"
        )


@contextlib.contextmanager
def _store_server(settings: Settings, admission: Admission, stop: Callable[[], None]) -> Iterator[StoreServer]:
    """Create a server with its state in memory or a data directory; raise the error of its storage in the end."""
    server = StoreServer(settings, None if settings.data_dir is None else _storage(settings.data_dir), admission)
    server.on_failure = server.listener.on_idle = stop
    try:
        with _usable(settings.data_dir, inside=True):
            yield server
    finally:
        if server.storage is not None:
            server.storage.close()
    if server.failed is not None:
        raise server.failed


@contextlib.contextmanager
def _replicated_server(
    settings: Settings, address: Address, admission: Admission, security: ClientSecurity, stop: Callable[[], None]
) -> Iterator[Served]:
    """Create one of the servers of a store in etcd; raise the error that ended it, if any."""
    try:
        from rallypoint.server.replication.replicated_server import ReplicatedServer
    except ModuleNotFoundError as error:
        why = f"{address.name} needs the etcd extra ({error}): pip install 'rallypoint[etcd]'"
        raise ValueError(why) from None
    server = ReplicatedServer(settings, address, admission, security)
    server.on_failure = server.on_idle = stop
    yield server
    if server.failed is not None:
        raise server.failed


def _storage(directory: str) -> Any:
    """Open a data directory; raise DirectoryInUse or StorageDamaged."""
    from rallypoint.storage.file.storage import FileStorage

    with _usable(directory):
        return FileStorage(directory)


@contextlib.contextmanager
def _usable(directory: str | None, inside: bool = False) -> Iterator[None]:
    """Turn an OSError into a ValueError that names the data directory; with `inside`, only for files in it."""
    try:
        yield
    except OSError as error:
        if isinstance(error, RallypointError) or directory is None or error.filename is None:
            raise
        if inside and not os.path.abspath(error.filename).startswith(os.path.abspath(directory)):
            raise
        why = f"{error.strerror}: {error.filename}"
        raise ValueError(f"cannot use the data directory {directory} (serve --data-dir): {why}") from error


def _address(url: str) -> Address:
    parsed = parse_url(url)
    if parsed.scheme != "etcd" or parsed.prefix:
        raise ValueError(f"invalid storage {parsed}: give a store in etcd, as etcd://host:2379,host:2379/name")
    return parsed.etcd()
