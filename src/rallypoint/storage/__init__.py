"""The storage of a server's log: the interface between a server and its storage.

A server in memory has no storage and waits for nothing. With a storage, the server applies a batch of entries once the
batch is committed. `file/storage.py` stores the log in a directory, `etcd/storage.py` in etcd, for the leader of
several servers. Entries and snapshots are opaque bytes here; `rallypoint.core` gives them a meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio

__all__ = ["CommitCallback", "Storage"]

CommitCallback = Callable[[BaseException | None], None]
"""The callback of a commit: called with None or the error, in any thread."""


class Storage(Protocol):
    """A log with snapshots. Call `recover`, then `attach`, then `commit` at will, finally `save` and `close`."""

    confirms: bool
    """Whether reads must wait for `confirm`, because another server may have taken over the log."""

    def recover(self) -> tuple[Iterator[bytes] | None, Iterator[bytes]]:
        """Return the chunks of the newest snapshot (None: there is none), and the records committed after it.

        Iterate over both, in this order and to their ends; they are read lazily, and raise StorageDamaged.
        """

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Use this event loop to complete commits; `commit`, `save` and `close` are called on it from now on."""

    def commit(self, records: Sequence[bytes], done: CommitCallback, urgent: bool = False) -> None:
        """Start to make a batch durable; call `done` in any thread when it is. An urgent batch may use the reserve.

        DiskFull: nothing of the batch was kept, and a later commit may succeed. StorageFailed: the state of the disk
        is unknown, and every later commit fails in the same way; the server must stop. Start the next commit only
        after `done` was called.
        """

    def confirm(self, done: CommitCallback) -> None:
        """Check that no other server has committed to the log, then call `done`; only for a storage that `confirms`."""

    def compact_if_due(self) -> bool:
        """Start a compaction if the log has grown enough; return whether it was started. Never blocks."""

    def save(self, chunks: Iterable[bytes]) -> None:
        """Write a snapshot of everything committed. No commit may be in flight until this returns."""

    def close(self) -> None:
        """Wait for the commit in flight, and free all resources; harmless when repeated."""

    def statistics(self) -> dict[str, int | float]:
        """Return counts and sizes."""
