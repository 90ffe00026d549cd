"""Real runs whose output is folded, filtered, redrawn, or copied; and the options that workers get from torchrun."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.launch.runs import Place, gone
from tests.launch.test_console import Terminal
from tests.raw_peer import AMPLE_S

from rallypoint.launch.events import Events
from rallypoint.launch.job import Job, WorkerCommand
from rallypoint.launch.output.log_files import LogFiles
from rallypoint.launch.workers.worker_process import WorkerProcess

SAYS = "say('here', rank)"
BARS = """
for n in range(101):
    os.write(2, b"\\r%d%%" % n)
os.write(2, b"\\nend\\n")
"""


# Lines


def test_a_filter_of_global_ranks_counts_over_all_nodes(place: Place) -> None:
    script = place.script(SAYS)
    nodes = [
        place.node(name, "--nproc-per-node", 2, "--ranks-filter", "0,2-9", script, env={"PYTHONUNBUFFERED": "1"})
        for name in "ab"
    ]
    assert [node.end() for node in nodes] == [0, 0]
    lines = [line for node in nodes for line in node.out.splitlines()]
    assert sorted(lines) == ["here 0", "here 2", "here 3"]


@pytest.mark.parametrize(("fold", "workers"), [("on", 2), ("off", 6), ("auto", 6)])
def test_lines_are_folded_where_that_is_asked_for(place: Place, fold: str, workers: int) -> None:
    node = place.run("--nproc-per-node", workers, "--fold", fold, "--node", "n", place.script("say('same')"))
    assert node.end() == 0
    folded = [line for line in node.out.splitlines() if line.startswith("[n:")]
    if fold == "on":
        assert folded == node.out.splitlines()
        assert len(folded) in (1, 2), "a slow machine starts one worker long after the other"
    else:
        assert node.out.splitlines() == ["same"] * workers, "not a terminal: every line, and nothing but the lines"


def test_progress_bars_are_their_last_state(place: Place) -> None:
    node = place.run("--nproc-per-node", 2, "--tee", "3", "--log-dir", place.where / "logs", place.script(BARS))
    assert node.end() == 0
    assert sorted(node.err.splitlines()) == ["100%", "100%", "end", "end"]
    assert {file.read_text() for file in place.where.glob("logs/*/attempt_0/*/stderr.log")} == {"100%\nend\n"}


@pytest.mark.parametrize("words", [("--nproc-per-node", "2", "--progress-bars", "raw"), ("--nproc-per-node", "1")])
def test_bars_are_left_alone_where_that_is_asked_for_and_for_one_worker(place: Place, words: tuple[str, ...]) -> None:
    node = place.run(*words, place.script(BARS))
    assert node.end() == 0
    assert "\r0%\r1%\r2%" in node.err


def test_workers_know_the_width_that_a_terminal_has_for_them(place: Place) -> None:
    terminal = Terminal()
    stream = terminal._theirs
    script = place.script("say('columns', os.environ.get('COLUMNS'))")
    node = place.run("--node", "n", script, stdout=stream, stderr=stream, env={"COLUMNS": ""})
    assert node.end() == 0
    terminal.until(f"[n:0] columns {30 - len('[n:0] ') - 1}", "")
    terminal.close()


def test_lines_with_some_texts_are_copied_if_they_are_teed(place: Place) -> None:
    logs = place.where / "logs"
    words = ("--tee", "0:3,1:1", "--log-dir", logs, "--duplicate-stdout-filters", "loss,,,nan", "--role", "r")
    code = "say('loss, ', rank); say('other'); say('nan', rank); sys.stderr.write('loss, \\n')"
    node = place.run("--nproc-per-node", 2, *words, "--duplicate-stderr-filters", "loss", place.script(code))
    assert node.end() == 0
    (out,), (err,) = logs.glob("*/attempt_0/filtered_stdout.log"), logs.glob("*/attempt_0/filtered_stderr.log")
    lines = out.read_text().splitlines()
    assert sorted(lines) == ["[r0]:loss,  0", "[r0]:nan 0", "[r1]:loss,  1", "[r1]:nan 1"]
    assert err.read_text() == "[r0]:loss, \n", "rank 1 has its stderr on the console only"


# Attempts


def test_attempts_are_numbered_by_restarts(place: Place) -> None:
    logs = place.where / "logs"
    code = "say('restarts', restarts); sys.exit(restarts < 2)"
    node = place.run("--max-restarts", 2, "-r", "3", "--min-uptime", 0, "--log-dir", logs, place.script(code))
    assert node.end() == 0
    found = {path.parent.parent.name: path.read_text() for path in logs.glob("*/attempt_*/0/stdout.log")}
    assert found == {f"attempt_{n}": f"restarts {n}\n" for n in range(3)}


def test_a_start_without_a_restart_does_not_touch_the_files_of_the_one_before(tmp_path: Path) -> None:
    job = Job(command=WorkerCommand("script", "x", ()), log_dir=str(tmp_path), run_id="run")
    logs = LogFiles(job, Events("", True, False))
    made = []
    for restarts in (0, 0, 1, 0):
        logs.begin(restarts)
        made += [str(logs.of(local).relative_to(next(tmp_path.glob("run_*")))) for local in (0, 1)]
    attempts = ("attempt_0", "attempt_0.1", "attempt_1", "attempt_0.2")
    assert made == [f"{attempt}/{local}" for attempt in attempts for local in (0, 1)]


# Workers


def test_a_worker_is_bound_to_its_cpus_and_the_agent_is_not() -> None:
    before = os.sched_getaffinity(0)
    reader, writer = os.pipe()
    cpus = frozenset({max(before)})
    worker = WorkerProcess(["cat", "/proc/self/status"], dict(os.environ), "node:0", writer, cpus=cpus)
    worker.start()
    os.close(writer)
    with open(reader) as out:
        (allowed,) = [line for line in out.read().splitlines() if line.startswith("Cpus_allowed_list")]
    assert worker.close(AMPLE_S)
    assert allowed.split()[1] == str(max(before))
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("file", [False, True])
def test_a_virtual_local_rank_is_0_and_its_device_the_only_one(place: Place, file: bool) -> None:
    given = {"CUDA_VISIBLE_DEVICES": "4, 7"}
    (place.where / "env").write_text("CUDA_VISIBLE_DEVICES=4,7\n")
    words = ("--env-file", place.where / "env") if file else ()
    script = place.script("say(os.environ['LOCAL_RANK'], os.environ['CUDA_VISIBLE_DEVICES'], rank)")
    node = place.run("--nproc-per-node", 2, "--virtual-local-rank", *words, script, env={} if file else given)
    assert node.end() == 0
    assert sorted(node.out.splitlines()) == ["0 4 0", "0 7 1"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--nproc-per-node 3 --virtual-local-rank", "no device for local rank 2 in CUDA_VISIBLE_DEVICES=0,1"),
        ("--signals-to-handle SIGTERM,SIGHELLO", "'SIGHELLO' is not a signal"),
        ("--signals-to-handle SIGKILL", "'SIGKILL' is not a signal that can be handled"),
        ("--signals-to-handle ,", "names no signal"),
        ("--numa-binding numa", "node"),
        ("--event-log-handler x", "'x' is not one of"),
        ("--ranks-filter 3-1", "'3-1' is not a range of ranks"),
        ("--logs-specs unknown", "--logs-specs"),
    ],
)
def test_mistakes_are_named(place: Place, words: str, says: str) -> None:
    node = place.run(*words.split(), place.script(SAYS), env={"CUDA_VISIBLE_DEVICES": "0,1"})
    assert node.end() == 2
    assert says in node.err.replace("\n", " "), node.err


# Signals

WAITS = """
on("SIGUSR1", lambda: (say("got USR1"), os._exit(7)))
on("SIGTERM", lambda: (say("got TERM"), os._exit(0)))
say("up", os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"])
hang()
"""


def test_a_signal_to_handle_ends_the_workers_and_the_agent(place: Place) -> None:
    node = place.run("--signals-to-handle", "SIGTERM, SIGUSR1", place.script(WAITS))
    node.until("^up SIGTERM,SIGUSR1$")
    node.signal("SIGUSR1")
    assert node.end() == 128 + signal.SIGUSR1
    assert "got USR1" in node.out


def test_a_signal_that_is_not_handled_has_the_systems_effect(place: Place) -> None:
    node = place.run("--signals-to-handle", "SIGUSR2", place.script("say('up', os.getpid())\nhang()"))
    pid = int(node.until(r"^up (\d+)$")[0][1])
    node.signal("SIGTERM")
    assert node.end() == -signal.SIGTERM
    gone(pid)
