"""Errors of a server's storage, in the style of `rallypoint.errors`; a full disk is `rallypoint.errors.DiskFull`.

    StoreError
    ├── Deposed            another server leads the replicated store
    ├── DirectoryInUse     another process uses the data directory
    ├── StorageDamaged     acknowledged data cannot be read back: the server does not start
    ├── StorageFailed      a write or a sync failed: the contents of the disk are unknown, the server stops
    └── StoreGone          a replicated store expired in etcd

Rejected: OSError as a second base of StorageFailed; code that handles an OSError and goes on must not catch it.
"""

from __future__ import annotations

from rallypoint.errors import StoreError, WithFields

__all__ = ["Deposed", "DirectoryInUse", "StorageDamaged", "StorageFailed", "StoreGone"]


class DirectoryInUse(WithFields, StoreError):
    """Another process holds the lock of the directory; `pid` is None and `host` empty if it has not written them."""

    directory: str
    pid: int | None
    host: str

    def _sentence(self) -> str:
        owner = "another process" if self.pid is None else f"process {self.pid} on {self.host}"
        return (
            f"{self.directory} is in use by {owner}. "
            f"Stop that process, or choose another data directory (serve --data-dir)"
        )


class StorageDamaged(WithFields, StoreError):
    """A file of the data directory is missing or corrupt; recovery changed nothing."""

    path: str
    offset: int
    why: str

    def _sentence(self) -> str:
        return (
            f"{self.path} is damaged at byte {self.offset}: {self.why}. Acknowledged changes may be lost, so the "
            f"server does not start. Check the disk, then restore the data directory from a backup, or move it away "
            f"to start with an empty store"
        )


class StorageFailed(WithFields, StoreError):
    """A write or a sync failed (`number` is the errno, or 0); nothing more can be committed."""

    path: str
    why: str
    number: int = 0

    def _sentence(self) -> str:
        return (
            f"writing {self.path} failed: {self.why}. Whether the last changes reached the disk is unknown, so the "
            f"server must stop. Check the disk (dmesg), then restart the server: it recovers all committed changes"
        )


class Deposed(WithFields, StoreError):
    """Another server leads the store: `epoch` has ended, and this server has committed nothing since."""

    store: str
    epoch: int

    def _sentence(self) -> str:
        return f"another server now leads {self.store}: epoch {self.epoch} has ended; this server commits nothing more"


class StoreGone(WithFields, StoreError):
    """The keys of a store in etcd are gone: it had no server for longer than its recovery time."""

    store: str

    def _sentence(self) -> str:
        return (
            f"{self.store} is gone: it had no server for longer than its recovery time (serve --recovery), or "
            f"its keys in etcd were deleted. A new store of this name starts empty"
        )
