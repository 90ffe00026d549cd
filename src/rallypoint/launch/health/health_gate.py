"""The health gate of a node: holds it back from joining a round while its health check has not passed.

The agent asks it before each join (`hold`). With --restart node or worker, workers restart without a join: then the
loop of the round starts a check itself, and goes on with its other events until `is_checking` is over.
`core/policy/health_policy.py` decides. A node whose check fails leaves the round, so that the others go on without it,
and gives back the restart that the failure of its worker has used: the node was the cause, as if it had been lost.

While it is held, a node has a session and a report, but no place in a round. A signal ends it at once; so does the end
of the run, with the result for a node that could have been a spare.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence

from rallypoint.core.policy.health_policy import (
    CoolDown,
    GiveUp,
    HealthDecision,
    HealthSituation,
    JoinRound,
    LeaveRound,
    RunCheck,
    WaitForCheck,
    decide,
    failed_in_row,
)
from rallypoint.core.run_report import HealthReport
from rallypoint.deadline import Deadline
from rallypoint.errors import RunClosed
from rallypoint.launch.events import Events
from rallypoint.launch.failures import Failure
from rallypoint.launch.health.check_process import HealthCheck
from rallypoint.launch.health.health_error import HealthCheckFailed
from rallypoint.launch.job import Job
from rallypoint.launch.node_run import NodeRun
from rallypoint.launch.wakeup_pipe import Signalled, WakeupPipe
from rallypoint.launch.workers.orphan_reaper import OrphanReaper
from rallypoint.launch.workers.worker_process import WorkerProcess

__all__ = ["HealthGate"]

LOOK_S, SPARE_S = 5.0, 1.0
"""How often a node that is held looks at the run, besides when it is notified: whether it is over, or a spare waits."""

LOOKS_PER_S = 100.0
"""How often the nodes of a large run do so together."""

REPORT_S = 10.0
"""How often a check that takes long is reported."""

CHECKING, UNHEALTHY = "checking", "unhealthy"
"""The states that a node reports."""


class HealthGate:
    """Runs the health checks of one node; without --health-check it lets the node pass."""

    def __init__(self, job: Job, run: NodeRun, reaper: OrphanReaper, events: Events, wakeup: WakeupPipe) -> None:
        self._job, self._rules, self._run, self._reaper = job, job.health, run, reaper
        self._events, self._wakeup = events, wakeup
        self._due = "before it joins" if self._rules.command else ""
        self._check: HealthCheck | None = None
        self._has_run = self._has_place = self._saw_run = False
        self._others = self._failed = self._charges = 0
        self._reported_s = 0.0
        self._state_before = ("", "")
        self._blocked: WorkerProcess | None = None
        self._cooldown: Deadline | None = None
        self._give_up_by: Deadline | None = None
        self._out_since: float | None = None
        self._well_since: float | None = None
        run.monitor.reporter.health = self._report

    def close(self) -> None:
        """Kill the check if one runs."""
        check, self._check = self._check, None
        if check is not None:
            check.close()
            self._blocked = check.blocked

    # The loop of a round

    @property
    def is_checking(self) -> bool:
        """Whether workers must not be started: a check runs, or has failed."""
        return self._check is not None

    def worker_failed(self, failures: Iterable[Failure], ranks: Sequence[int]) -> None:
        """Have this node checked before workers start again, if one of these failures is one of its ranks."""
        for one in failures if self._rules.command else ():
            if one.rank in ranks or not set(ranks).isdisjoint(one.hung):
                self._due, self._has_place = f"after a failure: {one.summary()}", True

    def restart_used(self) -> None:
        """Note that a failure of this node's workers has used a restart, to be given back if this node is the cause."""
        self._charges += bool(self._due)

    def restart_returned(self) -> None:
        """Note that it was given back for another cause."""
        self._charges = 0

    def begin(self) -> None:
        """Start a check if one is due."""
        if not self._due or self._check is not None:
            return
        self._reported_s, self._state_before = 0.0, self._run.monitor.reporter.current
        self._give_up_by = self._give_up_by or Deadline(self._job.join_timeout_s)
        again = "" if self._out_since is None else f" again, {self._failed} failed in a row"
        self._run.monitor.reporter.state(CHECKING, f"checking its health {self._due}{again}")
        self._events.say("health-check", f"checking the health of this node {self._due}{again}", as_text=False)
        rules, wake = self._rules, self._wakeup.wake
        self._check = HealthCheck(
            rules.command, self._environment(), rules.timeout_s, self._reaper, wake, self._blocked
        )

    def poll(self) -> str:
        """Return why the check has failed; empty if it passed, still runs, or none was started."""
        result = None if self._check is None else self._check.result
        if result is None:
            return ""
        if result.passed:
            self._passed()
            self._run.monitor.reporter.state(*self._state_before)
            return ""
        return f"the health check of this node failed: {result.reason}"

    def explains_failure(self, stop: Callable[[], object]) -> bool:
        """Stop the workers and check this node, before its failure ends the run; return whether it is unhealthy."""
        if not self._due:
            return False
        stop()
        self.begin()
        try:
            while self._check is not None and self._check.result is None:
                self._look()
                self._wait_for_check(LOOK_S)
        except (Signalled, RunClosed):
            return False
        return bool(self.poll())

    # Before a join

    def hold(self) -> None:
        """Return when this node may join a round.

        Raises HealthCheckFailed at the join timeout, RunClosed at the end of the run, and Signalled on a signal.
        """
        if not self._due:
            return
        self._run.opened()
        name = self._events.node or f"{socket.gethostname()} (pid {os.getpid()})"
        self._run.monitor.attach(self._run.store, name)
        with self._events.status(lambda: self._run.held):
            while self._cooldown is not None or not isinstance(decision := self._decision(), JoinRound):
                if self._cooldown is not None:
                    self._stay_out(self._cooldown)
                else:
                    self._carry_out(decision)
        self._passed()

    def _decision(self) -> HealthDecision:
        running_s, result = (None, None) if self._check is None else (self._check.running_s, self._check.result)
        situation = HealthSituation(
            due=self._due,
            running_s=running_s,
            result=result,
            failed=failed_in_row(self._failed, None if self._well_since is None else _since(self._well_since)),
            has_run=self._has_run,
            has_place=self._has_place,
            others=self._others,
            max_nodes=self._job.max_nodes,
            left_s=self._job.join_timeout_s if self._give_up_by is None else self._give_up_by.remaining(),
        )
        return decide(self._rules, situation)

    def _carry_out(self, decision: HealthDecision) -> None:
        self._run.held = f"{'out of the run: ' * isinstance(decision, CoolDown)}{decision.reason}"
        if isinstance(decision, RunCheck):
            self.begin()
        elif isinstance(decision, WaitForCheck):
            self._look()
            self._wait_for_check(SPARE_S if self._has_place else LOOK_S)
        elif isinstance(decision, LeaveRound):
            self._events.say("health-check", decision.reason)
            self._has_place = False
            self._run.leave_round()
        elif isinstance(decision, CoolDown):
            self._start_cooldown(decision)
        elif isinstance(decision, GiveUp):
            raise self._error(decision)

    def _wait_for_check(self, look_s: float) -> None:
        """Wait until the check ends, or until it is time to look at the run again."""
        self._wakeup.wait(max(look_s, self._job.max_nodes / LOOKS_PER_S))
        running_s = self._check.running_s if self._check is not None else None
        if running_s is not None and running_s >= self._reported_s + REPORT_S:
            self._reported_s = running_s
            self._events.waits(f"the health check of this node has been running for {running_s:.0f} s")

    def _look(self) -> None:
        """Look at the run; raise Signalled on a terminating signal, and RunClosed at the end of the run."""
        self._wakeup.interruptible(lambda: None, patience_s=0.0)
        status = self._run.rendezvous.status()
        if status.phase == "closed":
            result, _, reason = status.reason.partition(": ")
            raise RunClosed(thing=f"run {self._job.run_id}", result=result, reason=reason, waited=self._saw_run)
        self._saw_run, self._others = True, len(status.waiting)
        if status.phase == "formed":  # as a spare, this node then waits without limit
            self._give_up_by = Deadline(self._job.join_timeout_s)

    # Out of the run

    def _start_cooldown(self, decision: CoolDown) -> None:
        assert self._check is not None and self._check.result is not None
        result, now = self._check.result, time.monotonic()
        self._failed = failed_in_row(self._failed, None if self._well_since is None else now - self._well_since)
        self._out_since, self._well_since, self._has_run = self._out_since or now, None, True
        self._cooldown = Deadline(decision.for_s)
        self.close()
        self._run.monitor.reporter.state(UNHEALTHY, decision.reason)
        self._events.say(
            UNHEALTHY,
            f"{decision.reason}; this node is out of the run, and is checked again in {round(decision.for_s, 1):g} s",
            failed=self._failed,
            cooldown_s=decision.for_s,
            exit_code=result.code,
            output=list(result.output),
        )

    def _stay_out(self, cooldown: Deadline) -> None:
        """Leave the round, give back the restart that it has cost, and wait until the cool-down is over."""
        if self._charges:
            self._events.say("refund", "no restart is used for the failure: this node is unhealthy")
        while self._charges:
            self._run.run_state.refund()
            self._charges -= 1
        if self._has_place:
            self._run.leave_round()
            self._has_place = False
        while not cooldown.expired():
            self._look()
            self._wakeup.wait(min(max(LOOK_S, self._job.max_nodes / LOOKS_PER_S), cooldown.remaining()))
        self._cooldown = None

    def _passed(self) -> None:
        """Note that this node is well, and may work again."""
        if self._out_since is not None:
            out_s, often = _since(self._out_since), f"{self._failed} time{'s' * (self._failed > 1)}"
            message = f"the health check passed, after it failed {often} in {out_s:.0f} s: this node joins again"
            self._events.say("healthy", message, failed=self._failed, out_s=round(out_s, 3))
        self.close()
        self._due, self._charges, self._has_run, self._run.held = "", 0, True, ""
        self._give_up_by = self._out_since = None
        self._well_since = time.monotonic()

    def _error(self, decision: GiveUp) -> HealthCheckFailed:
        assert self._check is not None and self._check.result is not None
        result = self._check.result
        return HealthCheckFailed(
            command=self._rules.command,
            why=result.reason,
            code=result.code,
            output=result.output,
            failed=self._failed + 1,
            out_s=0.0 if self._out_since is None else _since(self._out_since),
            exit_code=decision.exit_code,
        )

    def _environment(self) -> dict[str, str]:
        """Return the environment of a check: that of the workers, without what belongs to a round."""
        node = self._events.node or socket.gethostname()
        return {**os.environ, **self._job.environment, "RALLYPOINT_RUN": self._job.run_id, "RALLYPOINT_NODE": node}

    def _report(self) -> HealthReport | None:
        """Return what this node reports of its health; in the reporter's thread."""
        out_since, cooldown = self._out_since, self._cooldown
        if out_since is None:
            return None
        next_s = None if cooldown is None else round(cooldown.remaining(), 3)
        return HealthReport(failed=self._failed, out_s=round(_since(out_since), 3), next_check_s=next_s)


def _since(at: float) -> float:
    return time.monotonic() - at
