"""`InProcessServer`: the real server, in a thread of the test's process, with its own event loop.

It speaks every protocol on a port of loopback, so that blocking, asyncio and PyTorch clients reach it as they reach
`rallypoint.Server`. It starts in milliseconds, can be killed and restarted, and may live in virtual time. The port
stays reserved while the server is down.

It is for tests: a test that is busy in Python delays its own server. Rejected: a transport without sockets; the code
that reconnects is what most tests of a cut are about.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import socket
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from rallypoint.core.limits import LEAST_BYTES, MAX_GRACE_S
from rallypoint.deadline import Deadline, Timeout, seconds
from rallypoint.errors import ServerFailed
from rallypoint.security.credentials import OPEN, Credentials
from rallypoint.server.admission import Admission
from rallypoint.server.server import StoreServer
from rallypoint.server.settings import Settings
from rallypoint.testing.forwarding import reserve_port
from rallypoint.testing.memory_log import MemoryLog
from rallypoint.testing.virtual_clock import TimedLoop, VirtualClock

__all__ = ["InProcessServer"]

AMPLE_S = 60.0
"""How long the server's thread may take to start, to answer and to end."""

LAST_TURNS = 1000
"""Turns of the event loop in which connections may close after a kill."""

T = TypeVar("T")
_Self = TypeVar("_Self", bound="InProcessServer")


class InProcessServer:
    """A server in a thread of this process, started at once; a context manager.

    `grace` is how long a session outlives its connection: 2 s as with `rallypoint.Server`, or a minute with a virtual
    clock, because clients count it in real time. With `durable` the server keeps its data and sessions when it is
    killed and started again, as with a data directory; clients then try for `recovery` (60 s) to reconnect. Without,
    it returns empty, and clients get ServerRestarted. With a `clock`, leases, grace periods, last calls and the
    timeouts of store operations pass only when that is advanced.

        with InProcessServer() as server, rallypoint.connect(server.url) as store:
            store.set("k", "v")
            server.restart()
            store.get("k")      # raises ServerRestarted

    Its methods may be called from any thread, and raise ValueError when the server is not running.
    """

    def __init__(
        self,
        *,
        grace: Timeout | None = None,
        durable: bool = False,
        recovery: Timeout | None = None,
        clock: VirtualClock | None = None,
        max_memory: int | None = None,
        credentials: Credentials = OPEN,
    ) -> None:
        if recovery is not None and not durable:
            raise ValueError("recovery needs durable=True: otherwise a restarted server has no sessions")
        if clock is not None and not isinstance(clock, VirtualClock):
            raise TypeError(f"clock must be a VirtualClock, not {clock!r}")
        if not isinstance(credentials, Credentials):
            raise TypeError("credentials must be Credentials")  # and is not shown: it may be a token
        self._clock = clock
        self._settings = _settings(grace, recovery, clock, max_memory)
        self._admission = Admission(credentials)
        self._durable = durable
        self._log = MemoryLog() if durable else None
        self._pid = os.getpid()
        self._reserved = reserve_port()
        self.port: int = self._reserved.getsockname()[1]
        self._run: _ServerRun | None = None
        self._closed = False
        self.start()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<InProcessServer {self.url}{'' if self.running() else ' closed' if self._closed else ' killed'}>"

    @property
    def url(self) -> str:
        """The URL for clients, the same after every restart."""
        return f"tcp://127.0.0.1:{self.port}"

    def running(self) -> bool:
        """Return whether the server is up."""
        return self._run is not None

    # Start and stop

    def start(self) -> None:
        """Start the server again, on its port, after it was killed."""
        if self._closed:
            raise ValueError(f"{self!r} cannot be started again: create another server")
        if self._run is not None:
            raise ValueError(f"{self!r} is running already")
        self._run = _ServerRun(self.new_server, self.port, self._clock)

    def kill(self) -> None:
        """Close its port and all connections at once, as when its process dies; nothing happens if it is down."""
        run, self._run = self._run, None
        if run is not None:
            if self._log is not None:
                self._log = MemoryLog(self._log.records)  # later commits are lost
            run.end()

    def restart(self, *, forget: bool = False) -> None:
        """Kill the server and start it again; with `forget`, a durable one loses its data, too."""
        self.kill()
        if forget and self._durable:
            self._log = MemoryLog()
        self.start()

    def close(self) -> None:
        """Stop the server for good, and free its port; a second call does nothing."""
        self._closed = True
        self.kill()
        self._reserved.close()

    # While it runs

    def cut(self) -> None:
        """Drop all connections; their clients reconnect at once, with their sessions."""
        self._running().call(lambda server: server.listener.cut())

    def statistics(self) -> dict[str, Any]:
        """Return the server's statistics, as `rallypoint.Server.statistics` does."""
        return self._running().call(_statistics)

    def wait_until(self, condition: Callable[[dict[str, Any]], object], timeout: Timeout = AMPLE_S) -> None:
        """Wait until a condition of the statistics holds; raise TimeoutError, with the last ones, if it does not.

        It is evaluated in the server's thread whenever the server has done something: it must be quick.
        """
        self._running().wait_until(condition, Deadline(timeout))

    def wait_for_waiters(self, count: int, timeout: Timeout = AMPLE_S) -> None:
        """Wait until so many calls of clients wait on the server, for a key, an item, a lock or other members."""
        self.wait_until(lambda statistics: statistics["waiting"] == count, timeout)

    def new_server(self, loop: asyncio.AbstractEventLoop) -> StoreServer:
        """Create the server that the thread runs; tests of the server itself may override it."""
        return StoreServer(self._settings, self._log, self._admission, loop.time)

    def _running(self) -> _ServerRun:
        run = self._run
        if os.getpid() != self._pid:
            raise ValueError(f"{self!r} runs in another process, of which this one is a fork: use rallypoint.Server")
        if run is None:
            raise ValueError(f"{self!r} is not running: start() it")
        return run


class _ServerRun:
    """One life of a server: its thread, from its start to its end."""

    def __init__(
        self, new_server: Callable[[asyncio.AbstractEventLoop], StoreServer], port: int, clock: VirtualClock | None
    ) -> None:
        self._loop = TimedLoop(clock)
        self._server = new_server(self._loop)
        self._killed = asyncio.Event()
        self._conditions: list[tuple[Callable[[dict[str, Any]], object], concurrent.futures.Future[None]]] = []
        self._loop.on_idle = self._check_conditions
        self._up: concurrent.futures.Future[None] = concurrent.futures.Future()
        listener = socket.create_server(("127.0.0.1", port), backlog=512)
        self._thread = threading.Thread(target=self._main, args=[listener], name=f"server at {port}", daemon=True)
        self._thread.start()
        try:
            self._up.result(AMPLE_S)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """End the thread at once."""
        with contextlib.suppress(RuntimeError):  # its loop is closed: it has failed
            self._loop.call_soon_threadsafe(self._killed.set)
        self._thread.join(AMPLE_S)
        if self._thread.is_alive():
            raise ServerFailed(pid=os.getpid(), why=f"its thread did not end within {AMPLE_S:g} s")

    def call(self, work: Callable[[StoreServer], T]) -> T:
        """Call a function in the server's thread, and return its result."""
        if threading.current_thread() is self._thread:  # from a condition
            return work(self._server)
        result: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            try:
                result.set_result(work(self._server))
            except BaseException as error:
                result.set_exception(error)

        self._do(run)
        return result.result(AMPLE_S)

    def wait_until(self, condition: Callable[[dict[str, Any]], object], deadline: Deadline) -> None:
        """Wait until a condition holds."""
        met: concurrent.futures.Future[None] = concurrent.futures.Future()
        entry = (condition, met)
        self._do(lambda: self._conditions.append(entry))
        try:
            met.result(deadline.remaining())
        except concurrent.futures.TimeoutError:
            if met.done():
                raise  # by the condition itself
            last = self.call(_statistics)
            raise TimeoutError(f"the condition did not hold within {deadline.timeout_s:g} s; last: {last}") from None
        finally:
            with contextlib.suppress(ServerFailed):
                self._do(lambda: self._conditions.remove(entry) if entry in self._conditions else None)

    def _do(self, work: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(work)
        except RuntimeError:
            raise ServerFailed(pid=os.getpid(), why="its thread has ended") from None

    def _check_conditions(self) -> None:
        for entry in self._conditions.copy():
            condition, met = entry
            try:
                if not condition(_statistics(self._server)):
                    continue
            except BaseException as error:
                met.set_exception(error)
            else:
                met.set_result(None)
            self._conditions.remove(entry)

    def _main(self, listener: socket.socket) -> None:
        with contextlib.closing(self._loop):
            try:
                self._loop.run_until_complete(self._serve(listener))
            except BaseException as error:
                if self._up.done():
                    raise
                self._up.set_exception(error)
            for _, met in self._conditions:
                met.set_exception(ServerFailed(pid=os.getpid(), why="it was killed meanwhile"))

    async def _serve(self, listener: socket.socket) -> None:
        await self._server.open([listener])
        self._up.set_result(None)
        await self._killed.wait()
        await self._server.abandon()
        for _ in range(LAST_TURNS):
            if not self._server.listener.connections:
                break
            await asyncio.sleep(0)


def _statistics(server: StoreServer) -> dict[str, Any]:
    facts, clients, sessions = server.statistics()
    return {**facts, "clients": list(clients), "sessions": list(sessions)}


def _settings(
    grace: Timeout | None, recovery: Timeout | None, clock: VirtualClock | None, max_memory: int | None
) -> Settings:
    """Validate the options and return them as settings."""
    default = Settings() if clock is None else Settings(grace_s=AMPLE_S)
    options: dict[str, Any] = {"grace_s": default.grace_s if grace is None else seconds(grace, "grace")}
    if recovery is not None:
        options["recovery_s"] = seconds(recovery, "recovery")
    for name, found_s in options.items():
        if found_s > MAX_GRACE_S:
            raise ValueError(f"{name.removesuffix('_s')} must be at most {MAX_GRACE_S:g} s, got {found_s:g} s")
    if max_memory is not None:
        if isinstance(max_memory, bool) or not isinstance(max_memory, int):
            raise TypeError(f"max_memory must be a number of bytes, not {max_memory!r}")
        if max_memory < LEAST_BYTES["max_memory"]:
            raise ValueError(f"max_memory must be at least {LEAST_BYTES['max_memory']} bytes, got {max_memory}")
        options["max_memory"] = max_memory
    return Settings(**options)
