"""Preemption in one round, on one node: joins the agreement on a step, tells the ranks, and says when all have ended.

The agent's loop calls `next` before it waits. Without a request that costs nothing. With one, this node, or any other,
begins the agreement in the store of the round and notifies all agents. From then on each of them looks at the records
of its ranks every POLL_S, writes the proposed step there, and reports what it sees; the coordinator decides
(`core/policy/stop_policy.py`). Nodes that are preempted leave when no rank of the round runs any more: the others may
still need their relay for a checkpoint.

After the preemption timeout, each agent stops its ranks, whatever was agreed.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

import msgspec

from rallypoint.core.policy.restart_policy import Action, Decision, RestartPolicy, WorkerExit
from rallypoint.core.policy.stop_policy import (
    NONE,
    PREEMPTED_CODE,
    NodeStop,
    RankStop,
    StopPhase,
    StopRequest,
    StopState,
    decide_stop,
    node_stop,
)
from rallypoint.core.stacks import rank_list
from rallypoint.deadline import Deadline
from rallypoint.launch.events import Events
from rallypoint.launch.job import Job
from rallypoint.launch.node_run import NodeRun
from rallypoint.launch.preemption.stop_keys import StopKeys
from rallypoint.launch.preemption.stop_record import ACCEPTED, COMMITTED, PASSED, PROPOSED, STOPPED
from rallypoint.launch.round_spec import RoundSpec
from rallypoint.launch.wakeup_pipe import WakeupPipe
from rallypoint.launch.workers.worker_group import WorkerGroup
from rallypoint.recipes.join_args import shortened
from rallypoint.recipes.rendezvous import Status

__all__ = ["RoundPreemption"]

POLL_S = 0.02
"""How often the records of ranks are read."""

STATUS_S = 1.0
"""How often the nodes of the round are counted."""

REST_S = 10.0
"""How long the other nodes may take, beyond the grace period, after the preemption timeout."""


class RoundPreemption:
    """The agreement of one round, as one node sees it; `stop` stops all workers of the node with a signal."""

    def __init__(
        self,
        spec: RoundSpec,
        job: Job,
        run: NodeRun,
        workers: WorkerGroup,
        policy: RestartPolicy,
        events: Events,
        wakeup: WakeupPipe,
        stop: Callable[..., object],
    ) -> None:
        self._spec, self._job, self._run, self._workers = spec, job, run, workers
        self._policy, self._events, self._wakeup, self._stop = policy, events, wakeup, stop
        self._keys: StopKeys | None = None
        self._seen: StopState | None = None
        """The state that was told to the ranks and the user last."""

        self._published: NodeStop | None = None
        self._nodes: list[str] = []
        self._count_by = Deadline(0.0)
        self._ends_by = Deadline(0.0)
        self._leaves_by: Deadline | None = None
        """When this node goes on without the others; set at the preemption timeout."""

        self._any_stopped = False
        self.due: Deadline | None = None
        """When to look at the records again; None without a request."""

        self.holds_round = False
        """Whether the round is over, and goes on until its ranks have stopped."""

    # The agent's loop

    def next(self) -> Decision | None:
        """Look at the agreement, if it is time to; return what to do when it is over."""
        request = self._wakeup.preempted
        if self._keys is not None and self._keys.round_store is not self._run.run_state.round_store:
            self._restart()
        if request is not None and self._keys is None:
            reason = shortened(f"{self._spec.node}: {request.reason}", "reason")
            first = StopRequest(node=self._spec.node, reason=reason, signal=request.signal)
            self._begin(first)
        if self._keys is None or not (self._keys.changed or self.due is None or self.due.expired()):
            return None
        self._keys.changed = False  # first: a change during the look causes another look
        self.due = Deadline(POLL_S)
        return self._look(self._keys)

    def notice(self) -> None:
        """Join the agreement, if another node has begun one."""
        if self._keys is None:
            keys = self._open()
            if keys.has_begun():
                self._join(keys)

    def exited(self, end: WorkerExit) -> Decision | None:
        """Return what follows the exit of a worker that was told to stop, and has not failed."""
        if self._keys is None or end.code not in (0, PREEMPTED_CODE):
            return None
        record = self._record(end.rank)
        if not record.stopped:
            return None
        self._any_stopped, self.due = True, Deadline(0.0)
        return self._policy.stopped(end.rank, f"rank {end.rank} has stopped at the agreed step: {end.description}")

    def holds(self, status: Status) -> bool:
        """Return whether ranks go on to the agreed step although the round is over: no node that they need was lost."""
        self.holds_round = False
        if self._keys is None or self._leaves_by is not None:
            return False
        if self._keys.state is not None and self._keys.state.phase == StopPhase.OVER:
            self.holds_round = True  # the next look ends it, with the reason
            return True
        progress = self._run.progress(status)
        lost = set(progress.members).difference(progress.living, progress.done)
        self.holds_round = not lost or all(self._record(rank).stopped for rank in self._policy.running)
        return self.holds_round

    def close(self) -> None:
        """End what listens to the store."""
        if self._keys is not None:
            self._keys.close()

    # Inside

    def _restart(self) -> None:
        """Begin again with another session: what this node knew of the old one's keys may be old."""
        self._keys, self._published, self._count_by = None, None, Deadline(0.0)
        self.notice()

    def _open(self) -> StopKeys:
        return StopKeys(self._run.run_state.round_store, self._wakeup.wake)

    def _begin(self, request: StopRequest) -> None:
        keys = self._open()
        keys.begin(StopState(phase=StopPhase.ASKED, request=request, reason=request.reason))
        self._run.run_state.notify()
        self._join(keys)

    def _join(self, keys: StopKeys) -> None:
        keys.join()
        if self._keys is None and self._seen is None:
            self._ends_by = Deadline(self._job.preempt_timeout_s)
        self._keys, self.due = keys, Deadline(0.0)

    def _look(self, keys: StopKeys) -> Decision | None:
        """Tell the ranks the state, report on them, decide if this is the coordinator; act on the state."""
        state = keys.state
        if state is None:
            return None
        self._tell(state)
        ranks = [self._record(rank) for rank in self._policy.running]
        report = node_stop(ranks, state.step, self._any_stopped)
        self._publish(keys, report)
        if self._is_coordinator():
            keys.watch_reports()
            reports = {**(keys.reports or {}), self._spec.node: report}
            decided = decide_stop(state, self._nodes, reports)
            if isinstance(decided, StopState):
                keys.advance(state, decided)
                keys.changed = True  # tell the ranks first
                return None
        return self._act(state)

    def _tell(self, state: StopState) -> None:
        """Write the step into the records of all ranks, also of those that were started since; report a new state."""
        committed = state.phase not in (StopPhase.ASKED, StopPhase.PROPOSED)
        for rank in self._policy.running:
            numbers = self._workers.records.numbers(rank - self._spec.first)
            if numbers is not None and state.step is not None:
                numbers[PROPOSED] = state.step
                if committed:
                    numbers[COMMITTED] = state.step
        if self._seen is None or state.order > self._seen.order:
            is_new = self._seen is None or self._seen.phase != state.phase
            self._seen = state
            why = f"{state.request.reason}: " if state.phase != StopPhase.ASKED else ""
            begun = "; all ranks are asked to stop" if state.phase == StopPhase.ASKED else ""
            message = f"{why}{state.reason}{begun}"
            self._run.monitor.reporter.state(self._state_word, message)
            facts = {"phase": state.phase, "step": state.step, "by": state.request.node}
            self._events.say("preemption", message, as_text=is_new and state.phase != StopPhase.PROPOSED, **facts)

    @property
    def _state_word(self) -> str:
        return "draining" if self._wakeup.preempted is not None else "stopping"

    def _publish(self, keys: StopKeys, report: NodeStop) -> None:
        """Write the report, if something else than a passed step below the proposed one has changed."""
        last = self._published
        passes = report.passed is not None and report.step is not None and report.passed >= report.step
        known = report if last is None or passes else msgspec.structs.replace(report, passed=last.passed)
        if known != last:
            keys.report(self._spec.node, report)
            self._published = report

    def _is_coordinator(self) -> bool:
        if self._count_by.expired():
            self._count_by = Deadline(STATUS_S)
            nodes = self._run.rendezvous.status().nodes
            self._nodes = sorted(set(nodes).intersection(self._spec.members), key=lambda node: nodes[node])
        return bool(self._nodes) and self._nodes[0] == self._spec.node

    def _act(self, state: StopState) -> Decision | None:
        """Signal the workers that do not ask, or stop all workers at the timeout; return what to do at the end."""
        running = sorted(self._policy.running)
        if running and state.phase == StopPhase.SIGNALLED:
            self._stop_all(signal.Signals[state.request.signal] if _is_signal(state.request.signal) else signal.SIGTERM)
        elif self._leaves_by is None and self._ends_by.expired() and state.phase != StopPhase.OVER:
            self._leaves_by = Deadline(self._job.grace_s + REST_S)
            late = f": {rank_list(running)} still running" if running else ""
            message = f"not all ranks have stopped within {self._job.preempt_timeout_s:g} s (--preempt-timeout){late}"
            self._events.say("preemption", message, phase="timeout", step=state.step, ranks=running)
            self._stop_all(signal.SIGTERM)
        late_too = self._leaves_by is not None and self._leaves_by.expired()
        if state.phase != StopPhase.OVER and not late_too:
            return None
        own = self._wakeup.preempted
        if own is not None:
            self._wakeup.preempted = own._replace(reason=f"{own.reason}: {state.reason}")  # for the end of the run
            return Decision(Action.PREEMPTED, f"{state.request.reason}: {state.reason}; this node leaves")
        return Decision(Action.REJOIN, f"{state.request.reason}: {state.reason}; no restart is used")

    def _stop_all(self, number: int) -> None:
        """Stop all workers of this node, with the grace period."""
        self._any_stopped = True
        self._stop(signum=number)
        self._policy.reset()
        self.due = Deadline(0.0)

    def _record(self, rank: int) -> RankStop:
        """Return what the record of a rank says."""
        numbers = self._workers.records.numbers(rank - self._spec.first)
        if numbers is None:
            return RankStop(rank, NONE, NONE, False)
        return RankStop(rank, numbers[PASSED], numbers[ACCEPTED], numbers[STOPPED] != NONE)


def _is_signal(name: str) -> bool:
    return name in signal.Signals.__members__
