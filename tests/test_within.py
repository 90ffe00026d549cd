"""A time limit on an awaitable: it passes on results, errors and cancellations, whenever they come."""

from __future__ import annotations

import asyncio

import pytest

from rallypoint.within import within


def test_a_cancellation_is_not_lost_when_the_work_is_done_at_the_same_moment() -> None:
    async def body() -> None:
        work = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(within(60.0, work))
        for _ in range(3):
            await asyncio.sleep(0)
        work.set_result("done")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(body())


def test_work_that_takes_too_long_is_cancelled() -> None:
    async def body() -> None:
        work = asyncio.get_running_loop().create_future()
        with pytest.raises(asyncio.TimeoutError):
            await within(0.0, work)
        assert work.cancelled()

    asyncio.run(body())


def test_results_and_errors_are_passed_on() -> None:
    async def fails() -> None:
        raise KeyError("why")

    async def works() -> str:
        return "result"

    async def body() -> None:
        assert await within(60.0, works()) == "result"
        with pytest.raises(KeyError, match="why"):
            await within(60.0, fails())

    asyncio.run(body())
