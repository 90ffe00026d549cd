"""Round listeners: a port with a namespace of its own for each round of a run; in memory, and through a log."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.server.fake_log import Bugs, FakeLog, disk_full, on_log
from tests.server.peers import Line, Ours, Torch, settle
from tests.wire import AMPLE_S

from rallypoint import net
from rallypoint.core import lock, ops
from rallypoint.core.entries import OpenNamespace
from rallypoint.protocol.c10d import Opcode, encode
from rallypoint.server.doors import TooLate
from rallypoint.server.rounds import RoundListener
from rallypoint.server.server import StoreServer
from rallypoint.server.settings import Settings

LONG_S = 1000.0
GET = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"


def in_memory(**settings: Any) -> Callable[..., Callable[[], None]]:
    """Run a test in a loop, with a server in memory that listens on loopback."""

    def decorate(test: Callable[[StoreServer, FakeLog | None], Awaitable[None]]) -> Callable[[], None]:
        async def run() -> None:
            server = StoreServer(Settings(**settings))
            await server.open(net.listen(["127.0.0.1"], 0))
            await asyncio.wait_for(test(server, None), AMPLE_S)
            await server.close()

        def call() -> None:
            with Bugs.none():
                asyncio.run(run())

        return call

    return decorate


def both(test: Callable[[StoreServer, FakeLog | None], Awaitable[None]]) -> Callable[[str], None]:
    """Run a test with a server in memory, and with one that has a log."""

    @pytest.mark.parametrize("kept", ["memory", "log"])
    def call(kept: str) -> None:
        (in_memory()(test) if kept == "memory" else on_log(test))()

    call.__name__, call.__doc__ = test.__name__, test.__doc__
    return call


async def opened(server: StoreServer, name: str, scope: int, number: int | None = None) -> int:
    """Return the port of a round, or raise why there is none."""
    answer: asyncio.Future[int | Exception] = asyncio.get_running_loop().create_future()
    server.open_round(name, scope, number, answer.set_result)
    port = await answer
    if isinstance(port, Exception):
        raise port
    return port


async def closed(server: StoreServer, name: str, scope: int | None = None) -> bool:
    answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    server.close_round(name, scope, answer.set_result)
    return await answer


async def ours(port: int) -> Ours:
    peer = await Ours.dial(port)
    await peer.greets()
    assert peer.session
    return peer


async def torch(port: int) -> Torch:
    return await (await Torch.dial(port)).greets()


async def is_shut(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionRefusedError:
        return True
    writer.close()
    return False


def main_port(server: StoreServer) -> int:
    return int(server.sockets[0].getsockname()[1])


# A later round replaces the earlier one


@both
async def test_a_later_round_replaces_the_earlier_one(server: StoreServer, log: FakeLog | None) -> None:
    first = await opened(server, "run", 1)
    worker, store = await torch(first), await ours(first)
    await store.asked(ops.Set(1, b"/k", b"first"))
    await store.asked(ops.Lease(2, b"/leased", b"v", 0.0))
    worker.asks(Opcode.WAIT, 1, b"/never")
    store.asks(ops.Take(3, b"/q", LONG_S))
    second = await opened(server, "run", 2, number=7)
    assert second != first
    await asyncio.gather(worker.ends(), store.ends())
    assert await is_shut(first)
    later = await ours(second)
    assert await later.asked(ops.Count(1, b"")) == 0, "nothing is left of the round before"
    assert server.statistics()["doors"] == {
        "run": {"round": 7, "scope": 2, "port": second, "connections": 1, "keys": 0}
    }
    with pytest.raises(TooLate, match="a later round of 'run' has begun"):
        await opened(server, "run", 1)


@both
async def test_the_sessions_of_a_dropped_namespace_end(server: StoreServer, log: FakeLog | None) -> None:
    port = await opened(server, "run", 1)
    peer, front = await ours(port), await ours(main_port(server))
    await peer.asked(ops.Lease(1, b"/leased", b"v", LONG_S))
    peer.asks(ops.Get(2, b"/never", LONG_S), ops.Act(3, b"/lock", "me", 1, lock.Acquire(), LONG_S))
    assert (await peer.reads())[0] == 3
    before = server.statistics()
    assert len(server.state.sessions) == 2 and before["more_sessions"] == 0
    assert [one["name"] for one in before["sessions"]] == ["test"], "the server's own page has its own"
    assert await closed(server, "run")
    await peer.ends()
    assert list(server.state.sessions_by_id) == [front.session] and len(server.state.namespaces) == 1
    assert server.state.budget.kept == 0
    again = await Ours.dial(main_port(server))
    _, why = await again.greets(peer.session)
    assert why == "unknown session: expired, or created by another server"
    assert not server.clock.deadlines, "what they waited for is nobody's deadline any more"


@both
async def test_a_session_is_resumed_only_where_it_was_opened(server: StoreServer, log: FakeLog | None) -> None:
    port = await opened(server, "run", 1)
    peer = await ours(port)
    other = await Ours.dial(main_port(server))
    assert (await other.greets(peer.session))[1].startswith("unknown session")
    await peer.asked(ops.Set(1, b"/k", b"v"))
    again = await Ours.dial(port)
    assert len(await again.greets(peer.session)) > 2, "the session went on meanwhile"


@both
async def test_what_comes_behind_the_end_of_a_round_does_no_harm(server: StoreServer, log: FakeLog | None) -> None:
    """Requests that were sent before their round ended, and are read after it, in any order with its end."""
    for scope in range(1, 30):
        port = await opened(server, "run", scope)
        peer, worker = await ours(port), await torch(port)
        await peer.asked(ops.MultiSet(1, [(b"/%d" % number, b"") for number in range(1500)]))
        if log is not None and scope % 3 == 0:
            log.stalled = True
        end = asyncio.ensure_future(closed(server, "run"))
        requests = (
            ops.DeletePrefix(2, b"/"),
            ops.Act(3, b"/lock", "me", 1, lock.Acquire(), LONG_S),
            ops.Lease(4, b"/leased", b"v", 5.0),
            ops.Take(5, b"/q", LONG_S),
            ops.Set(6, b"/k", b"v"),
        )
        if scope % 2:
            await asyncio.sleep(0)
        peer.asks(*requests)
        worker.says(encode(Opcode.WAIT, 1, b"/q") + encode(Opcode.BARRIER, b"/b", 2) + encode(Opcode.SET, b"/k", b"v"))
        for _ in range(scope):
            await asyncio.sleep(0)
        if log is not None:
            await log.flow()
        assert await end
        await asyncio.gather(peer.ends(), worker.ends())
        await settle()
        assert not server.state.visitors and not server.state.sessions
        assert server.state.budget.kept == 0 and server.held_bytes() == 0


@on_log
async def test_requests_that_are_committed_behind_the_end_of_their_round_change_nothing(
    server: StoreServer, log: FakeLog
) -> None:
    """As they do when the log is replayed: they find no namespace. Here the connections stay open after it."""
    await opened(server, "run", 1)
    listener = RoundListener(server, server.state.namespaces[1])
    worker, peer = await Torch(listener).greets(), Ours(listener)
    await peer.greets()
    log.stalled = True
    end = asyncio.ensure_future(closed(server, "run"))
    await settle()
    worker.says(encode(Opcode.SET, b"/k", b"v") + encode(Opcode.WAIT, 1, b"/q"))
    peer.asks(ops.Take(1, b"/q", LONG_S), ops.Set(2, b"/k", b"v"))
    await log.flow()
    assert await end
    assert not server.state.visitors and not worker.pending and not peer.pending
    worker.asks(Opcode.WAIT, 1, b"/q")
    await settle()
    assert not server.state.visitors


@both
async def test_a_round_that_is_closed_as_soon_as_it_is_opened_listens_no_more(
    server: StoreServer, log: FakeLog | None
) -> None:
    for turns in range(6):
        port = await opened(server, "run", 1)
        for _ in range(turns):
            await asyncio.sleep(0)
        assert await closed(server, "run", 1)
        await settle()
        assert await is_shut(port), f"after {turns} turns of the loop"
    assert server.crowd == 0


@both
async def test_two_who_open_a_round_at_once_get_the_same_port(server: StoreServer, log: FakeLog | None) -> None:
    ports = await asyncio.gather(*(opened(server, "run", 1) for _ in range(5)))
    assert len(set(ports)) == 1
    peer = await torch(ports[0])
    await peer.pings()
    assert server.crowd == 2, "a connection, and one listening socket"
    late = await asyncio.gather(opened(server, "run", 3), opened(server, "run", 2), return_exceptions=True)
    assert isinstance(late[0], int) and isinstance(late[1], TooLate)


@both
async def test_who_is_connected_at_a_round_is_counted(server: StoreServer, log: FakeLog | None) -> None:
    port = await opened(server, "run", 1)
    peers = [await torch(port), await ours(port), await torch(main_port(server))]
    assert (server.connections, server.in_rounds, server.crowd) == (1, 2, 4)
    for peer in peers:
        peer.hangs_up()
    while server.crowd > 1:
        await asyncio.sleep(0)
    assert (server.connections, server.in_rounds) == (0, 0)


# A restart


@in_memory()
async def test_rounds_that_the_log_has_get_their_ports_back(server: StoreServer, log: FakeLog | None) -> None:
    (free,) = net.listen(["127.0.0.1"], 0)
    port = free.getsockname()[1]
    free.close()
    restarted = StoreServer(Settings())
    restarted.state.apply(OpenNamespace("run", 4, 2, port))
    await restarted.open(net.listen(["127.0.0.1"], 0))
    await (await torch(port)).pings()
    assert await opened(restarted, "run", 4) == port
    await restarted.close()
    assert await is_shut(port)


@in_memory()
async def test_a_round_whose_port_is_taken_after_a_restart_gets_another(
    server: StoreServer, log: FakeLog | None
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        restarted = StoreServer(Settings())
        restarted.state.apply(OpenNamespace("run", 4, 2, port))
        await restarted.open(net.listen(["127.0.0.1"], 0))
        assert restarted.statistics()["doors"] == {}
        other = await opened(restarted, "run", 4)
        assert other != port, "somebody else listens there"
        await (await torch(other)).pings()
        assert await opened(restarted, "run", 4) == other == restarted.statistics()["doors"]["run"]["port"]
        await restarted.close()


# Over HTTP, with requests behind


def put(path: str) -> bytes:
    return f"PUT /rounds/{path} HTTP/1.1\r\nhost: x\r\n\r\n".encode()


def delete(path: str) -> bytes:
    return f"DELETE /rounds/{path} HTTP/1.1\r\nhost: x\r\n\r\n".encode()


async def bodies(peer: Line, count: int) -> list[Any]:
    """Return the bodies of so many answers, JSON where they are."""
    found = []
    for _ in range(count):
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += await peer.hears(1)
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        body = await peer.hears(length)
        found.append(json.loads(body) if b"application/json" in head else body)
    return found


@both
async def test_requests_behind_a_put_are_answered_after_it(server: StoreServer, log: FakeLog | None) -> None:
    peer = Line(server)
    if log is not None:
        log.stalled = True
    peer.says(GET + put("run/1") + GET + delete("run/2") + GET)
    await settle()
    if log is not None:
        assert peer.pending.count(b"ok\n") == 1, "the rest comes in its order"
        await log.flow()
    first, opened_at, second, ended, third = await bodies(peer, 5)
    assert first == second == third == b"ok\n" and ended == {"closed": True}
    assert await is_shut(opened_at["port"])


@both
async def test_many_requests_behind_a_put_are_all_answered(server: StoreServer, log: FakeLog | None) -> None:
    peer = Line(server)
    if log is not None:
        log.stalled = True
    peer.says(put("run/1") + GET * 100 + put("run/2") + GET * 100 + delete("run"))
    await settle()
    if log is not None:
        await log.flow()
    answers = await bodies(peer, 203)
    assert answers[1:101] == answers[102:202] == [b"ok\n"] * 100
    assert answers[0]["port"] != answers[101]["port"] and answers[202] == {"closed": True}
    assert not peer.stopped


@both
async def test_a_put_that_comes_byte_by_byte(server: StoreServer, log: FakeLog | None) -> None:
    peer = Line(server)
    for byte in put("run/1") + GET + delete("run/1"):
        while peer.stopped:
            await asyncio.sleep(0)
        peer.says(bytes((byte,)))
    answers = await bodies(peer, 3)
    assert "port" in answers[0] and answers[1:] == [b"ok\n", {"closed": True}]


@both
async def test_a_connection_that_is_to_close_is_closed_behind_the_answer(
    server: StoreServer, log: FakeLog | None
) -> None:
    peer = await Line.dial(main_port(server))
    peer.says(put("run/1").replace(b"host: x", b"host: x\r\nconnection: close"))
    (answer,) = await bodies(peer, 1)
    assert "port" in answer
    await peer.ends()


@both
async def test_bad_http_behind_a_put_is_answered_behind_it(server: StoreServer, log: FakeLog | None) -> None:
    peer = await Line.dial(main_port(server))
    peer.says(put("run/1") + b"NONSENSE\r\n\r\n")
    answer, _ = await bodies(peer, 2)
    assert "port" in answer
    await peer.ends()


@on_log
async def test_who_asks_for_a_round_is_not_read_from_before_it_is_answered(server: StoreServer, log: FakeLog) -> None:
    peer = Line(server)
    log.stalled = True
    peer.says(put("run/1"))
    assert peer.stopped and not peer.pending
    await log.flow()
    assert not peer.stopped and "port" in (await bodies(peer, 1))[0]


@on_log
async def test_who_asks_for_a_round_may_hang_up_before_the_answer(server: StoreServer, log: FakeLog) -> None:
    peer = Line(server)
    log.stalled = True
    peer.says(put("run/1") + GET)
    peer.hangs_up()
    await settle()
    await log.flow()
    assert list(server.statistics()["doors"]) == ["run"]


@on_log
async def test_a_full_disk_opens_no_round_and_keeps_no_socket(server: StoreServer, log: FakeLog) -> None:
    log.error = disk_full()
    with pytest.raises(Exception, match="No space left on device"):
        await opened(server, "run", 1)
    assert server.crowd == 0 and server.statistics()["doors"] == {}
    log.error = None
    assert await opened(server, "run", 1)
