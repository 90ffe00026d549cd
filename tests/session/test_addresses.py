"""A store that has several addresses: the client is at the first that answers, and moves on when that one is lost.

Two proxies in front of one server stand for two servers of one store: what counts is that the session is there behind
both. At every byte of a request and of its answer, one of them dies, and the operation has to be finished through the
other, exactly once.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.cutter import DOWN, UP, Cutter
from tests.session.test_cuts import BLOCKED, CASES, await_waiting
from tests.wire import read_line, script

import rallypoint
from rallypoint import Store
from rallypoint.core.records import Status
from rallypoint.deadline import Deadline
from rallypoint.protocol.native import ACCEPTED, PREFACE, VERSION, Frames, frame
from rallypoint.store import peer_check, search

DEADLINE_S = 60


@pytest.fixture(scope="module")
def server() -> Iterator[rallypoint.Server]:
    with rallypoint.Server(grace=DEADLINE_S) as server:
        yield server


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no address be taken for a silent one because this machine is busy; tests of silence have their own moment."""
    monkeypatch.setattr(search, "PATIENCE_S", (DEADLINE_S / 2, DEADLINE_S / 2))
    monkeypatch.setattr(peer_check, "PING_S", DEADLINE_S)


@pytest.fixture
def ways(server: rallypoint.Server) -> Iterator[list[Cutter]]:
    """Two ways to the server."""
    with Cutter(server.port) as one, Cutter(server.port) as other:
        yield [one, other]
    with rallypoint.connect(server.url) as store:
        store.delete_prefix("")


def connect(*ports: int, timeout: float = DEADLINE_S) -> Store:
    return rallypoint.connect("tcp://" + ",".join(f"127.0.0.1:{port}" for port in ports), timeout=timeout)


def through(ways: list[Cutter]) -> Store:
    return connect(*(way.port for way in ways))


def until(true: Callable[[], bool], what: str) -> None:
    """Look until something is so."""
    deadline = Deadline(DEADLINE_S)
    while not true():
        assert not deadline.expired(), f"not within {DEADLINE_S} s: {what}"


@contextlib.contextmanager
def nobody() -> Iterator[int]:
    """A port where nothing listens, and nothing else will."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


@contextlib.contextmanager
def silent() -> Iterator[int]:
    """A port that takes connections, and says nothing on any of them."""
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        yield listener.getsockname()[1]


class Impostor:
    """A server that answers the preface, then the greeting as it is told, and then hangs up or stays."""

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
                        sock.sendall(frame((0, Status.OK, welcome)))
                        break
            if hangs_up:
                sock.close()
            else:
                self._held.append(sock)


# To the first that answers


def test_they_are_tried_in_their_order(ways: list[Cutter]) -> None:
    with nobody() as empty:
        for ports, taken in (
            ((ways[0].port, ways[1].port), ways[0].port),
            ((ways[1].port, ways[0].port), ways[1].port),
            ((empty, ways[1].port, ways[0].port), ways[1].port),
        ):
            with connect(*ports) as store:
                assert isinstance(store, rallypoint.TCPStore)
                assert (store.host, store.port) == ("127.0.0.1", taken)
                assert store.add("n", 1) > 0


def test_again_and_again_until_one_is_there(ways: list[Cutter]) -> None:
    with nobody() as empty:
        ways[1].refusing = True
        stores: list[Store] = []
        caller = threading.Thread(target=lambda: stores.append(connect(empty, ways[1].port)))
        caller.start()
        until(lambda: ways[1].connections > 2, "it tries more than one round")
        ways[1].refusing = False
        caller.join(DEADLINE_S)
        with stores[0] as store:
            assert store.add("n", 1) == 1


def test_one_that_says_nothing_is_passed_over(ways: list[Cutter], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "PATIENCE_S", (0.2, 30.0))
    with silent() as mute, connect(mute, ways[0].port) as store:
        assert store.port == ways[0].port


def test_one_that_is_no_server_of_ours_is_passed_over(ways: list[Cutter]) -> None:
    with Impostor(PREFACE[-len(ACCEPTED) :]) as torchs, Impostor(b"HTTP") as web:
        with connect(torchs.port, web.port, ways[0].port) as store:
            assert store.port == ways[0].port
        assert torchs.calls == web.calls == 1


def test_where_none_is_a_server_of_ours_there_is_no_second_round() -> None:
    with Impostor(PREFACE[-len(ACCEPTED) :]) as torchs, Impostor(b"HTTP") as web:
        with pytest.raises(rallypoint.ConnectFailed) as caught:
            connect(torchs.port, web.port)
        assert torchs.calls == web.calls == 1
    assert caught.value.tried == {
        f"127.0.0.1:{torchs.port}": search.NOT_OF_SEVERAL,
        f"127.0.0.1:{web.port}": "not a store: it answered b'HTTP'",
    }


def test_an_error_names_all_of_them() -> None:
    with nobody() as one, nobody() as other:
        with pytest.raises(rallypoint.ConnectFailed) as caught:
            connect(one, other, timeout=0.2)
        assert caught.value.peer == f"127.0.0.1:{one},127.0.0.1:{other}"
        assert sorted(caught.value.tried) == sorted(f"127.0.0.1:{port}" for port in (one, other))


def test_no_time_is_one_attempt_at_each(ways: list[Cutter]) -> None:
    with nobody() as empty, connect(empty, ways[0].port, timeout=0) as store:
        assert store.port == ways[0].port


# On to another


@pytest.mark.parametrize("name", CASES)
def test_every_byte(name: str, server: rallypoint.Server, ways: list[Cutter]) -> None:
    case = CASES[name]
    with connect(server.port) as plain, through(ways) as store:
        here, there = ways
        plain.delete_prefix("")
        case.prepare(plain)
        before = dict(here.passed)
        assert case.act(store) == case.returns
        sizes = {way: here.passed[way] - before[way] for way in (UP, DOWN)}
        for way in (UP, DOWN):
            for after in range(sizes[way] + 1):
                plain.delete_prefix("")
                case.prepare(plain)
                there.refusing, here.refusing = False, True
                here.arm(way, after)
                assert case.act(store) == case.returns, f"cut after {after} bytes {way}"
                assert case.then(plain), f"cut after {after} bytes {way}"
                here.disarm()
                if store._backend._route.at.port != here.port:  # type: ignore[attr-defined]
                    here, there = there, here
        moves = min(way.connections for way in ways)
        assert moves > (sum(sizes.values()) - 10) / 2, "it really went to and fro"


@pytest.mark.parametrize("name", BLOCKED)
def test_a_blocked_call_goes_on(name: str, server: rallypoint.Server, ways: list[Cutter]) -> None:
    act, release, returns = BLOCKED[name]
    with connect(server.port) as plain, through(ways) as store:
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(act(store)))
        thread.start()
        await_waiting(server, 1)
        ways[0].stop()
        until(lambda: ways[1].connections == 1, "it has come to the other")
        release(plain)
        thread.join(DEADLINE_S)
        assert results == [returns]


def test_an_idle_client_moves_on_with_its_lease(server: rallypoint.Server, ways: list[Cutter]) -> None:
    with connect(server.port) as plain, through(ways) as store:
        store.lease("mine", "v")
        ways[0].stop()
        until(lambda: store.port == ways[1].port, "the keeper has come to the other")
        assert plain.get("mine") == b"v"
        assert [one["here"] for one in server.statistics()["sessions"] if one["leases"] == ["/mine"]] == [True]
    with connect(server.port) as plain:
        until(lambda: not plain.check(["mine"]), "it says goodbye there")


def test_a_watch_misses_nothing_and_sees_nothing_twice(server: rallypoint.Server, ways: list[Cutter]) -> None:
    with connect(server.port) as plain, through(ways) as store, store.watch("k") as changes:
        here, there = ways
        for number in range(20):
            plain.set("k", str(number))
            there.refusing, here.refusing = False, True
            here.cut_all()
            plain.set("k", f"{number} while it was away")
            seen = [changes.next(DEADLINE_S).value for _ in range(2)]
            assert seen == [b"%d" % number, b"%d while it was away" % number]
            here, there = there, here


def test_it_stays_where_it_was_cut_if_that_is_still_there(ways: list[Cutter]) -> None:
    with through(ways) as store:
        for number in range(1, 6):
            ways[0].cut_all()
            assert store.add("n", 1) == number
        assert store.port == ways[0].port
        assert ways[1].connections == 0


def test_one_that_welcomes_and_hangs_up_is_left(ways: list[Cutter]) -> None:
    with through(ways) as store:
        store.set("k", "v")
        core = store._backend._wire._core  # type: ignore[attr-defined]
        with Impostor(ACCEPTED, [VERSION, core.server, core.session, DEADLINE_S, True]) as sick:
            ways[0].redirect(sick.port)
            assert store.get("k") == b"v"
            assert store.port == ways[1].port
            assert sick.calls == 1


def test_a_silent_one_is_passed_over(ways: list[Cutter], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "PATIENCE_S", (0.2, 30.0))
    with silent() as mute, connect(ways[0].port, mute, ways[1].port) as store:
        store.lease("mine", "v")
        ways[0].stop()
        assert store.get("mine") == b"v"
        assert store.port == ways[1].port


def test_where_it_was_is_silent_now(ways: list[Cutter], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "PATIENCE_S", (0.2, 30.0))
    with silent() as mute, through(ways) as store:
        store.lease("mine", "v")
        ways[0].redirect(mute)
        assert store.get("mine") == b"v"
        assert store.port == ways[1].port


def test_threads_lose_nothing_while_it_goes_to_and_fro(server: rallypoint.Server, ways: list[Cutter]) -> None:
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


def test_a_clone_begins_where_the_store_is(ways: list[Cutter]) -> None:
    with through(ways) as store:
        ways[0].stop()
        store.set("k", "v")
        with store.clone() as clone:
            assert clone.port == store.port == ways[1].port
            assert clone.get("k") == b"v"
            assert repr(clone) == repr(store)


def test_a_clone_moves_on_as_well(ways: list[Cutter]) -> None:
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


def test_a_forked_child_has_all_addresses(ways: list[Cutter]) -> None:
    url = f"tcp://127.0.0.1:{ways[0].port},127.0.0.1:{ways[1].port}"
    with script(FORK, url) as process:
        assert read_line(process) == f"1 {ways[0].port}"
        ways[0].stop()
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        assert [read_line(process) for _ in range(2)] == [f"2 {ways[1].port}", f"3 {ways[1].port}"]


# The end


def test_when_all_are_gone_the_session_is_lost() -> None:
    with rallypoint.Server(grace=0.3) as server, Cutter(server.port) as one, Cutter(server.port) as other:
        with connect(one.port, other.port) as store:
            one.stop()
            other.stop()
            with pytest.raises(rallypoint.SessionLost) as caught:
                store.get("k")
        addresses = [f"127.0.0.1:{way.port}" for way in (one, other)]
        assert caught.value.peer == ",".join(addresses)
        assert all(f"{address}: refused" in str(caught.value) for address in addresses)


def test_a_session_that_ended_meanwhile_is_lost_at_every_address(server: rallypoint.Server, ways: list[Cutter]) -> None:
    with through(ways) as store:
        wire = store._backend._wire  # type: ignore[attr-defined]
        wire._core.session = b"ended"
        ways[0].stop()
        with pytest.raises(rallypoint.SessionLost, match=rf"{ways[1].port} \(one of 127.*unknown session: expired"):
            store.get("k")


def test_a_server_of_another_store_is_refused() -> None:
    with (
        rallypoint.Server(grace=DEADLINE_S) as server,
        rallypoint.Server() as stranger,
        Cutter(server.port) as way,
        connect(way.port, stranger.port) as store,
        store.clone() as clone,
    ):
        way.stop()
        for one in (store, clone):
            with pytest.raises(rallypoint.ServerRestarted, match=rf"127.0.0.1:{stranger.port} \(one of "):
                one.get("k")
        with pytest.raises(rallypoint.ServerRestarted, match="its identity is another"):
            store.clone()
        assert stranger.statistics()["keys"] == 0


# What a server may not do
