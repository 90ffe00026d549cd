"""A log in memory whose commits end when the test says so, and a server on it, for tests of commits.

`on_log` runs a test with a server whose every change goes through a `FakeLog`; the test controls the transports of its
clients (`peers.py`). At the end the log is replayed, and must produce the state of the server. `in_memory`
runs a test without a log, and `both` runs it both ways.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
from tests.raw_peer import AMPLE_S
from tests.server.peers import settle
from tests.turns import AmpleTurns, use_turns

from rallypoint import net
from rallypoint.core import entries
from rallypoint.core.snapshot import write
from rallypoint.core.state import State
from rallypoint.errors import DiskFull
from rallypoint.server.server import StoreServer
from rallypoint.server.settings import Settings

__all__ = ["Bugs", "FakeLog", "both", "disk_full", "in_memory", "on_log", "replayed"]

Done = Callable[[BaseException | None], None]


def disk_full() -> DiskFull:
    return DiskFull(path="/data/log", why="No space left on device", number=28)


class FakeLog:
    """A storage that keeps what is committed in a list."""

    confirms = False

    def __init__(self, records: Sequence[bytes] = ()) -> None:
        self.records = list(records)
        """The durable records."""

        self.batches: list[list[bytes]] = []
        """The records of each commit, completed or not."""

        self.stalled = False
        """Whether commits end only by `end`; otherwise they end at once."""

        self.error: BaseException | None = None
        """The error of commits, unless they are stalled."""

        self.reserve = False
        """Whether urgent commits succeed despite the error."""

        self.urgent: list[list[bytes]] = []
        """The batches that were urgent."""

        self.saved: list[bytes] = []
        self.closed = False
        self._under_way: tuple[list[bytes], Done] | None = None

    @property
    def committing(self) -> bool:
        """Whether a commit is in flight."""
        return self._under_way is not None

    def commit(self, records: Sequence[bytes], done: Done, urgent: bool = False) -> None:
        assert self._under_way is None, "two commits at a time"
        assert records, "an empty commit"
        batch = list(records)
        self.batches.append(batch)
        self.urgent += [batch] if urgent else []
        self._under_way = batch, done
        if not self.stalled:
            error = None if urgent and self.reserve else self.error
            asyncio.get_running_loop().call_soon(self._end_unless_over, self._under_way, error)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Commits end on the loop anyway."""

    def end(self, error: BaseException | None = None) -> None:
        """End the commit in flight."""
        assert self._under_way is not None
        (records, done), self._under_way = self._under_way, None
        if error is None:
            self.records += records
        done(error)

    def _end_unless_over(self, commit: object, error: BaseException | None) -> None:
        if self._under_way is commit:
            self.end(error)

    async def flow(self) -> None:
        """End the commit in flight and, from now on, every commit at once; let their effects happen."""
        self.stalled = False
        if self.committing:
            self.end()
        await settle()

    # The rest of a storage

    def recover(self) -> tuple[None, Iterator[bytes]]:
        return None, iter(self.records.copy())

    def confirm(self, done: Done) -> None:
        raise AssertionError("a log that does not confirm was asked to")

    def compact_if_due(self) -> bool:
        return False

    def save(self, chunks: Iterable[bytes]) -> None:
        self.saved = list(chunks)

    def close(self) -> None:
        self.closed = True

    def statistics(self) -> dict[str, int | float]:
        return {"commits": len(self.batches)}


class Bugs(logging.Handler):
    """Collects what was logged with a traceback."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.told: list[str] = []

    @classmethod
    @contextlib.contextmanager
    def none(cls) -> Iterator[None]:
        """Check that a block logs none."""
        bugs = cls()
        logging.getLogger().addHandler(bugs)
        try:
            yield
        finally:
            logging.getLogger().removeHandler(bugs)
        assert not bugs.told

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.told.append(f"{record.getMessage()}: {record.exc_info[1]!r}")


def replayed(log: FakeLog) -> State:
    """Return the state that the log produces."""
    state = State()
    for record in log.records:
        state.apply(entries.decode(record))
    return state


def on_log(
    test: Callable[[StoreServer, FakeLog], Awaitable[None]] | None = None, **settings: Any
) -> Callable[..., Any]:
    """Run a test in a loop, with a server on a log that listens on loopback.

    At the end the log must produce the same state, and no exception may have been logged.
    """
    if test is None:
        return functools.partial(on_log, **settings)

    async def run() -> None:
        log = FakeLog()
        server = use_turns(StoreServer(Settings(**settings), log), AmpleTurns())
        await server.open(net.listen(["127.0.0.1"], 0))
        await asyncio.wait_for(test(server, log), AMPLE_S)
        if server.failed is None:
            await log.flow()
            assert list(write(server.state)) == list(write(replayed(log))), "a restart would produce another state"
        await server.close()

    def call() -> None:
        with Bugs.none():
            asyncio.run(run())

    call.__name__, call.__doc__ = test.__name__, test.__doc__
    return call


def in_memory(**settings: Any) -> Callable[..., Callable[[], None]]:
    """Run a test in a loop, with a server in memory that listens on loopback."""

    def decorate(test: Callable[[StoreServer, FakeLog | None], Awaitable[None]]) -> Callable[[], None]:
        async def run() -> None:
            server = use_turns(StoreServer(Settings(**settings)), AmpleTurns())
            await server.open(net.listen(["127.0.0.1"], 0))
            await asyncio.wait_for(test(server, None), AMPLE_S)
            await server.close()

        def call() -> None:
            with Bugs.none():
                asyncio.run(run())

        return call

    return decorate


def both(test: Callable[[StoreServer, FakeLog | None], Awaitable[None]]) -> Callable[[str], None]:
    """Run a test with a server in memory, and with one that has a log."""

    @pytest.mark.parametrize("kept", ["memory", "log"])
    def call(kept: str) -> None:
        (in_memory()(test) if kept == "memory" else on_log(test))()

    call.__name__, call.__doc__ = test.__name__, test.__doc__
    return call
