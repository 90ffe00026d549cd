"""Unix sockets, by path: listen on one, connect to one, and tell a file that a dead process left from one in use.

Rules:
- A file whose listener is gone refuses connections, and is replaced. One that somebody listens on is `AddressTaken`,
  and so is a file that is no socket: nothing is deleted but what can be of no use to anybody.
- Looking, replacing and listening are one step, under a lock on the directory: of two processes that start at the same
  moment, one has the path, and the other finds it in use.
- Whoever listens removes the file in the end, unless it is another's by then.

Rejected: a lock file beside the socket. It would stay behind for ever, or be deleted under the feet of the next one.
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
"""What the URL of a Unix socket starts with; its absolute path follows."""

MAX_PATH_BYTES = 107
"""How long a path the kernel takes."""

LEAST_S = 0.1
"""What connecting gets, however little time is left."""

_BACKLOG = 4096


def checked(path: str) -> str:
    """Return a path that can be listened on, made absolute; raise ValueError that quotes any other."""
    if not path or "\0" in path:
        raise ValueError(f"{path!r} is not the path of a Unix socket")
    whole = os.path.abspath(path)
    size = len(os.fsencode(whole))
    if size > MAX_PATH_BYTES:
        raise ValueError(f"the path {whole!r} has {size} bytes; a Unix socket's has {MAX_PATH_BYTES} at most")
    return whole


def listen(path: str) -> socket.socket:
    """Listen on a path, in the place of a dead process if need be; raise AddressTaken where that cannot be."""
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
    """Connect to a path, once; raise ConnectFailed."""
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
    """Remove the file of a socket that is no longer listened on, if it is still this one (see `where`)."""
    with contextlib.suppress(OSError), _locked(os.path.dirname(path)):
        if where(path) == identity:
            os.unlink(path)


def where(path: str) -> tuple[int, int] | None:
    """Return what a path is, as device and inode; None where there is nothing."""
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
    """See to it that a path is free: remove a socket that nobody listens on."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise AddressTaken(address=SCHEME + path, why="there is a file that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:
            pass  # many queue up there
    raise AddressTaken(address=SCHEME + path, why="another process listens there")


def _bound(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock
