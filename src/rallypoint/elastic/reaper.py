"""Kill the processes that carry a mark, and never any other: the last duty of a warden (warden.py).

A script of its own, run by the warden with `-I -S` so that it is up in milliseconds: it imports nothing of the package.

A process carries a mark in its environment (`NAME=value`) or as its soft limit of file locks. The limit survives
`env -i`, `setsid`, a double fork and closed descriptors; the kernel has ignored its value since Linux 2.4.25. A process
is pinned by a pidfd before its mark is looked at, so the signal cannot reach a stranger who was given the number since.
What was killed may have forked just before, so the search is repeated until it finds nobody.
Rejected: PR_SET_CHILD_SUBREAPER. An orphan goes to an ancestor of its parent, and when the agent has been killed, none
of those is ours: the warden is a sister of the workers.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import sys

__all__ = ["reap"]

PASSES = 20
"""How often to look, at most: somebody may start processes faster than they can be found."""

GONE_MS = 500
"""How long to wait for the killed to be gone before looking again."""

UNKNOWN = -1
"""Instead of a pidfd, where the kernel has none to give."""


def reap(environment: str, limit: str) -> None:
    """Kill all processes with this line in their environment, or this soft limit of file locks, and wait for them."""
    for _ in range(PASSES):
        killed = [_kill_marked(pid, environment, limit) for pid in _others() if is_marked(pid, environment, limit)]
        for descriptor in killed:
            if descriptor is not None and descriptor != UNKNOWN:
                poll = select.poll()
                poll.register(descriptor, select.POLLIN)
                poll.poll(GONE_MS)
                os.close(descriptor)
        if all(descriptor is None for descriptor in killed):
            return


def is_marked(pid: int, environment: str, limit: str) -> bool:
    """Say whether a process carries the mark, and is more than the record of a dead one."""
    limits = [line.split() for line in _read(pid, "limits").splitlines() if line.startswith(b"Max file locks ")]
    marked = limits and limits[0][3] == limit.encode()
    if not marked and environment.encode() not in _read(pid, "environ").split(b"\0"):
        return False
    return _read(pid, "stat").rpartition(b")")[2].split()[:1] not in ([b"Z"], [b"X"], [])


def _others() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]


def _kill_marked(pid: int, environment: str, limit: str) -> int | None:
    """Kill a process if it is still a marked one, and return its pidfd; None if it is not, or may not be killed."""
    descriptor = UNKNOWN
    try:
        descriptor = _pinned(pid)
        if is_marked(pid, environment, limit):
            if descriptor == UNKNOWN:
                os.kill(pid, signal.SIGKILL)
            else:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            return descriptor
    except OSError:
        pass
    if descriptor != UNKNOWN:
        os.close(descriptor)
    return None


def _pinned(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
    except AttributeError:
        pass
    return UNKNOWN


def _read(pid: int, name: str) -> bytes:
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""


if __name__ == "__main__":
    reap(*sys.argv[1:3])
