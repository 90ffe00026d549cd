"""The asyncio client while its server is down: it follows the rules of the blocking client (`test_outages.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.outage_log import DEADLINE_S, LogRecorder, go_down, told
from tests.ports import reserve_port
from tests.recovering_server import RecoveringServer
from tests.served import server_fixture

import rallypoint
from rallypoint import aio
from rallypoint.aio import AsyncStore
from rallypoint.client import async_session, outage
from rallypoint.client.routing import route
from rallypoint.core import ops
from rallypoint.deadline import Deadline
from rallypoint.testing import HANGS_UP, REFUSES, SILENT, CuttingProxy

__all__ = ["told"]


server = server_fixture(grace=2 * DEADLINE_S)


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, 3 * DEADLINE_S))


@asynccontextmanager
async def opened(server: rallypoint.Server) -> AsyncIterator[tuple[CuttingProxy, AsyncStore, AsyncStore]]:
    """A proxy, a store behind it, and one that is never cut."""
    with CuttingProxy(server.port) as cutter:
        url = f"tcp://127.0.0.1:{cutter.port}"
        async with (
            await aio.connect(server.url, timeout=DEADLINE_S) as plain,
            await aio.connect(url, timeout=DEADLINE_S) as store,
        ):
            yield cutter, store, plain


async def until(true: Callable[[], bool], what: str) -> None:
    """Poll until a condition is true."""
    deadline = Deadline(DEADLINE_S)
    while not true():
        assert not deadline.expired(), f"not within {DEADLINE_S} s: {what}"
        await asyncio.sleep(0)


async def until_waiting(server: rallypoint.Server, number: int) -> None:
    await until(lambda: server.statistics()["waiting"] == number, f"{number} wait")


BLOCKED: dict[str, tuple[Callable[[AsyncStore], Awaitable[Any]], Callable[[AsyncStore], Awaitable[Any]], Any]] = {
    "get": (lambda s: s.get("a"), lambda s: s.set("a", "v"), b"v"),
    "wait": (lambda s: s.wait(["b"]), lambda s: s.set("b", "v"), None),
    "multi_get": (lambda s: s.multi_get(["c", "d"]), lambda s: s.multi_set(["c", "d"], ["1", "2"]), [b"1", b"2"]),
    "queue_pop": (lambda s: s.queue_pop("q"), lambda s: s.queue_push("q", "v"), b"v"),
    "barrier": (lambda s: s.barrier("e", 2), lambda s: s.barrier("e", 2), None),
}


@pytest.mark.parametrize("how", [REFUSES, HANGS_UP, SILENT])
def test_blocked_calls_survive_an_outage_and_a_short_one_times_out_in_it(
    how: str, server: rallypoint.Server, told: LogRecorder
) -> None:
    async def main() -> None:
        async with opened(server) as (cutter, store, plain):
            ends = {name: asyncio.ensure_future(BLOCKED[name][0](store)) for name in BLOCKED}
            await until_waiting(server, len(BLOCKED))
            await asyncio.to_thread(go_down, cutter, told, how)
            made = asyncio.ensure_future(store.add("n", 1))  # in the outage
            with pytest.raises(rallypoint.StoreTimeout) as caught:
                await store.wait(["x", "y"], timeout=2.0)
            assert f"127.0.0.1:{cutter.port} has been down for" in caught.value.down
            assert caught.value.missing == ("x", "y")
            assert not made.done() and not any(end.done() for end in ends.values())
            cutter.come_back()
            assert await made == 1
            for name, (_, release, returns) in BLOCKED.items():
                await release(plain)
                assert await ends[name] == returns, name
            await asyncio.to_thread(told.until, "is back")
            assert (told.count("is down"), told.count("is back")) == (1, 1)
            if how == REFUSES:
                assert "(refused, nothing listens there)" in told.lines[0]

    run(main())


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_error_says_why_a_server_is_not_reachable_as_in_the_blocking_client(host: str) -> None:
    port = reserve_port()
    with pytest.raises(rallypoint.ConnectFailed) as caught:
        run(aio.connect(f"tcp://{host}:{port}", timeout=0.1))
    assert caught.value.tried == {f"{host}:{port}": "refused, nothing listens there"}


def test_a_call_that_does_not_wait_fails_after_the_answer_timeout_and_is_not_executed_later(
    server: rallypoint.Server, told: LogRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with opened(server) as (cutter, store, plain):
            with monkeypatch.context() as patch:
                patch.setattr(store._session, "patience_s", 0.5)
                await asyncio.to_thread(go_down, cutter, told)
                with pytest.raises(rallypoint.ConnectionLost, match="it may or may not have been applied"):
                    await store.add("n", 1)
            cutter.come_back()
            assert await store.add("m", 1) == 1
            assert await plain.list_keys() == ["m"]

    run(main())


def test_a_cancelled_call_is_not_executed_later(server: rallypoint.Server, told: LogRecorder) -> None:
    async def main() -> None:
        async with opened(server) as (cutter, store, plain):
            before = asyncio.ensure_future(store.queue_pop("q"))
            await until_waiting(server, 1)
            await asyncio.to_thread(go_down, cutter, told)
            meanwhile = asyncio.ensure_future(store.queue_pop("q"))
            added = asyncio.ensure_future(store.add("n", 1))
            await asyncio.sleep(0)
            for task in (before, meanwhile, added):
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            cutter.come_back()
            assert await store.add("m", 1) == 1
            await plain.queue_push("q", "item")
            assert await plain.queue_pop("q") == b"item", "none of them takes it"
            assert not await plain.check(["n"])
            await until_waiting(server, 0)

    run(main())


def test_polls_leave_no_request_to_repeat(server: rallypoint.Server, told: LogRecorder) -> None:
    async def main() -> None:
        async with opened(server) as (cutter, store, _):
            await asyncio.to_thread(go_down, cutter, told)
            for _ in range(200):
                with pytest.raises(rallypoint.StoreTimeout):
                    await store.get("never", timeout=0.001)
            assert store._session._core.unanswered() == []
            cutter.come_back()
            assert await store.add("n", 1) == 1

    run(main())


def test_a_watch_has_no_gap_and_may_be_closed_in_an_outage(server: rallypoint.Server, told: LogRecorder) -> None:
    async def main() -> None:
        async with opened(server) as (cutter, store, plain):
            changes, others = store.watch("k"), store.watch("l")
            first = asyncio.ensure_future(anext(changes))
            second = asyncio.ensure_future(anext(others))
            await until(lambda: server.statistics()["watches"] == 2, "the server has both watches")
            await plain.set("l", "")
            await second
            await asyncio.to_thread(go_down, cutter, told)
            for number in range(50):
                await plain.set("k", str(number))
            await others.aclose()
            cutter.come_back()
            seen = [(await first).value, *[(await anext(changes)).value for _ in range(49)]]
            assert seen == [b"%d" % number for number in range(50)]
            await until(lambda: server.statistics()["watches"] == 1, "the closed watch is gone from the server")
            await changes.aclose()

    run(main())


@pytest.mark.parametrize("how", [REFUSES, SILENT])
def test_close_does_not_wait_for_the_server(how: str, server: rallypoint.Server, told: LogRecorder) -> None:
    async def main() -> None:
        tasks = len(asyncio.all_tasks())
        async with opened(server) as (cutter, store, _):
            waiting = asyncio.ensure_future(store.get("late"))
            await until_waiting(server, 1)
            await asyncio.to_thread(go_down, cutter, told, how)
            await store.close()
            with pytest.raises(rallypoint.StoreClosed):
                await waiting
            with pytest.raises(rallypoint.StoreClosed):
                await store.set("k", "v")
            await until(lambda: len(asyncio.all_tasks()) == tasks, "no task reconnects any more")

    run(main())


async def get_in_outage(store: AsyncStore, server: RecoveringServer, told: LogRecorder) -> asyncio.Future[bytes]:
    """Return a pending call, when the client has noticed that the server is down."""
    waiting = asyncio.ensure_future(store.get("late"))
    await until(lambda: server.count(ops.Get) == 1, "it waits")
    server.kill()
    await asyncio.to_thread(told.until, "is down")
    return waiting


def test_a_wait_is_repeated_with_its_remaining_time(told: LogRecorder) -> None:
    async def main(server: RecoveringServer) -> None:
        async with await aio.connect(server.url, timeout=DEADLINE_S) as store:
            waiting = await get_in_outage(store, server, told)
            server.start()
            await until(lambda: server.count(ops.Get) == 2, "it is repeated")
            await store.set("late", "v")
            assert await waiting == b"v"
        first, again = server.of(ops.Get)
        assert again.number == first.number and again.timeout_s <= first.timeout_s - outage.DOWN_S

    with RecoveringServer(0.1, DEADLINE_S) as server:
        run(main(server))


@pytest.mark.parametrize("recovery_s", [DEADLINE_S, 0.0])
def test_calls_survive_a_crash_loop_only_if_the_server_recovers_its_sessions(
    recovery_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route, "IN_A_ROW_S", DEADLINE_S)

    async def main(server: RecoveringServer) -> None:
        async with await aio.connect(server.url, timeout=DEADLINE_S) as store:
            waiting = asyncio.ensure_future(store.get("late"))
            await until(lambda: server.count(ops.Get) == 1, "it waits")
            for again in range(2, 2 * route.MAX_CUTS):
                server.kill()
                server.start()
                await until(
                    lambda again=again: waiting.done() or server.count(ops.Get) == again,  # type: ignore[misc]
                    "it is repeated",
                )
            if recovery_s:
                await store.set("late", "v")
                assert await waiting == b"v"
            else:
                with pytest.raises(rallypoint.ConnectionLost, match=f"cut {route.MAX_CUTS} times in a row"):
                    await waiting

    with RecoveringServer(DEADLINE_S, recovery_s) as server:
        run(main(server))


@pytest.mark.parametrize(
    ("identity", "error"), [(b"identity", rallypoint.SessionLost), (b"another", rallypoint.ServerRestarted)]
)
def test_calls_fail_when_the_server_returns_without_the_session(
    identity: bytes, error: type[rallypoint.RallypointError], told: LogRecorder
) -> None:
    async def main(server: RecoveringServer) -> None:
        async with await aio.connect(server.url, timeout=DEADLINE_S) as store:
            waiting = await get_in_outage(store, server, told)
            server.forget(identity)
            server.start()
            with pytest.raises(error):
                await waiting

    with RecoveringServer(0.1, DEADLINE_S) as server:
        run(main(server))


def test_a_session_is_lost_when_the_server_is_down_for_longer_than_its_recovery() -> None:
    async def main(server: RecoveringServer) -> None:
        async with await aio.connect(server.url, timeout=DEADLINE_S) as store:
            server.kill()
            with pytest.raises(rallypoint.SessionLost, match=r"cut for 0\.5 s"):
                await store.get("k")

    with RecoveringServer(0.1, 0.5) as server:
        run(main(server))


def test_an_unexpected_error_while_reconnecting_ends_the_calls(
    server: rallypoint.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    async def main() -> None:
        async with opened(server) as (cutter, store, _):
            waiting = asyncio.ensure_future(store.get("never"))
            await until_waiting(server, 1)
            monkeypatch.setattr(async_session, "Search", fail)
            cutter.cut_all()
            with pytest.raises(rallypoint.ConnectionLost, match=r"reconnecting.*RuntimeError: a bug"):
                await waiting

    run(main())
