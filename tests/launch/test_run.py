"""`rallypoint run` as people run it: real agents, real workers, real signals."""

from __future__ import annotations

import errno
import json
import os
import pty
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.launch.runs import HARNESS, Node, Place, gone
from tests.raw_peer import AMPLE_S, until

import rallypoint
from rallypoint.cli import main
from rallypoint.core.policy.restart_policy import RestartRules
from rallypoint.launch.agent import NodeAgent
from rallypoint.launch.job import Job, WorkerCommand
from rallypoint.launch.run_state import RunState
from rallypoint.launch.workers.worker_group import _why_not
from rallypoint.launch.workers.worker_process import WorkerUnstartable
from rallypoint.readiness import wait_readable
from rallypoint.recipes.rendezvous import Rendezvous
from rallypoint.store.batch import Batch

TOLD = frozenset(
    """RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE
    MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID
    TORCHELASTIC_USE_AGENT_STORE TORCHELASTIC_ERROR_FILE TORCHELASTIC_SIGNALS_TO_HANDLE TORCH_NCCL_ASYNC_ERROR_HANDLING
    OMP_NUM_THREADS""".split()  # noqa: SIM905
)
"""What torchrun 2.13 tells two workers."""

ABBREVIATED = WorkerCommand("script", "x.py", ("--redirect", "3", "script.py"))
STAY = "stay()"
TELL = "say(json.dumps(dict(os.environ)))"


def told(node: Node) -> list[dict[str, str]]:
    """Return the environments that workers printed, by rank."""
    return sorted((json.loads(line) for line in node.out.splitlines()), key=lambda one: int(one["RANK"]))


# One node


def test_workers_get_the_environment_that_torchrun_sets(place: Place) -> None:
    node = place.run("--nproc-per-node", 2, "--role", "trainer", "--max-restarts=3", place.script(TELL))
    assert (node.end(), node.err) == (0, "")
    zero, one = told(node)
    ours = {name for name in one if name.startswith("RALLYPOINT_")}
    assert set(one) - set(os.environ) - ours - HARNESS == TOLD - set(os.environ)
    assert one["RALLYPOINT_URL"].startswith("tcp://127.0.0.1:") and ours >= {"RALLYPOINT_RUN", "RALLYPOINT_ROUND"}
    names = """RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_NAME ROLE_RANK
    ROLE_WORLD_SIZE MASTER_ADDR TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_USE_AGENT_STORE"""
    assert " ".join(one[name] for name in names.split()) == "1 1 2 2 0 1 trainer 1 2 127.0.0.1 0 3 True"
    assert zero["TORCHELASTIC_ERROR_FILE"] != one["TORCHELASTIC_ERROR_FILE"]
    assert not Path(one["TORCHELASTIC_ERROR_FILE"]).parents[2].exists(), "what had no place of its own is removed"


def test_a_worker_that_would_serve_the_store_is_a_client_of_the_launchers(place: Place) -> None:
    script = place.script("""
        import rallypoint
        where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = rallypoint.TCPStore(*where, world, is_master=rank == 0)
        mine = rallypoint.TCPStore("127.0.0.1", 0, 1, is_master=True)  # a private store, on another port
        mine.set("mine", str(rank))
        store.set(f"private/{rank}", str(mine.port))
        ports = store.multi_get([f"private/{one}" for one in range(world)])
        others = [rallypoint.TCPStore("127.0.0.1", int(port)).get("mine") for port in ports]
        store.barrier("read", world)
        say(rank, "serves" if store._server else "is a client", len({where[1], *map(int, ports)}), others)
    """)
    node = place.run("--nproc-per-node", 2, script)
    assert (node.end(), node.err) == (0, "")
    assert sorted(node.out.splitlines()) == [f"{rank} is a client 3 [b'0', b'1']" for rank in range(2)]


@pytest.mark.needs("torch")
def test_the_list_of_those_variables_is_torchruns(place: Place) -> None:
    script = place.where / "tell.py"
    script.write_text("import json, os\nos.write(1, json.dumps(dict(os.environ)).encode() + b'\\n')")  # one write each
    mine = {name: value for name, value in os.environ.items() if name not in TOLD}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, env=mine, capture_output=True, check=True, timeout=AMPLE_S)
    assert {name for name in json.loads(done.stdout.splitlines()[0]) if name not in mine} == TOLD


RAISE = """
if rank == 1:
    os.write(2, b"a word before\\n")
    raise ValueError("no such thing")
hang()
"""
RECORD = """
if rank == 1:
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump({"message": {"message": "told so", "extraInfo": {"py_callstack": "by the script"}}}, file)
    sys.exit(7)
hang()
"""


@pytest.mark.parametrize(
    ("code", "exit_code", "said"),
    [
        (
            RAISE,
            1,
            ["FAILED FIRST: ValueError: no such thing", "exit code 1", "| a word before", 'raise ValueError("no'],
        ),
        (RECORD, 7, ["FAILED FIRST: told so", "exit code 7", "by the script"]),
        ("os.kill(os.getpid(), 11) if rank == 1 else hang()", 139, ["FAILED FIRST: killed by SIGSEGV (11)"]),
    ],
)
def test_a_failure_is_reported(place: Place, code: str, exit_code: int, said: list[str]) -> None:
    node = place.run("--nproc-per-node=2", "--log-dir", place.where / "logs", place.script(code))
    assert node.end() == exit_code
    for words in [*said, "1 (local rank 1)"]:
        assert words in node.err
    assert "rallypoint run:" not in node.err, "the report says it all"
    found = json.loads((place.where / "logs" / "failure.json").read_text())
    assert found["first"]["rank"] == 1 and abs(found["first"]["code"]) == (exit_code if exit_code < 128 else 11)
    assert found["first"]["message"] in said[0] and found["others"] == []


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_what_others_died_of_is_folded_under_it(place: Place, order: list[int]) -> None:
    node = place.run("--nproc-per-node=2", place.script("on('SIGUSR2', lambda: os._exit(3 + rank)); stay()"))
    pids = node.up(0, 1, world=2)
    node.signal("SIGSTOP")  # it finds both dead when it goes on
    for rank in order:
        os.kill(pids[rank], signal.SIGUSR2)
        gone(pids[rank])
    node.signal("SIGCONT")
    first, other = order
    assert node.end() == 3 + first
    assert f"FAILED FIRST: exit code {3 + first}" in node.err
    assert (
        f"1 more failed after it:\n  - rank {other} on" in node.err and f") failed: exit code {3 + other}" in node.err
    )


def test_who_recorded_an_error_before_the_others_is_blamed_even_if_slow_to_end(place: Place) -> None:
    code = """
    import rallypoint
    def record():
        with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
            json.dump({"message": f"by {rank}"}, file)
    record() if rank == 1 else None
    rallypoint.worker().barrier()
    if rank == 1:
        hang()
    record()
    sys.exit(6)
    """
    node = place.run("--nproc-per-node=3", place.script(code))
    assert node.end() == 1
    assert "FAILED FIRST: by 1\n  how   error recorded" in node.err
    assert re.search(r"rank [02] on .* failed: exit code 6: by [02]", node.err)


def test_who_was_started_again_since_is_not_among_those_who_failed_after_it(place: Place) -> None:
    script = place.script("on('SIGUSR2', lambda: os._exit(42)); sys.exit(5) if not restarts and rank == 0 else stay()")
    node = place.run("--nproc-per-node=2", "--restart=worker", "--max-restarts=3", "--final-codes=42", script)
    node.up(0, world=2, restarts=1)
    os.kill(node.up(1, world=2)[1], signal.SIGUSR2)
    assert node.end() == 42 and "FAILED FIRST: exit code 42" in node.err and "after it" not in node.err


def test_a_worker_that_is_killed_in_an_exchange_again_and_again_takes_its_place_in_it(place: Place) -> None:
    """Each life gives other bytes, and dies once it waits; the last one lives, and all get what that one gave."""
    code = """
    import rallypoint
    from rallypoint.recipes.hosting import shared_object
    shared_object.PROGRESS_S = 0.05
    store = rallypoint.worker().store
    def waits(_):
        if rank == 1 and restarts < 3:
            os.kill(os.getpid(), signal.SIGKILL)
        elif rank == 1:
            store.set("here to stay", "")
    if rank == 2:
        store.wait(["here to stay"])
    exchange = rallypoint.Exchange(store, "e", world, progress=waits)
    while True:
        try:
            given = exchange.all_gather(rank, f"{rank}.{restarts}".encode(), 60)
            break
        except rallypoint.MembersLost:  # where it took longer than the grace to start again
            pass
    say("got", *(data.decode() for data in given))
    """
    options = ["--nproc-per-node=3", "--restart=worker", "--max-restarts=3", "--min-uptime=0"]
    node = place.run(*options, place.script(code))
    assert node.end() == 0, node.err
    assert sorted(node.out.splitlines()) == ["got 0.0 1.3 2.0"] * 3


def test_a_fault_of_the_launcher_itself_is_said(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    def broken(*_: object) -> None:
        raise KeyError("no such thing")

    monkeypatch.setattr("rallypoint.launch.agent.LogFiles", broken)
    assert NodeAgent(Job(run_id="run", command=WorkerCommand("command", "true", ()))).run() == 1
    said = capfd.readouterr().err
    assert "rallypoint run: internal error of the launcher:\nTraceback" in said and "no such thing" in said


def test_final_codes_are_not_started_again(place: Place) -> None:
    script = place.script("say('up'); sys.exit(42)")
    node = place.run("--max-restarts=5", "--final-codes=41,42", script)
    assert (node.end(), node.out) == (42, "up")
    assert "is final (--final-codes)" in node.err


def test_what_cannot_be_started(place: Place) -> None:
    plain = place.where / "plain"
    plain.write_text("words")
    for what, code, why in (("nosuch", 127, "No such file"), (plain, 126, "Permission denied")):
        node = place.run("--no-python", "--max-restarts=3", what)
        assert node.end() == code
        assert len(node.err.splitlines()) == 1 and why in node.err and "Traceback" not in node.err


def test_a_script_or_module_that_is_not_there_uses_no_restart(place: Place) -> None:
    (place.where / "empty").mkdir()
    for what, code, why in (
        (["nosuch.py"], 127, "'nosuch.py': No such file"),
        (["-m", "nosuch.sub"], 127, "'nosuch.sub': no module named 'nosuch'"),
        (["empty"], 126, "'empty': is a directory without __main__.py"),
    ):
        node = place.run("--max-restarts=3", "--nproc-per-node=2", *what)
        assert node.end() == code
        assert len(node.err.splitlines()) == 1 and why in node.err and "Traceback" not in node.err


def test_what_python_can_run_is_run(place: Place) -> None:
    hello = "print('hello', flush=True)"
    (place.where / "folder").mkdir()
    for name in ("folder/__main__.py", "beside.py"):
        (place.where / name).write_text(hello)
    with zipfile.ZipFile(place.where / "packed", "w") as packed:
        packed.writestr("__main__.py", hello)
    os.mkfifo(place.where / "pipe")
    nodes = [place.run(*what) for what in (["folder"], ["packed"], ["-m", "beside"], ["pipe"])]
    (place.where / "pipe").write_text(hello)
    for node in nodes:
        assert (node.end(), node.out) == (0, "hello"), node.err


def test_what_is_sure_before_python_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret.py").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    problem = WorkerCommand("script", str(tmp_path / "secret.py"), ()).problem({})
    assert isinstance(problem, PermissionError) and problem.strerror == "Permission denied"
    assert WorkerCommand("script", "-", ()).problem({}) is None
    assert WorkerCommand("command", "nosuch", ()).problem({}) is None
    assert WorkerCommand("module", "nosuch", ()).problem({"PYTHONPATH": "/elsewhere"}) is None
    assert WorkerCommand("module", "", ()).problem({}) is None
    assert WorkerCommand("module", "json.tool", ()).problem({}) is None


def test_one_that_dies_young_is_started_after_a_pause_and_a_signal_ends_the_pause(place: Place) -> None:
    script = place.script("sys.exit(5) if rank == 1 or restarts < 3 else stay()")
    for policy in ("worker", "group"):
        node = place.run("--nproc-per-node=2", "--restart", policy, "--max-restarts=99", "--json", script)
        node.until("after a pause of [248] s")
        node.signal("SIGTERM")
        assert node.end() == 143
        assert "other nodes" not in node.err, "there are none to wait for"


# Signals


SLOW = """
def save():
    say("saving")
    while not os.path.exists("saved"):
        pass
    say("saved")
    os._exit(0)
on(sys.argv[1], save)
on("SIGUSR2", lambda: say("got USR2"))
stay()
"""


def test_signalled_workers_have_a_grace_period_to_save(place: Place) -> None:
    for name, code in (("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129), ("SIGQUIT", 131)):
        node = place.run("--nproc-per-node=2", "--log-dir=logs", place.script(SLOW), name)
        pids = node.up(0, 1, world=2)
        node.signal("SIGUSR2")
        node.until("got USR2", 2)
        node.signal(name)
        node.until("saving", 2)
        (place.where / "saved").touch()
        assert (node.end(), node.out.count("saved")) == (code, 2)
        hint = "; repeat to kill them" if name == "SIGINT" else ""
        assert node.err == f"rallypoint run: {name}: stopping the workers{hint}"
        (place.where / "saved").unlink()
        gone(*pids.values())


def test_interrupted_twice_it_kills_at_once_and_when_the_grace_is_over_too(place: Place) -> None:
    deaf = place.script("on('SIGINT', lambda: say('deaf')); stay()")
    for grace, interrupts, code in ((600, 2, 130), (0.1, 1, 130)):
        node = place.run("--grace", grace, deaf)
        pids = node.up(0, world=1)
        for _ in range(interrupts):
            node.signal("SIGINT")
            node.until("deaf")
        assert node.end() == code
        gone(*pids.values())


def test_a_signal_while_workers_are_stopped_for_a_restart_is_not_lost(place: Place) -> None:
    deaf = place.script("on('SIGTERM', lambda: say('deaf')); stay()")
    for policy in ("group", "node"):
        node = place.run("--nproc-per-node=2", "--max-restarts=5", "--grace=600", "--restart", policy, deaf)
        os.kill(node.up(0, 1, world=2)[1], signal.SIGKILL)
        node.until("deaf")
        node.signal("SIGTERM")
        node.signal("SIGINT")
        assert node.end() in (130, 143), "of two at once, either is the first"


def test_a_silent_server_does_not_delay_a_signalled_agent(place: Place) -> None:
    for name, code in (("SIGTERM", 143), ("SIGINT", 130)):
        node = place.run("--nproc-per-node=2", "--master-port", place.port, "--max-restarts=3", place.script(STAY))
        pids = node.up(0, 1, world=2)
        server = place.server()
        os.kill(server, signal.SIGSTOP)
        try:
            if name == "SIGINT":  # it asks about that
                os.kill(pids[1], signal.SIGKILL)
                gone(pids[1])
            node.signal(name)
            assert node.end() == code
        finally:
            os.kill(server, signal.SIGKILL)
        gone(*pids.values())


def test_a_signal_while_it_waits_for_other_nodes(place: Place) -> None:
    node = place.node("a", "--json", place.script(STAY))
    with rallypoint.TCPStore("localhost", place.port, timeout=AMPLE_S) as store:
        until(Rendezvous(store, "job", 2).status, lambda status: status.waiting == ("a",))
    node.signal("SIGTERM")
    assert node.end() == 143
    (event,) = node.events()
    assert (event["event"], event["reason"]) == ("signal", "SIGTERM while waiting for other nodes")


def test_on_a_terminal_there_is_a_line_that_says_what_is_waited_for(place: Place) -> None:
    screen, end = pty.openpty()
    node = place.node("a", place.script(STAY), stderr=end)
    os.close(end)
    shown = b""
    while b"has waited 2 s" not in shown:
        assert wait_readable(screen, timeout_s=AMPLE_S), shown
        shown += os.read(screen, 1000)
    assert b"\r\x1b[Krallypoint run: this node has waited 1 s: 1 of at least 2 nodes: waiting for 1" in shown
    assert b"\n" not in shown
    node.signal("SIGINT")
    assert node.end() == 130
    os.close(screen)


# Output


def test_bytes_pass_through_as_they_are_and_many_of_them(place: Place) -> None:
    code = """
    line = bytes(range(256)).replace(b"\\n", b"") * 4 + b"\\n"
    for _ in range(50):
        sys.stdout.buffer.write(line * 1024)
    sys.stdout.buffer.write(b"no end of line")
    """
    with open(place.where / "out", "wb") as out:
        assert place.run(place.script(code), stdout=out).end() == 0
    line = bytes(range(256)).replace(b"\n", b"") * 4 + b"\n"
    data = (place.where / "out").read_bytes()
    assert data == line * (50 * 1024) + b"no end of line"


def test_sixty_four_workers(place: Place) -> None:
    node = place.run("--nproc-per-node=64", "--no-python", "/bin/sh", "-c", "echo $RANK of $WORLD_SIZE")
    assert node.end() == 0
    assert sorted(node.out.splitlines()) == sorted(f"{rank} of 64" for rank in range(64))


def test_files(place: Place) -> None:
    script = place.script("say('out', rank); os.write(2, b'err %d\\n' % rank)")
    words = ["--nproc-per-node=3", "--log-dir=logs", "--redirects=0:3", "-t", "1:1,2:3", "--local-ranks-filter=0,1"]
    node = place.run(*words, script)
    assert (node.end(), node.out, node.err) == (0, "out 1", "err 1"), "0 is in files only, 2 is filtered"
    assert logged(place.where / "logs") == {
        "0/stdout.log": "out 0\n",
        "0/stderr.log": "err 0\n",
        "1/stdout.log": "out 1\n",
        "2/stdout.log": "out 2\n",
        "2/stderr.log": "err 2\n",
    }


def logged(logs: Path) -> dict[str, str]:
    """Return what the files of the only run and attempt hold, by their names."""
    (attempt,) = logs.glob("*/attempt_*")
    return {str(path.relative_to(attempt)): path.read_text() for path in attempt.rglob("*.log")}


def test_every_run_has_a_directory_of_its_own_whatever_its_name(place: Place) -> None:
    logs, script = place.where / "in" / "logs", place.script("say(os.environ['TORCHELASTIC_RUN_ID'])")
    runs = ["job", "job", "../../out", "/a b\n*", "." * 300, "."]
    for run in runs:
        assert place.run("--log-dir", logs, "-r3", "--rdzv-id", run, script).end() == 0
    files = [path for path in place.where.rglob("*.log") if path.stat().st_size]
    assert sorted(path.read_text() for path in files) == sorted(f"{run}\n" for run in runs)
    assert {path.relative_to(logs).parts[1:] for path in files} == {("attempt_0", "0", "stdout.log")}
    assert len(list(logs.glob("job_*"))) == 2 and len(list(logs.glob("_*"))) == 4


@pytest.mark.needs("torch")
def test_files_are_where_torchrun_has_them(place: Place) -> None:
    script = place.where / "tell.py"
    script.write_text("import os; open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write('{}')")
    words = ["--nproc-per-node=2", "--rdzv-id=job", "-t3", script]
    ours, theirs = place.where / "ours", place.where / "theirs"
    assert place.run("--log-dir", ours, *words).end() == 0
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    command += ["--log-dir", str(theirs), *map(str, words)]
    subprocess.run(command, capture_output=True, check=True, timeout=AMPLE_S)
    layouts = [[re.sub("^job_[^/]+", "job_", str(path.relative_to(logs))) for path in logs.rglob("*")]
               for logs in (ours, theirs)]  # fmt: skip
    assert sorted(layouts[0]) == sorted(layouts[1]) and "job_/attempt_0/1/error.json" in layouts[0]


def test_files_that_have_no_place_get_one_and_it_is_said(place: Place) -> None:
    script = place.script("say('out'); sys.exit(3)")
    node = place.run("--tee=1", script)
    assert node.end() == 3
    (match,) = node.until("^rallypoint run: output of the workers is in (.*)$")
    assert logged(Path(match[1]).parent) == {"0/stdout.log": "out\n"}
    assert json.loads((Path(match[1]).parent / "failure.json").read_text())["first"]["code"] == 3
    node = place.run("--redirects=1", "--json", script)
    assert node.end() == 3
    (event,) = [event for event in node.events() if event["event"] == "logs"]
    assert logged(Path(event["directory"]).parent) == {"0/stdout.log": "out\n"} and not node.out


def test_a_log_dir_that_is_none_is_said(place: Place) -> None:
    node = place.run("--log-dir=plain", place.script("say(rank)"))
    assert node.end() == 0
    (place.where / "file").touch()
    for name, why in (("file", "File exists"), ("file/logs", "Not a directory"), ("/proc/logs", "No such file")):
        node = place.run("--log-dir", name, place.script("say(rank)"))
        assert node.end() == 2 and why in node.err and "--log-dir" in node.err


DAEMON = """
import subprocess
daemon = "(env -i setsid sh -c 'echo daemon $$; exec sleep 1000' &)"  # no group, no parent, no environment
told = subprocess.Popen(["sh", "-c", daemon], stdout=subprocess.PIPE).stdout.readline()  # else it may not come to that
say(told.decode().strip())
if sys.argv[1:]:
    sys.exit(int(sys.argv[1]))
stay()
"""


def test_what_left_the_group_of_its_worker_ends_with_the_agent(place: Place) -> None:
    for exit_code in (0, 3):
        node = place.run(place.script(DAEMON), exit_code)
        assert node.end() == exit_code
        gone(int(node.until(r"^daemon (\d+)$")[0][1]))


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGKILL", -9)])
def test_processes_that_left_their_workers_group_end_with_a_signalled_agent(place: Place, name: str, code: int) -> None:
    node = place.run("--nproc-per-node=2", place.script(DAEMON))
    daemons = [int(found[1]) for found in node.until(r"^daemon (\d+)$", 2)]
    workers = node.up(0, 1, world=2)
    node.signal(name)
    assert node.child.wait(AMPLE_S) == code
    gone(*daemons, *workers.values())


def test_standard_streams_may_be_closed(place: Place) -> None:
    script = place.script("open('ran', 'a').write('.')")
    command = [sys.executable, "-m", "rallypoint", "run", script]
    for closed in ("2>&-", ">&-", "<&- >&- 2>&-"):
        shell = ["sh", "-c", f'exec "$0" "$@" {closed}', *command]
        assert subprocess.run(shell, cwd=place.where, timeout=AMPLE_S).returncode == 0
    assert (place.where / "ran").read_text() == "..."


def test_what_a_system_has_not_enough_of_is_said() -> None:
    for number, says in ((errno.EMFILE, "beside 9 others"), (errno.E2BIG, "exceed the limit")):
        error = OSError(number, os.strerror(number))
        unstartable = WorkerUnstartable(command=["true"], why=str(error))
        unstartable.__cause__ = error
        assert says in _why_not(unstartable, 9)
    assert "beside 9 others" in _why_not(OSError(errno.EMFILE, "too many"), 9)


def test_an_agent_leaves_nothing_behind_even_if_it_is_killed(place: Place) -> None:
    node = place.run("--nproc-per-node=2", place.script("say(os.environ['TORCHELASTIC_ERROR_FILE']); stay()"))
    pids = node.up(0, 1, world=2)
    (scratch,) = {Path(match[0]).parents[2] for match in node.until("^/.*", 2)}
    assert scratch.parent == place.where and scratch.is_dir()
    node.child.kill()
    gone(*pids.values())
    until(scratch.exists, lambda there: not there)


def test_events_are_json_a_line_each(place: Place) -> None:
    script = place.script("sys.exit(3 if restarts < 2 else 0)")
    node = place.run("--json", "--max-restarts=1", "--rdzv-backend=c10d", script)
    assert node.end() == 3
    events = node.events()
    assert [event["event"] for event in events] == [
        "note",
        "round",
        "started",
        "rejoin",
        "round",
        "started",
        "fail",
        "failure",
    ]
    assert all(event["node"] and event["reason"] and event["time"].endswith("Z") for event in events[1:])
    assert events[-1]["failure"]["code"] == 3 and events[4]["round"] == 2


def test_quiet_is_but_for_failures(place: Place) -> None:
    script = place.script("sys.exit(3 if restarts < 1 else 0)")
    node = place.run("--quiet", "--max-restarts=1", "--rdzv-backend=c10d", script)
    assert (node.end(), node.err) == (0, "")
    node = place.run("--quiet", place.script("sys.exit(3)"))
    assert node.end() == 3 and node.err.startswith("=" * 80)


# Options


def test_options_of_torchrun_that_do_not_matter_are_noted(place: Place) -> None:
    words = ["--monitor-interval", "1", "--rdzv_conf", "is_host=1,join_timeout=30", "--start_method=spawn"]
    node = place.run(*words, "--standalone", place.script("say(rank)"), "--not", "ours")
    assert (node.end(), node.out) == (0, "0")
    for what in (
        "--monitor-interval is ignored: workers are monitored",
        "--rdzv-conf is_host is ignored: this node has a private server",
        "--start-method is ignored",
    ):
        assert f"rallypoint run: {what}" in node.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--nproc-per-noed=2"], "--nproc-per-node"),
        (["--rdzv=x"], "--rdzv is ambiguous: could be --rdzv-backend, --rdzv-conf, --rdzv-endpoint, --rdzv-id"),
        (["--resta=node"], "--resta is ambiguous: could be --restart, --restart-budget"),
        (["--rdzv-conf=is_host='true'"], """'is_host' must be a boolean (true or false), not "'true'\""""),
        (["--nnodes=2"], "--nnodes=2 needs a server: set --rdzv-endpoint=HOST:PORT"),
        (["--nnodes=3:2"], "with MIN <= MAX"),
        (["--nproc-per-node=gpus"], "use a number, auto, cpu or gpu"),
        (["--rdzv-conf=jointimeout=3"], "unknown key 'jointimeout'; valid keys: "),
        (["--rdzv-endpoint=a:b:c"], "is not host[:port]"),
        (["--store=localhost:1"], "store URL 'localhost:1'"),
        (["--store=tcp://localhost:1", "--data-dir=d"], "--data-dir is for a server that this node starts"),
        (["--data-dir=env"], "env"),
        (["--tee=4"], "'4' is none of 0"),
        (["--local-ranks-filter=x"], "'x' is not a local rank"),
        (["--rdzv-conf=join_timeout=soon"], "join_timeout=soon: not a number of seconds"),
        (["--env-file=env"], "line 1: 'no value' is not NAME=value"),
        (["-m", "--no-python"], "mutually exclusive"),
        (["--rdzv-conf=last_call_timeout=1e9"], "last_call_timeout=1e9: not a number of seconds"),
        (["--rdzv-conf=join_timeout=nan"], "join_timeout=nan: not a number of seconds"),
        (["--grace=nan"], "grace=nan: not a number of seconds"),
        (["--exit-timeout=-1"], "exit-timeout=-1: not a number of seconds from 0 to"),
        (["--nnodes=100000", "--master-port=1"], "is not a number of nodes: 1 to "),
        (["--node-rank=1000000"], "not in the range"),
        (["--node="], "1 to 256 characters, not 0"),
        (["--node=" + "n" * 400], "1 to 256 characters, not 400"),
        (["--node=\udcff"], "unprintable"),
        (["--rdzv-id=\udcff"], "surrogates not allowed"),
        (["--rdzv-id=" + "x" * 2000], "2000 characters long"),
        (["--local-ranks-filter=-1"], "'-1' is not a local rank"),
        (["--final-codes=x"], "'x' is not the exit code of a failure"),
        (["--final-codes=3,300"], "'300' is not the exit code of a failure"),
        (["--standalone", "--nnodes=2"], "--standalone runs on one node, but --nnodes=2"),
        (["--start-method=foo"], "'foo' is not one of"),
        (["--monitor-interval=x"], "'x' is not a valid float"),
        (["--env-file=nul"], "is not NAME=value"),
    ],
)
def test_a_mistake_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch, words: list[str], says: str) -> None:
    (place.where / "env").write_text("no value")
    (place.where / "nul").write_text("A=1\0")
    monkeypatch.chdir(place.where)
    told = CliRunner().invoke(main, ["run", *words, "script.py"])
    assert (told.exit_code, says in told.output) == (2, True), told.output


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        ("--nnodes=2 --node-rank=0 --master-addr=h", {"endpoint": "h:29500", "run_id": "none", "max_nodes": 2}),
        ("--nnodes=2 --master-port=7", {"endpoint": "127.0.0.1:7"}),
        ("--master-addr=h", {"endpoint": None, "alone": True}),
        ("--standalone --nnodes=1:3", {"max_nodes": 1, "alone": True}),
        ("--local-ranks-filter=", {"shown_ranks": None}),
        ("--grace=3 --shutdown-timeout=4 --exit-timeout=5", {"grace_s": 3.0, "exit_timeout_s": 5.0}),
        ("--shutdown-timeout=4", {"grace_s": 4.0, "exit_timeout_s": 300.0}),
        ("--redirect 3 --nproc=2 --max 4 -t1 -mq", {"redirects": "3", "workers": 2, "tee": "1", "quiet": True}),
        ("--re 1 --restart node", {"redirects": "1", "rules": RestartRules(restart="node", min_uptime_s=5.0)}),
        ("--node n --exit=7 --env-f=/dev/null", {"node": "n", "exit_timeout_s": 7.0}),
        ("--nn 1 --standal x.py --redirect 3", {"redirects": "0", "command": ABBREVIATED}),
        ("-r 3 --module --tee 1 -- --redirect", {"redirects": "3", "tee": "1"}),
        ("--rdzv-endp h:1 --rdzv-conf is_host=F", {"is_host": False, "notes": ()}),
        ("--rdzv-endp h:1 --rdzv-conf is_host=y", {"is_host": True}),
        ("--rdzv-endp h:1", {"is_host": None, "line_prefix": "", "data_dir": None}),
        ("--data-dir /tmp", {"data_dir": "/tmp", "alone": True}),
    ],
)
def test_what_options_mean(monkeypatch: pytest.MonkeyPatch, words: str, facts: dict[str, object]) -> None:
    jobs: list[Job] = []
    monkeypatch.setattr(NodeAgent, "__init__", lambda _, job: jobs.append(job))
    monkeypatch.setattr(NodeAgent, "run", lambda _, exits: 0)
    assert CliRunner().invoke(main, ["run", *words.split(), "script.py"]).exit_code == 0
    assert {name: getattr(jobs[0], name) for name in facts} == facts


def test_who_is_host_is_as_told(place: Place) -> None:
    meet = ["--nnodes=2", f"--rdzv-endpoint=localhost:{place.port}", "--rdzv-id=job"]
    joiner = place.run(*meet, "--rdzv-conf=is_host=false,join_timeout=0.3", place.script("say(rank)"))
    assert joiner.end() == 1 and "no store answered at localhost" in joiner.err
    nodes = [place.run(*meet, f"--rdzv-conf=is_host={told}", place.script("say(rank)")) for told in ("no", "yes")]
    assert [node.end() for node in nodes] == [0, 0]
    assert sorted(node.out for node in nodes) == ["0", "1"]


def test_runs_whose_names_begin_alike_have_nothing_in_common() -> None:
    with rallypoint.Server() as server, rallypoint.TCPStore("127.0.0.1", server.port, timeout=AMPLE_S) as store:
        one, other = (RunState(store, name, lambda: None) for name in ("exp", "exp/1"))
        other.refund()
        with Batch(store) as batch:
            one.clear(batch)
        assert other.restarts() == -1


def test_variables_modules_and_files_of_variables(place: Place) -> None:
    (place.where / "job.py").write_text("import os, sys; print(sys.argv[1], os.environ['A'], os.environ['B'])")
    (place.where / "env").write_text("\ufeff# ours\nexport A=1 # one\n\nB='two words'\n", encoding="utf-8")
    node = place.run("--env-file=env", "-m", "job", "-x", env={"PET_NPROC_PER_NODE": "2", "PET_MAX_RESTARTS": "7"})
    assert (node.end(), node.out) == (0, "-x 1 # one two words\n-x 1 # one two words")
    node = place.run(
        place.script(TELL), env={"PET_NPROC_PER_NODE": "2", "PET_MAX_RESTARTS": "7", "PET_STANDALONE": "1"}
    )
    assert node.end() == 0
    assert [one["TORCHELASTIC_MAX_RESTARTS"] for one in told(node)] == ["7", "7"]
