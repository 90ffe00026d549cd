"""A log in memory whose commits end when the test says so, and a server on it: what the tests of commits share.

`on_log` runs a test with a server whose every change goes through a `FakeLog`, on a transport in the test's hands
(`peers.py`). When the test is over, the log is replayed: it must make the very state that the server has.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any

from tests.server.peers import settle
from tests.wire import AMPLE_S

from rallypoint import net
from rallypoint.core import entries
from rallypoint.core.snapshot import write
from rallypoint.core.state import State
from rallypoint.errors import DiskFull
from rallypoint.server.server import StoreServer
from rallypoint.server.settings import Settings

__all__ = ["Bugs", "FakeLog", "disk_full", "on_log", "replayed"]

Done = Callable[[BaseException | None], None]


def disk_full() -> DiskFull:
    return DiskFull(path="/data/log", why="No space left on device", number=28)


class FakeLog:
    """A storage that keeps what is committed in a list."""

    confirms = False

    def __init__(self, records: Sequence[bytes] = ()) -> None:
        self.records = list(records)
        """All that is durable."""

        self.batches: list[list[bytes]] = []
        """What each commit was given, whether or not it has ended."""

        self.stalled = False
        """Whether commits end only by `end`; else they do at once."""

        self.error: BaseException | None = None
        """What commits fail with, unless they are stalled."""

        self.reserve = False
        """Whether there is room for what is urgent, whatever the error is."""

        self.urgent: list[list[bytes]] = []
        """What was urgent of `batches`."""

        self.saved: list[bytes] = []
        self.closed = False
        self._under_way: tuple[list[bytes], Done] | None = None

    @property
    def committing(self) -> bool:
        """Whether a commit is under way."""
        return self._under_way is not None

    def commit(self, records: list[bytes], done: Done, urgent: bool = False) -> None:
        assert self._under_way is None, "two commits at a time"
        assert records, "an empty commit"
        self.batches.append(records)
        self.urgent += [records] if urgent else []
        self._under_way = records, done
        if not self.stalled:
            error = None if urgent and self.reserve else self.error
            asyncio.get_running_loop().call_soon(self._end_unless_over, self._under_way, error)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Commits end on the loop anyway."""

    def end(self, error: BaseException | None = None) -> None:
        """End the commit that is under way."""
        assert self._under_way is not None
        (records, done), self._under_way = self._under_way, None
        if error is None:
            self.records += records
        done(error)

    def _end_unless_over(self, commit: object, error: BaseException | None) -> None:
        if self._under_way is commit:
            self.end(error)

    async def flow(self) -> None:
        """End all commits, now and from now on, and let what they bring happen."""
        self.stalled = False
        if self.committing:
            self.end()
        await settle()

    # What else a storage does

    def recover(self) -> tuple[None, Iterator[bytes]]:
        return None, iter(self.records.copy())

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
        """See that there are none in a block."""
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
    """Return what the log makes of nothing."""
    state = State()
    for record in log.records:
        state.apply(entries.decode(record))
    return state


def on_log(
    test: Callable[[StoreServer, FakeLog], Awaitable[None]] | None = None, **settings: Any
) -> Callable[..., Any]:
    """Run a test in a loop, with a server on a log that listens on loopback.

    At the end the log must make the same state, and nothing may have been raised that somebody had to catch.
    """
    if test is None:
        return functools.partial(on_log, **settings)

    async def run() -> None:
        log = FakeLog()
        server = StoreServer(Settings(**settings), log)
        await server.open(net.listen(["127.0.0.1"], 0))
        await asyncio.wait_for(test(server, log), AMPLE_S)
        if server.failed is None:
            await log.flow()
            assert list(write(server.state)) == list(write(replayed(log))), "a restart would find another state"
        await server.close()

    def call() -> None:
        with Bugs.none():
            asyncio.run(run())

    call.__name__, call.__doc__ = test.__name__, test.__doc__
    return call
