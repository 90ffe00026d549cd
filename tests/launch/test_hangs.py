"""Hangs: the ranks that hang are named, and not those that wait for them; then the job goes on.

A worker that was started again makes no progress that could be late on a busy machine: it just ends.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.launch.runs import Node, Place, gone

from rallypoint.launch import failures

HANG = ["--hang-timeout", 3, "--grace", 60]
"""A grace period that no test waits for: ranks that hang are killed at once."""

SCRIPT = """
import ctypes, rallypoint
def asleep():
    while True:
        ctypes.PyDLL(None).sleep(1000)  # holds the interpreter lock
if restarts:
    say("well", rank)
    sys.exit()
me = rallypoint.worker()
me.barrier(60, "all are here")
me.progress(7)
on("SIGTERM", lambda: say("never") if rank in (1, 2) else os._exit(0))
say("up", rank, world, restarts, os.getpid())
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
if rank == 2:
    asleep()
me.barrier(600, "nobody comes")
"""

ODD_ONE = """
if restarts:
    say("well", rank)
    sys.exit()
import torch, torch.distributed as dist, rallypoint
dist.init_process_group("gloo")
def enter():
    dist.all_reduce(torch.ones(1))
enter()
rallypoint.worker().progress(1)
def stray():
    while True:
        time.sleep(0.1)
say("up", rank, world, restarts, os.getpid())
if rank == 2:
    stray()
enter()
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with Place(tmp_path) as made:
        yield made


def ended_well(*nodes: Node) -> None:
    codes = [node.end() for node in nodes]
    assert codes == [0] * len(nodes), "\n".join(node.text() for node in nodes)


def named(node: Node) -> str:
    """Return the line that names the ranks that hang."""
    return node.until(r"^rallypoint run: (.* hangs?: .*)$")[0][1]


STOPPED = r"rank 1 on \w+ hangs: stopped \(SIGSTOP\) for [\d.]+ s"
ASLEEP = r"rank 2 on \w+ hangs: no progress for [\d.]+ s since step 7, in asleep \(script1.py:\d+\)"
WAITING = r"waiting: ranks 0, 3 in barrier \(script1.py:\d+\)"


def test_a_stopped_rank_and_one_asleep_in_c_are_named_and_restarted(place: Place) -> None:
    words = ["--nproc-per-node", 4, "--node", "n0", "--max-restarts", 1, "--log-dir", "logs", *HANG]
    node = place.run(*words, place.script(SCRIPT))
    pids = node.up(0, 1, 2, 3, world=4)
    assert re.fullmatch(f"{STOPPED}; {ASLEEP}; {WAITING}", named(node)), node.err
    ended_well(node)
    assert sorted(re.findall(r"^well (\d)$", node.out, re.M)) == ["0", "1", "2", "3"] and "never" not in node.out
    (saved,) = place.where.glob("logs/*/attempt_0/stacks.txt")
    text = saved.read_text()
    assert re.search(r"rank 2 on n0 \(pid %d\), step 7: asleep" % pids[2], text)  # noqa: UP031
    assert re.search(r'File ".*script1.py", line \d+ in asleep', text) and "in barrier" in text


def test_without_a_restart_left_the_report_has_the_stacks(place: Place) -> None:
    node = place.run("--nproc-per-node", 4, "--node", "n0", "--log-dir", "logs", *HANG, place.script(SCRIPT))
    pids = node.up(0, 1, 2, 3, world=4)
    assert node.end() == 128 + signal.SIGKILL
    found = failures.read(place.where / "logs")
    assert (found.first.rank, found.first.pid, found.first.how, found.first.hung) == (1, pids[1], "hung", (1, 2))
    assert [place.split(" (")[0] for place in found.first.stacks] == [
        "rank 1 stopped", "rank 2 in asleep", "ranks 0, 3 in barrier",
    ]  # fmt: skip
    (other,) = [other for other in found.others if other.rank == 2]
    assert re.search(r"^  asleep \(.*script1.py:\d+\)$", other.traceback, re.M)
    assert re.search(r"^ +asleep \(.*script1.py:\d+\)$", node.err, re.M), "the printed report has it, too"
    gone(*pids.values())


def test_only_the_rank_that_hangs_restarts_with_worker_restarts(place: Place) -> None:
    script = place.script("""
        import rallypoint
        if restarts:
            rallypoint.worker().store.set("back", "")
            sys.exit()
        if rank:
            rallypoint.worker().progress(1)
        if rank == 2:
            os._exit(0)  # done, and silent for that reason
        if rank == 1:
            hang()
        rallypoint.worker().store.wait(["back"], 60)  # never calls progress: it is not blamed
        say("still", rank)
    """)
    node = place.run("--nproc-per-node", 3, "--restart", "worker", "--max-restarts", 1, *HANG, script)
    ended_well(node)
    assert node.out == "still 0" and "restart 1 of 1" in node.err and "rank 2" not in node.err


def test_a_rank_of_another_node_is_named_and_killed_there(place: Place) -> None:
    script = place.script(SCRIPT.replace("if rank == 2:", "if rank == 4:"))
    words = ["--nproc-per-node", 2, "--max-restarts", 1, *HANG]
    nodes = [place.node(name, "--node-rank", at, *words, script) for at, name in enumerate(("n0", "n1"))]
    pids = nodes[0].up(0, 1, world=4) | nodes[1].up(2, 3, world=4)
    ended_well(*nodes)
    lines = [line for node in nodes for line in re.findall(r"^.* hangs?: .*$", node.err, re.M)]
    assert len(lines) == 1, "one node looks for all"
    assert re.search(rf"{STOPPED}; waiting: ranks 0, 2, 3 in barrier", lines[0])
    assert any("rank 1 on n0 (pid %d) failed: hung" % pids[1] in node.err for node in nodes)  # noqa: UP031
    assert [node.out.count("well") for node in nodes] == [2, 2]


@pytest.mark.needs("torch")
def test_the_rank_that_never_enters_all_reduce_is_named(place: Place) -> None:
    node = place.run("--nproc-per-node", 4, "--node", "n0", "--max-restarts", 1, *HANG, place.script(ODD_ONE))
    line = named(node)
    assert re.match(r"rank 2 on n0 hangs: no progress for [\d.]+ s since step 1, in stray \(", line), line
    assert re.search(r"; waiting: ranks 0, 1, 3 in all_reduce \(script1.py:\d+\)$", line), line
    ended_well(node)


UNANSWERED = """
import rallypoint, threading
numbers = {signal.SIGRTMIN + 6, signal.SIGRTMIN + 7}
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
say("up", rank, world, restarts, os.getpid())
rallypoint.worker().progress(1)
while not numbers & signal.sigpending():
    time.sleep(0.01)
say("asked")
hang()
"""
"""A worker that keeps the dump of its stacks waiting."""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_ends_the_agent_in_the_middle_of_a_dump(place: Place, name: str) -> None:
    node = place.run("--hang-timeout", 1, "--max-restarts", 1, place.script(UNANSWERED))
    pids = node.up(0, world=1)
    node.until("^asked$")
    node.signal(name)
    assert node.end() == 128 + getattr(signal, name), node.text()
    gone(*pids.values())


def test_a_worker_that_does_not_answer_is_restarted_all_the_same(place: Place) -> None:
    script = place.script("if restarts: sys.exit()\n" + UNANSWERED)
    node = place.run("--json", "--hang-timeout", 1, "--max-restarts", 1, script)
    ended_well(node)
    (event,) = [event for event in node.events() if event["event"] == "hang"]
    assert event["ranks"] == [0] and "no answer within" in event["reason"], json.dumps(event)


def test_one_node_looks_although_the_stacks_take_long(place: Place) -> None:
    script = place.script("if restarts: sys.exit()\n" + UNANSWERED)  # on both nodes: each dump takes all of its time
    words = ["--hang-timeout", 1, "--max-restarts", 1, script]
    nodes = [place.node(name, "--node-rank", at, *words) for at, name in enumerate(("n0", "n1"))]
    ended_well(*nodes)
    lines = [line for node in nodes for line in re.findall(r"^.* hangs?: .*$", node.err, re.M)]
    assert len(lines) == 1, "\n".join(lines)


def test_restarts_without_a_new_step_end_the_job(place: Place) -> None:
    script = place.script("""
        import rallypoint
        rallypoint.worker().progress([5, 5, 6, 6, 2][restarts])
        say("step", restarts)
        sys.exit(7)
    """)
    words = ["--max-restarts", 9, "--no-progress-limit", 2, "--min-uptime", 0]
    node = place.run(*words, script)
    assert node.end() == 7
    assert node.out.splitlines() == [f"step {restart}" for restart in range(5)]
    assert re.search(r"no new step of progress in 2 restarts in a row \(--no-progress-limit\)", node.err)


def test_log_format_json_is_another_spelling_of_json(place: Place) -> None:
    node = place.run("--log-format", "json", place.script("say('ran')"))
    assert node.end() == 0 and {"round", "started"} <= {event["event"] for event in node.events()}
