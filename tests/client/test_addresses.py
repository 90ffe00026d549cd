"""A store with several addresses: the client uses the first that replies, and fails over when that one is lost.

Two proxies in front of one server act as two servers of one store: both can resume the session. One of them dies at
every byte of a request and of its reply, and the operation must complete through the other, exactly once.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.client.sessions import connection_of
from tests.client.test_cuts import BLOCKED, CASES, await_waiting, measure
from tests.outage_log import DEADLINE_S, until
from tests.raw_peer import read_line, script
from tests.served import server_fixture

import rallypoint
from rallypoint import TCPStore
from rallypoint.client import hang_check
from rallypoint.client.routing import dial, search, server_replies
from rallypoint.client.routing.route import Route
from rallypoint.core.records import ReplyStatus
from rallypoint.deadline import Deadline
from rallypoint.net import Endpoint, Endpoints
from rallypoint.protocol.native import ACCEPTED, PREFACE, VERSION, Frames, Standby, frame, standby
from rallypoint.security.client_security import ClientSecurity
from rallypoint.security.credentials import OPEN
from rallypoint.testing import DOWN, UP, CuttingProxy

server = server_fixture("module", grace=DEADLINE_S)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow much time for replies, so that a busy machine fails no test; tests of silent servers set a limit."""
    monkeypatch.setattr(search, "PATIENCE_S", (DEADLINE_S / 2, DEADLINE_S / 2))
    monkeypatch.setattr(hang_check, "PING_S", DEADLINE_S)


@pytest.fixture
def ways(server: rallypoint.Server) -> Iterator[list[CuttingProxy]]:
    """Two proxies of the server."""
    with CuttingProxy(server.port) as one, CuttingProxy(server.port) as other:
        yield [one, other]
    with rallypoint.connect(server.url) as store:
        store.delete_prefix("")


def connect(*ports: int, timeout: float = DEADLINE_S) -> TCPStore:
    store = rallypoint.connect("tcp://" + ",".join(f"127.0.0.1:{port}" for port in ports), timeout=timeout)
    assert isinstance(store, TCPStore)
    return store


def through(ways: list[CuttingProxy]) -> TCPStore:
    return connect(*(way.port for way in ways))


@contextlib.contextmanager
def nobody() -> Iterator[int]:
    """Yield a port where nothing listens, and nothing else will."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


@contextlib.contextmanager
def silent() -> Iterator[int]:
    """Yield a port that accepts connections and never replies."""
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        yield listener.getsockname()[1]


class Impostor:
    """A server that sends the given replies to the preface and the hello, and then hangs up or keeps the connection."""

    def __init__(self, accepts: bytes, welcome: Any = None, hangs_up: bool = True) -> None:
        self._said = (accepts, welcome, hangs_up)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = self._listener.getsockname()[1]
        self.calls = 0
        self._held: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> Impostor:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(DEADLINE_S)
        for sock in self._held:
            sock.close()

    def _serve(self) -> None:
        accepts, welcome, hangs_up = self._said
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.calls += 1
            with contextlib.suppress(OSError):
                sock.recv(len(PREFACE), socket.MSG_WAITALL)
                sock.sendall(accepts)
                frames = Frames(1 << 16)
                while welcome is not None and (data := sock.recv(65536)):
                    if list(frames.feed(data)):
                        sock.sendall(frame((0, ReplyStatus.OK, welcome)))
                        break
            if hangs_up:
                sock.close()
            else:
                self._held.append(sock)


# Connecting


def test_addresses_are_tried_in_the_given_order(ways: list[CuttingProxy]) -> None:
    with nobody() as empty:
        for ports, taken in (
            ((ways[0].port, ways[1].port), ways[0].port),
            ((ways[1].port, ways[0].port), ways[1].port),
            ((empty, ways[1].port, ways[0].port), ways[1].port),
        ):
            with connect(*ports) as store:
                assert (store.host, store.port) == ("127.0.0.1", taken)
                assert store.add("n", 1) > 0


def test_connecting_is_retried_until_a_server_accepts(ways: list[CuttingProxy]) -> None:
    with nobody() as empty:
        ways[1].refusing = True
        stores: list[TCPStore] = []
        caller = threading.Thread(target=lambda: stores.append(connect(empty, ways[1].port)))
        caller.start()
        until(lambda: ways[1].connections > 2, "the client tries more than one round")
        ways[1].refusing = False
        caller.join(DEADLINE_S)
        with stores[0] as store:
            assert store.add("n", 1) == 1


def test_a_silent_server_is_skipped_when_connecting(ways: list[CuttingProxy], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "PATIENCE_S", (0.2, 30.0))
    with silent() as mute, connect(mute, ways[0].port) as store:
        assert store.port == ways[0].port


def test_a_foreign_server_is_skipped(ways: list[CuttingProxy]) -> None:
    with Impostor(PREFACE[-len(ACCEPTED) :]) as torchs, Impostor(b"HTTP") as web:
        with connect(torchs.port, web.port, ways[0].port) as store:
            assert store.port == ways[0].port
        assert torchs.calls == web.calls == 1


def test_connecting_fails_after_one_round_if_all_servers_are_foreign() -> None:
    with Impostor(PREFACE[-len(ACCEPTED) :]) as torchs, Impostor(b"HTTP") as web:
        with pytest.raises(rallypoint.ConnectFailed) as caught:
            connect(torchs.port, web.port)
        assert torchs.calls == web.calls == 1
    assert caught.value.tried == {
        f"127.0.0.1:{torchs.port}": server_replies.NOT_OF_SEVERAL,
        f"127.0.0.1:{web.port}": "not a store: it replied b'HTTP'",
    }


def test_the_error_names_all_addresses() -> None:
    with nobody() as one, nobody() as other:
        with pytest.raises(rallypoint.ConnectFailed) as caught:
            connect(one, other, timeout=0.2)
        assert caught.value.peer == f"127.0.0.1:{one},127.0.0.1:{other}"
        assert sorted(caught.value.tried) == sorted(f"127.0.0.1:{port}" for port in (one, other))


def test_a_timeout_of_zero_allows_one_attempt_at_each_address(ways: list[CuttingProxy]) -> None:
    with nobody() as empty, connect(empty, ways[0].port, timeout=0) as store:
        assert store.port == ways[0].port


# Failover


@pytest.mark.parametrize("name", CASES)
def test_failover_at_every_byte_executes_the_operation_once(
    name: str, server: rallypoint.Server, ways: list[CuttingProxy]
) -> None:
    case = CASES[name]
    with connect(server.port) as plain, through(ways) as store:
        here, there = ways
        sizes = measure(case, plain, store, here)
        for way in (UP, DOWN):
            for after in range(sizes[way] + 1):
                plain.delete_prefix("")
                case.prepare(plain)
                there.refusing, here.refusing = False, True
                here.cut_after(way, after)
                assert case.act(store) == case.returns, f"cut after {after} bytes {way}"
                assert case.then(plain), f"cut after {after} bytes {way}"
                here.disarm()
                if store.port != here.port:
                    here, there = there, here
        moves = min(way.connections for way in ways)
        assert moves > (sum(sizes.values()) - 10) / 2, "it failed over again and again"


@pytest.mark.parametrize("name", BLOCKED)
def test_a_blocked_call_survives_a_failover(name: str, server: rallypoint.Server, ways: list[CuttingProxy]) -> None:
    act, release, returns = BLOCKED[name]
    with connect(server.port) as plain, through(ways) as store:
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(act(store)))
        thread.start()
        await_waiting(server, 1)
        ways[0].stop()
        until(lambda: ways[1].connections == 1, "it has failed over")
        release(plain)
        thread.join(DEADLINE_S)
        assert results == [returns]


def test_an_idle_client_fails_over_and_keeps_its_lease(server: rallypoint.Server, ways: list[CuttingProxy]) -> None:
    with connect(server.port) as plain, through(ways) as store:
        store.lease("mine", "v")
        ways[0].stop()
        until(lambda: store.port == ways[1].port, "the monitor has failed over")
        assert plain.get("mine") == b"v"
        assert [one["here"] for one in server.statistics()["sessions"] if one["leases"] == ["/mine"]] == [True]
    with connect(server.port) as plain:
        until(lambda: not plain.check(["mine"]), "closing ends the session at the second server")


def test_a_watch_loses_and_repeats_no_change_over_failovers(
    server: rallypoint.Server, ways: list[CuttingProxy]
) -> None:
    with connect(server.port) as plain, through(ways) as store, store.watch("k") as changes:
        here, there = ways
        for number in range(20):
            plain.set("k", str(number))
            there.refusing, here.refusing = False, True
            here.cut_all()
            plain.set("k", f"{number} during the cut")
            seen = [changes.next(DEADLINE_S).value for _ in range(2)]
            assert seen == [b"%d" % number, b"%d during the cut" % number]
            here, there = there, here


def test_a_cut_client_returns_to_the_same_server_if_that_still_accepts(ways: list[CuttingProxy]) -> None:
    with through(ways) as store:
        for number in range(1, 6):
            ways[0].cut_all()
            assert store.add("n", 1) == number
        assert store.port == ways[0].port
        assert ways[1].connections == 0


def test_a_server_that_hangs_up_after_its_welcome_is_left(ways: list[CuttingProxy]) -> None:
    with through(ways) as store:
        store.set("k", "v")
        core = connection_of(store).core
        with Impostor(ACCEPTED, [VERSION, core.server, core.session, DEADLINE_S, True]) as sick:
            ways[0].redirect(sick.port)
            assert store.get("k") == b"v"
            assert store.port == ways[1].port
            assert sick.calls == 1


def test_a_silent_server_is_skipped_in_a_failover(ways: list[CuttingProxy], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "PATIENCE_S", (0.2, 30.0))
    with silent() as mute, connect(ways[0].port, mute, ways[1].port) as store:
        store.lease("mine", "v")
        ways[0].stop()
        assert store.get("mine") == b"v"
        assert store.port == ways[1].port


def test_a_server_that_is_silent_after_a_cut_is_left(ways: list[CuttingProxy], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "PATIENCE_S", (0.2, 30.0))
    with silent() as mute, through(ways) as store:
        store.lease("mine", "v")
        ways[0].redirect(mute)
        assert store.get("mine") == b"v"
        assert store.port == ways[1].port


def test_threads_lose_no_add_over_many_failovers(server: rallypoint.Server, ways: list[CuttingProxy]) -> None:
    threads, adds = 6, 60
    with through(ways) as store:
        totals: list[int] = []
        ended = threading.Event()

        def add() -> None:
            totals.extend([store.add("n", 1) for _ in range(adds)])

        def kill() -> None:
            here, there = ways
            for _ in range(10_000):
                there.refusing, here.refusing = False, True
                here.cut_all()
                arrivals, seen = there.connections, len(totals)
                while not ended.is_set() and there.connections == arrivals and len(totals) == seen:
                    pass
                if ended.is_set():
                    return
                here, there = there, here

        workers = [threading.Thread(target=add) for _ in range(threads)]
        killer = threading.Thread(target=kill)
        for thread in (*workers, killer):
            thread.start()
        for thread in workers:
            thread.join(DEADLINE_S)
        ended.set()
        killer.join(DEADLINE_S)
        assert sorted(totals) == list(range(1, threads * adds + 1))


# Clones and children


def test_a_clone_starts_at_the_current_server_of_its_store(ways: list[CuttingProxy]) -> None:
    with through(ways) as store:
        ways[0].stop()
        store.set("k", "v")
        with store.clone() as clone:
            assert clone.port == store.port == ways[1].port
            assert clone.get("k") == b"v"
            assert repr(clone) == repr(store)


def test_a_clone_fails_over_as_well(ways: list[CuttingProxy]) -> None:
    with through(ways) as store, store.clone() as clone:
        clone.lease("its", "v")
        ways[0].stop()
        assert clone.get("its") == b"v"
        assert clone.port == ways[1].port


FORK = """
import os, sys, rallypoint
store = rallypoint.connect(sys.argv[1], timeout=60)
print(store.add("n", 1), store.port, flush=True)
sys.stdin.readline()
child = os.fork()
if child == 0:
    print(store.add("n", 1), store.port, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(store.add("n", 1), store.port, flush=True)
"""


def test_a_forked_child_knows_all_addresses(ways: list[CuttingProxy]) -> None:
    url = f"tcp://127.0.0.1:{ways[0].port},127.0.0.1:{ways[1].port}"
    with script(FORK, url) as process:
        assert read_line(process) == f"1 {ways[0].port}"
        ways[0].stop()
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        assert [read_line(process) for _ in range(2)] == [f"2 {ways[1].port}", f"3 {ways[1].port}"]


# The end


def test_the_session_is_lost_when_all_servers_are_gone() -> None:
    with rallypoint.Server(grace=0.3) as server, CuttingProxy(server.port) as one, CuttingProxy(server.port) as other:
        with connect(one.port, other.port) as store:
            one.stop()
            other.stop()
            with pytest.raises(rallypoint.SessionLost) as caught:
                store.get("k")
        addresses = [f"127.0.0.1:{way.port}" for way in (one, other)]
        assert caught.value.peer == ",".join(addresses)
        assert all(f"{address}: refused" in str(caught.value) for address in addresses)


def test_a_session_that_expired_is_lost_at_every_address(server: rallypoint.Server, ways: list[CuttingProxy]) -> None:
    with through(ways) as store:
        connection_of(store).core.session = b"ended"
        ways[0].stop()
        with pytest.raises(rallypoint.SessionLost, match=rf"{ways[1].port} \(one of 127.*unknown session: expired"):
            store.get("k")


def test_a_server_of_another_store_is_refused() -> None:
    with (
        rallypoint.Server(grace=DEADLINE_S) as server,
        rallypoint.Server() as stranger,
        CuttingProxy(server.port) as way,
        connect(way.port, stranger.port) as store,
        store.clone() as clone,
    ):
        way.stop()
        for one in (store, clone):
            with pytest.raises(rallypoint.ServerRestarted, match=rf"127.0.0.1:{stranger.port} \(one of "):
                one.get("k")
        with pytest.raises(rallypoint.ServerRestarted, match="its identity has changed"):
            store.clone()
        assert stranger.statistics()["keys"] == 0


@pytest.mark.parametrize(("says", "left"), [(ACCEPTED, False), (standby(Standby("", [])), True)])
def test_a_deposed_server_is_left_like_one_that_hangs(says: bytes, left: bool) -> None:
    with Impostor(says, hangs_up=False) as server:
        at = Endpoint("127.0.0.1", server.port)
        assert hang_check.is_hung(Route(Endpoints([at]))) is left
        assert dial.answers(at, Deadline(DEADLINE_S), ClientSecurity(OPEN))
