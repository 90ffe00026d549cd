"""A server that is away for a while, and comes back with its sessions: calls go on, or end when their own time is over.

To a client, a memory server with a long grace behind a proxy that is down looks exactly like one that is restarted with
its data directory. An outage has been noticed when the log says so; how long it lasts after that is up to the test.
"""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.cutter import HANGS_UP, REFUSES, SILENT, Cutter
from tests.outages import DEADLINE_S, Told, go_down, told, until
from tests.session.test_interrupts import interrupted_at
from tests.wire import read_line, script

import rallypoint
from rallypoint import Barrier, Exchange, Lock, Store
from rallypoint.core.machine import Disconnected
from rallypoint.recipes import hosting
from rallypoint.store import outage

__all__ = ["told"]


@pytest.fixture
def server() -> Iterator[rallypoint.Server]:
    with rallypoint.Server(grace=2 * DEADLINE_S) as server:
        yield server


@pytest.fixture
def cutter(server: rallypoint.Server) -> Iterator[Cutter]:
    with Cutter(server.port) as cutter:
        yield cutter


@pytest.fixture
def plain(server: rallypoint.Server) -> Iterator[Store]:
    """A store whose connection is never cut."""
    with rallypoint.connect(server.url, timeout=DEADLINE_S) as plain:
        yield plain


@pytest.fixture
def store(cutter: Cutter, plain: Store) -> Iterator[Store]:
    """A store behind the proxy."""
    with rallypoint.connect(f"tcp://127.0.0.1:{cutter.port}", timeout=DEADLINE_S) as store:
        yield store


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(20) as pool:
        yield pool


def await_waiting(server: rallypoint.Server, number: int) -> None:
    """Return when so many requests wait at the server."""
    until(lambda: server.statistics()["waiting"] == number, f"{number} wait")


def times_out(store: Store, timeout: float = 0.0) -> rallypoint.StoreTimeout:
    """Make a call that ends in an outage when its own time is over."""
    with pytest.raises(rallypoint.StoreTimeout) as caught:
        store.get("never", timeout=timeout)
    return caught.value


# Calls go on

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
def test_blocked_calls_go_on_however_long_the_server_was_away(
    how: str,
    server: rallypoint.Server,
    cutter: Cutter,
    plain: Store,
    store: Store,
    told: Told,
    pool: ThreadPoolExecutor,
) -> None:
    stores = {name: store.clone() for name in BLOCKED}
    ends = {name: pool.submit(BLOCKED[name][0], stores[name]) for name in BLOCKED}
    await_waiting(server, len(BLOCKED))
    go_down(cutter, told, how)
    times_out(store, 2.0)
    assert not any(end.done() for end in ends.values())
    cutter.come_back()
    for name, (_, release, returns) in BLOCKED.items():
        release(plain)
        assert ends[name].result(DEADLINE_S) == returns, name
    assert plain.queue_len("q") == 0
    for clone in stores.values():
        clone.close()


def test_one_connection_has_many_blocked_calls_and_all_go_on(
    server: rallypoint.Server, cutter: Cutter, plain: Store, store: Store, told: Told, pool: ThreadPoolExecutor
) -> None:
    ends = [pool.submit(store.get, "late") for _ in range(10)] + [pool.submit(store.queue_pop, "q") for _ in range(5)]
    await_waiting(server, 15)
    go_down(cutter, told)
    made = [pool.submit(store.add, "n", 1) for _ in range(3)]  # in the outage
    cutter.come_back()
    assert sorted(one.result(DEADLINE_S) for one in made) == [1, 2, 3]
    plain.set("late", "v")
    for number in range(5):
        plain.queue_push("q", str(number))
    answers = [end.result(DEADLINE_S) for end in ends]
    assert answers[:10] == [b"v"] * 10 and sorted(answers[10:]) == [b"%d" % number for number in range(5)]


def test_a_lock_is_waited_for_and_held_over_an_outage(
    server: rallypoint.Server, cutter: Cutter, plain: Store, store: Store, told: Told, pool: ThreadPoolExecutor
) -> None:
    held, wanted = Lock(store, "held"), Lock(store, "wanted")
    fence = held.acquire()
    others = Lock(plain, "wanted")
    others.acquire()
    waiting = pool.submit(wanted.acquire)
    await_waiting(server, 1)
    go_down(cutter, told)
    cutter.come_back()
    others.release()
    assert waiting.result(DEADLINE_S) > 0
    assert not held.lost and held.fence == fence
    assert held.release() and wanted.release()


def test_what_happened_meanwhile_is_answered_and_not_done_again(
    server: rallypoint.Server,
    cutter: Cutter,
    plain: Store,
    store: Store,
    told: Told,
    pool: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The barrier opens while this member is away, and is forgotten by the server; the answer is kept for it."""
    monkeypatch.setattr(hosting, "PROGRESS_S", 0.1)
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
        await_waiting(server, 1)
        cutter.go_down()
        assert waits_on.wait(DEADLINE_S)
        Barrier(plain, "b", 2).wait(1)
        cutter.come_back()
        assert member.result(DEADLINE_S) is None
        assert "has been down for" in reasons[-1] or "members are here" in reasons[-1]
    until(lambda: not server.statistics()["objects"], "nothing is left of it")


def test_a_watch_has_no_gap(cutter: Cutter, plain: Store, store: Store, told: Told) -> None:
    with store.watch("k") as changes:
        plain.set("k", "before")
        go_down(cutter, told)
        for number in range(100):
            plain.set("k", str(number))
        cutter.come_back()
        plain.set("k", "after")
        seen = [changes.next(DEADLINE_S).value for _ in range(102)]
        assert seen == [b"before", *(b"%d" % number for number in range(100)), b"after"]


def test_a_lease_with_a_heartbeat_beats_on(cutter: Cutter, plain: Store, store: Store, told: Told) -> None:
    store.lease("mine", "v", heartbeat=5.0)
    with plain.watch("mine") as changes:
        go_down(cutter, told)
        cutter.come_back()
        told.until("is back")
        with pytest.raises(rallypoint.StoreTimeout):
            changes.next(6.0)
    assert plain.get("mine") == b"v"


# A call's own time


def test_a_call_ends_in_an_outage_when_its_time_is_over_and_another_goes_on(
    server: rallypoint.Server, cutter: Cutter, plain: Store, store: Store, told: Told, pool: ThreadPoolExecutor
) -> None:
    reader = pool.submit(times_out, store, 1.0)  # the first one reads for all, and notices the cut
    await_waiting(server, 1)
    sibling = pool.submit(store.get, "late")
    await_waiting(server, 2)
    go_down(cutter, told)
    error = reader.result(DEADLINE_S)
    assert "is not known" in str(error) and f"127.0.0.1:{cutter.port} has been down for" in error.down
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
    cutter.come_back()
    plain.set("late", "v")
    assert sibling.result(DEADLINE_S) == b"v"
    await_waiting(server, 0)
    assert not plain.check(["b"]), "and nobody has come to the barrier"


def test_what_is_answered_at_once_ends_with_its_patience_and_is_not_done_later(
    cutter: Cutter, plain: Store, store: Store, told: Told
) -> None:
    store._backend.be_patient(0.5)  # type: ignore[attr-defined]
    go_down(cutter, told)
    reads = (lambda: store.get("k", timeout=0), lambda: store.wait(["k"], timeout=0))  # an outage does not decide them
    for call in (lambda: store.add("n", 1), lambda: store.set("k", "v"), lambda: pipelined(store), *reads):
        with pytest.raises(rallypoint.ConnectionLost, match="whether it was carried out is not known") as caught:
            call()
        assert "has been down for" in caught.value.why
    cutter.come_back()
    store._backend.be_patient(DEADLINE_S)  # type: ignore[attr-defined]
    assert store.add("m", 1) == 1
    assert plain.list_keys() == ["m"]


def pipelined(store: Store) -> None:
    with store.pipeline() as pipe:
        pipe.set("k", "v")


def test_an_item_for_one_who_gave_up_goes_to_another(
    server: rallypoint.Server, cutter: Cutter, plain: Store, store: Store, told: Told, pool: ThreadPoolExecutor
) -> None:
    """The server may have given it before the cut was known: whoever gives up takes the request back."""
    cutter.half_open = True  # the server goes on sending into the void
    taker = pool.submit(store.queue_pop, "q", True, 1.0)
    await_waiting(server, 1)
    cutter.go_down()
    plain.queue_push("q", "item")
    until(lambda: plain.queue_len("q") == 0, "it is given")
    with pytest.raises(rallypoint.StoreTimeout):
        taker.result(DEADLINE_S)
    cutter.come_back()
    assert plain.queue_pop("q", timeout=DEADLINE_S) == b"item"


def test_a_lock_that_was_not_had_in_an_outage_is_nobodys(
    server: rallypoint.Server, cutter: Cutter, plain: Store, store: Store, told: Told, pool: ThreadPoolExecutor
) -> None:
    holder = Lock(plain, "l")
    holder.acquire()
    waiting = pool.submit(Lock(store, "l").acquire, 1.5)
    await_waiting(server, 1)
    go_down(cutter, told)
    with pytest.raises(rallypoint.MembersMissing, match=r"has been down for .* taken back when the server is back"):
        waiting.result(DEADLINE_S)
    for timeout in (0, 0.2):
        with pytest.raises(rallypoint.MembersMissing, match="has been down for"):
            Lock(store, "l").acquire(timeout)
    holder.release()  # and it is given to the one that waited, which has gone
    cutter.come_back()
    assert holder.acquire(DEADLINE_S) > 0
    assert holder.release()


def test_polls_in_an_outage_leave_nothing_to_be_said(
    cutter: Cutter, plain: Store, store: Store, told: Told, pool: ThreadPoolExecutor
) -> None:
    go_down(cutter, told)
    for _ in range(200):
        times_out(store, 0.001)
        with pytest.raises(rallypoint.MembersMissing):
            Lock(store, "l").acquire(0)
    wire = store._backend._wire  # type: ignore[attr-defined]
    assert wire._core.unanswered() == [] and wire._slots == {}
    cutter.come_back()
    assert store.add("n", 1) == 1


def test_a_call_of_no_time_is_not_disturbed_by_a_cut(
    cutter: Cutter, plain: Store, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outage, "DOWN_S", DEADLINE_S)
    plain.set("k", "v")
    for _ in range(20):
        cutter.cut_all()
        assert store.get("k", timeout=0) == b"v"


# What is said


def test_an_outage_is_said_once_and_so_is_its_end(
    cutter: Cutter, plain: Store, store: Store, told: Told, pool: ThreadPoolExecutor
) -> None:
    waiting = [pool.submit(store.get, "late") for _ in range(5)]
    for number in (1, 2):
        go_down(cutter, told)
        times_out(store, 1.0)
        cutter.come_back()
        told.until("is back", number)
    assert told.count("is down") == told.count("is back") == 2
    peer = f"server at 127.0.0.1:{cutter.port}"
    while_it_lasts = (
        r"is down for \d s \(refused, nothing listens there\); waiting until \d\d:\d\d:\d\d \(1\d\d s more\)"
    )
    assert re.fullmatch(f"{peer} {while_it_lasts}", told.lines[0])
    assert re.fullmatch(rf"{peer} is back after \d+\.\d s", told.lines[1])
    plain.set("late", "v")
    assert [one.result(DEADLINE_S) for one in waiting] == [b"v"] * 5


def test_a_cut_is_not_spoken_of(
    cutter: Cutter, plain: Store, store: Store, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outage, "DOWN_S", DEADLINE_S)
    for number in range(1, 20):
        cutter.cut_all()
        assert store.add("n", 1) == number
    assert told.lines == []


# The end


def test_close_does_not_wait_for_the_server(
    server: rallypoint.Server, cutter: Cutter, plain: Store, store: Store, told: Told, pool: ThreadPoolExecutor
) -> None:
    watch = store.watch("w")
    waiting = [pool.submit(store.get, "late"), pool.submit(store.queue_pop, "q"), pool.submit(watch.next)]
    await_waiting(server, 2)
    go_down(cutter, told, SILENT)
    store.close()
    for one in waiting:
        with pytest.raises(rallypoint.StoreClosed):
            one.result(DEADLINE_S)
    until(lambda: reconnecting() == 0, "nobody tries any more")


def test_a_watch_that_is_closed_in_an_outage_is_given_up_when_the_server_is_back(
    server: rallypoint.Server, cutter: Cutter, plain: Store, store: Store, told: Told
) -> None:
    watch = store.watch("w")
    go_down(cutter, told)
    with pytest.raises(rallypoint.StoreTimeout, match="has been down for"):
        watch.next(0.0)
    watch.close()
    cutter.come_back()
    until(lambda: server.statistics()["watches"] == 0, "the server has forgotten it")


def test_a_store_that_nobody_holds_is_not_kept_by_an_outage(
    cutter: Cutter, plain: Store, store: Store, told: Told
) -> None:
    forgotten = store.clone()
    go_down(cutter, told)
    told.until("is down", 2)
    assert reconnecting() == 2
    del forgotten
    gc.collect()
    until(lambda: reconnecting() == 1, "nobody tries for it any more")


def reconnecting() -> int:
    return sum(thread.name == "rallypoint reconnect" for thread in threading.enumerate())


# Interrupts, forks


@pytest.mark.parametrize("name", ["add", "get"])
def test_a_call_that_is_interrupted_anywhere_after_a_cut_leaves_nothing_held(
    name: str, cutter: Cutter, plain: Store, store: Store
) -> None:
    wire = store._backend._wire  # type: ignore[attr-defined]
    plain.set("there", "v")
    calls: dict[str, Callable[[], object]] = {"add": lambda: store.add("n", 1), "get": lambda: store.get("there")}
    done = 0
    for point in count(1):
        cutter.cut_all()
        done += not interrupted_at(point, calls[name])
        until(lambda: wire._reader is None and not wire._sender.locked() and not wire._lock.locked(), f"at {point}")
        assert store.add("quiet", 1) == point
        assert wire._slots == {} and wire._core.unanswered() == []
        if done == 3:  # how far it comes is not the same every time
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
def test_ctrl_c_ends_a_call_at_once_and_no_other(
    others: str, server: rallypoint.Server, cutter: Cutter, plain: Store, tmp_path: Path
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
        plain.set("late", "v")
        assert read_line(process) == str([b"v"] * 3)
        plain.queue_push("wanted", "item")
        assert plain.queue_pop("wanted", timeout=DEADLINE_S) == b"item", "the interrupted call takes nothing"


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


def test_a_child_that_is_forked_in_an_outage_has_a_session_of_its_own(
    server: rallypoint.Server, cutter: Cutter, plain: Store, tmp_path: Path
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
        assert read_line(process) == f"parent {[b'v']} {b'v'}"


# All at once


def test_threads_lose_nothing_over_many_outages(
    cutter: Cutter, plain: Store, store: Store, pool: ThreadPoolExecutor
) -> None:
    threads, ended = 6, threading.Event()
    gave_up = "not carried out, as far as the client knows"

    def add(number: int) -> list[int]:
        totals = []
        while not ended.is_set():
            totals.append(store.add("n", 1))
            if number % 2:
                with pytest.raises(rallypoint.StoreTimeout):
                    store.wait(["never"], timeout=0.001)
        return totals

    wire = store._backend._wire  # type: ignore[attr-defined]
    adders: list[Future[list[int]]] = [pool.submit(add, number) for number in range(threads)]
    for how in (REFUSES, HANGS_UP, SILENT, REFUSES, HANGS_UP, REFUSES):
        before = int(plain.add("n", 0))
        until(lambda before=before: plain.add("n", 0) > before, "they add")  # type: ignore[misc]
        cutter.go_down(how)
        until(lambda: wire._outage is not None, "it is noticed")
        cutter.come_back()
    ended.set()
    totals = sorted(total for adder in adders for total in adder.result(DEADLINE_S))
    assert totals == list(range(1, plain.add("n", 0) + 1)), gave_up
