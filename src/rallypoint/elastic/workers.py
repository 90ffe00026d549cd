"""A worker as a process: started, watched, signalled with all its children, and gone when its agent is.

Every worker leads a session, and so a process group, of its own: signals reach what it starts (data loaders), and a
Ctrl-C in the terminal reaches only the agent, which decides. An exit is seen by a descriptor that becomes readable.
The dead leader is kept until `close`, so that its number cannot pass to a stranger while its group may be signalled.

That it ends with its agent is the work of warden.py.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence

from rallypoint.elastic.warden import MARK, Warden, bound
from rallypoint.errors import RallypointError

__all__ = ["Worker", "WorkerUnstartable", "describe_exit", "exit_code_of"]

CLOSE_S = 10.0
"""How long a process that was killed may take to be gone."""


class WorkerUnstartable(RallypointError):
    """A worker's command cannot be run at all; trying again changes nothing."""

    command: tuple[str, ...]
    why: str

    def __init__(self, *, command: Sequence[str], why: str) -> None:
        shown = " ".join(command[:4]) + (" ..." if len(command) > 4 else "")
        super().__init__(
            f"the worker's command cannot be started: {shown[:200]!r}: {why}. "
            f"Is it spelled right, is it there on this machine, and may it be executed?",
            command=tuple(command),
            why=why,
        )


def describe_exit(code: int) -> str:
    """Say in words how a process ended; a negative code is a signal."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name} ({-code})"
    except ValueError:
        return f"killed by signal {-code}"


def exit_code_of(code: int) -> int:
    """Return the exit code to pass on: as it is, or 128 and the number of the signal, as shells do."""
    return code if code >= 0 else 128 - code


class Worker:
    """One process of a job; it runs from `start` until it ends, and is forgotten by `close`.

    `environment` is all that it gets, plus the mark of its warden. `stdout` and `stderr` are descriptors, None for the
    agent's own; its standard input is empty. `start` raises WorkerUnstartable.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        label: str,
        stdout: int | None = None,
        stderr: int | None = None,
        warden: Warden | None = None,
    ) -> None:
        self.command = list(command)
        self.label = label
        self._environment = dict(environment)
        self._stdout, self._stderr = stdout, stderr
        self._warden = warden
        self._popen: subprocess.Popen[bytes] | None = None
        self._descriptor = -1
        self._has_pidfd = False
        self._code: int | None = None
        self._started_at = self._ended_at = 0.0

    def __repr__(self) -> str:
        state = "not started" if self._popen is None else f"pid {self.pid}"
        return f"<Worker {self.label} {state}{'' if self._code is None else ', ' + describe_exit(self._code)}>"

    def start(self) -> None:
        """Start the process; it may be done once, from a thread that lives as long as the worker shall."""
        if self._popen is not None:
            raise ValueError(f"worker {self.label} was started already")
        _keep_the_dead()
        mark = {} if self._warden is None else {MARK: self._warden.mark}
        marking = contextlib.nullcontext() if self._warden is None else self._warden.marking()
        try:
            command = bound(self.command, self._environment)
            with marking:
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
        if self._warden is not None:
            self._warden.started(self._popen.pid)
        self._started_at = time.monotonic()
        self._descriptor, self._has_pidfd = _exit_descriptor(self._popen)

    @property
    def pid(self) -> int:
        """The process id, which is also that of its group and session."""
        return self._running.pid

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the worker has ended."""
        return self._descriptor if self._running else -1

    def poll(self) -> int | None:
        """Return how it ended (an exit code, or a signal as a negative number), None while it runs."""
        if self._code is None:
            code = _look(self.pid) if self._has_pidfd else self._running.returncode
            if code is not None:
                self._code, self._ended_at = code, time.monotonic()
        return self._code

    @property
    def uptime_s(self) -> float:
        """How long it has run, until its end was seen."""
        until = time.monotonic() if self._code is None else self._ended_at
        return until - self._started_at if self._running else 0.0

    def signal(self, signum: int) -> None:
        """Send a signal to the worker and all of its group; also when it has ended and children of it have not."""
        pid = self.pid
        if self._descriptor >= 0:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter: only zombies, on macOS
                os.killpg(pid, signum)

    def kill(self) -> None:
        """End the worker and all of its group at once."""
        self.signal(signal.SIGKILL)

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Kill what is left of it and of its group, and forget it; say whether it is gone.

        It is not when the kernel holds it for longer (a file system or a device that hangs): call again, or leave it
        to the warden. Harmless for a worker that never started or was closed.
        """
        if self._popen is None or self._descriptor < 0:
            return True
        self.kill()
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            return False
        self.poll()
        if self._warden is not None:
            self._warden.ended(self.pid)
        self._popen.wait()
        os.close(self._descriptor)
        self._descriptor = -1
        return True

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        if self._popen is None:
            raise ValueError(f"worker {self.label} has not been started")
        return self._popen


def _look(pid: int) -> int | None:
    """Return how a child ended, None while it runs, and leave it as it is."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _exit_descriptor(popen: subprocess.Popen[bytes]) -> tuple[int, bool]:
    """Return a descriptor that is readable once the child has ended, and whether it is the kernel's own."""
    try:
        return os.pidfd_open(popen.pid), True
    except (AttributeError, OSError):
        reader, writer = os.pipe()

    def wait() -> None:
        popen.wait()
        os.close(writer)

    threading.Thread(target=wait, name=f"exit of {popen.pid}", daemon=True).start()
    return reader, False


def _keep_the_dead() -> None:
    """Undo an inherited "ignore my children", by which how they ended would be lost."""
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
