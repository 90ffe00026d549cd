"""Run a server on an event loop: open it, tell where it is, and close it when told to or when the parent is gone.

What every process with a server shares: that of a store (`process.py`) and that of a relay. A server that a program
started for itself (`Server`, `Relay`) lives exactly as long as that program. It watches the parent by its process
descriptor, not by PR_SET_PDEATHSIG: that one fires when the *thread* that started the child ends.

This module knows no kind of server: a relay is small because it imports no store.
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
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rallypoint import net, unix_socket
from rallypoint.errors import RallypointError
from rallypoint.server import streams
from rallypoint.server.base import ServerBase
from rallypoint.server.settings import Settings
from rallypoint.supervisor import WHY_NOT

__all__ = ["FILES_KEPT", "Serving", "limited", "published", "run", "run_child", "url_of"]

log = logging.getLogger("rallypoint.server")

FILES_WANTED = 65_536
FILES_KEPT = 64
"""How many descriptors the server keeps for itself, and for those whom it accepts only to turn them away."""

CLOSE_S = 20.0
"""How long closing may take; every kind of server bounds what it waits for by less."""

PARENT_POLL_S = 0.5

AnySettings = TypeVar("AnySettings", bound=Settings)

Serving = Callable[[Callable[[], None]], contextlib.AbstractContextManager[ServerBase]]
"""Makes a server, on the event loop, and lets go of what it holds in the end; it is given what stops the process."""


def run_child(kind: type[AnySettings], serve: Callable[[AnySettings], None], name: str) -> None:
    """Serve as a child that is told what to do by JSON on its standard input; say why where it cannot."""
    streams.fill()
    logging.basicConfig(format=f"rallypoint {name}: %(message)s", level=logging.WARNING)
    settings = msgspec.json.decode(streams.read_settings(), type=kind)
    try:
        serve(settings)
    except (RallypointError, ValueError, OSError) as error:
        if settings.ready_fd is None:
            raise
        with contextlib.suppress(OSError):  # it is closed once the server is ready
            os.write(settings.ready_fd, f"{WHY_NOT}{' '.join(str(error).split())}\n".encode())
        sys.exit(1)


def limited(settings: AnySettings) -> AnySettings:
    """Return settings that allow as many connections as this process may have files, or fewer where they say so."""
    most = max(1, net.raise_file_limit(FILES_WANTED) - FILES_KEPT)
    return msgspec.structs.replace(settings, max_connections=min(settings.max_connections or most, most))


def run(make: Serving, settings: Settings, sockets: list[socket.socket], ready: Callable[[str], None]) -> None:
    """Serve on listening sockets until SIGTERM, SIGINT or the end of the parent; on uvloop where it is installed."""
    main: Coroutine[Any, Any, None] = _serve(make, settings, sockets, ready)
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


async def _serve(make: Serving, settings: Settings, sockets: list[socket.socket], ready: Callable[[str], None]) -> None:
    stop = asyncio.Event()
    with make(stop.set) as server:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, stop.set)
        if settings.parent_pid is None:
            loop.add_signal_handler(signal.SIGINT, stop.set)
        else:
            loop.add_signal_handler(signal.SIGINT, lambda: None)  # Ctrl-C is the parent's to judge
            _watch_parent(settings.parent_pid, stop)
        server.on_alone = stop.set
        if not await _open(server, sockets, stop):
            return
        gc.freeze()  # what is here now stays; collections need not look at it again
        url = url_of(sockets)
        with published(settings, url):
            ready(url)
            await stop.wait()
        await _close(server)


async def _close(server: ServerBase) -> None:
    """Close the server, and give that up after a while: a process that was told to end must end."""
    closing = asyncio.ensure_future(server.close())
    done, _ = await asyncio.wait([closing], timeout=CLOSE_S)
    if not done:
        log.error("a bug: closing takes longer than %g s, and is given up", CLOSE_S)
        return
    closing.result()


async def _open(server: ServerBase, sockets: list[socket.socket], stop: asyncio.Event) -> bool:
    """Open the server, which may take long; return False where it is told to end before."""
    opening, stopped = asyncio.ensure_future(server.open(sockets)), asyncio.ensure_future(stop.wait())
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

    def gone(descriptor: int) -> None:
        loop.remove_reader(descriptor)  # which would call again and again
        stop.set()

    if descriptor is not None:
        loop.add_reader(descriptor, gone, descriptor)

    def look() -> None:
        if os.getppid() != pid:
            stop.set()
        elif descriptor is None:
            loop.call_later(PARENT_POLL_S, look)

    look()  # also after opening the descriptor: the parent may have gone, and its number to another, before


def url_of(sockets: list[socket.socket]) -> str:
    """Return the address to give to clients: what was bound, or this host's name where that was every address."""
    if sockets[0].family == socket.AF_UNIX:
        return unix_socket.SCHEME + str(sockets[0].getsockname())
    host, port = sockets[0].getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"tcp://{net.Endpoint(host, port)}"


@contextlib.contextmanager
def published(settings: Settings, url: str) -> Iterator[None]:
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
