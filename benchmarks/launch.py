"""Launching: how long a job takes to come up and to come back, and what its agent weighs, beside torchrun.

One job is measured three times: when it starts, while it stands still, and when one of its workers is killed.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.rig import CORES, need, pin, resident_kb, say
from benchmarks.table import Line, Target
from rallypoint.process.supervisor import stop

TITLE = "Launching, beside torchrun"
OPTIONS = "--standalone --nproc-per-node=2 --max-restarts=9"
NOTES = (
    f"The same command, `rallypoint run` and `torchrun` with `{OPTIONS}`, and everything else as each has it by "
    "itself (torchrun looks at its workers every 0.1 s), in turn, on the same cores. The script prints a line and "
    "then keeps still; it imports nothing before that line. *Up* is from the command until both workers have "
    "printed; *back* is from the SIGKILL of one worker until both new ones have. Memory is resident memory while the "
    "workers run. Torchrun has its store in the agent; ours is a process of its own, the largest of *the others*, "
    "next to a shell that kills the workers should the agent be killed."
)
SCRIPT = """
print(open("/proc/self/stat").read().split()[0] + "\\n", end="", flush=True)
import time
time.sleep(600)
"""
LIMIT_S = 60.0
COMMANDS = {"rallypoint": ["rallypoint", "run"], "torch": ["torchrun"]}
PLACES = {"one core": CORES[:1], **({"two cores": CORES[:2]} if len(CORES) > 1 else {})}

UP, BACK, AGENT, OTHERS = "up", "back after a kill", "memory of the agent", "memory of the others"
UNITS = {UP: "ms", BACK: "ms", AGENT: "MB", OTHERS: "MB"}
TARGETS = {UP: Target(at_most=0.2), BACK: Target(at_most=0.5), AGENT: Target(at_most=0.3)}


def run(quick: bool) -> list[Line]:
    """Measure jobs in turn, first on one core, then on two."""
    need("torch")
    lines = []
    try:
        for where, cores in PLACES.items():
            say(f"  {where}")
            os.sched_setaffinity(0, cores)  # what is started from here on has these
            figures = _in_turn(2 if quick else 9)
            memory = where == next(iter(PLACES))  # which is the same on any
            lines += [_line(what, where, figures) for what in UNITS if memory or UNITS[what] == "ms"]
    finally:
        pin(os.getpid(), CORES[-1])
    return lines


def _in_turn(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Have jobs of either kind in turn, the order reversed every other round; the first round is for warming up."""
    figures: dict[str, dict[str, list[float]]] = {name: {what: [] for what in UNITS} for name in COMMANDS}
    for turn in range(rounds + 1):
        for name in list(COMMANDS) if turn % 2 else reversed(COMMANDS):
            one = _measured(name)
            if turn:
                for what, figure in one.items():
                    figures[name][what].append(figure)
                say(f"    {name}: {', '.join(f'{what} {figure:.0f} {UNITS[what]}' for what, figure in one.items())}")
    return figures


def _line(what: str, where: str, figures: dict[str, dict[str, list[float]]]) -> Line:
    ours, theirs = (figures[name][what] for name in COMMANDS)
    peer = ("torchrun", theirs) if any(theirs) else ()
    return Line(what, where, UNITS[what], ours, *peer)._replace(target=TARGETS.get(what))


def _measured(name: str) -> dict[str, float]:
    """Have one job; return what was measured."""
    began_at = time.monotonic()
    with _job(name) as (agent, printed):
        workers = [_next(printed, name) for _ in range(2)]
        up_ms = (time.monotonic() - began_at) * 1000
        others = [pid for pid in _children(agent) if pid not in workers]
        memory = {AGENT: resident_kb(agent) / 1024, OTHERS: sum(map(resident_kb, others)) / 1024}
        began_at = time.monotonic()
        os.kill(workers[1], signal.SIGKILL)
        for _ in range(2):
            _next(printed, name)
        return {UP: up_ms, BACK: (time.monotonic() - began_at) * 1000, **memory}


@contextlib.contextmanager
def _job(name: str) -> Iterator[tuple[int, queue.Queue[int]]]:
    """Run a job for a while; its agent's pid, and the pids that its workers print."""
    with tempfile.TemporaryDirectory() as place:
        script = Path(place) / "script.py"
        script.write_text(SCRIPT)
        program, *words = COMMANDS[name]
        path = str(Path(sys.executable).with_name(program))
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        agent = subprocess.Popen(
            [path, *words, *OPTIONS.split(), str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,  # the first job writes its bytecode
            start_new_session=True,
        )
        printed: queue.Queue[int] = queue.Queue()
        threading.Thread(target=_listen, args=(agent.stdout, printed), daemon=True).start()
        try:
            yield agent.pid, printed
        finally:
            stop(agent, LIMIT_S)


def _listen(stream: Any, printed: queue.Queue[int]) -> None:
    for line in stream:
        printed.put(int(line))


def _next(printed: queue.Queue[int], name: str) -> int:
    try:
        return printed.get(timeout=LIMIT_S)
    except queue.Empty:
        raise RuntimeError(f"{name}: a worker did not come within {LIMIT_S:.0f} s") from None


def _children(parent: int) -> list[int]:
    """Return the processes that a process has started."""
    tasks = Path(f"/proc/{parent}/task").iterdir()
    return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
