"""The hang watch of one round: notices ranks that stopped, looks at the stacks of all nodes, and names those that hang.

The agent's loop asks it from time to time (`check`). Only when a rank of this node is overdue does it ask for stacks:
of all nodes of the round, if a failure restarts all of them, else of its own workers. One agent at a time does so: the
first, by a key of the round, and another one if that one has not come to a result in time.
`core/policy/hang_policy.py` decides.
"""

from __future__ import annotations

import signal
import socket
import time
from datetime import datetime, timezone

from rallypoint.core.policy.hang_policy import HungRanks, find_hung, is_overdue, reason_of
from rallypoint.core.stacks import RankStack, decode_stacks, fold
from rallypoint.deadline import Deadline
from rallypoint.errors import RallypointError
from rallypoint.launch.events import Events
from rallypoint.launch.failures import Failure
from rallypoint.launch.job import Job
from rallypoint.launch.monitoring.agent_requests import STACKS, AgentRequest, ask_agents
from rallypoint.launch.monitoring.stack_dump import DUMP_S
from rallypoint.launch.node_run import NodeRun
from rallypoint.launch.round_spec import RoundSpec
from rallypoint.launch.wakeup_pipe import WakeupPipe
from rallypoint.launch.workers.worker_group import WorkerGroup
from rallypoint.text import printable

__all__ = ["HangWatch"]

LOOKS = 8
"""How often the workers are looked at in the time of a hang timeout; at most every 0.1 s, and at least every second."""

ANSWER_S = 5.0
"""How long the agents of other nodes may take to send their stacks."""

LOOK_S = ANSWER_S + 2 * DUMP_S
"""How long the look of one agent may take before another one looks as well: it may be gone."""

STACK_FRAMES = 30


class HangWatch:
    """Watches the workers of one node in one round; without --hang-timeout it does nothing."""

    def __init__(
        self, spec: RoundSpec, job: Job, run: NodeRun, workers: WorkerGroup, events: Events, wakeup: WakeupPipe
    ) -> None:
        self._spec, self._job, self._run, self._workers = spec, job, run, workers
        self._events, self._wakeup = events, wakeup
        self._timeout_s = job.hang_timeout_s
        self.due: Deadline | None = self._next()
        """When to look at the workers again; None if they are not watched."""

    def _next(self) -> Deadline | None:
        return Deadline(min(1.0, max(0.1, self._timeout_s / LOOKS))) if self._timeout_s else None

    def check(self) -> list[Failure]:
        """Look at the workers, if it is time to; return the failures of those that hang, the first one last."""
        if self.due is None or not self.due.expired():
            return []
        self.due = self._next()
        overdue = [one for one in self._run.monitor.observe() if is_overdue(one, self._timeout_s)]
        if not overdue or not self._is_first():
            return []
        began_at = time.monotonic()
        stacks, unknown = self._stacks()
        found = find_hung(stacks, self._timeout_s, unknown)
        if not isinstance(found, HungRanks):
            self.due = Deadline(max(1.0, self._timeout_s / 4))  # the question disturbs the workers
            self._events.say("no-hang", found.reason, as_text=False)
            return []
        path = self._workers.save_stacks(_listed(found.reason, stacks))
        took_s = time.monotonic() - began_at
        self._events.say("hang", found.reason, ranks=found.ranks, stacks=path, took_s=round(took_s, 3))
        self._run.monitor.reporter.hung = {one.rank: reason_of(one) for one in stacks if one.rank in found.ranks}
        groups = tuple(str(group) for group in fold(stacks))
        blamed = sorted((one for one in stacks if one.rank in found.ranks), key=lambda one: -one.rank)
        return [self._failure(one, found.ranks, groups) for one in blamed]

    def _is_first(self) -> bool:
        """Return whether this agent is to look at the stacks of all nodes; true if it only looks at its own."""
        patience_s = max(LOOK_S, self._timeout_s)
        return not self._looks_everywhere or self._run.run_state.claim_hang(self._spec.node, patience_s)

    @property
    def _looks_everywhere(self) -> bool:
        return self._spec.nodes > 1 and self._job.rules.restart == "group"

    def _stacks(self) -> tuple[list[RankStack], list[str]]:
        """Return the stacks of the running ranks of this round, and the nodes that did not answer.

        They are those of this node only if the store fails.
        """
        monitor = self._run.monitor
        if self._looks_everywhere:
            request = AgentRequest(kind=STACKS)
            try:
                answers, missing = self._wakeup.interruptible(
                    lambda: ask_agents(self._run.store, self._job.run_id, request, ANSWER_S)
                )
                found = [one for data in answers.values() for one in decode_stacks(data)]
                return found, [node for node in missing if node in self._spec.members]
            except RallypointError:
                pass
        return monitor.stacks(cancelled=self._wakeup.is_ending), []

    def _failure(self, one: RankStack, hung: list[int], groups: tuple[str, ...]) -> Failure:
        frames = [f"  {frame}" for frame in one.stack[:STACK_FRAMES]]
        here = one.rank in self._spec.ranks
        return Failure(
            node=one.node or self._spec.node,
            host=socket.gethostname() if here else one.node,
            rank=one.rank,
            local_rank=one.rank - self._spec.first if here else -1,
            pid=one.pid,
            code=-signal.SIGKILL,
            how="hung",
            at=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            message=f"hung: {reason_of(one)}",
            traceback="\n".join(["Stack (most recent call first):", *frames]) if frames else "",
            hung=tuple(hung),
            stacks=groups,
        )


def _listed(reason: str, stacks: list[RankStack]) -> str:
    """Return the content of a stack file: the reason, the places, and the stacks of all ranks."""
    lines = [reason, "", *map(str, fold(stacks))]
    for one in sorted(stacks, key=lambda one: one.rank):
        lines += ["", f"rank {one.rank} on {one.node} (pid {one.pid}), step {one.step}: {one.place}", one.text.rstrip()]
    return printable("\n".join(lines) + "\n", keep="\n")
