"""The asyncio client while a server is away: the rules are those of the blocking one (`test_outages.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.cutter import HANGS_UP, REFUSES, SILENT, Cutter
from tests.outages import DEADLINE_S, Told, go_down, told
from tests.recovering import RecoveringServer

import rallypoint
from rallypoint import aio, net
from rallypoint.aio import AsyncStore
from rallypoint.core import ops
from rallypoint.deadline import Deadline
from rallypoint.store import outage, route

__all__ = ["told"]


@pytest.fixture
def server() -> Iterator[rallypoint.Server]:
    with rallypoint.Server(grace=2 * DEADLINE_S) as server:
        yield server


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, 3 * DEADLINE_S))


@asynccontextmanager
async def opened(server: rallypoint.Server) -> AsyncIterator[tuple[Cutter, AsyncStore, AsyncStore]]:
    """A proxy, a store behind it, and one that is never cut."""
    with Cutter(server.port) as cutter:
        url = f"tcp://127.0.0.1:{cutter.port}"
        async with (
            await aio.connect(server.url, timeout=DEADLINE_S) as plain,
            await aio.connect(url, timeout=DEADLINE_S) as store,
        ):
            yield cutter, store, plain


async def until(true: Callable[[], bool], what: str) -> None:
    """Look until something is so."""
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
def test_blocked_calls_go_on_and_a_short_one_ends_when_its_time_is_over(
    how: str, server: rallypoint.Server, told: Told
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
def test_it_says_in_the_words_of_the_blocking_client_why_a_server_is_not_reached(host: str) -> None:
    port = net.free_port(host)
    with pytest.raises(rallypoint.ConnectFailed) as caught:
        run(aio.connect(f"tcp://{host}:{port}", timeout=0.1))
    assert caught.value.tried == {f"{host}:{port}": "refused, nothing listens there"}


def test_what_is_answered_at_once_ends_with_its_patience_and_is_not_done_later(
    server: rallypoint.Server, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with opened(server) as (cutter, store, plain):
            with monkeypatch.context() as patch:
                patch.setattr(store._session, "patience_s", 0.5)
                await asyncio.to_thread(go_down, cutter, told)
                with pytest.raises(rallypoint.ConnectionLost, match="whether it was carried out is not known"):
                    await store.add("n", 1)
            cutter.come_back()
            assert await store.add("m", 1) == 1
            assert await plain.list_keys() == ["m"]

    run(main())


def test_a_cancelled_call_leaves_nothing_behind(server: rallypoint.Server, told: Told) -> None:
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


def test_polls_leave_nothing_to_be_said(server: rallypoint.Server, told: Told) -> None:
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


def test_a_watch_has_no_gap_and_may_be_given_up(server: rallypoint.Server, told: Told) -> None:
    async def main() -> None:
        async with opened(server) as (cutter, store, plain):
            changes, others = store.watch("k"), store.watch("l")
            first = asyncio.ensure_future(anext(changes))
            second = asyncio.ensure_future(anext(others))
            await until(lambda: server.statistics()["watches"] == 2, "both stand")
            await plain.set("l", "")
            await second
            await asyncio.to_thread(go_down, cutter, told)
            for number in range(50):
                await plain.set("k", str(number))
            await others.aclose()  # type: ignore[attr-defined]
            cutter.come_back()
            seen = [(await first).value, *[(await anext(changes)).value for _ in range(49)]]
            assert seen == [b"%d" % number for number in range(50)]
            await until(lambda: server.statistics()["watches"] == 1, "the other is given up")
            await changes.aclose()  # type: ignore[attr-defined]

    run(main())


@pytest.mark.parametrize("how", [REFUSES, SILENT])
def test_close_does_not_wait_for_the_server(how: str, server: rallypoint.Server, told: Told) -> None:
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
            await until(lambda: len(asyncio.all_tasks()) == tasks, "nobody tries any more")

    run(main())


def test_a_wait_is_said_again_with_the_time_that_is_left(told: Told) -> None:
    async def main(server: RecoveringServer) -> None:
        async with await aio.connect(server.url, timeout=DEADLINE_S) as store:
            waiting = asyncio.ensure_future(store.get("late"))
            await until(lambda: server.count(ops.Get) == 1, "it waits")
            server.kill()
            await asyncio.to_thread(told.until, "is down")
            server.start()
            await until(lambda: server.count(ops.Get) == 2, "it is said again")
            await store.set("late", "v")
            assert await waiting == b"v"
        first, again = server.of(ops.Get)
        assert again.number == first.number and again.timeout_s <= first.timeout_s - outage.DOWN_S

    with RecoveringServer(0.1, DEADLINE_S) as server:
        run(main(server))


@pytest.mark.parametrize("recovery_s", [DEADLINE_S, 0.0])
def test_a_crash_loop_is_outlasted_where_the_server_recovers(
    recovery_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route, "IN_A_ROW_S", DEADLINE_S)

    async def main(server: RecoveringServer) -> None:
        async with await aio.connect(server.url, timeout=DEADLINE_S) as store:
            waiting = asyncio.ensure_future(store.get("late"))
            await until(lambda: server.count(ops.Get) == 1, "it waits")
            for again in range(2, 2 * route.MENDS):
                server.kill()
                server.start()
                await until(
                    lambda again=again: waiting.done() or server.count(ops.Get) == again,  # type: ignore[misc]
                    "it is said again",
                )
            if recovery_s:
                await store.set("late", "v")
                assert await waiting == b"v"
            else:
                with pytest.raises(rallypoint.ConnectionLost, match=f"cut {route.MENDS} times in a row"):
                    await waiting

    with RecoveringServer(DEADLINE_S, recovery_s) as server:
        run(main(server))


@pytest.mark.parametrize(
    ("identity", "error"), [(b"identity", rallypoint.SessionLost), (b"another", rallypoint.ServerRestarted)]
)
def test_a_server_that_is_back_without_the_session_says_so(
    identity: bytes, error: type[rallypoint.RallypointError], told: Told
) -> None:
    async def main(server: RecoveringServer) -> None:
        async with await aio.connect(server.url, timeout=DEADLINE_S) as store:
            waiting = asyncio.ensure_future(store.get("late"))
            await until(lambda: server.count(ops.Get) == 1, "it waits")
            server.kill()
            await asyncio.to_thread(told.until, "is down")
            server.forget(identity)
            server.start()
            with pytest.raises(error):
                await waiting

    with RecoveringServer(0.1, DEADLINE_S) as server:
        run(main(server))


def test_a_session_is_lost_when_the_server_is_away_for_longer_than_it_said() -> None:
    async def main(server: RecoveringServer) -> None:
        async with await aio.connect(server.url, timeout=DEADLINE_S) as store:
            server.kill()
            with pytest.raises(rallypoint.SessionLost, match=r"cut for 0\.5 s"):
                await store.get("k")

    with RecoveringServer(0.1, 0.5) as server:
        run(main(server))
