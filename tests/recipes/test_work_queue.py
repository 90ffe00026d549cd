"""Work queues on every kind of store: the same calls, results and errors; and through cuts, restarts and relays."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.store_kinds import AMPLE_S, BYTES, HOSTED, Open, together

from rallypoint import (
    FileStore,
    HashStore,
    ItemLost,
    LimitExceeded,
    Relay,
    Server,
    StoreTimeout,
    TCPStore,
    WorkQueue,
    connect,
)
from rallypoint.core.machines.machine import Waiting
from rallypoint.recipes import work_queue
from rallypoint.recipes.hosting import heartbeat, shared_object
from rallypoint.recipes.work_queue import WorkQueueStatus
from rallypoint.testing import DOWN, UP, CuttingProxy

WORKERS = 4


def counts(queue: WorkQueue) -> tuple[int, int, int, int]:
    """Return how many items are ready, taken, dead and done."""
    return queue.status()[:4]


def test_every_item_goes_to_one_taker(open_store: Open) -> None:
    items = [f"item {number}" for number in range(20)]
    ids = WorkQueue(open_store(), "jobs").put_many(items)
    assert len(set(ids)) == len(items)
    finished: list[bytes] = []

    def work(_: int) -> None:
        queue = WorkQueue(open_store(), "jobs")
        while (item := queue.try_take()) is not None:
            with item:
                finished.append(item.data)

    together([partial(work, number) for number in range(WORKERS)])
    assert sorted(finished) == sorted(item.encode() for item in items)
    assert counts(WorkQueue(open_store(), "jobs")) == (0, 0, 0, len(items))


def test_a_take_waits_for_an_item_and_is_served_in_order(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_object, "PROGRESS_S", 0.05)
    waits = [threading.Event(), threading.Event()]
    with ThreadPoolExecutor(2) as pool:
        taking = []
        for event in waits:
            queue = WorkQueue(open_store(), "jobs", progress=lambda _, event=event: event.set())  # type: ignore[misc]
            taking.append(pool.submit(queue.take, AMPLE_S))
            assert event.wait(AMPLE_S)
        producer = WorkQueue(open_store(), "jobs")
        assert producer.status().waiting == 2
        producer.put_many(["first", "second"])
        taken = [future.result(AMPLE_S) for future in taking]
    assert [item.data for item in taken] == [b"first", b"second"]
    assert [item.deliveries for item in taken] == [1, 1]
    for item in taken:
        item.done()


def test_a_block_that_raises_gives_the_item_back_until_it_is_dead(open_store: Open) -> None:
    queue = WorkQueue(open_store(), "jobs", "ann")
    queue.put("bad", max_deliveries=2)
    queue.put("good")
    for deliveries in (1, 2):
        item = queue.take(AMPLE_S)
        assert (item.data, item.deliveries) == (b"bad", deliveries)
        with pytest.raises(ZeroDivisionError), item:
            _ = 1 / 0
        with queue.take(AMPLE_S) as item:
            assert item.data == b"good", "an item that failed goes to the end"
        queue.put("good")
    assert counts(queue) == (1, 0, 1, 2)
    (letter,) = queue.dead_letters()
    assert (letter.data, letter.deliveries) == (b"bad", 2)
    assert letter.why.startswith("ann (") and letter.why.endswith("ZeroDivisionError: division by zero")
    assert queue.requeue([letter]) == 1 and queue.requeue([letter]) == 0
    assert counts(queue) == (2, 0, 0, 2)


def test_dead_letters_are_listed_requeued_and_discarded(open_store: Open) -> None:
    queue = WorkQueue(open_store(), "jobs")
    queue.put_many(["a", "b", "c", "d"], max_deliveries=1)
    for _ in range(4):
        assert queue.take(AMPLE_S).release("no good")
    letters = list(queue.dead_letters())
    assert [letter.data for letter in letters] == [b"a", b"b", b"c", b"d"]
    assert queue.discard(letters[:1]) == 1 and queue.requeue(letters[1:2]) == 1
    assert [letter.data for letter in queue.dead_letters()] == [b"c", b"d"]
    assert queue.requeue() == 2
    assert [queue.take(AMPLE_S).data for _ in range(3)] == [b"b", b"c", b"d"]


def test_a_timeout_names_the_holder_and_leaves_the_line(open_store: Open) -> None:
    queue = WorkQueue(open_store(), "jobs", "ann")
    with pytest.raises(StoreTimeout, match=r"take timed out after 0\.1 s: work queue 'jobs': 0 items are ready"):
        queue.take(0.1)
    queue.put("x")
    item = queue.take(AMPLE_S)
    for call in (queue.take, queue.join):
        with pytest.raises(StoreTimeout, match="1 taken, held by ann"):
            call(0.1)
    status = queue.status()
    assert (status.taken, status.waiting) == (1, 0)
    assert status.holders[0][1:] == (item.id, 1) and status.holders[0].holder.startswith("ann")
    item.done()
    queue.join(AMPLE_S)
    assert queue.status() == WorkQueueStatus(0, 0, 0, 1, 0, ())


def test_join_returns_when_all_is_done(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_object, "PROGRESS_S", 0.05)
    queue = WorkQueue(open_store(), "jobs")
    queue.join(0)
    queue.put("x")
    waits = threading.Event()
    joiner = WorkQueue(open_store(), "jobs", progress=lambda _: waits.set())
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(joiner.join, AMPLE_S)
        assert waits.wait(AMPLE_S)
        item = queue.take(AMPLE_S)
        assert not joined.done()
        item.done()
        joined.result(AMPLE_S)


@pytest.mark.parametrize("kind", [*HOSTED, *BYTES])
def test_items_of_a_closed_store_go_back(kind: Any, tmp_path: Path, quick_heartbeat: None) -> None:
    with kind(tmp_path) as open_one:
        store = open_one()
        queue = WorkQueue(open_one(), "jobs")
        queue.put("x")
        item = WorkQueue(store, "jobs").take(AMPLE_S)
        store.close()
        again = queue.take(AMPLE_S)
        assert (again.id, again.data, again.deliveries) == (item.id, b"x", 2)
        again.done()


def test_an_interrupted_take_leaves_the_item_to_others(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_object, "PROGRESS_S", 0.05)

    def interrupt(_: Waiting) -> None:
        WorkQueue(open_store(), "jobs").put("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        WorkQueue(open_store(), "jobs", progress=interrupt).take(AMPLE_S)
    item = WorkQueue(open_store(), "jobs").take(AMPLE_S)
    assert item.deliveries == 1, "nobody has seen it before"
    item.done()


# Misuse


def test_misuse_is_named() -> None:
    queue = WorkQueue(HashStore(), "jobs")
    with pytest.raises(TypeError, match="an item must be a string or bytes, not 5"):
        queue.put(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="put_many takes a list of items"):
        queue.put_many("abc")
    with pytest.raises(ValueError, match="max_deliveries must be 1 to 1,000,000, not 0"):
        queue.put("x", max_deliveries=0)
    with pytest.raises(TypeError, match="max_deliveries must be a whole number, not '2'"):
        queue.put("x", max_deliveries="2")  # type: ignore[arg-type]
    with pytest.raises(LimitExceeded, match="an item of work queue 'jobs' has 8,388,609 bytes"):
        queue.put(bytes(8 * 1024 * 1024 + 1))
    with pytest.raises(ValueError, match="the name of a work queue must be a non-empty string"):
        WorkQueue(HashStore(), "")
    queue.put("x")
    item = queue.take(0)
    item.done()
    for call in (item.done, item.release):
        with pytest.raises(RuntimeError, match=r"<item .* delivery 1> was already acknowledged or given back"):
            call()


def test_batches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_queue, "BATCH_BYTES", 10)
    queue = WorkQueue(HashStore(), "jobs")
    assert len(queue.put_many(["a" * 8, "b" * 8, "c", "d", "e" * 30])) == 5
    assert [queue.take(0).data for _ in range(5)] == [b"a" * 8, b"b" * 8, b"c", b"d", b"e" * 30]
    assert queue.put_many([]) == []


# A session that expires; cuts, restarts, relays


def test_done_after_another_got_the_item_is_refused_on_our_server() -> None:
    with Server(grace=0.5) as server, CuttingProxy(server.port) as proxy:
        queue = WorkQueue(connect(server.url), "jobs")
        queue.put("x")
        cut_off = WorkQueue(TCPStore("127.0.0.1", proxy.port), "jobs").take(AMPLE_S)
        proxy.go_down()
        item = queue.take(AMPLE_S)
        assert (item.id, item.deliveries) == (cut_off.id, 2)
        proxy.come_back()
        with pytest.raises(ItemLost) as lost:
            cut_off.done()
        assert lost.value.item == item.id and "work queue 'jobs'" in lost.value.thing and lost.value.why
        item.done()
        assert counts(queue) == (0, 0, 0, 1)


def test_done_after_another_got_the_item_names_the_holder(tmp_path: Path, quick_heartbeat: None) -> None:
    """Where the members host the queue, the stalled one finds out who evicted it."""
    stores = [FileStore(str(tmp_path / "store")) for _ in range(2)]
    queue = WorkQueue(stores[0], "jobs", "bob")
    queue.put("x")
    stalled = WorkQueue(stores[1], "jobs", "ann").take(AMPLE_S)
    reader = heartbeat.heartbeat_reader_of(stores[1])
    reader.local.end()  # its heartbeat stops
    item = queue.take(AMPLE_S)
    with pytest.raises(ItemLost) as lost:
        stalled.done()
    assert lost.value.holder.startswith("bob") and lost.value.item == item.id


@pytest.mark.parametrize("way", [UP, DOWN])
def test_a_cut_at_any_byte_takes_and_finishes_every_item_once(way: str) -> None:
    """Each call is cut within its request, or within the reply; the resumed session repeats it, with one effect."""
    with Server() as server, CuttingProxy(server.port) as proxy:
        queue = WorkQueue(TCPStore("127.0.0.1", proxy.port), "jobs")
        total = 0
        for after in range(0, 90, 3):
            proxy.cut_after(way, after)
            queue.put(str(after))
            total += 1
            with queue.take(AMPLE_S) as item:
                assert (item.data, item.deliveries) == (str(after).encode(), 1)
            proxy.disarm()
        assert counts(queue) == (0, 0, 0, total)


def test_a_queue_survives_the_death_of_its_server(tmp_path: Path) -> None:
    with Server(data_dir=str(tmp_path / "data")) as server:
        queue = WorkQueue(connect(server.url), "jobs")
        queue.put_many(["a", "b", "c"], max_deliveries=1)
        held, dead = queue.take(AMPLE_S), queue.take(AMPLE_S)
        dead.release("bad")
        os.kill(server.pid, signal.SIGKILL)
        held.done()
        assert counts(queue) == (1, 0, 1, 1)
        os.kill(server.pid, signal.SIGKILL)
        with queue.take(AMPLE_S) as item:
            assert item.data == b"c"
        assert [letter.data for letter in queue.dead_letters()] == [b"b"]


def test_a_waiting_take_survives_the_death_of_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_object, "PROGRESS_S", 0.2)
    waits = threading.Event()
    with Server(data_dir=str(tmp_path / "data")) as server, ThreadPoolExecutor(1) as pool:
        taking = pool.submit(WorkQueue(connect(server.url), "jobs", progress=lambda _: waits.set()).take, AMPLE_S)
        assert waits.wait(AMPLE_S)
        os.kill(server.pid, signal.SIGKILL)
        WorkQueue(connect(server.url), "jobs").put("x")
        item = taking.result(AMPLE_S)
        assert (item.data, item.deliveries) == (b"x", 1)


def test_a_queue_works_through_a_relay() -> None:
    with Server(grace=0.5) as server, Relay(server.url) as relay:
        queue = WorkQueue(connect(relay.url), "jobs")
        queue.put("x")
        first = connect(relay.url)
        item = WorkQueue(first, "jobs").take(AMPLE_S)
        first.close()
        with queue.take(AMPLE_S) as again:
            assert (again.id, again.deliveries) == (item.id, 2)
        assert counts(WorkQueue(connect(server.url), "jobs")) == (0, 0, 0, 1)
