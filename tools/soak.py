"""Run the seeded tests again and again, with fresh seeds each round, until the time is over or a round fails.

A round is one run of pytest over `SEEDED`: histories of real processes that must be linearizable, simulations with
random cuts and deaths, those of shared objects and of a store in etcd included, everything that hypothesis makes up,
jobs under the launcher whose workers are killed for a minute, a farm of workers that are killed every second, and
servers with a data directory that are killed a hundred times. Its seeds follow from one number, which is printed before
it starts. The first failure ends the soak, with the command that runs that round again.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SEEDED = (
    "tests/linearizability",
    "tests/durability",
    "tests/core",
    "tests/simulation/test_simulation.py",
    "tests/simulation/test_rendezvous.py",
    "tests/testing/test_simulate.py",
    "tests/conformance/test_machine.py",
    "tests/conformance/test_differential.py",
    "tests/filestore/test_follower.py",
    "tests/store/test_file.py::test_a_killed_writer_loses_no_acknowledged_write",
    "tests/store/test_file.py::test_a_process_killed_while_compacting_loses_nothing",
    "tests/launch/test_pi.py",
    "tests/interop/test_ddp_elastic.py",
    "tests/etcd/test_histories.py",
    "tests/faults/test_work_farm.py",
)
KILLING_S = 60
"""How long the workers of an example are killed, one by one."""


KILLS = 100
"""How often a server with a data directory is killed in each test of it."""


FARM_ITEMS = 10_000
"""How many items a farm of workers has, of which one is killed every second."""


SCHEDULES = 2000
"""How many schedules each simulation has, and how many histories are replayed."""


def replay(seed: int, histories: int, tests: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables and the command of the round with this first seed."""
    variables = {"FIRST_SEED": str(seed), "HISTORIES": str(histories), "KILLING_S": str(KILLING_S)}
    variables["SEEDS"] = variables["STATE_SEEDS"] = str(SCHEDULES)
    variables["KILLS"], variables["KILLED_HISTORIES"] = str(KILLS), str(histories)
    variables["FARM_ITEMS"], variables["FARM_KILL_S"] = str(FARM_ITEMS), "1"
    variables["REPLICATED_HISTORIES"] = str(histories)
    return variables, [sys.executable, "-m", "pytest", "-x", "-q", f"--hypothesis-seed={seed}", *tests]


def main() -> int:
    """Soak; return 1 at the first failure, 0 when the time is over."""
    parser = argparse.ArgumentParser(description="Run the seeded tests with fresh seeds until the time is over.")
    parser.add_argument("--hours", type=float, default=1.0, help="for how long; the round under way is finished")
    parser.add_argument("--histories", type=int, default=200, help="how many histories a round has")
    parser.add_argument("tests", nargs="*", default=list(SEEDED), help="what to run, instead of all seeded tests")
    told = parser.parse_args()
    ends_at = time.monotonic() + told.hours * 3600
    chance, rounds = random.SystemRandom(), 0
    while rounds == 0 or time.monotonic() < ends_at:
        rounds += 1
        seed = chance.randrange(1, 10**9)
        variables, command = replay(seed, told.histories, told.tests)
        print(f"soak: round {rounds}, first seed {seed}", flush=True)
        ended = subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, check=False).returncode
        if ended:
            shown = " ".join(f"{name}={value}" for name, value in variables.items())
            print(f"soak: round {rounds} failed; again: cd {ROOT} && {shown} {shlex.join(command)}", flush=True)
            return 1
    print(f"soak: {rounds} rounds in {told.hours:g} hours, no failure", flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
