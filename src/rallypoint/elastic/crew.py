"""The workers of one node in one round: started, waited for, stopped, and asked what they died of."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import selectors
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from string import Template

from rallypoint.core.gang import Exit
from rallypoint.deadline import Deadline
from rallypoint.elastic.failure import Failure, earliest, failure_of
from rallypoint.elastic.job import Job
from rallypoint.elastic.logs import Logs
from rallypoint.elastic.output import Feed, Pump, Std, parse_std, route
from rallypoint.elastic.warden import Warden
from rallypoint.elastic.workers import Worker, WorkerUnstartable, describe_exit
from rallypoint.elastic.world import World, environment

__all__ = ["Crew"]

NOT_EXECUTABLE, NOT_FOUND = 126, 127
SLICE_S = 0.5
"""How long a stop waits before it looks whether it was interrupted again, should the bell have been missed."""


class Crew:
    """All workers that this agent has, by global rank. `bell` is readable when there is other news."""

    def __init__(self, job: Job, logs: Logs, bell: int) -> None:
        self._job = job
        self._logs = logs
        self._bell = bell
        self._redirects, self._tee = parse_std(job.redirects), parse_std(job.tee)
        self._prefix = os.isatty(1)
        self._warden = Warden(logs.scratch)
        self._pump = Pump()
        self._workers: dict[int, tuple[Worker, Feed, Path]] = {}
        self._exits = selectors.DefaultSelector()
        """What tells of the end of a worker; those that have ended come in the order of their ends, on Linux."""

        self._exits.register(bell, selectors.EVENT_READ)
        self._ended: list[int] = []
        """The ranks whose end was seen, and not told yet."""

        self._attempt = -1
        self._world: World

    def enter(self, world: World) -> None:
        """Take the place of this round; no worker runs."""
        self._world = world

    def restarted(self, restarts: int) -> None:
        """Note how many restarts the job has used, for those who are started next."""
        self._world = self._world._replace(restarts=restarts)

    def start(self, ranks: Sequence[int]) -> Failure | None:
        """Start workers; return what is known of one that cannot be started at all."""
        self._attempt += 1
        problem = self._job.command.problem(self._job.environment)
        if problem is not None:  # each start of Python would find that out, and use up a restart
            why = problem.strerror or str(problem)
            unstartable = WorkerUnstartable(command=[self._job.command.what], why=why)
            unstartable.__cause__ = problem
            return self._unstartable(ranks[0], unstartable)
        for rank in ranks:
            try:
                self._start(rank)
            except (WorkerUnstartable, OSError) as error:
                return self._unstartable(rank, error)
        return None

    def _start(self, rank: int) -> None:
        local, world = rank - self._world.first, self._world
        directory = self._logs.of(self._attempt, local)
        errors = directory / "error.json"
        out, err = (
            route(stream, local, self._redirects, self._tee, self._job.shown_ranks, directory)
            for stream in (Std.OUT, Std.ERR)
        )
        label = f"{world.node}:{rank}"
        names = {"role_name": self._job.role, "rank": rank, "local_rank": local}
        header = Template(self._job.line_prefix).safe_substitute(names)
        feed = self._pump.open(label, out, err, rank=rank, prefix=self._prefix, header=header)
        told = environment(world, rank, self._job.environment, str(errors))
        worker = Worker(self._job.command.words(), told, label, feed.stdout, feed.stderr, self._warden)
        try:
            worker.start()
        finally:
            feed.started()
        self._workers[rank] = (worker, feed, errors)
        self._exits.register(worker.fileno(), selectors.EVENT_READ, rank)

    def wait(self, timeout_s: float) -> None:
        """Wait until a worker ends, the bell rings, or the time is over."""
        for key, _ in self._exits.select(timeout_s):
            if key.data is not None:
                self._exits.unregister(key.fd)  # seen once: were it to stay, it would lose its place among the others
                self._ended.append(key.data)

    def exits(self) -> Iterator[Exit]:
        """Yield who has ended, once each; those who are stopped or started again between two of them are not told."""
        self.wait(0.0)
        while self._ended:
            rank = self._ended.pop(0)
            worker = self._workers[rank][0]
            code = worker.poll()
            assert code is not None
            yield Exit(rank, code, describe_exit(code), worker.uptime_s)

    def signal(self, number: int) -> None:
        """Send a signal to all workers, and what they have started."""
        for worker, _, _ in self._workers.values():
            worker.signal(number)

    def stop(self, ranks: Sequence[int] | None, how: int, deadline: Deadline, hurried: Callable[[], bool]) -> None:
        """Ask workers to end by a signal, kill those who have not at the deadline, or once hurried, and forget them."""
        stopped = [rank for rank in self._workers if ranks is None or rank in ranks]
        running = [self._workers[rank][0] for rank in stopped if self._workers[rank][0].poll() is None]
        for worker in running:
            worker.signal(how)
        while running and not deadline.expired() and not hurried():
            descriptors = [self._bell, *(worker.fileno() for worker in running)]
            _wait_for(descriptors, min(deadline.remaining(), SLICE_S))
            running = [worker for worker in running if worker.poll() is None]
        for rank in stopped:
            self._workers[rank][0].kill()
        self._ended = [rank for rank in self._ended if rank not in stopped]
        for rank in stopped:
            worker, feed, _ = self._workers.pop(rank)
            with contextlib.suppress(KeyError):  # its end was seen
                self._exits.unregister(worker.fileno())
            worker.close()
            feed.finish()

    def failures(self, rank: int, code: int) -> list[Failure]:
        """Say what is known of a worker that failed, and of others here who recorded an error; the first is last."""
        ended = self.failure(rank, code)
        ends = {other: worker.poll() for other, (worker, _, errors) in self._workers.items() if errors.exists()}
        others = [self.failure(other, end) for other, end in ends.items() if other != rank and end != 0]
        first = earliest(ended, others)
        return [*(other for other in (ended, *others) if other.recorded_at and other is not first), first]

    def failure(self, rank: int, code: int | None) -> Failure:
        """Say what is known of a worker that failed, or (None) may have and still runs."""
        worker, feed, errors = self._workers[rank]
        if code is not None:
            feed.finish()
        return failure_of(
            node=self._world.node,
            host=socket.gethostname(),
            rank=rank,
            local_rank=rank - self._world.first,
            pid=worker.pid,
            code=code,
            at=datetime.now(timezone.utc),
            error_file=errors,
            stderr=feed.tail(),
        )

    def say(self, line: str) -> None:
        """Show a line between those of the workers."""
        self._pump.say(line)

    def close(self) -> None:
        """End all that is left, at once."""
        self.stop(None, signal.SIGKILL, Deadline(0.0), lambda: True)
        self._pump.close()
        self._exits.close()
        self._warden.close()

    def _unstartable(self, rank: int, error: Exception) -> Failure:
        """Say of one that is no process what a shell would."""
        return Failure(
            node=self._world.node,
            host=socket.gethostname(),
            rank=rank,
            local_rank=rank - self._world.first,
            pid=0,
            code=NOT_FOUND if isinstance(error.__cause__, FileNotFoundError) else NOT_EXECUTABLE,
            how="not started",
            at=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            message=_why_not(error, len(self._workers)),
        )


def _why_not(error: Exception, before: int) -> str:
    """Say why a worker could not be started, after so many others."""
    cause = error if isinstance(error, OSError) else error.__cause__
    number = cause.errno if isinstance(cause, OSError) else None
    if number in (errno.EMFILE, errno.ENFILE):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return (
            f"the worker cannot be started beside {before} others: this agent may have {most} descriptors open, and "
            f"each takes a few. Raise that (ulimit -n), or start fewer"
        )
    if number == errno.E2BIG:
        return "the worker cannot be started: its arguments and its environment are larger than this system takes"
    if not isinstance(error, OSError):
        return str(error)
    place = f" at {error.filename}" if error.filename else ""
    return f"the worker's files cannot be made: {error.strerror}{place}"


def _wait_for(descriptors: Sequence[int], timeout_s: float) -> None:
    """Wait until one of them is readable, or the time is over; there may be more than `select` can take."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    poller.poll(timeout_s * 1000)
