"""The workers of one node in one round: started, waited for, stopped, and asked what they died of."""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path

from rallypoint.core.gang import Exit
from rallypoint.deadline import Deadline
from rallypoint.elastic.failure import Failure, failure_of
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
        self._ended: set[int] = set()
        """The ranks whose end was told."""

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
        feed = self._pump.open(label, out, err, rank=rank, prefix=self._prefix)
        told = environment(world, rank, self._job.environment, str(errors))
        worker = Worker(self._job.command.words(), told, label, feed.stdout, feed.stderr, self._warden)
        try:
            worker.start()
        finally:
            feed.started()
        self._workers[rank] = (worker, feed, errors)
        self._ended.discard(rank)

    def wait(self, timeout_s: float) -> None:
        """Wait until a worker ends, the bell rings, or the time is over."""
        running = [worker.fileno() for rank, (worker, _, _) in self._workers.items() if rank not in self._ended]
        _wait_for([self._bell, *running], timeout_s)

    def exits(self) -> Iterator[Exit]:
        """Yield who has ended, once each; those who are stopped or started again between two of them are not told."""
        for rank in list(self._workers):
            if rank in self._workers and rank not in self._ended:
                worker = self._workers[rank][0]
                code = worker.poll()
                if code is not None:
                    self._ended.add(rank)
                    yield Exit(rank, code, describe_exit(code), worker.uptime_s)

    def signal(self, number: int) -> None:
        """Send a signal to all workers, and what they have started."""
        for worker, _, _ in self._workers.values():
            worker.signal(number)

    def stop(self, ranks: Sequence[int] | None, deadline: Deadline, hurried: Callable[[], bool]) -> None:
        """Ask workers to end, and kill those who have not at the deadline, or once it is hurried; forget them."""
        stopped = [rank for rank in self._workers if ranks is None or rank in ranks]
        running = [self._workers[rank][0] for rank in stopped if self._workers[rank][0].poll() is None]
        for worker in running:
            worker.signal(signal.SIGTERM)
        while running and not deadline.expired() and not hurried():
            descriptors = [self._bell, *(worker.fileno() for worker in running)]
            _wait_for(descriptors, min(deadline.remaining(), SLICE_S))
            running = [worker for worker in running if worker.poll() is None]
        for rank in stopped:
            self._workers[rank][0].kill()
        for rank in stopped:
            worker, feed, _ = self._workers.pop(rank)
            worker.close()
            feed.finish()

    def failure(self, rank: int, code: int) -> Failure:
        """Say what is known of a worker that failed."""
        worker, feed, errors = self._workers[rank]
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
        self.stop(None, Deadline(0.0), lambda: True)
        self._pump.close()
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
            message=_without_files(error) if isinstance(error, OSError) else str(error),
        )


def _without_files(error: OSError) -> str:
    place = f" at {error.filename}" if error.filename else ""
    return f"the worker's files cannot be made: {error.strerror}{place}. Is --log-dir a directory to write in?"


def _wait_for(descriptors: Sequence[int], timeout_s: float) -> None:
    """Wait until one of them is readable, or the time is over; there may be more than `select` can take."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    poller.poll(timeout_s * 1000)
