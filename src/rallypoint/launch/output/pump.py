"""The output pump: one thread reads the output of all workers and forwards it, line by line, to console and files.

It has its own thread because a console may block (a pager, Ctrl-S) while the agent must still see its workers exit. A
stream that goes to a file only is not pumped: the worker writes the file itself. Bytes are not changed. An unfinished
line is forwarded after HOLD_S, or at 64 KiB; if another worker writes next, a line break is inserted. The output of a
single worker without a prefix is forwarded byte for byte.

When a worker has exited, all its output is in the pipe: the pump reads what is there and stops, since children of the
worker may keep the pipe open forever. The end of stderr is kept for the failure report.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from rallypoint.deadline import Deadline
from rallypoint.launch.output.routes import OutputRoute, Std, parse_ranks, parse_std, route, worker_dir
from rallypoint.launch.output.stream import READ_BYTES, Console, Stream, last_lines

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

HOLD_S = 0.1
"""How long an unfinished line is held back."""

FINISH_S = 5.0
"""How long to wait for a console that blocks."""


class OutputPump:
    """The thread that forwards the workers' output; `open` creates the streams of each worker.

    `stdout` and `stderr` are the descriptors of the console, which stay open. `colour` None means: on a terminal only.
    """

    def __init__(self, stdout: int = 1, stderr: int = 2, *, colour: bool | None = None) -> None:
        self._out = Console(stdout, colour)
        self._err = self._out if os.path.sameopenfile(stdout, stderr) else Console(stderr, colour)
        self._tasks: deque[Callable[[], object]] = deque()
        self._selector = selectors.DefaultSelector()
        self._wakeup: tuple[int, ...] = os.pipe()
        for descriptor in self._wakeup:
            os.set_blocking(descriptor, False)
        self._selector.register(self._wakeup[0], selectors.EVENT_READ)
        self._streams: set[Stream] = set()
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
        rank: int = 0,
        prefix: bool = True,
        header: str = "",
    ) -> WorkerStreams:
        """Create the streams of a worker; its lines are shown as `[label] …`, in the colour of its rank.

        Lines of a teed stream begin with `header` instead, if given. Raises OSError if a file cannot be created.
        """
        if self._closing:
            raise ValueError("the pump is closed")
        streams = [Stream(stdout, self._out, label, rank, prefix, header)]
        try:
            streams.append(Stream(stderr, self._err, label, rank, prefix, header))
        except OSError:
            streams[0].abandon()
            raise
        pumped = [stream for stream in streams if stream.reader >= 0]
        self._call_soon(lambda: self._add(pumped))
        return WorkerStreams(self, streams[0], streams[1])

    def say(self, line: str) -> None:
        """Queue a line of the agent for stderr, where it does not break lines of workers."""
        self._call_soon(lambda: self._err.write(self, b"", line.encode(errors="replace") + b"\n"))

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
            for key, _ in self._selector.select(self._wait_s()):
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        os.read(key.fd, 4096)
                else:
                    self._carry(key.data)
            while self._tasks:
                self._tasks.popleft()()
            self._release()
            self.stuck = False
        self._selector.close()

    def _wait_s(self) -> float | None:
        """Return the time until the oldest unfinished line must be shown."""
        if self._tasks:
            return 0.0
        held = [stream.held_at for stream in self._streams if stream.held]
        return max(0.0, min(held) + HOLD_S - time.monotonic()) if held else None

    def _release(self) -> None:
        for stream in self._streams:
            if stream.held and time.monotonic() >= stream.held_at + HOLD_S:
                stream.flush()

    def _add(self, streams: Sequence[Stream]) -> None:
        for stream in streams:
            self._streams.add(stream)
            self._selector.register(stream.reader, selectors.EVENT_READ, stream)

    def _carry(self, stream: Stream) -> None:
        if stream in self._streams and stream.carry(READ_BYTES) == 0:
            self._end(stream)

    def _drain(self, streams: Sequence[Stream]) -> None:
        """Forward what is in the pipes now, and close them."""
        for stream in self._streams.intersection(streams):
            left = stream.waiting()
            while left > 0 and (read := stream.carry(min(left, READ_BYTES))) > 0:
                left -= read
            self._end(stream)

    def _end(self, stream: Stream) -> None:
        self._selector.unregister(stream.reader)
        self._streams.discard(stream)
        stream.end()


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
