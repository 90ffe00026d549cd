"""Run the subjects that were asked for, or all; print their tables, and write them to results.md beside this file."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import resource
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
RESULTS = Path(__file__).with_name("results.md")
READING = (
    "A figure is a median, with its quartiles in brackets. Ours and the peer run side by side and are measured in "
    "turn, in short slices. The ratio is ours / theirs: *of medians*, and *of slices*, the median of the ratios of "
    "adjacent slices, which decides. *One core*: servers and clients share it. *Two cores*: the servers have one, the "
    "clients the other."
)


def main() -> int:
    """Measure; return 1 when a subject failed."""
    parser = argparse.ArgumentParser(prog="benchmarks", description="Measure rallypoint side by side with its peers.")
    parser.add_argument(
        "subjects", nargs="*", metavar="subject", help=f"of {', '.join(SUBJECTS)}; all if none is named"
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run: few and short slices, figures of no worth")
    asked = parser.parse_args()
    if unknown := set(asked.subjects) - set(SUBJECTS):
        parser.error(f"no subject {', '.join(sorted(unknown))}; there are {', '.join(SUBJECTS)}")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    pin(os.getpid(), CORES[-1])

    began_at, load = time.monotonic(), os.getloadavg()[0]
    parts, failed = [], False
    for name in asked.subjects or SUBJECTS:
        try:
            parts.append(measure(name, asked.quick))
        except Exception as error:
            traceback.print_exc()
            failed = True
            parts.append(f"## {SUBJECTS[name].TITLE}\n\nFAILED: {type(error).__name__}.")
        print(f"\n{parts[-1]}", flush=True)
    facts = machine(time.monotonic() - began_at, load, asked.quick)
    print(f"\n{facts}")
    RESULTS.write_text("\n\n".join(["# Side by side", facts, READING, *parts]) + "\n", encoding="utf-8")
    return int(failed)


def measure(name: str, quick: bool) -> str:
    """Run one subject; return its section."""
    subject = SUBJECTS[name]
    say(f"{name}:")
    try:
        return f"## {subject.TITLE}\n\n{table(subject.run(quick))}\n\n{subject.NOTES}"
    except Missing as missing:
        return f"## {subject.TITLE}\n\nNOT MEASURED: {missing}."


def machine(took_s: float, load: float, quick: bool) -> str:
    """Say when, on what and with what it was measured, and how busy the machine was with other things."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    model = models[0].partition(":")[2].strip() if models else platform.machine()
    facts = [
        f"{time.strftime('%Y-%m-%d %H:%M')}, in {took_s:.0f} s"
        + (" (a quick run: the figures are of no worth)" if quick else ""),
        f"{len(CORES)} core{'s' * (len(CORES) > 1)} of {model}, Linux {platform.release()}",
        f"Python {platform.python_version()}, " + ", ".join(version(name) for name in ("torch", "uvloop", "redis")),
        f"load before the run {load:.1f} (above 0.5, others were at work: look at the quartiles)",
    ]
    if len(CORES) == 1:
        facts.append("ONE CORE ONLY: clients on a core of their own could not be measured")
    return "\n".join(f"- {fact}" for fact in facts)


def version(name: str) -> str:
    """Return a package's name and version."""
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {name}"


if __name__ == "__main__":
    sys.exit(main())
