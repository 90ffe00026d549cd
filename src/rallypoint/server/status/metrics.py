"""The model in the text format of Prometheus (version 0.0.4).

Names follow its conventions: base units, `_total` for counters, `_seconds` and `_bytes`. The number of series is
bounded. Labels are runs, kinds, states and, of stragglers, the objects that cost most; series of single ranks and
members come only if asked for (`/metrics?ranks=1`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from rallypoint.core.run_report import RankReport
from rallypoint.server.status.model import RunStatus, ServerStatus

__all__ = ["METRICS_TYPE", "render_metrics"]

METRICS_TYPE = "text/plain; version=0.0.4"
"""The type of the page."""

MAX_RANK_SERIES = 2000
"""Ranks with series of their own."""

Labels = tuple[tuple[str, str], ...]
Samples = Iterable[tuple[Labels, float]]
Family = tuple[str, str, str, Samples]
"""A name, its type, its help, and the samples."""

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def render_metrics(status: ServerStatus, by_rank: bool = False) -> bytes:
    """Return the metrics; `by_rank`: those of each rank too."""
    lines: list[str] = []
    for name, kind, words, samples in (*_server(status), *_runs(status), *_objects(status, by_rank)):
        found = [f"{name}{_label_text(labels)} {_number(value)}" for labels, value in samples]
        if found:
            lines += (*_heading(name, kind, words), *found)
    if by_rank:
        lines += _rank_lines(status)
    return ("\n".join(lines) + "\n").encode("utf-8", "backslashreplace")


def _heading(name: str, kind: str, words: str) -> tuple[str, str]:
    return f"# HELP {name} {words}", f"# TYPE {name} {kind}"


def _label_text(labels: Labels) -> str:
    return "{" + ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels) + "}" if labels else ""


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.10g}".replace("inf", "Inf").replace("nan", "NaN")


def _one(value: float | None) -> Samples:
    return [] if value is None else [((), value)]


def _server(status: ServerStatus) -> Iterator[Family]:
    info: Labels = (("version", status.version), ("role", status.role))
    gauge, counter = "gauge", "counter"
    yield "rallypoint_server_info", gauge, "The version and the role of this server.", [(info, 1)]
    yield "rallypoint_uptime_seconds", gauge, "Time since the server started.", _one(status.uptime_s)
    yield "rallypoint_healthy", gauge, "Whether the server can answer, or the relay reaches it.", _one(_healthy(status))
    yield "rallypoint_connections", gauge, "Open connections.", _one(status.connections)
    yield "rallypoint_connections_limit", gauge, "Maximum number of connections.", _one(status.max_connections)
    for name, words, value in (
        ("refused_connections", "Connections over the limit.", status.refused_connections),
        ("denied_connections", "Connections without the token or a certificate.", status.denied_connections),
        ("refused_sessions", "Sessions over the limit.", status.refused_sessions),
    ):
        yield f"rallypoint_{name}_total", counter, words, _one(value)
    for name, words, value in (
        ("sessions", "Sessions, including detached ones in their grace period.", status.sessions),
        ("watchers", "Live pages that are open.", status.watchers),
        ("memory_bytes", "Everything held for clients.", status.bytes),
        ("memory_limit_bytes", "Limit of what is held for clients.", status.max_bytes),
        ("keys", "Keys of all namespaces.", status.keys),
        ("waiting_requests", "Requests that wait.", status.waiting),
        ("leased_keys", "Keys that go with the session of their owner.", status.leased_keys),
        ("round_namespaces", "Namespaces of rounds.", status.namespaces),
    ):
        yield f"rallypoint_{name}", gauge, words, _one(value)
    storage = status.storage
    for name, words in (("commits", "Commits to the log."), ("committed_bytes", "Bytes committed to the log.")):
        if name in storage:
            yield f"rallypoint_{name}_total", counter, words, _one(storage[name])
    if "epoch" in storage:
        yield "rallypoint_leader_epoch", gauge, "The number of this leader.", _one(storage["epoch"])
    behind = {one.url: one.behind for one in status.followers}
    words = "Commits that a standby has not applied, as of its last report."
    yield (
        "rallypoint_follower_behind_commits",
        gauge,
        words,
        [((("server", url),), count) for url, count in behind.items()],
    )
    for name, count in status.counters.items():
        kind = "counter" if name.startswith("requests_") else "gauge"
        yield f"rallypoint_relay_{name}{'_total' if kind == 'counter' else ''}", kind, "Of this relay.", _one(count)


def _healthy(status: ServerStatus) -> int:
    return int(not status.trouble and not status.storage.get("disk_full"))


def _runs(status: ServerStatus) -> Iterator[Family]:
    runs = [((("run", run.run),), run) for run in {run.run: run for run in status.runs}.values()]

    def each(name: str, words: str, value: str, kind: str = "gauge") -> Family:
        found = [(labels, getattr(run, value)) for labels, run in runs]
        return (
            f"rallypoint_run_{name}",
            kind,
            words,
            [(labels, number) for labels, number in found if number is not None],
        )

    phases: list[tuple[Labels, float]] = [((*labels, ("phase", run.phase)), 1) for labels, run in runs]
    yield "rallypoint_run_phase", "gauge", "The phase of each run.", phases
    yield each("round", "Number of the current or last round.", "round")
    yield each("round_age_seconds", "Time since the standing round formed.", "round_s")
    yield each("restarts_total", "Restarts that the job has used.", "restarts", "counter")
    yield each("restart_budget", "Restarts that the job may use.", "restart_budget")
    nodes: list[tuple[Labels, float]] = []
    ranks: list[tuple[Labels, float]] = []
    silent: list[tuple[Labels, float]] = []
    oldest: list[tuple[Labels, float]] = []
    for labels, run in runs:
        states = Counter("spare" if node.spare else node.state for node in run.nodes)
        nodes += [((*labels, ("state", state)), count) for state, count in states.most_common(16)]
        ranks += [((*labels, ("state", state)), count) for state, count in run.rank_states.items()]
        silent.append((labels, sum(node.silent for node in run.nodes)))
        ages = list(_progress_ages(run))
        oldest += [(labels, max(ages))] if ages else []
    yield "rallypoint_run_nodes", "gauge", "Nodes of each run by state.", nodes
    yield "rallypoint_run_silent_nodes", "gauge", "Nodes whose reports are overdue.", silent
    yield "rallypoint_run_ranks", "gauge", "Workers of each run by state.", ranks
    yield "rallypoint_run_oldest_progress_seconds", "gauge", "Time since the last progress of the slowest rank.", oldest


def _progress_ages(run: RunStatus) -> Iterator[float]:
    for node in run.nodes:
        for rank in node.ranks:
            if rank.progress_age_s is not None:
                yield rank.progress_age_s + (node.report_age_s or 0.0)


def _objects(status: ServerStatus, by_member: bool) -> Iterator[Family]:
    kinds = ("barrier", "exchange")
    waits = {kind: [one for one in status.meetings if one.kind == kind] for kind in kinds}
    yield (
        "rallypoint_meetings_waiting",
        "gauge",
        "Barriers and exchanges at which members wait, as far as they are listed.",
        [((("kind", kind),), len(waits[kind])) for kind in kinds],
    )
    yield (
        "rallypoint_meeting_longest_wait_seconds",
        "gauge",
        "Longest time that a member has waited for others.",
        [((("kind", kind),), max((one.waited_s for one in waits[kind]), default=0.0)) for kind in kinds],
    )
    yield "rallypoint_locks_held", "gauge", "Locks that are held.", _one(len(status.locks) + status.more_locks)
    queued = sum(len(lock.queue) + lock.more_queued for lock in status.locks)
    yield "rallypoint_lock_waiters", "gauge", "Processes that wait for locks.", _one(queued)
    queues = status.work_queues
    yield (
        "rallypoint_work_items",
        "gauge",
        "Items of the work queues that are listed.",
        [((("state", state),), sum(getattr(queue, state) for queue in queues)) for state in ("ready", "taken", "dead")],
    )
    late: Counter[Labels] = Counter()
    times: Counter[Labels] = Counter()
    for one in status.stragglers:
        labels: Labels = (("kind", one.kind), ("name", one.name), ("run", one.run))
        labels = (*labels, ("member", one.member)) if by_member else labels
        late[labels] += one.late_s  # type: ignore[assignment]  # a Counter of floats
        times[labels] += one.times_last
    words = "Time that the last members came after half of the others."
    yield "rallypoint_straggler_late_seconds_total", "counter", words, late.items()
    yield "rallypoint_straggler_rounds_total", "counter", "Rounds in which they came last.", times.items()


def _rank_lines(status: ServerStatus) -> Iterator[str]:
    """Yield the series of the ranks. There may be thousands, so each label is escaped once."""
    found: dict[str, tuple[RankReport, float]] = {}
    for run in status.runs:
        name = f'run="{run.run.translate(_ESCAPES)}"'
        for node in run.nodes:
            for rank in node.ranks[: MAX_RANK_SERIES - len(found)]:
                found[f'{name},rank="{rank.rank}"'] = rank, node.report_age_s or 0.0
    if not found:
        return
    yield from _heading("rallypoint_rank_state", "gauge", "The state of each rank.")
    for labels, (rank, _) in found.items():
        yield f'rallypoint_rank_state{{{labels},state="{rank.state.translate(_ESCAPES)}"}} 1'
    yield from _heading("rallypoint_rank_step", "gauge", "The last step that a rank has reported.")
    for labels, (rank, _) in found.items():
        if rank.step is not None:
            yield f"rallypoint_rank_step{{{labels}}} {rank.step}"
    yield from _heading("rallypoint_rank_progress_age_seconds", "gauge", "Time since the last progress of a rank.")
    for labels, (rank, age_s) in found.items():
        if rank.progress_age_s is not None:
            yield f"rallypoint_rank_progress_age_seconds{{{labels}}} {rank.progress_age_s + age_s:.10g}"
    yield from _heading(
        "rallypoint_rank_restarts_total", "counter", "Times that a rank was started again in this round."
    )
    for labels, (rank, _) in found.items():
        yield f"rallypoint_rank_restarts_total{{{labels}}} {rank.restarts}"
