"""torchrun's agents for tests: real ones, whose output is read line by line, and whose workers are known by their pids.

`Cast` starts them, waits for what they say, kills them and their workers by pid, and leaves nobody behind. An agent is
the `torchrun` command, or torchrun's own `main` in a member of the crew, which saves the seconds of importing torch.
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

from rallypoint import net
from rallypoint.deadline import Deadline

from .crew import AMPLE_S, Crew, Member, MemberFailed

LOOP = Path(__file__).with_name("loop.py")
TORCHRUN = Path(sys.executable).with_name("torchrun")
QUICK = "--rdzv-backend=rallypoint --monitor-interval=0.1 --max-restarts=9"
BEGINS = re.compile(r"worker (\d+) of (\d+) on node (\d+) begins after step (\d+), pid (\d+)")


class Begins:
    """What a worker says when it begins."""

    def __init__(self, said: re.Match[str]) -> None:
        self.rank, self.size, self.node_rank, self.step, self.pid = map(int, said.groups())

    def __repr__(self) -> str:
        return f"{self.rank} of {self.size} on {self.node_rank} after {self.step}"


class Agent:
    """One agent: its process id, what was said by it and its workers, and how it ended."""

    def __init__(self, name: str, heard: threading.Condition) -> None:
        self.name = name
        self.pid = 0
        self.lines: list[str] = []
        self.ended: Callable[[], int] = lambda: 0
        self._heard = heard

    def listen(self, source: Callable[[], IO[str]]) -> None:
        """Take down what is said, in a thread, until nobody is left who could say something."""
        threading.Thread(target=self._take_down, args=(source,), name=f"hears {self.name}", daemon=True).start()

    def _take_down(self, source: Callable[[], IO[str]]) -> None:
        with source() as stream:
            for line in stream:
                with self._heard:
                    self.lines.append(line.rstrip())
                    self._heard.notify_all()

    @property
    def begun(self) -> list[Begins]:
        """What its workers said when they began, in order."""
        return [Begins(said) for said in map(BEGINS.fullmatch, list(self.lines)) if said]

    def says(self, words: str) -> bool:
        """Say whether words were said."""
        return any(words in line for line in self.lines)

    def workers(self) -> list[int]:
        """Return the pids of its workers that live."""
        pids = (begins.pid for begins in self.begun)
        return [pid for pid in pids if str(LOOP).encode() in _command(pid)]


def _kill(pid: int) -> None:
    """Kill a process of ours, unless it has ended and the number is another's by now."""
    ours = (str(LOOP), str(TORCHRUN), "tests.interop.crew")
    if any(words.encode() in _command(pid) for words in ours):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def run_agent(command: list[str], output: str) -> int:
    """Be torchrun, in a member of the crew; return the exit code."""
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


class Cast:
    """The agents of one test, of one or more jobs that train with loop.py."""

    def __init__(self, crew: Crew, place: Path, port: int | None = None, endpoint: str = "") -> None:
        self._starts_server = port is None and not endpoint
        self.port = net.free_port() if port is None else port
        self.endpoint = endpoint or f"localhost:{self.port}"
        self.agents: list[Agent] = []
        self._crew = crew
        self._place = place
        self._heard = threading.Condition()

    def start(self, name: str, options: str, conf: str = "", job: str = "job", command: bool = False) -> Agent:
        """Start an agent of a job; `name` is its node's, unless it begins with an underscore."""
        conf = ",".join(filter(None, [conf, f"node={name}" if name[0] != "_" else ""]))
        where = f"--rdzv-endpoint={self.endpoint} --rdzv-id={job}"
        words = [*QUICK.split(), *where.split(), *options.split(), *([f"--rdzv-conf={conf}"] if conf else [])]
        words += [str(LOOP), str(self._place / f"{job}.step"), str(self.stop_file(job))]
        agent = Agent(name, self._heard)
        self.agents.append(agent)
        if command:
            self._by_command(agent, words)
        else:
            self._by_member(agent, words)
        return agent

    def _by_command(self, agent: Agent, words: list[str]) -> None:
        process = subprocess.Popen(
            [str(TORCHRUN), *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        stream: Any = process.stdout
        agent.pid, agent.ended = process.pid, lambda: process.wait(AMPLE_S)
        agent.listen(lambda: stream)

    def _by_member(self, agent: Agent, words: list[str]) -> None:
        pipe = self._place / f"output-{len(self.agents)}"
        os.mkfifo(pipe)
        agent.listen(functools.partial(open, pipe, errors="replace"))
        member: Member = self._crew.start(run_agent, words, str(pipe))
        agent.pid, agent.ended = member.pid, member.result

    def wait(self, true: Callable[[], Any], what: str) -> Any:
        """Return what is true, once something was said that made it so."""
        deadline = Deadline(AMPLE_S)
        with self._heard:
            while not (seen := true()):
                assert self._heard.wait(deadline.remaining()) or true(), f"never: {what}\n{self.said()}"
        return seen

    def train_as(self, agents: Iterable[Agent], after: int = 0, workers: int = 1) -> list[int]:
        """Wait until workers of all these agents have begun one round together, after such a step; return node ranks.

        The step that they begin after is the same for all, and is said in `self.step`.
        """
        agents = list(agents)

        def latest() -> list[Begins]:
            found = [begins for agent in agents for begins in agent.begun[-workers:]]
            same = {(begins.size, begins.step) for begins in found}
            whole = sorted(begins.rank for begins in found) == list(range(len(agents) * workers))
            good = whole and same == {(len(found), found[0].step)} and found[0].step >= after
            return found if good else []

        names = ", ".join(agent.name for agent in agents)
        found = self.wait(latest, f"{names} train as {len(agents) * workers}, from step {after} on")
        self.step: int = found[0].step
        return [begins.node_rank for begins in found[::workers]]

    def codes(self, *agents: Agent) -> list[int]:
        """Wait for agents to end, and return their exit codes."""
        try:
            return [agent.ended() for agent in agents]
        except (MemberFailed, subprocess.TimeoutExpired) as error:
            raise AssertionError(f"{error}\n{self.said()}") from None

    def checkpoint(self, job: str = "job") -> int:
        """Return how many steps there have been."""
        place = self._place / f"{job}.step"
        return int(place.read_text()) if place.exists() else 0

    def some_steps(self, job: str = "job") -> int:
        """Wait until there have been some steps more, and return how many there are then."""
        before = self.checkpoint(job)
        self.poll(lambda: self.checkpoint(job) >= before + 3, f"{job} is past step {before}")
        return self.checkpoint(job)

    def poll(self, true: Callable[[], Any], what: str) -> Any:
        """Return what is true, once it is so in the outside world, which tells nobody; leave the others the cores."""
        deadline, pause = Deadline(AMPLE_S), threading.Event()
        while not (seen := true()):
            assert not deadline.expired(), f"never: {what}\n{self.said()}"
            pause.wait(0.02)
        return seen

    def stop_file(self, job: str = "job") -> Path:
        """Return the file by which a job is told to end."""
        return self._place / f"{job}.stop"

    def kill(self, agent: Agent, workers: bool = True) -> None:
        """Kill an agent, and its workers, at once."""
        for pid in [agent.pid, *(agent.workers() if workers else [])]:
            _kill(pid)

    def said(self) -> str:
        """Return everything that was said."""
        return "\n".join(f"{agent.name}: {line}" for agent in self.agents for line in agent.lines[-60:])

    def close(self) -> None:
        """Kill everybody who is left, and end the server if they have started one."""
        for agent in self.agents:
            self.kill(agent)
        if self._starts_server:
            with contextlib.suppress(OSError), urlopen(f"http://localhost:{self.port}/about") as about:
                os.kill(json.load(about)["pid"], signal.SIGTERM)


@contextlib.contextmanager
def cast(crew: Crew, place: Path, port: int | None = None, endpoint: str = "") -> Iterator[Cast]:
    """Have a cast for a while; the server is at that port, or is started by the first agent at a free one.

    With another endpoint it is neither.
    """
    everybody = Cast(crew, place, port, endpoint)
    try:
        yield everybody
    finally:
        everybody.close()
