"""One node's side of a run: its session with the server, its rendezvous, and the state that the agents share.

A session ends if the node is disconnected for longer than the grace period, or if the server dies. `attach` opens
another under the same name, and notes whether the server is a different one, without the state of the run.

Rejected: to let the store replace its session by itself. The leases of the lost session are gone, and only the agent
knows the consequence: its workers have to stop.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Container

from rallypoint.core.machines.machine import Waiting
from rallypoint.core.policy.restart_policy import RoundProgress
from rallypoint.deadline import Deadline
from rallypoint.errors import ConnectionLost, MeetingError, NetworkError, RallypointError
from rallypoint.launch.agent_liveness import AgentLiveness
from rallypoint.launch.events import Events
from rallypoint.launch.failures import Failure, server_failure
from rallypoint.launch.job import Job
from rallypoint.launch.monitoring.node_monitor import NodeMonitor
from rallypoint.launch.preemption.leaving import close_if_preempted
from rallypoint.launch.round_entry import RoundEntry
from rallypoint.launch.round_spec import RoundSpec
from rallypoint.launch.run_state import RunState, failure_in
from rallypoint.launch.stores.interruptible_store import interruptible_view
from rallypoint.launch.stores.store_provider import StoreProvider
from rallypoint.launch.stores.store_search import READ_S, StoreSearch
from rallypoint.launch.wakeup_pipe import WakeupPipe
from rallypoint.recipes import rendezvous_batch
from rallypoint.recipes.rendezvous import Rendezvous, Round, Status
from rallypoint.store.base import Store
from rallypoint.store.batch import Answer, Batch

__all__ = ["FAILED", "SUCCEEDED", "NodeRun"]

SUCCEEDED, FAILED = "succeeded", "failed"
"""The results of a run."""

LEAVE_S = 5.0
"""Time limit of leaving the run."""


class NodeRun:
    """One node's side of a run, across reconnects to its server."""

    run_state: RunState
    rendezvous: Rendezvous
    store: Store
    """The store of the run; a terminating signal interrupts its requests."""

    def __init__(self, job: Job, events: Events, wakeup: WakeupPipe) -> None:
        self._job = job
        self._events = events
        self._wakeup = wakeup
        self._search = StoreSearch(job, events, wakeup)
        self._members: list[str] = []
        self._suspects: set[str] = set()
        self._round: Round | None = None
        self._provider: StoreProvider | None = None
        self._server_id: bytes | None = None
        self._opening: Batch
        self._has_begun = False
        """Whether a closed run of this id has been opened again if it was to be: once, before the first join."""

        self._must_count = True
        """Whether the number of used restarts is read after the exchange, when all nodes have given back restarts."""

        self._stack = contextlib.ExitStack()
        self.monitor = NodeMonitor(job, wakeup, events)
        self._liveness = AgentLiveness(job.run_id, job.agent_timeout_s, wakeup.wake)
        self.done = False
        """Whether this node's workers have succeeded in its last round, as announced to the others."""

        self.state_lost = False
        """Whether the server has lost the state of the run, or is a different one; the agent resets it."""

        self.failed = ""
        """Why this node fails, if it does; sent to the others when it leaves."""

        self.held = ""
        """What the health gate holds this node back for; empty if it does not."""

    @property
    def waits_for(self) -> str:
        """What an agent without workers is doing; reported if a signal ends it."""
        idle = "no worker ran" if self._job.max_nodes == 1 else "waiting for other nodes"
        return self._search.waits_for or self.held or idle

    # The session

    @property
    def recovers(self) -> bool:
        """Whether the server of the last session may return with it."""
        return self._provider is not None and self._provider.recovers

    def attach(self, deadline: Deadline) -> None:
        """Open a session with the server, the first one or one that replaces a lost one.

        Raises NetworkError if no server answers by the deadline.
        """
        self._provider = None
        self.monitor.detach()
        self._stack.close()  # what remains of the previous session
        at = self._search.find(deadline)
        self._stack.callback(at.close)
        at.store.set_timeout(READ_S)
        store = interruptible_view(at.store, self._wakeup)
        first, same = self._server_id is None, self._server_id == at.server_id
        run_state = RunState(store, self._job.run_id, self._wakeup.wake, 0 if first else self.run_state.used)
        rendezvous = self._rendezvous(store)
        if not first:
            rendezvous.succeed(self.rendezvous, same)
            self._wakeup.interruptible(run_state.confirm)
        self._opening = Batch(store)
        if not self._has_begun:
            rendezvous_batch.begin_anew(rendezvous, self._opening).then(self._begun)
        self._opening.send()
        self._provider, self._server_id, self.run_state, self.rendezvous = at, at.server_id, run_state, rendezvous
        self.state_lost = self.state_lost or not (first or same)
        self.store = store
        if self._job.node is not None:  # otherwise the name is known once this node has joined
            self.monitor.attach(store, self._job.node)

    def _begun(self, _: bool) -> None:
        self._has_begun = True

    def opened(self) -> None:
        """Wait for the replies to the requests of `attach`."""
        self._opening.wait()
        self._wakeup.interruptible(self.run_state.confirm)

    def close(self) -> None:
        """Leave the run if the server answers, and end the session."""
        with self._wakeup.uninterrupted(), self._stack:
            if self._provider is not None:
                self._leave(self._provider)

    def _rendezvous(self, store: Store) -> Rendezvous:
        job = self._job
        return Rendezvous(
            store,
            job.run_id,
            job.min_nodes,
            job.max_nodes,
            node=job.node,
            rank=job.node_rank,
            settings=job.settings(),
            last_call=job.last_call_s,
            address=job.local_address,
            spare=job.min_nodes < job.max_nodes,
            progress=self._report_wait,
            on_change=self._wakeup.wake,
        )

    @property
    def _stores(self) -> StoreProvider:
        assert self._provider is not None
        return self._provider

    # Rounds

    def join_round(self) -> RoundSpec:
        """Join rounds until one lasts long enough for its nodes to exchange their data; return it."""
        self.done = False
        self.monitor.reporter.state("waiting", "joining a round")
        while True:
            with self._events.status(self._waiting_reason):
                joined, entering = self._join()
                entry = RoundEntry(self._job, self._events, joined, self.rendezvous, self._stores)
                try:
                    self._wakeup.interruptible(entry.exchange, patience_s=0.0)
                except (MeetingError, ConnectionLost) as error:
                    if not isinstance(error, MeetingError) and not self._stores.failure_reason():
                        raise
                    entering.wait()
                    self._events.say("rejoin", f"round {joined.number} failed to start: {error}")
                    continue
            entering.wait()
            self._members = entry.members
            with Batch(self.store) as entering:
                self._liveness.enter(entering, self.store, self._members, joined.rank)
                if self._must_count:
                    self.run_state.count_restarts(entering)
            self._wakeup.interruptible(self._liveness.confirm)
            self.monitor.reporter.restarts = self.run_state.used
            return entry.spec(self._wakeup.interruptible(self._stores.relay), self.run_state.used)

    def _join(self) -> tuple[Round, Batch]:
        """Join a round, and enter it; return the batch of its first requests, to be collected once it has formed."""
        join_s, entering = self._job.join_timeout_s, Batch(self.store)
        try:
            joined = self._round = self._wakeup.interruptible(
                lambda: rendezvous_batch.join(self.rendezvous, entering, join_s), patience_s=0.0
            )
        except NetworkError:
            with contextlib.suppress(RallypointError):
                self._opening.wait()  # before the next `attach`: the requests may have reached the server
            raise
        self.opened()
        self.run_state.enter_round(entering, joined.store, self.rendezvous.node)
        self._events.node = self.rendezvous.node
        self.monitor.attach(self.store, self.rendezvous.node)
        self._must_count = joined.world_size > 1 or bool(self._suspects)
        if not self._must_count:
            self.run_state.count_restarts(entering)
        entering.send()
        self._refund_lost_nodes()
        return joined, entering

    def rejoin_finished(self) -> None:
        """Rejoin a round in which this node is done, after a reconnect; if another round forms, join that one."""
        last, status = self._round, self.rendezvous.status()
        if last is None or status.round != last.number or not set(self._members).isdisjoint(status.waiting):
            self.done = False  # another round forms, or has formed
            return
        with Batch(self.store) as batch:
            self.run_state.enter_round(batch, self.rendezvous.follow(last).store, self.rendezvous.node)
        if status.phase != "closed":
            self.finish()  # the first announcement may have been lost
        self.run_state.notified = True

    def finish(self) -> bool:
        """Announce that this node's workers have succeeded; return whether those of all nodes have."""
        self.done = True  # first: even if the server is lost now, the workers are not run again
        with Batch(self.store) as batch:
            done = self.run_state.finish(batch, self.rendezvous.node)
        self._events.say("done", "announced that this node is done", as_text=False)
        return RoundProgress(self._members, (), done=done.value).all_done

    def check(self) -> tuple[Status, Failure | None]:
        """Return the state of the run, and the failure for which all nodes stop, if any."""
        with Batch(self.store) as batch:
            status = rendezvous_batch.status(self.rendezvous, batch)
            cause = self.run_state.ask_cause(batch)
        return status.value, failure_in(cause)

    def progress(self, status: Status | None = None) -> RoundProgress:
        """Return which nodes of this round are alive, waiting and done."""
        with Batch(self.store) as batch:
            asked = rendezvous_batch.status(self.rendezvous, batch)  # first: a node that leaves in between was done
            done = self.run_state.ask_done(batch)
        status = status or asked.value
        return RoundProgress(self._members, list(status.nodes), status.waiting, done.value)

    def lost_nodes(self) -> set[str]:
        """Return the nodes whose loss explains failures of others: dead before they were done, or without relay."""
        progress, cause = self.progress(), self.run_state.cause()
        of_servers = {cause.node} if cause is not None and cause.rank < 0 else set()
        return set(progress.members).difference(progress.living, progress.done) | of_servers

    def evict_silent_agents(self) -> None:
        """Remove nodes whose agents are stopped from the round; the others then form another one."""
        while self._liveness.silent and self._round is not None:
            node = self._liveness.silent.popleft()
            self._events.say("evict", f"{node}: {self._liveness.reason}", nodes=[node])
            self.rendezvous.evict(node, self._round.scope, self._liveness.reason)

    def announce_failure(self, failures: Container[Failure]) -> None:
        """Notify all agents of a failure; if it is one of `failures`, it used a restart: remember possible causes."""
        with Batch(self.store) as batch:
            self.run_state.notify(batch)
            cause, done = self.run_state.ask_cause(batch), self.run_state.ask_done(batch)
        if failure_in(cause) in failures:
            self._suspects = set(self._members).difference(done.value)

    def store_lost(self, failed: bool = False) -> Failure | None:
        """If the store of this node's workers is lost, tell all nodes to stop, and return it as their failure.

        It is the cause of any failure that follows, here or on other nodes, and uses no restart: no worker failed by
        itself. If a worker has `failed` already, also probe the store on rank 0's node.
        """
        how = self._wakeup.interruptible(lambda: self._stores.failure_reason(failed))
        if not how:
            return None
        cause = server_failure(self.rendezvous.node, how)
        self.run_state.announce(cause)
        return cause

    def _refund_lost_nodes(self) -> None:
        """Give back a restart that the loss of a node has used; the others wait for this node before they count."""
        gone, self._suspects = self.run_state.dead_among(self._suspects), set()
        if gone:
            self.run_state.refund()
            message = f"no restart is used for the failure: lost {', '.join(gone)} in the same round"
            self._events.say("refund", message, nodes=gone)

    def end_run(self, result: str, reason: str, failure: Failure | None = None) -> str:
        """Close the run for all nodes, with the failure that ended it; return its result: the first one counts."""
        with Batch(self.store) as batch:
            if failure is not None:
                self.run_state.fail(batch, failure)
            rendezvous_batch.close(self.rendezvous, batch, result, reason)
            self.run_state.notify(batch)
            status = rendezvous_batch.status(self.rendezvous, batch)
        return status.value.result or result

    def _leave(self, at: StoreProvider) -> None:
        """Leave the run; give up after LEAVE_S if the server does not answer."""
        self.monitor.close()
        given_up = threading.Timer(LEAVE_S, at.store.close)
        given_up.daemon = True
        given_up.start()
        with contextlib.suppress(RallypointError):
            with Batch(self.store) as batch:
                left = self._ask_to_leave(batch, self.failed, self.done)
                if self.failed:
                    self.run_state.notify(batch)
            close_if_preempted(self.rendezvous, self.run_state, self._wakeup.preempted, self._round is not None)
            if left is not None and left.value == 0 and self._round is not None:
                at.close_round(self._job.run_id, self._round.scope, LEAVE_S)
                with Batch(self.store) as batch:
                    rendezvous_batch.drop_round(self.rendezvous, batch, self._round.scope)
                    self.run_state.clear(batch)
        given_up.cancel()

    def leave_round(self) -> None:
        """Leave the round, as a lost node does; this node may join again."""
        self._suspects = set()
        with Batch(self.store) as batch:
            left = self._ask_to_leave(batch)
        if left is not None and left.value == 0 and self._round is not None:
            with Batch(self.store) as batch:
                rendezvous_batch.drop_round(self.rendezvous, batch, self._round.scope)

    def _ask_to_leave(self, batch: Batch, failed: str = "", done: bool = False) -> Answer[int] | None:
        """Ask to leave the round; the answer is how many nodes are left, or None if this one is not in it."""
        self.run_state.leave(batch)
        left = rendezvous_batch.leave(self.rendezvous, batch, failed, done)
        self._liveness.leave(batch)
        return left

    def _waiting_reason(self) -> str:
        status = self.rendezvous.status()
        return "this node is a spare" if status.phase == "formed" else status.reason

    def _report_wait(self, waiting: Waiting) -> None:
        self.opened()
        self.monitor.reporter.state("waiting", waiting.reason)
        self._events.waits(f"this node has waited {waiting.waited_s:.0f} s: {waiting.reason}")
