"""The data directory of a server: its file names, its lock, and the syncs that make names durable.

    lock                   locked by the one process that writes; contains its process id and host name
    log-<n>                a segment of the log; n is the sequence number of its first frame
    snapshot-<n>           the state after frame n; the log continues in log-<n+1>, which exists before the snapshot
    snapshot-<n>.<x>.tmp   an unfinished snapshot, in progress or left by a process that died

Other files are ignored. The lock is an flock: the kernel releases it when its process dies, so it is never stale.
Programs that the process starts do not inherit it (descriptors are close-on-exec), but a plain fork does.
Rejected: a lock by the existence of a file; it would have to be removed by hand after every crash.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import socket
from typing import NamedTuple

from rallypoint.storage.errors import DirectoryInUse

__all__ = [
    "DirectoryLock",
    "Listing",
    "list_directory",
    "make_directory",
    "remove_covered",
    "remove_temporaries",
    "segment_path",
    "snapshot_path",
    "sync_directory",
    "temporary_path",
]

_NAME = re.compile(r"(log|snapshot)-([0-9]{20})(\.[0-9a-f]+\.tmp)?")


class Listing(NamedTuple):
    """The storage's files in a directory: sorted numbers of segments and snapshots, names of temporary files."""

    segments: list[int]
    snapshots: list[int]
    temporaries: list[str]


class DirectoryLock:
    """The lock of a directory, held until `release`. Raises DirectoryInUse."""

    def __init__(self, directory: str) -> None:
        self._fd = os.open(os.path.join(directory, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(self._fd, 1024, 0).decode(errors="replace").split()
            self.release()
            if not isinstance(error, BlockingIOError):
                raise
            said = len(owner) == 2 and owner[0].isdecimal()
            raise DirectoryInUse(
                directory=directory, pid=int(owner[0]) if said else None, host=owner[1] if said else ""
            ) from None
        text = f"{os.getpid()} {socket.gethostname()}\n".encode()
        with contextlib.suppress(OSError):  # on a full disk the lock holds without its text
            os.pwrite(self._fd, text, 0)
            os.ftruncate(self._fd, len(text))

    def release(self) -> None:
        """Release the lock; the file stays, because the next process may already have it open."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def make_directory(directory: str, mode: int = 0o700) -> None:
    """Create a directory, for this user alone, and missing parents; make their names durable."""
    if os.path.isdir(directory):
        return
    parent = os.path.dirname(directory)
    make_directory(parent, 0o777)
    try:
        os.mkdir(directory, mode)
    except FileExistsError:
        if not os.path.isdir(directory):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), directory) from None
    sync_directory(parent)


def list_directory(directory: str) -> Listing:
    """Return the storage's files in a directory."""
    listing = Listing([], [], [])
    for name in sorted(os.listdir(directory)):
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        kind, number, temporary = match.groups()
        if temporary:
            listing.temporaries.append(name)
        else:
            (listing.segments if kind == "log" else listing.snapshots).append(int(number))
    return listing


def segment_path(directory: str, first: int) -> str:
    """Return the path of the segment whose first frame has this number."""
    return os.path.join(directory, f"log-{first:020d}")


def snapshot_path(directory: str, covers: int) -> str:
    """Return the path of the snapshot of the state after this frame."""
    return os.path.join(directory, f"snapshot-{covers:020d}")


def temporary_path(directory: str, covers: int) -> str:
    """Return a unique path for writing a snapshot."""
    return f"{snapshot_path(directory, covers)}.{secrets.token_hex(8)}.tmp"


def sync_directory(directory: str) -> None:
    """Make the names in a directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_temporaries(directory: str) -> None:
    """Remove unfinished snapshots."""
    for name in list_directory(directory).temporaries:
        os.unlink(os.path.join(directory, name))


def remove_covered(directory: str, covers: int) -> None:
    """Remove the segments and snapshots that a durable snapshot replaces, oldest first.

    Every frame of a segment before log-<covers + 1> is covered: that segment existed before the snapshot did.
    """
    listing = list_directory(directory)
    for first in listing.segments:
        if first <= covers:
            os.unlink(segment_path(directory, first))
    for older in listing.snapshots:
        if older < covers:
            os.unlink(snapshot_path(directory, older))
