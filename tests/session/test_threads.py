"""One store in many threads: who reads for whom, Ctrl-C, close, fork, the end of the store, of the server, and lies."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.cutter import DOWN, Cutter

import rallypoint
from rallypoint.core.records import Status
from rallypoint.deadline import Deadline
from rallypoint.protocol.native import ACCEPTED, PREFACE, Welcome, frame
from rallypoint.store import keeper

DEADLINE_S = 60


@pytest.fixture
def server() -> Iterator[rallypoint.Server]:
    with rallypoint.Server(grace=DEADLINE_S) as server:
        yield server


@pytest.fixture
def store(server: rallypoint.Server) -> Iterator[rallypoint.Store]:
    with rallypoint.connect(server.url, timeout=DEADLINE_S) as store:
        yield store


def until(true: Callable[[], bool], what: str) -> None:
    """Look until something is so."""
    deadline = Deadline(DEADLINE_S)
    while not true():
        assert not deadline.expired(), f"not within {DEADLINE_S} s: {what}"


def until_waiting(server: rallypoint.Server, count: int) -> None:
    until(lambda: server.statistics()["waiting"] == count, f"{count} requests wait")


def test_a_hundred_threads_on_one_store(server: rallypoint.Server, store: rallypoint.Store) -> None:
    blocked, busy, adds = 50, 50, 40
    with ThreadPoolExecutor(blocked + busy) as pool:
        waiting = [pool.submit(store.get if number % 2 else store.queue_pop, f"late {number}") for number in range(50)]
        until_waiting(server, blocked)
        adding = [pool.submit(lambda: [store.add("n", 1) for _ in range(adds)]) for _ in range(busy)]
        totals = sorted(total for one in adding for total in one.result(DEADLINE_S))
        assert totals == list(range(1, busy * adds + 1))
        for number in reversed(range(blocked)):
            (store.set if number % 2 else store.queue_push)(f"late {number}", str(number))
        assert [one.result(DEADLINE_S) for one in waiting] == [b"%d" % number for number in range(blocked)]
    until_waiting(server, 0)
    assert len(server.statistics()["sessions"]) == 1


def test_whoever_reads_hands_on_the_reading(server: rallypoint.Server, store: rallypoint.Store) -> None:
    """The one that reads for all is released first, again and again; the last still gets its answer."""
    with ThreadPoolExecutor(20) as pool:
        waiting = []
        for number in range(20):
            waiting.append(pool.submit(store.get, f"k {number}"))
            until_waiting(server, number + 1)
        with rallypoint.connect(server.url, timeout=DEADLINE_S) as other:
            for number, one in enumerate(waiting):
                other.set(f"k {number}", "v")
                assert one.result(DEADLINE_S) == b"v"


@pytest.mark.parametrize("read_by_another", [False, True])
def test_a_call_ends_in_its_time_beside_a_request_that_the_server_does_not_read(
    read_by_another: bool, server: rallypoint.Server, store: rallypoint.Store
) -> None:
    wire = store._backend._wire  # type: ignore[attr-defined]
    with ThreadPoolExecutor(2) as pool:
        reading = [pool.submit(store.get, "late")] if read_by_another else []
        until_waiting(server, len(reading))
        os.kill(server.pid, signal.SIGSTOP)
        try:
            large = pool.submit(store.multi_set, ["a", "b", "late"], ["v" * (8 << 20)] * 3)
            until(wire._sender.locked, "it is being sent")
            with pytest.raises(rallypoint.StoreTimeout, match="not sent: the server has not read"):
                store.get("never", timeout=0.2)
            with pytest.raises(rallypoint.MembersMissing, match="not sent: the server has not read"):
                rallypoint.Lock(store, "l").acquire(0.2)
            wire.patience_s = 0.2
            for call in (lambda: store.add("n", 1), lambda: store.watch("w"), lambda: pipelined(store)):
                with pytest.raises(rallypoint.ConnectionLost, match="not sent: the server has not read"):
                    call()
            assert not large.done()
        finally:
            wire.patience_s = DEADLINE_S
            os.kill(server.pid, signal.SIGCONT)
        large.result(DEADLINE_S)
        assert all(one.result(DEADLINE_S) == b"v" * (8 << 20) for one in reading)
    assert store.add("n", 1) == 1, "the others were not carried out"
    assert wire._slots == {} and server.statistics()["watches"] == 0


def pipelined(store: rallypoint.Store) -> None:
    with store.pipeline() as pipe:
        pipe.add("n", 1)


def test_time_outs_of_some_leave_the_others_alone(server: rallypoint.Server, store: rallypoint.Store) -> None:
    with ThreadPoolExecutor(20) as pool:
        short = [pool.submit(store.get, "never", timeout=0.05) for _ in range(10)]
        long = [pool.submit(store.get, "late") for _ in range(10)]
        for one in short:
            with pytest.raises(rallypoint.StoreTimeout):
                one.result(DEADLINE_S)
        until_waiting(server, 10)
        store.set("late", "v")
        assert [one.result(DEADLINE_S) for one in long] == [b"v"] * 10


# Ctrl-C

INTERRUPTED = """
import sys, threading, rallypoint
store = rallypoint.connect(sys.argv[1], timeout=60)
results = []
others = [threading.Thread(target=lambda: results.append(store.get("late"))) for _ in range(5)]
if sys.argv[3] == "first":  # one of the others reads for all
    [other.start() for other in others]
    store.add("ready", 1)
try:
    if sys.argv[3] == "last":  # main reads: the others come when it does
        threading.Timer(0.0, lambda: [other.start() for other in others]).start()
    getattr(store, sys.argv[2])("wanted")
except KeyboardInterrupt:
    print("interrupted", flush=True)
print(store.get("go on").decode(), flush=True)
[other.join() for other in others]
print(results, store.add("n", 1), flush=True)
"""


@pytest.mark.parametrize("call", ["get", "queue_pop"])
@pytest.mark.parametrize("others", ["first", "last"])
def test_ctrl_c_ends_one_call_and_no_other(
    call: str, others: str, server: rallypoint.Server, store: rallypoint.Store
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, server.url, call, others],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        until_waiting(server, 6)
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        until(lambda: "/wanted" not in waited_for(server), "the interrupted call is gone from the server")
        store.queue_push("wanted", "item")
        store.set("go on", "going on")
        store.set("late", "v")
        out, err = process.communicate(timeout=DEADLINE_S)
        assert out == f"going on\n{[b'v'] * 5} 1\n", err
        assert store.queue_pop("wanted", block=False) == b"item"
    finally:
        process.kill()
        process.communicate()


def waited_for(server: rallypoint.Server) -> list[str]:
    return [key for session in server.statistics()["sessions"] for key in session["waits_for"]]


# The end


def test_close_wakes_everybody(server: rallypoint.Server, store: rallypoint.Store) -> None:
    watch = store.watch("w")
    calls: list[Callable[[], Any]] = [
        lambda: store.get("k"),
        lambda: store.wait(["k"]),
        lambda: store.queue_pop("k"),
        lambda: store.barrier("b", 99),
        watch.next,
    ]
    with ThreadPoolExecutor(20) as pool:
        waiting = [pool.submit(call) for call in calls for _ in range(4 if call != watch.next else 1)]
        until_waiting(server, 16)
        store.close()
        for one in waiting:
            with pytest.raises(rallypoint.StoreClosed):
                one.result(DEADLINE_S)
    with pytest.raises(rallypoint.StoreClosed):
        store.get("k")
    store.close()
    until(lambda: server.statistics()["sessions"] == [], "the session ends at once, without grace")
    assert server.statistics()["waiting"] == 0


def test_a_store_that_nobody_holds_is_kept_no_more_and_its_session_ends(server: rallypoint.Server) -> None:
    def kept() -> int:
        wires = [reference() for reference in list(keeper._keeper._all.values())]
        return sum(f":{server.port}" in wire.label for wire in wires if wire is not None)

    stores = [rallypoint.connect(server.url, timeout=DEADLINE_S) for _ in range(3)]
    stores[0].lease("k", "v")
    assert kept() == 3 and len(server.statistics()["sessions"]) == 3
    assert sum(thread.name == "rallypoint keeper" for thread in threading.enumerate()) == 1
    del stores
    gc.collect()
    until(lambda: not kept(), "the keeper lets go")
    until(lambda: server.statistics()["sessions"] == [], "the sessions end")
    assert server.statistics()["keys"] == 0


def test_a_killed_server_ends_all_calls() -> None:
    with rallypoint.Server(grace=0.2) as server:
        store = rallypoint.connect(server.url, timeout=DEADLINE_S)
        with ThreadPoolExecutor(10) as pool:
            waiting = [pool.submit(store.get, "k") for _ in range(10)]
            until_waiting(server, 10)
            os.kill(server.pid, signal.SIGKILL)
            for one in waiting:
                with pytest.raises(rallypoint.SessionLost):
                    one.result(DEADLINE_S)
        with pytest.raises(rallypoint.SessionLost):
            store.set("k", "v")
        store.close()


# Watches


def test_a_client_that_only_watches_confirms_what_it_saw(server: rallypoint.Server, store: rallypoint.Store) -> None:
    count = 10_000  # more than a session may leave unconfirmed
    with rallypoint.connect(server.url, timeout=DEADLINE_S) as other, store.watch() as changes:
        with other.pipeline() as pipe:
            for _ in range(count):
                pipe.add("n", 1)
        assert [changes.next().value for _ in range(count)] == [b"%d" % (number + 1) for number in range(count)]
        assert store.add("n", 1) == count + 1


def test_events_that_overtake_the_answer_to_watch_are_kept(server: rallypoint.Server, store: rallypoint.Store) -> None:
    with Cutter(server.port) as cutter, rallypoint.connect(f"tcp://127.0.0.1:{cutter.port}") as cut:
        cutter.arm(DOWN, 0)
        cutter.refusing = True
        with ThreadPoolExecutor(1) as pool:
            watching = pool.submit(cut.watch)
            until(lambda: server.statistics()["watches"] == 1, "the server has the watch")
            store.set("a", "1")
            store.set("b", "2")
            cutter.refusing = False
            with watching.result(DEADLINE_S) as changes:
                assert [changes.next().key, changes.next().key] == ["a", "b"]
                store.set("c", "3")
                assert changes.next().key == "c"


# Fork

FORKED = """
import os, sys, rallypoint
store = rallypoint.connect(sys.argv[1], timeout=60)
store.lease("parents", "v")
watch = store.watch("w")
reading, writing = os.pipe()
if os.fork() == 0:
    if sys.argv[2] == "close":
        store.close()
    elif sys.argv[2] == "collect":
        del store, watch
        import gc; gc.collect()
    else:
        try:
            watch.next(timeout=5)
        except rallypoint.SessionLost:
            pass
        own = store.watch("w")
        watch.close()
        store.set("w1", "from the child")
        assert own.next().key == "w1"
        store.lease("childs", "v")
        assert store.add("n", 1) == 1
    os.write(writing, b"x")
    os._exit(0)
os.read(reading, 1)
os.wait()
assert store.get("parents") == b"v"
if sys.argv[2] == "use":
    assert watch.next().value == b"from the child"
print(store.add("n", 1), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("child", "total"), [("use", 2), ("close", 1), ("collect", 1)])
def test_a_forked_child_has_its_own_session(child: str, total: int, server: rallypoint.Server) -> None:
    with Cutter(server.port) as cutter:
        process = subprocess.Popen(
            [sys.executable, "-c", FORKED, f"tcp://127.0.0.1:{cutter.port}", child],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == f"{total}\n"
            assert cutter.connections == (2 if child == "use" else 1), "the parent's connection was not cut"
        finally:
            process.kill()
            process.communicate()


# A server that lies

WELCOME = frame((0, Status.OK, Welcome(1, b"server", b"session", 0.2, False)))

LIES = {
    "noise": b"\xff" * 64,
    "no array": frame("hello"),
    "too short": frame([1]),
    "a text for a number": frame(["1", 0, None]),
    "a list for a number": frame([[1], 0, None]),
    "a push that is none": frame([0, 1, 5]),
    "a push of too little": frame([0, 1, [1, 2]]),
    "nested without end": (100_000).to_bytes(4, "little") + b"\x91" * 100_000,
    "no text": frame([1, 0, None])[:4] + b"\x93\x01\x00\xa1\xff"[:4],
    "an error that is none": frame([1, Status.ERROR, 5]),
    "an unknown error": frame([1, Status.ERROR, ["Weather", {"rain": True}]]),
}


@pytest.fixture
def liar() -> Iterator[Callable[[bytes, bytes], str]]:
    """Start a server that welcomes and then answers the first request with what it is told; return its URL."""
    listeners: list[socket.socket] = []

    def start(welcome: bytes, lie: bytes) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def serve() -> None:
            peer, _ = listener.accept()
            listener.close()
            with peer:
                peer.recv(len(PREFACE), socket.MSG_WAITALL)
                peer.sendall(ACCEPTED)
                peer.recv(4096)
                peer.sendall(welcome)
                if peer.recv(4096):
                    peer.sendall(lie)
                while peer.recv(4096):
                    pass

        threading.Thread(target=serve, daemon=True).start()
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for listener in listeners:
        listener.close()


@pytest.mark.parametrize("lie", LIES)
def test_an_answer_that_makes_no_sense_is_an_error_of_ours(lie: str, liar: Callable[[bytes, bytes], str]) -> None:
    store = rallypoint.connect(liar(WELCOME, LIES[lie]), timeout=DEADLINE_S)
    with pytest.raises(rallypoint.RallypointError):
        store.set("k", "v")
    store.close()


@pytest.mark.parametrize("welcome", [frame([0, 0, 5]), frame([0, 3, [b"server", "not today"]]), b"\xff" * 64])
def test_so_is_a_welcome_that_is_none(welcome: bytes, liar: Callable[[bytes, bytes], str]) -> None:
    with pytest.raises(rallypoint.ConnectFailed):
        rallypoint.connect(liar(welcome, b""), timeout=5)
