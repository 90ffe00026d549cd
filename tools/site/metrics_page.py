"""The page of all metrics: what `/metrics` would show of a server on which everything happens."""

from __future__ import annotations

import re

from rallypoint.core.run_report import RankReport
from rallypoint.server.status.metrics import MAX_RANK_SERIES, render_metrics
from rallypoint.server.status.model import FollowerStatus, NodeStatus, RunStatus, ServerStatus, StragglerStatus

HEAD = f"""# Metrics

What `GET /metrics` of a server or a relay shows, in the text format of Prometheus. Series of single ranks and members
come with `/metrics?ranks=1`, for at most {MAX_RANK_SERIES:,} ranks. The page is made from the code.
[What a server is doing](../status.md) has the other views, and a configuration for Prometheus.

| metric | type | labels | meaning |
|---|---|---|---|
"""
RELAYED = {"torch_clients": 1, "requests_asked": 1, "requests_sent": 1, "rounds": 1}
MEANS = {
    "rallypoint_relay_torch_clients": "PyTorch clients of this relay.",
    "rallypoint_relay_requests_asked_total": "Requests of PyTorch clients.",
    "rallypoint_relay_requests_sent_total": "Requests that the relay has sent for them; the others were merged.",
    "rallypoint_relay_rounds": "Open ports of rounds.",
}
"""What those metrics mean for which `/metrics` has only a general word."""


def render() -> str:
    """Return the page."""
    text = render_metrics(busy(), by_rank=True).decode()
    lines = []
    for name, words in re.findall(r"^# HELP (\S+) (.*)$", text, re.M):
        (kind,) = re.findall(rf"^# TYPE {name} (\w+)$", text, re.M)
        labels = dict.fromkeys(re.findall(r'(\w+)="', "".join(re.findall(rf"^{name}\{{(.*)\}} ", text, re.M))))
        lines.append(f"| `{name}` | {kind} | {', '.join(labels)} | {MEANS.get(name, words)} |")
    return HEAD + "\n".join(lines) + "\n"


def busy() -> ServerStatus:
    """Return the status of a server that has something of everything."""
    rank = RankReport(rank=0, local_rank=0, pid=1, step=1, progress_age_s=0.0)
    node = NodeStatus(node="n", rank=0, report_age_s=0.0, ranks=[rank])
    run = RunStatus(
        run="r", round=1, round_s=1.0, restarts=0, restart_budget=1, nodes=[node], rank_states={"running": 1}
    )
    late = StragglerStatus(kind="barrier", name="b", run="r", member="m", rounds=1, times_last=1, late_s=1, worst_s=1)
    return ServerStatus(
        role="leader", version="1", pid=1, uptime_s=1.0, max_connections=1, runs=[run], stragglers=[late],
        followers=[FollowerStatus(url="tcp://host:1", index=1, behind=0)],
        storage={"commits": 1, "committed_bytes": 1, "epoch": 1}, counters=dict(RELAYED),
    )  # fmt: skip
