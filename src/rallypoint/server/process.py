"""The process of a store server: take the sockets, make the server that the settings ask for, and run it.

The state is in this process, in a data directory, or in etcd; each is imported only where it is needed. How a server is
run, and when it ends, is in `running.py`.
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
from rallypoint.server.base import ServerBase
from rallypoint.server.running import Serving, limited, run, run_child
from rallypoint.server.server import StoreServer
from rallypoint.server.settings import Settings
from rallypoint.store.url import parse_url

__all__ = ["main", "serve"]

log = logging.getLogger("rallypoint.server")

SWITCH_S = 0.0005
"""How long the event loop may keep the interpreter to itself while the thread of the log waits for it; Python's own
5 ms are as long as dozens of commits."""


def main() -> None:
    """Run as the child of a `Server`, told what to do by JSON on standard input."""
    run_child(Settings, serve, "server")


def serve(settings: Settings, ready: Callable[[str], None] = lambda url: None) -> None:
    """Serve until SIGTERM, SIGINT, or the end of the parent; call `ready` with the URL once clients get in.

    Raises AddressTaken or ValueError when the sockets or the data directory cannot be had, NoQuorum when the storage is
    etcd, and silent, and StorageFailed when the data directory cannot be written to any more.
    """
    settings = limited(settings)
    if settings.data_dir is not None:
        sys.setswitchinterval(SWITCH_S)
    make = _serving(settings)
    sockets = [net.adopt(fd) for fd in settings.fds] or net.listen(settings.hosts, settings.port)
    if settings.storage is not None:
        _check_reachable(_address(settings.storage), [str(sock.getsockname()[0]) for sock in sockets])
    run(make, settings, sockets, ready)


def _serving(settings: Settings) -> Serving:
    """Return what makes the server; raise ValueError where its storage cannot be."""
    if settings.storage is None:
        return lambda stop: _store_server(settings, stop)
    address = _address(settings.storage)
    return lambda stop: _replicated_server(settings, address, stop)


def _check_reachable(address: Address, hosts: list[str]) -> None:
    """Raise ValueError where others would be told of a server that only this machine reaches, and etcd is on others."""
    members = [net.parse_endpoint(member, 0).host for member in address.endpoints]
    if all(map(_is_loopback, hosts)) and not all(map(_is_loopback, members)):
        raise ValueError(
            f"a server of {address.name} that listens on {hosts[0]} is of no use to other machines, which are told of "
            f"it: give an address that they reach (serve --host)"
        )


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


@contextlib.contextmanager
def _store_server(settings: Settings, stop: Callable[[], None]) -> Iterator[ServerBase]:
    """Make a server that has its state here, let go of its data directory, and raise why that failed, if it did."""
    server = StoreServer(settings, None if settings.data_dir is None else _storage(settings.data_dir))
    server.on_failure = stop
    try:
        with _usable(settings.data_dir, inside=True):
            yield server
    finally:
        if server.storage is not None:
            server.storage.close()
    if server.failed is not None:
        raise server.failed


@contextlib.contextmanager
def _replicated_server(settings: Settings, address: Address, stop: Callable[[], None]) -> Iterator[Any]:
    """Make one of the servers of a store in etcd; raise why it cannot go on, if so."""
    try:
        from rallypoint.server.replicated import ReplicatedServer
    except ModuleNotFoundError as error:
        why = f"{address.name} needs more than is installed ({error}): pip install 'rallypoint[etcd]'"
        raise ValueError(why) from None
    server = ReplicatedServer(settings, address)
    server.on_failure = stop
    yield server
    if server.failed is not None:
        raise server.failed


def _storage(directory: str) -> Any:
    """Open a data directory; raise where another server has it, or where it is damaged."""
    from rallypoint.storage.file import FileStorage

    with _usable(directory):
        return FileStorage(directory)


@contextlib.contextmanager
def _usable(directory: str | None, inside: bool = False) -> Iterator[None]:
    """Turn an error of the file system into one that names the data directory; `inside`: of a file in it."""
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
        raise ValueError(f"storage {parsed} is not a store in etcd: give etcd://host:2379,host:2379/name")
    return parsed.etcd()
