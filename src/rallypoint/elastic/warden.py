"""Who ends an agent's workers when the agent has ended without a word (SIGKILL): three ways, and none needs another.

    setpriv       where it is installed, arms the kernel (PR_SET_PDEATHSIG) and becomes the worker
    a cgroup      where one can be made (version 2, writable): all that workers start is in it, and is killed at once
    the warden    a shell at the other end of a pipe, which outlives the agent and kills what carries its mark

The kernel looks at the *thread* that started a worker, so it is armed from the main thread only. The mark is in the
environment of every worker and, on Linux, in its limits, where nobody clears it (reaper.py): a worker may have been
started and not told yet, and what it started may have left its group, or its environment. For that the warden does its
duty also when all is well. Only where limits cannot be marked are process groups killed by their numbers, which could
be a stranger's by then. A warden that is killed is replaced; only if it and the agent are killed at the same moment may
something that left its group live on.
Rejected: `preexec_fn`, which copies the agent first: 2 ms a worker and not 0.2, and unsafe beside threads.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import secrets
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rallypoint.elastic import cgroup, reaper

__all__ = ["MARK", "Warden", "bound"]

MARK = "RALLYPOINT_WARDEN"
"""The variable by which a warden knows the workers of its agent."""

HEAD_BYTES = 256
"""How much of an executable is read to see whether it will run."""

DUTY_S = 2.0
"""How long a warden may take to look at all processes, and to kill."""

REPLACED = 10
"""How many wardens in a row may be killed before nobody is put in their place any more."""

RLIMIT_LOCKS = 10
"""The limit that is the mark: inherited by all, used by nobody; Python has no name for it."""

_spawning = threading.RLock()
"""Held while the limits of this process are those of a child that is being started."""

_WATCH = """
trap '' HUP INT QUIT TERM
groups=' '
while read -r verb group; do
    case $verb in
    start) groups="$groups$group " ;;
    end) groups="${groups%%" $group "*} ${groups#*" $group "}" ;;
    esac
done
[ -z "$CGROUP" ] || echo 1 > "$CGROUP/cgroup.kill"
[ -n "$LIMIT" ] || for group in $groups; do kill -s KILL -- "-$group"; done
marked=$(grep -ls -e "^Max file locks  *${LIMIT:-none} " /proc/[0-9]*/limits; grep -lsF -e "$0" /proc/[0-9]*/environ)
[ -z "$marked" ] || "$PYTHON" -I -S "$REAPER" "$0" "$LIMIT"
for again in 1 2 3; do
    [ -z "$SCRATCH" ] || rm -rf -- "$SCRATCH"
done
for again in 1 2 3 4 5 6 7 8 9; do
    [ -d "$CGROUP" ] || break
    find "$CGROUP" -depth -type d -exec rmdir {} + || sleep 0.1
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
        self._limit = _free_limit()
        self._scratch = str(scratch or "")
        self._cgroup = cgroup.make_cgroup(f"rallypoint-{self.mark}")
        self._groups: set[int] = set()
        self._lock = threading.RLock()
        self._replaced = 0
        self._open()

    @property
    def pid(self) -> int:
        """The process id of the warden as it is now."""
        return self._child.pid

    @contextlib.contextmanager
    def marking(self) -> Iterator[None]:
        """Let a process that is started in this block, and all that it starts, be known by its limits and cgroup."""
        with self._lock, _limited(self._limit):
            inside = bool(self._cgroup) and cgroup.enter(self._cgroup)
            try:
                yield
            finally:
                if inside and not cgroup.leave(self._cgroup):  # then it must not be killed: this process is in it
                    self._cgroup = ""
                    self._child.kill()
                    self._replace()

    def started(self, group: int) -> None:
        """Tell it of a child that leads a process group, to end with this process."""
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
            if self._pipe.closed:
                return
            self._pipe.close()
            if self._awaited() < 0:  # somebody killed it: another does its duty
                self._open()
                self._pipe.close()
                self._awaited()
            if self._cgroup:
                with contextlib.suppress(OSError):  # the warden has removed it, if it was not killed itself
                    os.rmdir(self._cgroup)

    def _awaited(self) -> int:
        """Wait for its end, which it is given if somebody stopped it; return its exit code."""
        try:
            return self._child.wait(DUTY_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
            return 0

    def _open(self) -> None:
        nothing = subprocess.DEVNULL
        told = {"SCRATCH": self._scratch, "CGROUP": self._cgroup, "LIMIT": str(self._limit or "")}
        with _limited(resource.RLIM_INFINITY):  # this process may itself be marked by another agent's warden
            self._child = subprocess.Popen(
                ["/bin/sh", "-c", _WATCH, f"{MARK}={self.mark}"],
                stdin=subprocess.PIPE,
                stdout=nothing,
                stderr=nothing,
                bufsize=0,
                cwd="/",
                env={"PATH": os.defpath, "PYTHON": sys.executable, "REAPER": os.path.abspath(reaper.__file__), **told},
                start_new_session=True,
            )
        assert self._child.stdin is not None
        self._pipe = self._child.stdin
        child = self._child
        threading.Thread(target=self._watch, args=(child,), name=f"end of warden {child.pid}", daemon=True).start()

    def _watch(self, child: subprocess.Popen[bytes]) -> None:
        """Replace a warden as soon as somebody has killed it."""
        child.wait()
        with self._lock, contextlib.suppress(OSError):
            if child is self._child and not self._pipe.closed and self._replaced < REPLACED:
                self._replace()

    def _replace(self) -> None:
        self._replaced += 1
        self._pipe.close()
        self._child.wait()
        self._open()
        self._pipe.write("".join(f"start {group}\n" for group in self._groups).encode())

    def _tell(self, line: str) -> None:
        if self._pipe.closed:
            return
        try:
            self._pipe.write(line.encode())
        except BrokenPipeError:  # somebody killed it a moment ago
            self._replace()


def bound(command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the command so that it dies with this thread, where that can be had; what will not run stays as it is."""
    if threading.current_thread() is not threading.main_thread() or not command:
        return list(command)
    binder, found = _binder(), shutil.which(command[0], path=environment.get("PATH", os.defpath))
    if not binder or found is None or not _will_run(found):
        return list(command)  # the error, if there is one, is then about the command and not about the binder
    return [binder, "--pdeathsig", "KILL", "--", found, *command[1:]]


def _free_limit() -> int | None:
    """Return a limit of file locks that nobody else has, None where a process cannot be marked by one."""
    if sys.platform != "linux":
        return None
    limit = (1 << 40) + secrets.randbits(60)
    try:
        with _limited(limit), open("/proc/self/limits", encoding="ascii") as limits:
            return limit if f" {limit} " in limits.read() else None
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def _limited(limit: int | None) -> Iterator[None]:
    """Have another limit of file locks in this block, where there is such a thing."""
    if limit is None or sys.platform != "linux":
        yield
        return
    with _spawning:
        soft, hard = resource.getrlimit(RLIMIT_LOCKS)
        resource.setrlimit(RLIMIT_LOCKS, (hard if limit == resource.RLIM_INFINITY else limit, hard))
        try:
            yield
        finally:
            resource.setrlimit(RLIMIT_LOCKS, (soft, hard))


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
