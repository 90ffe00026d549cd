"""The part of the model about runs: what the rendezvous knows of a run, joined with the reports of its agents."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from itertools import islice

import msgspec

from rallypoint.core.machines.machine import Call
from rallypoint.core.machines.rendezvous import RendezvousMachine
from rallypoint.core.policy.round_policy import JoinedNode
from rallypoint.core.run_report import FailureReport, HealthReport, NodeReport
from rallypoint.server.status.history import History, aged
from rallypoint.server.status.model import NodeStatus, RunStatus
from rallypoint.server.status.reports import ReceivedReport, RunSource
from rallypoint.server.status.wait_times import WaitTimes

__all__ = ["MAX_NODES", "MAX_RANKS", "RunDescriber"]

MAX_NODES = 1024
"""Nodes listed for one run."""

MAX_RANKS = 4096
"""Workers listed in one model; of the others, only those that need attention."""

MAX_ODD = 64
"""Such workers listed for one node."""

CALM = frozenset(("starting", "running", "succeeded", "ended"))
"""States of workers that need no attention."""

SILENT = 3.0
"""A report is overdue after this many of its intervals."""


class RunDescriber:
    """Builds the entries of runs."""

    def __init__(self, times: WaitTimes, history: History, clock: Callable[[], float] = time.monotonic) -> None:
        self._times, self._history, self._clock = times, history, clock

    def describe(self, source: RunSource, listed: int) -> RunStatus:
        """Return the entry of a run; `listed` workers of other runs are listed already."""
        status = RunStatus(run=source.name, phase="unknown")
        machine = source.machine
        reports = {one.report.node: one for one in source.reports if one.report is not None}
        if machine is not None:
            _describe_rendezvous(status, machine)
            status.round_s = self._history.standing_s(source.name)
        names = {**(machine.ranks if machine is not None else {}), **(machine.waiting if machine is not None else {})}
        everybody = list(dict.fromkeys([*names, *reports]))
        status.more_nodes = max(0, len(everybody) - MAX_NODES)
        for name in islice(everybody, MAX_NODES):
            status.nodes.append(self._node(name, source, reports.get(name)))
        out = {node.node for node in status.nodes if node.health is not None}  # they left, and were not lost
        status.missing = [name for name in status.missing if name not in out]
        _count_ranks(status, reports, MAX_RANKS - listed)
        status.failure = self._first_failure(reports) if reports else self._history.failure_of(source.name)
        return status

    def _node(self, name: str, source: RunSource, received: ReceivedReport | None) -> NodeStatus:
        machine, node = source.machine, NodeStatus(node=name, state="lost")
        if machine is not None:
            _place(node, machine)
            joined = machine.waiting.get(name) or machine.nodes.get(name)
            if joined is not None:
                node.host, node.address = joined.host, joined.address
                node.since_s = self._since(source.key, joined)
        report = None if received is None else received.report
        if received is not None and report is not None:
            node.host, node.address = report.host or node.host, report.address or node.address
            node.state, node.reason, node.pid = report.state, report.reason, report.pid
            node.report_age_s = max(0.0, self._clock() - received.at)
            late = node.report_age_s > SILENT * max(1.0, report.interval_s)
            node.silent = late and report.state not in ("done", "failed")
            node.ranks, node.health = report.ranks, _health_after(report.health, node.report_age_s)
        return node

    def _since(self, key: bytes, joined: JoinedNode) -> float:
        call: Call = joined.call
        return self._times.since(0, RendezvousMachine, key, call)

    def _first_failure(self, reports: dict[str, ReceivedReport]) -> FailureReport | None:
        """Return the failure that was seen first, by what each agent says of its age."""
        now = self._clock()
        found = [
            (now - one.at + one.report.failure.age_s, one.report.failure)
            for one in reports.values()
            if one.report is not None and one.report.failure is not None
        ]
        if not found:
            return None
        age_s, failure = max(found, key=lambda item: item[0])
        return aged(failure, age_s)


def _describe_rendezvous(status: RunStatus, machine: RendezvousMachine) -> None:
    status.round = machine.number
    status.min_nodes, status.max_nodes = machine.limits.min_nodes, machine.limits.max_nodes
    if machine.closed is not None:
        status.phase, (status.result, status.reason) = "closed", machine.closed
    elif not machine.over:
        status.phase, status.reason = "running", machine.reason
    else:
        latest = next(reversed(machine.waiting.values()), None)
        status.phase = "gathering"
        status.reason = machine.over if latest is None else machine.explain(latest.call).reason
    if machine.closed is None:
        here = (machine.nodes, machine.waiting, machine.finished)
        status.missing = [name for name in islice(machine.ranks, MAX_NODES) if not any(name in part for part in here)]


def _place(node: NodeStatus, machine: RendezvousMachine) -> None:
    """Set the place of a node in the rendezvous."""
    name = node.node
    if name in machine.waiting:
        node.state, node.spare = "waiting", name in machine.spares
    elif name in machine.finished:
        node.state, node.rank = "done", machine.ranks.get(name)
    elif name in machine.nodes:
        node.state, node.rank = "waiting" if machine.over else "running", machine.ranks.get(name)
    elif machine.closed is not None:
        node.state, node.rank = "done", machine.ranks.get(name)


def _health_after(health: HealthReport | None, age_s: float) -> HealthReport | None:
    """Return the health of a node as of now, by a report of that age."""
    if health is None:
        return None
    next_s = None if health.next_check_s is None else max(0.0, round(health.next_check_s - age_s, 3))
    return msgspec.structs.replace(health, out_s=round(health.out_s + age_s, 3), next_check_s=next_s)


def _count_ranks(status: RunStatus, reports: dict[str, ReceivedReport], room: int) -> None:
    """Count all workers by state, and list as many as there is room for; take the restarts from the reports."""
    known: list[NodeReport] = [one.report for one in reports.values() if one.report is not None]
    states = Counter(rank.state for report in known for rank in report.ranks)
    listed = 0
    for node in status.nodes:
        if len(node.ranks) > room - listed:
            node.ranks = [rank for rank in node.ranks if rank.state not in CALM][:MAX_ODD]
        listed += len(node.ranks)
    status.ranks, status.rank_states = states.total(), dict(states.most_common(16))
    status.more_ranks = status.ranks - listed
    if known:
        status.restarts = max(report.restarts for report in known)
        status.restart_budget = max(report.restart_budget for report in known)
