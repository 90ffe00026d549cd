"""The recent rounds and failures of all runs, as a server has seen them since it started. Bounded; lost with it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import msgspec

from rallypoint.core.run_report import FailureReport
from rallypoint.server.status.model import PastFailure, PastRound
from rallypoint.server.status.reports import RunSource

__all__ = ["MAX_FAILURES", "MAX_ROUNDS", "History"]

MAX_ROUNDS, MAX_FAILURES = 50, 20
"""Rounds and failures that are remembered, of all runs together."""


class RoundRecord:
    """One round."""

    __slots__ = ("formed_at", "nodes", "number", "over", "over_at", "reason", "run", "scope")

    def __init__(self, run: str, scope: int, number: int, nodes: int, reason: str, formed_at: float) -> None:
        self.run, self.scope, self.number, self.nodes, self.reason = run, scope, number, nodes, reason
        self.formed_at = formed_at
        self.over = ""
        self.over_at = 0.0


class History:
    """What has happened to the runs of one server."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rounds: deque[RoundRecord] = deque(maxlen=MAX_ROUNDS)
        self._last: dict[str, RoundRecord] = {}  # of each run
        self._failures: dict[tuple[object, ...], tuple[PastFailure, float]] = {}

    def see(self, runs: list[RunSource]) -> None:
        """Note what has changed."""
        for run in runs:
            if run.machine is not None and run.machine.number:
                self._see_round(run)
            for received in run.reports:
                if received.report is not None and received.report.failure is not None:
                    self._see_failure(run.name, received.report.round, received.report.failure, received.at)
        names = {run.name for run in runs}
        for name in [name for name in self._last if name not in names]:
            self._end(self._last.pop(name), "the run is gone")

    def standing_s(self, run: str) -> float | None:
        """Return how long ago the standing round of a run was formed; None if none stands."""
        record = self._last.get(run)
        return None if record is None or record.over else max(0.0, self._clock() - record.formed_at)

    def failure_of(self, run: str) -> FailureReport | None:
        """Return the first failure of the last round of a run that failed, also when its agents have gone."""
        theirs = [(past, at) for past, at in self._failures.values() if past.run == run]
        last = max((past.round or 0 for past, _ in theirs), default=0)
        found = [(at, past.failure) for past, at in theirs if (past.round or 0) == last]
        if not found:
            return None
        at, failure = min(found, key=lambda item: item[0])
        return aged(failure, self._clock() - at)

    def rounds(self) -> list[PastRound]:
        """Return the recent rounds, the latest first."""
        now = self._clock()
        return [
            PastRound(
                run=one.run,
                round=one.number,
                nodes=one.nodes,
                reason=one.reason,
                formed_s=now - one.formed_at,
                lasted_s=one.over_at - one.formed_at if one.over else None,
                over=one.over,
            )
            for one in reversed(self._rounds)
        ]

    def failures(self) -> list[PastFailure]:
        """Return the recent failures, the latest first."""
        now = self._clock()
        return [
            PastFailure(run=past.run, round=past.round, failure=aged(past.failure, now - at))
            for past, at in sorted(self._failures.values(), key=lambda item: -item[1])
        ]

    def _see_round(self, run: RunSource) -> None:
        machine = run.machine
        assert machine is not None
        last = self._last.get(run.name)
        if last is None or last.scope != machine.scope:
            if last is not None:
                self._end(last, "another round has formed")
            last = RoundRecord(
                run.name, machine.scope, machine.number, len(machine.ranks), machine.reason, self._clock()
            )
            self._rounds.append(last)
            self._last[run.name] = last
        if machine.over:
            self._end(last, machine.over)

    def _end(self, record: RoundRecord, why: str) -> None:
        if not record.over:
            record.over, record.over_at = why, self._clock()

    def _see_failure(self, run: str, number: int | None, failure: FailureReport, at: float) -> None:
        key = (run, failure.node, failure.rank, failure.pid, failure.how, failure.message)
        if key not in self._failures:
            if len(self._failures) >= MAX_FAILURES:
                del self._failures[next(iter(self._failures))]
            past = PastFailure(run=run, round=number, failure=failure)
            self._failures[key] = past, at - failure.age_s


def aged(failure: FailureReport, age_s: float) -> FailureReport:
    """Return a failure with its age as of now."""
    return msgspec.structs.replace(failure, age_s=round(max(0.0, age_s), 3))
