"""One store in many threads: the election of the reader, Ctrl-C, close, a killed server, fork, malformed replies."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.client.sessions import connection_of, session_of
from tests.conformance.calls import blocking_calls
from tests.outage_log import DEADLINE_S, await_waiting, until

import rallypoint
from rallypoint.client.blocking import monitor, pending_call
from rallypoint.client.blocking.socket_reader import SocketReader
from rallypoint.client.blocking.supervisor import ConnectionSupervisor
from rallypoint.core.records import ReplyStatus
from rallypoint.protocol.native import ACCEPTED, PREFACE, Welcome, frame
from rallypoint.testing import DOWN, CuttingProxy


def test_a_hundred_threads_share_one_store(server: rallypoint.Server, store: rallypoint.Store) -> None:
    blocked, busy, adds = 50, 50, 40
    with ThreadPoolExecutor(blocked + busy) as pool:
        waiting = [pool.submit(store.get if number % 2 else store.queue_pop, f"late {number}") for number in range(50)]
        await_waiting(server, blocked)
        adding = [pool.submit(lambda: [store.add("n", 1) for _ in range(adds)]) for _ in range(busy)]
        totals = sorted(total for one in adding for total in one.result(DEADLINE_S))
        assert totals == list(range(1, busy * adds + 1))
        for number in reversed(range(blocked)):
            (store.set if number % 2 else store.queue_push)(f"late {number}", str(number))
        assert [one.result(DEADLINE_S) for one in waiting] == [b"%d" % number for number in range(blocked)]
    await_waiting(server, 0)
    assert len(server.statistics()["sessions"]) == 1


def test_a_reader_that_ends_wakes_another_reader(server: rallypoint.Server, store: rallypoint.Store) -> None:
    """The call that reads for all ends first, again and again; the last call still gets its reply."""
    with ThreadPoolExecutor(20) as pool:
        waiting = []
        for number in range(20):
            waiting.append(pool.submit(store.get, f"k {number}"))
            await_waiting(server, number + 1)
        with rallypoint.connect(server.url, timeout=DEADLINE_S) as other:
            for number, one in enumerate(waiting):
                other.set(f"k {number}", "v")
                assert one.result(DEADLINE_S) == b"v"


class TakenUnnoticed:
    """A lock that another thread has taken right after it was checked: it looks free."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.acquire, self.release = self._lock.acquire, self._lock.release
        self.tried = threading.Event()

    def locked(self) -> bool:
        self.tried.set()
        return False

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def test_a_reader_does_not_wait_for_a_thread_that_sends(server: rallypoint.Server, store: rallypoint.Store) -> None:
    """That thread may wait for the server, and the server for a thread that reads."""
    sending = TakenUnnoticed()
    with (
        ThreadPoolExecutor(1) as pool,
        rallypoint.connect(server.url, timeout=DEADLINE_S) as other,
        store.watch("w") as watch,
    ):
        connection_of(store).send_lock = sending  # type: ignore[assignment]
        lone = pool.submit(store.add, "n", 1)
        try:
            assert sending.tried.wait(DEADLINE_S)
            other.set("w", "v")
            assert watch.next(timeout=DEADLINE_S).value == b"v"
        finally:
            sending.release()
        assert lone.result(DEADLINE_S) == 1


def test_the_main_thread_sleeps_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that arrives right before it sleeps does not wake it."""
    monkeypatch.setattr(pending_call, "SLICE_S", 0.01)
    call = pending_call.PendingCall()
    call.wakeup = threading.Lock()
    call.wakeup.acquire()
    before = time.monotonic()
    call.wait(DEADLINE_S)
    assert time.monotonic() < before + DEADLINE_S


def test_a_cut_wakes_a_thread_that_sends(store: rallypoint.Store) -> None:
    """It would hold the lock, for which the interrupted call waits, until the peer reads on."""
    connection = connection_of(store)
    ours, peer = socket.socketpair()
    with ThreadPoolExecutor(1) as pool, peer:
        connection.socket_reader = SocketReader(ours)
        sending = pool.submit(
            connection.in_turn, lambda: connection.send(b"v" * (8 << 20)), time.monotonic() + DEADLINE_S
        )
        assert peer.recv(1) == b"v", "it sends"
        connection.cut()
        assert sending.result(DEADLINE_S)


@pytest.mark.parametrize("read_by_another", [False, True])
def test_a_call_times_out_while_the_server_does_not_read_a_large_request(
    read_by_another: bool, server: rallypoint.Server, store: rallypoint.Store
) -> None:
    client_session = session_of(store)
    with ThreadPoolExecutor(2) as pool:
        reading = [pool.submit(store.get, "late")] if read_by_another else []
        await_waiting(server, len(reading))
        os.kill(server.pid, signal.SIGSTOP)
        try:
            large = pool.submit(store.multi_set, ["a", "b", "late"], ["v" * (8 << 20)] * 3)
            until(client_session._connection.send_lock.locked, "it is being sent")
            with pytest.raises(rallypoint.StoreTimeout, match="not sent: the server has not read"):
                store.get("never", timeout=0.2)
            with pytest.raises(rallypoint.MembersMissing, match="not sent: the server has not read"):
                rallypoint.Lock(store, "l").acquire(0.2)
            client_session.patience_s = 0.2
            for call in (lambda: store.add("n", 1), lambda: store.watch("w"), lambda: pipelined(store)):
                with pytest.raises(rallypoint.ConnectionLost, match="not sent: the server has not read"):
                    call()
            assert not large.done()
        finally:
            client_session.patience_s = DEADLINE_S
            os.kill(server.pid, signal.SIGCONT)
        large.result(DEADLINE_S)
        assert all(one.result(DEADLINE_S) == b"v" * (8 << 20) for one in reading)
    assert store.add("n", 1) == 1, "the calls that timed out were not executed"
    assert client_session._connection.pending == {} and server.statistics()["watches"] == 0


def pipelined(store: rallypoint.Store) -> None:
    with store.pipeline() as pipe:
        pipe.add("n", 1)


def test_timeouts_of_some_calls_do_not_disturb_others(server: rallypoint.Server, store: rallypoint.Store) -> None:
    with ThreadPoolExecutor(20) as pool:
        short = [pool.submit(store.get, "never", timeout=0.05) for _ in range(10)]
        long = [pool.submit(store.get, "late") for _ in range(10)]
        for one in short:
            with pytest.raises(rallypoint.StoreTimeout):
                one.result(DEADLINE_S)
        await_waiting(server, 10)
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
    if sys.argv[3] == "last":  # main reads for all: the others start after it
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
        await_waiting(server, 6)
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


# Close and a killed server


def test_close_ends_all_blocked_calls(server: rallypoint.Server, store: rallypoint.Store) -> None:
    watch = store.watch("key")
    calls = blocking_calls(store, watch)
    with ThreadPoolExecutor(20) as pool:
        waiting = [pool.submit(call) for call in calls for _ in range(4 if call != watch.next else 1)]
        await_waiting(server, 16)
        store.close()
        for one in waiting:
            with pytest.raises(rallypoint.StoreClosed):
                one.result(DEADLINE_S)
    with pytest.raises(rallypoint.StoreClosed):
        store.get("k")
    store.close()
    until(lambda: server.statistics()["sessions"] == [], "the session ends at once, without a grace period")
    assert server.statistics()["waiting"] == 0


def test_the_session_of_an_unreferenced_store_ends(server: rallypoint.Server) -> None:
    def monitored() -> int:
        sessions = [reference() for reference in list(monitor._monitor._all.values())]
        supervisors = [each for each in sessions if isinstance(each, ConnectionSupervisor)]
        return sum(f":{server.port}" in each._connection.peer for each in supervisors)

    stores = [rallypoint.connect(server.url, timeout=DEADLINE_S) for _ in range(3)]
    stores[0].lease("k", "v")
    assert monitored() == 3 and len(server.statistics()["sessions"]) == 3
    assert sum(thread.name == "rallypoint monitor" for thread in threading.enumerate()) == 1
    del stores
    gc.collect()
    until(lambda: not monitored(), "the monitor drops the sessions")
    until(lambda: server.statistics()["sessions"] == [], "the sessions end")
    assert server.statistics()["keys"] == 0


def test_a_killed_server_ends_all_calls() -> None:
    with rallypoint.Server(grace=0.2) as server:
        store = rallypoint.connect(server.url, timeout=DEADLINE_S)
        with ThreadPoolExecutor(10) as pool:
            waiting = [pool.submit(store.get, "k") for _ in range(10)]
            await_waiting(server, 10)
            os.kill(server.pid, signal.SIGKILL)
            for one in waiting:
                with pytest.raises(rallypoint.SessionLost):
                    one.result(DEADLINE_S)
        with pytest.raises(rallypoint.SessionLost):
            store.set("k", "v")
        store.close()


# Watches


def test_a_client_that_only_watches_confirms_its_events(server: rallypoint.Server, store: rallypoint.Store) -> None:
    count = 10_000  # more than a session may leave unconfirmed
    with rallypoint.connect(server.url, timeout=DEADLINE_S) as other, store.watch() as changes:
        with other.pipeline() as pipe:
            for _ in range(count):
                pipe.add("n", 1)
        assert [changes.next().value for _ in range(count)] == [b"%d" % (number + 1) for number in range(count)]
        assert store.add("n", 1) == count + 1


def test_events_that_arrive_before_the_reply_to_watch_are_kept(
    server: rallypoint.Server, store: rallypoint.Store
) -> None:
    with CuttingProxy(server.port) as cutter, rallypoint.connect(f"tcp://127.0.0.1:{cutter.port}") as cut:
        cutter.cut_after(DOWN, 0)
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
    with CuttingProxy(server.port) as cutter:
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


# Malformed replies

WELCOME = frame((0, ReplyStatus.OK, Welcome(1, b"server", b"session", 0.2, False)))

MALFORMED = {
    "noise": b"\xff" * 64,
    "no array": frame("hello"),
    "too short": frame([1]),
    "a text for a number": frame(["1", 0, None]),
    "a list for a number": frame([[1], 0, None]),
    "a push that is none": frame([0, 1, 5]),
    "a push of too little": frame([0, 1, [1, 2]]),
    "nested without end": (100_000).to_bytes(4, "little") + b"\x91" * 100_000,
    "no text": frame([1, 0, None])[:4] + b"\x93\x01\x00\xa1\xff"[:4],
    "an error that is none": frame([1, ReplyStatus.ERROR, 5]),
    "an unknown error": frame([1, ReplyStatus.ERROR, ["Weather", {"rain": True}]]),
}


@pytest.fixture
def fake_server() -> Iterator[Callable[[bytes, bytes], str]]:
    """Return a function that starts a server with a given welcome and first reply, and returns its URL."""
    listeners: list[socket.socket] = []

    def start(welcome: bytes, reply: bytes) -> str:
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
                    peer.sendall(reply)
                while peer.recv(4096):
                    pass

        threading.Thread(target=serve, daemon=True).start()
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for listener in listeners:
        listener.close()


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_reply_raises_a_typed_error(kind: str, fake_server: Callable[[bytes, bytes], str]) -> None:
    store = rallypoint.connect(fake_server(WELCOME, MALFORMED[kind]), timeout=DEADLINE_S)
    with pytest.raises(rallypoint.RallypointError):
        store.set("k", "v")
    store.close()


@pytest.mark.parametrize("welcome", [frame([0, 0, 5]), frame([0, 3, [b"server", "not today"]]), b"\xff" * 64])
def test_a_malformed_welcome_raises_connect_failed(welcome: bytes, fake_server: Callable[[bytes, bytes], str]) -> None:
    with pytest.raises(rallypoint.ConnectFailed):
        rallypoint.connect(fake_server(welcome, b""), timeout=5)
