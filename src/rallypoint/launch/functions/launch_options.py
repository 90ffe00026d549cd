"""The options of `rallypoint.launch`, and the job that they make for its agent."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping

import msgspec

from rallypoint.core.policy.restart_policy import RestartRules
from rallypoint.deadline import Timeout, seconds
from rallypoint.launch.job import Job, WorkerCommand, workers_here
from rallypoint.security.credentials import resolve

__all__ = ["LaunchOptions"]

MAX_GRACE_S = 86400.0


class LaunchOptions(msgspec.Struct, frozen=True):
    """The options of `launch`, checked; the caller sends them to its agent."""

    workers: int
    timeout_s: float | None
    max_restarts: int
    restart: str
    environment: dict[str, str]
    grace_s: float
    log_dir: str | None

    @classmethod
    def of(
        cls,
        nproc: int | str,
        timeout: Timeout | None,
        max_restarts: int,
        restart: str,
        env: Mapping[str, str] | None,
        grace: Timeout,
        log_dir: str | os.PathLike[str] | None,
    ) -> LaunchOptions:
        """Check the options; raise TypeError or ValueError that names the option."""
        if isinstance(max_restarts, bool) or not isinstance(max_restarts, int) or max_restarts < 0:
            raise ValueError(f"max_restarts must be a number of restarts, 0 or more, not {max_restarts!r}")
        if restart not in ("group", "node", "worker"):
            raise ValueError(f"restart must be 'group', 'node' or 'worker', not {restart!r}")
        environment = dict(env or {})
        for name, value in environment.items():
            if not isinstance(name, str) or not isinstance(value, str) or "\0" in name + value or "=" in name:
                raise ValueError(f"env must map names of variables to strings: {name!r} is {value!r}")
        try:
            workers = workers_here(str(nproc))
        except ValueError as error:
            raise ValueError(f"nproc: {error}") from None
        grace_s = seconds(grace, "grace")
        if grace_s > MAX_GRACE_S:
            raise ValueError(f"grace must be at most {MAX_GRACE_S:g} s, got {grace_s:g} s")
        resolve()  # the agent uses the same credentials: an error is raised here
        return cls(
            workers,
            None if timeout is None or (timeout_s := seconds(timeout)) == float("inf") else timeout_s,
            max_restarts,
            restart,
            environment,
            grace_s,
            None if log_dir is None else os.path.abspath(os.fspath(log_dir)),
        )

    def job(self, command: WorkerCommand) -> Job:
        """Return the job of the agent: one node, with a private server, and the credentials of the environment."""
        return Job(
            command=command,
            workers=self.workers,
            run_id=uuid.uuid4().hex,
            credentials=resolve(),
            rules=RestartRules(restart=self.restart, budget=self.max_restarts),
            grace_s=self.grace_s,
            log_dir=self.log_dir,
            redirects="0" if self.log_dir is None else "3",
            environment=self.environment,
        )
