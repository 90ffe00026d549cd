"""`MemoryLog`: the log of a server in a list, which survives when the server is killed, as a data directory does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence

from rallypoint.storage import CommitCallback

__all__ = ["MemoryLog"]


class MemoryLog:
    """A storage whose commits end at once, on the event loop."""

    confirms = False

    def __init__(self, records: Sequence[bytes] = ()) -> None:
        self.records = list(records)
        """The committed records."""

    def recover(self) -> tuple[None, Iterator[bytes]]:
        """Return the records of earlier servers; there are no snapshots."""
        return None, iter(self.records.copy())

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Do nothing: commits end on the running loop."""

    def commit(self, records: Sequence[bytes], done: CommitCallback, urgent: bool = False) -> None:
        """Keep a batch of records, and call `done` in the next turn of the loop."""
        self.records += records
        asyncio.get_running_loop().call_soon(done, None)

    def confirm(self, done: CommitCallback) -> None:
        """Raise AssertionError: only a log that confirms is asked to."""
        raise AssertionError("a log that does not confirm was asked to")

    def compact_if_due(self) -> bool:
        """Return False: the log of a test stays short."""
        return False

    def save(self, chunks: Iterable[bytes]) -> None:
        """Do nothing: the records are enough."""

    def close(self) -> None:
        """Do nothing: the log outlives its server."""

    def statistics(self) -> dict[str, int | float]:
        """Return the number of records."""
        return {"records": len(self.records)}
