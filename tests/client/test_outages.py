"""A server that goes down and returns with its sessions: calls continue, or time out by their own deadline.

To a client, a memory server with a long grace period behind a proxy that is down looks exactly like a server that
restarts with its data directory. A test waits until the client has logged the outage, and decides when it ends.
"""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.client.sessions import connection_of, native_backend, session_of
from tests.client.test_interrupts import interrupted_at
from tests.outage_log import DEADLINE_S, LogRecorder, await_waiting, go_down, told, until
from tests.raw_peer import read_line, script
from tests.served import server_fixture

import rallypoint
from rallypoint import Barrier, Exchange, Lock, Store
from rallypoint.client import outage
from rallypoint.core.machines.machine import Disconnected
from rallypoint.recipes.hosting import shared_object
from rallypoint.testing import HANGS_UP, REFUSES, SILENT, CuttingProxy

__all__ = ["told"]


server = server_fixture(grace=2 * DEADLINE_S)


@pytest.fixture
def plain(server: rallypoint.Server) -> Iterator[Store]:
    """A store whose connection is never cut."""
    with rallypoint.connect(server.url, timeout=DEADLINE_S) as plain:
        yield plain


@pytest.fixture
def store(cutter: CuttingProxy, plain: Store) -> Iterator[Store]:
    """A store behind the proxy."""
    with rallypoint.connect(f"tcp://127.0.0.1:{cutter.port}", timeout=DEADLINE_S) as store:
        yield store


class ProxiedServer(NamedTuple):
    """A server behind a proxy that takes it down, and the log of the clients."""

    server: rallypoint.Server
    cutter: CuttingProxy
    told: LogRecorder

    def await_waiting(self, number: int) -> None:
        """Return when this many requests wait at the server."""
        await_waiting(self.server, number)

    def go_down(self, how: str = REFUSES) -> None:
        """Take the server down, and return when a client has logged it."""
        go_down(self.cutter, self.told, how)

    def come_back(self) -> None:
        """End the outage."""
        self.cutter.come_back()


@pytest.fixture
def proxied(server: rallypoint.Server, cutter: CuttingProxy, told: LogRecorder) -> ProxiedServer:
    return ProxiedServer(server, cutter, told)


def times_out(store: Store, timeout: float = 0.0) -> rallypoint.StoreTimeout:
    """Make a call that times out, and return its error."""
    with pytest.raises(rallypoint.StoreTimeout) as caught:
        store.get("never", timeout=timeout)
    return caught.value


# Calls continue

BLOCKED: dict[str, tuple[Callable[[Store], Any], Callable[[Store], Any], Any]] = {
    "get": (lambda s: s.get("a"), lambda s: s.set("a", "v"), b"v"),
    "wait": (lambda s: s.wait(["b"]), lambda s: s.set("b", "v"), None),
    "multi_get": (lambda s: s.multi_get(["c", "d"]), lambda s: s.multi_set(["c", "d"], ["1", "2"]), [b"1", b"2"]),
    "queue_pop": (lambda s: s.queue_pop("q"), lambda s: s.queue_push("q", "v"), b"v"),
    "barrier": (lambda s: s.barrier("e", 2), lambda s: s.barrier("e", 2), None),
    "Barrier": (lambda s: Barrier(s, "b", 2).wait(0), lambda s: Barrier(s, "b", 2).wait(1), None),
    "Exchange": (
        lambda s: Exchange(s, "e", 2).all_gather(0, b"a"),
        lambda s: Exchange(s, "e", 2).all_gather(1, b"b"),
        [b"a", b"b"],
    ),
}


@pytest.mark.parametrize("how", [REFUSES, HANGS_UP, SILENT])
def test_blocked_calls_survive_an_outage(
    how: str, proxied: ProxiedServer, plain: Store, store: Store, pool: ThreadPoolExecutor
) -> None:
    stores = {name: store.clone() for name in BLOCKED}
    ends = {name: pool.submit(BLOCKED[name][0], stores[name]) for name in BLOCKED}
    proxied.await_waiting(len(BLOCKED))
    proxied.go_down(how)
    times_out(store, 2.0)
    assert not any(end.done() for end in ends.values())
    proxied.come_back()
    for name, (_, release, returns) in BLOCKED.items():
        release(plain)
        assert ends[name].result(DEADLINE_S) == returns, name
    assert plain.queue_len("q") == 0
    for clone in stores.values():
        clone.close()


def test_all_blocked_calls_of_one_connection_survive_an_outage(
    proxied: ProxiedServer, plain: Store, store: Store, pool: ThreadPoolExecutor
) -> None:
    ends = [pool.submit(store.get, "late") for _ in range(10)] + [pool.submit(store.queue_pop, "q") for _ in range(5)]
    proxied.await_waiting(15)
    proxied.go_down()
    made = [pool.submit(store.add, "n", 1) for _ in range(3)]  # in the outage
    proxied.come_back()
    assert sorted(one.result(DEADLINE_S) for one in made) == [1, 2, 3]
    plain.set("late", "v")
    for number in range(5):
        plain.queue_push("q", str(number))
    answers = [end.result(DEADLINE_S) for end in ends]
    assert answers[:10] == [b"v"] * 10 and sorted(answers[10:]) == [b"%d" % number for number in range(5)]


def test_large_requests_of_an_outage_are_repeated_while_their_replies_are_read(
    proxied: ProxiedServer, plain: Store, store: Store, pool: ThreadPoolExecutor
) -> None:
    """The server reads the last of them only when the replies to the first have been read."""
    large, pending = b"v" * (8 << 20), connection_of(store).pending
    plain.set("large", large)
    proxied.go_down()
    reads = [pool.submit(store.get, "large") for _ in range(8)]
    until(lambda: len(pending) == 8, "the reads come first")
    writes = [pool.submit(store.set, f"large {number}", large) for number in range(2)]
    until(lambda: len(pending) == 10, "then the writes")
    proxied.come_back()
    assert all(one.result(DEADLINE_S) == large for one in reads)
    assert [one.result(DEADLINE_S) for one in writes] == [None, None]


def test_a_release_that_failed_in_an_outage_can_be_repeated(proxied: ProxiedServer, plain: Store, store: Store) -> None:
    lock = Lock(store, "l")
    lock.acquire()
    session_of(store).patience_s = 0.2
    proxied.go_down()
    with pytest.raises(rallypoint.ConnectionLost):
        lock.release()
    proxied.come_back()
    session_of(store).patience_s = DEADLINE_S
    assert lock.release()
    assert Lock(plain, "l").acquire(DEADLINE_S)


def test_a_held_lock_and_a_wait_for_one_survive_an_outage(
    proxied: ProxiedServer, plain: Store, store: Store, pool: ThreadPoolExecutor
) -> None:
    held, wanted = Lock(store, "held"), Lock(store, "wanted")
    fence = held.acquire()
    others = Lock(plain, "wanted")
    others.acquire()
    waiting = pool.submit(wanted.acquire)
    proxied.await_waiting(1)
    proxied.go_down()
    proxied.come_back()
    others.release()
    assert waiting.result(DEADLINE_S) > 0
    assert not held.lost and held.fence == fence
    assert held.release() and wanted.release()


def test_a_barrier_that_opens_in_an_outage_releases_the_member_later(
    proxied: ProxiedServer, plain: Store, store: Store, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server drops the opened barrier while this member is disconnected, and keeps the reply for it."""
    monkeypatch.setattr(shared_object, "PROGRESS_S", 0.1)
    reasons: list[str] = []
    waits_on = threading.Event()

    def progress(waiting: Any) -> None:
        reasons.append(waiting.reason)
        if isinstance(waiting, Disconnected) and len(reasons) > 3:
            waits_on.set()

    for _ in range(3):
        reasons.clear()
        waits_on.clear()
        member = pool.submit(Barrier(store, "b", 2, progress).wait, 0)
        until(lambda: bool(reasons), "it waits")
        proxied.await_waiting(1)
        proxied.cutter.go_down()
        assert waits_on.wait(DEADLINE_S)
        Barrier(plain, "b", 2).wait(1)
        proxied.come_back()
        assert member.result(DEADLINE_S) is None
        assert "has been down for" in reasons[-1] or "members are here" in reasons[-1]
    until(lambda: not proxied.server.statistics()["objects"], "the server has dropped the barrier")


def test_a_watch_has_no_gap(proxied: ProxiedServer, plain: Store, store: Store) -> None:
    with store.watch("k") as changes:
        plain.set("k", "before")
        proxied.go_down()
        for number in range(100):
            plain.set("k", str(number))
        proxied.come_back()
        plain.set("k", "after")
        seen = [changes.next(DEADLINE_S).value for _ in range(102)]
        assert seen == [b"before", *(b"%d" % number for number in range(100)), b"after"]


def test_heartbeats_continue_after_an_outage(proxied: ProxiedServer, plain: Store, store: Store) -> None:
    store.lease("mine", "v", heartbeat=5.0)
    with plain.watch("mine") as changes:
        proxied.go_down()
        proxied.come_back()
        proxied.told.until("is back")
        with pytest.raises(rallypoint.StoreTimeout):
            changes.next(6.0)
    assert plain.get("mine") == b"v"


# Timeouts in an outage


def test_a_call_times_out_in_an_outage_and_another_continues(
    proxied: ProxiedServer, plain: Store, store: Store, pool: ThreadPoolExecutor
) -> None:
    reader = pool.submit(times_out, store, 1.0)  # the first call reads for all, and notices the cut
    proxied.await_waiting(1)
    sibling = pool.submit(store.get, "late")
    proxied.await_waiting(2)
    proxied.go_down()
    error = reader.result(DEADLINE_S)
    assert "is not known" in str(error) and f"127.0.0.1:{proxied.cutter.port} has been down for" in error.down
    assert (error.operation, error.missing, error.timeout_s) == ("get", ("never",), 1.0)
    for call in (
        lambda: store.wait(["a", "b"], timeout=0.5),
        lambda: store.multi_get(["a", "b"], timeout=0.5),
        lambda: store.queue_pop("q", timeout=0.5),
        lambda: store.barrier("b", 2, timeout=0.5),
    ):
        with pytest.raises(rallypoint.StoreTimeout) as caught:
            call()
        assert caught.value.down and caught.value.missing in (("a", "b"), ("q",), ("b",))
    assert not sibling.done()
    proxied.come_back()
    plain.set("late", "v")
    assert sibling.result(DEADLINE_S) == b"v"
    proxied.await_waiting(0)
    assert not plain.check(["b"]), "no arrival is left at the barrier"


def test_a_call_that_does_not_wait_fails_after_the_answer_timeout_and_is_not_executed_later(
    proxied: ProxiedServer, plain: Store, store: Store
) -> None:
    native_backend(store).set_answer_timeout(0.5)
    proxied.go_down()
    reads = (
        lambda: store.get("k", timeout=0),
        lambda: store.wait(["k"], timeout=0),
    )  # the outage is no proof that the key is missing
    for call in (lambda: store.add("n", 1), lambda: store.set("k", "v"), lambda: pipelined(store), *reads):
        with pytest.raises(rallypoint.ConnectionLost, match="it may or may not have been applied") as caught:
            call()
        assert "has been down for" in caught.value.why
    proxied.come_back()
    native_backend(store).set_answer_timeout(DEADLINE_S)
    assert store.add("m", 1) == 1
    assert plain.list_keys() == ["m"]


def pipelined(store: Store) -> None:
    with store.pipeline() as pipe:
        pipe.set("k", "v")


def test_an_item_for_a_pop_that_timed_out_returns_to_the_queue(
    proxied: ProxiedServer, plain: Store, store: Store, pool: ThreadPoolExecutor
) -> None:
    """The server may have sent the item before it noticed the cut: a client that times out withdraws its request."""
    proxied.cutter.half_open = True  # the server does not notice the cut, and keeps sending
    taker = pool.submit(store.queue_pop, "q", True, 1.0)
    proxied.await_waiting(1)
    proxied.cutter.go_down()
    plain.queue_push("q", "item")
    until(lambda: plain.queue_len("q") == 0, "the server has sent the item")
    with pytest.raises(rallypoint.StoreTimeout):
        taker.result(DEADLINE_S)
    proxied.come_back()
    assert plain.queue_pop("q", timeout=DEADLINE_S) == b"item"


def test_a_lock_whose_acquire_timed_out_in_an_outage_stays_free(
    proxied: ProxiedServer, plain: Store, store: Store, pool: ThreadPoolExecutor
) -> None:
    holder = Lock(plain, "l")
    holder.acquire()
    waiting = pool.submit(Lock(store, "l").acquire, 1.5)
    proxied.await_waiting(1)
    proxied.go_down()
    with pytest.raises(rallypoint.MembersMissing, match=r"has been down for .* undone when the server is back"):
        waiting.result(DEADLINE_S)
    for timeout in (0, 0.2):
        with pytest.raises(rallypoint.MembersMissing, match="has been down for"):
            Lock(store, "l").acquire(timeout)
    holder.release()  # the server grants it to the waiter that has timed out
    proxied.come_back()
    assert holder.acquire(DEADLINE_S) > 0
    assert holder.release()


def test_polls_in_an_outage_leave_no_request_to_repeat(
    proxied: ProxiedServer, plain: Store, store: Store, pool: ThreadPoolExecutor
) -> None:
    proxied.go_down()
    for _ in range(200):
        times_out(store, 0.001)
        with pytest.raises(rallypoint.MembersMissing):
            Lock(store, "l").acquire(0)
    connection = connection_of(store)
    assert connection.core.unanswered() == [] and connection.pending == {}
    proxied.come_back()
    assert store.add("n", 1) == 1


def test_a_call_with_timeout_zero_survives_a_cut(
    cutter: CuttingProxy, plain: Store, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outage, "DOWN_S", DEADLINE_S)
    plain.set("k", "v")
    for _ in range(20):
        cutter.cut_all()
        assert store.get("k", timeout=0) == b"v"


# Log messages


def test_an_outage_is_logged_once_and_so_is_its_end(
    proxied: ProxiedServer, plain: Store, store: Store, pool: ThreadPoolExecutor
) -> None:
    waiting = [pool.submit(store.get, "late") for _ in range(5)]
    for number in (1, 2):
        proxied.go_down()
        times_out(store, 1.0)
        proxied.come_back()
        proxied.told.until("is back", number)
    assert proxied.told.count("is down") == proxied.told.count("is back") == 2
    peer = f"server at 127.0.0.1:{proxied.cutter.port}"
    while_it_lasts = (
        r"is down for \d s \(refused, nothing listens there\); waiting until \d\d:\d\d:\d\d \(1\d\d s more\)"
    )
    assert re.fullmatch(f"{peer} {while_it_lasts}", proxied.told.lines[0])
    assert re.fullmatch(rf"{peer} is back after \d+\.\d s", proxied.told.lines[1])
    plain.set("late", "v")
    assert [one.result(DEADLINE_S) for one in waiting] == [b"v"] * 5


def test_a_short_cut_is_not_logged(
    proxied: ProxiedServer, plain: Store, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outage, "DOWN_S", DEADLINE_S)
    for number in range(1, 20):
        proxied.cutter.cut_all()
        assert store.add("n", 1) == number
    assert proxied.told.lines == []


# The end


def test_close_does_not_wait_for_the_server(
    proxied: ProxiedServer, plain: Store, store: Store, pool: ThreadPoolExecutor
) -> None:
    watch = store.watch("w")
    calls: list[Callable[[], object]] = [lambda: store.get("late"), lambda: store.queue_pop("q"), watch.next]
    waiting = [pool.submit(call) for call in calls]
    proxied.await_waiting(2)
    proxied.go_down(SILENT)
    store.close()
    for one in waiting:
        with pytest.raises(rallypoint.StoreClosed):
            one.result(DEADLINE_S)
    until(lambda: reconnecting() == 0, "no thread reconnects any more")


def test_a_watch_closed_in_an_outage_ends_when_the_server_is_back(
    proxied: ProxiedServer, plain: Store, store: Store
) -> None:
    watch = store.watch("w")
    proxied.go_down()
    with pytest.raises(rallypoint.StoreTimeout, match="has been down for"):
        watch.next(0.0)
    watch.close()
    proxied.come_back()
    until(lambda: proxied.server.statistics()["watches"] == 0, "the server has dropped the watch")


def test_reconnecting_keeps_no_unreferenced_store_alive(proxied: ProxiedServer, plain: Store, store: Store) -> None:
    forgotten = store.clone()
    proxied.go_down()
    proxied.told.until("is down", 2)
    assert reconnecting() == 2
    del forgotten
    gc.collect()
    until(lambda: reconnecting() == 1, "nothing reconnects for it any more")


def reconnecting() -> int:
    return sum(thread.name == "rallypoint reconnect" for thread in threading.enumerate())


# Interrupts, forks


@pytest.mark.parametrize("name", ["add", "get"])
def test_a_call_interrupted_at_any_point_after_a_cut_leaves_no_lock_held(
    name: str, cutter: CuttingProxy, plain: Store, store: Store
) -> None:
    connection = connection_of(store)
    plain.set("there", "v")
    calls: dict[str, Callable[[], object]] = {"add": lambda: store.add("n", 1), "get": lambda: store.get("there")}
    done = 0
    for point in count(1):
        cutter.cut_all()
        done += not interrupted_at(point, calls[name], store)
        assert store.add("quiet", 1) == point
        assert connection.pending == {} and connection.core.unanswered() == []
        if done == 3:  # the number of points varies from run to run
            break
    assert point > 20


INTERRUPTED = """
import sys, threading, rallypoint
store = rallypoint.connect(sys.argv[1], timeout=60)
results = []
others = [threading.Thread(target=lambda: results.append(store.get("late"))) for _ in range(3)]
if sys.argv[2] == "first":
    [other.start() for other in others]
    store.add("ready", 1)
try:
    if sys.argv[2] == "last":  # main reads for all, and notices the cut
        threading.Timer(0.0, lambda: [other.start() for other in others]).start()
    store.queue_pop("wanted")
except KeyboardInterrupt:
    print("interrupted", flush=True)
try:
    store.set("k", "v")
    print("set", flush=True)
    [other.join() for other in others]
    print(results, flush=True)
except KeyboardInterrupt:
    print("interrupted again", flush=True)
"""


@pytest.mark.parametrize("others", ["first", "last"])
def test_ctrl_c_in_an_outage_ends_one_call_at_once_and_no_other(
    others: str, server: rallypoint.Server, cutter: CuttingProxy, plain: Store, tmp_path: Path
) -> None:
    with (
        open(tmp_path / "err", "wb+", buffering=0) as err,
        script(INTERRUPTED, f"tcp://127.0.0.1:{cutter.port}", others, stderr=err) as process,
    ):
        await_waiting(server, 4)
        cutter.go_down(HANGS_UP)
        until(lambda: b"is down" in (tmp_path / "err").read_bytes(), "the client has noticed")
        process.send_signal(2)
        assert read_line(process) == "interrupted"
        cutter.come_back()
        assert read_line(process) == "set"
        before = server.statistics()
        plain.set("late", "v")
        after = server.statistics()
        assert read_line(process) == str([b"v"] * 3), ((tmp_path / "err").read_text(), before, after)
        plain.queue_push("wanted", "item")
        assert plain.queue_pop("wanted", timeout=DEADLINE_S) == b"item", "the interrupted call must not take the item"


FORKED = """
import os, sys, threading, rallypoint
store = rallypoint.connect(sys.argv[1], timeout=60)
store.lease("parents", "v")
results = []
waiter = threading.Thread(target=lambda: results.append(store.get("late")))
waiter.start()
print("ready", store.add("n", 1), flush=True)
sys.stdin.readline()
child = os.fork()
if child == 0:
    print("forked", flush=True)
    print("child", store.get("late").decode(), store.check(["parents"]), flush=True)
    store.close()
    os._exit(0)
os.waitpid(child, 0)
waiter.join()
print("parent", results, store.get("parents"), flush=True)
"""


def test_a_child_forked_in_an_outage_has_its_own_session(
    server: rallypoint.Server, cutter: CuttingProxy, plain: Store, tmp_path: Path
) -> None:
    with (
        open(tmp_path / "err", "wb+", buffering=0) as err,
        script(FORKED, f"tcp://127.0.0.1:{cutter.port}", stderr=err) as process,
    ):
        assert read_line(process) == "ready 1"
        await_waiting(server, 1)
        cutter.go_down()
        until(lambda: b"is down" in (tmp_path / "err").read_bytes(), "the parent has noticed")
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        assert read_line(process) == "forked"
        cutter.come_back()
        plain.set("late", "v")
        assert read_line(process) == "child v True"
        assert read_line(process) == "parent [b'v'] b'v'"


# All at once


def test_threads_lose_no_add_over_many_outages(
    cutter: CuttingProxy, plain: Store, store: Store, pool: ThreadPoolExecutor
) -> None:
    threads, ended = 6, threading.Event()

    def add(number: int) -> list[int]:
        totals = []
        while not ended.is_set():
            totals.append(store.add("n", 1))
            if number % 2:
                with pytest.raises(rallypoint.StoreTimeout):
                    store.wait(["never"], timeout=0.001)
        return totals

    connection = connection_of(store)
    adders: list[Future[list[int]]] = [pool.submit(add, number) for number in range(threads)]
    for how in (REFUSES, HANGS_UP, SILENT, REFUSES, HANGS_UP, REFUSES):
        before = int(plain.add("n", 0))
        until(lambda before=before: plain.add("n", 0) > before, "they add")  # type: ignore[misc]
        cutter.go_down(how)
        until(lambda: connection.outage is not None, "it is noticed")
        cutter.come_back()
    ended.set()
    totals = sorted(total for adder in adders for total in adder.result(DEADLINE_S))
    assert totals == list(range(1, plain.add("n", 0) + 1))
