"""An agent asks together what it could ask in a row: each trip counts where the server is far away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.launch.round_trip_count import count_trips
from tests.launch.runs import Place
from tests.raw_peer import AMPLE_S

import rallypoint
from rallypoint.core import ops
from rallypoint.deadline import Deadline
from rallypoint.launch.agent import NodeAgent
from rallypoint.launch.events import Events
from rallypoint.launch.job import Job, WorkerCommand
from rallypoint.launch.node_run import NodeRun
from rallypoint.launch.wakeup_pipe import WakeupPipe
from rallypoint.store.native_backend import NativeBackend
from rallypoint.testing import InProcessServer

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


def test_a_node_that_is_done_and_leaves_during_a_batch_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other clients' requests may come between those of a batch, as after a cut in the middle of it."""
    begin, between = NativeBackend.begin, list[Callable[[], object]]()

    def begin_apart(backend: NativeBackend, batch: Sequence[ops.Op]) -> Callable[[], list[Any]]:
        if not between:
            return begin(backend, batch)
        happens, results = between.pop(), begin(backend, batch[:1])()
        happens()
        results += begin(backend, batch[1:])()
        return lambda: results

    def joined(node: str) -> NodeRun:
        command = WorkerCommand("command", "true", ())
        job = Job(command=command, run_id="run", store=server.url, node=node, min_nodes=2, max_nodes=2, quiet=True)
        run = NodeRun(job, Events("", True, False), WakeupPipe())
        run.attach(Deadline(AMPLE_S))
        run.join_round()
        return run

    def end_well() -> None:
        other.finish()
        other.close()

    monkeypatch.setattr(NativeBackend, "begin", begin_apart)
    with InProcessServer() as server, ThreadPoolExecutor(2) as pool:
        one, other = pool.map(joined, "ab", timeout=AMPLE_S)
        with closing(one):
            between.append(end_well)
            assert one.lost_nodes() == set()
            assert not between
