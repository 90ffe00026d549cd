"""The failures of one node's workers in one round: what is kept of them, and what is said of them in the end."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rallypoint.elastic.events import Events
from rallypoint.elastic.failure import Failure, report
from rallypoint.elastic.logs import Logs
from rallypoint.elastic.workers import exit_code_of

__all__ = ["Losses"]


class Losses:
    """Failures of workers that were not started again since, one a process."""

    def __init__(self) -> None:
        self._kept: list[Failure] = []

    def __bool__(self) -> bool:
        return bool(self._kept)

    def __contains__(self, failure: object) -> bool:
        return failure in self._kept

    @property
    def last(self) -> Failure:
        """The one that was kept last."""
        return self._kept[-1]

    def keep(self, failures: Sequence[Failure]) -> None:
        """Keep failures; of a worker that was on its way out, what is known last."""
        pids = {failure.pid for failure in failures}
        self._kept = [*(failure for failure in self._kept if failure.pid not in pids), *failures]

    def forget(self, ranks: Collection[int] | None = None) -> None:
        """Forget those of workers that are started again, or all."""
        self._kept = [] if ranks is None else [failure for failure in self._kept if failure.rank not in ranks]

    def report(self, first: Failure, events: Events, logs: Logs) -> int:
        """Say what the run failed of, and fold these under it; return the exit code."""
        others = [other for other in self._kept if (other.host, other.pid) != (first.host, first.pid)]
        words = first.summary() if first.pid else f"rank {first.rank} on {first.node}: {first.message}"
        text = report(first, others) if first.pid else ""
        events.fail("failure", words, text, failure=first.facts())
        logs.record(first, others)
        return exit_code_of(first.code)
