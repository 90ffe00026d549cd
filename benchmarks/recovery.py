"""Recovery: how long training under torchrun stands still when somebody dies or comes, with our back end and torch's.

Two agents of one worker each train with gloo; `--nnodes=1:3`, so that they may become one or three. In each job, one
after the other: a worker is killed; a third agent is started; that agent is killed with its worker; the agent that
hosts torch's store, or has started our server, is killed with its worker. A job that does not recover is ended, and
the next thing is done to a fresh one.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.rig import CORES, need, pin, say
from benchmarks.table import Line
from rallypoint import net
from rallypoint.deadline import Deadline

TITLE = "Recovery under torchrun"
BACK_ENDS = {"rallypoint": "rallypoint", "torch": "c10d"}
LIMIT_S = 75.0
OPTIONS = "--nnodes=1:3 --nproc-per-node=1 --max-restarts=9 --rdzv-id=bench --rdzv-conf=last_call_timeout=10"
NOTES = (
    f"The same commands with `--rdzv-backend=rallypoint` and `c10d`: `torchrun {OPTIONS}`, everything else as torchrun "
    "has it by itself. Seconds from the SIGKILL, or from the start of the third agent, until every worker of the next "
    "round has made its first step; importing torch in the new processes, a second or more each, is in all of them. "
    f"Where it took more than {LIMIT_S:.0f} s, or all agents gave up, the peer's column says so. (In torch 2.13, one "
    "that stays rank 0 does not tell an agent that came later where its store is, which waits until it gives up.)"
)
TRAIN = """
import os, threading
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rest, first = threading.Event(), True
while True:
    dist.all_reduce(torch.ones(1))
    if first:
        os.write(1, f"\\nSTEPPED {dist.get_world_size()} {os.getpid()}\\n".encode())
    first = rest.wait(0.02)
"""
STEPPED = re.compile(r"STEPPED (\d+) (\d+)")


class GaveUp(Exception):
    """Training did not go on."""


class Agent:
    """One torchrun, with the pids of its workers."""

    def __init__(self, job: Job, back_end: str) -> None:
        place = f"--rdzv-backend={back_end} --rdzv-endpoint=localhost:{job.port}"
        torchrun = str(Path(sys.executable).with_name("torchrun"))
        self.process = subprocess.Popen(
            [torchrun, *place.split(), *OPTIONS.split(), str(job.script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.workers: list[int] = []
        self._job = job
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        stream: Any = self.process.stdout
        for line in stream:
            if said := STEPPED.search(line):
                self.workers.append(int(said[2]))
                self._job.stepped(int(said[1]))
        self._job.stepped(0)  # it has ended: look

    def kill(self, workers: bool = True) -> None:
        """Kill it, and its last worker."""
        if workers:
            with contextlib.suppress(ProcessLookupError, IndexError):
                os.kill(self.workers[-1], signal.SIGKILL)
        self.process.kill()
        self.process.wait()


class Job:
    """Agents that train together."""

    def __init__(self, back_end: str, place: Path) -> None:
        self.port = net.free_port()
        self.script = place / "train.py"
        self.script.write_text(TRAIN)
        self.agents: list[Agent] = []
        self._back_end = back_end
        self._heard = threading.Condition()
        self._sizes: list[int] = []

    def begin(self) -> None:
        """Start two agents; the first has the store, or starts the server."""
        self.start()
        net.connect("localhost", self.port, Deadline(LIMIT_S)).close()
        self.start()
        self.until(2)

    def start(self) -> None:
        """Start one more agent."""
        self.agents.append(Agent(self, self._back_end))

    def stepped(self, size: int) -> None:
        """Hear of a worker's first step in a world of that size."""
        with self._heard:
            self._sizes.append(size)
            self._heard.notify_all()

    def forget(self) -> None:
        """Count from here on."""
        with self._heard:
            self._sizes.clear()

    def until(self, size: int) -> None:
        """Wait until a whole world of that size has made its first step."""
        deadline = time.monotonic() + LIMIT_S
        with self._heard:
            while self._sizes.count(size) < size:
                if all(agent.process.poll() is not None for agent in self.agents):
                    raise GaveUp("all agents gave up")
                if not self._heard.wait(min(1.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    raise GaveUp(f"not within {LIMIT_S:.0f} s")

    def close(self) -> None:
        """End all agents, who end their workers."""
        for agent in self.agents:
            agent.process.terminate()
        for agent in self.agents:
            try:
                agent.process.wait(10)
            except subprocess.TimeoutExpired:
                agent.kill()


def _a_worker(job: Job) -> int:
    os.kill(job.agents[1].workers[-1], signal.SIGKILL)
    return 2


def _a_third_agent(job: Job) -> int:
    job.start()
    return 3


def _an_agent(job: Job) -> int:
    job.agents.pop().kill()
    return len(job.agents)


def _the_host(job: Job) -> int:
    job.agents.pop(0).kill()
    return len(job.agents)


WHAT: dict[str, Callable[[Job], int]] = {
    "a worker is killed": _a_worker,
    "a third agent comes": _a_third_agent,
    "an agent is killed": _an_agent,
    "the agent with the store is killed": _the_host,
}
"""What happens, and how many there are then."""


def run(quick: bool) -> list[Line]:
    """Measure everything in turn, as often as is needed for a median."""
    need("torch")
    figures: dict[str, dict[str, list[float | str]]] = {name: {what: [] for what in WHAT} for name in BACK_ENDS}
    os.sched_setaffinity(0, CORES)  # what is started from here has all of them
    try:
        for turn in range(1 if quick else 3):
            for name in list(BACK_ENDS) if turn % 2 == 0 else reversed(BACK_ENDS):
                for what, figure in _lived_through(name):
                    figures[name][what].append(figure)
                    say(f"  {name}: {what}: {figure if isinstance(figure, str) else f'{figure:.1f} s'}")
    finally:
        pin(os.getpid(), CORES[-1])
    return [_line(what, figures["rallypoint"][what], figures["torch"][what]) for what in WHAT]


def _lived_through(name: str) -> Iterator[tuple[str, float | str]]:
    """Do everything to jobs of one back end; yield what, and how long it took or why it did not end well."""
    with tempfile.TemporaryDirectory() as place:
        job: Job | None = None
        try:
            for what, happen in WHAT.items():
                if job is not None and len(job.agents) < 2:
                    job.close()
                    job = None
                if job is None:
                    job = Job(BACK_ENDS[name], Path(place))
                    job.begin()
                job.forget()
                began_at = time.monotonic()
                try:
                    job.until(happen(job))
                    yield what, time.monotonic() - began_at
                except GaveUp as why:
                    yield what, str(why)
                    job.close()
                    job = None
        finally:
            if job is not None:
                job.close()


def _line(what: str, ours: list[float | str], theirs: list[float | str]) -> Line:
    """Make a line; what did not end well is counted beside the peer's name, and ours must."""
    good, bad = ([one for one in theirs if isinstance(one, kind)] for kind in (float, str))
    if any(isinstance(one, str) for one in ours):
        raise RuntimeError(f"{what}, and with our back end the job did not recover: {ours}")
    peer = "torch" + (f" ({len(bad)} of {len(theirs)}: {bad[0]})" if bad else "")
    return Line(what, "all cores", "s", [one for one in ours if isinstance(one, float)], peer, good)  # type: ignore[arg-type]
