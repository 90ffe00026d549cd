"""The agent: takes one node through the rounds of a job.

One thread makes all decisions: it joins a round, starts the workers, and handles events until the round ends
(`round_loop.py`). Other threads only write to the wakeup pipe, and the pump forwards the workers' output. node_run.py
joins the rounds; run_state.py holds the state that the agents share.

An agent that loses its server stops its workers, because the other nodes continue without this one. It reconnects until
its join timeout. Then it rejoins the run; if the server has lost its state, all agents start the run again, which uses
one restart. Rejected: to keep the workers running meanwhile. The other nodes reassign their ranks.
"""

from __future__ import annotations

import contextlib
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

from rallypoint.client import outage
from rallypoint.client.routing.refusals import Refusals
from rallypoint.core.policy.restart_policy import FORWARDED, RestartPolicy, describe_result
from rallypoint.core.policy.stop_policy import PREEMPTED, PREEMPTED_CODE
from rallypoint.deadline import Deadline
from rallypoint.errors import AuthenticationFailed, MeetingError, NetworkError, RallypointError, RunClosed
from rallypoint.launch.events import Events
from rallypoint.launch.failure_log import FailureLog
from rallypoint.launch.health.health_error import HealthCheckFailed
from rallypoint.launch.health.health_gate import HealthGate
from rallypoint.launch.job import Job
from rallypoint.launch.node_run import SUCCEEDED, NodeRun
from rallypoint.launch.output.log_files import LogFiles
from rallypoint.launch.round_loop import RoundLoop
from rallypoint.launch.round_spec import RoundSpec
from rallypoint.launch.run_errors import describe_end, describe_loss
from rallypoint.launch.torch_events import TorchEvents
from rallypoint.launch.wakeup_pipe import Signalled, WakeupPipe
from rallypoint.launch.workers.worker_group import WorkerGroup

__all__ = ["NodeAgent"]

RETRY_S = 1.0
"""Pause before the next attempt to reconnect, if the last one failed at once."""


class NodeAgent:
    """Runs one node's workers until the job ends; `report` receives its events, if given."""

    _logs: LogFiles
    _workers: WorkerGroup
    _health: HealthGate

    def __init__(self, job: Job, report: Callable[[dict[str, Any]], object] | None = None) -> None:
        self._job = job
        forwarded = tuple(name for name in FORWARDED if name not in (*job.signals, *job.preempt_signals))
        self._policy = RestartPolicy(rules=job.rules, forwarded=forwarded)
        self._wakeup = WakeupPipe(job.signals, job.preempt_signals)
        self._events = Events(job.node or "", job.quiet, job.json, self._wakeup.uninterrupted, report)
        self._torch_events = TorchEvents(job, self._events.line)
        self._run = NodeRun(job, self._events, self._wakeup)
        self._round: RoundLoop | None = None
        """The last round that this node has joined."""

    def run(self, exits: bool = False) -> int:
        """Run the job; return the exit code, with which this process then `exits`."""
        with (
            self._wakeup.handling_signals(exits),
            outage.shown_by(self._report_outage, "rallypoint.server"),
            contextlib.ExitStack() as stack,
        ):
            try:
                for note in self._job.notes:
                    self._events.say("note", note)
                self._set_up(stack)
                code = self._run_rounds()
                interrupted = self._policy.signals > 0 or code == PREEMPTED_CODE
                self._torch_events.ended(code == 0, self._failures, interrupted=interrupted)
                return code
            except Signalled as caught:
                self._torch_events.ended(False, (), interrupted=True)
                if not caught.name and self._wakeup.preempted is not None:
                    reason = f"{self._wakeup.preempted.reason}: this node leaves, while {self._run.waits_for}"
                    self._events.say(PREEMPTED, reason)
                    return PREEMPTED_CODE
                self._events.say("signal", f"{caught.name} while {self._run.waits_for}")
                return 128 + int(signal.Signals[caught.name])
            except RallypointError as error:
                message, text = describe_end(error, self._round is not None), ""
                code = error.exit_code if isinstance(error, HealthCheckFailed) else 1
            except Exception:
                code, message = 1, f"internal error of the launcher:\n{traceback.format_exc().rstrip()}"
                text = f"rallypoint run: {message}"
            self._events.fail("error", message, text)
            self._torch_events.ended(False, (), interrupted=True)
            self._run.failed = message
            if self._round is not None:
                self._round.stop()
            return code

    def _report_outage(self, message: str) -> None:
        """Report that the server is down, is being restarted, or is back; the workers keep running."""
        self._events.say("server", message)

    def _set_up(self, stack: contextlib.ExitStack) -> None:
        """Prepare the first round; the stack cleans up."""
        stack.callback(self._run.close)
        self._run.attach(Deadline(self._job.join_timeout_s))
        self._logs = LogFiles(self._job, self._events)
        stack.callback(self._logs.close)
        self._workers = WorkerGroup(self._job, self._logs, self._wakeup.fileno(), self._torch_events.started)
        stack.callback(self._workers.close)
        self._health = HealthGate(self._job, self._run, self._workers.reaper, self._events, self._wakeup)
        stack.callback(self._health.close)
        self._run.monitor.watch(self._workers)
        stack.enter_context(self._events.shown_by(self._workers.say))

    # Rounds

    def _run_rounds(self) -> int:
        """Run round after round, reconnecting if the server is lost; return the exit code."""
        lost: NetworkError | None = None
        while True:
            try:
                code = self._next_round() if lost is None else self._reconnect(lost)
                lost = None
            except NetworkError as error:
                code, lost = None, error
            if code is not None:
                return code

    def _next_round(self) -> int | None:
        """Run the next round, or continue the current one if this node is done in it; return the exit code or None."""
        if self._round is None or not self._run.done:
            try:
                self._health.hold()
                began_at = time.monotonic()
                spec = self._run.join_round()
            except RunClosed as closed:
                return self._too_late(closed)
            self._torch_events.joined(spec, time.monotonic() - began_at)
            self._round = self._enter(spec)
        end = self._round.run()
        if end.result:
            return self._ended(end.result, end.reason)
        if end.code is None:
            self._run.done = False  # there is another round to join
        return end.code

    def _enter(self, spec: RoundSpec) -> RoundLoop:
        """Enter a round."""
        self._policy.reset()
        self._wakeup.forget_forwarded()
        self._workers.enter_round(spec)
        self._run.monitor.restart = None  # it was meant for workers of an earlier round
        self._run.monitor.reporter.entered(spec.number, spec.nodes, spec.reason)
        message = f"round {spec.number}: {spec.describe()}; {spec.reason}"
        facts = {"round": spec.number, "node_rank": spec.node_rank, "nodes": spec.nodes, "workers": spec.size}
        self._events.say("round", message, as_text=self._job.max_nodes > 1, **facts)
        parts = self._run, self._workers, self._health, self._policy, self._events, self._wakeup
        return RoundLoop(spec, self._job, *parts)

    def _too_late(self, closed: RunClosed) -> int:
        """Report the result of a closed run; it is also this node's result if it took part, or waited as a spare."""
        has_joined = self._round is not None
        if not closed.result:
            self._events.fail("end", "the run ended while this node was disconnected; another run now uses its id")
            return 1
        without = " without this node" * (not has_joined)
        reason = describe_result(f"{closed.result}{without}", closed.reason)
        if has_joined or closed.result == PREEMPTED or (closed.waited and self._job.min_nodes < self._job.max_nodes):
            return self._ended(closed.result, reason)
        self._events.fail("end", f"{reason}. No worker was started here. For a separate job, set --rdzv-id")
        return 1

    def _ended(self, result: str, reason: str) -> int:
        """Report the result of the run; return the exit code."""
        if result == SUCCEEDED:
            self._events.say("end", reason, as_text=not self._job.alone)
            return 0
        if result == PREEMPTED:
            self._events.say("end", f"{reason}; exit code {PREEMPTED_CODE}")
            return PREEMPTED_CODE
        try:
            first = self._run.run_state.failure()
        except Signalled:
            first = None  # too late to change the result
        if first is None:
            self._events.fail("end", reason)
            return 1
        return self._failures.report(first, self._events, self._logs)

    @property
    def _failures(self) -> FailureLog:
        return FailureLog() if self._round is None else self._round.failures

    # Reconnecting

    def _reconnect(self, lost: NetworkError) -> int | None:
        """Stop the workers and reconnect; return the exit code, or None to continue."""
        done_by = self._round.result.done_by if self._round is not None and self._run.done else None
        if done_by is not None and self._job.alone:
            return self._ended(SUCCEEDED, "the workers have succeeded")
        deadline = done_by or Deadline(self._job.join_timeout_s)
        stopped = "; stopping the workers" if self._policy.running else ""
        trying = f"reconnecting for up to {deadline.remaining():.0f} s"
        self._events.say("disconnected", f"{describe_loss(lost)}{stopped}; {trying}")
        if self._round is not None:
            self._round.stop()
        self._policy.retract_failure("the server")
        try:
            self._attach_again(deadline, confirmed=isinstance(lost, AuthenticationFailed) and self._run.recovers)
        except NetworkError as error:
            if done_by is None:
                raise MeetingError(describe_end(error, self._round is not None)) from error
            message = "the workers of this node have succeeded; the result of the other nodes is unknown"
            return self._ended(SUCCEEDED, f"{message}: {describe_loss(error)}")
        if self._run.state_lost and self._round is not None:
            self._restart_run()
            return None
        self._events.say("reconnected", "reconnected; this node rejoins the run")
        end = None if self._round is None else self._round.resume()
        return None if end is None else self._ended(end.result, end.reason)

    def _attach_again(self, deadline: Deadline, confirmed: bool) -> None:
        """Attach to the server; retry until the deadline, or a final refusal; the session may have `confirmed` it."""
        refusals = Refusals(confirms=not confirmed)
        while True:
            try:
                self._run.attach(deadline)
                return
            except NetworkError as error:
                if deadline.expired() or refusals.ends(error):
                    raise
                self._events.waits(f"no server yet: {describe_loss(error)}")
                self._wakeup.wait(min(RETRY_S, deadline.remaining()))

    def _restart_run(self) -> None:
        """Start the run again on a server that has lost its state, as all agents do; uses one restart."""
        self._run.done = False
        budget, state = self._job.rules.budget, self._run.run_state
        used = state.carry_over(state.used + 1)
        reason = "the server restarted and lost the state of the run"
        if used > budget:  # the other agents fail alike; do not close the run: it may be another job's by now
            raise MeetingError(
                f"the run cannot continue: {reason}; restart budget exhausted ({budget} of {budget} used)"
            )
        self._run.state_lost = False
        self._events.say("restart", f"{reason}; restart {used} of {budget}")
