"""Runs in the model: the rendezvous, the reports of the nodes, and what a server remembers of both."""

from __future__ import annotations

from typing import Any

import pytest
from tests.server.fake_log import FakeLog, in_memory
from tests.server.peers import settle
from tests.status.models import Turned, join, report, report_key

from rallypoint.core.machines.rendezvous import RendezvousClose, RendezvousLeave
from rallypoint.core.run_report import FailureReport, HealthReport, RankReport
from rallypoint.server.server import StoreServer
from rallypoint.server.status import reports, runs
from rallypoint.server.status.history import MAX_FAILURES, MAX_ROUNDS
from rallypoint.server.status.source import BuiltStatus


def rank(number: int, **more: Any) -> RankReport:
    return RankReport(rank=number, local_rank=number, pid=1000 + number, **more)


def failure(number: int, **more: Any) -> FailureReport:
    facts = {"how": "exit code 1", "message": "boom", "traceback": "Traceback\nboom", "age_s": 4.0, **more}
    return FailureReport(rank=number, node="n0", host="a-host", pid=1000 + number, **facts)


@in_memory()
async def test_a_run_is_described_by_its_rendezvous_and_its_reports(server: StoreServer, log: FakeLog | None) -> None:
    turned = Turned(server)
    peers = [await turned.peer() for _ in range(3)]
    await turned.act(peers[0], b"/demo", "n0", join(2, 2, "host0", "10.0.0.1"))
    (run,) = turned.status().runs
    assert (run.run, run.phase, run.round) == ("demo", "gathering", 0)
    assert run.reason.startswith("1 of at least 2 nodes: waiting for 1")
    turned.now += 5
    for number in (1, 2):
        await turned.act(peers[number], b"/demo", f"n{number}", join(2, 2))
    await turned.put(peers[0], report_key("demo", "n0"), report("demo", "n0", rank(0), rank(1, state="hung")))
    turned.observe()
    turned.now += 10
    (run,) = turned.status().runs
    assert (run.phase, run.round, run.round_s, run.reason) == ("running", 1, 10.0, "all 2 nodes joined")
    assert [(node.node, node.rank, node.spare, node.state) for node in run.nodes] == [
        ("n0", 0, False, "running"),
        ("n1", 1, False, "running"),
        ("n2", None, True, "waiting"),
    ]
    assert [node.since_s for node in run.nodes] == [15.0, 10.0, 10.0]
    assert (run.nodes[0].host, run.nodes[0].address) == ("a-host", "10.0.0.1")
    assert (run.ranks, run.rank_states) == (2, {"running": 1, "hung": 1})
    assert (run.restarts, run.restart_budget) == (1, 3)


@in_memory()
async def test_a_node_whose_report_is_overdue_is_silent(server: StoreServer, log: FakeLog | None) -> None:
    turned = Turned(server)
    peer = await turned.peer()
    await turned.act(peer, b"/demo", "n0", join(1))
    await turned.put(peer, report_key("demo", "n0"), report("demo", "n0", interval_s=5.0))
    turned.observe()
    turned.now += 14
    assert [(node.silent, node.report_age_s) for node in turned.status().runs[0].nodes] == [(False, 14.0)]
    turned.now += 2
    assert turned.status().runs[0].nodes[0].silent
    await turned.put(peer, report_key("demo", "n0"), report("demo", "n0", interval_s=5.0))
    assert not turned.status().runs[0].nodes[0].silent


@in_memory()
async def test_a_node_that_left_for_its_health_is_unhealthy_and_not_lost(
    server: StoreServer, log: FakeLog | None
) -> None:
    turned = Turned(server)
    peers = [await turned.peer() for _ in range(2)]
    calls = [await turned.act(peer, b"/demo", f"n{at}", join(2)) for at, peer in enumerate(peers)]
    await turned.act(peers[1], b"/demo", "n1", RendezvousLeave(calls[1]))
    assert turned.status().runs[0].missing == ["n1"]
    health = HealthReport(failed=2, out_s=7.0, next_check_s=20.0)
    data = report("demo", "n1", state="unhealthy", reason="no GPU", health=health, round=2)
    await turned.put(peers[1], report_key("demo", "n1"), data)
    turned.observe()
    for later_s, out_s, next_s in ((5.0, 12.0, 15.0), (30.0, 42.0, 0.0)):
        turned.now += later_s
        (run,) = turned.status().runs
        (node,) = [node for node in run.nodes if node.node == "n1"]
        assert (node.state, node.reason, node.rank, run.missing) == ("unhealthy", "no GPU", None, [])
        assert node.health == HealthReport(failed=2, out_s=out_s, next_check_s=next_s)


@in_memory()
async def test_the_first_failure_is_the_oldest(server: StoreServer, log: FakeLog | None) -> None:
    turned = Turned(server)
    peer = await turned.peer()
    for node, age_s in (("n0", 2.0), ("n1", 8.0)):
        data = report("demo", node, failure=failure(int(node[1]), age_s=age_s))
        await turned.put(peer, report_key("demo", node), data)
    turned.observe()
    turned.now += 1
    (run,) = turned.status().runs
    assert run.phase == "unknown" and run.failure is not None
    assert (run.failure.rank, run.failure.age_s, run.failure.traceback) == (1, 9.0, "Traceback\nboom")


@in_memory(grace_s=0.0)
async def test_rounds_and_failures_are_remembered(server: StoreServer, log: FakeLog | None) -> None:
    turned = Turned(server)
    peers = [await turned.peer() for _ in range(2)]
    for number in range(MAX_ROUNDS + 1):
        calls = [await turned.act(peer, b"/demo", f"n{at}", join(2)) for at, peer in enumerate(peers)]
        await turned.put(
            peers[0], report_key("demo", "n0"), report("demo", "n0", failure=failure(number), round=number)
        )
        turned.observe()
        turned.now += 1
        await turned.act(peers[0], b"/demo", "n0", RendezvousLeave(calls[0]))
        turned.observe()
    await turned.act(peers[0], b"/demo", "n0", RendezvousClose("failed", "no more"))
    status = turned.status()
    assert (len(status.rounds), len(status.failures)) == (MAX_ROUNDS, MAX_FAILURES)
    latest = status.rounds[0]
    assert (latest.run, latest.round, latest.nodes, latest.lasted_s) == ("demo", MAX_ROUNDS + 1, 2, 1.0)
    assert latest.over == "n0 (test) left"
    assert status.failures[0].failure.rank == MAX_ROUNDS
    (run,) = status.runs
    assert (run.phase, run.result, run.reason) == ("closed", "failed", "no more")
    peers[0].hangs_up()
    while server.state.namespaces[0].engine.holds(report_key("demo", "n0")):
        await settle()
        server.clock._tick()
    (run,) = turned.status().runs
    assert run.failure is not None and run.failure.rank == MAX_ROUNDS, "it is there when the agents have gone"


@in_memory()
async def test_a_run_in_a_store_with_a_prefix_has_its_reports(server: StoreServer, log: FakeLog | None) -> None:
    turned = Turned(server)
    peer = await turned.peer()
    await turned.act(peer, b"/job-7/a/b", "n0", join(1))
    await turned.put(peer, b"/job-7/run:a%2Fb/node:n0", report("a/b", "n0", rank(0)))
    (run,) = turned.status().runs
    assert (run.run, run.ranks) == ("job-7/a/b", 1)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff\xfe",
        b"{}",
        b"[" * 100_000,
        report("demo", "n0").replace(b"demo", b"other"),
        report("demo", "somebody else"),
        report("demo", "n0", rank(0, step=10**40)),
        report("demo", "n0", rank(0)).replace(b'"pid":1000', b'"pid":1e999'),
        report("demo", "n0", state="x" * 600),
        report("demo", "n0").replace(b"a-host", rb"\ud800"),
        report("demo", "n0", *[rank(0)] * 5000),
    ],
)
def test_what_is_no_report_is_ignored(value: bytes) -> None:
    @in_memory()
    async def test(server: StoreServer, log: FakeLog | None) -> None:
        turned = Turned(server)
        peer = await turned.peer()
        await turned.act(peer, b"/demo", "n0", join(1))
        await turned.put(peer, report_key("demo", "n0"), value)
        await turned.put(peer, report_key("demo", "n1"), report("demo", "n1", rank(3)))
        (run,) = turned.status().runs
        assert {node.node: len(node.ranks) for node in run.nodes} == {"n0": 0, "n1": 1}

    test()


@in_memory()
async def test_of_too_many_ranks_those_that_need_attention_are_listed(server: StoreServer, log: FakeLog | None) -> None:
    turned = Turned(server)
    peer = await turned.peer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "MAX_RANKS", 4)
        for node in range(3):
            ranks = [rank(3 * node + at, state="hung" if at == 1 else "running") for at in range(3)]
            await turned.put(peer, report_key("demo", f"n{node}"), report("demo", f"n{node}", *ranks))
        (run,) = turned.status().runs
    assert [[one.rank for one in node.ranks] for node in run.nodes] == [[0, 1, 2], [4], [7]]
    assert (run.ranks, run.more_ranks, run.rank_states) == (9, 4, {"running": 6, "hung": 3})


@in_memory()
async def test_runs_that_are_over_do_not_hide_those_that_run(server: StoreServer, log: FakeLog | None) -> None:
    turned = Turned(server)
    peer = await turned.peer()
    for number in range(reports.MAX_OVER + 2):
        name = b"/over%d" % number
        call = await turned.act(peer, name, "n0", join(1))
        await turned.act(peer, name, "n0", RendezvousLeave(call))
    await turned.act(peer, b"/running", "n0", join(1))
    names = [run.run for run in turned.status().runs]
    assert names == ["running", *(f"over{number}" for number in range(2, reports.MAX_OVER + 2))]


@in_memory()
async def test_nodes_over_the_limit_are_counted_with_their_ranks(server: StoreServer, log: FakeLog | None) -> None:
    turned = Turned(server)
    peer = await turned.peer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "MAX_NODES", 2)
        for node in range(3):
            await turned.put(peer, report_key("demo", f"n{node}"), report("demo", f"n{node}", rank(node)))
        (run,) = turned.status().runs
    assert (len(run.nodes), run.more_nodes, run.ranks, run.more_ranks) == (2, 1, 3, 1)


@in_memory()
async def test_the_server_follows_runs_although_nobody_looks(server: StoreServer, log: FakeLog | None) -> None:
    turned = Turned(server)
    peer = await turned.peer()
    server.housekeeping.sweep()
    assert server.status._source is None, "a server without runs has nothing to follow"
    call = await turned.act(peer, b"/demo", "n0", join(1))
    server.housekeeping.sweep()
    await turned.act(peer, b"/demo", "n0", RendezvousLeave(call))
    server.housekeeping.sweep()
    await turned.act(peer, b"/demo", "n0", join(1))
    server.housekeeping.sweep()
    found: list[BuiltStatus | None] = []
    server.status.source().get(found.append)
    await settle()
    assert found[0] is not None
    assert [(one.round, one.over) for one in found[0].status.rounds] == [(2, ""), (1, "n0 (test) left")]
