"""Run a server on an event loop: open it, publish its URL, and close it on a signal or when the parent is gone.

The processes of a store (`process.py`) and of a relay share this module. A server that a program started for itself
(`Server`, `Relay`) lives exactly as long as that program.

The module imports no particular kind of server: a relay is small because it imports no store.

Rejected: PR_SET_PDEATHSIG to watch the parent. It fires when the *thread* that started the child ends; a process
descriptor does not.
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
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from rallypoint import net, unix_socket
from rallypoint.errors import RallypointError
from rallypoint.process import standard_streams
from rallypoint.process.child import CREDENTIALS
from rallypoint.process.supervisor import WHY_NOT
from rallypoint.security.credentials import Credentials, resolve
from rallypoint.server.settings import Settings

__all__ = ["FILES_KEPT", "LongCollections", "Served", "Serving", "limited", "published", "run", "run_child", "url_of"]

log = logging.getLogger("rallypoint.server")

FILES_WANTED = 65_536
FILES_KEPT = 64
"""Descriptors kept back for the server itself, and for connections that it accepts only to refuse them."""

CLOSE_S = 20.0
"""How long closing may take; the timeouts inside every kind of server are shorter."""

PARENT_POLL_S = 0.5

LONG_COLLECTION_S = 0.005
"""A garbage collection that takes longer is not to be repeated for the same objects."""

AnySettings = TypeVar("AnySettings", bound=Settings)


class LongCollections:
    """A callback of the garbage collector: after a collection that took long, later ones skip the objects it visited.

    They are keys, waits and leases, which end without a collection: the server makes no reference cycles. Rejected: to
    count the keys. Millions of waits and leases are traversed as well, at 30 ms per million.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began_at = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        """Note the begin of a collection, and freeze the objects that are left if it took long."""
        if phase == "start":
            self._began_at = self._clock()
        elif self._clock() - self._began_at > LONG_COLLECTION_S:
            gc.freeze()


class Served(Protocol):
    """A server: of a store, alone or among several, or a relay."""

    async def open(self, sockets: Sequence[socket.socket]) -> None:
        """Start to serve on bound, listening sockets."""

    async def close(self) -> None:
        """Stop listening, answer pending requests, and close all connections."""


Serving = Callable[[Callable[[], None]], contextlib.AbstractContextManager[Served]]
"""Creates a server on the event loop and frees its resources in the end; its argument stops the process."""


def run_child(kind: type[AnySettings], serve: Callable[[AnySettings, Credentials], None], name: str) -> None:
    """Serve as a child process with settings in JSON on standard input; report to the parent why it cannot.

    The credentials are among them, as the variables that `Credentials.environ` returns.
    """
    standard_streams.fill()
    logging.basicConfig(format=f"rallypoint {name}: %(message)s", level=logging.WARNING)
    told: dict[str, Any] = msgspec.json.decode(standard_streams.read_settings())
    credentials = resolve(told.pop(CREDENTIALS, {}))
    settings = msgspec.convert(told, kind)
    try:
        serve(settings, credentials)
    except (RallypointError, ValueError, OSError) as error:
        if settings.ready_fd is None:
            raise
        with contextlib.suppress(OSError):  # closed once the server is ready
            os.write(settings.ready_fd, f"{WHY_NOT}{' '.join(str(error).split())}\n".encode())
        sys.exit(1)


def limited(settings: AnySettings) -> AnySettings:
    """Return the settings with `max_connections` reduced to what the limit on open files allows."""
    most = max(1, net.raise_file_limit(FILES_WANTED) - FILES_KEPT)
    return msgspec.structs.replace(settings, max_connections=min(settings.max_connections or most, most))


def run(
    make: Serving,
    settings: Settings,
    sockets: list[socket.socket],
    ready: Callable[[str], None],
    credentials: Credentials,
) -> None:
    """Serve on listening sockets until SIGTERM, SIGINT or the end of the parent; on uvloop where it is installed."""
    _warn_if_open(sockets, credentials)
    main: Coroutine[Any, Any, None] = _serve(make, settings, sockets, ready, credentials.serves_tls)
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


def _warn_if_open(sockets: list[socket.socket], credentials: Credentials) -> None:
    """Say in one line that whoever reaches the port may use the store."""
    beyond = [
        sock.getsockname()[0]
        for sock in sockets
        if sock.family != socket.AF_UNIX and not net.is_loopback(sock.getsockname()[0])
    ]
    if beyond and not credentials.authenticates:
        log.warning("open to everybody who reaches %s: set a token (rallypoint token new; docs/security.md)", beyond[0])


async def _serve(
    make: Serving, settings: Settings, sockets: list[socket.socket], ready: Callable[[str], None], tls: bool
) -> None:
    stop = asyncio.Event()
    with make(stop.set) as server:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, stop.set)
        if settings.parent_pid is None:
            loop.add_signal_handler(signal.SIGINT, stop.set)
        else:
            loop.add_signal_handler(signal.SIGINT, lambda: None)  # the parent decides what Ctrl-C means
            _watch_parent(settings.parent_pid, stop)
        if not await _open(server, sockets, stop):
            return
        gc.freeze()  # these objects stay; later collections can skip them
        gc.callbacks.append(LongCollections())
        url = url_of(sockets, tls)
        with published(settings, url):
            ready(url)
            await stop.wait()
        await _close(server)


async def _close(server: Served) -> None:
    """Close the server, but give up after `CLOSE_S`: a process that was told to end must end."""
    closing = asyncio.ensure_future(server.close())
    done, _ = await asyncio.wait([closing], timeout=CLOSE_S)
    if not done:
        log.error("bug: closing did not finish within %g s; exiting", CLOSE_S)
        return
    closing.result()


async def _open(server: Served, sockets: list[socket.socket], stop: asyncio.Event) -> bool:
    """Open the server, which may take long; return False if it is stopped before that."""
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
        loop.remove_reader(descriptor)  # it stays readable, and would call again and again
        stop.set()

    if descriptor is not None:
        loop.add_reader(descriptor, gone, descriptor)

    def look() -> None:
        if os.getppid() != pid:
            stop.set()
        elif descriptor is None:
            loop.call_later(PARENT_POLL_S, look)

    look()  # even with a descriptor: the parent may have died, and its pid been reused, before it was opened


def url_of(sockets: list[socket.socket], tls: bool = False) -> str:
    """Return the URL for clients: the bound address, or this host's name if bound to all interfaces.

    With `tls` it is a tcps:// URL, except on loopback.
    """
    if sockets[0].family == socket.AF_UNIX:
        return unix_socket.SCHEME + str(sockets[0].getsockname())
    host, port = sockets[0].getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"{'tcps' if tls and not net.is_loopback(host) else 'tcp'}://{net.Endpoint(host, port)}"


@contextlib.contextmanager
def published(settings: Settings, url: str) -> Iterator[None]:
    """Write the URL to the descriptor and the file in the settings; remove the file in the end."""
    if settings.ready_fd is not None:
        with contextlib.suppress(BrokenPipeError):  # the waiting process was killed
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
