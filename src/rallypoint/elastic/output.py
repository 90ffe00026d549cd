"""What workers print: read by one thread, and brought whole line by whole line to the console, to files, or both.

A thread of its own, because a console may block (a pager, Ctrl-S) and the agent must still see its workers die. What
goes to a file only is not read at all: the worker writes the file itself. Bytes stay as they are; a line that does not
end is passed on after a moment, or when 64 KiB of it are there, and if another worker then has something to say, a
line break is put between them. One worker alone without a prefix is passed on byte for byte.

When a worker has ended, all that it wrote is in its pipe: that much is read, and no more. Its children may hold the
pipe open for ever. The last of its standard error is kept, for the report of its failure.
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
from rallypoint.elastic.routes import Route, Std, parse_ranks, parse_std, route, worker_dir
from rallypoint.elastic.stream import READ_BYTES, Console, Stream, last_lines

__all__ = ["Feed", "Pump", "Route", "Std", "last_lines", "parse_ranks", "parse_std", "route", "worker_dir"]

HOLD_S = 0.1
"""How long the beginning of a line is held back."""

FINISH_S = 5.0
"""How long a console that blocks may keep the end waiting."""


class Pump:
    """The thread that carries what workers print; `open` a feed for each of them.

    `stdout` and `stderr` are the console's descriptors, which stay open. `colour` None means: where that is a terminal.
    """

    def __init__(self, stdout: int = 1, stderr: int = 2, *, colour: bool | None = None) -> None:
        self._out = Console(stdout, colour)
        self._err = self._out if os.path.sameopenfile(stdout, stderr) else Console(stderr, colour)
        self._asked: deque[Callable[[], object]] = deque()
        self._selector = selectors.DefaultSelector()
        self._bell: tuple[int, ...] = os.pipe()
        for descriptor in self._bell:
            os.set_blocking(descriptor, False)
        self._selector.register(self._bell[0], selectors.EVENT_READ)
        self._streams: set[Stream] = set()
        self._closing = False
        self.stuck = False
        """Whether a console has kept somebody waiting too long, and has not moved since: nobody waits for it again."""

        self._thread = threading.Thread(target=self._run, name="output of workers", daemon=True)
        self._thread.start()

    def open(
        self, label: str, stdout: Route, stderr: Route, *, rank: int = 0, prefix: bool = True, header: str = ""
    ) -> Feed:
        """Make the ends that a worker writes to; its lines are shown as `[label] …`, in the colour of its rank.

        Those that go to a file too begin with `header` instead, if there is one. Raises OSError where a file cannot be
        made.
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
        self._ask(lambda: self._add(pumped))
        return Feed(self, streams[0], streams[1])

    def say(self, line: str) -> None:
        """Show a line of the agent's own on its standard error, between those of the workers; does not wait."""
        self._ask(lambda: self._err.write(self, b"", line.encode(errors="replace") + b"\n"))

    def close(self, timeout_s: float = FINISH_S) -> bool:
        """Pass on what has been printed and end; say whether all of it was. Harmless when it is closed already."""
        if not self._closing:
            self._closing = True
            self._ask(lambda: self._drain(list(self._streams)))
        self._thread.join(0.0 if self.stuck else timeout_s)
        if self._thread.is_alive():
            return False
        for descriptor in self._bell:
            os.close(descriptor)
        self._bell = ()
        return True

    def _ask(self, what: Callable[[], object]) -> None:
        """Have the thread do something."""
        self._asked.append(what)
        if self._bell:
            with contextlib.suppress(BlockingIOError):  # it is full, so the thread will wake up anyway
                os.write(self._bell[1], b"!")

    # What the thread does

    def _run(self) -> None:
        while not (self._closing and not self._asked and not self._streams):
            for key, _ in self._selector.select(self._wait_s()):
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        os.read(key.fd, 4096)
                else:
                    self._carry(key.data)
            while self._asked:
                self._asked.popleft()()
            self._release()
            self.stuck = False
        self._selector.close()

    def _wait_s(self) -> float | None:
        """Return how long to wait for more before the beginning of some line is old enough to be shown."""
        if self._asked:
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
        """Read what is there now, and no more."""
        for stream in self._streams.intersection(streams):
            left = stream.waiting()
            while left > 0 and (read := stream.carry(min(left, READ_BYTES))) > 0:
                left -= read
            self._end(stream)

    def _end(self, stream: Stream) -> None:
        self._selector.unregister(stream.reader)
        self._streams.discard(stream)
        stream.end()


class Feed:
    """What one worker prints: the ends to give to it, and what is kept of it."""

    def __init__(self, pump: Pump, out: Stream, err: Stream) -> None:
        self._pump, self._out, self._err = pump, out, err

    @property
    def stdout(self) -> int:
        """The descriptor for the worker's standard output, until `started`."""
        return self._out.writer

    @property
    def stderr(self) -> int:
        """The descriptor for the worker's standard error, until `started`."""
        return self._err.writer

    def started(self) -> None:
        """Close our copies of the worker's ends; call it when it has started, and also when it could not be."""
        self._out.let_go()
        self._err.let_go()

    def finish(self, timeout_s: float = FINISH_S) -> bool:
        """Pass on all that a worker which has ended wrote; say whether that was done in time (0 does not wait)."""
        self.started()
        pump, streams = self._pump, [stream for stream in (self._out, self._err) if stream.reader >= 0]
        pump._ask(lambda: pump._drain(streams))
        deadline = Deadline(0.0 if pump.stuck else timeout_s)
        done = all(stream.done.wait(deadline.remaining()) for stream in (self._out, self._err))
        pump.stuck = pump.stuck or (timeout_s > 0 and not done)
        return done

    def tail(self) -> bytes:
        """Return the last that it wrote on its standard error; all of that is there after `finish`."""
        return self._err.tail()
