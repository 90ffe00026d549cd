"""Output: what it costs the agent that 64 ranks print 100 lines a second each, beside torchrun's `--tee`."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.rig import CORES, Missing, cpu_s, need, pin, say
from benchmarks.table import Line, Target
from rallypoint.process.supervisor import stop

TITLE = "Output of many ranks"
RANKS, LINES_A_S = 64, 100
NOTES = (
    f"{RANKS} workers print {LINES_A_S} lines a second each, every line flushed. The figure is the processor time of "
    "the agent, all its threads, in percent of a core, in slices of a second. The agent has one core, the workers and "
    "the reader of its output the other. *Own lines*: each rank's lines differ; *equal lines*: all ranks print the "
    "same. On a terminal (a pseudo-terminal here) equal lines are folded. torchrun's agent carries output only with "
    "`--tee`, and looks at its files every 0.1 s; its figure is for `--tee 1`, and ours beside it for the same. Jobs "
    "are measured one after the other, not in turn: 64 more workers would not fit beside them."
)
SCRIPT = f"""
import os, sys, time
rank = os.environ["RANK"] if sys.argv[1] == "own" else "-"
began_at, lines = time.monotonic(), 0
while True:
    lines += 1
    os.write(1, f"step {{lines}} of rank {{rank}}: loss 0.1234, 56.7 samples/s, lr 0.001\\n".encode())
    time.sleep(max(0.0, began_at + lines / {LINES_A_S} - time.monotonic()))
"""
UP_S = 120.0
TARGET = Target(at_most=30, unit="%")


class Case(NamedTuple):
    """One way to print and to be shown."""

    name: str
    lines: str
    terminal: bool = False
    options: tuple[str, ...] = ()
    program: tuple[str, ...] = ("rallypoint", "run")


CASES = [
    Case("own lines to a pipe", "own"),
    Case("own lines on a terminal", "own", terminal=True),
    Case("equal lines on a terminal", "equal", terminal=True),
    Case("own lines to a pipe and files", "own", options=("--tee=1",)),
]
TORCHRUN = Case("torchrun --tee 1", "own", options=("--tee=1",), program=("torchrun",))


def run(quick: bool) -> list[Line]:
    """Measure one job after the other: a machine has no room for 64 more workers."""
    slices = 2 if quick else 10
    lines = []
    for case in CASES:
        peer: tuple[str, list[float]] | tuple[()] = ()
        if case.options:
            with contextlib.suppress(Missing):
                need("torch")
                peer = TORCHRUN.name, _cpu_percent(TORCHRUN, slices)
        target = None if peer else TARGET
        lines.append(Line(case.name, "two cores", "%", _cpu_percent(case, slices), *peer)._replace(target=target))
    pin(os.getpid(), CORES[-1])
    return lines


def _cpu_percent(case: Case, slices: int) -> list[float]:
    """Run one job; return the agent's share of a core in each slice, once all its workers print."""
    with tempfile.TemporaryDirectory() as place, _job(case, Path(place)) as (agent, reader):
        reader.wait_for(RANKS * LINES_A_S)
        pin(agent.pid, CORES[0])
        figures = []
        for _ in range(slices):
            before, began_at, shown = cpu_s(agent.pid), time.monotonic(), reader.bytes
            time.sleep(1.0)
            figures.append((cpu_s(agent.pid) - before) / (time.monotonic() - began_at) * 100)
            say(f"    {case.name}: {figures[-1]:.0f} %, {(reader.bytes - shown) / 1000:.0f} kB shown")
        return figures


class Reader:
    """Reads what the agent shows, and counts it."""

    def __init__(self, descriptor: int) -> None:
        self.bytes = 0
        self._descriptor = descriptor
        self._enough = threading.Event()
        self._wanted = 1 << 60
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the end of a terminal
            while data := os.read(self._descriptor, 1 << 16):
                self.bytes += len(data)
                if self.bytes >= self._wanted:
                    self._enough.set()

    def wait_for(self, size: int) -> None:
        """Wait until so many bytes were shown."""
        self._wanted = self.bytes + size
        if not self._enough.wait(UP_S):
            raise RuntimeError(f"{self.bytes} bytes were shown in {UP_S:.0f} s")


@contextlib.contextmanager
def _job(case: Case, place: Path) -> Iterator[tuple[subprocess.Popen[bytes], Reader]]:
    """Run a job of 64 workers; its agent, and the reader of its output."""
    script = place / "script.py"
    script.write_text(SCRIPT)
    program, *words = case.program
    command = [str(Path(sys.executable).with_name(program)), *words, f"--nproc-per-node={RANKS}", *case.options]
    ours, theirs = pty.openpty() if case.terminal else os.pipe()
    if CORES[1:]:
        os.sched_setaffinity(0, CORES[1:])  # what is started from here on stays there
    agent = subprocess.Popen(
        [*command, f"--log-dir={place}", str(script), case.lines],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs if case.terminal else subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(theirs)
    reader = Reader(ours)
    try:
        yield agent, reader
    finally:
        stop(agent, UP_S)
        os.close(ours)
