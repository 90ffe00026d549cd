"""One run of a health check: how it ends, what is kept of its output, and that nothing of it is left."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.launch.runs import gone
from tests.raw_peer import AMPLE_S, until

from rallypoint.core.policy.health_policy import CheckResult
from rallypoint.launch.health import check_process
from rallypoint.launch.health.check_process import HealthCheck
from rallypoint.launch.workers.orphan_reaper import OrphanReaper
from rallypoint.launch.workers.worker_process import WorkerProcess


@pytest.fixture(scope="module")
def reaper() -> Iterator[OrphanReaper]:
    made = OrphanReaper()
    yield made
    made.close()


class Run:
    """A check, and the event of its end."""

    def __init__(self, reaper: OrphanReaper, command: str, timeout_s: float = AMPLE_S, **more: WorkerProcess) -> None:
        self.ended = threading.Event()
        self.check = HealthCheck(command, dict(os.environ), timeout_s, reaper, self.ended.set, **more)

    def result(self) -> CheckResult:
        assert self.ended.wait(AMPLE_S) and self.check.result is not None
        self.check.close()
        return self.check.result


def test_a_check_has_the_exit_code_and_the_last_lines_of_both_streams(reaper: OrphanReaper) -> None:
    found = Run(reaper, "seq 1000; echo; echo 'bad \033[31mGPU' >&2; exit 7").result()
    assert found[:] == (7, "exit code 7", ("999", "1000", r"bad \x1b[31mGPU"))
    assert found.reason == r"exit code 7: 999; 1000; bad \x1b[31mGPU" and not found.passed
    assert Run(reaper, "exit 0").result().passed
    assert Run(reaper, "kill -9 $$").result()[:2] == (-9, "killed by SIGKILL (9)")


def test_a_check_that_prints_without_end_is_bounded(reaper: OrphanReaper) -> None:
    found = Run(reaper, "yes $(printf %0999d 7) | head -c 20000000; exit 1").result()
    assert found.code == 1 and len(found.output) == check_process.LINES
    assert all(len(line) <= check_process.LINE_CHARS for line in found.output)


def test_a_check_that_hangs_is_killed_with_its_children(reaper: OrphanReaper, tmp_path: Path) -> None:
    script = f"sleep 1000 & echo $! > {tmp_path}/child; echo asking the GPU; wait"
    run = Run(reaper, script, timeout_s=1.0)
    assert run.result() == (None, "no end after 1 s, killed", ("asking the GPU",))
    gone(int((tmp_path / "child").read_text()))


def test_a_check_that_leaves_children_ends_with_its_shell_and_they_are_killed(
    reaper: OrphanReaper, tmp_path: Path
) -> None:
    assert Run(reaper, f"sleep 1000 & echo $! > {tmp_path}/child; exit 0").result().passed
    gone(int((tmp_path / "child").read_text()))


def test_closing_a_check_kills_it(reaper: OrphanReaper, tmp_path: Path) -> None:
    run = Run(reaper, f"echo $$ > {tmp_path}/pid; mv {tmp_path}/pid {tmp_path}/there; sleep 1000")
    until((tmp_path / "there").exists, bool)
    assert run.check.running_s is not None
    run.check.close()
    assert run.ended.is_set() and run.check.running_s is None
    gone(int((tmp_path / "there").read_text()))


def test_a_check_blocked_by_the_kernel_is_left_behind_and_fails_the_next_until_it_ends(
    reaper: OrphanReaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, blocked = WorkerProcess.close, True

    def close(process: WorkerProcess, timeout_s: float = 1.0) -> bool:
        return not blocked and real(process, timeout_s)

    monkeypatch.setattr(WorkerProcess, "close", close)
    first = Run(reaper, "sleep 1000", timeout_s=0.5)
    assert first.result().code is None and first.check.blocked is not None
    again = Run(reaper, "exit 0", timeout_s=0.5, blocked=first.check.blocked)
    pid = first.check.blocked.pid
    words = f"process {pid} of an earlier check is killed, and still blocked by the kernel"
    assert again.result() == (None, words, ()) and again.check.blocked is first.check.blocked
    blocked = False
    assert Run(reaper, "exit 0", blocked=first.check.blocked).result().passed
    gone(pid)


def test_no_check_leaves_descriptors_open(reaper: OrphanReaper) -> None:
    Run(reaper, "exit 0").result()
    before = len(os.listdir("/proc/self/fd"))
    for command in ("exit 0", "nosuch", "yes | head -c 1000000"):
        Run(reaper, command).result()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_check_without_descriptors_fails(reaper: OrphanReaper, monkeypatch: pytest.MonkeyPatch) -> None:
    main, pipe = threading.current_thread(), os.pipe

    def full() -> tuple[int, int]:
        if threading.current_thread() is main:
            return pipe()
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pipe", full)
    assert Run(reaper, "exit 0").result() == (None, "it cannot be run: Too many open files", ())
