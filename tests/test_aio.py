"""The asyncio front: every operation, time-outs, cancellation, watches, cuts, and the end of server and store."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from tests.served import server_fixture

import rallypoint
from rallypoint import aio
from rallypoint.aio import AsyncStore
from rallypoint.client import async_session
from rallypoint.client.routing import search
from rallypoint.core.records import ReplyStatus
from rallypoint.deadline import Deadline
from rallypoint.protocol.native import ACCEPTED, PREFACE, Welcome, frame
from rallypoint.testing import DOWN, UP, CuttingProxy

DEADLINE_S = 60


server = server_fixture("module")


@pytest.fixture(autouse=True)
def clean(server: rallypoint.Server) -> Iterator[None]:
    yield
    with rallypoint.connect(server.url) as store:
        store.delete_prefix("")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the time-outs for silent addresses, so that a busy machine triggers none."""
    monkeypatch.setattr(search, "PATIENCE_S", (DEADLINE_S / 2, DEADLINE_S / 2))


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Run one scenario within DEADLINE_S."""
    return asyncio.run(asyncio.wait_for(main, DEADLINE_S))


@asynccontextmanager
async def opened(port: int, count: int = 1) -> AsyncIterator[list[AsyncStore]]:
    stores = [await aio.connect(f"tcp://127.0.0.1:{port}", timeout=DEADLINE_S) for _ in range(count)]
    try:
        yield stores
    finally:
        for store in stores:
            await store.close()


async def until(true: Callable[[], bool], what: str) -> None:
    """Poll until a condition is true, and let other tasks run."""
    deadline = Deadline(DEADLINE_S)
    while not await asyncio.to_thread(true):
        assert not deadline.expired(), f"not within {DEADLINE_S} s: {what}"


async def until_waiting(server: rallypoint.Server, count: int) -> None:
    await until(lambda: server.statistics()["waiting"] == count, f"{count} requests wait")


def test_every_operation(server: rallypoint.Server) -> None:
    async def main() -> None:
        async with opened(server.port) as (store,):
            await store.set("k", "v")
            assert await store.get("k") == b"v"
            assert [await store.add("n", 5), await store.add("n", -2)] == [5, 3]
            assert await store.compare_set("k", "v", "w") == b"w"
            assert await store.swap("k", "other", "x") == (False, b"w")
            assert await store.swap("new", None, "x") == (True, b"x")
            await store.append("k", b"!")
            assert await store.check(["k", "n"]) and not await store.check(["k", "absent"])
            await store.wait(["k", "n"])
            await store.multi_set(["a", "b"], ["1", b"2"])
            assert await store.multi_get(["a", "b", "k"]) == [b"1", b"2", b"w!"]
            assert await store.delete_key("a") and not await store.delete_key("a")
            assert sorted(await store.list_keys()) == ["b", "k", "n", "new"]
            assert await store.num_keys() == 4
            await store.queue_push("q", "i")
            assert await store.queue_len("q") == 1
            assert await store.queue_pop("q") == b"i"
            await store.barrier("gate", 1)
            await store.lease("leased", "v")
            assert await store.delete_prefix("ne") == 1

    run(main())
    assert not rallypoint.connect(server.url).check(["leased"])


def test_errors_are_those_of_the_blocking_store(server: rallypoint.Server) -> None:
    async def main() -> None:
        async with opened(server.port) as (store,):
            await store.set("k", "word")
            for call, error in (
                (store.add("k", 1), rallypoint.NotAnInteger),
                (store.queue_pop("q", block=False), rallypoint.QueueEmpty),
                (store.set("k" * 10_000, "v"), rallypoint.LimitExceeded),
                (store.set("k", 5), TypeError),  # type: ignore[arg-type]
                (store.add("k", 2**63), ValueError),
                (store.barrier("b", "2"), TypeError),  # type: ignore[arg-type]
            ):
                with pytest.raises(error):
                    await call
            assert await store.get("k") == b"word"

    run(main())


def test_a_prefix_in_the_url(server: rallypoint.Server) -> None:
    async def main() -> None:
        store = await aio.connect(f"{server.url}/job", timeout=DEADLINE_S)
        async with store, opened(server.port) as (whole,):
            await store.set("k", "v")
            assert await whole.list_keys() == ["job/k"]
            assert (await store.list_keys(), await store.num_keys()) == (["k"], 1)

    run(main())


def test_timeouts_name_the_missing_keys(server: rallypoint.Server) -> None:
    async def main() -> None:
        async with opened(server.port) as (store,):
            await store.set("here", "v")
            for call, missing in (
                (store.get("k", timeout=0.01), ("k",)),
                (store.wait(["here", "k"], timeout=0.01), ("k",)),
                (store.multi_get(["k", "here"], timeout=0), ("k",)),
                (store.queue_pop("q", timeout=0.01), ("q",)),
                (store.barrier("b", 2, timeout=0.01), ("b",)),
            ):
                with pytest.raises(rallypoint.StoreTimeout) as caught:
                    await call
                assert caught.value.missing == missing
            await until_waiting(server, 0)

    run(main())


@pytest.mark.parametrize("timeout", [float("inf"), 1e12])
def test_an_infinite_timeout_waits_for_ever(timeout: float, server: rallypoint.Server) -> None:
    async def main() -> None:
        async with opened(server.port) as (store,):
            waiting = asyncio.create_task(store.get("late", timeout=timeout))
            await until_waiting(server, 1)
            await store.set("late", "v")
            assert await waiting == b"v"

    run(main())


def test_hundreds_of_concurrent_calls_are_all_answered(server: rallypoint.Server) -> None:
    async def main() -> None:
        async with opened(server.port, 3) as stores:
            waiting = [asyncio.create_task(stores[0].get(f"late {number}")) for number in range(200)]
            totals = await asyncio.gather(*(stores[number % 3].add("n", 1) for number in range(600)))
            assert sorted(totals) == list(range(1, 601))
            await asyncio.gather(*(stores[1].set(f"late {number}", str(number)) for number in range(200)))
            assert await asyncio.gather(*waiting) == [b"%d" % number for number in range(200)]
            await asyncio.gather(*(store.barrier("gate", 3) for store in stores))

    run(main())


# Cancellation

BLOCKED: dict[str, Callable[[AsyncStore], Awaitable[Any]]] = {
    "get": lambda store: store.get("late"),
    "wait": lambda store: store.wait(["late"]),
    "multi_get": lambda store: store.multi_get(["late", "later"]),
    "queue_pop": lambda store: store.queue_pop("late"),
    "barrier": lambda store: store.barrier("gate", 2),
}


@pytest.mark.parametrize("name", BLOCKED)
def test_a_cancelled_call_leaves_nothing_behind(name: str, server: rallypoint.Server) -> None:
    async def main() -> None:
        async with opened(server.port) as (store,):
            tasks = [asyncio.ensure_future(BLOCKED[name](store)) for _ in range(1 if name == "barrier" else 3)]
            await until_waiting(server, len(tasks))
            for task in tasks:
                task.cancel()
            assert all(isinstance(end, asyncio.CancelledError) for end in await gathered(tasks))
            await until_waiting(server, 0)
            if name == "barrier":
                assert await store.get("gate") == b"0"
            await store.queue_push("late", "item")
            assert await store.queue_pop("late", block=False) == b"item"

    run(main())


async def gathered(tasks: Sequence[asyncio.Future[Any]]) -> list[Any]:
    return await asyncio.gather(*tasks, return_exceptions=True)


def test_wait_for_cancels_cleanly(server: rallypoint.Server) -> None:
    async def main() -> None:
        async with opened(server.port) as (store,):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(store.queue_pop("q"), 0.01)
            await until_waiting(server, 0)
            await store.queue_push("q", "item")
            assert await store.queue_len("q") == 1

    run(main())


def test_an_item_that_comes_while_its_taker_is_cancelled_is_not_lost(server: rallypoint.Server) -> None:
    """Cancel at every step around the reply: the item is either with the consumer or still in the queue."""

    async def main() -> None:
        async with opened(server.port, 2) as (store, other):
            for steps in range(40):
                task = asyncio.ensure_future(store.queue_pop("q"))
                pushed = asyncio.ensure_future(other.queue_push("q", str(steps)))
                for _ in range(steps):
                    await asyncio.sleep(0)
                task.cancel()
                (end,) = await gathered([task])
                await pushed
                await store.add("settled", 1)  # behind the Drop
                left = await other.queue_len("q")
                assert left == (1 if isinstance(end, asyncio.CancelledError) else 0), steps
                if left:
                    assert await other.queue_pop("q") == str(steps).encode()

    run(main())


def test_an_answer_that_its_task_has_not_seen_is_not_confirmed(server: rallypoint.Server) -> None:
    """A pop has its reply, other calls make the client confirm, and then the task that popped is cancelled."""

    async def main() -> None:
        async with opened(server.port) as (store,):
            task = asyncio.ensure_future(store.queue_pop("q"))
            await until_waiting(server, 1)
            session = store._session
            (future,) = session._waiting.values()
            future.add_done_callback(lambda _: task.cancel())  # runs after the task was woken, before it runs
            session._core._unconfirmed = 1000
            await store.queue_push("q", "item")
            (end,) = await gathered([task])
            await store.add("settled", 1)
            assert await store.queue_len("q") == (1 if isinstance(end, asyncio.CancelledError) else 0)

    run(main())


# Watches


def test_watch(server: rallypoint.Server) -> None:
    async def main() -> None:
        async with opened(server.port, 2) as (store, other):
            await store.set("a0", "before")
            async with aclosing(store.watch("a")) as changes:
                first = asyncio.ensure_future(anext(changes))
                await until(lambda: server.statistics()["watches"] == 1, "the watch stands")
                await other.set("a1", "v")
                await other.set("b", "v")
                await other.delete_key("a1")
                seen = [await first, await anext(changes)]
                assert [(change.key, change.value) for change in seen] == [("a1", b"v"), ("a1", None)]
                assert seen[0].revision < seen[1].revision
            assert server.statistics()["watches"] == 0

    run(main())


def test_a_cancelled_watch_leaves_nothing_behind(server: rallypoint.Server) -> None:
    async def look(store: AsyncStore) -> None:
        async for _ in store.watch():
            pass

    async def main() -> None:
        async with opened(server.port) as (store,):
            task = asyncio.ensure_future(look(store))
            await until(lambda: server.statistics()["watches"] == 1, "the watch stands")
            task.cancel()
            await gathered([task])
            await until(lambda: server.statistics()["watches"] == 0, "the watch is gone")
            assert store._session.watches == {}

    run(main())


def test_a_task_that_only_watches_confirms_what_it_saw(server: rallypoint.Server) -> None:
    count = 10_000  # more than a session may leave unconfirmed

    async def main() -> None:
        async with opened(server.port) as (store,), aclosing(store.watch()) as changes:
            first = asyncio.ensure_future(anext(changes))
            await until(lambda: server.statistics()["watches"] == 1, "the watch stands")
            await asyncio.to_thread(write)
            await first
            for _ in range(count - 1):
                last = await anext(changes)
            assert last.value == b"%d" % count
            assert await store.add("n", 1) == count + 1

    def write() -> None:
        with rallypoint.connect(server.url) as plain, plain.pipeline() as pipe:
            for _ in range(count):
                pipe.add("n", 1)

    run(main())


# Cuts


@pytest.mark.parametrize("after", [0, 5, 100, 1000])
def test_calls_leases_and_watches_survive_a_cut(after: int, server: rallypoint.Server) -> None:
    async def main(cutter: CuttingProxy) -> None:
        async with opened(cutter.port) as (store,):
            await store.lease("leased", "v")
            late = asyncio.ensure_future(store.get("late"))
            item = asyncio.ensure_future(store.queue_pop("q"))
            changes = store.watch("w")
            change = asyncio.ensure_future(anext(changes))
            await until(lambda: server.statistics()["watches"] == 1, "the watch stands")
            cutter.cut_after(UP, after)
            totals = await asyncio.gather(*(store.add("n", 1) for _ in range(200)))
            assert totals == list(range(1, 201))
            assert cutter.connections > 1, "the connection was cut"
            await store.multi_set(["late", "w1"], ["v", "v"])
            await store.queue_push("q", "item")
            assert (await late, await item, (await change).key) == (b"v", b"item", "w1")
            assert await store.get("leased") == b"v"
            await changes.aclose()

    with CuttingProxy(server.port) as cutter:
        run(main(cutter))


def test_calls_made_while_cut_are_sent_later(server: rallypoint.Server) -> None:
    async def main(cutter: CuttingProxy) -> None:
        async with opened(cutter.port) as (store,):
            before = cutter.connections
            cutter.refusing = True
            cutter.cut_all()
            await until(lambda: cutter.connections > before, "it tries to come back")
            adding = asyncio.gather(*(store.add("n", 1) for _ in range(10)))
            given_up = asyncio.ensure_future(store.queue_pop("q"))
            await asyncio.sleep(0)
            given_up.cancel()
            cutter.refusing = False
            assert await adding == list(range(1, 11))
            await store.queue_push("q", "item")
            assert await store.queue_len("q") == 1

    with CuttingProxy(server.port) as cutter:
        run(main(cutter))


def test_a_cut_longer_than_the_grace_ends_the_session() -> None:
    async def main(cutter: CuttingProxy) -> None:
        async with opened(cutter.port) as (store,):
            waiting = asyncio.ensure_future(store.get("k"))
            cutter.refusing = True
            cutter.cut_all()
            with pytest.raises(rallypoint.SessionLost):
                await waiting
            with pytest.raises(rallypoint.SessionLost):
                await store.add("n", 1)

    with rallypoint.Server(grace=0.2) as server, CuttingProxy(server.port) as cutter:
        run(main(cutter))


def test_another_server_at_the_address_ends_calls_with_server_restarted() -> None:
    async def main() -> None:
        with rallypoint.Server(grace=DEADLINE_S) as one, rallypoint.Server() as other, CuttingProxy(one.port) as cutter:
            async with opened(cutter.port) as (store,):
                changes = store.watch()
                tasks: list[asyncio.Future[Any]] = [
                    asyncio.ensure_future(store.get("k")),
                    asyncio.ensure_future(anext(changes)),
                ]
                await until(lambda: one.statistics()["watches"] == 1, "the watch stands")
                cutter.redirect(other.port)
                for end in await gathered(tasks):
                    assert isinstance(end, rallypoint.ServerRestarted)

    run(main())


# Several addresses


@asynccontextmanager
async def through(ways: list[CuttingProxy]) -> AsyncIterator[AsyncStore]:
    """A store that has two addresses; at the end no request waits at the server."""
    addresses = ",".join(f"127.0.0.1:{way.port}" for way in ways)
    async with await aio.connect(f"tcp://{addresses}", timeout=DEADLINE_S) as store:
        yield store


def at(store: AsyncStore) -> int:
    return store._session._route.at.port


def two_ways(main: Callable[[list[CuttingProxy]], Coroutine[Any, Any, None]], grace: float = DEADLINE_S) -> None:
    """Run a scenario with two proxies in front of one server."""
    with rallypoint.Server(grace=grace) as server, CuttingProxy(server.port) as one, CuttingProxy(server.port) as other:
        run(main([one, other]))


@pytest.mark.parametrize("way", [UP, DOWN])
def test_after_a_cut_at_any_byte_the_session_continues_at_another_address(way: str) -> None:
    async def main(ways: list[CuttingProxy]) -> None:
        async with through(ways) as store:
            here, there = ways
            before = here.passed[way]
            assert await store.add("n", 1) == 1
            size = here.passed[way] - before
            for after in range(size + 1):
                there.refusing, here.refusing = False, True
                here.cut_after(way, after)
                assert await store.add("n", 1) == 2 + after, f"cut after {after} bytes {way}"
                here.disarm()
                if at(store) != here.port:
                    here, there = there, here
            assert min(each.connections for each in ways) > (size - 5) / 2, "both addresses were used"

    two_ways(main)


def test_leases_waits_and_watches_continue_at_another_address() -> None:
    async def main(ways: list[CuttingProxy]) -> None:
        async with through(ways) as store, aclosing(store.watch("w")) as changes:
            await store.lease("leased", "v")
            late = asyncio.ensure_future(store.get("late"))
            change = asyncio.ensure_future(anext(changes))
            assert await store.add("n", 1) == 1
            ways[0].stop()
            await until(lambda: at(store) == ways[1].port, "it has come to the other")
            await store.multi_set(["late", "w1"], ["v", "v"])
            assert (await late, (await change).key, await store.get("leased")) == (b"v", "w1", b"v")

    two_ways(main)


def test_silent_and_refusing_addresses_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(ways: list[CuttingProxy]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            ways[0].redirect(silent.getsockname()[1])
            async with through(ways) as store:
                assert at(store) == ways[1].port
            ways[0].stop()
            async with through(ways) as store:
                assert at(store) == ways[1].port
                assert await store.add("n", 1) == 1

    monkeypatch.setattr(search, "PATIENCE_S", (0.2, 30.0))
    two_ways(main)


def test_an_address_that_is_no_host_name_is_skipped() -> None:
    async def main(ways: list[CuttingProxy]) -> None:
        for url in (f"tcp://{'x' * 64}.y,127.0.0.1:{ways[0].port}", f"tcp://127.0.0.1:{ways[0].port},{'x' * 64}.y"):
            async with await aio.connect(url, timeout=DEADLINE_S) as store:
                ways[0].cut_all()
                assert await store.add("n", 1) > 0

    two_ways(main)


def test_when_every_address_is_gone_the_error_names_them() -> None:
    async def main(ways: list[CuttingProxy]) -> None:
        async with through(ways) as store:
            for way in ways:
                way.stop()
            with pytest.raises(rallypoint.SessionLost) as caught:
                await store.get("k")
            assert caught.value.peer == f"127.0.0.1:{ways[0].port},127.0.0.1:{ways[1].port}"
        with pytest.raises(rallypoint.ConnectFailed) as failed:
            await aio.connect(f"tcp://{caught.value.peer}", timeout=0.2)
        assert failed.value.peer == caught.value.peer
        assert sorted(failed.value.tried) == sorted(caught.value.peer.split(","))

    two_ways(main, grace=0.3)


def test_a_server_of_another_store_is_refused() -> None:
    async def main(ways: list[CuttingProxy]) -> None:
        with rallypoint.Server() as stranger:
            ways[1].redirect(stranger.port)
            async with through(ways) as store:
                ways[0].stop()
                with pytest.raises(rallypoint.ServerRestarted, match=rf":{ways[1].port} \(one of "):
                    await store.get("k")

    two_ways(main)


# The end


def test_close_ends_every_pending_call(server: rallypoint.Server) -> None:
    async def main() -> None:
        store = await aio.connect(server.url, timeout=DEADLINE_S)
        changes = store.watch()
        tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(BLOCKED[name](store)) for name in BLOCKED]
        tasks.append(asyncio.ensure_future(anext(changes)))
        await until(lambda: server.statistics()["watches"] == 1, "the watch stands")
        await store.close()
        for end in await gathered(tasks):
            assert isinstance(end, rallypoint.StoreClosed)
        with pytest.raises(rallypoint.StoreClosed):
            await store.set("k", "v")
        with pytest.raises(rallypoint.StoreClosed):
            await anext(store.watch())
        await store.close()
        await until(lambda: server.statistics()["sessions"] == [], "the session ends without grace")

    run(main())


STOPPED: dict[str, Callable[[AsyncStore], Awaitable[Any]]] = {
    **BLOCKED,
    "set": lambda store: store.set("k", "v"),
    "add": lambda store: store.add("n", 1),
    "delete_key": lambda store: store.delete_key("k"),
    "queue_len": lambda store: store.queue_len("q"),
    "lease": lambda store: store.lease("k", "v"),
    "watch": lambda store: anext(store.watch()),
}


def test_calls_to_a_stopped_server_fail_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(server: rallypoint.Server) -> None:
        async with opened(server.port) as (store,):
            monkeypatch.setattr(store._session, "patience_s", 0.2)
            store.set_timeout(0.2)
            os.kill(server.pid, signal.SIGSTOP)
            try:
                ends = await gathered([asyncio.ensure_future(call(store)) for call in STOPPED.values()])
            finally:
                os.kill(server.pid, signal.SIGCONT)
            for operation, end in zip(STOPPED, ends, strict=True):
                assert isinstance(end, rallypoint.ConnectionLost), operation
                assert (end.operation, end.peer) == (operation, f"127.0.0.1:{server.port}")
                assert "no answer within 0." in str(end)
            monkeypatch.setattr(store._session, "patience_s", DEADLINE_S)
            assert await store.add("n", 1) in (1, 2), "it continues with the server"
            await until_waiting(server, 0)
            await until(lambda: server.statistics()["watches"] == 0, "the watch is taken back")

    with rallypoint.Server() as server:
        run(main(server))


def test_the_patience_equals_the_blocking_clients(server: rallypoint.Server) -> None:
    async def main() -> None:
        for timeout, patience_s in ((0.5, 10.0), (60, 60.0)):
            async with await aio.connect(server.url, timeout=timeout) as store:
                assert store._session.patience_s == patience_s
            with rallypoint.connect(server.url, timeout=timeout) as blocking:
                assert blocking._backend._session.patience_s == patience_s  # type: ignore[attr-defined]

    run(main())


@pytest.mark.parametrize("size", [-(2**70), -1, 0, 1])
def test_a_barrier_of_zero_or_fewer_members_is_open(size: int, server: rallypoint.Server) -> None:
    async def main() -> None:
        async with opened(server.port) as (store,):
            await store.barrier("gate", size)

    run(main())
    with rallypoint.connect(server.url) as store:
        store.barrier("other gate", size)


def test_a_barrier_of_more_than_64_bits_times_out(server: rallypoint.Server) -> None:
    async def main() -> None:
        async with opened(server.port) as (store,):
            with pytest.raises(rallypoint.StoreTimeout):
                await store.barrier("gate", 2**70, timeout=0.01)

    run(main())


def test_it_works_in_a_second_event_loop(server: rallypoint.Server) -> None:
    async def main() -> int:
        async with opened(server.port) as (store,):
            return await store.add("n", 1)

    assert [run(main()), run(main())] == [1, 2]


def test_connecting_where_nothing_listens_fails() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(rallypoint.ConnectFailed, match=str(port)):
        run(aio.connect(f"tcp://127.0.0.1:{port}", timeout=0.1))


def test_only_tcp_urls_are_accepted() -> None:
    with pytest.raises(ValueError, match="asyncio is for tcp://"):
        run(aio.connect("file:///tmp/nothing"))


@pytest.mark.parametrize(
    ("answer", "welcome", "why"),
    [
        (b"HTTP", b"", "not a store"),
        (ACCEPTED, frame([0, ReplyStatus.REFUSED, [b"server", "not today"]]), "not today"),
        (ACCEPTED, frame([0, ReplyStatus.OK, 5]), "malformed welcome from server"),
    ],
)
def test_a_server_that_refuses_is_not_tried_again(answer: bytes, welcome: bytes, why: str) -> None:
    with ScriptedServer(answer, welcome) as url, pytest.raises(rallypoint.ConnectFailed, match=why):
        run(aio.connect(url, timeout=10 * DEADLINE_S))


@pytest.mark.parametrize("lie", [b"\xff" * 64, frame("hello"), frame([[1], 0, None]), frame([0, 1, 5])])
def test_a_malformed_reply_raises_connection_lost(lie: bytes) -> None:
    async def main(url: str) -> None:
        store = await aio.connect(url, timeout=DEADLINE_S)
        with pytest.raises(rallypoint.ConnectionLost):
            await store.set("k", "v")

    with ScriptedServer(
        ACCEPTED, frame([0, ReplyStatus.OK, Welcome(1, b"server", b"session", 0.2, False)]), lie
    ) as url:
        run(main(url))


class ScriptedServer:
    """A server that answers the preface, greeting and first request of one connection with given bytes."""

    def __init__(self, *answers: bytes) -> None:
        self._answers = answers
        self._listener = socket.create_server(("127.0.0.1", 0))

    def __enter__(self) -> str:
        threading.Thread(target=self._serve, daemon=True).start()
        return f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _serve(self) -> None:
        peer, _ = self._listener.accept()
        with peer:
            peer.recv(len(PREFACE), socket.MSG_WAITALL)
            for answer in self._answers:
                peer.sendall(answer)
                if not peer.recv(4096):
                    return


TORCHS = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.mark.needs("torch")
def test_a_plain_pytorch_server_is_recognised() -> None:
    process = subprocess.Popen([sys.executable, "-c", TORCHS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        port = int(process.stdout.readline())
        with pytest.raises(rallypoint.Unsupported, match="the server there is PyTorch"):
            run(aio.connect(f"tcp://127.0.0.1:{port}", timeout=DEADLINE_S))
    finally:
        process.kill()
        process.communicate()


def test_closing_ends_the_search_for_a_server_at_every_step_of_it(
    server: rallypoint.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        for ticks in range(6):
            attempts, tried, fail = 0, asyncio.Event(), asyncio.Event()

            async def greet(
                session: async_session.AsyncSession,
                endpoint: object,
                tried: asyncio.Event = tried,
                fail: asyncio.Event = fail,
            ) -> None:
                nonlocal attempts
                attempts += 1
                tried.set()
                await fail.wait()
                raise OSError("no")

            store = await aio.connect(server.url, timeout=DEADLINE_S)
            with monkeypatch.context() as patch:
                patch.setattr(async_session.AsyncSession, "_greet", greet)
                transport = store._session._transport
                assert transport is not None
                transport.abort()
                await tried.wait()
                fail.set()
                for _ in range(ticks):
                    await asyncio.sleep(0)
                await store.close()
                searching = store._session._reconnecting
                assert searching is not None
                await asyncio.wait([searching], timeout=DEADLINE_S / 2)
                assert searching.done() and attempts == 1, f"after {ticks} ticks"

    run(main())


# Work queues


def test_a_work_queue(server: rallypoint.Server) -> None:
    async def main() -> None:
        async with opened(server.port, 2) as (store, other):
            queue, others = store.work_queue("jobs", "ann"), other.work_queue("jobs", "bob")
            waiting = asyncio.ensure_future(others.take())
            await until_waiting(server, 1)
            assert len(await queue.put_many(["a", "b"], max_deliveries=2)) == 2
            async with await waiting as item:
                assert (item.data, item.deliveries) == (b"a", 1)
            for dead in (False, True):
                assert await (await queue.take()).release("no good") is dead
            with pytest.raises(rallypoint.StoreTimeout, match=r"take timed out after 0\.1 s: work queue 'jobs'"):
                await queue.take(0.1)
            await queue.join()
            assert await queue.try_take() is None
            assert (await queue.status())[:5] == (0, 0, 1, 1, 0)
            await queue.put("c")
            item = await queue.take()
            with pytest.raises(ZeroDivisionError):
                async with item:
                    _ = 1 / 0
            with pytest.raises(RuntimeError, match="already acknowledged or given back"):
                await item.done()
            async with await others.take() as again:
                assert (again.id, again.deliveries) == (item.id, 2)

    run(main())


def test_a_cancelled_take_or_join_leaves_nothing_behind(server: rallypoint.Server) -> None:
    async def main() -> None:
        async with opened(server.port) as (store,):
            queue = store.work_queue("cancelled")
            taking = asyncio.ensure_future(queue.take())
            await until_waiting(server, 1)
            taking.cancel()
            await gathered([taking])
            await until_waiting(server, 0)
            await queue.put("x")
            joining = asyncio.ensure_future(queue.join())
            await until_waiting(server, 1)
            joining.cancel()
            await gathered([joining])
            async with await queue.take() as item:
                assert item.deliveries == 1
            await queue.join()

    run(main())


def test_an_item_of_a_lost_session_goes_to_another() -> None:
    async def main(server: rallypoint.Server, cutter: CuttingProxy) -> None:
        async with opened(server.port) as (store,), opened(cutter.port) as (cut_off,):
            queue = store.work_queue("jobs")
            await queue.put("x")
            lost = await cut_off.work_queue("jobs").take()
            cutter.refusing = True
            cutter.cut_all()
            async with await queue.take() as item:
                assert (item.id, item.deliveries) == (lost.id, 2)
                with pytest.raises(rallypoint.ItemLost) as raised:
                    await lost.done()
                assert raised.value.item == item.id and raised.value.why

    with rallypoint.Server(grace=0.2) as server, CuttingProxy(server.port) as cutter:
        run(main(server, cutter))


def test_a_take_in_an_outage_ends_at_its_timeout(server: rallypoint.Server) -> None:
    async def main(cutter: CuttingProxy) -> None:
        async with opened(cutter.port) as (store,):
            queue = store.work_queue("outage")
            cutter.go_down()
            with pytest.raises(rallypoint.StoreTimeout, match="after 1 s: work queue 'outage': the server"):
                await queue.take(1.0)
            cutter.come_back()
            await queue.put("x")
            async with await queue.take() as item:
                assert item.deliveries == 1, "the one that gave up has left the line"

    with CuttingProxy(server.port) as cutter:
        run(main(cutter))
