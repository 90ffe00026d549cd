"""The kinds of native clients for tests of a replicated store, with one set of blocking calls.

A session of `aio` runs on an event loop in a thread. With `by_relay`, the client connects to a relay in its own
process, which is given the addresses of the servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.raw_peer import AMPLE_S, RelayProcess

import rallypoint
from rallypoint import aio

Connect = Callable[..., contextlib.AbstractContextManager[Any]]
"""Opens a store at a URL, with a timeout; it is closed when the block ends."""


class AsyncClient:
    """The calls of an `AsyncStore`, each run on the loop to its end."""

    def __init__(self, loop: asyncio.AbstractEventLoop, store: aio.AsyncStore) -> None:
        self._loop, self.store = loop, store

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self.store, name)
        return lambda *arguments: asyncio.run_coroutine_threadsafe(call(*arguments), self._loop).result(2 * AMPLE_S)


@contextlib.contextmanager
def blocking(url: str, timeout: float) -> Iterator[rallypoint.Store]:
    """Connect with the blocking client."""
    with rallypoint.connect(url, timeout=timeout) as store:
        yield store


@contextlib.contextmanager
def asynchronous(url: str, timeout: float) -> Iterator[AsyncClient]:
    """Connect with the asyncio client."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        store = asyncio.run_coroutine_threadsafe(aio.connect(url, timeout), loop).result(2 * AMPLE_S)
        try:
            yield AsyncClient(loop, store)
        finally:
            asyncio.run_coroutine_threadsafe(_end(store), loop).result(AMPLE_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(AMPLE_S)
        loop.close()


async def _end(store: aio.AsyncStore) -> None:
    """Close a store, and wait for its cancelled tasks."""
    await store.close()
    await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)


def by_relay(connect: Connect, place: Path) -> Connect:
    """Return a function that connects through a new relay."""

    @contextlib.contextmanager
    def connect_by_relay(url: str, timeout: float) -> Iterator[Any]:
        with RelayProcess(place, upstream=url) as relay, connect(relay.url, timeout=timeout) as store:
            yield store

    return connect_by_relay
