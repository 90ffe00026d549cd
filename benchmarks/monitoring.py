"""What it costs a job to be watched: its start, the start of a worker, the worker's speed, and a call of `progress`."""

from __future__ import annotations

import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.rig import PLACEMENTS, in_turn, pin, say
from benchmarks.startup import run_ms
from benchmarks.table import Line, Target
from rallypoint.launch.monitoring.worker_records import HOOK, WorkerRecords, directory_name
from rallypoint.process.supervisor import stop

TITLE = "Watched workers"
NOTES = (
    "On one core, in turn. *Job up*: from `rallypoint run --nproc-per-node 2` until both workers have printed a line; "
    "with hang detection, a limit on restarts in vain, agents watched and workers registered for stack dumps, and with "
    "none of it (only the agent's reports have no switch). *Work*: processor time of a worker of either job for the "
    "same loop. *Start of Python*: `python -c pass` with the hook for stack dumps and with nothing. *progress*: "
    "processor time of one call of `rallypoint.worker().progress(step)`, the mean of 100,000, in a process with a "
    "record as `rallypoint run` makes it."
)
CALLS = 100_000
SCRIPT = f"""
import time, rallypoint
began_at = time.process_time()
for step in range({CALLS}):
    rallypoint.worker().progress(step)
print((time.process_time() - began_at) / {CALLS} * 1e6)
"""
JOB = """
import time
began_at = time.process_time()
sum(step * step for step in range(300_000))
print("up", 1000 * (time.process_time() - began_at), flush=True)
time.sleep(600)
"""
WATCHING = ["--hang-timeout", "600", "--no-progress-limit", "3", "--agent-timeout", "5"]
LIMIT_S = 60.0
TOLD = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE RALLYPOINT_SCOPE RALLYPOINT_ROUND TORCHELASTIC_RESTART_COUNT"
LAUNCHED = {
    **dict.fromkeys(TOLD.split(), "0"),
    "RALLYPOINT_URL": "memory://",
    "RALLYPOINT_RUN": "bench",
    "RALLYPOINT_NODE": "bench",
    "RALLYPOINT_NODE_ADDR": "127.0.0.1",
    "RALLYPOINT_RANK0_ADDR": "127.0.0.1",
}


def run(quick: bool) -> list[Line]:
    """Measure starts, then calls."""
    pin(os.getpid(), PLACEMENTS[0].clients)
    rounds = 3 if quick else 40
    with tempfile.TemporaryDirectory() as place:
        tempfile.tempdir = place
        records = WorkerRecords(1)
        say("  a job")
        worked: dict[str, list[float]] = {"watched": [], "alone": []}
        up = in_turn(list(worked), 2 if quick else 20, functools.partial(_up_ms, Path(place), worked))
        say("  start of Python")
        started = in_turn(["hooked", "bare"], rounds, lambda kind: _start_ms(records, kind == "hooked"))
        say("  progress")
        calls = [_progress_us(records, Path(place)) for _ in range(3 if quick else 9)]
        records.close()
        tempfile.tempdir = None
    where = PLACEMENTS[0].name
    return [
        Line("job up", where, "ms", up["watched"], "alone", up["alone"], Target(at_most=1.1)),
        Line("work", where, "ms", worked["watched"], "alone", worked["alone"]),
        Line("start of Python", where, "ms", started["hooked"], "without", started["bare"])._replace(
            target=Target(at_most=1.1)
        ),
        Line("progress", where, "us", calls)._replace(target=Target(at_most=2, unit="us")),
    ]


def _up_ms(place: Path, worked: dict[str, list[float]], kind: str) -> float:
    """Start a job, watched or alone, and end it; return how long it took to come up, and note its workers' speed."""
    script, unusable = place / "job.py", place / "alone" / directory_name(os.geteuid())
    script.write_text(JOB)
    unusable.mkdir(parents=True, exist_ok=True)
    unusable.chmod(0o755)  # not private: an agent with this TMPDIR has no records, and its workers no hook
    options = WATCHING if kind == "watched" else ["--agent-timeout", "0"]
    command = [str(Path(sys.executable).with_name("rallypoint")), "run", "--nproc-per-node", "2", *options, str(script)]
    environment = {**os.environ, "TMPDIR": str(place if kind == "watched" else unusable.parent)}
    began_at = time.monotonic()
    agent = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert agent.stdout is not None
        lines = [agent.stdout.readline() for _ in range(2)]
        took_ms = 1000 * (time.monotonic() - began_at)
    finally:
        stop(agent, LIMIT_S)
    worked[kind].append(statistics.fmean(float(line.split()[1]) for line in lines))
    return took_ms


def _start_ms(records: WorkerRecords, hooked: bool) -> float:
    more = {**records.prepare(0), "PYTHONPATH": HOOK} if hooked else {}
    return statistics.fmean(run_ms([sys.executable, "-c", "pass"], more) for _ in range(5))


def _progress_us(records: WorkerRecords, place: Path) -> float:
    script = place / "calls.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, **LAUNCHED, **records.prepare(0)}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)
