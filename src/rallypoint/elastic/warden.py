"""Who ends an agent's workers when the agent has ended without a word (SIGKILL): two ways, and neither needs the other.

    setpriv       where it is installed, arms the kernel (PR_SET_PDEATHSIG) and becomes the worker
    the warden    a shell at the other end of a pipe, which is told the groups and outlives the agent to kill them

The kernel looks at the *thread* that started a worker, so it is armed from the main thread only. The warden also looks
for the mark that every worker has in its environment: one may have been started and not told yet, and what a worker
started may have left its group. For that it does its duty also when all is well.
Rejected: `preexec_fn`, which copies the agent first: 2 ms a worker and not 0.2, and unsafe beside threads.
"""

from __future__ import annotations

import functools
import os
import secrets
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["MARK", "Warden", "bound"]

MARK = "RALLYPOINT_WARDEN"
"""The variable by which a warden knows the workers of its agent."""

HEAD_BYTES = 256
"""How much of an executable is read to see whether it will run."""

DUTY_S = 2.0
"""How long a warden may take to look at all processes, and to kill."""

_WATCH = """
trap '' HUP INT QUIT TERM
groups=' '
while read -r verb group; do
    case $verb in
    start) groups="$groups$group " ;;
    end) groups="${groups%%" $group "*} ${groups#*" $group "}" ;;
    esac
done
for group in $groups; do kill -s KILL -- "-$group"; done
for again in 1 2 3; do
    for found in $(grep -lsF -e "$0" /proc/[0-9]*/environ); do
        found=${found#/proc/}
        kill -s KILL "${found%/environ}"
    done
    [ -z "$SCRATCH" ] || rm -rf -- "$SCRATCH"
done
"""


class Warden:
    """The process that kills what is left of an agent's workers, however the agent ends.

    It holds nothing of the agent's but the end of a pipe, ends after its duty, with the agent or `close`, and is
    replaced when somebody killed it. Only the process that made it may use it. `scratch` is a directory that is
    to go with the workers, and need not be there yet.
    """

    def __init__(self, scratch: Path | None = None) -> None:
        self.mark = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._scratch = str(scratch or "")
        self._groups: set[int] = set()
        self._lock = threading.Lock()
        self._open()

    @property
    def pid(self) -> int:
        """The process id of the warden as it is now."""
        return self._child.pid

    def started(self, group: int) -> None:
        """Tell it of a process group to end with this process."""
        with self._lock:
            self._groups.add(group)
            self._tell(f"start {group}\n")

    def ended(self, group: int) -> None:
        """Tell it that a process group is gone, and its number anybody's."""
        with self._lock:
            if group in self._groups:
                self._groups.discard(group)
                self._tell(f"end {group}\n")

    def close(self) -> None:
        """Have it do its duty now; return when it has, or is no use. Harmless when it is closed already."""
        with self._lock:
            if not self._pipe.closed:
                self._pipe.close()
                try:
                    self._child.wait(DUTY_S)
                except subprocess.TimeoutExpired:  # somebody stopped it
                    self._child.kill()
                    self._child.wait()

    def _open(self) -> None:
        nothing = subprocess.DEVNULL
        self._child = subprocess.Popen(
            ["/bin/sh", "-c", _WATCH, f"{MARK}={self.mark}"],
            stdin=subprocess.PIPE,
            stdout=nothing,
            stderr=nothing,
            bufsize=0,
            cwd="/",
            env={"PATH": os.defpath, "SCRATCH": self._scratch},
            start_new_session=True,
        )
        assert self._child.stdin is not None
        self._pipe = self._child.stdin

    def _tell(self, line: str) -> None:
        if self._pipe.closed:
            return
        try:
            self._pipe.write(line.encode())
        except BrokenPipeError:  # somebody killed it; another takes its place
            self._pipe.close()
            self._child.wait()
            self._open()
            self._pipe.write("".join(f"start {group}\n" for group in self._groups).encode())


def bound(command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the command so that it dies with this thread, where that can be had; what will not run stays as it is."""
    if threading.current_thread() is not threading.main_thread() or not command:
        return list(command)
    binder, found = _binder(), shutil.which(command[0], path=environment.get("PATH", os.defpath))
    if not binder or found is None or not _will_run(found):
        return list(command)  # the error, if there is one, is then about the command and not about the binder
    return [binder, "--pdeathsig", "KILL", "--", found, *command[1:]]


@functools.cache
def _binder() -> str:
    """Return the program that arms the kernel, empty where there is none that can."""
    found = shutil.which("setpriv", path=os.defpath) if sys.platform == "linux" else None
    if found is None:
        return ""
    nothing = subprocess.DEVNULL
    probe = [found, "--pdeathsig", "KILL", "--", found, "--version"]  # busybox has one that cannot
    works = subprocess.run(probe, stdin=nothing, stdout=nothing, stderr=nothing).returncode == 0
    return found if works else ""


def _will_run(path: str) -> bool:
    """Say whether a file is sure to be executable: a program for this kind of machine, or a script for one."""
    try:
        head = _head(path)
        if head[:2] == b"#!":
            interpreter = head[2:].split(b"\n")[0].split()
            return bool(interpreter) and os.access(interpreter[0], os.X_OK)
        ours = _head(sys.executable)
    except OSError:
        return False
    return head[:4] == b"\x7fELF" and (head[4:6], head[18:20]) == (ours[4:6], ours[18:20])


def _head(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(HEAD_BYTES)
