"""A blocking call beside an event loop: it passes on results and errors, and does not delay exit."""

from __future__ import annotations

import asyncio
import threading

import pytest
from tests.raw_peer import AMPLE_S, read_line, script

from rallypoint.in_thread import in_thread

ENDS = """
import asyncio, threading
from rallypoint.in_thread import in_thread

async def main():
    begun = threading.Event()
    call = asyncio.ensure_future(in_thread(lambda: (begun.set(), threading.Event().wait())))
    while not begun.is_set():
        await asyncio.sleep(0)
    call.cancel()

asyncio.run(main())
print("over", flush=True)
"""


def test_results_and_errors_are_passed_on() -> None:
    def fails() -> None:
        raise KeyError("why")

    async def body() -> None:
        assert await in_thread(threading.get_ident) != threading.get_ident()
        with pytest.raises(KeyError, match="why"):
            await in_thread(fails)

    asyncio.run(body())


def test_the_result_of_a_cancelled_call_is_dropped() -> None:
    async def body() -> None:
        go, gone = threading.Event(), threading.Event()
        call = asyncio.ensure_future(in_thread(lambda: go.wait(AMPLE_S)))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        go.set()
        await in_thread(gone.set)
        assert gone.is_set()

    asyncio.run(body())


def test_a_process_exits_while_a_call_still_blocks() -> None:
    with script(ENDS) as child:
        assert read_line(child) == "over"
        assert child.wait(AMPLE_S) == 0
