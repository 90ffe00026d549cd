"""Errors of `rallypoint.launch`; they survive pickling, as all errors do."""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.errors import RallypointError, WithFields

__all__ = ["LaunchFailed", "LaunchTimeout", "WorkerFailed"]


class WorkerFailed(WithFields, RallypointError):
    """A worker of `rallypoint.launch` failed, the first of them; `code` is its exit code, negative for a signal.

    `how` is the same in words, `message` the error, and `traceback` the text of its traceback, if it has one. `stderr`
    are the last lines of its standard error.
    """

    function: str
    rank: int
    pid: int
    code: int
    how: str
    message: str
    traceback: str = ""
    stderr: Sequence[str] = ()

    @property
    def signal(self) -> int | None:
        """The signal that killed the worker, or None."""
        return -self.code if self.code < 0 else None

    def _sentence(self) -> str:
        first = self.message.strip().partition("\n")[0]
        cause = "" if first in ("", self.how) else f": {first}"
        pid = f" (pid {self.pid})" if self.pid else ""
        return f"rank {self.rank} of {self.function}{pid} failed: {self.how}{cause}"

    def __str__(self) -> str:
        more = self.traceback.strip() or "\n".join(self.stderr).strip()
        return super().__str__() + (f"\n\n{more}" if more else "")


class LaunchTimeout(WithFields, RallypointError, TimeoutError):
    """A function has not returned in all workers within the timeout; `running` are the ranks in which it has not."""

    function: str
    timeout_s: float
    running: Sequence[int]

    def _sentence(self) -> str:
        ranks = f"rank{'s' * (len(self.running) > 1)} {', '.join(map(str, self.running))}"
        late = f"has not returned on {ranks}" if self.running else "has returned, but not all workers have exited"
        return f"{self.function} {late} within the timeout of {self.timeout_s:g} s; the workers were ended"


class LaunchFailed(WithFields, RallypointError):
    """The launcher failed, and not a worker."""

    function: str
    why: str

    def _sentence(self) -> str:
        return f"{self.function} could not be run: {self.why}"
