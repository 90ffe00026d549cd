"""torchrun's `--event-log-handler console`: its events as JSON lines, with its names and fields.

    RENDEZVOUS   AGENT    a round was joined; with `duration_ms`
    START        WORKER   a worker was started
    SUCCEEDED, FAILED, TERMINATED
                 WORKER   at the end of the job: how each worker of this node ended
    SUCCEEDED, FAILED
                 AGENT    whether the agent got to the end, whatever became of the workers; FAILED after a signal

`--json` says more, and says it in words.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterable
from typing import Any

from rallypoint.launch.failures import Failure
from rallypoint.launch.job import Job
from rallypoint.launch.round_spec import RoundSpec

__all__ = ["TorchEvents"]


class TorchEvents:
    """Writes the events of one agent with `put`, which takes a line; with another handler, nothing."""

    def __init__(self, job: Job, put: Callable[[str], object]) -> None:
        self._job, self._put = job, put
        self._is_on = job.output.event_log_handler == "console"
        self._spec: RoundSpec | None = None
        self._restarts = 0
        self._pids: dict[int, int] = {}
        """The process of each rank that was started last, in this round."""

    def joined(self, spec: RoundSpec, duration_s: float) -> None:
        """Record that a round was joined."""
        self._pids.clear()
        self._restarts = spec.restarts
        self._record("AGENT", "RENDEZVOUS", duration_ms=duration_s * 1000)  # with the node's rank in the last round
        self._spec = spec

    def started(self, spec: RoundSpec, rank: int, pid: int) -> None:
        """Record the start of a worker."""
        self._spec, self._restarts = spec, spec.restarts
        self._pids[rank] = pid
        self._record("WORKER", "START", rank)

    def ended(self, has_succeeded: bool, failures: Iterable[Failure], interrupted: bool) -> None:
        """Record the end of the job on this node; a job that was interrupted has no result of its workers."""
        failed = {failure.rank: failure for failure in failures}
        for rank in () if interrupted else sorted(self._pids):
            state = "SUCCEEDED" if has_succeeded else "FAILED" if rank in failed else "TERMINATED"
            self._record("WORKER", state, rank, failed.get(rank))
        self._record("AGENT", "FAILED" if interrupted else "SUCCEEDED")

    def _record(
        self,
        source: str,
        state: str,
        rank: int | None = None,
        failure: Failure | None = None,
        duration_ms: float | None = None,
    ) -> None:
        if not self._is_on:
            return
        spec = self._spec
        facts = {
            "run_id": self._job.run_id,
            "global_rank": rank,
            "group_rank": spec.node_rank if spec else None,
            "worker_id": None if rank is None else str(self._pids[rank]),
            "role": self._job.role,
            "hostname": socket.gethostname(),
            "state": state,
            "total_run_time": 0,
            "rdzv_backend": "rallypoint",
            "raw_error": None if failure is None else json.dumps({"message": failure.message}),
            "metadata": json.dumps(self._details(rank, failure)),
            "agent_restarts": self._restarts,
            "duration_ms": duration_ms,
        }
        name = f"torchelastic.worker.status.{state}"
        self._put(json.dumps({"name": name, "source": source, "timestamp": 0, "metadata": facts}))

    def _details(self, rank: int | None, failure: Failure | None) -> dict[str, Any]:
        spec = self._spec
        details: dict[str, Any] = {
            "group_world_size": spec.nodes if spec else None,
            "entry_point": self._job.command.argv()[0].rpartition("/")[2],
        }
        if rank is not None and spec is not None:
            details |= {
                "local_rank": [rank - spec.first],
                "role_rank": [rank],
                "role_world_size": [spec.size],
                "exit_code": [failure.code if failure else None],
                "worker_pid": [failure.pid if failure else None],
            }
        return details
