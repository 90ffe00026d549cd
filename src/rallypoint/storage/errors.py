"""Errors of a server's storage, in the style of `rallypoint.errors`; a full disk is `rallypoint.errors.DiskFull`.

    StoreError
    ├── Deposed            another server leads the replicated store
    ├── DirectoryInUse     another process has the data directory
    ├── StorageDamaged     acknowledged data cannot be read back: the server does not start
    ├── StorageFailed      a write or a sync failed: what is on disk is unknown, the server ends
    └── StoreGone          a replicated store was kept by nobody, and is not in etcd any more

Rejected: OSError as a second base of StorageFailed; code that handles an OSError and goes on must not catch it.
"""

from __future__ import annotations

from rallypoint.errors import StoreError

__all__ = ["Deposed", "DirectoryInUse", "StorageDamaged", "StorageFailed", "StoreGone"]


class DirectoryInUse(StoreError):
    """Another process holds the lock of the directory; `pid` is None and `host` empty where it has not said yet."""

    directory: str
    pid: int | None
    host: str

    def __init__(self, *, directory: str, pid: int | None, host: str) -> None:
        owner = "another process" if pid is None else f"process {pid} on {host}"
        super().__init__(
            f"{directory} is in use by {owner}. Stop that process, or choose another data directory (serve --data-dir)",
            directory=directory,
            pid=pid,
            host=host,
        )


class StorageDamaged(StoreError):
    """A file of the directory does not hold what was written to it; nothing was changed."""

    path: str
    offset: int
    why: str

    def __init__(self, *, path: str, offset: int, why: str) -> None:
        super().__init__(
            f"{path} is damaged at byte {offset}: {why}. Acknowledged changes may be lost, so the server does not "
            f"start. Check the disk, then restore the data directory from a backup, or move it away to start empty",
            path=path,
            offset=offset,
            why=why,
        )


class StorageFailed(StoreError):
    """Writing or syncing failed (`number` is the errno, 0 where there is none); nothing more can be committed."""

    path: str
    why: str
    number: int

    def __init__(self, *, path: str, why: str, number: int = 0) -> None:
        super().__init__(
            f"writing {path} failed: {why}. Whether the last changes reached the disk is unknown, so the server must "
            f"end. Check the disk (dmesg), then start the server again: it recovers what was committed",
            path=path,
            why=why,
            number=number,
        )


class Deposed(StoreError):
    """Another server leads the store, since `epoch` has passed; this one has committed nothing since."""

    store: str
    epoch: int

    def __init__(self, *, store: str, epoch: int) -> None:
        super().__init__(
            f"another server leads {store} by now: epoch {epoch} is over, and nothing more is committed in it",
            store=store,
            epoch=epoch,
        )


class StoreGone(StoreError):
    """All that a store had in etcd is gone, because nobody kept it for as long as it lasts."""

    store: str

    def __init__(self, *, store: str) -> None:
        super().__init__(
            f"{store} is gone: no server kept it in etcd for as long as it lasts (serve --recovery), or "
            f"somebody deleted its keys. A new store of this name begins empty",
            store=store,
        )
