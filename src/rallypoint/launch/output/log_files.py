"""The files of one agent's workers: torchrun's layout, in a directory of their own for each run and node.

    LOG_DIR/failure.json                                    the failure of the last failed run
    LOG_DIR/RUN_RANDOM/attempt_N/LOCAL_RANK/stdout.log      also stderr.log, and error.json if the script wrote one
    LOG_DIR/RUN_RANDOM/attempt_N/filtered_stdout.log        lines of --duplicate-stdout-filters
    LOG_DIR/RUN_RANDOM/attempt_N/stacks.txt                 the stacks of all ranks, after a hang

N is the number of used restarts, as with torchrun. Workers also start again without a restart, when a node joins or
leaves. torchrun then removes the files of attempt N; here the new ones are in `attempt_N.1`, and so on.

Without LOG_DIR, output that goes to files is in a temporary directory, which is kept. If no output goes to files,
error.json still needs a directory: a scratch directory, removed when the agent exits. Its name is chosen first and
passed to the orphan reaper, and the directory is created after that, so that it is removed even if the agent is
killed.
"""

from __future__ import annotations

import re
import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rallypoint.launch import failures
from rallypoint.launch.events import Events
from rallypoint.launch.failures import Failure
from rallypoint.launch.job import Job
from rallypoint.launch.output.routes import parse_std, worker_dir

__all__ = ["LogFiles"]

PREFIX = "rallypoint-"
MAX_NAME = 100
"""Limit of the run's id in a directory name; file systems allow 255 bytes."""


class LogFiles:
    """The directory of one agent, created when the first worker starts, and reported if it is kept."""

    def __init__(self, job: Job, events: Events) -> None:
        redirects, tee = parse_std(job.redirects), parse_std(job.tee)
        wanted = any(redirects[local] | tee[local] for local in range(job.workers))
        self._run = re.sub(r"[^A-Za-z0-9._-]", "_", job.run_id).lstrip(".")[:MAX_NAME]
        self._events = events
        self._is_given = bool(job.log_dir)
        self._root = Path(job.log_dir).absolute() if job.log_dir else None
        self._directory: Path | None = None
        self._begun: Counter[int] = Counter()
        self._attempt = ""
        is_kept = not job.output.logs_specs and bool(job.log_dir or wanted)
        self.scratch = None if is_kept else Path(tempfile.gettempdir(), f"{PREFIX}{secrets.token_hex(8)}")
        """Directory to remove when the agent exits; it may not exist yet."""

    def begin(self, restarts: int) -> None:
        """Begin an attempt, after so many restarts of the job."""
        again = self._begun[restarts]
        self._attempt = f"{restarts}.{again}" if again else str(restarts)
        self._begun[restarts] += 1

    def of(self, local_rank: int) -> Path:
        """Create and return the directory of one worker in this attempt; raise OSError if that fails."""
        if self._directory is None:
            self._directory = self._make()
        directory = worker_dir(self._directory, self._attempt, local_rank)
        directory.mkdir(parents=True)
        return directory

    def save(self, name: str, text: str) -> str:
        """Write a file of this attempt, if there is a log directory; return its path, else empty."""
        if self.scratch is not None or self._directory is None:
            return ""
        path = worker_dir(self._directory, self._attempt, 0).parent / name
        try:
            path.write_text(text)
        except OSError as error:
            self._events.fail("error", f"cannot write {name}: {error}")
            return ""
        return str(path)

    def record(self, first: Failure, others: Sequence[Failure]) -> None:
        """Write failure.json, if there is a log directory."""
        if self._root is not None:
            try:
                failures.write(self._root, first, others)
            except OSError as error:
                self._events.fail("error", f"cannot write failure.json: {error}")

    def close(self) -> None:
        """Remove the scratch directory."""
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def _make(self) -> Path:
        if self.scratch is not None:
            self.scratch.mkdir(mode=0o700)
            return self.scratch
        self._root = self._root or Path(tempfile.mkdtemp(prefix=PREFIX))
        self._root.mkdir(parents=True, exist_ok=True)
        created = tempfile.mkdtemp(prefix=f"{self._run}_", dir=self._root)
        message = f"output of the workers is in {created}"
        self._events.say("logs", message, as_text=not self._is_given, directory=created)
        return Path(created)
