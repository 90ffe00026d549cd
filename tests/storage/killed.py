"""A program that is killed at every step: `python -m tests.storage.killed SCENARIO TEMPLATE COUNT WORK`.

For each k it copies the directory TEMPLATE, a log with COUNT records, to WORK/k, forks, and runs the scenario there in
the child, which kills itself with SIGKILL at the k-th step: just before the k-th call that changes a file, or half-way
through it if that is a write (in whole sectors: the kernel checks for signals between pages). For each k it prints the
call in which the child died and the number of records acknowledged before; it stops at the first k that the scenario
survives. A fork is cheap and has no threads: the scenario starts its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.storage import logs
from tests.storage.kernels import FdatasyncKernel
from tests.storage.logs import FOLD, commit, opened

from rallypoint.storage.file import log_writer
from rallypoint.storage.file.compaction import CompactionJob, compact
from rallypoint.storage.file.directory import list_directory, temporary_path
from rallypoint.storage.file.segment import SECTOR_BYTES

CALLS = ("open", "pwrite", "fsync", "fdatasync", "rename", "unlink", "ftruncate", "posix_fallocate")
OPTIONS: dict[str, Any] = {"segment_bytes": 3000, "preallocate_bytes": 4096}
RECORDS = [b"%d" % index * 800 for index in range(12)]
"""The records that every scenario commits one by one, after those of the template."""


class Killer:
    """Kills this process at one step; in a write, after the first half."""

    def __init__(self, step: int, acknowledged: int, report: int) -> None:
        self.left, self.acknowledged, self.report = step, acknowledged, report
        for name in CALLS:
            setattr(os, name, self._watched(name, getattr(os, name)))

    def _watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if name != "open" or args[1] & os.O_CREAT:
                self.left -= 1
                if self.left == 0:
                    if name == "pwrite":
                        real(args[0], args[1][: len(args[1]) // 2 // SECTOR_BYTES * SECTOR_BYTES], args[2])
                    self.die(name)
            return real(*args)

        return call

    def die(self, name: str) -> None:
        os.write(self.report, json.dumps([name, self.acknowledged]).encode())
        os.kill(os.getpid(), signal.SIGKILL)


def save(directory: Path, killer: Killer) -> None:
    """Recover, commit a few records, save, commit one more, and close."""
    storage, _ = opened(directory, **OPTIONS)
    for record in RECORDS[killer.acknowledged : -1]:
        commit(storage, record)
        killer.acknowledged += 1
    storage.save(RECORDS[:-1])
    commit(storage, RECORDS[-1])
    killer.acknowledged += 1
    storage.close()


def save_attached(directory: Path, killer: Killer) -> None:
    """The same with small batches synced by the kernel."""
    vars(log_writer)["KernelSync"] = FdatasyncKernel
    logs.LOOP = asyncio.new_event_loop()
    save(directory, killer)


def fold(directory: Path, killer: Killer) -> None:
    """Act as the child process of a compaction."""
    listing = list_directory(str(directory))
    covers = listing.segments[-1] - 1
    snapshot = listing.snapshots[-1] if listing.snapshots else None
    compact(CompactionJob(str(directory), snapshot, covers, FOLD, temporary_path(str(directory), covers), os.getppid()))


SCENARIOS = {"save": save, "save_attached": save_attached, "fold": fold}


def main(scenario: str, template: str, count: str, work: str) -> None:
    steps, code = 0, -1
    while code:
        steps += 1
        directory = Path(work) / str(steps)
        shutil.copytree(template, directory)
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                SCENARIOS[scenario](directory, Killer(steps, int(count), writer))
                os._exit(0)
            finally:
                os._exit(1)  # an error, which has been printed
        os.close(writer)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with os.fdopen(reader) as report:
            print(report.read() or json.dumps(["survived", int(count) if scenario == "fold" else len(RECORDS)]))
        assert code in (0, -signal.SIGKILL), f"the scenario failed at step {steps}"


if __name__ == "__main__":
    main(*sys.argv[1:])
