"""Stacks of live workers: the hook that registers them, who is asked, and `rallypoint stacks`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.launch.runs import Node, Place, gone
from tests.raw_peer import AMPLE_S, until

import rallypoint
from rallypoint.launch.monitoring import stack_dump
from rallypoint.launch.monitoring.local_agents import agents_here
from rallypoint.launch.monitoring.stack_dump import dump_stacks
from rallypoint.launch.monitoring.worker_records import WorkerEntry

SLEEP_IN_C = """
import ctypes
def asleep():
    say("up", rank, world, restarts, os.getpid())
    while True:
        ctypes.PyDLL(None).sleep(1000)  # holds the interpreter lock
if rank == 2:
    asleep()
stay()
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with Place(tmp_path) as made:
        yield made


def stacks(place: Place, *words: object, env: dict[str, str] | None = None) -> str:
    """Run `rallypoint stacks` as another process of the same user; return its output."""
    command = [sys.executable, "-m", "rallypoint", "stacks", *map(str, words)]
    environment = {**os.environ, "TMPDIR": str(place.where), **(env or {})}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=AMPLE_S)
    return done.stdout + done.stderr


def entries(place: Place, node: Node, monkeypatch: pytest.MonkeyPatch) -> tuple[WorkerEntry, ...]:
    """Return the workers of an agent, as its directory lists them."""
    monkeypatch.setattr("tempfile.tempdir", str(place.where))
    monkeypatch.setattr("rallypoint.launch.monitoring.local_agents.SYSTEM_TEMPORARY", str(place.where))
    (agent,) = until(lambda: [agent for agent in agents_here() if agent.workers], bool)
    assert agent.pid == node.child.pid
    return agent.workers


def test_stacks_of_this_machine_are_folded_and_workers_go_on(place: Place) -> None:
    node = place.run("--nproc-per-node", 4, "--rdzv-id", "mine", place.script(SLEEP_IN_C))
    pids = node.up(0, 1, 2, 3, world=4)
    os.kill(pids[3], signal.SIGSTOP)
    odd = r"rank 2 in asleep \(script1.py:\d+\); rank 3 stopped \(SIGSTOP\); ranks 0, 1 in hang \(script1.py:\d+\)\n"
    said = until(lambda: stacks(place, "mine"), lambda said: re.match(odd, said) is not None)  # they have just said so
    assert re.search(r"^    asleep \(.*script1.py:\d+\)$", said, re.M), said
    assert "asleep" in stacks(place, "mine", "--rank", 2) and "asleep" not in stacks(place, "mine", "--rank", 0)
    listed = json.loads(stacks(place, "mine", "--json"))
    assert sorted((one["rank"], one["pid"]) for one in listed) == sorted(pids.items())
    os.kill(pids[3], signal.SIGCONT)
    assert "no run 'other'" in stacks(place, "other")
    node.signal("SIGTERM")
    assert node.end() == 128 + signal.SIGTERM
    assert "no run 'mine'" in stacks(place, "mine")
    gone(*pids.values())


def test_stacks_of_all_nodes_come_through_the_store(place: Place) -> None:
    script = place.script(SLEEP_IN_C.replace("rank == 2", "rank == 1"))
    nodes = [place.node(name, "--node-rank", at, script, run="a/b") for at, name in enumerate(("n0", "n1"))]
    pids = nodes[0].up(0, world=2) | nodes[1].up(1, world=2)
    url = f"tcp://localhost:{place.port}"
    both = r"rank 0 in hang \(.*\); rank 1 in asleep \(.*\)\n"
    until(lambda: stacks(place, "--store", url), lambda said: re.match(both, said) is not None)
    assert re.match(rf"rank 1 on n1 \(pid {pids[1]}\): asleep", stacks(place, "a/b", "--store", url, "--rank", 1))
    assert "no run 'x' in this store (runs there: a/b)" in stacks(place, "x", "--store", url)
    for node in nodes:
        node.signal("SIGTERM")
        node.end()
    with rallypoint.connect(url) as store:
        assert not [key for key in store.list_keys() if "ask:" in key or "answer:" in key]


def test_dumps_do_no_harm_to_a_worker_whose_threads_run(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    script = place.script("""
        import threading
        def deeper(depth):
            return deeper(depth - 1) if depth else [number for number in range(9)]
        def busy():
            while True:
                deeper(60)
        for _ in range(2):
            threading.Thread(target=busy, daemon=True).start()
        say("up", rank, world, restarts, os.getpid())
        busy()
    """)
    node = place.run(script)
    pids = node.up(0, world=1)
    workers = entries(place, node, monkeypatch)
    for name in ("SLEEPING_S", "RUNNING_S"):  # on a busy machine it may take longer, and is not in C code
        monkeypatch.setattr(stack_dump, name, AMPLE_S)
    for _ in range(300):
        (found,) = dump_stacks(workers, "n0", AMPLE_S)
        assert found.state == "running" and found.pid == pids[0], node.text()
    assert found.text.count("Thread ") == 3 and found.place.split(" (")[0] in ("busy", "deeper", "<listcomp>")
    node.signal("SIGTERM")
    assert node.end() == 143, node.text()


@pytest.mark.parametrize("how", ["execs", "closes its descriptors", "is no Python", "uses -I"])
def test_a_process_that_cannot_answer_is_not_signalled(place: Place, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = {
        "execs": [place.script("os.execvp('sh', ['sh', '-c', 'echo up 0 1 0 $$; exec sleep 600'])")],
        "closes its descriptors": [place.script("os.closerange(3, 2000)\nfile = open('mine', 'w')\nstay()")],
        "is no Python": ["--no-python", "sh", "-c", "echo up 0 1 0 $$; exec sleep 600"],
        "uses -I": ["--no-python", sys.executable, "-I", place.script("stay()")],
    }
    node = place.run(*commands[how])
    pids = node.up(0, world=1)
    (found,) = dump_stacks(entries(place, node, monkeypatch), "n0")
    assert (found.pid, found.text, found.note) == (
        pids[0], "", "no stack: not a Python process, or one that has not started yet",
    )  # fmt: skip
    os.kill(pids[0], 0)  # the dump signal would have killed it
    node.signal("SIGTERM")
    node.end()


def test_a_python_below_a_shell_answers_for_its_worker(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = f"{sys.executable} -c pass; {sys.executable} {place.script('stay()')}; true"
    node = place.run("--no-python", "sh", "-c", shell)
    pids = node.up(0, world=1)
    (found,) = dump_stacks(entries(place, node, monkeypatch), "n0")
    assert found.pid == pids[0] and " in stay\n" in found.text


def test_the_hook_leaves_no_trace_and_runs_the_users_own_sitecustomize(place: Place) -> None:
    mine = place.where / "mine"
    mine.mkdir()
    (mine / "sitecustomize.py").write_text("seen = True")
    script = place.script("""
        import subprocess
        import sitecustomize
        say(sitecustomize.seen, os.environ["PYTHONPATH"], [place for place in sys.path if "monitoring" in place])
        child = "import os, sys; print(sys.modules['sitecustomize'].seen, os.environ['PYTHONPATH'])"
        say(subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout.strip())
        say("open", [name for name in os.listdir("/proc/self/fd") if 2 < int(name) < 100 and os.path.exists("/proc/self/fd/" + name)])
    """)  # noqa: E501
    node = place.run(script, env={"PYTHONPATH": str(mine)})
    assert node.end() == 0, node.text()
    assert node.out.splitlines() == [f"True {mine} []", f"True {mine}", "open []"]


def test_an_error_of_the_users_sitecustomize_is_shown_as_python_shows_it(place: Place) -> None:
    (place.where / "sitecustomize.py").write_text("import nothing_of_that_name")
    node = place.run(place.script("say('ran')"), env={"PYTHONPATH": str(place.where)})
    assert (node.end(), node.out) == (0, "ran")
    assert "nothing_of_that_name" in node.err and "Error in sitecustomize" in node.err
