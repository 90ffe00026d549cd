"""`Process`: a process of another program, told from every later one that gets its number.

The kernel gives numbers again, so a pid in a file names nobody for certain. With it goes when the process was born: the
boot of the machine, and the tick of its clock. A signal goes by way of a descriptor of the process that is opened
first and looked at then, so that nothing slips in between. A zombie counts as ended: nothing of it runs.
Rejected: files with locks that the process holds; etcd does not take descriptors over.
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

LOOK_S = 0.01
_PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    """One process: its number, and when it was born."""

    pid: int
    born: str

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """Return the process that has this number now, or None."""
        born = _born(pid)
        return None if born is None else cls(pid, born)

    def running(self) -> bool:
        """Say whether it is still there."""
        return _born(self.pid) == self.born

    def signal(self, number: int) -> bool:
        """Send a signal to this process and no other; say whether it was there."""
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
        """Wait until it has ended, and say so; False at the deadline."""
        while self.running():
            if deadline.expired():
                return False
            time.sleep(LOOK_S)
        return True


def _descriptor(pid: int) -> int | None:
    """Return a descriptor of the process; None where the system has no such thing."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:  # an old kernel, or a sandbox that forbids it
        return None


def _born(pid: int) -> str | None:
    """Return when the process of this number was born, in words for comparing; None where none runs."""
    if not (_PROC / "self" / "stat").exists():
        return _born_by_ps(pid)
    try:
        fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    ended = fields[0] in "ZX" and int(fields[17]) <= 1  # other threads may still hold its sockets
    return None if ended else f"{boot} {fields[19]}"


def _born_by_ps(pid: int) -> str | None:
    asked = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    state, _, started = asked.stdout.strip().partition(" ")
    return None if not started or state.startswith("Z") else started.strip()
