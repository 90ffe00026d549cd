"""The commit queue: order, one commit at a time, a full disk, a failed one, and back-pressure."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from tests.event_loop import in_loop_with
from tests.raw_peer import AMPLE_S
from tests.server.fake_log import FakeLog, disk_full
from tests.server.peers import settle

from rallypoint.errors import StoreError
from rallypoint.server import commit
from rallypoint.server.commit import CommitQueue

MAX_BYTES = 1 << 30


class Client:
    """Submits work; records which was executed, and which was refused."""

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


class QueueHarness:
    """A queue on a log, and the failures that it reports to its owner."""

    def __init__(self) -> None:
        self.log = FakeLog()
        self.failures: list[BaseException] = []
        self.queue = CommitQueue(self.log, self.failures.append, MAX_BYTES)

    def client(self, refusable: bool = True) -> Client:
        return Client(self.queue, refusable)

    async def stalled_client(self) -> Client:
        """Return a client whose change "a" is being committed, until the log ends it."""
        client = self.client()
        self.log.stalled = True
        client.change("a")
        await settle()
        return client


on_a_queue = in_loop_with(QueueHarness)


class ConfirmingLog(FakeLog):
    """A log whose reads must be confirmed, as in etcd."""

    confirms = True

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Callable[[BaseException | None], None]] = []

    def confirm(self, done: Callable[[BaseException | None], None]) -> None:
        self.asked.append(done)


class ConfirmingQueue(QueueHarness):
    """A queue on such a log."""

    def __init__(self) -> None:
        super().__init__()
        self.log: ConfirmingLog = ConfirmingLog()
        self.queue = CommitQueue(self.log, self.failures.append, MAX_BYTES)


@in_loop_with(ConfirmingQueue)
async def test_reads_that_a_refused_commit_was_to_confirm_wait_for_another(harness: ConfirmingQueue) -> None:
    """A deposed leader may be refused for lack of room, and must not answer from its state."""
    writer, reader = harness.client(), harness.client()
    harness.log.error = disk_full()
    writer.change("a")
    reader.read("b")
    await settle()
    assert writer.refused == ["a"] and reader.ran == []
    harness.log.asked.pop()(None)
    await settle()
    assert reader.ran == ["b"] and harness.queue.idle


# Order


@on_a_queue
async def test_nothing_runs_before_it_is_durable(harness: QueueHarness) -> None:
    client = await harness.stalled_client()
    assert harness.log.batches == [[b"a"]] and client.ran == [] and not harness.queue.idle
    harness.log.end()
    await settle()
    assert client.ran == ["a"] and harness.queue.idle


@on_a_queue
async def test_changes_of_one_turn_of_the_loop_are_one_commit(harness: QueueHarness) -> None:
    clients = [harness.client() for _ in range(3)]
    for number, client in enumerate(clients):
        client.change(f"a{number}", f"b{number}")
    await settle()
    assert harness.log.batches == [[b"a0", b"b0", b"a1", b"b1", b"a2", b"b2"]]
    assert [client.ran for client in clients] == [["a0", "b0"], ["a1", "b1"], ["a2", "b2"]]


@on_a_queue
async def test_changes_during_a_commit_share_the_next_one(harness: QueueHarness) -> None:
    client = await harness.stalled_client()
    for work in ("b", "c", "d"):
        client.change(work)
        await settle()
    assert harness.log.batches == [[b"a"]], "one commit is in flight at a time"
    harness.log.end()
    await settle()
    assert harness.log.batches == [[b"a"], [b"b", b"c", b"d"]] and client.ran == ["a"]
    await harness.log.flow()
    assert client.ran == ["a", "b", "c", "d"]


@on_a_queue
async def test_a_read_runs_behind_what_was_submitted_before_it(harness: QueueHarness) -> None:
    client = harness.client()
    harness.log.stalled = True
    client.change("a")
    client.read("?1")
    client.change("b")
    client.read("?2")
    await settle()
    assert harness.log.batches == [[b"a", b"b"]] and client.ran == []
    client.read("?3")
    client.change("c")
    harness.log.end()
    await settle()
    assert client.ran == ["a", "?1", "b", "?2"], "no more, because that would break the order"
    await harness.log.flow()
    assert client.ran == ["a", "?1", "b", "?2", "?3", "c"] and harness.log.batches == [[b"a", b"b"], [b"c"]]


@on_a_queue
async def test_reads_alone_need_no_commit(harness: QueueHarness) -> None:
    client = harness.client()
    client.read("?1", "?2")
    await settle()
    assert client.ran == ["?1", "?2"] and harness.log.batches == [] and harness.queue.idle


@on_a_queue
async def test_work_submitted_by_work_is_queued_last(harness: QueueHarness) -> None:
    client = harness.client()

    def first() -> str:
        client.change("late")
        client.read("late?")
        return "a"

    harness.log.stalled = True
    harness.queue.submit(b"a", client, first)
    client.change("b")
    await settle()
    client.change("c")
    await harness.log.flow()
    assert client.ran == ["a", "b", "c", "late", "late?"]
    assert b"".join(harness.log.records) == b"abclate"


@on_a_queue
async def test_a_change_behind_a_full_batch_of_reads_waits_for_its_commit(harness: QueueHarness) -> None:
    client = await harness.stalled_client()
    client.read(*["?"] * commit.MAX_ITEMS)
    client.change("b")
    harness.log.end()
    await settle()
    assert "b" not in client.ran and harness.log.batches == [[b"a"], [b"b"]]
    await harness.log.flow()
    assert client.ran == ["a", *["?"] * commit.MAX_ITEMS, "b"] and harness.log.records == [b"a", b"b"]


# Bounds of one commit


@on_a_queue
async def test_a_commit_is_limited_in_items_and_bytes(harness: QueueHarness) -> None:
    client = harness.client()
    client.change(*map(str, range(3000)))
    big = [str(number) * (commit.MAX_BYTES // 2 - 1) for number in range(3)]
    client.change(*big, "x" * (2 * commit.MAX_BYTES), "y")
    await settle()
    assert [len(batch) for batch in harness.log.batches[:2]] == [commit.MAX_ITEMS] * 2
    assert all(len(batch) <= commit.MAX_ITEMS for batch in harness.log.batches)
    sizes = [sum(map(len, batch)) for batch in harness.log.batches if len(batch) > 1]
    assert max(sizes) <= commit.MAX_BYTES
    assert [b"x" * (2 * commit.MAX_BYTES)] in harness.log.batches, "a larger record is committed alone"
    assert client.ran == [*map(str, range(3000)), *big, "x" * (2 * commit.MAX_BYTES), "y"]


@on_a_queue
async def test_many_reads_behind_a_change_do_not_block_the_loop(harness: QueueHarness) -> None:
    client, seen = harness.client(), []
    harness.log.stalled = True
    client.change("a")
    client.read(*["?"] * (20 * commit.MAX_ITEMS))
    await settle()
    harness.log.end()
    for _ in range(60):
        seen.append(len(client.ran))
        await asyncio.sleep(0)
    assert len(client.ran) == 20 * commit.MAX_ITEMS + 1
    steps = [later - earlier for earlier, later in pairwise(seen)]
    assert max(steps) <= 2 * commit.MAX_ITEMS, "the event loop was blocked"


@on_a_queue
async def test_a_very_long_queue_of_reads_is_executed(harness: QueueHarness) -> None:
    client = harness.client()
    client.read(*["?"] * (600 * commit.MAX_ITEMS))
    while len(client.ran) < 600 * commit.MAX_ITEMS:
        assert not harness.queue.idle
        await asyncio.sleep(0)


# Bounds of what waits


@on_a_queue
async def test_the_queue_counts_its_bytes_until_they_are_executed(harness: QueueHarness) -> None:
    client = harness.client()
    harness.log.stalled = True
    client.change("abc", size=100)
    client.read("?")
    await settle()
    assert harness.queue.bytes == 103
    client.change("de", size=50)
    assert harness.queue.bytes == 155
    harness.log.end()
    await settle()
    assert harness.queue.bytes == 52
    harness.log.end(disk_full())
    await settle()
    assert harness.queue.bytes == 0 and client.refused == ["de"]


@on_a_queue
async def test_clients_of_a_full_queue_continue_in_order_when_there_is_room(harness: QueueHarness) -> None:
    client, admitted = harness.client(), list[int]()
    queue = harness.queue

    def come(number: int) -> None:
        if queue.crowded:
            queue.wait_for_room(lambda: come(number))
        else:
            admitted.append(number)
            client.change("x", size=MAX_BYTES // 2)

    harness.log.stalled = True
    for number in range(10):
        come(number)
    assert admitted == [0, 1] and queue.crowded
    while harness.log.committing or not queue.idle:
        await settle()
        assert queue.bytes < 2 * MAX_BYTES
        harness.log.end()
    assert admitted == list(range(10)) and queue.bytes == 0


# A full disk


@on_a_queue
async def test_a_full_disk_refuses_requests_and_lets_reads_run(harness: QueueHarness) -> None:
    client = harness.client()
    harness.log.error = disk_full()
    client.change("a")
    client.read("?")
    client.change("b")
    await settle()
    assert client.refused == ["a", "b"] and client.ran == ["?"] and harness.log.records == []
    assert not harness.failures and harness.queue.idle
    harness.log.error = None
    client.change("c")
    await settle()
    assert client.ran == ["?", "c"] and harness.log.records == [b"c"]


@on_a_queue
async def test_changes_that_cannot_be_refused_use_the_reserve(harness: QueueHarness) -> None:
    client, nobody = harness.client(), harness.client(refusable=False)
    harness.log.error, harness.log.reserve = disk_full(), True
    nobody.change("gone")
    client.change("a")
    nobody.change("over")
    await settle()
    assert harness.log.batches == [[b"gone", b"a", b"over"], [b"gone", b"over"]] and harness.log.urgent == [
        [b"gone", b"over"]
    ]
    assert client.refused == ["a"] and nobody.ran == ["gone", "over"] and harness.queue.idle
    harness.log.error = None
    client.change("b")
    await settle()
    assert client.ran == ["b"] and len(harness.log.urgent) == 1, "there is room again"


@on_a_queue
async def test_refusals_keep_the_order_of_the_requests(harness: QueueHarness) -> None:
    client, seen = harness.client(), list[str]()
    client.ran = client.refused = seen
    harness.log.error = disk_full()
    client.change("a")
    client.read("?1")
    client.change("b")
    client.read("?2")
    await settle()
    assert seen == ["a", "?1", "b", "?2"]


@on_a_queue
async def test_a_read_waits_for_what_its_own_client_put_into_the_reserve(harness: QueueHarness) -> None:
    client, nobody = harness.client(), harness.client(refusable=False)
    harness.log.error = disk_full()
    harness.log.stalled = True
    nobody.change("release")
    nobody.read("?")
    client.read("other")
    await settle()
    harness.log.end(disk_full())
    await settle()
    assert client.ran == ["other"] and nobody.ran == [] and harness.log.urgent == [[b"release"]]
    harness.log.end()
    assert nobody.ran == ["release", "?"]


@on_a_queue
async def test_an_exhausted_reserve_empties_the_queue(harness: QueueHarness) -> None:
    client, nobody = harness.client(), harness.client(refusable=False)
    harness.log.error = disk_full()
    for _ in range(3):
        nobody.change("gone")
        nobody.read("?")
        client.change("a")
        client.read("?")
        await settle()
        assert harness.queue.idle and harness.queue.bytes == 0
    assert nobody.refused == ["gone"] * 3 and nobody.ran == ["?"] * 3
    assert client.refused == ["a"] * 3 and client.ran == ["?"] * 3, "nothing waits behind it"


def test_a_full_disk_is_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fill_and_empty(times: int) -> None:
        harness = QueueHarness()
        client, nobody = harness.client(), harness.client(refusable=False)
        for _ in range(times):
            harness.log.error, harness.log.reserve = disk_full(), True
            for _ in range(3):
                client.change("a")
                nobody.change("over")
                await settle()
                assert harness.queue.disk_full
            harness.log.error = None
            for _ in range(3):
                client.change("b")
                await settle()
                assert not harness.queue.disk_full

    asyncio.run(fill_and_empty(3))
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("disk full; changes are refused until there is room: ") and "/data/log" in told
    caplog.clear()
    monkeypatch.setattr(commit, "CALM_S", 0.0)
    asyncio.run(fill_and_empty(2))
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "disk full; changes are refused until there is room",
        "disk has room again; changes are accepted",
    ] * 2


@on_a_queue
async def test_the_storage_may_fail_while_it_uses_its_reserve(harness: QueueHarness) -> None:
    nobody = harness.client(refusable=False)
    harness.log.stalled = True
    nobody.change("gone")
    await settle()
    harness.log.end(disk_full())
    await settle()
    assert harness.log.urgent == [[b"gone"]]
    failure = OSError(5, "Input/output error")
    harness.log.end(failure)
    await settle()
    assert harness.failures == [failure] and nobody.ran == []


# Failure


@on_a_queue
async def test_any_other_failure_is_final(harness: QueueHarness) -> None:
    client, nobody = harness.client(), harness.client(refusable=False)
    harness.log.error = OSError(5, "Input/output error")
    client.change("a")
    client.read("?")
    nobody.change("over")
    await settle()
    assert harness.failures == [harness.log.error]
    assert client.ran == client.refused == nobody.ran == [], "what is on disk is unknown"
    harness.log.error = None
    client.change("b")
    await settle()
    assert len(harness.log.batches) == 1, "no change may follow a commit of unknown outcome"
    assert client.ran == [] and len(harness.failures) == 1


@on_a_queue
async def test_a_failed_storage_is_not_treated_as_a_full_disk(harness: QueueHarness) -> None:
    from rallypoint.storage.errors import StorageFailed

    client = harness.client()
    harness.log.error = StorageFailed(path="/data/log", why="Input/output error", number=5)
    client.change("a")
    await settle()
    assert harness.failures == [harness.log.error] and client.refused == []


@on_a_queue
async def test_work_that_raises_does_not_affect_other_work(harness: QueueHarness) -> None:
    def bug() -> None:
        raise KeyError("bug")

    client = harness.client()
    harness.queue.submit(b"a", client, bug)
    client.change("b")
    await settle()
    client.change("c")
    await settle()
    assert client.ran == ["b", "c"] and harness.queue.idle and not harness.failures


@on_a_queue
async def test_a_refusal_that_raises_does_not_affect_other_refusals(harness: QueueHarness) -> None:
    class Broken(Client):
        def refuse(self, work: Any, size: int, error: StoreError, last: bool) -> bool:
            raise RuntimeError("the transport is closed")

    broken, client = Broken(harness.queue), harness.client()
    harness.log.error = disk_full()
    broken.change("a")
    client.change("b")
    await settle()
    assert client.refused == ["b"] and harness.queue.idle


def test_a_commit_that_ends_after_the_loop_is_ignored() -> None:
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
