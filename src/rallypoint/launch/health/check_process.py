"""One run of the health check: a shell in a process group of its own, killed with its children at the timeout.

A thread starts the command, reads its output and waits for its end, so that a check neither blocks the agent's loop nor
needs a place in it. The check ends when the shell does: what it left in the background is killed.

A process that the kernel blocks cannot be killed, as is usual for programs that ask a broken device. It is left behind,
and the next check waits for its end before it starts another one: until then the check fails.

Rejected: to write the output to a file. A check that prints without end would fill the disk.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping

from rallypoint.core.policy.health_policy import NOT_EXECUTABLE, NOT_FOUND, CheckResult
from rallypoint.deadline import Deadline
from rallypoint.launch.output.stream import last_lines
from rallypoint.launch.workers.orphan_reaper import OrphanReaper
from rallypoint.launch.workers.worker_process import WorkerProcess, WorkerUnstartable, describe_exit
from rallypoint.readiness import wait_readable
from rallypoint.text import printable

__all__ = ["HealthCheck"]

TAIL_BYTES = 8192
"""How much of the output is kept."""

LINES, LINE_CHARS = 3, 200
"""How much of it is shown: the last lines that are not empty."""

KILL_S = 1.0
"""How long a killed check may take to exit; then it is blocked by the kernel, and left behind."""


class HealthCheck:
    """Runs the command once, from its creation on; `on_end` is called in another thread when `result` is there."""

    def __init__(
        self,
        command: str,
        environment: Mapping[str, str],
        timeout_s: float,
        reaper: OrphanReaper | None,
        on_end: Callable[[], object],
        blocked: WorkerProcess | None = None,
    ) -> None:
        self._deadline = Deadline(timeout_s)
        self._began_at = time.monotonic()
        self._on_end = on_end
        self._cancelled, self._cancel = os.pipe()
        self.result: CheckResult | None = None
        """How it ended; None while it runs."""

        self.blocked = blocked
        """A process, of this check or an earlier one, that the kernel does not let end."""

        arguments = ["/bin/sh", "-c", command], dict(environment), reaper
        self._thread = threading.Thread(target=self._run, args=arguments, name="health check", daemon=True)
        self._thread.start()

    @property
    def running_s(self) -> float | None:
        """How long it has been running; None if it has ended."""
        return time.monotonic() - self._began_at if self.result is None else None

    def close(self) -> None:
        """Kill the check if it runs, and release it."""
        if self._cancel < 0:
            return
        os.close(self._cancel)  # the thread sees the end of the pipe
        self._cancel = -1
        self._thread.join()  # within KILL_S
        os.close(self._cancelled)

    # The thread of the check

    def _run(self, command: list[str], environment: dict[str, str], reaper: OrphanReaper | None) -> None:
        try:
            self.result = self._result(command, environment, reaper)
        except OSError as error:  # no descriptor left, for example
            self.result = CheckResult(None, printable(f"it cannot be run: {error.strerror or error}"))
        finally:
            self._on_end()

    def _result(self, command: list[str], environment: dict[str, str], reaper: OrphanReaper | None) -> CheckResult:
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        try:
            with os.fdopen(writer, "wb"):
                process = WorkerProcess(command, environment, "health check", writer, writer, reaper)
                result = self._await_blocked() or self._start(process)
            return result or self._wait(process, reader)
        finally:
            os.close(reader)

    def _await_blocked(self) -> CheckResult | None:
        """Wait for the end of an earlier process; return the failure of this check if it stays blocked."""
        if self.blocked is None or self.blocked.close(0.0):
            self.blocked = None
            return None
        wait_readable(self.blocked, self._cancelled, timeout_s=self._deadline.remaining())
        pid = self.blocked.pid
        if self.blocked.close(0.0):
            self.blocked = None
            return None
        return CheckResult(None, f"process {pid} of an earlier check is killed, and still blocked by the kernel")

    def _start(self, process: WorkerProcess) -> CheckResult | None:
        """Start the command; return the failure if there is no shell."""
        try:
            process.start()
        except WorkerUnstartable as error:
            missing = isinstance(error.__cause__, FileNotFoundError)
            return CheckResult(NOT_FOUND if missing else NOT_EXECUTABLE, printable(error.why))
        return None

    def _wait(self, process: WorkerProcess, reader: int) -> CheckResult:
        """Wait for the end of the command, and kill what is left of it."""
        tail, is_open = b"", True
        while process.poll() is None and not self._deadline.expired():
            wait_readable(
                process, self._cancelled, *([reader] if is_open else []), timeout_s=self._deadline.remaining()
            )
            if wait_readable(self._cancelled, timeout_s=0.0):
                break
            tail, is_open = _read(reader, tail)
        code = process.poll()
        if not process.close(KILL_S):
            self.blocked = process
        lines = _shown(_read(reader, tail)[0])
        if code is None:
            return CheckResult(None, f"no end after {self._deadline.timeout_s:g} s, killed", lines)
        return CheckResult(code, describe_exit(code), lines)


def _read(reader: int, tail: bytes) -> tuple[bytes, bool]:
    """Return the end of the output so far, and whether there may be more."""
    with contextlib.suppress(BlockingIOError):
        data = os.read(reader, 8 * TAIL_BYTES)
        return (tail + data)[-TAIL_BYTES:], bool(data)
    return tail, True


def _shown(output: bytes) -> tuple[str, ...]:
    """Return the last lines of the output, fit to be shown."""
    lines = [line.strip() for line in last_lines(output) if line.strip()]
    return tuple(printable(line)[:LINE_CHARS] for line in lines[-LINES:])
