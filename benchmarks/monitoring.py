"""What it costs a worker to be watched: its start, and a call of `progress`."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.rig import PLACEMENTS, in_turn, pin, say
from benchmarks.startup import run_ms
from benchmarks.table import Line, Target
from rallypoint.launch.monitoring.worker_records import HOOK, WorkerRecords

TITLE = "Watched workers"
NOTES = (
    "On one core. *Start of Python*: `python -c pass` with the hook for stack dumps and with nothing, in turn. "
    "*progress*: one call of `rallypoint.worker().progress(step)`, the mean of 100,000, in a process with a record as "
    "`rallypoint run` makes it."
)
CALLS = 100_000
SCRIPT = f"""
import time, rallypoint
began_at = time.perf_counter()
for step in range({CALLS}):
    rallypoint.worker().progress(step)
print((time.perf_counter() - began_at) / {CALLS} * 1e6)
"""
TOLD = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE RALLYPOINT_SCOPE RALLYPOINT_ROUND TORCHELASTIC_RESTART_COUNT"
LAUNCHED = {
    **dict.fromkeys(TOLD.split(), "0"),
    "RALLYPOINT_URL": "memory://",
    "RALLYPOINT_RUN": "bench",
    "RALLYPOINT_NODE": "bench",
}


def run(quick: bool) -> list[Line]:
    """Measure starts, then calls."""
    pin(os.getpid(), PLACEMENTS[0].clients)
    rounds = 3 if quick else 40
    with tempfile.TemporaryDirectory() as place:
        tempfile.tempdir = place
        records = WorkerRecords(1)
        say("  start of Python")
        started = in_turn(["hooked", "bare"], rounds, lambda kind: _start_ms(records, kind == "hooked"))
        say("  progress")
        calls = [_progress_us(records, Path(place)) for _ in range(3 if quick else 9)]
        records.close()
        tempfile.tempdir = None
    where = PLACEMENTS[0].name
    return [
        Line("start of Python", where, "ms", started["hooked"], "without", started["bare"])._replace(
            target=Target(at_most=1.1)
        ),
        Line("progress", where, "us", calls)._replace(target=Target(at_most=2, unit="us")),
    ]


def _start_ms(records: WorkerRecords, hooked: bool) -> float:
    more = {**records.prepare(0), "PYTHONPATH": HOOK} if hooked else {}
    return statistics.fmean(run_ms([sys.executable, "-c", "pass"], more) for _ in range(5))


def _progress_us(records: WorkerRecords, place: Path) -> float:
    script = place / "calls.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, **LAUNCHED, **records.prepare(0)}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)
