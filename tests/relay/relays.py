"""Relays for tests: in a thread of this process, or in their own process, which can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import uvloop
from tests.raw_peer import AMPLE_S, RawPeer, http, read_line, script, until

from rallypoint import net
from rallypoint.relay.server import RelayServer
from rallypoint.server.settings import Settings

__all__ = ["RelayThread", "get", "relay_process"]

T = TypeVar("T")

RELAY = """
import asyncio, sys
from rallypoint import net
from rallypoint.relay.server import RelayServer
from rallypoint.server.settings import Settings

async def main():
    relay = RelayServer(Settings(), net.parse_endpoints(sys.argv[1], 0))
    sockets = net.listen(["127.0.0.1"], int(sys.argv[2]))
    await relay.open(sockets)
    relay.upstream.on_connected(lambda: print(sockets[0].getsockname()[1], flush=True))
    await asyncio.Event().wait()

asyncio.run(main())
"""


class RelayThread:
    """A relay of servers at these ports of loopback, in a thread with its own event loop."""

    def __init__(self, *ports: int, sockets: list[socket.socket] | None = None, **settings: Any) -> None:
        endpoints = net.Endpoints([net.Endpoint("127.0.0.1", port) for port in ports])
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._thread.start()
        sockets = sockets or net.listen(["127.0.0.1"], 0)
        self.server = self.call(lambda: RelayServer(Settings(**settings), endpoints))
        self.wait(self.server.open(sockets))
        self.port = 0 if sockets[0].family == socket.AF_UNIX else int(sockets[0].getsockname()[1])
        self.address = ("127.0.0.1", self.port)

    def __enter__(self) -> RelayThread:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait(self.server.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(AMPLE_S)
        self._loop.close()

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def wait(self, work: Any) -> Any:
        """Run a coroutine in the relay's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(AMPLE_S)

    def call(self, function: Callable[[], T]) -> T:
        """Call a function in the relay's loop."""

        async def run() -> T:
            return function()

        return self.wait(run())  # type: ignore[no-any-return]

    def connected(self, times: int = 1) -> RelayThread:
        """Return when it has connected to its server at least `times` times."""
        upstream = self.server.upstream
        until(lambda: upstream.connected and upstream.connections, lambda made: made >= times)
        return self

    def statistics(self) -> Any:
        return json.loads(get(self.address, "/statistics"))

    def peer(self) -> RawPeer:
        return RawPeer(self.address)

    def open_round(self, run: str, scope: int, number: int | None = None, port: int = 0) -> int:
        """Open a round, as over HTTP; return its port, or raise the error."""
        answers: list[int | Exception] = []
        self.call(lambda: self.server.open_round(run, scope, number, answers.append, port=port))
        if isinstance(answers[0], Exception):
            raise answers[0]
        return answers[0]

    def close_round(self, run: str, scope: int | None = None) -> bool:
        async def close() -> bool:
            answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            self.server.close_round(run, scope, answer.set_result)
            return await answer

        return bool(self.wait(close()))


def get(address: tuple[str, int], path: str, method: str = "GET") -> str:
    """Return the body of an HTTP response."""
    answer = http(address, f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    return answer.partition(b"\r\n\r\n")[2].decode()


@contextlib.contextmanager
def relay_process(upstream_port: int, port: int = 0) -> Iterator[tuple[int, Callable[[], None]]]:
    """Run a relay in its own process; yield its port once it is connected, and a function that kills it."""
    with script(RELAY, f"127.0.0.1:{upstream_port}", port) as child:

        def kill() -> None:
            os.kill(child.pid, signal.SIGKILL)
            child.wait(AMPLE_S)

        yield int(read_line(child)), kill
