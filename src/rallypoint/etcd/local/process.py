"""`Process`: a process of another program, distinguished from every later process with the same pid.

The kernel reuses pids, so a pid in a file does not identify a process. `start_time` completes it: the boot id of the
machine, and the start in clock ticks. To send a signal, a pidfd is opened first and the identity checked after that,
so that the pid cannot be reused in between. A zombie counts as exited.
Rejected: lock files held by the process. etcd does not inherit descriptors.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from rallypoint.deadline import Deadline

__all__ = ["Process"]

POLL_S = 0.01
_PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    """One process: its pid and its start time."""

    pid: int
    start_time: str

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """Return the process that has this pid now, or None."""
        start_time = _start_time(pid)
        return None if start_time is None else cls(pid, start_time)

    def running(self) -> bool:
        """Return whether it is still running."""
        return _start_time(self.pid) == self.start_time

    def signal(self, number: int) -> bool:
        """Send a signal to this process and no other; return whether it was running."""
        with contextlib.ExitStack() as stack, contextlib.suppress(ProcessLookupError):
            descriptor = _descriptor(self.pid)
            if descriptor is not None:
                stack.callback(os.close, descriptor)
            if not self.running():
                return False
            if descriptor is None:
                os.kill(self.pid, number)
            else:
                signal.pidfd_send_signal(descriptor, number)
            return True
        return False

    def wait(self, deadline: Deadline) -> bool:
        """Wait until it has exited and return True; return False at the deadline."""
        while self.running():
            if deadline.expired():
                return False
            time.sleep(POLL_S)
        return True


def _descriptor(pid: int) -> int | None:
    """Return a pidfd of the process; None if the system does not support it."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:  # an old kernel, or a sandbox that forbids it
        return None


def _start_time(pid: int) -> str | None:
    """Return the start time of the process with this pid, as text for comparison; None if none is running."""
    if not (_PROC / "self" / "stat").exists():
        return _start_time_by_ps(pid)
    try:
        fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    ended = fields[0] in "ZX" and int(fields[17]) <= 1  # other threads may still hold its sockets
    return None if ended else f"{boot} {fields[19]}"


def _start_time_by_ps(pid: int) -> str | None:
    listed = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    state, _, started = listed.stdout.strip().partition(" ")
    return None if not started or state.startswith("Z") else started.strip()
