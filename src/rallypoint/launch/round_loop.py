"""The loop of one round: waits for an event on this node, decides what to do about it, and carries that out.

An event is a signal, the exit of a worker, a change of the round or of the run, or a timer that expires. They are
handled one at a time, signals first. `core/policy/restart_policy.py` decides; the first agent to see the result of the
run closes it, and the others see that as the end of the round.

A terminating signal interrupts a request to the store, wherever in the loop it is made, and nothing else: workers are
started, stopped and reaped undisturbed. The signal is then the next event, and this node leaves: the reply no longer
matters.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

from rallypoint.core.policy.restart_policy import Action, Decision, RestartPolicy, WorkerExit
from rallypoint.core.policy.stop_policy import PREEMPTED_CODE
from rallypoint.deadline import Deadline
from rallypoint.launch.events import Events
from rallypoint.launch.failure_log import FailureLog
from rallypoint.launch.failures import server_failure
from rallypoint.launch.hang_watch import HangWatch
from rallypoint.launch.health.health_gate import HealthGate
from rallypoint.launch.job import Job
from rallypoint.launch.node_run import SUCCEEDED, NodeRun
from rallypoint.launch.preemption.round_preemption import RoundPreemption
from rallypoint.launch.round_result import REJOIN, RoundEnd, RoundResult
from rallypoint.launch.round_spec import RoundSpec
from rallypoint.launch.run_state import RunState
from rallypoint.launch.wakeup_pipe import Signalled, WakeupPipe
from rallypoint.launch.workers.worker_group import WorkerGroup
from rallypoint.recipes.rendezvous import Rendezvous

__all__ = ["RoundLoop"]

LONG_S = 3600.0
CHECK_S = 5.0
"""How often a node that is done, and no longer in the round, checks whether the others form another round."""

STARTED = "started"
STATES = {
    **dict.fromkeys((Action.REJOIN, Action.LEAVE, Action.KILL, Action.END), "stopping"),
    Action.PREEMPTED: "draining",
    Action.FAIL: "failed",
    Action.FINISH: "done",
}
"""The state that a node reports after a decision."""


class RoundLoop:
    """One round on this node, from the start of its workers on."""

    def __init__(
        self,
        spec: RoundSpec,
        job: Job,
        run: NodeRun,
        workers: WorkerGroup,
        health: HealthGate,
        policy: RestartPolicy,
        events: Events,
        wakeup: WakeupPipe,
    ) -> None:
        self._spec, self._job, self._run, self._workers, self._health = spec, job, run, workers, health
        self._policy, self._events, self._wakeup = policy, events, wakeup
        self._due: list[tuple[Deadline, Sequence[int]]] = [(Deadline(0.0), spec.ranks)]
        """Ranks to start, each group with its start time, earliest first."""

        self._is_over = False
        self._closed_with: str | None = None
        """The result of the run, once it is closed."""

        self._check_by: Deadline | None = None
        """When to check the round again; set only on a node that has left it and receives no notifications."""

        self.failures = FailureLog()
        self._hangs = HangWatch(spec, job, run, workers, events, wakeup)
        self._preemption = RoundPreemption(spec, job, run, workers, policy, events, wakeup, self.stop)
        parts = run, workers, health, policy, events, self.failures
        self.result = RoundResult(spec, job, *parts, self.stop, self._pause)

    def run(self) -> RoundEnd:
        """Run the round to its end; raise NetworkError if the server is lost."""
        while True:
            try:
                decision = self._next_decision()
                if decision is None:
                    self._workers.wait(self._wait_s())
                    self._wakeup.drain()
                    continue
                self._announce(decision)
                end = self._carry_out(decision)
            except Signalled:
                continue  # the signal is queued
            if end is not None:
                self._preemption.close()
                return end

    def _next_decision(self) -> Decision | None:
        """Return what to do about the next event, or None if there is none."""
        if self._wakeup.signals:
            return self._policy.signal(self._wakeup.signals.pop(0))
        worker_exit = next(self._workers.exits(), None)
        if worker_exit is not None:
            return self._exited(worker_exit)
        if self._run.monitor.restart is not None:
            return self._restart_requested()
        self._run.evict_silent_agents()
        if (decision := self._preemption.next()) is not None:
            return decision
        if self._must_check():
            self._run_state.notified = False  # first: a notification during the check causes another check
            self._preemption.notice()
            self._check_by = self._check_by and Deadline(CHECK_S)
            return self._check_round() or Decision(Action.WAIT, "the round is unchanged")
        unhealthy = self._health.poll()
        if unhealthy:
            return self._policy.unhealthy(unhealthy)
        if self._due and self._due[0][0].expired() and not self._health.is_checking:
            return self._start(self._due.pop(0)[1])
        if self.result.done_by is not None and self.result.done_by.expired():
            return self._waited_for_others()
        return self._store_lost() or self._check_hangs()

    def _wait_s(self) -> float:
        """Return the time until the next timer expires; all other events wake the agent."""
        hangs_by = self._hangs.due if self._policy.running else None
        starts = () if self._health.is_checking else self._due
        timers = [*(deadline for deadline, _ in starts), self.result.done_by, self._check_by, hangs_by]
        timers.append(self._preemption.due)
        return min([LONG_S, *(timer.remaining() for timer in timers if timer is not None)])

    def _announce(self, decision: Decision) -> None:
        """Report a decision; as JSON only, if the final report repeats it."""
        act = decision.action
        if act in STATES:
            self._run.monitor.reporter.state(STATES[act], decision.reason)
        if act != Action.WAIT:
            in_report = act == Action.FAIL and (not self._job.rules.budget or not self.failures.last.pid)
            shown = act not in (Action.FINISH, Action.END, Action.FORWARD, STARTED) and not in_report
            self._events.say(act, decision.reason, as_text=shown, ranks=list(decision.ranks))

    def _carry_out(self, decision: Decision) -> RoundEnd | None:
        """Carry out a decision; return how it ends the round, or None if the round goes on."""
        act = decision.action
        if act == Action.FORWARD:
            self._workers.signal(signal.Signals[decision.signal])
        elif act == Action.RESTART:
            self.failures.forget(decision.ranks)
            self.stop(decision.ranks)
            self._workers.restarted(self._run_state.restarts())
            self._due = sorted([*self._due, (Deadline(decision.after_s), decision.ranks)], key=lambda due: due[0].at)
            self._health.begin()
        elif act == Action.REJOIN:
            if self.failures:
                self._run.announce_failure(self.failures)
            self.stop()
            self._pause(decision.after_s, rejoins=True)
            return REJOIN
        elif act == Action.FINISH:
            return self.result.finish()
        elif act in (Action.LEAVE, Action.KILL):
            self.stop(signum=signal.Signals[decision.signal], grace_s=0.0 if act == Action.KILL else None)
            return RoundEnd(code=128 + int(signal.Signals[decision.signal]))
        elif act == Action.PREEMPTED:
            self.stop()
            return RoundEnd(code=PREEMPTED_CODE)
        elif act == Action.FAIL:
            return self.result.fail(decision.reason)
        elif act == Action.END:
            self.stop()
            return RoundEnd(self._closed_with or self._rendezvous.status().result or SUCCEEDED, decision.reason)
        return None

    # Events

    def _exited(self, end: WorkerExit) -> Decision:
        """Decide what follows the exit of a worker; if the round or its store ended first, that is the cause."""
        if (stopped := self._preemption.exited(end)) is not None:
            return stopped
        if end.code == 0 or self._policy.ending:
            return self._policy.exited(end, 0)
        self.failures.add(self._workers.failures(end.rank, end.code))
        return self._failed(end)

    def _failed(self, end: WorkerExit) -> Decision:
        """Decide what follows the failure added last, unless it is the consequence of another one."""
        self._health.worker_failed(self.failures, self._spec.ranks)
        other = self._store_lost() or (None if self._is_over else self._check_round()) or self._store_lost(failed=True)
        if other is not None:
            return other
        self._run.monitor.reporter.failed(self.failures.last)
        of_all = self._job.rules.restart == "group"
        used = self._run.monitor.reporter.restarts = self._run_state.charge(self.failures.last, of_all)
        if self._run_state.charged:
            self._health.restart_used()
        counts = self._job.rules.no_progress_limit and self._run_state.charged
        stalled = self._run_state.count_stalled(self._run.monitor.highest_step()) if counts else 0
        return self._policy.exited(end, used, stalled)

    def _check_hangs(self) -> Decision | None:
        """Look for workers that hang, and treat them as failed: kill them, and decide about the rest."""
        hung = self._hangs.check() if self._policy.running and not self._policy.ending else []
        if not hung:
            return None
        self.failures.add(hung)
        first = hung[-1]
        self._workers.kill([first.rank] if self._job.rules.restart == "worker" else first.hung)
        return self._failed(WorkerExit(first.rank, first.code, first.message, self._workers.uptime_s(first.rank)))

    def _restart_requested(self) -> Decision:
        """Decide on a request of an operator to restart the workers: of all nodes, unless nodes restart alone."""
        request, self._run.monitor.restart = self._run.monitor.restart, None
        assert request is not None
        reason = f"restart {request.origin}; no restart is used"
        if self._policy.ending or not self._policy.running:
            return Decision(Action.WAIT, reason)
        if self._job.rules.restart != "group":
            return self._policy.restart_all(reason)
        if self._spec.node_rank and not request.node:
            return Decision(Action.WAIT, f"{reason}; node 0 tells all nodes")
        self._run_state.announce(server_failure(self._run.rendezvous.node, reason))
        return self._policy.failed_elsewhere(reason)

    def _store_lost(self, failed: bool = False) -> Decision | None:
        """Decide what follows the loss of the workers' store: running workers need it, a node that is done does not."""
        works = self._policy.running and not self._policy.ending
        cause = self._run.store_lost(failed) if works else None
        return None if cause is None else self._policy.failed_elsewhere(f"{cause.summary()}; no restart is used")

    def _must_check(self) -> bool:
        """Return whether to check the round: it has changed, an agent has notified the others, or it is time to."""
        is_due = self._check_by is not None and self._check_by.expired()
        known = self._is_over or self._preemption.holds_round
        return is_due or self._run_state.notified or (self._rendezvous.changed.is_set() and not known)

    def _check_round(self) -> Decision | None:
        """Check the round and the run; return what to do, or None to continue."""
        status, cause = self._run.check()
        if status.phase == "closed":
            self._closed_with = status.result
            return self._policy.closed(*status.reason.split(": ", 1))
        if cause is not None:
            self._workers.kill(cause.hung)
            self._health.worker_failed([cause], self._spec.ranks)
            return self._policy.failed_elsewhere(cause.summary())
        change = self._rendezvous.changed  # also set when the watch was lost
        if status.phase == "formed" and status.round == self._spec.number and not change.is_set():
            return None
        if self._preemption.holds(status):  # the ranks reach the agreed step first
            self._check_by = Deadline(CHECK_S)
            return None
        was_over, self._is_over = self._is_over, True
        reason = "another node has left" if was_over else status.over or change.reason or "another round was formed"
        decision = self._policy.changed(reason, self._run.progress(status))
        if decision.action != Action.WAIT:
            return decision
        if not was_over:
            self._events.say("left", decision.reason)
            self._run_state.watch_agents()
        return None

    def _start(self, ranks: Sequence[int]) -> Decision:
        self._policy.started(ranks)
        unstartable = self._workers.start(ranks)
        if unstartable is not None:
            self.failures.add([unstartable])
            return self._policy.start_failed(unstartable.message)
        return Decision(STARTED, f"started {len(ranks)} worker{'s' * (len(ranks) > 1)}", ranks)

    def _waited_for_others(self) -> Decision:
        progress = self._run.progress()
        late = ", ".join(sorted(progress.living.difference(progress.done)))
        return Decision(Action.END, f"waited {self._job.exit_timeout_s:g} s for other nodes, still running: {late}")

    # After a reconnect

    def resume(self) -> RoundEnd | None:
        """Rejoin the round if this node is done in it, and fail the run if it was about to; return the end, or None."""
        if self._run.done:
            self._run.rejoin_finished()
            self._is_over, self._check_by = False, Deadline(CHECK_S)
        return self.result.resume()

    # Stopping and pausing

    def stop(
        self, ranks: Sequence[int] | None = None, signum: int = signal.SIGTERM, grace_s: float | None = None
    ) -> None:
        """Signal workers, and kill those left after the grace period, or on a second interrupt."""
        if ranks is None:
            self._due = []
        self._workers.stop(ranks, signum, Deadline(self._job.grace_s if grace_s is None else grace_s), self._must_kill)

    def _must_kill(self) -> bool:
        self._wakeup.drain()
        return self._policy.must_kill(self._wakeup.signals)

    def _pause(self, after_s: float, rejoins: bool = False) -> None:
        """Sleep, but return at once on a signal to end, when the run is closed, or if a preempted node would rejoin."""
        deadline = Deadline(after_s)
        while not deadline.expired() and not self._wakeup.is_ending():
            if (rejoins and self._wakeup.preempted) or self._rendezvous.status().phase == "closed":
                break
            self._wakeup.wait(deadline.remaining())

    @property
    def _run_state(self) -> RunState:
        return self._run.run_state

    @property
    def _rendezvous(self) -> Rendezvous:
        return self._run.rendezvous
