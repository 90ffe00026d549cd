"""`--health-check`: a node whose check fails stays out of the run, a spare takes its rank, and it is back when well."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from tests.launch.runs import Node, Place, gone
from tests.raw_peer import AMPLE_S, until

import rallypoint
from rallypoint import Rendezvous

STAY = "stay()"
WELL = 'test ! -e "bad-$RALLYPOINT_NODE" || { echo "GPU 0 is lost" >&2; exit 3; }'
"""A check that fails where there is a file `bad-NODE`."""

BRIEF = ("--health-cooldown", "0.2")
LONG_CALL, AT_ONCE = "--rdzv-conf=last_call_timeout=60", "--rdzv-conf=last_call_timeout=0"


def fail(place: Place, name: str) -> Path:
    """Have the checks of a node fail from now on; removing the file ends that."""
    path = place.where / f"bad-{name}"
    path.touch()
    return path


def up_with(node: Node, world: int, restarts: int = 0, times: int = 1) -> tuple[int, int]:
    """Return the rank and the pid of the node's worker in a world of this size."""
    match = node.until(rf"^up (\d) {world} {restarts} (\d+)$", times)[-1]
    return int(match[1]), int(match[2])


def kill(pid: int) -> None:
    os.kill(pid, 9)
    gone(pid)


def finish(*nodes: Node) -> None:
    for node in nodes:
        node.signal("SIGUSR1")
    assert [node.end() for node in nodes] == [0] * len(nodes), "\n".join(node.text() for node in nodes)


def status_of(place: Place) -> Rendezvous:
    return Rendezvous(rallypoint.TCPStore("localhost", place.port, timeout=AMPLE_S), "job", 1, 2)


# One node


def test_a_node_of_its_own_is_checked_again_until_the_join_timeout(place: Place) -> None:
    check = ("--health-check", "echo 'GPU 0 is lost'; exit 3", "--health-cooldown", "1")
    node = place.run(*check, "--rdzv-conf", "join_timeout=4", "--json", place.script(STAY))
    assert node.end() == 1 and not node.out
    *_, last = events = node.events()
    out = [event for event in events if event["event"] == "unhealthy"]
    assert [(one["failed"], one["exit_code"], one["output"]) for one in out[:2]] == [
        (1, 3, ["GPU 0 is lost"]),
        (2, 3, ["GPU 0 is lost"]),
    ]
    assert [one["cooldown_s"] for one in out[:2]] == [1.0, 2.0]
    assert last["event"] == "error" and re.search(
        r"gives up at its join timeout: the health check \"echo 'GPU 0 is lost'; exit 3\" failed \d times in \d s, "
        r"the last time with exit code 3: GPU 0 is lost$",
        last["reason"],
    )


@pytest.mark.parametrize(("command", "code"), [("nosuchcheck", 127), ("./plain", 126)])
def test_a_check_that_cannot_be_run_ends_the_node_at_once(place: Place, command: str, code: int) -> None:
    (place.where / "plain").touch()
    node = place.run("--health-check", f"{command} --all", place.script(STAY))
    assert node.end() == code and not node.out
    assert f"the health check '{command} --all' cannot be run: exit code {code}: " in node.err
    assert node.err.count("rallypoint run:") == 1


def test_a_node_joins_when_its_check_passes(place: Place) -> None:
    bad = fail(place, "n0")
    node = place.run("--node", "n0", "--health-check", WELL, *BRIEF, place.script(STAY))
    node.until("health check failed 2 times in a row: exit code 3: GPU 0 is lost; this node is out of the run")
    bad.unlink()
    node.until(r"the health check passed, after it failed \d times? in \d s: this node joins again")
    node.up(0, world=1)
    finish(node)


def test_the_check_is_killed_at_its_timeout(place: Place) -> None:
    check = f"sleep 1000 & echo $! >> {place.where}/children; wait"
    node = place.run("--health-check", check, "--health-timeout", "0.5", *BRIEF, place.script(STAY))
    node.until(r"health check failed 2 times in a row: no end after 0.5 s, killed")
    node.signal("SIGTERM")
    assert node.end() == 143
    gone(*map(int, (place.where / "children").read_text().split()))


@pytest.mark.parametrize("cools_down", [False, True])
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_ends_the_agent_at_once(place: Place, cools_down: bool, name: str, code: int) -> None:
    check = "echo $$ > pid; mv pid there; " + ("exit 3" if cools_down else "exec sleep 1000")
    node = place.run("--health-check", check, "--health-timeout=900", "--health-cooldown=900", place.script(STAY))
    if cools_down:
        node.until("this node is out of the run, and is checked again in")
    else:
        until((place.where / "there").exists, bool)
    node.signal(name)
    assert node.end() == code and not node.out
    what = (
        "out of the run: health check failed: exit code 3"
        if cools_down
        else "checking the health of this node, before it joins"
    )
    assert f"{name} while {what}" in node.err
    gone(int((place.where / "there").read_text()))


def test_a_check_ends_with_its_agent(place: Place) -> None:
    check = "setsid sleep 1000 & echo $! > pid; mv pid there; wait"
    node = place.run("--health-check", check, place.script(STAY))
    until((place.where / "there").exists, bool)
    node.child.kill()
    gone(int((place.where / "there").read_text()))


def test_a_check_gets_the_variables_of_the_workers_and_the_name_of_its_node(place: Place) -> None:
    (place.where / "more.env").write_text("LIMIT=80\n")
    words = ["--node=n0", "--rdzv-id=job", "--env-file=more.env", "--health-cooldown=900", place.script(STAY)]
    check = "echo $LIMIT $RALLYPOINT_NODE $RALLYPOINT_RUN; cat; exit 3"
    node = place.run(*words, env={"RALLYPOINT_HEALTH_CHECK": check})
    node.until("health check failed: exit code 3: 80 n0 job; this node")


@pytest.mark.parametrize(
    "words", [["--health-check=true", "--health-timeout=0"], ["--health-cooldown=soon"], ["--health-cooldown=0"]]
)
def test_wrong_options_are_usage_errors(place: Place, words: list[str]) -> None:
    node = place.run(*words, place.script(STAY))
    assert node.end() == 2 and re.search("health[-_](timeout|cooldown)", node.err)


# Several nodes


def test_a_spare_takes_the_rank_and_the_node_comes_back_as_a_spare(place: Place) -> None:
    words = ["--max-restarts=1", "--health-check", WELL, *BRIEF, LONG_CALL, place.script(STAY)]
    a, b = (place.node(name, *words, nodes="1:2") for name in "ab")
    ranks = {name: up_with(node, 2) for name, node in (("a", a), ("b", b))}
    c = place.node("c", *words, nodes="1:2")
    run = status_of(place)
    until(run.status, lambda status: status.spares == ("c",))
    bad = fail(place, "b")
    kill(ranks["b"][1])
    b.until("restart 1 of 1")
    b.until(
        "health check failed: exit code 3: GPU 0 is lost; this node is out of the run, and is checked again in 0.2 s"
    )
    b.until("no restart is used for the failure: this node is unhealthy")
    assert up_with(c, 2)[0] == ranks["b"][0], "its rank, with the restart given back"
    assert up_with(a, 2, times=2)[0] == ranks["a"][0]
    b.until("failed 2 times in a row")
    bad.unlink()
    b.until("the health check passed")
    until(run.status, lambda status: status.spares == ("b",))
    finish(a, c)
    assert b.end() == 0, b.text()
    assert [node.out.count("up ") for node in (a, b, c)] == [2, 1, 1], "the round that is full is not disturbed"


def test_without_a_spare_the_others_continue_and_the_node_joins_again(place: Place) -> None:
    words = ["--max-restarts=1", "--health-check", WELL, *BRIEF, AT_ONCE, place.script(STAY)]
    a = place.node("a", *words, nodes="1:2")
    a.until("^up")
    b = place.node("b", *words, nodes="1:2")
    (_, victim), before = up_with(b, 2), a.out.count("up 0 1 0 ")
    bad = fail(place, "b")
    kill(victim)
    a.until(r"^up 0 1 0 \d+$", before + 1)
    b.until("failed 2 times in a row")
    bad.unlink()
    for node in (a, b):
        up_with(node, 2, times=2)
    finish(a, b)


def test_in_a_run_of_a_fixed_size_the_others_wait_for_the_node(place: Place) -> None:
    words = ["--max-restarts=1", "--health-check", WELL, *BRIEF, place.script(STAY)]
    a, b = (place.node(name, *words) for name in "ab")
    up_with(a, 2)
    _, victim = up_with(b, 2)
    bad = fail(place, "b")
    kill(victim)
    b.until("failed 2 times in a row")
    bad.unlink()
    for node in (a, b):
        up_with(node, 2, times=2)
    finish(a, b)


def test_a_spare_does_not_wait_for_a_check_that_takes_long(place: Place) -> None:
    check = 'echo "$RALLYPOINT_NODE" >> checks; test ! -e slow || exec sleep 1000'
    words = ["--health-check", check, "--health-timeout=900", LONG_CALL, "--max-restarts=1", place.script(STAY)]
    a, b = (place.node(name, *words, nodes="1:2") for name in "ab")
    up_with(a, 2)
    _, victim = up_with(b, 2)
    c = place.node("c", *words, nodes="1:2")
    until(status_of(place).status, lambda status: status.spares == ("c",))
    (place.where / "slow").touch()
    kill(victim)
    b.until(r"a spare takes its place: its health check has been running for \d\.\d s")
    for node in (a, c):
        up_with(node, 2, restarts=1)
    assert (place.where / "checks").read_text().split().count("a") == 1, "its workers did not fail by themselves"
    finish(a, c)
    assert b.end() == 0, "a spare, which ends with the run in the middle of its check"


def test_a_check_that_passes_costs_the_run_one_round(place: Place) -> None:
    words = ["--max-restarts=1", "--health-check", WELL, *BRIEF, place.script(STAY)]
    a, b = (place.node(name, *words) for name in "ab")
    _, victim = up_with(a, 2), up_with(b, 2)[1]
    kill(victim)
    for node in (a, b):
        up_with(node, 2, restarts=1)
    finish(a, b)
    assert [node.out.count("up ") for node in (a, b)] == [2, 2] and "out of the run" not in a.err + b.err


@pytest.mark.parametrize("nodes", ["1", "1:2"])
def test_a_failure_without_a_restart_left_does_not_end_the_run_of_an_unhealthy_node(place: Place, nodes: str) -> None:
    words = ["--health-check", WELL, *BRIEF, AT_ONCE, place.script(STAY)]
    b = place.node("b", *words, nodes=nodes)
    pids = [up_with(b, 1)[1]]
    fail(place, "b")
    kill(pids[0])
    b.until("the failure is not the worker's; this node leaves the round")
    b.until("failed 2 times in a row")
    (place.where / "bad-b").unlink()
    pids.append(up_with(b, 1, times=2)[1])
    kill(pids[1])
    assert b.end() == 137, "the node is well: it was the worker"
    assert "FAILED FIRST" in b.err


def test_a_spare_steps_in_although_no_restart_is_left(place: Place) -> None:
    words = ["--health-check", WELL, "--health-cooldown=900", LONG_CALL, place.script(STAY)]
    a, b = (place.node(name, *words, nodes="1:2") for name in "ab")
    up_with(a, 2)
    rank, victim = up_with(b, 2)
    c = place.node("c", *words, nodes="1:2")
    until(status_of(place).status, lambda status: status.spares == ("c",))
    fail(place, "b")
    kill(victim)
    assert up_with(c, 2)[0] == rank
    up_with(a, 2, times=2)
    assert "restart budget exhausted" not in a.err + c.err and "this node leaves the round" in b.err
    finish(a, c)
    assert b.end() == 0, "it took part in a run that succeeded"


@pytest.mark.parametrize("policy", ["node", "worker"])
def test_where_workers_restart_alone_a_failed_check_takes_the_node_out(place: Place, policy: str) -> None:
    words = ["--nproc-per-node=2", "--restart", policy, "--max-restarts=9", "--health-check", WELL, *BRIEF, AT_ONCE]
    a = place.node("a", *words, place.script(STAY), nodes="1:2")
    a.until("^up")
    b = place.node("b", *words, place.script(STAY), nodes="1:2")
    pids = b.up(2, 3, world=4)
    kill(pids[3])  # a check that passes
    again = [2, 3] if policy == "node" else [3]
    started = b.up(*again, world=4, restarts=1)
    before = len(re.findall(r"(?m)^up 0 2 1 ", a.out))
    bad = fail(place, "b")
    kill(started[3])
    b.until("the health check of this node failed: exit code 3: GPU 0 is lost; this node leaves the round")
    a.until(r"^up 0 2 1 \d+$", before + 1)
    bad.unlink()
    for rank, node in ((0, a), (1, a), (2, b), (3, b)):
        node.until(rf"^up {rank} 4 1 \d+$", 2 if rank in again else 1)
    finish(a, b)


def test_a_node_on_which_a_rank_hung_is_checked(place: Place) -> None:
    code = """
    import rallypoint
    worker = rallypoint.worker()
    worker.progress(0)
    if restarts or node == "a":
        on("SIGUSR1", lambda: os._exit(0))
        say("up", rank, world, restarts, os.getpid())
        while True:
            worker.progress(1)
            time.sleep(0.1)
    hang()
    """
    check = 'echo "$RALLYPOINT_NODE" >> checks'
    words = ["--max-restarts=1", "--hang-timeout=2", "--health-check", check, place.script(code)]
    a, b = (place.node(name, *words) for name in "ab")
    for node in (a, b):
        up_with(node, 2, restarts=1)
    finish(a, b)
    assert sorted((place.where / "checks").read_text().split()) == ["a", "b", "b"]


def test_a_node_that_is_out_when_the_run_ends_has_its_result(place: Place) -> None:
    fail(place, "b")
    words = ["--health-check", WELL, "--health-cooldown=900", AT_ONCE, place.script(STAY)]
    b = place.node("b", *words, nodes="1:2")
    b.until("this node is out of the run, and is checked again in")
    a = place.node("a", *words, nodes="1:2")
    up_with(a, 1)
    finish(a)
    assert b.end() == 0 and not b.out, b.text()


def test_a_node_that_has_not_seen_the_run_open_has_no_part_in_its_result(place: Place) -> None:
    script = place.script("on('SIGTERM', lambda: say('asked to end'))\nstay()")
    words = ["--health-check", WELL, AT_ONCE, "--grace=600", script]
    a = place.node("a", *words, nodes="1:2")
    _, worker = up_with(a, 1)
    with rallypoint.TCPStore("localhost", place.port, timeout=AMPLE_S) as store:
        Rendezvous(store, "job", 1, 2, node="closer").close("succeeded", "somebody says so")
    a.until("asked to end")
    b = place.node("b", *words, nodes="1:2")
    assert b.end() == 1 and "No worker was started here" in b.err, b.text()
    kill(worker)
    assert a.end() == 0


def test_a_node_that_is_out_comes_back_after_a_restart_of_the_server(place: Place) -> None:
    bad = fail(place, "b")
    words = ["--health-check", WELL, *BRIEF, place.script(STAY)]
    store = place.where / "data"
    a = place.node("a", "--data-dir", store, *words)
    b = place.node("b", *words)
    b.until("failed 3 times in a row")
    os.kill(place.server(), 9)
    b.until("failed 5 times in a row")
    bad.unlink()
    for node in (a, b):
        up_with(node, 2)
    finish(a, b)
