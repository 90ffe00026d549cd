"""The orphan reaper: kills the workers of an agent that was killed (SIGKILL), by three independent means.

    setpriv       if installed, sets PR_SET_PDEATHSIG and then executes the worker
    a cgroup      if one can be created (version 2, writable): holds all workers and their children, killed at once
    the reaper    a shell at the other end of a pipe, which outlives the agent and kills all processes with its mark

PR_SET_PDEATHSIG refers to the *thread* that started the worker, so it is used in the main thread only. The mark is in
the environment of every worker and, on Linux, in its resource limits, which nothing clears (kill_marked.py): a worker
may have started before the reaper knew it, and its children may have left its process group or cleared the environment.
To kill such children, the reaper also runs after a normal end. Only if limits cannot be marked does it kill process
groups by number, which may have been reused by then. A reaper that is killed is replaced; a process that left its group
survives only if the reaper and the agent are killed at the same moment.
Rejected: `preexec_fn`, which forks the whole agent: 2 ms per worker instead of 0.2, and unsafe with threads.
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

from rallypoint.launch.workers import cgroup, kill_marked

__all__ = ["MARK_VARIABLE", "OrphanReaper", "bind_to_parent"]

MARK_VARIABLE = "RALLYPOINT_WARDEN"
"""Environment variable that marks the workers of an agent."""

HEAD_BYTES = 256
"""How much of an executable is read to check whether it will run."""

REAP_S = 2.0
"""How long a reaper may take to scan all processes and kill the marked ones."""

REPLACED = 10
"""How many times a killed reaper is replaced."""

RLIMIT_LOCKS = 10
"""The resource limit used as mark: inherited by children, without effect; Python has no constant for it."""

_spawning = threading.RLock()
"""Held while this process has the limits of a child that is being started."""

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
    [ -z "$RECORDS" ] || rm -rf -- "$RECORDS"
done
for again in 1 2 3 4 5 6 7 8 9; do
    [ -d "$CGROUP" ] || break
    find "$CGROUP" -depth -type d -exec rmdir {} + || sleep 0.1
done
"""


class OrphanReaper:
    """The process that kills the remaining workers of an agent, however the agent ends.

    It shares only a pipe with the agent, reaps when the agent exits or calls `close`, then exits, and is replaced if it
    is killed. Only the process that created it may use it. `scratch` is a directory to remove after the workers, and
    `records` another one; they need not exist yet.
    """

    def __init__(self, scratch: Path | None = None, records: Path | None = None) -> None:
        self.mark = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._limit = _free_limit()
        self._scratch, self._records = str(scratch or ""), str(records or "")
        self._cgroup = cgroup.make_cgroup(f"rallypoint-{self.mark}")
        self._groups: set[int] = set()
        self._lock = threading.RLock()
        self._replaced = 0
        self._open()

    @property
    def pid(self) -> int:
        """Process id of the current reaper."""
        return self._child.pid

    @contextlib.contextmanager
    def marking(self) -> Iterator[None]:
        """Mark processes started in this block, and their children, by their limits and cgroup."""
        with self._lock, _limited(self._limit):
            inside = bool(self._cgroup) and cgroup.enter(self._cgroup)
            try:
                yield
            finally:
                if inside and not cgroup.leave(self._cgroup):  # do not kill the cgroup: this process is in it
                    self._cgroup = ""
                    self._child.kill()
                    self._replace()

    def started(self, group: int) -> None:
        """Register the process group of a child, to be killed with this process."""
        with self._lock:
            self._groups.add(group)
            self._tell(f"start {group}\n")

    def ended(self, group: int) -> None:
        """Unregister a process group that has ended: its number may be reused."""
        with self._lock:
            if group in self._groups:
                self._groups.discard(group)
                self._tell(f"end {group}\n")

    def close(self) -> None:
        """Kill all marked processes now, and wait until that is done, up to REAP_S. Idempotent."""
        with self._lock:
            if self._pipe.closed:
                return
            self._pipe.close()
            if self._wait() < 0:  # it was killed: use a replacement
                self._open()
                self._pipe.close()
                self._wait()
            if self._cgroup:
                with contextlib.suppress(OSError):  # usually the reaper has removed it
                    os.rmdir(self._cgroup)

    def _wait(self) -> int:
        """Wait for the reaper to exit, kill it if it hangs, and return its exit code."""
        try:
            return self._child.wait(REAP_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
            return 0

    def _open(self) -> None:
        nothing = subprocess.DEVNULL
        directories = {"SCRATCH": self._scratch, "RECORDS": self._records}
        variables = {**directories, "CGROUP": self._cgroup, "LIMIT": str(self._limit or "")}
        with _limited(resource.RLIM_INFINITY):  # this process may itself be marked by another agent's reaper
            self._child = subprocess.Popen(
                ["/bin/sh", "-c", _WATCH, f"{MARK_VARIABLE}={self.mark}"],
                stdin=subprocess.PIPE,
                stdout=nothing,
                stderr=nothing,
                bufsize=0,
                cwd="/",
                env={
                    "PATH": os.defpath,
                    "PYTHON": sys.executable,
                    "REAPER": os.path.abspath(kill_marked.__file__),
                    **variables,
                },
                start_new_session=True,
            )
        assert self._child.stdin is not None
        self._pipe = self._child.stdin
        child = self._child
        threading.Thread(target=self._watch, args=(child,), name=f"exit of reaper {child.pid}", daemon=True).start()

    def _watch(self, child: subprocess.Popen[bytes]) -> None:
        """Replace the reaper as soon as it is killed."""
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
        except BrokenPipeError:  # it was just killed
            self._replace()


def bind_to_parent(command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return a command that is killed when this thread ends, if possible; otherwise the command as it is."""
    if threading.current_thread() is not threading.main_thread() or not command:
        return list(command)
    binder, found = _binder(), shutil.which(command[0], path=environment.get("PATH", os.defpath))
    if not binder or found is None or not _will_run(found):
        return list(command)  # so that an error names the command, not the binder
    return [binder, "--pdeathsig", "KILL", "--", found, *command[1:]]


def _free_limit() -> int | None:
    """Return an unused value for the limit on file locks, or None if processes cannot be marked by it."""
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
    """Change the limit on file locks in this block, on Linux."""
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
    """Return the path of a setpriv that can set PR_SET_PDEATHSIG, or empty."""
    found = shutil.which("setpriv", path=os.defpath) if sys.platform == "linux" else None
    if found is None:
        return ""
    nothing = subprocess.DEVNULL
    probe = [found, "--pdeathsig", "KILL", "--", found, "--version"]  # busybox's setpriv has no --pdeathsig
    works = subprocess.run(probe, stdin=nothing, stdout=nothing, stderr=nothing).returncode == 0
    return found if works else ""


def _will_run(path: str) -> bool:
    """Return whether a file is certain to run: an ELF file for this machine, or a script with an interpreter."""
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
