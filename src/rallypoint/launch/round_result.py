"""How a round ends: success is announced and waited for, a failure ends the run unless a lost node explains it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rallypoint.core.policy.restart_policy import RestartPolicy
from rallypoint.deadline import Deadline
from rallypoint.launch.events import Events
from rallypoint.launch.failure_log import FailureLog
from rallypoint.launch.failures import Failure
from rallypoint.launch.health.health_gate import HealthGate
from rallypoint.launch.job import Job
from rallypoint.launch.node_run import FAILED, SUCCEEDED, NodeRun
from rallypoint.launch.round_spec import RoundSpec
from rallypoint.launch.run_state import RunState
from rallypoint.launch.workers.worker_group import WorkerGroup
from rallypoint.server.settings import DEFAULT_GRACE_S

__all__ = ["REJOIN", "RoundEnd", "RoundResult"]

LOST_S = DEFAULT_GRACE_S + 1.0
"""Time to detect a lost node; an earlier failure of a worker may be a consequence of it."""


class RoundEnd(NamedTuple):
    """How a round ends on this node: it has the result of the run, or the exit code, or joins the next round."""

    result: str = ""
    reason: str = ""
    code: int | None = None


REJOIN = RoundEnd()
"""This node joins the next round."""


class RoundResult:
    """The end of one round on this node; `stop` stops the workers, and `pause` waits unless the run ends."""

    def __init__(
        self,
        spec: RoundSpec,
        job: Job,
        run: NodeRun,
        workers: WorkerGroup,
        health: HealthGate,
        policy: RestartPolicy,
        events: Events,
        failures: FailureLog,
        stop: Callable[[], object],
        pause: Callable[[float], object],
    ) -> None:
        self._spec, self._job, self._run, self._workers, self._health = spec, job, run, workers, health
        self._policy, self._events, self._failures = policy, events, failures
        self._stop, self._pause = stop, pause
        self._failing = ""
        """Reason of the failure that is about to end the run."""

        self.done_by: Deadline | None = None
        """How long this node waits for the others, once it is done."""

    def finish(self) -> RoundEnd | None:
        """Announce that this node is done, and close the run if all nodes are."""
        reason = "the workers of all nodes have succeeded"
        self.done_by = self.done_by or Deadline(self._job.exit_timeout_s)
        if not self._run.finish():
            return None
        return RoundEnd(self._run.end_run(SUCCEEDED, reason), f"the run has succeeded: {reason}")

    def fail(self, reason: str) -> RoundEnd:
        """Fail the run; if a lost node or this node's health explains the failure, join the next round instead."""
        own, self._failing = self._failures.last, reason
        self._failures.add([self._workers.failure(end.rank, end.code) for end in self._workers.exits() if end.code])
        known = Deadline(LOST_S)
        is_explicable = own.pid and own.code not in self._job.rules.final_codes
        if self._spec.nodes > 1 and is_explicable:
            self._run_state.announce(own)
            self._stop()
            self._health.begin()
            self._pause(known.remaining())
            lost = self._run.lost_nodes()
            if lost:
                if self._run_state.cause() == own:
                    self._refund()
                self._failing = ""
                self._events.say("rejoin", self._policy.retract_failure(", ".join(sorted(lost))).reason)
                return REJOIN
        if is_explicable and self._health.explains_failure(self._stop):
            self._failing = ""
            self._events.say("rejoin", self._policy.unhealthy("the failure is not the worker's").reason)
            return REJOIN
        end = self._close_failed(self._run_state.cause() or own, reason)
        self._stop()
        return end

    def _close_failed(self, first: Failure, reason: str) -> RoundEnd:
        self._run.end_run(FAILED, reason, first)
        return RoundEnd(FAILED, f"the run has failed: {reason}")

    def resume(self) -> RoundEnd | None:
        """After a reconnect, fail the run if it was about to fail; return the end, or None to continue."""
        if not self._failing:
            return None
        own = self._failures.last
        if own.pid and own.code not in self._job.rules.final_codes:  # the outage may have caused it
            if self._run_state.restarts() > self._job.rules.budget:
                self._refund()
            self._events.say("refund", f"{own.summary()}; possibly caused by the lost connection; no restart is used")
            self._failing = ""
            return None
        return self._close_failed(own, self._failing)

    def _refund(self) -> None:
        self._run_state.refund()
        self._health.restart_returned()

    @property
    def _run_state(self) -> RunState:
        return self._run.run_state
