"""The process of a worker: started, watched, and signalled together with its children.

Every worker leads its own session, and so its own process group: signals reach its children (data loaders), and Ctrl-C
in the terminal reaches only the agent, which decides what to do. A descriptor becomes readable when the worker exits.
The zombie is kept until `close`, so that its process id cannot be reused while its group may be signalled.

orphan_reaper.py kills workers whose agent has died.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from rallypoint.errors import RallypointError, WithFields
from rallypoint.launch.workers.orphan_reaper import MARK_VARIABLE, OrphanReaper, bind_to_parent
from rallypoint.readiness import wait_readable

__all__ = ["WorkerProcess", "WorkerUnstartable", "describe_exit", "exit_code_of"]

CLOSE_S = 10.0
"""How long a killed process may take to exit."""


class WorkerUnstartable(WithFields, RallypointError):
    """A worker's command cannot be executed; a retry would not help."""

    command: Sequence[str]
    why: str

    def _sentence(self) -> str:
        shown = " ".join(self.command[:4]) + (" ..." if len(self.command) > 4 else "")
        return (
            f"cannot start the worker's command: {shown[:200]!r}: {self.why}. "
            f"Is it spelled correctly, installed on this machine, and executable?"
        )


def describe_exit(code: int) -> str:
    """Return an exit code in words; a negative code is a signal."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name} ({-code})"
    except ValueError:
        return f"killed by signal {-code}"


def exit_code_of(code: int) -> int:
    """Return the exit code for a shell: the code itself, or 128 plus the number of the signal."""
    return code if code >= 0 else 128 - code


class WorkerProcess:
    """One worker process; `start` starts it, and `close` releases it.

    `environment` is its complete environment, except for the mark of `reaper`. `stdout` and `stderr` are descriptors,
    None for the agent's own; stdin is empty. `cpus` are those that it may use, None for the agent's. `start` raises
    WorkerUnstartable.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        label: str,
        stdout: int | None = None,
        stderr: int | None = None,
        reaper: OrphanReaper | None = None,
        cpus: frozenset[int] | None = None,
    ) -> None:
        self.command = list(command)
        self.label = label
        self._environment = dict(environment)
        self._stdout, self._stderr = stdout, stderr
        self._reaper = reaper
        self._cpus = cpus
        self._popen: subprocess.Popen[bytes] | None = None
        self._descriptor = -1
        self._has_pidfd = False
        self._code: int | None = None
        self._started_at = self._ended_at = 0.0

    def __repr__(self) -> str:
        state = "not started" if self._popen is None else f"pid {self.pid}"
        return f"<Worker {self.label} {state}{'' if self._code is None else ', ' + describe_exit(self._code)}>"

    def start(self) -> None:
        """Start the process; call it once, in a thread that outlives the worker."""
        if self._popen is not None:
            raise ValueError(f"worker {self.label} has already been started")
        _keep_zombies()
        mark = {} if self._reaper is None else {MARK_VARIABLE: self._reaper.mark}
        marking = contextlib.nullcontext() if self._reaper is None else self._reaper.marking()
        try:
            command = bind_to_parent(self.command, self._environment)
            with marking, _affinity(self._cpus):
                self._popen = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=self._stdout,
                    stderr=self._stderr,
                    env={**self._environment, **mark},
                    start_new_session=True,
                )
        except (OSError, ValueError, IndexError) as error:
            why = (error.strerror if isinstance(error, OSError) else "") or str(error)
            raise WorkerUnstartable(command=self.command, why=why if self.command else "it is empty") from error
        if self._reaper is not None:
            self._reaper.started(self._popen.pid)
        self._started_at = time.monotonic()
        self._descriptor, self._has_pidfd = _exit_descriptor(self._popen)

    @property
    def pid(self) -> int:
        """Process id, also of its process group and session."""
        return self._running.pid

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the worker exits."""
        return self._descriptor if self._running else -1

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while it runs."""
        if self._code is None:
            code = _peek_exit_code(self.pid) if self._has_pidfd else self._running.returncode
            if code is not None:
                self._code, self._ended_at = code, time.monotonic()
        return self._code

    @property
    def uptime_s(self) -> float:
        """How long it has run, or ran until its exit was seen."""
        until = time.monotonic() if self._code is None else self._ended_at
        return until - self._started_at if self._running else 0.0

    def signal(self, signum: int) -> None:
        """Send a signal to the worker's process group, even if only children of it are left."""
        pid = self.pid
        if self._descriptor >= 0:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter: only zombies, on macOS
                os.killpg(pid, signum)

    def kill(self) -> None:
        """Kill the worker and its process group."""
        self.signal(signal.SIGKILL)

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Kill the worker and its process group, and release it; return whether it has exited.

        It has not if the kernel blocks it for longer (a hanging file system or device): call again, or leave it to the
        orphan reaper. Does nothing if the worker never started or is closed.
        """
        if self._popen is None or self._descriptor < 0:
            return True
        self.kill()
        if not wait_readable(self._descriptor, timeout_s=timeout_s):
            return False
        self.poll()
        if self._reaper is not None:
            self._reaper.ended(self.pid)
        self._popen.wait()
        os.close(self._descriptor)
        self._descriptor = -1
        return True

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        if self._popen is None:
            raise ValueError(f"worker {self.label} has not been started")
        return self._popen


@contextlib.contextmanager
def _affinity(cpus: frozenset[int] | None) -> Iterator[None]:
    """Run this thread on some CPUs only: a process that it starts stays there."""
    if cpus is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _peek_exit_code(pid: int) -> int | None:
    """Return the exit code of a child, or None while it runs, without reaping it."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _exit_descriptor(popen: subprocess.Popen[bytes]) -> tuple[int, bool]:
    """Return a descriptor that becomes readable when the child exits, and whether it is a pidfd."""
    try:
        return os.pidfd_open(popen.pid), True
    except (AttributeError, OSError):
        reader, writer = os.pipe()

    def wait() -> None:
        popen.wait()
        os.close(writer)

    threading.Thread(target=wait, name=f"exit of {popen.pid}", daemon=True).start()
    return reader, False


def _keep_zombies() -> None:
    """Reset SIGCHLD if it is inherited as ignored, which would discard the exit codes of children."""
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
