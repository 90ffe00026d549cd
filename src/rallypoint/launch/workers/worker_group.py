"""The worker group: starts, watches and stops the workers of one node, and collects their failures."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import selectors
import signal
import socket
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path

from rallypoint.core.policy.restart_policy import WorkerExit
from rallypoint.deadline import Deadline
from rallypoint.launch.failures import Failure, earliest, failure_of
from rallypoint.launch.job import Job
from rallypoint.launch.monitoring.stack_dump import STOPPED, process_state
from rallypoint.launch.monitoring.worker_records import AgentEntry, WorkerEntry, WorkerRecords, with_hook
from rallypoint.launch.output.log_files import LogFiles
from rallypoint.launch.output.pump import WorkerStreams
from rallypoint.launch.output.worker_output import WorkerOutput
from rallypoint.launch.round_spec import SIGNALS, RoundSpec, environment, virtual_local_rank
from rallypoint.launch.signal_names import ENDING_SIGNALS
from rallypoint.launch.workers.orphan_reaper import OrphanReaper
from rallypoint.launch.workers.worker_process import WorkerProcess, WorkerUnstartable, describe_exit
from rallypoint.readiness import wait_readable

__all__ = ["WorkerGroup"]

NOT_EXECUTABLE, NOT_FOUND = 126, 127
CHECK_S = 0.5
"""How often a stop checks for a second interrupt, in case it missed the wakeup."""


class WorkerGroup:
    """The workers of one agent, by global rank. `wakeup_fd` becomes readable to wake the agent.

    `on_start` is called after each start, with the round, the rank and the process id.
    """

    def __init__(
        self,
        job: Job,
        logs: LogFiles,
        wakeup_fd: int,
        on_start: Callable[[RoundSpec, int, int], object] = lambda spec, rank, pid: None,
    ) -> None:
        self._job = job
        self._on_start = on_start
        self._logs = logs
        self._wakeup_fd = wakeup_fd
        self.records = WorkerRecords(job.workers)
        """What the workers tell this agent while they run."""

        self.reaper = OrphanReaper(logs.scratch, self.records.directory)
        """Kills what this agent has started, if the agent dies."""

        self._output = WorkerOutput(job, logs)
        self._workers: dict[int, tuple[WorkerProcess, WorkerStreams, Path]] = {}
        self._exits = selectors.DefaultSelector()
        """Descriptors that signal the exit of a worker; on Linux they become ready in the order of the exits."""

        self._exits.register(wakeup_fd, selectors.EVENT_READ)
        self._ended: list[int] = []
        """Ranks that have exited and were not yielded yet."""

        self._starts: Counter[int] = Counter()
        self._round: RoundSpec
        self.entries: tuple[WorkerEntry, ...] = ()
        """The workers that were started and not stopped since; other threads may read it."""

    def enter_round(self, spec: RoundSpec) -> None:
        """Switch to a round; call it while no worker runs."""
        self._round = spec
        self._starts.clear()

    def restarted(self, restarts: int) -> None:
        """Set the number of used restarts, for the workers started next."""
        self._round = self._round._replace(restarts=restarts)

    def start(self, ranks: Sequence[int]) -> Failure | None:
        """Start workers; return the failure of one that cannot be started, or None."""
        self._output.begin(self._round)
        problem = self._job.command.problem(self._job.environment)
        if problem is not None:  # otherwise every start of Python would fail, and use a restart
            why = problem.strerror or str(problem)
            unstartable = WorkerUnstartable(command=[self._job.command.what], why=why)
            unstartable.__cause__ = problem
            return self._unstartable(ranks[0], unstartable)
        for rank in ranks:
            try:
                self._start(rank)
            except (WorkerUnstartable, OSError) as error:
                return self._unstartable(rank, error)
        self._publish()
        return None

    def _publish(self) -> None:
        """Publish which workers there are, for this agent's reports and for commands on this machine."""
        self.entries = tuple(
            self.records.entry(rank, rank - self._round.first, worker.pid)
            for rank, (worker, _, _) in sorted(self._workers.items())
        )
        spec = self._round
        own = "" if self._job.credentials.token else spec.credentials.run_token  # made for this run
        self.records.publish(AgentEntry(spec.run_id, spec.node, os.getpid(), self.entries, spec.url), own)

    def restarts_of(self, rank: int) -> int:
        """Return how often a worker was started again in this round."""
        return max(0, self._starts[rank] - 1)

    def exit_code(self, rank: int) -> int | None:
        """Return the exit code of a worker, None while it runs."""
        return self._workers[rank][0].poll()

    def _start(self, rank: int) -> None:
        local, spec = rank - self._round.first, self._round
        streams, errors = self._output.open(spec, rank)
        worker = WorkerProcess(
            self._job.command.argv(),
            self._environment(rank, str(errors)),
            f"{spec.node}:{rank}",
            streams.stdout,
            streams.stderr,
            self.reaper,
            None if self._job.cpus is None else self._job.cpus[local],
        )
        try:
            worker.start()
        finally:
            streams.started()
        self._workers[rank] = (worker, streams, errors)
        self._starts[rank] += 1
        self._exits.register(worker.fileno(), selectors.EVENT_READ, rank)
        self._on_start(spec, rank, worker.pid)

    def _environment(self, rank: int, error_file: str) -> dict[str, str]:
        local, job = rank - self._round.first, self._job
        variables = environment(self._round, rank, job.environment, error_file)
        virtual = virtual_local_rank(local, variables) if job.virtual_local_rank else {}
        signals = {} if job.signals == ENDING_SIGNALS else {SIGNALS: ",".join(job.signals)}
        width = {} if variables.get("COLUMNS") else self._output.variables(self._round, rank)
        return with_hook({**variables, **width, **virtual, **signals, **self.records.prepare(local)})

    def wait(self, timeout_s: float) -> None:
        """Wait until a worker exits, the agent is woken, or the timeout."""
        for key, _ in self._exits.select(timeout_s):
            if key.data is not None:
                self._exits.unregister(key.fd)  # once: else the order of exits would be lost
                self._ended.append(key.data)

    def exits(self) -> Iterator[WorkerExit]:
        """Yield each worker that has exited, once; skip those stopped or restarted meanwhile."""
        self.wait(0.0)
        while self._ended:
            rank = self._ended.pop(0)
            worker = self._workers[rank][0]
            code = worker.poll()
            assert code is not None
            yield WorkerExit(rank, code, describe_exit(code), worker.uptime_s)

    def signal(self, number: int) -> None:
        """Send a signal to all workers and their process groups."""
        for worker, _, _ in self._workers.values():
            worker.signal(number)

    def kill(self, ranks: Collection[int]) -> None:
        """Kill workers that do not react to anything else; their exits are seen as those of others."""
        for rank in self._workers.keys() & set(ranks):
            self._workers[rank][0].kill()

    def uptime_s(self, rank: int) -> float:
        """Return how long a worker has run; 0 if it is not one of this node."""
        return self._workers[rank][0].uptime_s if rank in self._workers else 0.0

    def save_stacks(self, text: str) -> str:
        """Write the stacks of all ranks to the log directory, if there is one; return the path, else empty."""
        return self._logs.save("stacks.txt", text)

    def stop(self, ranks: Sequence[int] | None, signum: int, deadline: Deadline, must_kill: Callable[[], bool]) -> None:
        """Signal workers, kill those left at the deadline or once `must_kill` returns true, and forget them all."""
        stopped = [rank for rank in self._workers if ranks is None or rank in ranks]
        running = [self._workers[rank][0] for rank in stopped if self._workers[rank][0].poll() is None]
        for worker in running:
            worker.signal(signal.SIGKILL if process_state(worker.pid) in STOPPED else signum)  # it would not react
        while running and not deadline.expired() and not must_kill():
            descriptors = [self._wakeup_fd, *(worker.fileno() for worker in running)]
            wait_readable(*descriptors, timeout_s=min(deadline.remaining(), CHECK_S))
            running = [worker for worker in running if worker.poll() is None]
        for rank in stopped:
            self._workers[rank][0].kill()
        self._ended = [rank for rank in self._ended if rank not in stopped]
        for rank in stopped:
            worker, streams, _ = self._workers.pop(rank)
            with contextlib.suppress(KeyError):  # its exit was seen
                self._exits.unregister(worker.fileno())
            worker.close()
            streams.finish()
        if stopped:
            self._publish()

    def failures(self, rank: int, code: int) -> list[Failure]:
        """Return the failure of a worker, and of others that recorded an error; the earliest comes last."""
        ended = self.failure(rank, code)
        ends = {other: worker.poll() for other, (worker, _, errors) in self._workers.items() if errors.exists()}
        others = [self.failure(other, end) for other, end in ends.items() if other != rank and end != 0]
        first = earliest(ended, others)
        return [*(other for other in (ended, *others) if other.recorded_at and other is not first), first]

    def failure(self, rank: int, code: int | None) -> Failure:
        """Return the failure of a worker; `code` is None if it recorded an error and still runs."""
        worker, streams, errors = self._workers[rank]
        if code is not None:
            streams.finish()
        return failure_of(
            node=self._round.node,
            host=socket.gethostname(),
            rank=rank,
            local_rank=rank - self._round.first,
            pid=worker.pid,
            code=code,
            at=datetime.now(timezone.utc),
            error_file=errors,
            stderr=streams.tail(),
        )

    def say(self, line: str) -> None:
        """Show a line of the agent between the lines of workers."""
        self._output.say(line)

    def close(self) -> None:
        """Kill all remaining workers, and release all resources."""
        self.stop(None, signal.SIGKILL, Deadline(0.0), lambda: True)
        self._output.close()
        self._exits.close()
        self.reaper.close()
        self.records.close()

    def _unstartable(self, rank: int, error: Exception) -> Failure:
        """Return the failure of a worker that could not be started, with the exit code a shell would use."""
        return Failure(
            node=self._round.node,
            host=socket.gethostname(),
            rank=rank,
            local_rank=rank - self._round.first,
            pid=0,
            code=NOT_FOUND if isinstance(error.__cause__, FileNotFoundError) else NOT_EXECUTABLE,
            how="not started",
            at=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            message=_why_not(error, len(self._workers)),
        )


def _why_not(error: Exception, before: int) -> str:
    """Return why a worker could not be started, after `before` others."""
    cause = error if isinstance(error, OSError) else error.__cause__
    number = cause.errno if isinstance(cause, OSError) else None
    if number in (errno.EMFILE, errno.ENFILE):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return (
            f"cannot start the worker beside {before} others: this agent may open {limit} descriptors, and each worker "
            f"takes a few. Raise the limit (ulimit -n), or start fewer workers"
        )
    if number == errno.E2BIG:
        return "cannot start the worker: its arguments and environment exceed the limit of this system"
    if not isinstance(error, OSError):
        return str(error)
    place = f" at {error.filename}" if error.filename else ""
    return f"cannot create the worker's files: {error.strerror}{place}"
