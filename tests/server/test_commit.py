"""The way of a change through the log: order, one commit at a time, a full disk, a failed one, and back-pressure."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import pytest
from tests.server.fake_log import FakeLog, disk_full
from tests.server.peers import settle
from tests.wire import AMPLE_S

from rallypoint.errors import StoreError
from rallypoint.server import commit
from rallypoint.server.commit import CommitQueue

MAX_BYTES = 1 << 30


class Client:
    """Whoever submits; it notes what was carried out, and what was refused."""

    def __init__(self, queue: CommitQueue, refusable: bool = True) -> None:
        self.queue = queue
        self.refusable = refusable
        self.ran: list[Any] = []
        self.refused: list[Any] = []

    def change(self, *works: str, size: int = 0) -> None:
        for work in works:
            self.queue.submit(work.encode(), self, work, size)

    def read(self, *works: str) -> None:
        for work in works:
            self.queue.submit(None, self, work, 0)

    def committed(self, work: Any, size: int) -> None:
        self.ran.append(work() if callable(work) else work)

    def refuse(self, work: Any, size: int, error: StoreError, last: bool) -> bool:
        if self.refusable or last:
            self.refused.append(work)
        return self.refusable


class Desk:
    """A queue on a log, and what it tells its owner."""

    def __init__(self) -> None:
        self.log = FakeLog()
        self.failures: list[BaseException] = []
        self.queue = CommitQueue(self.log, self.failures.append, MAX_BYTES)

    def client(self, refusable: bool = True) -> Client:
        return Client(self.queue, refusable)


def on_a_queue(test: Callable[[Desk], Awaitable[None]]) -> Callable[[], None]:
    async def run() -> None:
        await asyncio.wait_for(test(Desk()), AMPLE_S)

    def call() -> None:
        asyncio.run(run())

    call.__name__, call.__doc__ = test.__name__, test.__doc__
    return call


# Order


@on_a_queue
async def test_nothing_runs_before_it_is_durable(desk: Desk) -> None:
    client = desk.client()
    desk.log.stalled = True
    client.change("a")
    await settle()
    assert desk.log.batches == [[b"a"]] and client.ran == [] and not desk.queue.idle
    desk.log.end()
    await settle()
    assert client.ran == ["a"] and desk.queue.idle


@on_a_queue
async def test_all_that_comes_in_one_turn_of_the_loop_is_one_commit(desk: Desk) -> None:
    clients = [desk.client() for _ in range(3)]
    for number, client in enumerate(clients):
        client.change(f"a{number}", f"b{number}")
    await settle()
    assert desk.log.batches == [[b"a0", b"b0", b"a1", b"b1", b"a2", b"b2"]]
    assert [client.ran for client in clients] == [["a0", "b0"], ["a1", "b1"], ["a2", "b2"]]


@on_a_queue
async def test_what_comes_during_a_commit_goes_together_with_the_next(desk: Desk) -> None:
    client = desk.client()
    desk.log.stalled = True
    client.change("a")
    await settle()
    for work in ("b", "c", "d"):
        client.change(work)
        await settle()
    assert desk.log.batches == [[b"a"]], "one is under way at a time"
    desk.log.end()
    await settle()
    assert desk.log.batches == [[b"a"], [b"b", b"c", b"d"]] and client.ran == ["a"]
    await desk.log.flow()
    assert client.ran == ["a", "b", "c", "d"]


@on_a_queue
async def test_a_read_runs_behind_what_was_submitted_before_it(desk: Desk) -> None:
    client = desk.client()
    desk.log.stalled = True
    client.change("a")
    client.read("?1")
    client.change("b")
    client.read("?2")
    await settle()
    assert desk.log.batches == [[b"a", b"b"]] and client.ran == []
    client.read("?3")
    client.change("c")
    desk.log.end()
    await settle()
    assert client.ran == ["a", "?1", "b", "?2"], "and no more: it would not be in order"
    await desk.log.flow()
    assert client.ran == ["a", "?1", "b", "?2", "?3", "c"] and desk.log.batches == [[b"a", b"b"], [b"c"]]


@on_a_queue
async def test_reads_alone_need_no_commit(desk: Desk) -> None:
    client = desk.client()
    client.read("?1", "?2")
    await settle()
    assert client.ran == ["?1", "?2"] and desk.log.batches == [] and desk.queue.idle


@on_a_queue
async def test_what_is_submitted_while_work_is_carried_out_comes_after_all_that_waits(desk: Desk) -> None:
    client = desk.client()

    def first() -> str:
        client.change("late")
        client.read("late?")
        return "a"

    desk.log.stalled = True
    desk.queue.submit(b"a", client, first)
    client.change("b")
    await settle()
    client.change("c")
    await desk.log.flow()
    assert client.ran == ["a", "b", "c", "late", "late?"]
    assert b"".join(desk.log.records) == b"abclate"


@on_a_queue
async def test_reads_in_front_of_a_change_do_not_take_it_along_uncommitted(desk: Desk) -> None:
    client = desk.client()
    desk.log.stalled = True
    client.change("a")
    await settle()
    client.read(*["?"] * commit.MAX_ITEMS)
    client.change("b")
    desk.log.end()
    await settle()
    assert "b" not in client.ran and desk.log.batches == [[b"a"], [b"b"]]
    await desk.log.flow()
    assert client.ran == ["a", *["?"] * commit.MAX_ITEMS, "b"] and desk.log.records == [b"a", b"b"]


# Bounds of one commit


@on_a_queue
async def test_a_commit_has_only_so_many_items_and_bytes(desk: Desk) -> None:
    client = desk.client()
    client.change(*map(str, range(3000)))
    big = [str(number) * (commit.MAX_BYTES // 2 - 1) for number in range(3)]
    client.change(*big, "x" * (2 * commit.MAX_BYTES), "y")
    await settle()
    assert [len(batch) for batch in desk.log.batches[:2]] == [commit.MAX_ITEMS] * 2
    assert all(len(batch) <= commit.MAX_ITEMS for batch in desk.log.batches)
    sizes = [sum(map(len, batch)) for batch in desk.log.batches if len(batch) > 1]
    assert max(sizes) <= commit.MAX_BYTES
    assert [b"x" * (2 * commit.MAX_BYTES)] in desk.log.batches, "one that is larger goes alone"
    assert client.ran == [*map(str, range(3000)), *big, "x" * (2 * commit.MAX_BYTES), "y"]


@on_a_queue
async def test_many_reads_behind_a_change_leave_others_their_turn(desk: Desk) -> None:
    client, seen = desk.client(), []
    desk.log.stalled = True
    client.change("a")
    client.read(*["?"] * (20 * commit.MAX_ITEMS))
    await settle()
    desk.log.end()
    for _ in range(60):
        seen.append(len(client.ran))
        await asyncio.sleep(0)
    assert len(client.ran) == 20 * commit.MAX_ITEMS + 1
    steps = [later - earlier for earlier, later in pairwise(seen)]
    assert max(steps) <= 2 * commit.MAX_ITEMS, "the event loop was held up"


@on_a_queue
async def test_a_mountain_of_reads_is_carried_out(desk: Desk) -> None:
    client = desk.client()
    client.read(*["?"] * (600 * commit.MAX_ITEMS))
    while len(client.ran) < 600 * commit.MAX_ITEMS:
        assert not desk.queue.idle
        await asyncio.sleep(0)


# Bounds of what waits


@on_a_queue
async def test_the_queue_says_what_it_holds_until_that_is_carried_out(desk: Desk) -> None:
    client = desk.client()
    desk.log.stalled = True
    client.change("abc", size=100)
    client.read("?")
    await settle()
    assert desk.queue.bytes == 103
    client.change("de", size=50)
    assert desk.queue.bytes == 155
    desk.log.end()
    await settle()
    assert desk.queue.bytes == 52
    desk.log.end(disk_full())
    await settle()
    assert desk.queue.bytes == 0 and client.refused == ["de"]


@on_a_queue
async def test_who_finds_the_queue_crowded_goes_on_in_turn_when_it_is_not(desk: Desk) -> None:
    client, admitted = desk.client(), list[int]()
    queue = desk.queue

    def come(number: int) -> None:
        if queue.crowded:
            queue.wait_for_room(lambda: come(number))
        else:
            admitted.append(number)
            client.change("x", size=MAX_BYTES // 2)

    desk.log.stalled = True
    for number in range(10):
        come(number)
    assert admitted == [0, 1] and queue.crowded
    while desk.log.committing or not queue.idle:
        await settle()
        assert queue.bytes < 2 * MAX_BYTES
        desk.log.end()
    assert admitted == list(range(10)) and queue.bytes == 0


# A full disk


@on_a_queue
async def test_a_full_disk_refuses_requests_and_lets_reads_run(desk: Desk) -> None:
    client = desk.client()
    desk.log.error = disk_full()
    client.change("a")
    client.read("?")
    client.change("b")
    await settle()
    assert client.refused == ["a", "b"] and client.ran == ["?"] and desk.log.records == []
    assert not desk.failures and desk.queue.idle
    desk.log.error = None
    client.change("c")
    await settle()
    assert client.ran == ["?", "c"] and desk.log.records == [b"c"]


@on_a_queue
async def test_what_cannot_be_refused_goes_into_the_reserve(desk: Desk) -> None:
    client, nobody = desk.client(), desk.client(refusable=False)
    desk.log.error, desk.log.reserve = disk_full(), True
    nobody.change("gone")
    client.change("a")
    nobody.change("over")
    await settle()
    assert desk.log.batches == [[b"gone", b"a", b"over"], [b"gone", b"over"]] and desk.log.urgent == [
        [b"gone", b"over"]
    ]
    assert client.refused == ["a"] and nobody.ran == ["gone", "over"] and desk.queue.idle
    desk.log.error = None
    client.change("b")
    await settle()
    assert client.ran == ["b"] and len(desk.log.urgent) == 1, "there is room again"


@on_a_queue
async def test_a_full_disk_is_told_in_the_order_of_the_requests(desk: Desk) -> None:
    client, seen = desk.client(), list[str]()
    client.ran = client.refused = seen
    desk.log.error = disk_full()
    client.change("a")
    client.read("?1")
    client.change("b")
    client.read("?2")
    await settle()
    assert seen == ["a", "?1", "b", "?2"]


@on_a_queue
async def test_a_read_waits_for_what_its_own_client_put_into_the_reserve(desk: Desk) -> None:
    client, nobody = desk.client(), desk.client(refusable=False)
    desk.log.error = disk_full()
    desk.log.stalled = True
    nobody.change("release")
    nobody.read("?")
    client.read("other")
    await settle()
    desk.log.end(disk_full())
    await settle()
    assert client.ran == ["other"] and nobody.ran == [] and desk.log.urgent == [[b"release"]]
    desk.log.end()
    assert nobody.ran == ["release", "?"]


@on_a_queue
async def test_nothing_stays_in_the_queue_when_the_reserve_is_used_up(desk: Desk) -> None:
    client, nobody = desk.client(), desk.client(refusable=False)
    desk.log.error = disk_full()
    for _ in range(3):
        nobody.change("gone")
        nobody.read("?")
        client.change("a")
        client.read("?")
        await settle()
        assert desk.queue.idle and desk.queue.bytes == 0
    assert nobody.refused == ["gone"] * 3 and nobody.ran == ["?"] * 3
    assert client.refused == ["a"] * 3 and client.ran == ["?"] * 3, "and nobody waits behind it"


def test_a_full_disk_is_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fill_and_empty(times: int) -> None:
        desk = Desk()
        client, nobody = desk.client(), desk.client(refusable=False)
        for _ in range(times):
            desk.log.error, desk.log.reserve = disk_full(), True
            for _ in range(3):
                client.change("a")
                nobody.change("over")
                await settle()
                assert desk.queue.disk_full
            desk.log.error = None
            for _ in range(3):
                client.change("b")
                await settle()
                assert not desk.queue.disk_full

    asyncio.run(fill_and_empty(3))
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("the disk is full, and changes are refused until there is room: ") and "/data/log" in told
    caplog.clear()
    monkeypatch.setattr(commit, "CALM_S", 0.0)
    asyncio.run(fill_and_empty(2))
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "the disk is full, and changes are refused until there is room",
        "the disk has room again",
    ] * 2


@on_a_queue
async def test_the_storage_may_fail_while_it_uses_its_reserve(desk: Desk) -> None:
    nobody = desk.client(refusable=False)
    desk.log.stalled = True
    nobody.change("gone")
    await settle()
    desk.log.end(disk_full())
    await settle()
    assert desk.log.urgent == [[b"gone"]]
    failure = OSError(5, "Input/output error")
    desk.log.end(failure)
    await settle()
    assert desk.failures == [failure] and nobody.ran == []


# Failure


@on_a_queue
async def test_any_other_failure_is_final(desk: Desk) -> None:
    client, nobody = desk.client(), desk.client(refusable=False)
    desk.log.error = OSError(5, "Input/output error")
    client.change("a")
    client.read("?")
    nobody.change("over")
    await settle()
    assert desk.failures == [desk.log.error]
    assert client.ran == client.refused == nobody.ran == [], "what is on disk is unknown"
    desk.log.error = None
    client.change("b")
    await settle()
    assert len(desk.log.batches) == 1, "nothing may be built on what is unknown"
    assert client.ran == [] and len(desk.failures) == 1


@on_a_queue
async def test_a_failed_storage_is_no_full_disk_though_both_are_store_errors(desk: Desk) -> None:
    from rallypoint.storage.errors import StorageFailed

    client = desk.client()
    desk.log.error = StorageFailed(path="/data/log", why="Input/output error", number=5)
    client.change("a")
    await settle()
    assert desk.failures == [desk.log.error] and client.refused == []


@on_a_queue
async def test_work_that_raises_takes_no_other_along(desk: Desk) -> None:
    def bug() -> None:
        raise KeyError("bug")

    client = desk.client()
    desk.queue.submit(b"a", client, bug)
    client.change("b")
    await settle()
    client.change("c")
    await settle()
    assert client.ran == ["b", "c"] and desk.queue.idle and not desk.failures


@on_a_queue
async def test_a_refusal_that_raises_takes_no_other_along(desk: Desk) -> None:
    class Broken(Client):
        def refuse(self, work: Any, size: int, error: StoreError, last: bool) -> bool:
            raise RuntimeError("the transport is closed")

    broken, client = Broken(desk.queue), desk.client()
    desk.log.error = disk_full()
    broken.change("a")
    client.change("b")
    await settle()
    assert client.refused == ["b"] and desk.queue.idle


def test_a_commit_that_ends_after_the_loop_is_nobodys_business() -> None:
    log = FakeLog()

    async def main() -> CommitQueue:
        queue = CommitQueue(log, lambda error: pytest.fail(str(error)))
        log.stalled = True
        Client(queue).change("a")
        await settle()
        return queue

    queue = asyncio.run(main())
    thread = threading.Thread(target=log.end)
    thread.start()
    thread.join(AMPLE_S)
    assert not queue.idle
