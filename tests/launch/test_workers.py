"""Workers as processes: started, seen to end, signalled with their children, and gone when their agent is."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.raw_peer import AMPLE_S, read_line, script, until, wait_for_end

from rallypoint.launch.workers import cgroup, kill_marked, orphan_reaper
from rallypoint.launch.workers.orphan_reaper import MARK_VARIABLE, OrphanReaper
from rallypoint.launch.workers.worker_process import WorkerProcess, WorkerUnstartable, describe_exit, exit_code_of
from rallypoint.readiness import wait_readable

SLEEP = ["sleep", "1000"]


@pytest.fixture
def reaper() -> Iterator[OrphanReaper]:
    made = OrphanReaper()
    yield made
    made.close()


@pytest.fixture(params=["pidfd", "thread"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways in which an exit is seen."""
    if request.param == "thread":
        monkeypatch.delattr(os, "pidfd_open")


class Run:
    """A worker that has started, what it prints, and its end."""

    def __init__(self, *command: str, reaper: OrphanReaper | None = None, **environment: str) -> None:
        reader, writer = os.pipe()
        self.worker = WorkerProcess(command, {**os.environ, **environment}, "node:0", writer, None, reaper)
        try:
            self.worker.start()
        finally:
            os.close(writer)
            self.out = os.fdopen(reader, "rb", buffering=0)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.worker.close()
        self.out.close()

    def line(self) -> str:
        assert wait_readable(self.out, timeout_s=AMPLE_S), "it says nothing"
        return self.out.readline().decode().strip()

    def end(self) -> int:
        """Wait for the end by the descriptor, as an agent does."""
        assert wait_readable(self.worker, timeout_s=AMPLE_S), "it lives on"
        code = self.worker.poll()
        assert code is not None, "the descriptor said that it had ended"
        return code


def gone(pid: int) -> bool:
    """Say whether a process has ended, reaped by whoever has it or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


# Start and end


@pytest.mark.parametrize(
    ("command", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -KILL $$", -9), ("kill -TERM $$", -15)]
)
@pytest.mark.usefixtures("way")
def test_an_end_is_seen_by_its_descriptor(command: str, code: int) -> None:
    with Run("sh", "-c", command) as run:
        assert run.end() == code
        assert run.worker.poll() == code
        assert run.worker.uptime_s == run.worker.uptime_s > 0


@pytest.mark.usefixtures("way")
def test_a_worker_runs_until_it_is_killed() -> None:
    with Run(*SLEEP) as run:
        assert run.worker.poll() is None
        assert not wait_readable(run.worker, timeout_s=0)
        first = run.worker.uptime_s
        assert run.worker.uptime_s > first >= 0
        run.worker.kill()
        assert run.end() == -signal.SIGKILL


def test_it_gets_the_environment_it_is_given_and_no_more() -> None:
    reader, writer = os.pipe()
    worker = WorkerProcess([sys.executable, "-c", "import os; print(*os.environ)"], {"ONLY": "1"}, "node:0", writer)
    worker.start()
    os.close(writer)
    with open(reader, "rb") as out:
        names = set(out.read().decode().split()) - {"LC_CTYPE"}  # Python's own
    worker.close()
    assert names == {"ONLY"}


def test_it_leads_a_session_and_reads_nothing() -> None:
    with Run("sh", "-c", "cat; echo $$; ps -o sid= -p $$") as run:
        assert [run.line(), run.line()] == [str(run.worker.pid)] * 2


def test_a_dead_leader_keeps_its_number_until_it_is_closed() -> None:
    with Run("true") as run:
        assert run.end() == 0
        pid = run.worker.pid
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.usefixtures("way")
def test_close_leaves_no_descriptor_and_may_be_repeated() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with Run(*SLEEP) as run:
        thread = [thread for thread in threading.enumerate() if thread.name == f"exit of {run.worker.pid}"]
    for each in thread:
        each.join(AMPLE_S)
    assert run.worker.close()
    run.worker.signal(signal.SIGTERM)  # to nobody
    assert run.worker.poll() == -signal.SIGKILL
    assert set(os.listdir("/proc/self/fd")) == before


def test_what_was_not_started_says_so() -> None:
    worker = WorkerProcess(["true"], {}, "node:3")
    assert worker.close()
    for ask in (worker.poll, worker.fileno, worker.kill, lambda: worker.pid, lambda: worker.uptime_s):
        with pytest.raises(ValueError, match="node:3 has not been started"):
            ask()


def test_a_worker_starts_once() -> None:
    with Run("true") as run, pytest.raises(ValueError, match="already been started"):
        run.worker.start()


def test_how_it_ended_is_known_where_children_were_ignored() -> None:
    previous = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with Run("sh", "-c", "exit 7") as run:
            assert run.end() == 7
    finally:
        signal.signal(signal.SIGCHLD, previous)


# What cannot be started


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "plain").write_text("#!/bin/sh\n")
    for name, text in (("odd", "#!/no/such/shell\n"), ("noise", "\x01\x02\x03")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["no-such-program-here", "x"], "No such file"),
        (["{}/missing"], "No such file"),
        (["{}/plain"], "Permission denied"),
        (["{}"], "Permission denied"),
        (["{}/odd"], "No such file"),
        (["{}/noise"], "Exec format error"),
        (["true", "a\0b"], "null byte"),
        ([], "it is empty"),
    ],
)
def test_what_cannot_be_started_is_an_error_of_its_own(place: Path, command: list[str], why: str) -> None:
    command = [word.replace("{}", str(place)) for word in command]
    worker = WorkerProcess(command, dict(os.environ), "node:0")
    with pytest.raises(WorkerUnstartable) as caught:
        worker.start()
    error = caught.value
    assert why in error.why and error.why in str(error)
    assert error.command == tuple(command)
    other_handle = pickle.loads(pickle.dumps(error))
    assert (str(other_handle), vars(other_handle)) == (str(error), vars(error))
    assert worker.close()


def test_a_script_with_an_interpreter_starts(place: Path) -> None:
    (place / "plain").chmod(0o755)
    with Run(str(place / "plain")) as run:
        assert run.end() == 0


# Words


@pytest.mark.parametrize(
    ("code", "words", "passed_on"),
    [
        (0, "exit code 0", 0),
        (1, "exit code 1", 1),
        (-9, "killed by SIGKILL (9)", 137),
        (-15, "killed by SIGTERM (15)", 143),
        (-99, "killed by signal 99", 227),
    ],
)
def test_an_end_in_words(code: int, words: str, passed_on: int) -> None:
    assert (describe_exit(code), exit_code_of(code)) == (words, passed_on)


# The group


def test_a_signal_reaches_the_children_too() -> None:
    with Run("sh", "-c", "sleep 1000 & echo $!; wait") as run:
        child = int(run.line())
        run.worker.signal(signal.SIGTERM)
        assert run.end() == -signal.SIGTERM
        until(lambda: gone(child), bool)


def test_a_child_that_outlives_its_worker_ends_with_close() -> None:
    with Run("sh", "-c", "sleep 1000 & echo $!") as run:
        child = int(run.line())
        assert run.end() == 0
        assert not gone(child)
    until(lambda: gone(child), bool)


# When the agent is gone

AGENT = """
import os, sys, time
from rallypoint.launch.workers import orphan_reaper
from rallypoint.launch.workers.orphan_reaper import OrphanReaper
from rallypoint.launch.workers.worker_process import WorkerProcess
with_reaper, bound, tell, command = sys.argv[1] == "1", sys.argv[2] == "1", sys.argv[3] == "1", sys.argv[4]
if not bound:
    orphan_reaper._binder = lambda: ""
if sys.argv[5] != "limit":
    orphan_reaper._free_limit = lambda: None
if sys.argv[5] != "cgroup":
    orphan_reaper.cgroup.make_cgroup = lambda name: ""
reaper = OrphanReaper() if with_reaper else None
if not tell:
    reaper.started = lambda group: None
worker = WorkerProcess(["sh", "-c", command], os.environ, "node:0", 1, 2, reaper)
worker.start()
os.write(1, f"{worker.pid} {reaper.pid if reaper else 0}\\n".encode())
time.sleep(1000)
"""
DAEMON = "env -i setsid sh -c 'echo $$; exec sleep 1000'"
WITH_CHILDREN = "sleep 1000 & sleep 1000 & jobs -p; wait"


def agent_killed(command: str, children: int, net: str = "limit", **how: bool) -> tuple[list[int], int]:
    """Start an agent with a worker, kill it, and return the pids of the worker and its children, and the reaper's.

    `net` is what the reaper has beside the mark in the environment: `limit`, `cgroup`, or only `groups`.
    """
    flags = [int(how.get(name, True)) for name in ("reaper", "bound", "tell")]
    with script(AGENT, *flags, command, net) as agent:
        lines = [read_line(agent) for _ in range(1 + children)]
        (told,) = [line for line in lines if " " in line]
        worker, reaper = map(int, told.split())
        pids = [worker, *(int(line) for line in lines if line != told)]
        assert not any(map(gone, pids))
        agent.kill()
        agent.wait(AMPLE_S)
    return pids, reaper


@pytest.mark.parametrize("net", ["limit", "groups"])
@pytest.mark.parametrize("bound", [False, True])
def test_a_worker_and_its_children_die_with_a_killed_agent(bound: bool, net: str) -> None:
    pids, reaper = agent_killed(WITH_CHILDREN, 2, net, bound=bound)
    for pid in [*pids, reaper]:
        wait_for_end(pid)


@pytest.mark.parametrize("net", ["limit", pytest.param("cgroup", marks=pytest.mark.needs("cgroup"))])
def test_a_daemon_without_group_parent_and_environment_dies_with_a_killed_agent(net: str) -> None:
    pids, reaper = agent_killed(f"({DAEMON} &); exec sleep 1000", 1, net)
    for pid in [*pids, reaper]:
        wait_for_end(pid)


def test_a_daemon_dies_with_a_killed_agent_whose_reaper_was_killed_before() -> None:
    """The agent has another by then, without having anything to tell it."""
    with script(AGENT, 1, 1, 1, f"({DAEMON} &); exec sleep 1000", "limit") as agent:
        told, daemon = sorted((read_line(agent), read_line(agent)), key=lambda line: " " not in line)
        first = int(told.split()[1])
        os.kill(first, signal.SIGKILL)
        second = until(lambda: children_of(agent.pid, "/bin/sh") - {first}, lambda found: len(found) == 1)
        agent.kill()
        agent.wait(AMPLE_S)
    for pid in [int(daemon), *second]:
        wait_for_end(pid)


def children_of(parent: int, program: str) -> set[int]:
    """Return the living children of a process that run a program."""
    found = set()
    for task in Path(f"/proc/{parent}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for pid in (task / "children").read_text().split():
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(program.encode() + b"\0"):
                    found.add(int(pid))
    return found


def test_a_worker_that_was_not_reported_to_the_reaper_dies_too() -> None:
    pids, reaper = agent_killed("sleep 1000", 0, bound=False, tell=False)
    for pid in [*pids, reaper]:
        wait_for_end(pid)


def test_a_worker_without_a_reaper_dies_too_where_the_kernel_can_be_armed() -> None:
    (worker, _), _ = agent_killed("echo $$; exec sleep 1000", 1, reaper=False)  # who speaks is armed
    if not orphan_reaper._binder():
        os.kill(worker, signal.SIGKILL)
    wait_for_end(worker)


ANSWERS = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
print("up", flush=True)
signal.sigwait([signal.SIGUSR1])
print("still here", flush=True)
"""


def test_a_worker_survives_the_thread_that_started_it() -> None:
    made: list[Run] = []

    def start() -> None:
        made.append(Run(sys.executable, "-c", ANSWERS))
        assert made[0].line() == "up"

    thread = threading.Thread(target=start)
    thread.start()
    thread.join(AMPLE_S)
    with made[0] as run:
        until(lambda: os.path.exists(f"/proc/self/task/{thread.native_id}"), lambda there: not there)
        run.worker.signal(signal.SIGUSR1)
        assert run.line() == "still here"


# The reaper


def test_a_reaper_holds_nothing_of_its_agent(reaper: OrphanReaper) -> None:
    def places() -> set[str]:
        with contextlib.suppress(FileNotFoundError):  # it is loading its libraries
            links = [os.readlink(f"/proc/{reaper.pid}/fd/{n}") for n in os.listdir(f"/proc/{reaper.pid}/fd")]
            return {place.partition(":")[0] for place in links}
        return {"unknown"}

    until(places, lambda found: found <= {"/dev/null", "pipe"})
    assert os.getsid(reaper.pid) == reaper.pid
    assert os.readlink(f"/proc/{reaper.pid}/cwd") == "/"


def test_a_reaper_that_is_closed_does_its_duty_and_ends() -> None:
    reaper = OrphanReaper()
    with Run(*SLEEP, reaper=reaper) as run:
        reaper.close()
        reaper.close()
        assert gone(reaper.pid) and run.end() == -signal.SIGKILL


def test_a_reaper_that_somebody_stopped_keeps_nobody_waiting(reaper: OrphanReaper) -> None:
    os.kill(reaper.pid, signal.SIGSTOP)
    reaper.close()
    assert gone(reaper.pid)


def test_a_worker_has_the_mark_of_its_reaper(reaper: OrphanReaper) -> None:
    with Run("sh", "-c", f"echo ${MARK_VARIABLE}", reaper=reaper) as run:
        assert run.line() == reaper.mark


@pytest.fixture
def unmarked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system where neither limits nor cgroups tell what workers have started."""
    monkeypatch.setattr(orphan_reaper, "_free_limit", lambda: None)
    monkeypatch.setattr(cgroup, "make_cgroup", lambda name: "")


@pytest.mark.usefixtures("unmarked")
def test_a_reaper_forgets_a_group_that_is_closed() -> None:
    """Another program's group may have its number by then: here, a group reported as ended that still runs."""
    reaper = OrphanReaper()
    with Run(*SLEEP) as one, Run(*SLEEP) as two, Run(*SLEEP) as three:
        for run in (one, two, three):
            reaper.started(run.worker.pid)
        reaper.ended(two.worker.pid)
        reaper.ended(two.worker.pid)
        reaper._pipe.close()  # as if this process had ended
        reaper._child.wait(AMPLE_S)
        assert (one.end(), three.end()) == (-signal.SIGKILL, -signal.SIGKILL)
        assert two.worker.poll() is None


@pytest.mark.usefixtures("unmarked")
def test_another_takes_the_place_of_a_reaper_that_was_killed() -> None:
    reaper = OrphanReaper()
    with Run(*SLEEP) as one, Run(*SLEEP) as two:
        first = reaper.pid
        reaper.started(one.worker.pid)
        os.kill(first, signal.SIGKILL)
        wait_for_end(first)
        reaper.started(two.worker.pid)
        assert reaper.pid != first
        reaper._pipe.close()
        reaper._child.wait(AMPLE_S)
        assert (one.end(), two.end()) == (-signal.SIGKILL, -signal.SIGKILL)


def test_where_workers_are_marked_no_group_is_killed_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number may be another program's: here, a group reported as started that has no mark."""
    monkeypatch.setattr(cgroup, "make_cgroup", lambda name: "")
    reaper = OrphanReaper()
    with Run(*SLEEP) as stranger, Run(*SLEEP, reaper=reaper) as worker:
        reaper.started(stranger.worker.pid)
        reaper.close()
        assert worker.end() == -signal.SIGKILL
        assert stranger.worker.poll() is None


def test_a_reaper_that_was_killed_a_moment_before_the_end_is_replaced_for_its_duty() -> None:
    reaper = OrphanReaper()
    with Run("sh", "-c", f"({DAEMON} &); exec sleep 1000", reaper=reaper) as run, reaper._lock:
        daemon = int(run.line())
        os.kill(reaper.pid, signal.SIGKILL)
        wait_for_end(reaper.pid)
        reaper.close()
        assert gone(daemon) and run.end() == -signal.SIGKILL


@pytest.mark.needs("cgroup")
def test_an_agent_that_does_not_get_out_of_its_cgroup_is_not_killed_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reaper, place = OrphanReaper(), Path("/proc/self/cgroup").read_text()
    made = reaper._cgroup
    with monkeypatch.context() as patch:
        patch.setattr(cgroup, "leave", lambda cgroup: False)
        with Run(*SLEEP, reaper=reaper) as run:
            reaper.close()
            assert run.end() == -signal.SIGKILL
    assert cgroup.leave(made) and Path("/proc/self/cgroup").read_text() == place
    os.rmdir(made)


@pytest.mark.needs("cgroup")
def test_a_cgroup_goes_with_its_reaper() -> None:
    reaper = OrphanReaper()
    assert os.path.isdir(reaper._cgroup)
    with Run(*SLEEP, reaper=reaper) as run:
        assert str(run.worker.pid) in Path(reaper._cgroup, "cgroup.procs").read_text().split()
        os.mkdir(f"{reaper._cgroup}/of-a-worker")
        reaper.close()
        assert run.end() == -signal.SIGKILL
    assert not os.path.exists(reaper._cgroup)


def test_this_process_is_not_marked_by_starting_what_is() -> None:
    before = Path("/proc/self/limits").read_text()
    reaper = OrphanReaper()
    with Run("grep", "locks", "/proc/self/limits", reaper=reaper) as run:
        assert run.line().split()[3] == str(reaper._limit)
    assert Path("/proc/self/limits").read_text() == before
    reaper.close()


def test_a_number_that_passed_to_a_stranger_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process is looked at once more when it cannot change any more: here, it has changed."""
    looks = iter([True, False])
    with Run(*SLEEP) as stranger:
        monkeypatch.setattr(kill_marked, "_others", lambda: [stranger.worker.pid])
        monkeypatch.setattr(kill_marked, "is_marked", lambda *_: next(looks))
        kill_marked.reap("NO=1", "1")
        assert stranger.worker.poll() is None


def test_a_reaper_removes_the_scratch_of_its_agent_and_no_more(tmp_path: Path) -> None:
    scratch = tmp_path / "with a space\nand a line"
    reaper = OrphanReaper(scratch)
    (scratch / "inside").mkdir(parents=True)
    reaper._pipe.close()  # as if this process had ended
    reaper._child.wait(AMPLE_S)
    assert not scratch.exists() and tmp_path.exists()


def test_only_what_will_run_is_bound() -> None:
    environment = dict(os.environ)
    assert orphan_reaper.bind_to_parent([sys.executable, "-V"], environment)[-2:] == [sys.executable, "-V"]
    for command in (["no-such-program-here"], []):
        assert orphan_reaper.bind_to_parent(command, environment) == command
