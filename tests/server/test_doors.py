"""Doors: ports behind which there is a store of its own, opened and closed over HTTP; and a server that nobody is at,
in front or behind a door, and that ends by itself.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import select
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.wire import AMPLE_S, Peer, Serving, read_line, script, until, wait_for_end

import rallypoint
from rallypoint.server import rounds
from rallypoint.server.doors import TooMany
from rallypoint.server.server import StoreServer
from rallypoint.server.settings import Settings


def ask(where: tuple[str, int], method: str, path: str) -> tuple[int, Any]:
    """Return status and answer: what JSON says, or else the words."""
    connection = http.client.HTTPConnection(*where, timeout=AMPLE_S)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        text = answer.read().decode()
        return answer.status, json.loads(text) if "json" in str(answer.getheader("content-type")) else text
    finally:
        connection.close()


class Front:
    """A server whose doors are opened and closed, all of a run of the test's own."""

    def __init__(self, server: Serving, run: str) -> None:
        self.server, self.run = server, run

    def open(self, scope: int, run: str = "", query: str = "") -> int:
        status, facts = ask(self.server.address, "PUT", f"/rounds/{run or self.run}/{scope}{query}")
        assert status == 200, facts
        return int(facts["port"])

    def close(self, path: str) -> bool:
        status, facts = ask(self.server.address, "DELETE", f"/rounds/{path}")
        assert status == 200, facts
        return bool(facts["closed"])

    def peer(self, port: int) -> Peer:
        return Peer((self.server.address[0], port))

    def doors(self) -> dict[str, Any]:
        found: dict[str, Any] = ask(self.server.address, "GET", "/statistics")[1]["doors"]
        return found


@pytest.fixture
def front(server: Serving, request: pytest.FixtureRequest) -> Iterator[Front]:
    run = request.node.originalname
    yield Front(server, run)
    ask(server.address, "DELETE", f"/rounds/{run}")


def is_shut(address: tuple[str, int]) -> bool:
    try:
        Peer(address, greet=False).close()
    except ConnectionRefusedError:
        return True
    return False


# Opening and closing


def test_a_round_has_one_door_however_often_it_is_opened(front: Front) -> None:
    port = front.open(3)
    assert port not in (front.server.address[1], 0) and front.open(3) == port
    with front.peer(port) as one, front.peer(front.open(3)) as other:
        one.set(b"/k", b"v")
        assert other.get(b"/k") == b"v"
        other.work()


def test_a_door_is_a_store_of_its_own(front: Front) -> None:
    ports = [front.server.address[1], front.open(1), front.open(1, "another")]
    host = front.server.address[0]
    torchs = [front.peer(port) for port in ports]
    ours = [rallypoint.TCPStore(host, port) for port in ports]
    for number, (torch, store) in enumerate(zip(torchs, ours, strict=True)):
        torch.set(b"/isolated", b"%d" % number)
        assert torch.add(b"/isolated/count", 1) == 1
        store.queue_push("isolated/queue", str(number))
    for number, (torch, store) in enumerate(zip(torchs, ours, strict=True)):
        assert store.get("isolated") == torch.get(b"/isolated") == b"%d" % number
        assert store.queue_len("isolated/queue") == 1
        assert sorted(store.list_keys())[:2] == ["isolated", "isolated/count"]
        lock = rallypoint.Lock(store, "isolated")
        assert lock.acquire(timeout=AMPLE_S), "nobody holds it, here"
        store.close()
        torch.close()
    assert front.close("another")


def test_the_door_of_a_later_round_closes_the_one_before(front: Front) -> None:
    first = front.open(5)
    with front.peer(first) as behind, rallypoint.TCPStore(front.server.address[0], first, timeout=AMPLE_S) as store:
        behind.set(b"/k", b"v")
        behind.wait(b"/never")
        second = front.open(9)
        assert second != first
        assert behind.rest() == b"", "it is hung up on"
        assert until(lambda: is_shut((front.server.address[0], first)), bool)
        with pytest.raises(rallypoint.NetworkError):
            store.get("k")
    with front.peer(second) as behind:
        behind.send(b"")
        assert behind.add(b"/k", 1) == 1, "nothing is left of the round before"


def test_the_door_of_an_earlier_round_is_refused(front: Front) -> None:
    port = front.open(9)
    status, why = ask(front.server.address, "PUT", f"/rounds/{front.run}/8")
    assert status == 409 and why == f"a later round of {front.run!r} has begun, and this one is over\n"
    with front.peer(port) as peer:
        peer.work(1)


def test_a_door_is_closed_by_whoever_asks_but_not_in_place_of_a_later_one(front: Front) -> None:
    port = front.open(4)
    with front.peer(port) as peer:
        assert not front.close(f"{front.run}/3")
        peer.work(1)
        assert front.close(f"{front.run}/4")
        assert peer.rest() == b""
    assert until(lambda: is_shut((front.server.address[0], port)), bool)
    assert not front.close(f"{front.run}/4") and not front.close(front.run)
    front.open(2)  # that round 4 was is forgotten
    assert front.close(front.run)


def test_names_of_runs_may_be_odd(front: Front) -> None:
    for run, name in {"a%2Fb": "a/b", "gr%C3%BC%C3%9Fe": "grüße", "%2e%2e": "..", "%20": " ", "x" * 9000: ""}.items():
        port = front.open(1, run)
        assert front.doors()[name or "x" * 9000]["port"] == port
        assert front.close(f"{run}/1")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PUT", "/rounds/run"),
        ("PUT", "/rounds/run/"),
        ("PUT", "/rounds/run/one"),
        ("PUT", "/rounds/run/-1"),
        ("PUT", "/rounds/run/1.5"),
        ("PUT", "/rounds/run/1/2"),
        ("PUT", f"/rounds/run/{'9' * 5000}"),
        ("PUT", "/rounds/"),
        ("PUT", "/rounds//1"),
        ("DELETE", "/rounds/"),
        ("DELETE", "/rounds//1"),
        ("DELETE", "/rounds/run/one"),
        ("DELETE", "/rounds/run/"),
        ("DELETE", "/rounds/run/1/2"),
    ],
)
def test_a_path_that_is_no_door_is_refused(front: Front, method: str, path: str) -> None:
    status, words = ask(front.server.address, method, path)
    assert status == 404 and words.startswith("nothing here: PUT or DELETE /rounds/RUN/SCOPE")
    assert "run" not in front.doors()


@pytest.mark.parametrize(
    ("method", "path"), [("PUT", "/rounds"), ("POST", "/rounds/run/1"), ("PUT", "/"), ("DELETE", "/")]
)
def test_another_method_is_refused(front: Front, method: str, path: str) -> None:
    assert ask(front.server.address, method, path)[0] == 405
    assert ask(front.server.address, "GET", "/rounds/run/1")[0] == 404


def test_the_statistics_show_what_is_behind_doors(front: Front) -> None:
    port = front.open(7, query="?round=2")
    with front.peer(port) as peer:
        peer.set(b"/k", b"v")
        expected = {"round": 2, "scope": 7, "port": port, "connections": 1, "keys": 1}
        assert front.doors()[front.run] == expected
        clients = ask(front.server.address, "GET", "/statistics")[1]["clients"]
        mine = "{}:{}".format(*peer.socket.getsockname())
        assert mine not in [client["peer"] for client in clients], "behind a door one is not in front of it"
    until(lambda: front.doors()[front.run]["connections"], lambda count: count == 0)


def test_a_door_listens_where_the_server_does_and_nowhere_else(tmp_path: Path) -> None:
    with Serving(tmp_path, hosts=["127.0.0.1", "127.0.0.3"]) as server:
        port = Front(server, "run").open(1)
        for host in ("127.0.0.1", "127.0.0.3"):
            with Peer((host, port)) as peer:
                peer.ping()
        assert is_shut(("127.0.0.2", port))


def test_doors_go_with_the_server() -> None:
    with rallypoint.Server() as server:
        port = ask(("127.0.0.1", server.port), "PUT", "/rounds/run/1")[1]["port"]
        peer = Peer(("127.0.0.1", port))
    assert peer.rest() == b"" and is_shut(("127.0.0.1", port))


# Limits


def with_server(test: Callable[[StoreServer], Awaitable[None]]) -> None:
    """Run a test in a loop with a server that listens."""

    async def run() -> None:
        from rallypoint import net

        server = StoreServer(Settings(max_connections=8))
        await server.open(net.listen(["127.0.0.1"], 0))
        try:
            await test(server)
        finally:
            await server.close()

    asyncio.run(run())


def opened(server: StoreServer, name: str, scope: int) -> int:
    """Return the port of a round, or raise why there is none."""
    answers: list[int | Exception] = []
    server.open_round(name, scope, None, answers.append)
    (answer,) = answers
    if isinstance(answer, Exception):
        raise answer
    return answer


def test_there_are_only_so_many_doors_and_empty_ones_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "MAX_ROUNDS", 3)

    async def test(server: StoreServer) -> None:
        writers = []
        for name in ("a", "b"):
            _, writer = await asyncio.open_connection("127.0.0.1", opened(server, name, 1))
            writers.append(writer)
        opened(server, "empty", 1)
        while server.in_rounds < 2:
            await asyncio.sleep(0)
        opened(server, "c", 1)
        assert set(server.rounds.statistics()) == {"a", "b", "c"}
        _, writer = await asyncio.open_connection("127.0.0.1", opened(server, "c", 1))
        while server.in_rounds < 3:
            await asyncio.sleep(0)
        with pytest.raises(TooMany, match="too many rounds: 3 are open, with connections at each"):
            opened(server, "d", 1)
        assert opened(server, "a", 2), "another round of one that there is"
        for one in (*writers, writer):
            one.close()

    with_server(test)


def test_too_many_doors_are_told_so_over_http(tmp_path: Path) -> None:
    few = "import rallypoint.server.rounds as rounds\nrounds.MAX_ROUNDS = 1\n"
    from tests.wire import SERVE

    with script(few + SERVE, json.dumps({"port": 0})) as child:
        host, port = read_line(child).removeprefix("tcp://").split(":")
        place = (host, int(port))
        door = ask(place, "PUT", "/rounds/one/1")[1]["port"]
        with Peer((host, door)):
            status, why = ask(place, "PUT", "/rounds/other/1")
            assert status == 503 and "too many rounds: 1 are open" in why
        until(lambda: ask(place, "PUT", "/rounds/other/1")[0], lambda status: status == 200)


def test_those_behind_doors_and_those_in_front_share_the_limit(tmp_path: Path) -> None:
    with Serving(tmp_path, max_connections=4) as server:
        front = Front(server, "run")
        door = front.open(1)  # which is one of the four
        with server.peer() as one, front.peer(door) as two, server.peer() as three:
            for place in (door, server.address[1]):
                with Peer((server.address[0], place), greet=False) as late:
                    assert late.rest() == b""
            for peer in (one, two, three):
                peer.work(1)
        until(lambda: closed(front), bool)
        with server.peer() as one, server.peer() as two, server.peer() as three, server.peer() as four:
            for peer in (one, two, three, four):
                peer.ping()


def closed(front: Front) -> bool:
    """Close the door; there may be no room yet to ask for it."""
    try:
        return front.close(front.run)
    except (ConnectionError, http.client.HTTPException):
        return False


# A server that nobody is at

LEAVE = """
import sys
from rallypoint import Server
server = Server(outlive=float(sys.argv[1]))
print(server.pid, server.port, flush=True)
sys.stdin.read()
"""


def test_it_ends_when_nobody_is_connected_and_not_before(tmp_path: Path) -> None:
    server = Serving(tmp_path, alone_s=0.0)
    peer = server.peer()
    front = Front(server, "run")
    behind = front.peer(front.open(1))
    peer.close()
    stays(server.child.pid, behind, sweeps=2)
    other = server.peer()
    behind.close()
    stays(server.child.pid, other, sweeps=1)
    other.close()
    wait_for_end(server.child.pid)
    assert server.child.wait(AMPLE_S) == 0
    assert "Traceback" not in server.log()
    assert server.child.stdout
    server.child.stdout.close()


def stays(pid: int, peer: Peer, sweeps: int) -> None:
    """See a server live on while it takes back turns in a queue, which it does in each sweep, and so looks around."""
    with Peer(peer.socket.getpeername()[:2]) as other:
        for turn in range(sweeps):
            key = b"/swept/%d" % turn
            peer.push(key, b"item")
            other.wait(key)
            assert other.read(1) == b"\0"
            peer.wait(key)
            assert peer.read(1) == b"\0"  # by the sweep, for the other does not take it
            assert peer.pop(key) == b"item"
    os.kill(pid, 0)


def test_it_waits_for_as_long_as_it_was_told(tmp_path: Path) -> None:
    with Serving(tmp_path, alone_s=3600.0) as server, server.peer() as peer:
        stays(server.child.pid, peer, sweeps=1)


def test_it_outlives_the_process_that_started_it_by_kill_and_serves_on() -> None:
    with script(LEAVE, 0) as parent:
        pid, port = map(int, read_line(parent).split())
        peer = Peer(("127.0.0.1", port))
        peer.set(b"/k", b"v")
        parent.send_signal(signal.SIGKILL)
        parent.wait(AMPLE_S)
        stays(pid, peer, sweeps=2)
        with Peer(("127.0.0.1", port)) as other:
            assert other.get(b"/k") == b"v"
        peer.close()
        wait_for_end(pid)


def test_it_holds_nothing_of_the_process_that_started_it() -> None:
    # Who reads that one's output must see its end when it ends, not when the server does.
    with script(LEAVE, 3600, stderr=-1) as parent:
        pid, _ = map(int, read_line(parent).split())
        try:
            assert parent.stdout is not None and parent.stderr is not None
            parent.send_signal(signal.SIGKILL)
            for stream in (parent.stdout, parent.stderr):
                assert select.select([stream], [], [], AMPLE_S)[0] and stream.read() == b""
            os.kill(pid, 0)
            assert os.getsid(pid) == pid, "no signal to a terminal's group reaches it"
        finally:
            os.kill(pid, signal.SIGTERM)
        wait_for_end(pid)


@pytest.mark.parametrize("wrong", [-1, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="outlive"):
        rallypoint.Server(outlive=wrong)
