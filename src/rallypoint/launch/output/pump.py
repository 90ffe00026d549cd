"""The output pump: one thread reads the output of all workers and forwards it, line by line, to console and files.

It has its own thread because a console may block (a pager, Ctrl-S) while the agent must still see its workers exit. A
stream that goes to a file only is not pumped: the worker writes the file itself. Bytes are not changed. An unfinished
line is forwarded after 0.1 s, or at 64 KiB; if another worker writes next, a line break is inserted. The output of a
single worker without a prefix is forwarded byte for byte.

When a worker has exited, all its output is in the pipe: the pump reads what is there and stops, since children of the
worker may keep the pipe open forever. The end of stderr is kept for the failure report.

While many workers print short lines, the pump pauses for PAUSE_S between two rounds of reads, so that it reads and
writes several lines at a time. A first line, and large amounts of output, are forwarded at once.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from rallypoint.deadline import Deadline
from rallypoint.launch.output.console import Console
from rallypoint.launch.output.line_filter import LineFilter
from rallypoint.launch.output.routes import OutputRoute, Std, parse_ranks, parse_std, route, worker_dir
from rallypoint.launch.output.stream import READ_BYTES, Stream, StreamStyle, last_lines
from rallypoint.readiness import wait_readable

__all__ = [
    "WorkerStreams",
    "OutputPump",
    "OutputRoute",
    "Std",
    "last_lines",
    "parse_ranks",
    "parse_std",
    "route",
    "worker_dir",
]

FINISH_S = 5.0
"""How long to wait for a console that blocks."""

PAUSE_S = 0.03
"""How long lines are collected while many arrive."""

BUSY_STREAMS = 4
"""Number of streams with output at once from which on lines are collected."""

BULK_BYTES = 16 * 1024
"""A stream with as much output in its pipe is not made to wait."""


class OutputPump:
    """The thread that forwards the workers' output; `open` creates the streams of each worker.

    `stdout` and `stderr` are the descriptors of the console, which stay open. `colour` None means: on a terminal only.
    If `folds`, equal lines of several ranks are shown once.
    """

    def __init__(self, stdout: int = 1, stderr: int = 2, *, colour: bool | None = None, folds: bool = False) -> None:
        self._out = Console(stdout, colour, folds)
        self._err = self._out if os.path.sameopenfile(stdout, stderr) else Console(stderr, colour, folds)
        self._consoles = {self._out, self._err}
        self._tasks: deque[Callable[[], object]] = deque()
        self._selector = selectors.DefaultSelector()
        self._wakeup: tuple[int, ...] = os.pipe()
        for descriptor in self._wakeup:
            os.set_blocking(descriptor, False)
        self._selector.register(self._wakeup[0], selectors.EVENT_READ)
        self._streams: set[Stream] = set()
        self._ended: list[Stream] = []
        """Streams that have ended, and whose last output is not written yet."""

        self._closing = False
        self.stuck = False
        """Whether the console blocked past a timeout, and has since; nothing waits for it until it accepts output."""

        self._thread = threading.Thread(target=self._run, name="output pump", daemon=True)
        self._thread.start()

    def open(
        self,
        label: str,
        stdout: OutputRoute,
        stderr: OutputRoute,
        *,
        filters: tuple[LineFilter | None, LineFilter | None] = (None, None),
        **style: Any,
    ) -> WorkerStreams:
        """Create the streams of a worker; `style` is as in StreamStyle, `filters` copy lines of stdout and stderr.

        Raises OSError if a file cannot be created.
        """
        if self._closing:
            raise ValueError("the pump is closed")
        shown = StreamStyle(label, **style)
        streams = [Stream(stdout, self._out, shown, filters[0])]
        try:
            streams.append(Stream(stderr, self._err, shown, filters[1]))
        except OSError:
            streams[0].abandon()
            raise
        pumped = [stream for stream in streams if stream.reader >= 0]
        self._call_soon(lambda: self._add(pumped))
        return WorkerStreams(self, streams[0], streams[1])

    def say(self, line: str) -> None:
        """Queue a line of the agent for stderr, where it does not break lines of workers."""
        self._call_soon(lambda: self._say(line.encode(errors="replace") + b"\n"))

    def close(self, timeout_s: float = FINISH_S) -> bool:
        """Forward the remaining output and stop; return whether all was forwarded in time. Idempotent."""
        if not self._closing:
            self._closing = True
            self._call_soon(lambda: self._drain(list(self._streams)))
        self._thread.join(0.0 if self.stuck else timeout_s)
        if self._thread.is_alive():
            return False
        for descriptor in self._wakeup:
            os.close(descriptor)
        self._wakeup = ()
        return True

    def _call_soon(self, task: Callable[[], object]) -> None:
        """Have the thread call a function."""
        self._tasks.append(task)
        if self._wakeup:
            with contextlib.suppress(BlockingIOError):  # the pipe is full: the thread wakes up anyway
                os.write(self._wakeup[1], b"!")

    # In the pump's thread

    def _run(self) -> None:
        while not (self._closing and not self._tasks and not self._streams):
            ready = [key for key, _ in self._selector.select(self._wait_s())]
            busiest = max((self._carry(key.data) for key in ready if key.data is not None), default=0)
            if any(key.data is None for key in ready):
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakeup[0], 4096)
            while self._tasks:
                self._tasks.popleft()()
            self._flush()
            self.stuck = False
            if len(ready) >= BUSY_STREAMS and busiest < BULK_BYTES:
                wait_readable(self._wakeup[0], timeout_s=PAUSE_S)
        self._selector.close()

    def _wait_s(self) -> float | None:
        """Return the time until something must be shown, or None if nothing waits."""
        if self._tasks:
            return 0.0
        waiting: Sequence[Stream | Console] = (*self._streams, *self._consoles)
        due = [at for each in waiting if (at := each.due_at()) is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _flush(self) -> None:
        """Show what is due, and report the streams that have ended."""
        now = time.monotonic()
        for stream in self._streams:
            stream.flush(now)
        for console in self._consoles:
            if self._closing and not self._streams:
                console.finish(now)
            else:
                console.flush(now)
        for stream in self._ended:
            stream.done.set()
        self._ended.clear()

    def _say(self, line: bytes) -> None:
        for console in self._consoles:
            console.unfold()
        self._err.write(self, b"", line)

    def _add(self, streams: Sequence[Stream]) -> None:
        for stream in streams:
            self._streams.add(stream)
            self._selector.register(stream.reader, selectors.EVENT_READ, stream)
            stream.begin()

    def _carry(self, stream: Stream) -> int:
        """Forward what one read returns; return its size."""
        read = stream.carry(READ_BYTES, time.monotonic()) if stream in self._streams else 0
        if stream in self._streams and read == 0:
            self._end(stream)
        return read

    def _drain(self, streams: Sequence[Stream]) -> None:
        """Forward what is in the pipes now, and close them."""
        for stream in self._streams.intersection(streams):
            left = stream.waiting()
            while left > 0 and (read := stream.carry(min(left, READ_BYTES), time.monotonic())) > 0:
                left -= read
            self._end(stream)

    def _end(self, stream: Stream) -> None:
        self._selector.unregister(stream.reader)
        self._streams.discard(stream)
        stream.end(time.monotonic())
        self._ended.append(stream)


class WorkerStreams:
    """The output streams of one worker."""

    def __init__(self, pump: OutputPump, out: Stream, err: Stream) -> None:
        self._pump, self._out, self._err = pump, out, err

    @property
    def stdout(self) -> int:
        """Descriptor for the worker's stdout, until `started`."""
        return self._out.writer

    @property
    def stderr(self) -> int:
        """Descriptor for the worker's stderr, until `started`."""
        return self._err.writer

    def started(self) -> None:
        """Close our copies of the worker's descriptors; call it after the start, whether it succeeded or not."""
        self._out.close_writer()
        self._err.close_writer()

    def finish(self, timeout_s: float = FINISH_S) -> bool:
        """Forward all output of a worker that has exited; return whether it was done in time (0: do not wait)."""
        self.started()
        pump, streams = self._pump, [stream for stream in (self._out, self._err) if stream.reader >= 0]
        pump._call_soon(lambda: pump._drain(streams))
        deadline = Deadline(0.0 if pump.stuck else timeout_s)
        done = all(stream.done.wait(deadline.remaining()) for stream in (self._out, self._err))
        pump.stuck = pump.stuck or (timeout_s > 0 and not done)
        return done

    def tail(self) -> bytes:
        """Return the end of the worker's stderr; complete after `finish`."""
        return self._err.tail()
