"""`worker().progress`, and the reports of agents: what they tell the store of a node, and when."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from tests.launch.runs import Place
from tests.raw_peer import AMPLE_S, until

import rallypoint
from rallypoint.core.run_keys import report_key
from rallypoint.core.run_report import NodeReport, decode_report
from rallypoint.launch.job import Job, WorkerCommand
from rallypoint.launch.monitoring import node_reporter
from rallypoint.launch.monitoring.node_reporter import NodeReporter
from rallypoint.launch.monitoring.worker_records import WorkerRecords
from rallypoint.launch.worker_context import Worker

STEPS = """
import rallypoint
me = rallypoint.worker()
me.progress(7 + rank)
if os.fork() == 0:
    if rank == 1:
        rallypoint.worker().progress(40)  # a child of the worker reports for it
    os._exit(0)
os.wait()
stay()
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with Place(tmp_path) as made:
        yield made


def report_of(store: rallypoint.Store, run: str, node: str, is_it: Callable[[NodeReport], bool]) -> NodeReport:
    """Return the first report of a node that is as described."""

    def look() -> NodeReport | None:
        with contextlib.suppress(rallypoint.StoreTimeout):
            return decode_report(store.get(report_key(run, node), 1.0))
        return None

    report = until(look, lambda report: report is not None and is_it(report))
    assert report is not None
    return report


def test_the_status_shows_the_ranks_of_a_node_with_any_name(place: Place) -> None:
    name = "rack:1/%node 0"
    with rallypoint.Server() as server:
        words = ["--store", server.url, "--rdzv-id", "run", "--node", name, place.script(STEPS)]
        node = place.run(*words)
        pids = node.up(0, world=1)

        def shown() -> list[tuple[str, list[int]]]:
            with urlopen(f"http://127.0.0.1:{server.port}/status") as page:
                runs = json.load(page)["runs"]
            return [(one["node"], [rank["pid"] for rank in one["ranks"]]) for run in runs for one in run["nodes"]]

        until(shown, lambda nodes: nodes == [(name, [pids[0]])])
        node.signal("SIGUSR1")
        assert node.end() == 0


def test_a_node_reports_its_round_its_ranks_and_their_steps(place: Place) -> None:
    with rallypoint.Server() as server:
        url = f"tcp://127.0.0.1:{server.port}"
        words = ["--store", url, "--rdzv-id", "a/b", "--node", "n0", "--nproc-per-node", 2, "--max-restarts", 3]
        node = place.run(*words, place.script(STEPS))
        pids = node.up(0, 1, world=2)
        with rallypoint.connect(url) as store:
            report = report_of(store, "a/b", "n0", lambda report: [rank.step for rank in report.ranks] == [7, 40])
            assert (report.run, report.node, report.pid, report.state) == ("a/b", "n0", node.child.pid, "running")
            assert (report.round, report.restarts, report.restart_budget) == (1, 0, 3)
            assert [(rank.rank, rank.pid, rank.state) for rank in report.ranks] == [
                (0, pids[0], "running"),
                (1, pids[1], "running"),
            ]
            assert all(rank.progress_age_s is not None for rank in report.ranks)
            os.kill(pids[1], 19)
            assert report_of(store, "a/b", "n0", lambda report: report.ranks[1].state == "stopped")
            os.kill(pids[1], 9)
            failed = report_of(store, "a/b", "n0", lambda report: report.restarts == 1 and report.round == 2)
            assert failed.failure is not None and (failed.failure.rank, failed.failure.pid) == (1, pids[1])
            node.up(0, 1, world=2, restarts=1)
            node.signal("SIGUSR1")
            assert node.end() == 0
            until(lambda: store.check([report_key("a/b", "n0")]), lambda there: not there)


class FailingStore:
    """A store that accepts nothing, and keeps what it was given."""

    def __init__(self) -> None:
        self.written: queue.Queue[bytes] = queue.Queue()

    def lease(self, _: str, value: bytes) -> None:
        self.written.put(value)
        raise rallypoint.StoreTimeout(operation="lease", keys=[], missing=[], timeout_s=0.0, store="slow")


@pytest.mark.parametrize(("nodes", "soonest_s", "interval_s"), [(1, 1.0, 5.0), (1000, 5.0, 5.0), (4000, 20.0, 20.0)])
def test_large_runs_report_more_rarely(nodes: int, soonest_s: float, interval_s: float) -> None:
    reporter = NodeReporter(Job(command=WorkerCommand("script", "x.py", ()), max_nodes=nodes))
    assert (reporter._soonest_s, reporter.interval_s) == (soonest_s, interval_s)
    assert nodes / reporter._soonest_s <= node_reporter.WRITES_PER_S or nodes == 1


def test_a_store_that_fails_does_not_stop_the_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_reporter, "SOONEST_S", 0.001)
    store = FailingStore()
    reporter = NodeReporter(Job(command=WorkerCommand("script", "x.py", ()), local_address="here"))
    reporter.attach(store, "n0")  # type: ignore[arg-type]
    store.written.get(timeout=AMPLE_S)
    reporter.state("done", "because")
    last = decode_report(store.written.get(timeout=AMPLE_S))
    reporter.close()
    assert last is not None and (last.state, last.reason, last.address) == ("done", "because", "here")


def test_progress_outside_of_a_run_is_refused() -> None:
    code = "import rallypoint\ntry: rallypoint.worker().progress(1)\nexcept rallypoint.NotLaunched: print('refused')"
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "RALLYPOINT_URL")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean, timeout=AMPLE_S)
    assert done.stdout == "refused\n"


@pytest.mark.parametrize("step", ["7", 1.5, 2**63])
def test_a_step_is_a_number_of_eight_bytes(step: object) -> None:
    worker = Worker(
        dict.fromkeys(
            """RALLYPOINT_URL RALLYPOINT_RUN RALLYPOINT_SCOPE RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE
            RALLYPOINT_NODE RALLYPOINT_NODE_ADDR RALLYPOINT_RANK0_ADDR RALLYPOINT_ROUND
            TORCHELASTIC_RESTART_COUNT""".split(),  # noqa: SIM905
            "1",
        )
    )
    with pytest.raises((TypeError, ValueError)):
        worker.progress(step)  # type: ignore[arg-type]


def test_records_without_a_private_directory_have_no_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"rallypoint-{os.geteuid()}").mkdir(mode=0o755)  # anybody could have made it
    os.chmod(tmp_path / f"rallypoint-{os.geteuid()}", 0o755)
    records = WorkerRecords(2)
    assert records.directory is None and records.prepare(0) == {} and records.progress(0) is None
    records.close()
