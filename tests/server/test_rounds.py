"""Rounds: namespaces of a server, entered by a hello that names one, and closed over HTTP; in memory and on a log."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.server.fake_log import FakeLog, both, disk_full, in_memory, on_log
from tests.server.fake_relay import ChannelClient, FakeRelay
from tests.server.peers import FakeTransport, NativePeer, settle

from rallypoint import net
from rallypoint.core import ops
from rallypoint.core.entries import (
    ContinueDelete,
    DetachOwner,
    EndSession,
    Entry,
    OpenNamespace,
    OpenSession,
    SessionRequest,
)
from rallypoint.core.machines import lock
from rallypoint.core.state import SLICE_KEYS
from rallypoint.relay.round_ports import close_at_server
from rallypoint.security.client_security import ClientSecurity
from rallypoint.security.credentials import OPEN
from rallypoint.server import round_namespaces
from rallypoint.server.server import StoreServer
from rallypoint.server.settings import Settings

LONG_S = 1000.0
GET = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"


async def entered(server: StoreServer, run: str, scope: int, number: int | None = None) -> ChannelClient:
    """Return a client in the namespace of a round, on a connection with channels of its own."""
    peer = (await FakeRelay(server).opens()).client()
    await peer.greets(run=run, scope=scope, round=number)
    assert peer.session
    return peer


async def leaves(peer: ChannelClient) -> None:
    """Have a client end its session."""
    peer.asks(ops.Bye(1))
    await settle()
    peer.closes()
    await settle()


async def closed(server: StoreServer, name: str, scope: int | None = None) -> bool:
    answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    server.rounds.close(name, scope, answer.set_result)
    return await answer


async def ours(server: StoreServer) -> NativePeer:
    """Return a client of the default namespace."""
    peer = await NativePeer.dial(main_port(server))
    await peer.greets()
    return peer


def main_port(server: StoreServer) -> int:
    return int(server.listener.sockets[0].getsockname()[1])


# A later round replaces the earlier one


@both
async def test_a_later_round_replaces_the_earlier_one(server: StoreServer, log: FakeLog | None) -> None:
    first, everybody = await entered(server, "run", 1), await ours(server)
    await first.asked(ops.Set(1, b"/k", b"first"))
    await first.asked(ops.SetLease(2, b"/leased", b"v", 0.0))
    first.asks(ops.BlockingPop(3, b"/q", LONG_S))
    later = await entered(server, "run", 2, number=7)
    assert await first.ends() == ""
    assert await later.asked(ops.Count(1, b"")) == 0, "the new round is empty"
    facts, _, sessions = server.statistics()
    assert facts["namespaces"] == {"run": {"round": 7, "scope": 2, "sessions": 1, "keys": 0}}
    assert facts["rounds"] == 1 and len(list(sessions)) == 2, "the page shows who is in a round, too"
    assert await everybody.asked(ops.Count(1, b"")) == 0


@both
async def test_a_round_replaced_in_the_middle_of_a_change_leaves_no_work(
    server: StoreServer, log: FakeLog | None
) -> None:
    """The end of a session deletes its leases in slices; the next round begins before the last of them."""
    server.submit(OpenNamespace("run", 1, None))
    server.submit(OpenSession(b"s" * 16, "client", 1, []))
    for number in range(SLICE_KEYS + 1):
        server.submit(SessionRequest(1, ops.SetLease(number + 1, b"/%d" % number, b"v", 0.0)))
    await settle()
    engine, slices, apply = server.state.namespaces[1].engine, list[Entry](), server.state.apply

    def counting(entry: Entry) -> Any:
        slices.extend([entry] if isinstance(entry, ContinueDelete) else [])
        return apply(entry)

    server.state.apply = counting  # type: ignore[method-assign]
    server.submit(DetachOwner(1))
    server.submit(EndSession(1))
    server.submit(OpenNamespace("run", 2, None))
    await settle()
    assert len(slices) <= 1 and not engine.clearing


@both
async def test_a_client_of_a_relays_port_is_not_sent_other_servers(server: StoreServer, log: FakeLog | None) -> None:
    """They would put it into the default namespace."""
    server.notices.set_servers(["tcp://a:1"])
    peers = [(await FakeRelay(server).opens()).client() for _ in range(2)]
    for peer, one_port in zip(peers, (True, False), strict=True):
        welcome = await peer.greets(run="run", scope=1, one_port=one_port)
        assert welcome[-1] == ([] if one_port else ["tcp://a:1"])
    server.notices.set_servers(["tcp://a:1", "tcp://b:2"])
    told = [(await peer.reads())[2] for peer in peers]
    assert [notice["servers"] for notice in told] == [None, ["tcp://a:1", "tcp://b:2"]]


def test_a_standby_closes_no_round() -> None:
    """Its state follows the log, and would differ from it."""

    async def run() -> None:
        server = StoreServer(Settings())
        await server.stand_by(net.listen(["127.0.0.1"], 0), b"elsewhere")
        with pytest.raises(ValueError, match="503"):
            await close_at_server(net.Endpoint("127.0.0.1", main_port(server)), ClientSecurity(OPEN), "run", 1)
        await server.close()

    asyncio.run(run())


@both
async def test_nothing_listens_for_a_round(server: StoreServer, log: FakeLog | None) -> None:
    browser = FakeTransport(server)
    browser.says(b"PUT /rounds/run/1?round=1 HTTP/1.1\r\nhost: x\r\n\r\n")
    assert browser.pending.startswith(b"HTTP/1.1 404") and b"a relay of it does" in browser.pending
    browser.hangs_up()
    await settle()
    peer = await entered(server, "run", 1)
    assert (server.listener.limit.connections, server.listener.limit.round_sockets) == (1, 0)
    assert server.state.namespace_of("run") is not None
    peer.closes()


@both
async def test_the_sessions_of_a_dropped_namespace_end(server: StoreServer, log: FakeLog | None) -> None:
    peer, front = await entered(server, "run", 1), await ours(server)
    await peer.asked(ops.SetLease(1, b"/leased", b"v", LONG_S))
    peer.asks(ops.Get(2, b"/never", LONG_S), ops.Act(3, b"/lock", "me", 1, lock.LockAcquire(), LONG_S))
    assert (await peer.reads())[0] == 3
    assert len(server.state.sessions) == 2
    assert await closed(server, "run")
    await peer.ends()
    assert list(server.state.sessions_by_id) == [front.session] and len(server.state.namespaces) == 1
    assert server.state.memory.kept == 0
    again = await NativePeer.dial(main_port(server))
    _, why = await again.greets(peer.session)
    assert why == "unknown session: expired, or created by another server"
    assert not server.clock.deadlines, "their waits leave no deadlines"


@both
async def test_requests_read_after_the_end_of_their_round_are_harmless(
    server: StoreServer, log: FakeLog | None
) -> None:
    """Requests sent before their round ended and read after it, in every order with the end."""
    for scope in range(1, 30):
        peer = await entered(server, "run", scope)
        await peer.asked(ops.MultiSet(1, [(b"/%d" % number, b"") for number in range(500)]))
        if log is not None and scope % 3 == 0:
            log.stalled = True
        end = asyncio.ensure_future(closed(server, "run"))
        requests = (
            ops.DeletePrefix(2, b"/"),
            ops.Act(3, b"/lock", "me", 1, lock.LockAcquire(), LONG_S),
            ops.SetLease(4, b"/leased", b"v", 5.0),
            ops.BlockingPop(5, b"/q", LONG_S),
            ops.Set(6, b"/k", b"v"),
        )
        if scope % 2:
            await asyncio.sleep(0)
        peer.asks(*requests)
        for _ in range(scope):
            await asyncio.sleep(0)
        if log is not None:
            await log.flow()
        assert await end
        await peer.ends()
        await settle()
        assert not server.state.connection_owners and not server.state.sessions
        assert server.state.memory.kept == 0 and server.held_bytes() == 0


@both
async def test_closing_another_round_than_the_last_has_no_effect(server: StoreServer, log: FakeLog | None) -> None:
    peer = await entered(server, "run", 4)
    assert not await closed(server, "run", 3) and not await closed(server, "other")
    assert await peer.asked(ops.Add(1, b"/n", 1)) == 1
    assert await closed(server, "run", 4) and not await closed(server, "run", 4)
    await entered(server, "run", 2)  # round 4 is forgotten
    assert await closed(server, "run")


# Limits


def limited(test: Callable[[StoreServer, FakeLog | None], Awaitable[None]]) -> Callable[..., None]:
    """Run a test with servers limited to three rounds."""

    @pytest.mark.parametrize("kept", ["memory", "log"])
    def call(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(round_namespaces, "MAX_ROUNDS", 3)
        (in_memory()(test) if kept == "memory" else on_log(test))()

    call.__name__, call.__doc__ = test.__name__, test.__doc__
    return call


@limited
async def test_rounds_are_limited_and_empty_ones_make_room(server: StoreServer, log: FakeLog | None) -> None:
    peers = {name: await entered(server, name, 1) for name in ("a", "b", "empty")}
    await leaves(peers["empty"])
    peers["c"] = await entered(server, "c", 1)
    assert set(server.rounds.statistics()) == {"a", "b", "c"}
    late = (await FakeRelay(server).opens()).client()
    _, why = await late.greets(run="d", scope=1)
    assert why == "too many rounds: 3 are open, with sessions in each"
    await entered(server, "a", 2)  # another round of an existing run
    assert await peers["b"].asked(ops.Ping(1)) is None


@limited
async def test_many_hellos_at_once_do_not_pass_the_limit(server: StoreServer, log: FakeLog | None) -> None:
    """The entry of each is still uncommitted when the next one is counted."""
    old = [await entered(server, f"old {number}", 1) for number in range(2)]
    for peer in old:
        await leaves(peer)
    if log is not None:
        log.stalled = True
    peers = [(await FakeRelay(server).opens()).client() for _ in range(10)]
    greetings = [asyncio.ensure_future(peer.greets(run=f"new {n}", scope=1)) for n, peer in enumerate(peers)]
    await settle()
    if log is not None:
        await log.flow()
    answers = await asyncio.gather(*greetings)
    assert [len(answer) > 2 for answer in answers] == [True] * 3 + [False] * 7
    assert set(server.rounds.statistics()) == {"new 0", "new 1", "new 2"}


@on_log
async def test_a_full_disk_opens_no_round(server: StoreServer, log: FakeLog) -> None:
    log.error = disk_full()
    peer = (await FakeRelay(server).opens()).client()
    _, why = await peer.greets(run="run", scope=1)
    assert "No space left on device" in why
    assert server.statistics().facts["namespaces"] == {}
    log.error = None
    await entered(server, "run", 1)


# Over HTTP, with requests behind


def put(path: str) -> bytes:
    return f"PUT /rounds/{path} HTTP/1.1\r\nhost: x\r\n\r\n".encode()


def delete(path: str) -> bytes:
    return f"DELETE /rounds/{path} HTTP/1.1\r\nhost: x\r\n\r\n".encode()


async def bodies(peer: FakeTransport, count: int) -> list[Any]:
    """Return the bodies of `count` replies, decoded if JSON."""
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
async def test_a_put_is_refused_and_refers_to_the_relay(server: StoreServer, log: FakeLog | None) -> None:
    peer = FakeTransport(server)
    peer.says(put("run/1") + GET)
    why, well = await bodies(peer, 2)
    assert b"a relay of it does" in why and well == b"ok\n"
    assert server.statistics().facts["namespaces"] == {}


@both
async def test_requests_behind_a_delete_are_answered_after_it(server: StoreServer, log: FakeLog | None) -> None:
    inside, peer = await entered(server, "run", 1), FakeTransport(server)
    if log is not None:
        log.stalled = True
    peer.says(GET + delete("run/2") + GET + delete("run") + GET)
    await settle()
    if log is not None:
        assert peer.pending.count(b"ok\n") == 1, "the rest comes in its order"
        await log.flow()
    first, ended, second, again, third = await bodies(peer, 5)
    assert first == second == third == b"ok\n"
    assert ended == {"closed": True} and again == {"closed": False}
    assert await inside.ends() == ""


@both
async def test_many_requests_behind_a_delete_are_all_answered(server: StoreServer, log: FakeLog | None) -> None:
    await entered(server, "run", 1)
    peer = FakeTransport(server)
    if log is not None:
        log.stalled = True
    peer.says(delete("run/1") + GET * 100 + delete("run/2") + GET * 100)
    await settle()
    if log is not None:
        await log.flow()
    answers = await bodies(peer, 202)
    assert answers[1:101] == answers[102:] == [b"ok\n"] * 100
    assert answers[0] == {"closed": True} and answers[101] == {"closed": False}
    assert not peer.stopped


@both
async def test_a_delete_that_comes_byte_by_byte(server: StoreServer, log: FakeLog | None) -> None:
    await entered(server, "run", 1)
    peer = FakeTransport(server)
    for byte in delete("run/1") + GET + delete("run/1"):
        while peer.stopped:
            await asyncio.sleep(0)
        peer.says(bytes((byte,)))
    assert await bodies(peer, 3) == [{"closed": True}, b"ok\n", {"closed": False}]


@both
async def test_a_connection_that_is_to_close_is_closed_behind_the_answer(
    server: StoreServer, log: FakeLog | None
) -> None:
    await entered(server, "run", 1)
    peer = await FakeTransport.dial(main_port(server))
    peer.says(delete("run/1").replace(b"host: x", b"host: x\r\nconnection: close"))
    assert await bodies(peer, 1) == [{"closed": True}]
    await peer.ends()


@both
async def test_bad_http_behind_a_delete_is_answered_behind_it(server: StoreServer, log: FakeLog | None) -> None:
    await entered(server, "run", 1)
    peer = await FakeTransport.dial(main_port(server))
    peer.says(delete("run/1") + b"NONSENSE\r\n\r\n")
    answer, _ = await bodies(peer, 2)
    assert answer == {"closed": True}
    await peer.ends()


@on_log
async def test_a_connection_that_closes_a_round_is_not_read_until_answered(server: StoreServer, log: FakeLog) -> None:
    await entered(server, "run", 1)
    peer = FakeTransport(server)
    log.stalled = True
    peer.says(delete("run/1"))
    assert peer.stopped and not peer.pending
    await log.flow()
    assert not peer.stopped and await bodies(peer, 1) == [{"closed": True}]


@on_log
async def test_a_client_that_closes_a_round_may_disconnect_before_the_reply(server: StoreServer, log: FakeLog) -> None:
    await entered(server, "run", 1)
    peer = FakeTransport(server)
    log.stalled = True
    peer.says(delete("run/1") + GET)
    peer.hangs_up()
    await settle()
    await log.flow()
    assert server.statistics().facts["rounds"] == 0


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PUT", "run"),
        ("PUT", "run/"),
        ("PUT", "run/one"),
        ("PUT", "run/-1"),
        ("PUT", "run/1.5"),
        ("PUT", "run/1/2"),
        ("PUT", f"run/{'9' * 5000}"),
        ("PUT", ""),
        ("PUT", "/1"),
        ("DELETE", ""),
        ("DELETE", "/1"),
        ("DELETE", "run/one"),
        ("DELETE", "run/"),
        ("DELETE", "run/1/2"),
    ],
)
def test_an_invalid_path_of_a_round_is_refused(method: str, path: str) -> None:
    async def test(server: StoreServer, log: FakeLog | None) -> None:
        await entered(server, "run", 1)
        peer = FakeTransport(server)
        peer.says(delete(path).replace(b"DELETE", method.encode()))
        (words,) = await bodies(peer, 1)
        assert words.startswith(b"nothing here: PUT or DELETE /rounds/RUN/SCOPE")
        assert server.statistics().facts["rounds"] == 1

    in_memory()(test)()


@pytest.mark.parametrize(
    ("name", "quoted"),
    [("a/b", "a%2Fb"), ("grüße", "gr%C3%BC%C3%9Fe"), ("..", "%2e%2e"), (" ", "%20"), ("x" * 1024, "x" * 1024)],
)
def test_names_of_runs_may_need_quoting(name: str, quoted: str) -> None:
    async def test(server: StoreServer, log: FakeLog | None) -> None:
        await entered(server, name, 1)
        assert list(server.statistics().facts["namespaces"]) == [name]
        peer = FakeTransport(server)
        peer.says(delete(f"{quoted}/1"))
        assert await bodies(peer, 1) == [{"closed": True}]

    in_memory()(test)()
