"""The model as plain text of a given width: `rallypoint status`, and the page where there are no scripts.

What is odd comes first: a failure, a rank that hangs, a member that is missing. Ranks in the same state are one line.
Names are escaped; a line that is too long is wrapped.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from rallypoint.core.run_report import FailureReport, HealthReport, RankReport
from rallypoint.server.status.model import NodeStatus, RunStatus, ServerStatus
from rallypoint.server.status.object_model import LockStatus, MeetingStatus, WorkStatus
from rallypoint.text import printable

__all__ = ["duration", "fold_ranks", "render_text", "size_text"]

LISTED_NODES = 8
"""Runs with at most this many nodes list them all; others list those that are not simply running."""

LISTED_ODD = 20
NAMES = 20
"""Names listed in one line."""

TRACEBACK_LINES = 40

CALM = frozenset(("running", "starting", "succeeded", "done", "waiting"))
"""States that need no attention."""


def render_text(status: ServerStatus, width: int = 80) -> str:
    """Return the model as text, each line at most `width` columns wide."""
    lines: list[str] = []
    for text in _lines(status):
        indent = len(text) - len(text.lstrip(" "))
        wrapped = textwrap.wrap(
            printable(text), max(20, width), subsequent_indent=" " * (indent + 2), break_on_hyphens=False
        )
        lines += wrapped or [""]
    return "\n".join(lines) + "\n"


def _lines(status: ServerStatus) -> Iterator[str]:
    yield from _head(status)
    for run in status.runs:
        yield ""
        yield from _run(run)
    if status.more_runs:
        yield f"and {status.more_runs} more runs"
    if status.meetings or status.locks or status.groups or status.work_queues:
        yield ""
    yield from map(_meeting, status.meetings)
    if status.more_meetings:
        yield f"and {status.more_meetings} more barriers and exchanges"
    yield from map(_lock, status.locks)
    if status.more_locks:
        yield f"and {status.more_locks} more locks"
    for group in status.groups:
        names = _names(group.members, group.more_members)
        yield f"group {_named(group.name, group.run)}: {_count(group.size, 'member')}: {names}"
    yield from map(_work_queue, status.work_queues)
    if status.more_work_queues:
        yield f"and {status.more_work_queues} more work queues"
    yield from _past(status)


def _head(status: ServerStatus) -> Iterator[str]:
    yield f"rallypoint {status.version}, {status.role}, pid {status.pid}, up {duration(status.uptime_s)}"
    if status.role == "standby":
        yield f"  the leader is at {status.leader}" if status.leader else f"  no leader: {status.trouble}"
    elif status.role == "relay":
        yield f"  relays {status.upstream}"
    if status.trouble and status.role != "standby":
        yield f"  trouble: {status.trouble}"
    if status.storage.get("disk_full"):
        yield "  the disk is full: changes are refused"
    if status.servers:
        yield f"  servers: {_names(status.servers, 0)}"
    for one in status.followers:
        yield f"  follower {one.url}: {_count(one.behind, 'commit') + ' behind' if one.behind else 'up to date'}"
    memory = f"{size_text(status.bytes)} of {size_text(status.max_bytes)}"
    counts = [_count(status.connections, "connection"), _count(status.sessions, "session")]
    counts += [_count(status.keys, "key"), f"{status.waiting} waiting", memory]
    yield "  " + ", ".join(counts)
    refused = {"refused": status.refused_connections, "denied": status.denied_connections}
    for what, count in refused.items():
        if count:
            yield f"  {_count(count, 'connection')} {what} so far"


# Runs


def _run(run: RunStatus) -> Iterator[str]:
    when = f" for {duration(run.round_s)}" if run.round_s is not None else ""
    what = f"{run.phase} ({run.result})" if run.result else run.phase
    yield f"run {run.run}: {what}, round {run.round}{when}: {run.reason}"
    facts = [f"{_count(len(run.nodes) + run.more_nodes, 'node')} ({_limits(run)})" if run.max_nodes else ""]
    facts.append(_count(run.ranks, "rank") if run.ranks else "")
    if run.restarts is not None:
        facts.append(f"{run.restarts} of {run.restart_budget} restarts used")
    yield "  " + ", ".join(filter(None, facts))
    if run.missing:
        yield f"  lost: {_names(run.missing, 0)}"
    if run.failure is not None:
        yield from _failure(run.failure, "  first failure: ")
    yield from _nodes(run)
    for line in fold_ranks([(rank, node.report_age_s or 0.0) for node in run.nodes for rank in node.ranks]):
        yield f"  {line}"
    if run.more_ranks:
        yield f"  and {run.more_ranks} more ranks"


def _limits(run: RunStatus) -> str:
    most = f" to {run.max_nodes}" if run.max_nodes > run.min_nodes else ""
    return f"of {run.min_nodes}{most}"


def _nodes(run: RunStatus) -> Iterator[str]:
    few = len(run.nodes) <= LISTED_NODES
    odd = [node for node in run.nodes if few or node.silent or node.spare or node.state not in CALM]
    for node in odd[: max(LISTED_NODES, LISTED_ODD)]:
        yield f"  {_node(node)}"
    rest = len(run.nodes) - min(len(odd), LISTED_ODD)
    if rest > 0:
        yield f"  {'and ' if odd else ''}{rest} {'more ' if odd else ''}nodes"


def _node(node: NodeStatus) -> str:
    where = ", ".join(filter(None, (node.host, node.address if node.address != node.host else "")))
    rank = f" rank {node.rank}" if node.rank is not None else ""
    since = f" for {duration(node.since_s)}" if node.since_s is not None else ""
    reason = f": {node.reason}" if node.reason else ""
    silent = f"; silent: no report for {duration(node.report_age_s or 0.0)}" if node.silent else ""
    spare = "spare, " if node.spare else ""
    out = f", {_out(node.health)}" if node.health is not None else ""
    return f"node{rank} {node.node}{f' ({where})' if where else ''}: {spare}{node.state}{since}{out}{reason}{silent}"


def _out(health: HealthReport) -> str:
    again = "" if health.next_check_s is None else f", checked again in {duration(health.next_check_s)}"
    return f"out for {duration(health.out_s)}{again}"


def _failure(failure: FailureReport, lead: str) -> Iterator[str]:
    who = f"rank {failure.rank} on {failure.node} ({failure.host}, pid {failure.pid})"
    yield f"{lead}{who}, {duration(failure.age_s)} ago: {failure.how}"
    for line in (failure.traceback or failure.message).strip().splitlines()[-TRACEBACK_LINES:]:
        yield f"    {line}"


def fold_ranks(ranks: Iterable[tuple[RankReport, float]]) -> list[str]:
    """Return a line for each group of workers in the same state, odd states first; each comes with its report's age."""
    groups: dict[tuple[str, str], list[tuple[RankReport, float]]] = {}
    for rank, age_s in ranks:
        reason = "" if rank.state in CALM else rank.reason
        groups.setdefault((rank.state, reason), []).append((rank, age_s))
    ordered = sorted(groups.items(), key=lambda item: (item[0][0] in CALM, len(item[1])))
    lines = [_group(state, reason, members) for (state, reason), members in ordered[:LISTED_ODD]]
    rest = sum(len(members) for _, members in ordered[LISTED_ODD:])
    return [*lines, f"and {rest} more ranks in other states"] if rest else lines


def _group(state: str, reason: str, members: Sequence[tuple[RankReport, float]]) -> str:
    numbers = sorted(rank.rank for rank, _ in members)
    text = f"rank{'s' if len(numbers) > 1 else ''} {_ranges(numbers)} {state}{f': {reason}' if reason else ''}"
    steps = [rank.step for rank, _ in members if rank.step is not None]
    if steps:
        text += f", step {min(steps)}" + (f" to {max(steps)}" if max(steps) > min(steps) else "")
    ages = [rank.progress_age_s + age_s for rank, age_s in members if rank.progress_age_s is not None]
    if ages:
        text += f", last progress {duration(max(ages))} ago"
    restarts = max(rank.restarts for rank, _ in members)
    if restarts:
        text += f", restarted {restarts} times" if restarts > 1 else ", restarted once"
    return text + (f" (pid {members[0][0].pid})" if len(members) == 1 else "")


def _ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers as ranges: 0-3,5,7-9."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number <= parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    shown = ",".join(f"{low}-{high}" if high > low else str(low) for low, high in parts[:NAMES])
    return shown + (f" and {len(parts) - NAMES} more ranges" if len(parts) > NAMES else "")


# Objects and history


def _meeting(meeting: MeetingStatus) -> str:
    missing = f"; missing: {_names(meeting.missing, meeting.more_missing)}" if meeting.missing else ""
    gone = f" (gave up: {_names(meeting.withdrawn, 0)})" if meeting.withdrawn else ""
    reason = f"; {meeting.reason}" if meeting.reason else ""
    waits = f"{meeting.arrived} of {meeting.size} for {duration(meeting.waited_s)}"
    return f"{meeting.kind} {_named(meeting.name, meeting.run)}: {waits}{missing}{gone}{reason}"


def _lock(lock: LockStatus) -> str:
    queue = [f"{one.name} for {duration(one.waited_s)}" for one in lock.queue]
    waiting = f"; {len(queue) + lock.more_queued} waiting: {_names(queue, lock.more_queued)}" if queue else ""
    return f"lock {_named(lock.name, lock.run)}: held by {lock.holder} for {duration(lock.held_s)}{waiting}"


def _work_queue(queue: WorkStatus) -> str:
    counts = f"{queue.ready} ready, {queue.taken} taken, {queue.dead} dead, {queue.done} done, {queue.waiting} waiting"
    held = [f"{one.item} by {one.holder} for {duration(one.held_s)}" for one in queue.held]
    return f"work queue {_named(queue.name, queue.run)}: {counts}" + (
        f"; held: {_names(held, queue.taken - len(held))}" if held else ""
    )


def _past(status: ServerStatus) -> Iterator[str]:
    if status.stragglers:
        yield ""
        yield "stragglers:"
    for one in status.stragglers[:10]:
        late = f"{duration(one.late_s / max(1, one.times_last))} late on average, at worst {duration(one.worst_s)}"
        often = f"last in {one.times_last} of {_count(one.rounds, 'round')}"
        yield f"  {one.kind} {_named(one.name, one.run)}: {one.member} {often}, {late}"
    over = [one for one in status.rounds if one.lasted_s is not None]
    if over:
        yield ""
        yield "earlier rounds:"
    for past in over[:5]:
        lasted = f"{_count(past.nodes, 'node')} for {duration(past.lasted_s or 0.0)}"
        yield f"  run {past.run}, round {past.round}: {lasted}; {past.over}"


def _named(name: str, run: str) -> str:
    return f"{name} of run {run}" if run else name


def _names(names: Sequence[str], more: int) -> str:
    rest = len(names[NAMES:]) + more
    return ", ".join(names[:NAMES]) + (f" and {rest} more" if rest else "")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def duration(seconds: float) -> str:
    """Return a duration for people: 5 ms, 0.3 s, 12 s, 3 min 5 s, 2 h 5 min, 3 d 4 h."""
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(min(seconds, 1e12))
    if whole < 60:
        return f"{whole} s"
    for large, small, size, part in (("min", "s", 60, 1), ("h", "min", 3600, 60)):
        if whole < size * (60 if size == 60 else 24):
            return f"{whole // size} {large}" + (f" {whole % size // part} {small}" if whole % size // part else "")
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def size_text(count: int) -> str:
    """Return a number of bytes for people: 512 B, 1.5 MiB."""
    if count < 1024:
        return f"{count} B"
    amount, unit = float(count), "B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):  # noqa: B007
        amount /= 1024
        if amount < 1024:
            break
    return f"{amount:.1f} {unit}"
