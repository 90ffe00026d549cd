"""An agent asks together what it could ask in a row: each trip counts where the server is far away."""

from __future__ import annotations

from typing import Any

import pytest
from tests.launch.round_trip_count import count_trips

import rallypoint
from rallypoint.launch.agent import NodeAgent
from rallypoint.launch.job import Job, WorkerCommand

STARTED, ENDED = 4, 9
"""Trips of a job of one node, on a server that runs already: until its workers start, and in all."""


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
