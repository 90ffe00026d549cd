"""The socket options of every accepted connection: keep-alive, a limit on unacknowledged data, and no delay.

An accepted socket inherits the options that its listening socket had when the connection queued up, and clients that
wait for a server queue up at once: the accepted ones are found among the descriptors of this process, and asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop
from tests.raw_peer import AMPLE_S

from rallypoint import net
from rallypoint.server.server import StoreServer
from rallypoint.server.settings import Settings

CLIENTS = 8
OPTIONS = {
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_NODELAY): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 5,
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): 6000,
}


def options(sock: socket.socket) -> dict[tuple[int, int], int]:
    return {option: sock.getsockopt(*option) for option in OPTIONS}


def accepted_from(client: socket.socket) -> dict[tuple[int, int], int]:
    """Return the options of the other end of a connection, which is in this process."""
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if not str(path.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(path.name))) as sock:
                if sock.getpeername() == client.getsockname():
                    return options(sock)
    raise AssertionError(f"nobody has accepted {client}")


@contextlib.contextmanager
def hammering(address: tuple[str, int]) -> Iterator[list[socket.socket]]:
    """Let clients try to connect without a pause, like agents that wait for their server; yield the connected."""
    met: list[socket.socket] = []
    deadline = time.monotonic() + AMPLE_S

    def hammer() -> None:
        while time.monotonic() < deadline:
            with contextlib.suppress(ConnectionRefusedError):
                met.append(socket.create_connection(address))
                return

    threads = [threading.Thread(target=hammer) for _ in range(CLIENTS)]
    try:
        for thread in threads:
            thread.start()
        yield met
    finally:
        for thread in threads:
            thread.join()
        for sock in met:
            sock.close()


async def serve_until_all_are_in(listening: socket.socket, clients: list[socket.socket]) -> None:
    server = StoreServer(Settings())
    await server.open([listening])
    deadline = time.monotonic() + AMPLE_S
    while server.listener.connections < CLIENTS and time.monotonic() < deadline:
        await asyncio.sleep(0)
    assert [accepted_from(client) for client in clients] == [OPTIONS] * CLIENTS
    await server.close()


@pytest.mark.parametrize("make_loop", [uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
@pytest.mark.parametrize("listens", [False, True], ids=["bound", "listening"])
def test_clients_queued_before_the_server_starts_get_keep_alive(listens: bool, make_loop: object) -> None:
    reserved = socket.create_server(("127.0.0.1", 0)) if listens else socket.socket()
    if not listens:
        reserved.bind(("127.0.0.1", 0))
    with hammering(reserved.getsockname()) as met, contextlib.closing(make_loop()) as loop:  # type: ignore[operator]
        deadline = time.monotonic() + AMPLE_S
        listening = net.adopt(reserved.detach())
        while len(met) < CLIENTS:
            assert time.monotonic() < deadline
        loop.run_until_complete(serve_until_all_are_in(listening, met))


def test_clients_that_connect_as_a_server_starts_get_keep_alive() -> None:
    (listening,) = net.listen(["127.0.0.1"], 0)
    with listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert options(accepted) == OPTIONS
