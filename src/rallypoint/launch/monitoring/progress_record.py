"""A worker's end of its record (worker_records.py), to which `progress` writes; workers import it, so it is small."""

from __future__ import annotations

import contextlib
import mmap

from rallypoint.core.policy.stop_policy import NONE

__all__ = ["MONITOR_VARIABLE", "PROGRESS_AT", "RECORD_BYTES", "STEP", "STOP_NUMBERS", "ProgressWriter"]

MONITOR_VARIABLE = "RALLYPOINT_MONITOR"
"""Environment variable with the location of a worker's record."""

RECORD_BYTES = 128
"""The size of a record."""

STOP_NUMBERS = 8, 13
"""The numbers of a record that belong to the agreement on a step to stop at (preemption/stop_record.py)."""

STEP = 0
"""Index of the last step in a record's numbers."""

PROGRESS_AT = 1
"""Index of the time of the last progress in a record's numbers."""


class ProgressWriter:
    """A worker's end of its record; its writes have no effect if there is no record."""

    def __init__(self, variable: str) -> None:
        directory, _, local_rank = variable.rpartition("/")
        self.numbers = memoryview(bytearray(RECORD_BYTES)).cast("q")
        """The record: a call of `progress` costs only two assignments."""

        for index in range(*STOP_NUMBERS):
            self.numbers[index] = NONE

        with contextlib.suppress(OSError, ValueError), open(f"{directory}/records", "rb+") as file:
            start = int(local_rank) * RECORD_BYTES
            shared = mmap.mmap(file.fileno(), 0)
            self.numbers = memoryview(shared)[start : start + RECORD_BYTES].cast("q")
