"""The report of an agent on its node, kept in the store for `rallypoint status`, the live page and the metrics.

A thread of its own writes the report, so that a slow or absent store delays nothing, and a report that cannot be
written is dropped. It is written soon after a change and from time to time without one; in a large run more rarely, so
that the agents together write at most about WRITES_PER_S reports a second. `core/run_report.py` has its fields.

The agent's thread assigns whole values, and the reporter reads them: no lock is needed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from rallypoint.core.run_keys import report_key
from rallypoint.core.run_report import FailureReport, HealthReport, NodeReport, RankReport, encode_report
from rallypoint.errors import RallypointError
from rallypoint.launch.failures import Failure
from rallypoint.launch.job import Job
from rallypoint.launch.monitoring.stack_dump import STOPPED, process_state
from rallypoint.launch.monitoring.worker_records import WorkerEntry
from rallypoint.launch.workers.worker_group import WorkerGroup
from rallypoint.recipes.join_args import address_of
from rallypoint.store.base import Lease, Store

__all__ = ["NodeReporter"]

SOONEST_S, LATEST_S = 1.0, 5.0
"""The shortest and the longest time between two reports of a node, in a run of a few nodes."""

WRITES_PER_S = 200.0
MAX_TEXT, MAX_LONG_TEXT = 500, 16 * 1024


class NodeReporter:
    """Writes the reports of one node, from the first `attach` to `close`."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._began_at = time.monotonic()
        self._state, self._reason = "waiting", ""
        self._round: int | None = None
        self._nodes = job.max_nodes
        self._failure: tuple[Failure, float] | None = None
        self._target: tuple[Store, str] | None = None
        self._address: tuple[Store, str] | None = None
        self._changed = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self.workers: WorkerGroup | None = None
        self.restarts = 0
        """Restarts that the job has used."""

        self.health: Callable[[], HealthReport | None] = lambda: None
        """What the health check has found; called in the reporter's thread."""

        self.hung: dict[int, str] = {}
        """Ranks that hang, and why; replaced as a whole."""

    # The agent's thread

    def attach(self, store: Store, node: str) -> None:
        """Write reports to this store from now on, under this name of the node."""
        self._target = store, node
        self._changed.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="node report", daemon=True)
            self._thread.start()

    def detach(self) -> None:
        """Write no more reports until the next `attach`: the store is lost."""
        self._target = None

    def state(self, state: str, reason: str = "") -> None:
        """Report a state of this node, and the reason for it."""
        self._state, self._reason = state, reason[:MAX_TEXT]
        self._changed.set()

    @property
    def current(self) -> tuple[str, str]:
        """The state that is reported, and its reason."""
        return self._state, self._reason

    def entered(self, number: int, nodes: int, reason: str) -> None:
        """Report a new round, with that number of nodes."""
        self._round, self._nodes, self.hung = number, nodes, {}
        self.state("running", reason)

    def failed(self, failure: Failure) -> None:
        """Report a failure of a worker."""
        self._failure = failure, time.monotonic()
        self._changed.set()

    def close(self) -> None:
        """Write no more reports."""
        self._target = None
        self._closed.set()
        self._changed.set()

    # The reporter's thread

    def _write(self) -> None:
        last: tuple[Store, NodeReport] | None = None
        lease: Lease | None = None
        written_at = 0.0
        while not self._closed.wait(max(0.0, written_at + self._soonest_s - time.monotonic())):
            if self._target is not None:
                store, node = self._target
                report = self._build(store, node)
                found = store, _without_durations(report)
                if found != last or time.monotonic() - written_at >= self.interval_s - self._soonest_s:
                    last, written_at = found, time.monotonic()
                    key = report_key(self._job.run_id, node)
                    with contextlib.suppress(RallypointError, ValueError):
                        if lease is not None and lease.key != key:  # the node got its name when it joined
                            lease.release()
                        lease = store.lease(key, encode_report(report))
            self._changed.wait(self._soonest_s)
            self._changed.clear()

    @property
    def _soonest_s(self) -> float:
        return max(SOONEST_S, self._nodes / WRITES_PER_S)

    @property
    def interval_s(self) -> float:
        """The longest time between two reports."""
        return max(LATEST_S, self._nodes / WRITES_PER_S)

    def _build(self, store: Store, node: str) -> NodeReport:
        if self._address is None or self._address[0] is not store:  # may have to look up a name
            self._address = store, self._job.local_address or address_of(store)
        workers = self.workers
        return NodeReport(
            run=self._job.run_id[:MAX_TEXT],
            node=node,
            host=socket.gethostname(),
            address=self._address[1],
            pid=os.getpid(),
            round=self._round,
            state=self._state,
            reason=self._reason,
            uptime_s=_rounded(time.monotonic() - self._began_at),
            restarts=self.restarts,
            restart_budget=self._job.rules.budget,
            failure=_failure_report(*self._failure) if self._failure else None,
            health=self.health(),
            ranks=[] if workers is None else [self._rank(workers, entry) for entry in workers.entries],
            interval_s=self.interval_s,
        )

    def _rank(self, workers: WorkerGroup, entry: WorkerEntry) -> RankReport:
        progress, state, reason = None, "running", ""
        with contextlib.suppress(KeyError, ValueError, OSError):  # it was stopped meanwhile
            progress = workers.records.progress(entry.local_rank)
            code = workers.exit_code(entry.rank)
            if code is not None:
                state = "succeeded" if code == 0 else "failed"
            elif entry.rank in self.hung:
                state, reason = "hung", self.hung[entry.rank]
            elif process_state(entry.pid) in STOPPED:
                state, reason = "stopped", "stopped by a signal or a debugger"
        return RankReport(
            rank=entry.rank,
            local_rank=entry.local_rank,
            pid=entry.pid,
            state=state,
            restarts=workers.restarts_of(entry.rank),
            step=None if progress is None else progress.step,
            progress_age_s=None if progress is None else _rounded(progress.age_s),
            reason=reason[:MAX_TEXT],
        )


def _failure_report(failure: Failure, seen_at: float) -> FailureReport:
    return FailureReport(
        rank=failure.rank,
        node=failure.node[:MAX_TEXT],
        host=failure.host[:MAX_TEXT],
        pid=failure.pid,
        how=failure.how[:MAX_TEXT],
        message=failure.message[:MAX_LONG_TEXT],
        traceback=failure.traceback[-MAX_LONG_TEXT:],
        age_s=_rounded(time.monotonic() - seen_at),
    )


def _without_durations(report: NodeReport) -> NodeReport:
    """Return what has changed when it changes: a report without what changes all the time."""
    ranks = [msgspec.structs.replace(rank, progress_age_s=None) for rank in report.ranks]
    failure = report.failure and msgspec.structs.replace(report.failure, age_s=0.0)
    health = report.health and msgspec.structs.replace(report.health, out_s=0.0, next_check_s=None)
    return msgspec.structs.replace(report, uptime_s=0.0, ranks=ranks, failure=failure, health=health)


def _rounded(duration_s: float) -> float:
    return round(duration_s, 3)
