"""Preemption: a signal to one agent, or a drain, becomes a step at which all ranks stop; and what follows."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.launch.runs import Node, Place, gone
from tests.raw_peer import AMPLE_S, until

import rallypoint

STEPS = """
import rallypoint
me, free = rallypoint.worker(), []
on("SIGUSR2", lambda: free.append(1))
long, code, last = map(int, sys.argv[1:])
say("up", rank, world, restarts, os.getpid())
for step in range(0, last, 5):
    if me.should_stop(step):
        say("stopped", rank, step)
        sys.exit(code)
    if step == 20:
        say("on", rank)
    if rank == long and step == 40:
        say("long", rank)
        while not free:
            time.sleep(0.01)
    me.barrier(timeout=600)
say("finished", rank)
"""
MIXED = """
import rallypoint
on("SIGUSR1", lambda: (say("signal", rank), os._exit(3)))
for step in range(10**9):
    if rank == 3:
        say("on", rank)
        hang()  # as a server for the others
    if rallypoint.worker().should_stop(step):
        say("stopped", rank, step)
        sys.exit()
    if step == 0:
        say("on", rank)  # it has asked
    time.sleep(0.01)
"""
NOBODY, ENDLESS = -1, 10**9


def words(long: int = NOBODY, code: int = 0, last: int = ENDLESS) -> list[int]:
    """Return the arguments of the script: the rank whose step 40 is long, the exit code after a stop, and the end."""
    return [long, code, last]


def one(place: Place, *options: Any, script: str = STEPS, ranks: int = 4, **how: int) -> Node:
    options = ("--nproc-per-node", ranks, "--node", "n0", "--preempt-signal", "SIGUSR1", *options)
    return place.run(*options, place.script(script), *words(**how))


def several(place: Place, *more: Any, nodes: str = "2", ranked: bool = True, **how: int) -> list[Node]:
    """Start as many nodes as there may be, with two workers each."""
    options = ("--nproc-per-node", 2, "--preempt-signal", "SIGUSR1", "--rdzv-conf", "last_call_timeout=60", *more)
    path, count = place.script(STEPS), int(nodes.rpartition(":")[2])
    ranks = [("--node-rank", at) if ranked else () for at in range(count)]
    return [place.node(f"n{at}", *ranks[at], *options, path, *words(**how), nodes=nodes) for at in range(count)]


def stopped(*nodes: Node) -> dict[int, int]:
    """Return the step at which each rank stopped."""
    lines = "\n".join(node.out for node in nodes)
    return {int(rank): int(step) for rank, step in re.findall(r"^stopped (\d+) (\d+)$", lines, re.M)}


def agreed(ranks: int, *nodes: Node) -> int:
    """Check that all ranks stopped at one step; return it."""
    found = stopped(*nodes)
    assert sorted(found) == list(range(ranks)), "\n".join(node.text() for node in nodes)
    assert len(set(found.values())) == 1, found
    return found[0]


def drain(place: Place, target: str, why: str = "maintenance", **variables: str) -> None:
    command = [sys.executable, "-m", "rallypoint", "runs", "drain", target, "--store", f"tcp://localhost:{place.port}"]
    env = {**os.environ, **variables}
    subprocess.run([*command, "--why", why], check=True, timeout=AMPLE_S, stdout=subprocess.DEVNULL, env=env)


@pytest.mark.parametrize("code", [0, 75])
def test_all_ranks_of_a_node_stop_at_one_step(place: Place, code: int) -> None:
    node = one(place, "--json", code=code)
    node.until(r"^on", 4)
    node.signal("SIGUSR1")
    assert node.end() == 75
    step = agreed(4, node)
    events = [event for event in node.events() if event["event"] in ("preemption", "preempted")]
    assert [event.get("phase") for event in events if event.get("phase") != "proposed"] == [
        "asked", "committed", "over", None,
    ]  # fmt: skip
    assert step - 5 < events[-2]["step"] <= step
    assert re.fullmatch(r"n0: SIGUSR1: all ranks have stopped at step \d+; this node leaves", events[-1]["reason"])


def test_a_signal_to_one_of_two_nodes_stops_both_and_closes_a_run_of_fixed_size(place: Place) -> None:
    nodes = several(place)
    for node in nodes:
        node.until(r"^on", 2)
    nodes[1].signal("SIGUSR1")
    assert [node.end() for node in nodes] == [75, 75], "\n".join(node.text() for node in nodes)
    agreed(4, *nodes)
    few = r"n1: SIGUSR1: all ranks have stopped at step \d+; 1 of at least 2 nodes are left; exit code 75"
    assert re.search(f"the run was preempted: {few}", nodes[0].err), nodes[0].err


def test_a_drained_node_of_an_elastic_job_leaves_and_the_others_go_on(place: Place) -> None:
    nodes = several(place, nodes="1:2", ranked=False)
    for node in nodes:
        node.until(r"^on", 2)
    drain(place, "job/n0")
    assert nodes[0].end() == 75
    agreed(4, *nodes)
    nodes[1].up(0, 1, world=2, restarts=0)
    nodes[1].signal("SIGUSR1")
    assert nodes[1].end() == 75
    assert re.search(r"n0: drain asked for by \S+@\S+: maintenance: all ranks have stopped", nodes[1].err)


def test_a_reason_over_the_limit_is_shortened(place: Place) -> None:
    node = place.node("n" * 100, place.script(STEPS), *words(), nodes="1:1")
    node.until(r"^on")
    drain(place, "job", why="w" * 500, LOGNAME="u" * 440)
    assert node.end() == 75, node.text()


def test_a_drained_run_ends_on_all_nodes(place: Place) -> None:
    nodes = several(place, nodes="1:2")
    for node in nodes:
        node.until(r"^on", 2)
    drain(place, "job")
    assert [node.end() for node in nodes] == [75, 75], "\n".join(node.text() for node in nodes)
    agreed(4, *nodes)
    assert not any("round 2" in node.err for node in nodes)


def test_a_script_that_does_not_ask_gets_the_signal(place: Place) -> None:
    script = "on('SIGUSR1', lambda: (say('signal', rank), os._exit(0)))\nsay('on', rank)\nhang()\n"
    node = one(place, script=script)
    node.until(r"^on", 4)
    node.signal("SIGUSR1")
    assert node.end() == 75
    assert len(re.findall(r"^signal \d$", node.out, re.M)) == 4
    assert "n0: SIGUSR1: SIGUSR1 for 4 ranks (0-3), which never asked whether to stop" in node.err


def test_ranks_that_do_not_ask_get_the_signal_when_the_others_have_ended(place: Place) -> None:
    node = one(place, script=MIXED)
    node.until(r"^on", 4)
    node.signal("SIGUSR1")
    assert node.end() == 75, node.text()
    assert len(stopped(node)) == 3 and node.out.splitlines()[-1] == "signal 3"


@pytest.mark.parametrize("budget", [0, 1])
def test_a_rank_killed_during_the_agreement(place: Place, budget: int) -> None:
    node = one(place, "--json", "--max-restarts", budget, long=2)
    pids = node.up(0, 1, 2, 3, world=4)
    node.until(r"^long 2$")
    node.signal("SIGUSR1")
    node.until(r'"phase": "proposed"')
    os.kill(pids[2], signal.SIGKILL)
    assert node.end() == (75 if budget else 137), node.text()
    assert not stopped(node) and "round 2" not in node.err
    gone(*pids.values())


def test_a_rank_killed_during_the_agreement_of_an_elastic_job(place: Place) -> None:
    nodes = several(place, "--max-restarts", 1, nodes="1:2", long=0)
    pids = nodes[0].up(0, 1, world=4)
    nodes[0].until("^long 0$")
    nodes[1].up(2, 3, world=4)
    nodes[1].signal("SIGUSR1")
    nodes[0].until("n1: SIGUSR1; all ranks are asked to stop")
    os.kill(pids[0], signal.SIGKILL)
    assert nodes[1].end() == 75
    nodes[0].up(0, 1, world=2)
    nodes[0].until("^long 0$", 2)
    nodes[0].signal("SIGTERM")
    assert nodes[0].end() == 143


def test_a_rank_that_never_reaches_the_step_is_stopped_at_the_timeout(place: Place) -> None:
    node = one(place, "--preempt-timeout", 2, "--grace", 1, long=2)
    node.until(r"^long 2$")
    node.signal("SIGUSR1")
    assert node.end() == 75, node.text()
    assert re.search(
        r"not all ranks have stopped within 2 s \(--preempt-timeout\): .*ranks.* \(?0-3\)? still", node.err
    )
    assert not stopped(node)


def test_the_step_is_agreed_on_across_a_restart_of_the_server(place: Place) -> None:
    nodes = several(place, "--data-dir", place.where / "state", long=3)
    nodes[1].until(r"^long 3$")
    nodes[1].signal("SIGUSR1")
    nodes[0].until("n1: SIGUSR1; all ranks are asked to stop")
    server = place.server()
    os.kill(server, signal.SIGKILL)
    gone(server)
    nodes[1].signal("SIGUSR2")  # ends the long step
    assert [node.end() for node in nodes] == [75, 75], "\n".join(node.text() for node in nodes)
    agreed(4, *nodes)


def test_workers_that_finish_first_succeed(place: Place) -> None:
    node = one(place, "--json", long=2, last=45)
    node.until(r"^long 2$")
    node.signal("SIGUSR1")
    node.until(r'"phase": "proposed"')
    node.signal("SIGUSR2")
    assert node.end() == 0, node.text()
    assert len(re.findall(r"^finished", node.out, re.M)) == 4


def test_another_exit_code_after_the_stop_is_a_failure(place: Place) -> None:
    node = one(place, code=3)
    node.until(r"^on", 4)
    node.signal("SIGUSR1")
    assert node.end() == 3, node.text()
    assert "FAILED FIRST" in node.err


@pytest.mark.parametrize(("final", "starts"), [((), 2), (("--final-codes", 75), 1)])
def test_a_worker_that_exits_with_75_by_itself_has_failed(place: Place, final: tuple[Any, ...], starts: int) -> None:
    node = one(place, "--max-restarts", 1, *final, script="say('up', rank)\nsys.exit(75)\n", ranks=1)
    assert node.end() == 75
    assert node.out.splitlines() == ["up 0"] * starts


def test_a_node_that_waits_for_others_leaves(place: Place) -> None:
    node = place.node("n0", "--preempt-signal", "SIGUSR1", place.script("stay()"), nodes="2")
    with rallypoint.TCPStore("localhost", place.port, timeout=AMPLE_S) as store:
        until(rallypoint.Rendezvous(store, "job", 2).status, lambda status: len(status.waiting) == 1)
    node.signal("SIGUSR1")
    assert node.end() == 75, node.text()
    assert "SIGUSR1: this node leaves, while waiting for other nodes" in node.err


def test_the_same_signal_again_has_no_effect_and_interrupts_end_the_node(place: Place) -> None:
    node = one(place, "--json", long=2)
    pids = node.up(0, 1, 2, 3, world=4)
    node.until(r"^long 2$")
    node.signal("SIGUSR1")
    node.until(r'"phase": "proposed"')
    node.signal("SIGUSR1")
    node.signal("SIGINT")
    assert node.end() == 130, node.text()
    gone(*pids.values())


def test_the_same_signal_has_no_effect_on_an_agent_that_exits(place: Place) -> None:
    node = one(place, ranks=1)
    node.until(r"^on")
    while node.child.poll() is None:
        node.signal("SIGUSR1")
        with contextlib.suppress(subprocess.TimeoutExpired):  # faster, handlers would interrupt each other without end
            node.child.wait(0.002)
    assert node.end() == 75, node.text()


def test_a_preemption_by_sigterm(place: Place) -> None:
    node = one(place, "--preempt-signal", "SIGTERM")
    node.until(r"^on", 4)
    node.signal("SIGTERM")
    assert node.end() == 75
    agreed(4, node)


def test_a_signal_that_cannot_be_handled_is_refused(place: Place) -> None:
    node = one(place, "--preempt-signal", "SIGKILL")
    assert node.end() == 2 and "'SIGKILL' is not a signal that can be handled" in node.err


def keep_on(path: str) -> int:
    worker = rallypoint.worker()
    for step in range(ENDLESS):
        if worker.should_stop(step):
            return step
        if step == 3 and worker.rank == 0:
            Path(path).write_text(worker.run_id)
        worker.barrier(timeout=60)
    return -1


def test_launched_functions_stop_and_the_caller_is_told(tmp_path: Path) -> None:
    started = tmp_path / "run"

    def ask() -> None:
        run = until(lambda: started.exists() and started.read_text(), bool)
        subprocess.run([sys.executable, "-m", "rallypoint", "runs", "drain", str(run)], check=True, timeout=AMPLE_S)

    thread = threading.Thread(target=ask)
    thread.start()
    with pytest.raises(rallypoint.LaunchFailed, match=r"drain asked for by .*: all ranks have stopped at step"):
        rallypoint.launch(keep_on, 2, args=(str(started),))
    thread.join(AMPLE_S)


def test_a_spare_that_is_drained_with_the_run_lets_the_ranks_reach_their_step(place: Place) -> None:
    nodes = several(place, nodes="1:2", long=0)
    for node in nodes:
        node.until(r"^on", 2)
    nodes[0].until("^long 0$")
    spare = place.node("n2", "--rdzv-conf", "last_call_timeout=60", place.script(STEPS), *words(0), nodes="1:2")
    spare.until("this node is a spare")
    drain(place, "job")
    assert spare.end() == 75, spare.text()
    nodes[0].signal("SIGUSR2")  # ends the long step
    assert [node.end() for node in nodes] == [75, 75], "\n".join(node.text() for node in nodes)
    agreed(4, *nodes)
