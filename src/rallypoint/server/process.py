"""The server's own process: take the sockets, serve, tell where, and end when told to or when the parent is gone.

A server that a program started for itself (`Server`) lives exactly as long as that program. It watches the parent by
its process descriptor, not by PR_SET_PDEATHSIG: that one fires when the *thread* that started the child ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec

from rallypoint import net
from rallypoint.errors import RallypointError
from rallypoint.etcd.address import Address
from rallypoint.server import streams
from rallypoint.server.base import ServerBase
from rallypoint.server.server import StoreServer
from rallypoint.server.settings import Settings
from rallypoint.store.url import parse_url
from rallypoint.supervisor import WHY_NOT

__all__ = ["main", "serve"]

log = logging.getLogger("rallypoint.server")

FILES_WANTED = 65_536
FILES_KEPT = 64
"""How many descriptors the server keeps for itself, and for those whom it accepts only to turn them away."""

SWITCH_S = 0.0005
"""How long the event loop may keep the interpreter to itself while the thread of the log waits for it; Python's own
5 ms are as long as dozens of commits."""

PARENT_POLL_S = 0.5
REACH_S = 10.0
"""How long etcd may take to answer when a gateway starts."""


def main() -> None:
    """Run as the child of a `Server`, told what to do by JSON in the second argument."""
    streams.fill()
    logging.basicConfig(format="rallypoint server: %(message)s", level=logging.WARNING)
    settings = msgspec.json.decode(sys.argv[2], type=Settings)
    try:
        serve(settings)
    except (RallypointError, ValueError, OSError) as error:
        if settings.ready_fd is None:
            raise
        with contextlib.suppress(OSError):  # it is closed once the server is ready
            os.write(settings.ready_fd, f"{WHY_NOT}{' '.join(str(error).split())}\n".encode())
        sys.exit(1)


def serve(settings: Settings, ready: Callable[[str], None] = lambda url: None) -> None:
    """Serve until SIGTERM, SIGINT, or the end of the parent; call `ready` with the URL once clients get in.

    Raises AddressTaken or ValueError when the sockets or the data directory cannot be had, NoQuorum when the engine is
    etcd, and silent, and StorageFailed when the data directory cannot be written to any more.
    """
    most = max(1, net.raise_file_limit(FILES_WANTED) - FILES_KEPT)
    settings = msgspec.structs.replace(settings, max_connections=min(settings.max_connections or most, most))
    if settings.data_dir is not None:
        sys.setswitchinterval(SWITCH_S)
    house = _house(settings)
    sockets = [net.adopt(fd) for fd in settings.fds] or net.listen(settings.hosts, settings.port)
    _run(_serve(house, settings, sockets, ready))


def _house(settings: Settings) -> Callable[[], ServerBase]:
    """Return what makes the server; raise ValueError where its engine cannot be."""
    if settings.engine is None:
        return lambda: StoreServer(settings, None if settings.data_dir is None else _storage(settings.data_dir))
    address = _engine(settings.engine)
    try:
        from rallypoint.etcd.space import Space
    except ModuleNotFoundError as error:
        why = f"engine {address.name} needs more than is installed ({error}): pip install 'rallypoint[etcd]'"
        raise ValueError(why) from None
    from rallypoint.server.gateway import OWN_LEASE_S, Gateway

    def connect() -> Awaitable[Space]:
        return Space.connect(address, f"gateway {net.caller_name()}", REACH_S, settings.grace_s + OWN_LEASE_S)

    return lambda: Gateway(settings, connect)


def _storage(directory: str) -> Any:
    """Open a data directory; raise where another server has it, or where it is damaged."""
    from rallypoint.storage.file import FileStorage

    with _usable(directory):
        return FileStorage(directory)


@contextlib.contextmanager
def _usable(directory: str | None) -> Iterator[None]:
    """Turn an error of the file system into one that names the data directory."""
    try:
        yield
    except OSError as error:
        if isinstance(error, RallypointError) or directory is None or error.filename is None:
            raise
        why = f"{error.strerror}: {error.filename}"
        raise ValueError(f"cannot use the data directory {directory} (serve --data-dir): {why}") from error


def _engine(url: str) -> Address:
    parsed = parse_url(url)
    if parsed.scheme != "etcd" or parsed.prefix:
        raise ValueError(f"engine {url!r} is not a store in etcd: give etcd://host:2379,host:2379/space")
    return parsed.etcd()


def _run(main: Coroutine[Any, Any, None]) -> None:
    """Run on uvloop where it is installed, else on asyncio's own loop."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
        return
    loop = uvloop.new_event_loop()
    try:
        loop.run_until_complete(main)
    finally:
        loop.close()


async def _serve(
    make: Callable[[], ServerBase], settings: Settings, sockets: list[socket.socket], ready: Callable[[str], None]
) -> None:
    house, stop = make(), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    if settings.parent_pid is None:
        loop.add_signal_handler(signal.SIGINT, stop.set)
    else:
        loop.add_signal_handler(signal.SIGINT, lambda: None)  # Ctrl-C is the parent's to judge
        _watch_parent(settings.parent_pid, stop)
    house.on_alone = stop.set
    if isinstance(house, StoreServer):
        house.on_failure = stop.set
    try:
        with _usable(settings.data_dir):
            opened = await _open(house, sockets, stop)
        if opened:
            gc.freeze()  # what is here now stays; collections need not look at it again
            url = _url(sockets)
            with _published(settings, url):
                ready(url)
                await stop.wait()
            await house.close()
    finally:
        if isinstance(house, StoreServer) and house.storage is not None:
            house.storage.close()
    if isinstance(house, StoreServer) and house.failed is not None:
        raise house.failed


async def _open(house: ServerBase, sockets: list[socket.socket], stop: asyncio.Event) -> bool:
    """Open the server, which may take long; return False where it is told to end before."""
    opening, stopped = asyncio.ensure_future(house.open(sockets)), asyncio.ensure_future(stop.wait())
    await asyncio.wait([opening, stopped], return_when=asyncio.FIRST_COMPLETED)
    for task in (opening, stopped):
        task.cancel()
    try:
        await opening
    except asyncio.CancelledError:
        return False
    return True


def _watch_parent(pid: int, stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    try:
        descriptor = os.pidfd_open(pid)
    except (AttributeError, OSError):
        descriptor = None
    if descriptor is not None:
        loop.add_reader(descriptor, stop.set)

    def look() -> None:
        if os.getppid() != pid:
            stop.set()
        elif descriptor is None:
            loop.call_later(PARENT_POLL_S, look)

    look()  # also after opening the descriptor: the parent may have gone, and its number to another, before


def _url(sockets: list[socket.socket]) -> str:
    """Return the address to give to clients: what was bound, or this host's name where that was every address."""
    host, port = sockets[0].getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"tcp://{net.Endpoint(host, port)}"


@contextlib.contextmanager
def _published(settings: Settings, url: str) -> Any:
    """Write the URL where it was asked for; a file appears whole, and goes when the server ends."""
    if settings.ready_fd is not None:
        with contextlib.suppress(BrokenPipeError):  # whoever waited for it has been killed
            os.write(settings.ready_fd, url.encode() + b"\n")
        os.close(settings.ready_fd)
    if settings.url_file is None:
        yield
        return
    path = Path(settings.url_file)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "w") as file:
        file.write(url + "\n")
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if path.read_text() == url + "\n":
                path.unlink()
