"""Kill all processes with a mark, and no others; run by the orphan reaper (orphan_reaper.py).

This is a stand-alone script, run with `-I -S` so that it starts in milliseconds: it imports nothing of the package.

The mark of a process is a line of its environment (`NAME=value`), or its soft limit on file locks. The limit survives
`env -i`, `setsid`, a double fork and closed descriptors; the kernel has ignored its value since Linux 2.4.25. The
script opens a pidfd before it checks the mark, so the signal cannot reach another process with a reused number. A
process may fork just before it is killed, so the search is repeated until it finds none.
Rejected: PR_SET_CHILD_SUBREAPER. It moves an orphan to an ancestor of its parent, and once the agent is killed none of
the ancestors is ours: the reaper is a sibling of the workers.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import sys

__all__ = ["reap"]

PASSES = 20
"""Limit on the number of searches: processes may fork faster than they are found."""

EXIT_MS = 500
"""How long to wait for a killed process to exit before the next search."""

NO_PIDFD = -1
"""Stands for a pidfd on kernels without them."""


def reap(environment: str, limit: str) -> None:
    """Kill all processes with this line in their environment, or this soft limit on file locks, and wait for them."""
    for _ in range(PASSES):
        killed = [_kill_marked(pid, environment, limit) for pid in _others() if is_marked(pid, environment, limit)]
        for descriptor in killed:
            if descriptor is not None and descriptor != NO_PIDFD:
                poll = select.poll()
                poll.register(descriptor, select.POLLIN)
                poll.poll(EXIT_MS)
                os.close(descriptor)
        if all(descriptor is None for descriptor in killed):
            return


def is_marked(pid: int, environment: str, limit: str) -> bool:
    """Return whether a process has the mark, and is not a zombie."""
    limits = [line.split() for line in _read(pid, "limits").splitlines() if line.startswith(b"Max file locks ")]
    marked = limits and limits[0][3] == limit.encode()
    if not marked and environment.encode() not in _read(pid, "environ").split(b"\0"):
        return False
    return _read(pid, "stat").rpartition(b")")[2].split()[:1] not in ([b"Z"], [b"X"], [])


def _others() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]


def _kill_marked(pid: int, environment: str, limit: str) -> int | None:
    """Kill a process if it still has the mark; return its pidfd, or None if it was not killed."""
    descriptor = NO_PIDFD
    try:
        descriptor = _open_pidfd(pid)
        if is_marked(pid, environment, limit):
            if descriptor == NO_PIDFD:
                os.kill(pid, signal.SIGKILL)
            else:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            return descriptor
    except OSError:
        pass
    if descriptor != NO_PIDFD:
        os.close(descriptor)
    return None


def _open_pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
    except AttributeError:
        pass
    return NO_PIDFD


def _read(pid: int, name: str) -> bytes:
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""


if __name__ == "__main__":
    reap(*sys.argv[1:3])
