"""Run the subjects that were asked for, or all; print their tables, record them in results.md, and write the pages."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import resource
import subprocess
import sys
import time
import traceback
from pathlib import Path

from benchmarks import (
    barrier,
    client,
    connect,
    durability,
    etcd,
    failover,
    heavy,
    launch,
    meeting,
    memory,
    monitoring,
    orientation,
    output,
    recovery,
    relay,
    rendezvous,
    round_trips,
    security,
    startup,
    status,
    throughput,
)
from benchmarks.pages import write_pages
from benchmarks.record import write_results
from benchmarks.rig import CORES, Missing, pin, say
from benchmarks.table import table

SUBJECTS = {
    "throughput": throughput,
    "barrier": barrier,
    "connect": connect,
    "client": client,
    "durability": durability,
    "heavy": heavy,
    "meeting": meeting,
    "memory": memory,
    "relay": relay,
    "rendezvous": rendezvous,
    "orientation": orientation,
    "recovery": recovery,
    "launch": launch,
    "monitoring": monitoring,
    "output": output,
    "round_trips": round_trips,
    "etcd": etcd,
    "failover": failover,
    "security": security,
    "startup": startup,
    "status": status,
}
ROOT = Path(__file__).resolve().parents[1]
BEFORE = "RALLYPOINT_BEFORE"
"""The variable that names a checkout of our own code to compare with."""


def main() -> int:
    """Measure; return 1 when a subject failed."""
    parser = argparse.ArgumentParser(prog="benchmarks", description="Measure rallypoint side by side with its peers.")
    parser.add_argument(
        "subjects", nargs="*", metavar="subject", help=f"of {', '.join(SUBJECTS)}; all if none is named"
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run: few and short slices; nothing is written")
    parser.add_argument("--pages", action="store_true", help="measure nothing; write the pages from results.md again")
    asked = parser.parse_args()
    if unknown := set(asked.subjects) - set(SUBJECTS):
        parser.error(f"no subject {', '.join(sorted(unknown))}; there are {', '.join(SUBJECTS)}")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    pin(os.getpid(), CORES[-1])

    measured, failed = {}, False
    for name in [] if asked.pages else asked.subjects or SUBJECTS:
        try:
            measured[SUBJECTS[name].TITLE] = measure(name, asked.quick)
        except Missing as missing:
            print(f"\n## {SUBJECTS[name].TITLE}\n\nNOT MEASURED: {missing}; its last results are kept.")
        except Exception as error:
            traceback.print_exc()
            failed = True
            print(f"\n## {SUBJECTS[name].TITLE}\n\nFAILED: {type(error).__name__}; its last results are kept.")
    if measured and not asked.quick:
        write_results(measured, [subject.TITLE for subject in SUBJECTS.values()])
    if asked.pages or not asked.quick:
        write_pages()
    return int(failed)


def measure(name: str, quick: bool) -> str:
    """Run one subject, print its section, and return it."""
    subject = SUBJECTS[name]
    say(f"{name}:")
    began_at, load = time.monotonic(), os.getloadavg()[0]
    found = table(subject.run(quick))
    section = f"{machine(time.monotonic() - began_at, load)}\n\n{found}\n\n{subject.NOTES}"
    print(f"\n## {subject.TITLE}\n\n{section}", flush=True)
    return section


def machine(took_s: float, load: float) -> str:
    """Say when, on what and with what it was measured, and how busy the machine was with other things."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    model = models[0].partition(":")[2].strip() if models else platform.machine()
    alone = ", ONE CORE ONLY: clients on a core of their own could not be measured" if len(CORES) == 1 else ""
    packages = ", ".join(version(name) for name in ("torch", "uvloop", "redis"))
    before = f"; `before` is commit {commit(Path(os.environ[BEFORE]))}" if BEFORE in os.environ else ""
    return (
        f"*Measured {time.strftime('%Y-%m-%d %H:%M')}, commit {commit(ROOT)}, in {took_s:.0f} s, on {len(CORES)} "
        f"core{'s' * (len(CORES) > 1)} of {model}{alone}, Linux {platform.release()}, "
        f"Python {platform.python_version()}, {packages}{before}; load before it {load:.1f}.*"
    )


def commit(checkout: Path) -> str:
    """Return the commit of a checkout, with a plus sign if files were changed; "unknown" without git."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty=+", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def version(name: str) -> str:
    """Return a package's name and version."""
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {name}"


if __name__ == "__main__":
    sys.exit(main())
