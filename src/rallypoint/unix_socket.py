"""Unix sockets by path: listen, connect, and replace the stale file of a dead process.

Rules:
- A socket file without a listener refuses connections and is replaced. A file with a listener raises `AddressTaken`,
  and so does a file that is not a socket: only stale socket files are deleted.
- Checking, replacing and listening are one step, under a lock on the directory: of two processes that start at the same
  moment, one gets the path and the other finds it in use.
- The listener removes its file at the end, unless another process has replaced it.

Rejected: a lock file beside the socket. It would stay behind for ever, or be deleted while the next process uses it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from collections.abc import Iterator

from rallypoint.deadline import Deadline
from rallypoint.errors import AddressTaken, ConnectFailed

__all__ = ["MAX_PATH_BYTES", "SCHEME", "checked", "connect", "listen", "remove", "where"]

SCHEME = "unix://"
"""The URL scheme of a Unix socket; its absolute path follows."""

MAX_PATH_BYTES = 107
"""The longest path that the kernel accepts."""

LEAST_S = 0.1
"""The shortest timeout of an attempt to connect, however little time is left."""

_BACKLOG = 4096


def checked(path: str) -> str:
    """Return the absolute path; raise ValueError, which quotes it, if no Unix socket can have it."""
    if not path or "\0" in path:
        raise ValueError(f"{path!r} is not the path of a Unix socket")
    whole = os.path.abspath(path)
    size = len(os.fsencode(whole))
    if size > MAX_PATH_BYTES:
        raise ValueError(f"the path {whole!r} has {size} bytes; the limit for a Unix socket is {MAX_PATH_BYTES}")
    return whole


def listen(path: str) -> socket.socket:
    """Listen on a path, replacing a stale file; raise AddressTaken if that is impossible."""
    path = checked(path)
    try:
        with _locked(os.path.dirname(path)):
            _clear(path)
            return _bound(path)
    except OSError as error:
        if isinstance(error, AddressTaken):
            raise
        raise AddressTaken(address=SCHEME + path, why=error.strerror or str(error)) from error


def connect(path: str, deadline: Deadline) -> socket.socket:
    """Connect to a path in one attempt; raise ConnectFailed."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(deadline.remaining(), LEAST_S))
        sock.connect(path)
        sock.settimeout(None)
    except OSError as error:
        sock.close()
        address = SCHEME + path
        why = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise ConnectFailed(peer=address, timeout_s=deadline.timeout_s, tried={address: why}) from error
    except BaseException:
        sock.close()
        raise
    return sock


def remove(path: str, identity: tuple[int, int]) -> None:
    """Remove the file of a closed listener, if it is still the same file (see `where`)."""
    with contextlib.suppress(OSError), _locked(os.path.dirname(path)):
        if where(path) == identity:
            os.unlink(path)


def where(path: str) -> tuple[int, int] | None:
    """Return the device and inode of a path; None if it does not exist."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


@contextlib.contextmanager
def _locked(directory: str) -> Iterator[None]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _clear(path: str) -> None:
    """Remove a stale socket file; raise AddressTaken if the path is in use."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise AddressTaken(address=SCHEME + path, why="the file exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:
            pass  # its backlog is full: there is a listener
    raise AddressTaken(address=SCHEME + path, why="another process is listening there")


def _bound(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock
