"""The metrics, read by Prometheus' own parser."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from tests.status.test_text import HOSTILE, full, rank, status

from rallypoint.server.status.metrics import MAX_RANK_SERIES, render_metrics
from rallypoint.server.status.model import NodeStatus, RunStatus, ServerStatus


def parsed(model: ServerStatus, by_rank: bool = False) -> dict[str, Any]:
    text = render_metrics(model, by_rank).decode()
    found = list(text_string_to_metric_families(text))
    names = [family.name for family in found]
    assert len(set(names)) == len(names), "a family comes once"
    for family in found:
        assert family.documentation and family.type in ("gauge", "counter"), family
        assert family.name.startswith("rallypoint_")
        assert not family.name.endswith(("_s", "_ms", "_kb")), "base units, by their names"
        labels = [tuple(sorted(sample.labels.items())) for sample in family.samples]
        assert len(set(labels)) == len(labels), f"a series comes once: {family}"
        if family.type == "counter":
            assert all(sample.name.endswith("_total") for sample in family.samples)
    return {family.name: family for family in found}


def value(families: dict[str, Any], name: str, /, **labels: str) -> float:
    found = [one.value for one in families[name].samples if labels.items() <= one.labels.items()]
    assert len(found) == 1, families[name]
    return float(found[0])


def test_the_metrics_follow_the_conventions() -> None:
    families = parsed(status(connections=3, storage={"commits": 5, "committed_bytes": 7, "epoch": 2}))
    assert value(families, "rallypoint_connections") == 3
    assert value(families, "rallypoint_commits") == 5
    assert value(families, "rallypoint_server_info", role="server", version="1.0") == 1
    assert value(families, "rallypoint_healthy") == 1


def test_hostile_names_are_escaped_and_come_back() -> None:
    families = parsed(full(HOSTILE), by_rank=True)
    assert value(families, "rallypoint_run_phase", run=HOSTILE, phase="gathering") == 1
    assert value(families, "rallypoint_straggler_late_seconds", member=HOSTILE, name=HOSTILE) == 1.0
    assert value(families, "rallypoint_rank_state", rank="2", state=HOSTILE) == 1
    assert value(families, "rallypoint_follower_behind_commits", server=HOSTILE) == 2


def test_ranks_and_members_have_series_only_if_asked_for() -> None:
    families = parsed(full("demo"))
    assert not [name for name in families if name.startswith("rallypoint_rank_")]
    assert all("member" not in one.labels for family in families.values() for one in family.samples)


def test_the_number_of_series_is_bounded() -> None:
    ranks = [rank(number, step=number, progress_age_s=1.0) for number in range(4096)]
    run = RunStatus(run="demo", nodes=[NodeStatus(node="n", ranks=ranks)])
    families = parsed(status(runs=[run, run]), by_rank=True)
    assert len(families["rallypoint_rank_step"].samples) == MAX_RANK_SERIES
    assert value(families, "rallypoint_run_oldest_progress_seconds") == 1.0
