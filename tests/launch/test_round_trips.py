"""An agent asks together what it could ask in a row: each trip counts where the server is far away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.launch.round_trip_count import count_trips
from tests.launch.runs import Place

import rallypoint
from rallypoint.launch.agent import NodeAgent
from rallypoint.launch.job import Job, WorkerCommand

STARTED, ENDED = 4, 9
"""Trips of a job of one node, on a server that runs already: until its workers start, and in all."""

STARTED_BY_TWO = 5
"""Trips of one node of two until its workers start. Afterwards they depend on which of the two is the last to leave."""


def agent(server: rallypoint.Server, node: str | None = None, nodes: int = 1, **more: Any) -> NodeAgent:
    job = Job(
        command=WorkerCommand("command", "true", ()),
        run_id="run",
        store=server.url,
        node=node,
        min_nodes=nodes,
        max_nodes=nodes,
        quiet=True,
    )
    return NodeAgent(job, **more)


def test_round_trips_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    with rallypoint.Server() as server:
        clock = count_trips(monkeypatch)
        at: dict[str, int] = {}
        assert agent(server, report=lambda event: at.setdefault(event["event"], clock.now)).run() == 0
    assert (at["started"], clock.now) == (STARTED, ENDED), at


def test_a_run_that_is_begun_anew_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    with rallypoint.Server() as server:
        assert agent(server).run() == 0
        with rallypoint.connect(server.url) as store:
            assert rallypoint.Rendezvous(store, "run", 1).status().phase == "closed"
        clock = count_trips(monkeypatch)
        assert agent(server).run() == 0
    assert clock.now == ENDED


def test_round_trips_of_two_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """However slow the other node is, a wait for it is one request: no slice of a wait ends."""
    monkeypatch.setattr("rallypoint.launch.round_spec.LOOK_S", 600.0)
    monkeypatch.setattr("rallypoint.recipes.hosting.shared_object.PROGRESS_S", 600.0)
    with rallypoint.Server() as server, Place(tmp_path) as place:
        other = place.run("--nnodes=2", f"--store={server.url}", "--rdzv-id=run", "--node=b", "--no-python", "true")
        clock = count_trips(monkeypatch)
        at: dict[str, int] = {}
        assert agent(server, "a", 2, report=lambda event: at.setdefault(event["event"], clock.now)).run() == 0
        assert other.end() == 0, other.err
    assert at["started"] == STARTED_BY_TWO, at
