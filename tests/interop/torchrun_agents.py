"""Real agents of torchrun for tests: their output is read line by line, and their workers are known by pid.

`TorchrunAgents` starts them, waits for output, kills them and their workers by pid, and leaves none behind. An agent is
the `torchrun` command, or torchrun's own `main` in a forked process, which saves the seconds of importing torch.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any
from urllib.request import urlopen

from tests.ports import reserve_port

from rallypoint.deadline import Deadline

from .torch_processes import AMPLE_S, TorchProcess, TorchProcesses, TorchProcessFailed

LOOP = Path(__file__).with_name("loop.py")
TORCHRUN = Path(sys.executable).with_name("torchrun")
QUICK = "--rdzv-backend=rallypoint --monitor-interval=0.1 --max-restarts=9"
BEGINS = re.compile(r"worker (\d+) of (\d+) on node (\d+) begins after step (\d+), pid (\d+)")


class WorkerStarted:
    """The line that a worker prints when it begins."""

    def __init__(self, said: re.Match[str]) -> None:
        self.rank, self.size, self.node_rank, self.step, self.pid = map(int, said.groups())

    def __repr__(self) -> str:
        return f"{self.rank} of {self.size} on {self.node_rank} after {self.step}"


class TorchrunAgent:
    """One agent: its pid, the output of it and its workers, and its exit code."""

    def __init__(self, name: str, heard: threading.Condition) -> None:
        self.name = name
        self.pid = 0
        self.lines: list[str] = []
        self.ended: Callable[[], int] = lambda: 0
        self._heard = heard

    def listen(self, source: Callable[[], IO[str]]) -> None:
        """Read the output in a thread, until all writers have ended."""
        threading.Thread(target=self._read_output, args=(source,), name=f"hears {self.name}", daemon=True).start()

    def _read_output(self, source: Callable[[], IO[str]]) -> None:
        with source() as stream:
            for line in stream:
                with self._heard:
                    self.lines.append(line.rstrip())
                    self._heard.notify_all()

    @property
    def begun(self) -> list[WorkerStarted]:
        """The workers that have begun, in order."""
        return [WorkerStarted(said) for said in map(BEGINS.fullmatch, list(self.lines)) if said]

    def says(self, words: str) -> bool:
        """Return whether these words are in the output."""
        return any(words in line for line in self.lines)

    def workers(self) -> list[int]:
        """Return the pids of its running workers."""
        pids = (begins.pid for begins in self.begun)
        return [pid for pid in pids if str(LOOP).encode() in _command(pid)]


def _kill(pid: int) -> None:
    """Kill a process of ours, unless it has ended and its pid was reused."""
    ours = (str(LOOP), str(TORCHRUN), "tests.interop.torch_processes")
    if any(words.encode() in _command(pid) for words in ours):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def run_agent(command: list[str], output: str) -> int:
    """Run torchrun in this forked process; return the exit code."""
    from torch.distributed import run

    pipe = os.open(output, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(pipe, descriptor)
    os.close(pipe)
    try:
        run.main(command)
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException as error:
        os.write(2, f"torchrun raised {type(error).__name__}: {error}\n".encode())
        return 1
    return 0


class TorchrunAgents:
    """The agents of one test, of one or more jobs that train with loop.py."""

    def __init__(
        self, torch_processes: TorchProcesses, place: Path, port: int | None = None, endpoint: str = ""
    ) -> None:
        self._starts_server = port is None and not endpoint
        self.port = reserve_port() if port is None else port
        self.endpoint = endpoint or f"localhost:{self.port}"
        self.agents: list[TorchrunAgent] = []
        self._processes = torch_processes
        self._place = place
        self._heard = threading.Condition()

    def start(self, name: str, options: str, conf: str = "", job: str = "job", command: bool = False) -> TorchrunAgent:
        """Start an agent of a job; `name` is its node's, unless it begins with an underscore."""
        conf = ",".join(filter(None, [conf, f"node={name}" if name[0] != "_" else ""]))
        where = f"--rdzv-endpoint={self.endpoint} --rdzv-id={job}"
        words = [*QUICK.split(), *where.split(), *options.split(), *([f"--rdzv-conf={conf}"] if conf else [])]
        words += [str(LOOP), str(self._place / f"{job}.step"), str(self.stop_file(job))]
        agent = TorchrunAgent(name, self._heard)
        self.agents.append(agent)
        if command:
            self._by_command(agent, words)
        else:
            self._by_member(agent, words)
        return agent

    def _by_command(self, agent: TorchrunAgent, words: list[str]) -> None:
        process = subprocess.Popen(
            [str(TORCHRUN), *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        stream: Any = process.stdout
        agent.pid, agent.ended = process.pid, lambda: process.wait(AMPLE_S)
        agent.listen(lambda: stream)

    def _by_member(self, agent: TorchrunAgent, words: list[str]) -> None:
        pipe = self._place / f"output-{len(self.agents)}"
        os.mkfifo(pipe)
        agent.listen(functools.partial(open, pipe, errors="replace"))
        member: TorchProcess = self._processes.start(run_agent, words, str(pipe))
        agent.pid, agent.ended = member.pid, member.result

    def wait(self, true: Callable[[], Any], what: str) -> Any:
        """Return the result of `true` once it is truthy; it is evaluated after every line of output."""
        deadline = Deadline(AMPLE_S)
        with self._heard:
            while not (seen := true()):
                assert self._heard.wait(deadline.remaining()) or true(), f"never: {what}\n{self.said()}"
        return seen

    def train_as(self, agents: Iterable[TorchrunAgent], after: int = 0, workers: int = 1) -> list[int]:
        """Wait until workers of all these agents have begun one round, after this step or later; return node ranks.

        All of them begin after the same step, which is stored in `self.step`.
        """
        agents = list(agents)

        def latest() -> list[WorkerStarted]:
            found = [begins for agent in agents for begins in agent.begun[-workers:]]
            same = {(begins.size, begins.step) for begins in found}
            whole = sorted(begins.rank for begins in found) == list(range(len(agents) * workers))
            good = whole and same == {(len(found), found[0].step)} and found[0].step >= after
            return found if good else []

        names = ", ".join(agent.name for agent in agents)
        found = self.wait(latest, f"{names} train as {len(agents) * workers}, from step {after} on")
        self.step: int = found[0].step
        return [begins.node_rank for begins in found[::workers]]

    def codes(self, *agents: TorchrunAgent) -> list[int]:
        """Wait for agents to end, and return their exit codes."""
        try:
            return [agent.ended() for agent in agents]
        except (TorchProcessFailed, subprocess.TimeoutExpired) as error:
            raise AssertionError(f"{error}\n{self.said()}") from None

    def checkpoint(self, job: str = "job") -> int:
        """Return the number of steps so far."""
        place = self._place / f"{job}.step"
        return int(place.read_text()) if place.exists() else 0

    def some_steps(self, job: str = "job") -> int:
        """Wait for a few more steps, and return their number."""
        before = self.checkpoint(job)
        self.poll(lambda: self.checkpoint(job) >= before + 3, f"{job} is past step {before}")
        return self.checkpoint(job)

    def poll(self, true: Callable[[], Any], what: str) -> Any:
        """Return the result of `true` once it is truthy; it is polled with pauses."""
        deadline, pause = Deadline(AMPLE_S), threading.Event()
        while not (seen := true()):
            assert not deadline.expired(), f"never: {what}\n{self.said()}"
            pause.wait(0.02)
        return seen

    def stop_file(self, job: str = "job") -> Path:
        """Return the file that tells a job to end."""
        return self._place / f"{job}.stop"

    def kill(self, agent: TorchrunAgent, workers: bool = True) -> None:
        """Kill an agent, and its workers, at once."""
        for pid in [agent.pid, *(agent.workers() if workers else [])]:
            _kill(pid)

    def said(self) -> str:
        """Return the output of all agents."""
        return "\n".join(f"{agent.name}: {line}" for agent in self.agents for line in agent.lines[-60:])

    def close(self) -> None:
        """Kill all agents and workers, and end the server if they have started one."""
        for agent in self.agents:
            self.kill(agent)
        if self._starts_server:
            with contextlib.suppress(OSError), urlopen(f"http://localhost:{self.port}/about") as about:
                os.kill(json.load(about)["pid"], signal.SIGTERM)


@contextlib.contextmanager
def torchrun_agents(
    torch_processes: TorchProcesses, place: Path, port: int | None = None, endpoint: str = ""
) -> Iterator[TorchrunAgents]:
    """Provide agents; the server is at the given port, or is started by the first agent at a free port.

    `endpoint` replaces both.
    """
    everybody = TorchrunAgents(torch_processes, place, port, endpoint)
    try:
        yield everybody
    finally:
        everybody.close()
