"""A delay line: a proxy that forwards every byte a fixed time after it arrived, in each direction, as a long cable.

Any number of bytes are under way at once, and their order is kept; the end of a stream is delayed as its bytes are.
Connecting is not: the line accepts at once, so a round trip that TCP itself takes to connect is not in the figures.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from concurrent.futures import Future
from typing import cast

LOOPBACK = "127.0.0.1"


class DelayLine:
    """A proxy in front of a port of this machine, in a thread; `delay_s` is the time in each direction."""

    def __init__(self, target: int, delay_s: float) -> None:
        self._target, self._delay_s = target, delay_s
        self._listening: Future[int] = Future()
        threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True).start()

    def port(self) -> int:
        """Return the port on which it listens."""
        return self._listening.result()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(self._accepted, LOOPBACK, 0)
        self._listening.set_result(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    def _accepted(self) -> _Way:
        up, down = _Way(self._delay_s), _Way(self._delay_s)
        up.sink_of, down.sink_of = down, up
        loop = asyncio.get_running_loop()
        connecting = loop.create_task(loop.create_connection(lambda: down, LOOPBACK, self._target))
        connecting.add_done_callback(lambda task: up.close() if task.exception() else None)
        return up


class _Way(asyncio.Protocol):
    """What one end sends: it is written to the other end's connection when its time has come."""

    sink_of: _Way
    """The way back; its connection is where this one's bytes go."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._loop = asyncio.get_running_loop()
        self._under_way: deque[tuple[float, bytes]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.sink_of.deliver()  # it may have waited for this connection

    def data_received(self, data: bytes) -> None:
        self._under_way.append((self._loop.time() + self._delay_s, data))
        self._arm()

    def connection_lost(self, error: Exception | None) -> None:
        self.data_received(b"")

    def close(self) -> None:
        """Close this end's connection, after what was written to it."""
        if self.transport is not None:
            self.transport.close()

    def deliver(self) -> None:
        """Write what is due to the other end; nothing means that this end has closed."""
        self._timer = None
        sink = self.sink_of.transport
        while sink is not None and self._under_way and self._under_way[0][0] <= self._loop.time():
            _, data = self._under_way.popleft()
            if data:
                sink.write(data)
            else:
                sink.close()
        if sink is not None:
            self._arm()

    def _arm(self) -> None:
        if self._timer is None and self._under_way:
            self._timer = self._loop.call_at(self._under_way[0][0], self.deliver)
