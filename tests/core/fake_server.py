"""A real `StoreServer` without sockets: its handlers on fake connections, and a fake clock.

Time passes only by `Clock.advance`. The clock replaces the event loop of the server as far as it needs one, and is its
time: callbacks run when the clock reaches their time. Handlers that need no clock, as those of PyTorch's clients,
may be called without it.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

from tests.turns import AmpleTurns, use_turns

from rallypoint.core import entries, ops
from rallypoint.core.engine import Engine
from rallypoint.protocol import BadMessage
from rallypoint.protocol.native import SharedReply
from rallypoint.server.connections.outgoing import Part
from rallypoint.server.server import StoreServer
from rallypoint.server.settings import Settings

UNLIMITED = 1 << 62


class Timer:
    """The handle that `call_later` returns."""

    def __init__(self, callback: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._callback = callback
        self._arguments = arguments
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True

    def run(self) -> None:
        if not self._cancelled:
            self._callback(*self._arguments)


class Clock:
    """The time, and the callbacks that are scheduled."""

    def __init__(self) -> None:
        self.now = 0.0
        self._later: list[tuple[float, int, Timer]] = []
        self._soon: deque[Timer] = deque()
        self._arrivals = count()

    def monotonic(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[..., Any], *arguments: Any) -> Timer:
        self._soon.append(Timer(callback, arguments))
        return self._soon[-1]

    def call_later(self, delay_s: float, callback: Callable[..., Any], *arguments: Any) -> Timer:
        timer = Timer(callback, arguments)
        heapq.heappush(self._later, (self.now + delay_s, next(self._arrivals), timer))
        return timer

    def advance(self, now: float) -> None:
        """Let time pass, and run the callbacks that become due, each at its time."""
        with self.running():
            self._run_soon()
            while self._later and self._later[0][0] <= now:
                self.now, _, timer = heapq.heappop(self._later)
                timer.run()
                self._run_soon()
        self.now = now

    def _run_soon(self) -> None:
        while self._soon:
            self._soon.popleft().run()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Act as the running event loop."""
        asyncio._set_running_loop(self)  # type: ignore[arg-type]
        try:
            yield
        finally:
            asyncio._set_running_loop(None)


class FakeConnection:
    """A connection without a socket, which records why it was dropped."""

    paused = False
    """It takes all replies at once."""

    def __init__(self, clock: Clock, send: Callable[[bytes], None]) -> None:
        self._clock = clock
        self._send = send
        self._stalled = False
        self.paused = False
        """Never: the peer reads its answers at once."""

        self.handler: Any = None
        self.dropped = ""

    def receive(self, data: bytes) -> None:
        """Deliver bytes to the handler, and its answers to the peer; raise BadMessage if the connection was dropped.

        The peer reads its answers at once, so requests that wait for that are executed, too.
        """
        with self._clock.running():
            self.send(self.handler.receive(data))
            while self.handler.blocked:
                self.send(self.handler.receive(b""))
        self._clock.advance(self._clock.now)
        assert not self._stalled, "without a log, nothing stays stalled"
        if self.dropped:
            raise BadMessage(self.dropped)

    def end(self) -> None:
        """Close the connection from the peer's side."""
        with self._clock.running():
            self.handler.end()
        self._clock.advance(self._clock.now)

    # Called by handlers

    def send(self, data: bytes | SharedReply) -> None:
        self._send(bytes(data))

    def send_parts(self, parts: Sequence[Part]) -> None:
        self._send(b"".join(part if isinstance(part, bytes) else part.data for part in parts))

    def drop(self, why: str) -> None:
        self.dropped = why

    @property
    def closing(self) -> bool:
        return bool(self.dropped)

    def stall(self) -> None:
        self._stalled = True

    def read_on(self) -> None:
        if self._stalled:
            self._stalled = False
            self.go_on()

    def go_on(self) -> None:
        if self.handler.blocked:
            self.send(self.handler.receive(b""))

    def recount(self) -> None:
        pass


def new_server(
    *,
    max_bytes: int = UNLIMITED,
    max_answer_bytes: int = UNLIMITED,
    max_kept_bytes: int = UNLIMITED,
    max_sessions: int = UNLIMITED,
    limit: int = UNLIMITED,
    grace_s: float = 2.0,
    clock: Clock | None = None,
) -> StoreServer:
    """Start a server that listens nowhere; `limit` bounds one request and one answer of a connection.

    Without a clock, its time stands still.
    """
    settings = Settings(max_connection_memory=limit, grace_s=grace_s)
    server = StoreServer(settings, monotonic=(clock or Clock()).monotonic)
    use_turns(server, AmpleTurns())
    limits = (max_bytes, max_answer_bytes, max_kept_bytes, max_sessions)
    server.state.apply(entries.StartServer(entries.VERSION, b"server", *limits))
    return server


def value_of(engine: Engine, key: bytes) -> bytes | None:
    """Return the current value of a key."""
    value: bytes | None = engine.execute(ops.Peek(0, key))
    return value


def items_of(engine: Engine, key: bytes) -> list[bytes]:
    """Return the items of a queue, in order."""
    return list(engine._queues.get(key, ()))


def waiting(engine: Engine) -> int:
    """Return the number of waiting requests."""
    return engine.statistics().waiters
