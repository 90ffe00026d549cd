"""What docs/queues.md promises of `queue_pop`, line by line: who has an item, who is told, and what is lost."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from tests.cutter import DOWN, UP, Cutter
from tests.etcd.fixtures import etcd_space, shared_cluster
from tests.wire import AMPLE_S, Peer, until

import rallypoint
import rallypoint.aio
from rallypoint.core import ops
from rallypoint.core.records import Status
from rallypoint.protocol.c10d import Opcode, encode
from rallypoint.protocol.client import Client
from rallypoint.protocol.native import frame

TAKER = """
import sys, rallypoint
store = rallypoint.connect(sys.argv[1], timeout=60)
print(store.queue_pop("q").decode(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def server() -> Iterator[rallypoint.Server]:
    with rallypoint.Server(grace=0.5) as server:
        yield server


@pytest.fixture
def cutter(server: rallypoint.Server) -> Iterator[Cutter]:
    with Cutter(server.port) as cutter:
        yield cutter


@pytest.mark.parametrize("among_others", [False, True])
@pytest.mark.parametrize(
    ("op", "status", "result", "at_once"),
    [
        (ops.Take(0, b"q", 1.0), Status.OK, b"item", True),
        (ops.Take(0, b"q", 1.0), Status.TIMED_OUT, [b"q"], False),
        (ops.Pop(0, b"q"), Status.OK, b"item", True),
        (ops.Pop(0, b"q"), Status.OK, None, False),
        (ops.Draw(0, b"q"), Status.OK, (1, b"item"), True),
        (ops.CompareSet(0, b"k", b"", b"v"), Status.OK, b"v", False),
    ],
)
def test_items_and_nothing_else_are_confirmed_at_once(
    op: ops.Op, status: int, result: object, at_once: bool, among_others: bool
) -> None:
    client = Client("test")
    number = client.number
    client.ask(op, 1.0 if isinstance(op, ops.Take) else None)
    answer = frame((number, status, result))
    if among_others:
        for reply in client.receive(answer):
            client.settle(reply)
    else:
        client.sole(answer, number)
    assert client.owes is at_once


def pop_and_lose_the_confirmation(taker: rallypoint.Store, cutter: Cutter) -> bytes:
    """Take an item of `q`; the connection is cut before the last byte of what tells the server that it has arrived."""
    taker.queue_push("p", "")
    counts = [cutter.passed[UP]]
    taker.queue_pop("p")
    for _ in range(2):
        taker.queue_len("q")  # what was sent before has passed when this is answered
        counts.append(cutter.passed[UP])
    before, first, second = counts
    cutter.arm(UP, (first - before) - (second - first) - 1)
    item = taker.queue_pop("q")
    assert cutter.cut.wait(AMPLE_S)
    return item


def test_one_that_comes_back_within_the_grace_keeps_its_item(server: rallypoint.Server, cutter: Cutter) -> None:
    """It confirms again, so the item is its own from then on, also when it dies later."""
    with rallypoint.connect(server.url) as other:
        taker = rallypoint.TCPStore("127.0.0.1", cutter.port)
        for item in "ab":
            other.queue_push("q", item)
        assert pop_and_lose_the_confirmation(taker, cutter) == b"a"
        assert taker.queue_len("q") == 1, "it has resumed its session"
        cutter.stop()
        only_one_session_is_left(server)
        assert (other.queue_pop("q"), other.queue_len("q")) == (b"b", 0)


def test_an_item_is_confirmed_in_asyncio_too_as_soon_as_it_is_there(server: rallypoint.Server, cutter: Cutter) -> None:
    """It is not kept for the taker's next call, which may come after hours of work."""

    async def take() -> bytes:
        async with await rallypoint.aio.connect(f"tcp://127.0.0.1:{cutter.port}") as taker:
            counts = [cutter.passed[UP]]
            await taker.queue_pop("p")
            for _ in range(2):
                await taker.queue_len("q")
                counts.append(cutter.passed[UP])
            before, first, second = counts
            confirmed = second + (first - before) - (second - first)
            item = await taker.queue_pop("q")
            await asyncio.to_thread(until, lambda: cutter.passed[UP], lambda passed: passed == confirmed)
            return item

    with rallypoint.connect(server.url) as other:
        other.queue_push("p", "")
        other.queue_push("q", "a")
        assert asyncio.run(take()) == b"a"


def test_one_that_is_cut_off_before_it_confirmed_shares_its_item_and_is_told(
    server: rallypoint.Server, cutter: Cutter
) -> None:
    """The item goes back to the front, so two have it; the first can write no result by the store it took it from."""
    with rallypoint.connect(server.url) as other:
        taker = rallypoint.TCPStore("127.0.0.1", cutter.port)
        for item in "ab":
            other.queue_push("q", item)
        cutter.refusing = True
        assert pop_and_lose_the_confirmation(taker, cutter) == b"a"
        only_one_session_is_left(server)
        assert [other.queue_pop("q") for _ in range(2)] == [b"a", b"b"]
        cutter.refusing = False
        with pytest.raises(rallypoint.SessionLost):
            taker.add("done", 1)
        assert not other.check(["done"])


def test_an_item_that_did_not_reach_its_taker_goes_back_to_the_front(server: rallypoint.Server, cutter: Cutter) -> None:
    with rallypoint.connect(server.url) as other:
        taker = rallypoint.TCPStore("127.0.0.1", cutter.port)
        for item in "ab":
            other.queue_push("q", item)
        cutter.refusing = True
        cutter.arm(DOWN, 1)
        with pytest.raises(rallypoint.SessionLost):
            taker.queue_pop("q")
        only_one_session_is_left(server)
        assert [other.queue_pop("q") for _ in range(2)] == [b"a", b"b"]


def only_one_session_is_left(server: rallypoint.Server) -> None:
    until(server.statistics, lambda facts: len(facts["sessions"]) == 1)


# What dies with its taker


Opened = tuple[str, Callable[[], object]]
"""The URL of a store, and what waits until the store knows that a taker has died."""


@contextlib.contextmanager
def on_our_server(_: Path) -> Iterator[Opened]:
    with rallypoint.Server(grace=0.2) as server:
        yield server.url, lambda: only_one_session_is_left(server)


@contextlib.contextmanager
def in_a_file(folder: Path) -> Iterator[Opened]:
    yield f"file://{folder}/store", lambda: None


@contextlib.contextmanager
def in_etcd(_: Path) -> Iterator[Opened]:
    yield etcd_space(shared_cluster()), lambda: None


STORES = [on_our_server, in_a_file, pytest.param(in_etcd, marks=pytest.mark.needs("etcd"), id="in_etcd")]


@pytest.mark.parametrize("kind", STORES)
def test_an_item_goes_with_a_taker_that_dies_over_it(
    kind: Callable[[Path], AbstractContextManager[Opened]], tmp_path: Path
) -> None:
    """The taker has it, and nobody knows what it made of it."""
    with kind(tmp_path) as (url, taker_has_gone), rallypoint.connect(url, timeout=AMPLE_S) as store:
        for item in "ab":
            store.queue_push("q", item)
        command = [sys.executable, "-c", TAKER, url]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as taker:
            assert taker.stdout and taker.stdout.readline() == "a\n"
            taker.kill()
        taker_has_gone()
        assert (store.queue_pop("q"), store.queue_len("q")) == (b"b", 0)


def test_an_item_goes_with_the_connection_of_a_pytorch_client_that_does_not_read_it(server: rallypoint.Server) -> None:
    """Its protocol has no word for that an answer has arrived."""
    with rallypoint.connect(server.url) as store:
        for item in "ab":
            store.queue_push("q", item)
        with Peer(("127.0.0.1", server.port)) as taker:
            taker.send(encode(Opcode.QUEUE_POP, b"/q"))
            until(lambda: store.queue_len("q"), lambda length: length == 1)
        until(server.statistics, lambda facts: [one["speaks"] for one in facts["clients"]].count("torch") == 0)
        assert (store.queue_pop("q"), store.queue_len("q")) == (b"b", 0)


def test_a_taker_that_gives_up_leaves_the_item_to_others(server: rallypoint.Server) -> None:
    with rallypoint.connect(server.url) as store:
        with pytest.raises(rallypoint.StoreTimeout):
            store.queue_pop("q", timeout=0.05)
        store.queue_push("q", "a")
        assert rallypoint.connect(server.url).queue_pop("q") == b"a"
