"""Where the files of one agent's workers are: torchrun's layout, in a directory that no other run or node has.

    LOG_DIR/failure.json                                    why the last run failed that did
    LOG_DIR/RUN_RANDOM/attempt_N/LOCAL_RANK/stdout.log      beside it stderr.log, and error.json if the script wrote one

Where files are wanted and no LOG_DIR is named, one is made among the temporary files, and kept. Where none are wanted,
error.json still needs a place: a scratch directory, which goes with the agent. Its name is chosen, then told to the
warden, and only then is it made, so that it also goes with an agent that is killed.
"""

from __future__ import annotations

import re
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rallypoint.elastic import failure
from rallypoint.elastic.events import Events
from rallypoint.elastic.failure import Failure
from rallypoint.elastic.job import Job
from rallypoint.elastic.routes import parse_std, worker_dir

__all__ = ["Logs"]

PREFIX = "rallypoint-"
MAX_NAME = 100
"""How much of a run's name its directory has; a file system takes 255 bytes."""


class Logs:
    """The directory of one agent. It is made when the first worker starts, and said then if it is to stay."""

    def __init__(self, job: Job, events: Events) -> None:
        redirects, tee = parse_std(job.redirects), parse_std(job.tee)
        wanted = any(redirects[local] | tee[local] for local in range(job.workers))
        self._run = re.sub(r"[^A-Za-z0-9._-]", "_", job.run_id).lstrip(".")[:MAX_NAME]
        self._events = events
        self._named = bool(job.log_dir)
        self._root = Path(job.log_dir).absolute() if job.log_dir else None
        self._directory: Path | None = None
        self.scratch = None if job.log_dir or wanted else Path(tempfile.gettempdir(), f"{PREFIX}{secrets.token_hex(8)}")
        """What goes with the agent, whether it has been made or not."""

    def of(self, attempt: int, local_rank: int) -> Path:
        """Return the directory of one worker, which is there; raises OSError where it cannot be made."""
        if self._directory is None:
            self._directory = self._make()
        directory = worker_dir(self._directory, attempt, local_rank)
        directory.mkdir(parents=True)
        return directory

    def record(self, first: Failure, others: Sequence[Failure]) -> None:
        """Write failure.json, if there is a place for it."""
        if self._root is not None:
            try:
                failure.write(self._root, first, others)
            except OSError as error:
                self._events.fail("error", f"failure.json cannot be written: {error}")

    def close(self) -> None:
        """Remove what was not to stay."""
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def _make(self) -> Path:
        if self.scratch is not None:
            self.scratch.mkdir(mode=0o700)
            return self.scratch
        self._root = self._root or Path(tempfile.mkdtemp(prefix=PREFIX))
        self._root.mkdir(parents=True, exist_ok=True)
        made = tempfile.mkdtemp(prefix=f"{self._run}_", dir=self._root)
        words = f"the files of the workers are in {made}"
        self._events.say("logs", words, to_people=not self._named, directory=made)
        return Path(made)
