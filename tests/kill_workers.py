"""A job under `rallypoint run` whose workers are killed at random moments: while they import, write or exit.

The seed decides which worker is killed, and when. Scheduling varies, so a seed may not reproduce a failure; it makes
every round of a soak different.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KILLING_S = float(os.environ.get("KILLING_S", "0"))
"""How long workers are killed; with 0 s there is one kill. `make soak` sets a minute."""

FIRST_SEED = int(os.environ.get("FIRST_SEED", "1"))
AMPLE_S, LOOK_S = 120.0, 0.01


def run_and_kill(
    example: str,
    *arguments: str,
    workers: int,
    begun: Callable[[], object],
    between_s: tuple[float, float],
    restart: str = "group",
) -> tuple[int, str]:
    """Run an example, and kill its workers one by one, from `begun` on, with pauses of `between_s`.

    The job may restart without limit and without delay, and must succeed. Return how many workers were killed, and
    the output.
    """
    options = f"--nproc-per-node={workers} --max-restarts=10000 --min-uptime=0 --grace=5 --restart={restart}"
    script = str(ROOT / "examples" / example)
    command = [sys.executable, "-m", "rallypoint", "run", *options.split(), script, *arguments]
    chance, pause, kills = random.Random(FIRST_SEED), threading.Event(), 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as agent:
        said: list[str] = []
        hears = threading.Thread(target=lambda: said.extend(agent.stdout or ()), name=f"hears {example}")
        hears.start()
        try:
            ends_at = time.monotonic() + KILLING_S
            while agent.poll() is None and (kills == 0 or time.monotonic() < ends_at):
                if begun():
                    kills += _kill_one(_workers(agent.pid, script), chance)
                pause.wait(chance.uniform(*between_s) if kills else LOOK_S)
            assert agent.wait(AMPLE_S) == 0, "".join(said)
        finally:
            agent.kill()
            hears.join(AMPLE_S)
    return kills, "".join(said)


def _kill_one(pids: list[int], chance: random.Random) -> bool:
    """Kill one of the workers; return whether there was one."""
    with contextlib.suppress(IndexError, ProcessLookupError):
        os.kill(chance.choice(pids), signal.SIGKILL)
        return True
    return False


def _workers(agent: int, script: str) -> list[int]:
    """Return the children of an agent that run a script, also those that have only begun to."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == agent and script.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return sorted(found)
