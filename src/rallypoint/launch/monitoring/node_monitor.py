"""The monitor of one node: its reports to the store, and what it does on requests of others."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import msgspec

from rallypoint.core.stacks import RankStack
from rallypoint.launch.events import Events
from rallypoint.launch.job import Job
from rallypoint.launch.monitoring.agent_requests import DRAIN, KILL, RESTART, AgentRequest, RequestListener
from rallypoint.launch.monitoring.native_stacks import add_native
from rallypoint.launch.monitoring.node_reporter import NodeReporter
from rallypoint.launch.monitoring.stack_dump import dump_stacks, process_state, state_word
from rallypoint.launch.wakeup_pipe import Preempted, WakeupPipe
from rallypoint.launch.workers.worker_group import WorkerGroup
from rallypoint.store.base import Store

__all__ = ["NodeMonitor"]


class NodeMonitor:
    """Reports on this node, and listens to requests, in each store that it is attached to."""

    def __init__(self, job: Job, wakeup: WakeupPipe, events: Events) -> None:
        self.reporter = NodeReporter(job)
        self._requests = RequestListener(job.run_id, self._requested_stacks, self._carry_out)
        self._wakeup = wakeup
        self._events = events
        self.restart: AgentRequest | None = None
        """A request to restart the workers, for the agent's loop."""

        self._node = job.node or ""
        self._stopped_at: dict[int, float] = {}
        """When a process was first seen stopped; forgotten when it runs again."""

    def watch(self, workers: WorkerGroup) -> None:
        """Report on these workers from now on."""
        self.reporter.workers = workers

    def attach(self, store: Store, node: str) -> None:
        """Use this store from now on, under this name of the node."""
        self._node = node
        self.reporter.attach(store, node)
        self._requests.attach(store, node)

    def detach(self) -> None:
        """Use no store until the next `attach`: it is lost."""
        self.reporter.detach()

    def observe(self) -> list[RankStack]:
        """Return the state and the progress of this node's running workers, without their stacks."""
        workers, now, found = self.reporter.workers, time.monotonic(), []
        entries = () if workers is None else workers.entries
        for entry in entries:
            state = state_word(process_state(entry.pid))
            if state == "ended":
                continue
            if state == "running":
                self._stopped_at.pop(entry.pid, None)
            else:
                self._stopped_at.setdefault(entry.pid, now)
            found.append(
                RankStack(
                    rank=entry.rank,
                    node=self._node,
                    pid=entry.pid,
                    state=state,
                    stopped_s=self._stopped_s(entry.pid),
                    **self._progress(entry.local_rank),
                )
            )
        return found

    def highest_step(self) -> int | None:
        """Return the highest step that a worker of this node has reached; None if none has called `progress`."""
        workers = self.reporter.workers
        entries = () if workers is None else workers.entries
        steps = [self._progress(entry.local_rank).get("step") for entry in entries]
        return max((step for step in steps if step is not None), default=None)

    def _progress(self, local_rank: int) -> dict[str, Any]:
        workers = self.reporter.workers
        progress = None if workers is None else workers.records.progress(local_rank)
        return {} if progress is None else {"step": progress.step, "age_s": progress.age_s}

    def _stopped_s(self, pid: int) -> float:
        return time.monotonic() - self._stopped_at[pid] if pid in self._stopped_at else 0.0

    def stacks(self, ranks: list[int] | None = None, cancelled: Callable[[], bool] = lambda: False) -> list[RankStack]:
        """Return the stacks of this node's running workers, or of some of them."""
        workers = self.reporter.workers
        entries = () if workers is None else workers.entries
        wanted = [entry for entry in entries if ranks is None or entry.rank in ranks]
        pids = {entry.rank: entry.pid for entry in wanted}
        found = dump_stacks(wanted, self._node, cancelled=cancelled)
        running = [one for one in found if one.state != "ended"]
        return [msgspec.structs.replace(one, stopped_s=self._stopped_s(pids[one.rank])) for one in running]

    def _requested_stacks(self, request: AgentRequest) -> list[RankStack]:
        found = self.stacks(request.ranks)
        return add_native(found, every=request.ranks is not None) if request.native else found

    def _carry_out(self, request: AgentRequest) -> None:
        """Carry out a request of an operator; in the thread of the watch."""
        if request.kind == RESTART:
            self.restart = request
            self._wakeup.wake()
        elif request.kind in (DRAIN, KILL):
            self._events.say(request.kind, f"this node leaves the run ({request.kind}), {request.origin}")
            self.reporter.state("draining", request.origin)
            if request.kind == DRAIN:
                self._wakeup.preempt(Preempted(f"drain {request.origin}", whole=not request.node))
                return
            os.kill(os.getpid(), signal.SIGTERM)  # wherever this agent waits
            os.kill(os.getpid(), signal.SIGINT)

    def close(self) -> None:
        """Write no more reports."""
        self.reporter.close()
