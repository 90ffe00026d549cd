"""One job of a framework's script: started, killed half-way, and followed to its end.

The job runs on the Python of `.venv-frameworks`; the test that follows it does not. Rank 0 prints `step N` as training
scripts do. When N is large enough, one worker gets SIGKILL from outside: the script knows nothing of it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rallypoint.launch.monitoring.native_stacks import find_py_spy

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv-frameworks" / "bin" / "python"
AMPLE_S = 900.0
"""More than any job takes: the first one of DeepSpeed compiles for minutes on a loaded machine."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "DS_ACCELERATOR": "cpu",
    "JAX_PLATFORMS": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "TORCH_EXTENSIONS_DIR": str(ROOT / ".venv-frameworks" / "torch-extensions"),
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}
"""No downloads, no GPU, one thread so that results are equal to the bit; what DeepSpeed compiles is kept."""


class Hung(AssertionError):
    """A job was not over at its deadline; the text has the stacks of its workers, and its output."""


class Outcome(NamedTuple):
    """How a job ended."""

    codes: tuple[int, ...]
    """Exit codes of the agents."""

    killed: int
    """Number of workers that were killed."""

    output: str

    def last(self, pattern: str) -> str:
        """Return what the last match of a pattern in the output has in its group; empty without a match."""
        return str((re.findall(pattern, self.output, re.M) or [""])[-1])


class Victim(NamedTuple):
    """Which worker is killed, and when."""

    rank: int
    step: int
    agent: int | None = None
    """Index of its agent, where several agents have a worker of this rank."""


def follow(agents: Sequence[subprocess.Popen[str]], victim: Victim | None, within_s: float = AMPLE_S) -> Outcome:
    """Follow a job to its end, kill its victim, and return the outcome; past the deadline, kill it and raise Hung."""
    lines: queue.Queue[str | None] = queue.Queue()
    for agent in agents:
        threading.Thread(target=_read, args=(agent, lines), name=f"reads {agent.pid}", daemon=True).start()
    said: list[str] = []
    killed, reading, ends_at = 0, len(agents), time.monotonic() + within_s
    try:
        while reading:
            line = lines.get(timeout=max(0.0, ends_at - time.monotonic()))
            if line is None:
                reading -= 1
                continue
            said.append(line)
            if victim and not killed and _step(line) >= victim.step:
                killed += _kill(agents if victim.agent is None else [agents[victim.agent]], victim.rank)
        return Outcome(tuple(agent.wait(AMPLE_S) for agent in agents), killed, "".join(said))
    except queue.Empty:
        raise Hung(f"not over after {within_s:.0f} s\n{stacks(agents)}\n{''.join(said)}") from None
    finally:
        for agent in agents:
            _end(agent)


def stacks(agents: Sequence[subprocess.Popen[str]]) -> str:
    """Return where the workers of these agents are, by py-spy; empty where it is not installed."""
    program, found = find_py_spy(), []
    for rank, pid in sorted(worker for agent in agents for worker in worker_pids(agent.pid)) if program else []:
        asked = subprocess.run([str(program), "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=60)
        found.append(f"rank {rank}\n{asked.stdout}{asked.stderr}")
    return "".join(found)


def start(command: Sequence[str | Path], **more: str) -> subprocess.Popen[str]:
    """Start an agent; `more` are further variables."""
    environment = {**without_launcher(os.environ), **ENVIRONMENT, **more}
    return subprocess.Popen(
        [str(word) for word in command],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def without_launcher(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those that a launcher sets."""
    ours = ("RALLYPOINT_", "TORCHELASTIC_", "PET_", "MASTER_")
    return {name: value for name, value in variables.items() if not name.startswith(ours)}


def worker_pids(agent: int) -> Iterator[tuple[int, int]]:
    """Yield rank and pid of the workers that an agent has started."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == agent and (found := re.search(rb"(?:^|\0)RANK=(\d+)\0", (entry / "environ").read_bytes())):
                yield int(found[1]), int(entry.name)


def _end(agent: subprocess.Popen[str]) -> None:
    """Kill an agent, and its workers: those of torchrun outlive it."""
    workers = [pid for _, pid in worker_pids(agent.pid)] if agent.poll() is None else []
    agent.kill()
    agent.wait(AMPLE_S)
    for pid in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _kill(agents: Sequence[subprocess.Popen[str]], rank: int) -> int:
    """Kill the worker of a rank; return how many there were."""
    pids = [pid for agent in agents for found, pid in worker_pids(agent.pid) if found == rank]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return len(pids)


def _step(line: str) -> int:
    found = re.search(r"\bstep (\d+)$", line.rstrip())
    return int(found[1]) if found and "after" not in line else 0


def _read(agent: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    """Put the output of an agent into a queue, line by line, and None at its end."""
    assert agent.stdout is not None
    with agent.stdout:
        for line in agent.stdout:
            lines.put(line)
    lines.put(None)
