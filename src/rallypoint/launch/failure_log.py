"""The failures of one node's workers in one round, and the report at the end of a failed run."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from rallypoint.launch.events import Events
from rallypoint.launch.failure_report import report
from rallypoint.launch.failures import Failure
from rallypoint.launch.output.log_files import LogFiles
from rallypoint.launch.workers.worker_process import exit_code_of

__all__ = ["FailureLog"]


class FailureLog:
    """Failures of workers that have not been restarted since, one per process."""

    def __init__(self) -> None:
        self._failures: list[Failure] = []

    def __bool__(self) -> bool:
        return bool(self._failures)

    def __iter__(self) -> Iterator[Failure]:
        return iter(self._failures)

    def __contains__(self, failure: object) -> bool:
        return failure in self._failures

    @property
    def last(self) -> Failure:
        """The failure added last."""
        return self._failures[-1]

    def add(self, failures: Sequence[Failure]) -> None:
        """Add failures; a later one of the same process replaces the earlier, unless it hung, and was killed for it."""
        hung = {failure.pid for failure in self._failures if failure.hung}
        new = [failure for failure in failures if failure.pid not in hung]
        pids = {failure.pid for failure in new}
        self._failures = [*(failure for failure in self._failures if failure.pid not in pids), *new]

    def forget(self, ranks: Collection[int] | None = None) -> None:
        """Forget the failures of workers that are restarted, or all."""
        self._failures = [] if ranks is None else [failure for failure in self._failures if failure.rank not in ranks]

    def report(self, first: Failure, events: Events, logs: LogFiles) -> int:
        """Report the first failure of the run, followed by the others; return the exit code."""
        others = [other for other in self._failures if (other.host, other.pid) != (first.host, first.pid)]
        started = first.pid or first.rank < 0
        message = first.summary() if started else f"rank {first.rank} on {first.node}: {first.message}"
        text = report(first, others) if first.pid else ""
        events.fail("failure", message, text, failure=first.facts())
        logs.record(first, others)
        return exit_code_of(first.code)
