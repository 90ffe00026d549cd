"""Where a server keeps its log: what the server asks of a storage.

A server in memory has no storage and waits for nothing. With one, the server applies a batch of entries when the batch
is committed. `file.py` is the storage in a directory, `etcd.py` that of a leader among several servers. Entries and
snapshots are opaque bytes here; `rallypoint.core` gives them a meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio

__all__ = ["Done", "Storage"]

Done = Callable[[BaseException | None], None]
"""What a commit calls when it is over: with None, or with the error. Called in any thread."""


class Storage(Protocol):
    """A log with snapshots. First `recover`, then `attach`, then `commit` at will, at last `save` and `close`."""

    confirms: bool
    """Whether reads have to wait for `confirm`, for another server may have taken over the log."""

    def recover(self) -> tuple[Iterator[bytes] | None, Iterator[bytes]]:
        """Return the chunks of the newest snapshot (None: there is none), and the records committed after it.

        Both are read while they are iterated over, in this order, and to their ends. Raises StorageDamaged meanwhile.
        """

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on commit, save and close are called on this event loop, which may learn of the ends of commits."""

    def commit(self, records: Sequence[bytes], done: Done, urgent: bool = False) -> None:
        """Make a batch durable, then call `done`, in any thread; return before. What is urgent may use a reserve.

        DiskFull: nothing of the batch was kept, and a later commit may succeed. StorageFailed: the state of the disk
        is unknown, and every later commit fails in the same way; the server has to end. The next commit is made
        after `done` was called.
        """

    def confirm(self, done: Done) -> None:
        """Make sure that all that is committed was committed here, then call `done`; only where it `confirms`."""

    def compact_if_due(self) -> bool:
        """Start replacing the log by a snapshot if it has grown enough; return whether it did. Never blocks."""

    def save(self, chunks: Iterable[bytes]) -> None:
        """Write a snapshot of all that was committed. No commit may be under way until this returns."""

    def close(self) -> None:
        """Wait for the commit that is under way, and free what is held; harmless when it is closed already."""

    def statistics(self) -> dict[str, int | float]:
        """Return counts and sizes."""
