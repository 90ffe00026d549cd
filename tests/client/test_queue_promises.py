"""The promises of docs/queues.md about `queue_pop`, line by line: who has an item, who gets an error, what is lost."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from tests.etcd.fixtures import etcd_space, shared_cluster
from tests.raw_peer import AMPLE_S, RawPeer, until
from tests.served import server_fixture

import rallypoint
import rallypoint.aio
from rallypoint.core import ops
from rallypoint.core.records import ReplyStatus
from rallypoint.protocol.c10d import Opcode, encode
from rallypoint.protocol.native import frame
from rallypoint.protocol.native_client import ClientProtocol
from rallypoint.testing import DOWN, UP, CuttingProxy

CONSUMER = """
import sys, rallypoint
store = rallypoint.connect(sys.argv[1], timeout=60)
print(store.queue_pop("q").decode(), flush=True)
sys.stdin.read()
"""


server = server_fixture(grace=0.5)


@pytest.mark.parametrize("among_others", [False, True])
@pytest.mark.parametrize(
    ("op", "status", "result", "at_once"),
    [
        (ops.BlockingPop(0, b"q", 1.0), ReplyStatus.OK, b"item", True),
        (ops.BlockingPop(0, b"q", 1.0), ReplyStatus.TIMED_OUT, [b"q"], False),
        (ops.Pop(0, b"q"), ReplyStatus.OK, b"item", True),
        (ops.Pop(0, b"q"), ReplyStatus.OK, None, False),
        (ops.TurnPop(0, b"q"), ReplyStatus.OK, (1, b"item"), True),
        (ops.CompareSet(0, b"k", b"", b"v"), ReplyStatus.OK, b"v", False),
    ],
)
def test_only_received_items_are_confirmed_at_once(
    op: ops.Op, status: int, result: object, at_once: bool, among_others: bool
) -> None:
    client = ClientProtocol("test")
    number = client.number
    client.ask(op, 1.0 if isinstance(op, ops.BlockingPop) else None)
    answer = frame((number, status, result))
    if among_others:
        for reply in client.receive(answer):
            client.settle(reply)
    else:
        client.sole(answer, number)
    assert client.has_unconfirmed is at_once


def pop_and_lose_the_confirmation(consumer: rallypoint.Store, cutter: CuttingProxy) -> bytes:
    """Pop an item of `q`; the connection is cut before the last byte of the confirmation."""
    consumer.queue_push("p", "")
    counts = [cutter.passed[UP]]
    consumer.queue_pop("p")
    for _ in range(2):
        consumer.queue_len("q")  # its reply proves that everything sent before has passed the proxy
        counts.append(cutter.passed[UP])
    before, first, second = counts
    cutter.cut_after(UP, (first - before) - (second - first) - 1)
    item = consumer.queue_pop("q")
    assert cutter.was_cut.wait(AMPLE_S)
    return item


def test_a_client_that_resumes_its_session_keeps_its_item(server: rallypoint.Server, cutter: CuttingProxy) -> None:
    """It repeats the confirmation, so the item does not return to the queue even if the client dies later."""
    with rallypoint.connect(server.url) as other:
        consumer = rallypoint.TCPStore("127.0.0.1", cutter.port)
        for item in "ab":
            other.queue_push("q", item)
        assert pop_and_lose_the_confirmation(consumer, cutter) == b"a"
        assert consumer.queue_len("q") == 1, "it has resumed its session"
        cutter.stop()
        await_single_session(server)
        assert (other.queue_pop("q"), other.queue_len("q")) == (b"b", 0)


def test_the_asyncio_client_confirms_an_item_at_once(server: rallypoint.Server, cutter: CuttingProxy) -> None:
    """The confirmation does not wait for the next call, which may come after hours of work."""

    async def take() -> bytes:
        async with await rallypoint.aio.connect(f"tcp://127.0.0.1:{cutter.port}") as consumer:
            counts = [cutter.passed[UP]]
            await consumer.queue_pop("p")
            for _ in range(2):
                await consumer.queue_len("q")
                counts.append(cutter.passed[UP])
            before, first, second = counts
            confirmed = second + (first - before) - (second - first)
            item = await consumer.queue_pop("q")
            await asyncio.to_thread(until, lambda: cutter.passed[UP], lambda passed: passed == confirmed)
            return item

    with rallypoint.connect(server.url) as other:
        other.queue_push("p", "")
        other.queue_push("q", "a")
        assert asyncio.run(take()) == b"a"


def test_an_unconfirmed_item_is_delivered_twice_and_the_first_client_gets_an_error(
    server: rallypoint.Server, cutter: CuttingProxy
) -> None:
    """The item returns to the front of the queue; the first client cannot write a result through its lost session."""
    with rallypoint.connect(server.url) as other:
        consumer = rallypoint.TCPStore("127.0.0.1", cutter.port)
        for item in "ab":
            other.queue_push("q", item)
        cutter.refusing = True
        assert pop_and_lose_the_confirmation(consumer, cutter) == b"a"
        await_single_session(server)
        assert [other.queue_pop("q") for _ in range(2)] == [b"a", b"b"]
        cutter.refusing = False
        with pytest.raises(rallypoint.SessionLost):
            consumer.add("done", 1)
        assert not other.check(["done"])


def test_an_item_that_did_not_arrive_returns_to_the_front(server: rallypoint.Server, cutter: CuttingProxy) -> None:
    with rallypoint.connect(server.url) as other:
        consumer = rallypoint.TCPStore("127.0.0.1", cutter.port)
        for item in "ab":
            other.queue_push("q", item)
        cutter.refusing = True
        cutter.cut_after(DOWN, 1)
        with pytest.raises(rallypoint.SessionLost):
            consumer.queue_pop("q")
        await_single_session(server)
        assert [other.queue_pop("q") for _ in range(2)] == [b"a", b"b"]


def await_single_session(server: rallypoint.Server) -> None:
    until(server.statistics, lambda facts: len(facts["sessions"]) == 1)


# Items that are lost with their consumer


Opened = tuple[str, Callable[[], object]]
"""The URL of a store, and a function that waits until the store has noticed the death of a consumer."""


@contextlib.contextmanager
def on_our_server(_: Path) -> Iterator[Opened]:
    with rallypoint.Server(grace=0.2) as server:
        yield server.url, lambda: await_single_session(server)


@contextlib.contextmanager
def in_a_file(folder: Path) -> Iterator[Opened]:
    yield f"file://{folder}/store", lambda: None


@contextlib.contextmanager
def in_etcd(_: Path) -> Iterator[Opened]:
    yield etcd_space(shared_cluster()), lambda: None


STORES = [on_our_server, in_a_file, pytest.param(in_etcd, marks=pytest.mark.needs("etcd"), id="in_etcd")]


@pytest.mark.parametrize("kind", STORES)
def test_a_confirmed_item_is_lost_with_its_consumer(
    kind: Callable[[Path], AbstractContextManager[Opened]], tmp_path: Path
) -> None:
    """The consumer had the item, and nobody knows how far it got."""
    with kind(tmp_path) as (url, await_death), rallypoint.connect(url, timeout=AMPLE_S) as store:
        for item in "ab":
            store.queue_push("q", item)
        command = [sys.executable, "-c", CONSUMER, url]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as consumer:
            assert consumer.stdout and consumer.stdout.readline() == "a\n"
            consumer.kill()
        await_death()
        assert (store.queue_pop("q"), store.queue_len("q")) == (b"b", 0)


def test_an_item_that_a_pytorch_client_does_not_read_is_lost_with_its_connection(server: rallypoint.Server) -> None:
    """PyTorch's protocol has no confirmation of a reply."""
    with rallypoint.connect(server.url) as store:
        for item in "ab":
            store.queue_push("q", item)
        with RawPeer(("127.0.0.1", server.port)) as consumer:
            consumer.send(encode(Opcode.QUEUE_POP, b"/q"))
            until(lambda: store.queue_len("q"), lambda length: length == 1)
        until(server.statistics, lambda facts: [one["speaks"] for one in facts["clients"]].count("torch") == 0)
        assert (store.queue_pop("q"), store.queue_len("q")) == (b"b", 0)


def test_a_pop_that_timed_out_takes_no_item(server: rallypoint.Server) -> None:
    with rallypoint.connect(server.url) as store:
        with pytest.raises(rallypoint.StoreTimeout):
            store.queue_pop("q", timeout=0.05)
        store.queue_push("q", "a")
        assert rallypoint.connect(server.url).queue_pop("q") == b"a"
