"""A server in a thread: it serves all clients, is killed and restarted, and its misuse is an error."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from tests.raw_peer import AMPLE_S, RawPeer

import rallypoint
from rallypoint import Barrier, WorkQueue, aio
from rallypoint.security.credentials import Credentials
from rallypoint.testing import InProcessServer

SERVERS = 5


@pytest.fixture
def server() -> Iterator[InProcessServer]:
    with InProcessServer() as server:
        yield server


def server_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("server at ")]


def connect(server: InProcessServer) -> rallypoint.Store:
    return rallypoint.connect(server.url, timeout=AMPLE_S)


def test_blocking_asyncio_and_torch_clients_use_one_store(server: InProcessServer) -> None:
    async def ask() -> bytes:
        async with await aio.connect(server.url, timeout=AMPLE_S) as store:
            return await store.get("k")

    with connect(server) as store, RawPeer(("127.0.0.1", server.port)):
        store.set("k", "v")
        assert asyncio.run(ask()) == b"v"
        assert {client["speaks"] for client in server.statistics()["clients"]} == {"rallypoint", "torch"}


def test_threads_meet_at_a_barrier(server: InProcessServer) -> None:
    def meet(member: str) -> None:
        with connect(server) as store:
            Barrier(store, "epoch", list("abc")).wait(member, AMPLE_S)

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(meet, member) for member in "abc"]:
            done.result(AMPLE_S)


def test_several_servers_are_strangers() -> None:
    servers = [InProcessServer() for _ in range(SERVERS)]
    for number, server in enumerate(servers):
        with connect(server) as store:
            assert store.add("n", number) == number
    for number, server in enumerate(servers):
        with connect(server) as store:
            assert store.get("n") == b"%d" % number
        server.close()


def test_a_restarted_server_is_empty_and_another_one(server: InProcessServer) -> None:
    with connect(server) as store:
        store.set("k", "v")
        server.restart()
        with pytest.raises(rallypoint.ServerRestarted):
            store.get("k")
    with connect(server) as store:
        assert not store.check(["k"])


def test_a_durable_server_keeps_sessions_and_waiting_calls() -> None:
    with InProcessServer(durable=True) as server, connect(server) as store, ThreadPoolExecutor(1) as pool:
        store.lease("mine", "v")
        waiting = pool.submit(store.get, "late")
        server.wait_for_waiters(1)
        for _ in range(3):
            server.kill()
            assert not server.running()
            server.start()
        with connect(server) as other:
            assert other.get("mine") == b"v"
            other.set("late", "1")
        assert waiting.result(AMPLE_S) == b"1"
        server.restart(forget=True)
        with pytest.raises(rallypoint.ServerRestarted):
            store.get("mine")


def test_a_cut_costs_nothing(server: InProcessServer) -> None:
    with connect(server) as store:
        for count in range(1, 30):
            server.cut()
            assert store.add("n", 1) == count
        assert len(server.statistics()["sessions"]) == 1


def test_an_item_returns_when_the_session_of_its_taker_ends() -> None:
    with InProcessServer(grace=0) as server, connect(server) as store, connect(server) as other:
        queue = WorkQueue(store, "q")
        queue.put("item")
        WorkQueue(other, "q").take(AMPLE_S)
        other.close()
        assert queue.take(AMPLE_S).deliveries == 2


def test_the_port_is_its_own_while_it_is_down(server: InProcessServer) -> None:
    port = server.port
    server.kill()
    with InProcessServer() as other:
        assert other.port != port
        server.start()
        assert server.port == port and connect(server).add("n", 1) == 1


def test_a_token_is_needed_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RALLYPOINT_TOKEN", raising=False)
    token = "t" * 40
    with InProcessServer(credentials=Credentials(token=token)) as server:
        with pytest.raises(rallypoint.AuthenticationFailed):
            connect(server)
        with rallypoint.connect(server.url, timeout=AMPLE_S, credentials=Credentials(token=token)) as store:
            assert store.add("n", 1) == 1


def test_its_thread_and_connections_end() -> None:
    with InProcessServer() as server:
        peers = [RawPeer(("127.0.0.1", server.port)) for _ in range(20)]
        server.wait_until(lambda statistics: statistics["connections"] == 20)
        assert f"server at {server.port}" in server_threads()
    for peer in peers:
        assert peer.socket.recv(1) == b""
        peer.close()
    assert not server_threads()


# Conditions


def test_a_condition_is_waited_for(server: InProcessServer) -> None:
    with ThreadPoolExecutor(1) as pool, connect(server) as store:
        reached = pool.submit(server.wait_until, lambda statistics: statistics["keys"] == 3)
        for name in "abc":
            assert not reached.done()
            store.set(name, "v")
        reached.result(AMPLE_S)


def test_a_condition_that_does_not_hold_shows_the_statistics(server: InProcessServer) -> None:
    with pytest.raises(TimeoutError, match=r"did not hold within 0 s; last: .*'waiting': 0"):
        server.wait_for_waiters(1, timedelta(0))
    with connect(server) as store:
        store.set("k", "v")  # it is not evaluated any more


def test_an_error_of_a_condition_is_raised(server: InProcessServer) -> None:
    with pytest.raises(KeyError, match="typo"):
        server.wait_until(lambda statistics: statistics["typo"])
    assert server.statistics()["waiting"] == 0


def test_a_condition_may_ask_the_server(server: InProcessServer) -> None:
    server.wait_until(lambda statistics: server.statistics()["waiting"] == statistics["waiting"])


def test_a_condition_ends_when_the_server_is_killed(server: InProcessServer) -> None:
    seen = threading.Event()

    def look(statistics: dict[str, Any]) -> bool:
        seen.set()
        return False

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.wait_until, look)
        assert seen.wait(AMPLE_S)
        server.kill()
        with pytest.raises(rallypoint.ServerFailed, match="killed meanwhile"):
            waiting.result(AMPLE_S)


# Misuse


def test_a_server_that_is_down_has_no_statistics(server: InProcessServer) -> None:
    with pytest.raises(ValueError, match="running already"):
        server.start()
    server.kill()
    server.kill()
    for call in (server.statistics, server.cut, lambda: server.wait_for_waiters(0)):
        with pytest.raises(ValueError, match=r"killed> is not running: start\(\) it"):
            call()
    server.close()
    server.close()
    with pytest.raises(ValueError, match="cannot be started again: create another server"):
        server.start()


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"recovery": 5}, ValueError, "recovery needs durable=True"),
        ({"grace": -1}, ValueError, "grace must not be negative"),
        ({"grace": 1e9}, ValueError, "grace must be at most 86400 s"),
        ({"recovery": 1e9, "durable": True}, ValueError, "recovery must be at most"),
        ({"max_memory": 10}, ValueError, "max_memory must be at least 1048576 bytes, got 10"),
        ({"max_memory": "1G"}, TypeError, "max_memory must be a number of bytes"),
        ({"clock": 60}, TypeError, "clock must be a VirtualClock, not 60"),
        ({"credentials": "secret"}, TypeError, "credentials must be Credentials$"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        InProcessServer(**options)


def test_a_forked_child_is_told_that_the_server_is_its_parents(server: InProcessServer) -> None:
    child = os.fork()
    if child == 0:
        try:
            server.statistics()
        except ValueError as error:
            server.close()  # as the end of a `with` block does
            os._exit(0 if "of which this one is a fork" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert server.statistics()["waiting"] == 0


def test_an_error_at_the_start_is_raised() -> None:
    class Broken(InProcessServer):
        def new_server(self, loop: asyncio.AbstractEventLoop) -> Any:
            server = super().new_server(loop)
            server.open = None  # type: ignore[method-assign, assignment]
            return server

    with pytest.raises(TypeError, match="not callable"):
        Broken()
    assert not server_threads()
