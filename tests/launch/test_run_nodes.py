"""`rallypoint run` on several nodes: agents on one machine, by names of their own, that meet at one port."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from tests.launch.runs import Node, Place, gone
from tests.pages import pid_at, read_page
from tests.raw_peer import AMPLE_S, until

import rallypoint
from rallypoint.launch import failures
from rallypoint.recipes.rendezvous import Rendezvous

STAY = "stay()"
AT_ONCE = "--rdzv-conf=last_call_timeout=0"


def ends(*nodes: Node) -> list[int]:
    return [node.end() for node in nodes]


# Restarts


@pytest.mark.parametrize(("policy", "again"), [("group", [0, 1, 2, 3]), ("node", [2, 3]), ("worker", [3])])
def test_who_starts_again_when_a_worker_is_killed(place: Place, policy: str, again: list[int]) -> None:
    words = ["--nproc-per-node=2", "--max-restarts=2", "--restart", policy, place.script(STAY)]
    a, b = place.node("a", "--node-rank=0", *words), place.node("b", "--node-rank=1", *words)
    pids = a.up(0, 1, world=4) | b.up(2, 3, world=4)
    os.kill(pids[3], signal.SIGKILL)
    new: dict[int, int] = {}
    for rank in again:
        new |= (a if rank < 2 else b).up(rank, world=4, restarts=1)
    gone(*(pids[rank] for rank in again))
    assert "rank 3 failed: killed by SIGKILL (9)" in b.err and "restart 1 of 2" in b.err
    assert ("rank 3 on b" in a.err) == (policy == "group")
    for node in (a, b):
        node.signal("SIGUSR1")
    assert ends(a, b) == [0, 0]
    ups = [line for node in (a, b) for line in node.out.splitlines()]
    assert len(ups) == 4 + len(again), "and nobody else"
    gone(*pids.values(), *new.values())


def test_the_budget_is_the_jobs_and_all_print_the_same_first_cause(place: Place) -> None:
    code = """
    on("SIGTERM", lambda: os._exit(9))  # dies of it, which is nobody's fault
    if rank == restarts:
        raise ValueError(f"no {rank}")
    stay()
    """
    words = ["--max-restarts=1", place.script(code)]
    logs = [place.where / name for name in "ab"]
    a, b = (place.node(path.name, "--log-dir", path, *words) for path in logs)
    assert ends(a, b) == [1, 1]
    for node in (a, b):
        assert "FAILED FIRST: ValueError: no 1" in node.err and "more failed" not in node.err
        assert node.err.count("ValueError: no 0") + node.out.count("ValueError: no 0") >= 1
    assert (logs[0] / "failure.json").read_text() == (logs[1] / "failure.json").read_text()


def test_nodes_may_share_a_directory(place: Place) -> None:
    code = "import rallypoint; say('on', node); rallypoint.worker().barrier(); sys.exit(3) if rank else hang()"
    words = ["--log-dir=logs", "-r3", place.script(code)]
    a, b = place.node("a", *words), place.node("b", *words)
    assert ends(a, b) == [3, 3]
    logs = place.where / "logs"
    files = list(logs.glob("job_*/attempt_0/0/stdout.log"))
    assert sorted(file.read_text() for file in files) == ["on a\n", "on b\n"]
    assert [path.name for path in logs.iterdir() if path.is_file()] == ["failure.json"]
    assert failures.read(logs).first.rank == 1


def test_nodes_hear_of_a_failure_before_the_workers_of_the_other_have_ended(place: Place) -> None:
    code = """
    on("SIGTERM", lambda: say("asked to end") if node == "b" else os._exit(0))
    stay()
    """
    words = ["--nproc-per-node=2", "--max-restarts=1", "--grace=600", place.script(code)]
    a, b = place.node("a", *words), place.node("b", *words)
    theirs, (victim, deaf) = up_anywhere(a, 2), up_anywhere(b, 2).values()
    os.kill(victim, signal.SIGKILL)
    b.until("asked to end")
    a.until("all nodes stop")
    gone(*theirs.values())
    assert b.child.poll() is None and Path(f"/proc/{deaf}").exists(), "b still waits for its other worker"
    os.kill(deaf, signal.SIGKILL)
    for node in (a, b):
        node.until(r"^up \d 4 1 ", 2)
    for node in (a, b):
        node.signal("SIGUSR1")
    assert ends(a, b) == [0, 0]


def up_anywhere(node: Node, count: int) -> dict[int, int]:
    """Return the pids of a node's first workers by rank, whichever that is."""
    return {int(match[1]): int(match[2]) for match in node.until(r"^up (\d+) \d+ 0 (\d+)$", count)}


def test_a_command_that_one_node_cannot_start_ends_the_run_for_all(place: Place) -> None:
    a, b = place.node("a", place.script(STAY)), place.node("b", "--no-python", "nosuch")
    assert ends(a, b) == [127, 127]
    for node in (a, b):
        assert re.search("rank [01] on b: cannot start the worker's command", node.err), node.err


# Nodes that come and go


PARENT = """
import subprocess
child = subprocess.Popen(["sleep", "1000"])
say("child", child.pid)
stay()
"""


def test_nodes_come_and_go_and_the_server_outlives_who_started_it(place: Place) -> None:
    words = [AT_ONCE, place.script(PARENT)]
    a = place.node("a", *words, nodes="1:3")
    first = a.up(0, world=1)
    b = place.node("b", *words, nodes="1:3")
    two = a.up(0, world=2) | b.up(1, world=2)
    gone(*first.values())
    c = place.node("c", *words, nodes="1:3")
    three = a.up(0, world=3) | b.up(1, world=3) | c.up(2, world=3)
    gone(*two.values())
    children = [int(match[1]) for match in a.until(r"^child (\d+)")]
    server = place.server()
    a.child.kill()  # it started the server
    gone(three[0], *children)
    places = b.until(r"^up (\d) 2 0 ", 2)[-1][1], c.until(r"^up (\d) 2 0 ")[-1][1]
    assert sorted(places) == ["0", "1"] and place.server() == server
    assert "lost a" in b.err and "lost a" in c.err
    back = place.node("a", *words, nodes="1:3")
    for node, times in ((back, 1), (b, 2), (c, 2)):
        node.until(r"^up \d 3 0 ", times)
    b.signal("SIGTERM")
    assert b.end() == 143
    for node in (back, c):
        node.until(r"^up \d 2 0 ", 2 if node is c else 1)
        node.signal("SIGUSR1")
    assert ends(back, c) == [0, 0]
    gone(*(int(match[1]) for node in (b, c, back) for match in node.until(r"^child (\d+)")))


@pytest.mark.parametrize("lost", [0, 1])
def test_a_failure_that_came_of_the_loss_of_a_node_does_not_end_the_run(place: Place, lost: int) -> None:
    code = """
    import socket, rallypoint
    with socket.create_server(("localhost", 0)) as listener:
        ports = rallypoint.worker().all_gather(str(listener.getsockname()[1]).encode())
        if world == 2:
            peer = socket.create_connection(("localhost", int(ports[1 - rank])))
            mine = listener.accept()[0]
            say("up", rank, world, restarts, os.getpid())
            mine.recv(1)
            raise ConnectionError("my peer is gone")
    stay()
    """
    words = [AT_ONCE, "--max-restarts=0", place.script(code)]
    nodes = {name: place.node(name, *words, nodes="1:2") for name in "ab"}
    ranks = {int(node.until(r"^up (\d) 2 0")[-1][1]): name for name, node in nodes.items()}
    left = nodes[ranks[1 - lost]]
    alone = len(re.findall(r"(?m)^up 0 1 0 ", left.out))  # a round may have begun before the other node came
    nodes[ranks[lost]].child.kill()
    left.until(r"^up 0 1 0 ", alone + 1)
    assert "ConnectionError: my peer is gone" in left.err
    why = rf"lost (node: )?{ranks[1]}\b" if lost else rf"the relay of rank 0 on {ranks[0]} \(127.0.0.1:\d+\) is gone"
    assert re.search(why, left.err), left.err
    left.signal("SIGUSR1")
    assert left.end() == 0


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_a_failure_that_came_of_the_loss_of_a_node_uses_no_restart(place: Place, name: str) -> None:
    code = """
    import socket, rallypoint
    with socket.create_server(("localhost", 0)) as listener:
        ports = rallypoint.worker().all_gather(str(listener.getsockname()[1]).encode())
        if world == 3 and rank > 0:
            peer = socket.create_connection(("localhost", int(ports[0])))
            say("up", rank, world, restarts, os.getpid())
            peer.recv(1)
            raise ConnectionError("my peer is gone")
        stay()
    """
    words = ["--rdzv-conf=last_call_timeout=60", "--max-restarts=1", place.script(code)]
    nodes = [place.node(each, *words, nodes="2:3") for each in "abc"]
    ranks = {node.until(r"^up (\d) 3 0 ")[0][1]: node for node in nodes}
    ranks.pop("0").signal(name)
    pids = [int(node.until(r"^up \d 2 0 (\d+)")[0][1]) for node in ranks.values()]
    os.kill(pids[0], signal.SIGKILL)  # this failure is the worker's own
    for node in ranks.values():
        node.until(r"^up \d 2 1 ")
        node.signal("SIGUSR1")
    assert ends(*ranks.values()) == [0, 0]


def test_a_spare_waits_and_ends_with_the_run(place: Place) -> None:
    words = ["--rdzv-conf=last_call_timeout=60", place.script(STAY)]
    a, b = (place.node(name, *words, nodes="1:2") for name in "ab")
    for node in (a, b):
        node.until("^up")
    c = place.node("c", *words, nodes="1:2")
    with rallypoint.TCPStore("localhost", place.port, timeout=AMPLE_S) as store:
        until(Rendezvous(store, "job", 1, 2).status, lambda status: status.spares == ("c",))
    for node in (a, b):
        node.signal("SIGUSR1")
    assert ends(a, b, c) == [0, 0, 0] and not c.out


def test_a_run_of_a_fixed_size_that_is_full_refuses_a_newcomer(tmp_path: Path) -> None:
    """Also one that runs the very same: it may be another job, and would end as the first does, having run nothing."""
    (tmp_path / "named").mkdir()
    with Place(tmp_path) as unnamed, Place(tmp_path / "named") as named:  # both at once: a newcomer waits for 10 s
        script = unnamed.script(STAY)
        runs = [(unnamed, ["--nnodes=2", "--master-port", unnamed.port, script])]
        runs += [(named, ["--nnodes=2", "--master-port", named.port, "--rdzv-id=job", script])]
        first = [place.run("--node", node, *words) for place, words in runs for node in "ab"]
        for node in first:
            node.until("^up")
        second = [place.run("--node", node, *words) for place, words in runs for node in "cd"]
        assert ends(*second) == [1] * 4
        for node in second:
            assert "is full: it has all of its 2 nodes (" in node.err and "run id of its own" in node.err
            assert not node.out
        for node in first:
            node.signal("SIGUSR1")
        assert ends(*first) == [0] * 4


def test_a_run_that_ends_while_a_newcomer_finds_no_place_is_not_its_success(place: Place) -> None:
    words = ["--nnodes=1", "--master-port", place.port, "--rdzv-id=job", place.script(STAY)]
    first = place.run(*words, "--node=a")
    first.until("^up")
    second = place.run(*words, "--node=b")
    second.until("waiting up to 10 s for a place")
    first.signal("SIGUSR1")
    assert first.end() == 0
    code = second.end()
    assert code == 1 or second.out.startswith("up"), "it fails, or it came when everybody had left, and ran"


@pytest.mark.parametrize("odd", ["path", "arguments", "working_directory", "env_file", "module"])
def test_what_an_unnamed_run_runs_must_be_the_same_on_all_nodes(place: Place, odd: str) -> None:
    script = Path(place.script(STAY))
    other = place.where / "elsewhere" / script.name
    other.parent.mkdir()
    other.write_text(script.read_text())
    (place.where / "variables").write_text("A=1\n")
    meet = ["--nnodes=2", "--master-port", place.port]
    a = place.run(*meet, "--node=a", script, "x")
    with rallypoint.TCPStore("localhost", place.port, timeout=AMPLE_S) as store:
        until(Rendezvous(store, "none", 2).status, lambda status: status.waiting == ("a",))
    words: dict[str, list[object]] = {
        "path": [other, "x"],
        "arguments": [script, "y"],
        "working_directory": [script, "x"],
        "env_file": ["--env-file=variables", script, "x"],
        "module": ["-m", script.stem, "x"],
    }
    where = other.parent if odd == "working_directory" else place.where
    b = place.run(*meet, "--node=b", *words[odd], where=where)
    setting = {"path": "command", "module": "command"}.get(odd, odd)
    assert b.end() == 1 and f": {setting} is " in b.err, b.err
    a.signal("SIGTERM")
    assert a.end() == 143


# The end


def test_what_a_node_that_is_lost_had_not_done_is_done_again_by_all(place: Place) -> None:
    words = ["--json", "--rdzv-conf=last_call_timeout=60", place.script(STAY)]
    a, b, c = (place.node(name, *words, nodes="2:3") for name in "abc")
    c.until("^up")
    for node in (a, b):
        node.until(r"^up \d 3 0")
        node.signal("SIGUSR1")
        node.until('"event": "finish"')
    c.child.kill()
    for node in (a, b):
        node.until(r"^up \d 2 0")
        node.signal("SIGUSR1")
    assert ends(a, b) == [0, 0]


def test_a_loss_is_heard_also_after_a_node_that_was_done_has_gone(place: Place) -> None:
    words = ["--json", "--rdzv-conf=last_call_timeout=60", place.script(STAY)]
    a, b, c = (place.node(name, f"--exit-timeout={0.1 if name == 'a' else 600}", *words, nodes="1:3") for name in "abc")
    for node in (a, b, c):
        node.until(r"^up \d 3 0")
    a.signal("SIGUSR1")
    assert a.end() == 0
    b.signal("SIGUSR1")
    b.until('"event": "finish"')
    c.child.kill()
    b.until(r"^up 0 1 0")
    b.signal("SIGUSR1")
    assert b.end() == 0


def test_runs_that_have_no_name_do_not_pass_for_each_other(place: Place) -> None:
    meet, script = ["--master-port", place.port], place.script(STAY)
    one = place.run(*meet, script)
    one.up(0, world=1)
    other = place.run(*meet, place.script("say('ran')"))
    assert (other.end(), other.out) == (0, "ran"), "on one node, a run that nobody named is one of its own"
    two = [place.run("--nnodes=2", *meet, "--node", name, script) for name in "ab"]
    for node in two:
        node.until("^up")
    third = place.run("--nnodes=2", *meet, "--node=c", place.script("say('ran')"))
    assert third.end() == 1 and "script" in third.err and not third.out
    for node in (one, *two):
        node.signal("SIGUSR1")
    assert ends(one, *two) == [0, 0, 0]


def test_who_comes_to_a_run_that_has_ended_has_not_succeeded(place: Place) -> None:
    script = place.script("say('ran')")
    with (
        rallypoint.Server() as server,
        rallypoint.TCPStore("127.0.0.1", server.port, timeout=AMPLE_S) as store,
        Rendezvous(store, "job", 1, node="a") as meeting,
    ):
        meeting.join(AMPLE_S)
        meeting.close("succeeded")
        for nodes in ("1", "1:2"):
            meet = ["--store", f"tcp://127.0.0.1:{server.port}", "--rdzv-id=job", "--nnodes", nodes]
            node = place.run(*meet, script)
            assert (node.end(), node.out) == (1, "")
            assert "the run has succeeded without this node" in node.err and "No worker was started here" in node.err


@pytest.mark.parametrize("exit_timeout", ["0", "0.1"])
def test_who_is_done_leaves_after_the_exit_timeout_and_the_others_go_on(place: Place, exit_timeout: str) -> None:
    script = place.script(STAY)
    a, b = place.node("a", f"--exit-timeout={exit_timeout}", script), place.node("b", "--json", script)
    a.until("^up")
    up = up_anywhere(b, 1)
    a.signal("SIGUSR1")
    assert a.end() == 0 and "still running: b" in a.err
    with rallypoint.TCPStore("localhost", place.port, timeout=AMPLE_S) as store:
        status = Rendezvous(store, "job", 2).status()
    assert (status.phase, set(status.nodes)) == ("formed", {"b"}), "the round stands without it"
    b.signal("SIGUSR1")
    assert b.end() == 0
    assert up_anywhere(b, 1) == up and b.out.count("up") == 1, "it was not started again"


def test_an_agent_that_ends_in_failure_ends_the_run_where_too_few_are_left(place: Place) -> None:
    """It is the agent that fails here, not only a worker."""
    a, b = (place.node(name, "--node-rank", rank, place.script(STAY)) for rank, name in enumerate("ab"))
    a.up(0, world=2)
    b.up(1, world=2)
    with rallypoint.TCPStore("localhost", place.port, timeout=AMPLE_S) as store:
        store.set("run:job/restarts", "no number")  # of which no agent can make sense
        os.kill(b.up(1, world=2)[1], signal.SIGKILL)
        assert b.end() == 1 and "run:job/restarts" in b.err
        assert a.end() == 1 and "ended in failure, 1 of at least 2 nodes are left" in a.err


@pytest.mark.parametrize("least", [1, 2])
def test_nobody_waits_for_a_node_whose_worker_failed(place: Place, least: int) -> None:
    """Both end in failure, also where the other could go on alone: it is the run that has failed."""
    code = "sys.exit(3) if rank else (on('SIGTERM', lambda: os._exit(0)), stay())"
    words = ["--rdzv-conf=last_call_timeout=60", place.script(code)]
    a, b = (place.node(name, *words, nodes=f"{least}:2") for name in "ab")
    assert ends(a, b) == [3, 3]
    for node in (a, b):
        assert "exit code 3" in node.err and "rank  1" in node.err


def test_the_server_and_the_agents_number_rounds_alike(place: Place) -> None:
    code = "import rallypoint; rallypoint.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])); stay()"
    a = place.node("a", "--max-restarts=1", place.script(code), nodes="1:2")
    os.kill(a.up(0, world=1)[0], signal.SIGKILL)
    a.up(0, world=1, restarts=1)
    told = read_page(f"localhost:{place.port}", "/statistics")["namespaces"]["job"]
    assert told["round"] == 2 and told["scope"] != 2
    a.signal("SIGUSR1")
    assert a.end() == 0


def test_a_running_server_is_used_and_nodes_that_cannot_meet_say_why(place: Place) -> None:
    script = place.script("say(rank, world)")
    with rallypoint.Server() as server:
        meet = ["--store", f"tcp://127.0.0.1:{server.port}", "--nnodes=2"]
        a = place.run(*meet, "--node=a", "--max-restarts=1", script)
        with rallypoint.TCPStore("127.0.0.1", server.port, timeout=AMPLE_S) as store:
            until(Rendezvous(store, "none", 2).status, lambda status: status.waiting == ("a",))
            odd = place.run(*meet, "--node=b", "--max-restarts=2", script)
            assert odd.end() == 1 and "restart_budget" in odd.err and "Traceback" not in odd.err
            b = place.run(*meet, "--node=b", "--max-restarts=1", script)
            assert ends(a, b) == [0, 0] and sorted([a.out, b.out]) == ["0 2", "1 2"]
            assert not [key for key in store.list_keys() if not key.startswith("rendezvous")], "nothing is left"
        late = place.run(*meet, "--rdzv-conf=join_timeout=0.1", "--rdzv-id=other", script)
        assert late.end() == 1 and "1 of at least 2 nodes: waiting for 1" in late.err
    node = place.run(*meet, "--rdzv-conf=join_timeout=0.1", script)
    assert node.end() == 1 and "no store answered" in node.err and "Traceback" not in node.err


def test_the_same_run_again_right_after(place: Place) -> None:
    code = """
    import rallypoint
    say("up", restarts)
    rallypoint.worker().barrier()
    sys.exit(4 if rank == 0 and "x" in sys.argv else 0)
    """
    script = place.script(code)
    for words, exit_code in ((["x"], 4), ([], 0), ([], 0)):
        a, b = place.node("a", script, *words), place.node("b", script, *words)
        assert ends(a, b) == [exit_code, exit_code]
        assert a.out == b.out == "up 0"


# A server that dies


SAVES = "on('SIGTERM', lambda: (say('saved'), os._exit(0))); stay()"


def test_a_run_whose_server_was_killed_begins_again_and_that_uses_a_restart(place: Place) -> None:
    words = ["--max-restarts=2", place.script(SAVES)]
    a, b = (place.node(name, "--node-rank", rank, *words) for rank, name in enumerate("ab"))
    before = a.up(0, world=2) | b.up(1, world=2)
    server = place.server()
    os.kill(server, signal.SIGKILL)
    after = a.up(0, world=2, restarts=1) | b.up(1, world=2, restarts=1)
    gone(*before.values())
    for node in (a, b):
        assert "saved" in node.out, "with its grace"
        assert "the server restarted and lost the state of the run; restart 1 of 2" in node.err
    assert place.server() != server
    os.kill(after[0], signal.SIGKILL)
    a.up(0, world=2, restarts=2)
    b.up(1, world=2, restarts=2)
    os.kill(place.server(), signal.SIGKILL)
    assert ends(a, b) == [1, 1]
    for node in (a, b):
        assert "restart budget exhausted (2 of 2 used)" in node.err and "Traceback" not in node.err


def test_a_run_without_restarts_ends_on_all_nodes_when_its_server_was_killed(place: Place) -> None:
    a, b = place.node("a", place.script(SAVES)), place.node("b", place.script(SAVES))
    pids = [*up_anywhere(a, 1).values(), *up_anywhere(b, 1).values()]
    os.kill(place.server(), signal.SIGKILL)
    assert ends(a, b) == [1, 1]
    gone(*pids)
    for node in (a, b):
        assert "the server restarted and lost the state of the run; restart budget exhausted (0 of 0 used)" in node.err


def test_a_run_whose_server_stays_away_ends_after_the_join_timeout(place: Place) -> None:
    with rallypoint.Server() as server:
        meet = [
            "--store",
            f"tcp://127.0.0.1:{server.port}",
            "--nnodes=2",
            "--rdzv-conf=join_timeout=8",
            place.script(SAVES),
        ]
        a, b = (place.run("--node", name, *meet) for name in "ab")
        pids = [*up_anywhere(a, 1).values(), *up_anywhere(b, 1).values()]
        os.kill(server.pid, signal.SIGKILL)
        assert ends(a, b) == [1, 1]
    gone(*pids)
    for node in (a, b):
        assert "reconnecting for up to 8 s" in node.err and "saved" in node.out
        assert "cannot continue without its server: connection timed out: no store answered" in node.err
        assert "Traceback" not in node.err


def test_who_is_done_ends_well_though_its_server_stays_away(place: Place) -> None:
    with rallypoint.Server() as server:
        meet = ["--store", f"tcp://127.0.0.1:{server.port}", "--nnodes=2", "--json", place.script(STAY)]
        a, b = place.run("--node=a", "--exit-timeout=9", *meet), place.run("--node=b", *meet)
        for node in (a, b):
            node.until("^up")
        a.signal("SIGUSR1")
        a.until('"event": "done"')
        os.kill(server.pid, signal.SIGKILL)
        b.until("stopping the workers; reconnecting for up to 600 s")
        b.signal("SIGTERM")
        assert b.end() == 143 and f"SIGTERM while no server answers at 127.0.0.1:{server.port}" in b.err
        assert a.end() == 0 and "the result of the other nodes is unknown" in a.err


def test_workers_that_succeed_without_their_server_have_succeeded(place: Place) -> None:
    node = place.run(place.script("say('at', *map(os.getenv, ['RALLYPOINT_URL', 'RALLYPOINT_RUN_TOKEN'])); stay()"))
    found = node.until(r"^at (\S+) (\S+)")[0]
    node.up(0, world=1)
    os.kill(pid_at(found[1], found[2]), signal.SIGKILL)
    node.signal("SIGUSR1")  # well within the grace in which nobody takes the server for lost
    assert node.end() == 0, node.err


def test_an_agent_that_has_lost_its_run_leaves_that_of_others_alone(place: Place) -> None:
    words = [AT_ONCE, place.script(STAY)]
    a, b = (place.node(name, *words, nodes="1:2") for name in "ab")
    for node in (a, b):
        node.until(r"^up \d 2 0 ")
    server = place.server()
    a.child.kill()
    os.kill(server, signal.SIGKILL)
    fresh = place.node("a", *words, nodes="1:2")
    assert b.end() == 1 and "restart budget exhausted (0 of 0 used)" in b.err
    fresh.until("^up 0 1 ")
    fresh.signal("SIGUSR1")
    assert fresh.end() == 0, fresh.err


def test_a_port_that_nobody_can_have_is_refused_at_once(place: Place) -> None:
    meet = ["--nnodes=2", "--rdzv-endpoint=127.0.0.1:0", "--rdzv-conf=is_host=0"]
    node = place.run(*meet, place.script(STAY))
    assert node.end() == 1 and "port 0" in node.err and len(node.err.splitlines()) == 1


def test_an_agent_that_finds_no_server_says_so_and_why(place: Place) -> None:
    meet = ["--nnodes=2", "--rdzv-endpoint=nosuch.invalid:29400"]
    node = place.run(*meet, place.script(STAY))
    node.until(r"no server answers at nosuch.invalid:29400 yet \(.*resolve")
    node.signal("SIGTERM")
    assert node.end() == 143 and "SIGTERM while no server answers at nosuch.invalid:29400" in node.err


# What workers do with it


def test_what_a_worker_finds_out(place: Place) -> None:
    code = """
    import rallypoint
    me = rallypoint.worker()
    assert me is rallypoint.worker() and repr(me) == f"<worker {rank} of 3, round 1 of 'job'>"
    assert (me.rank, me.world_size, me.node, me.restarts, me.round) == (rank, 3, node, 0, 1)
    me.barrier()
    gathered = b" ".join(me.all_gather(f"{me.node}{me.local_rank}/{me.local_world_size}".encode())).decode()
    count = me.store.add("came", 1)
    me.store.wait([f"all"]) if count < 3 else me.store.set("all", "")
    with rallypoint.TCPStore("localhost", 0, is_master=rank == 0) if rank == 0 else open(os.devnull) as own:
        port = int(me.all_gather(str(own.port if rank == 0 else 0).encode(), name="private")[0])
        with rallypoint.TCPStore("localhost", port) as private:
            private.add("here", 1)
            me.barrier(name="written")
            say(gathered, private.add("here", 0))
            me.barrier(name="read")
    """
    script = place.script(code)
    a = place.node("a", "--nproc-per-node=2", "--node-rank=0", script)
    b = place.node("b", "--node-rank=1", script)
    assert ends(a, b) == [0, 0], a.err + b.err
    assert a.out.splitlines() + b.out.splitlines() == ["a0/2 a1/2 b0/1 3"] * 3


def test_who_was_not_launched_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RALLYPOINT_URL", raising=False)
    with pytest.raises(rallypoint.NotLaunched, match="RALLYPOINT_URL is not set") as caught:
        rallypoint.worker()
    assert caught.value.missing == "RALLYPOINT_URL"


@pytest.mark.needs("torch")
def test_a_script_of_pytorchs_runs_as_it_is(place: Place) -> None:
    script = place.where / "train.py"
    script.write_text("""
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
private = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
private.set("k", "v")
ports = [None] * dist.get_world_size()
dist.all_gather_object(ports, private.port)
assert dist.TCPStore("localhost", ports[0], is_master=False).get("k") == b"v"
print("total", int(total))
dist.barrier()
dist.destroy_process_group()
""")
    a, b = place.node("a", "--nproc-per-node=2", script), place.node("b", script)
    assert ends(a, b) == [0, 0], a.err + b.err
    assert sorted(a.out.splitlines() + b.out.splitlines()) == ["total 6"] * 3
