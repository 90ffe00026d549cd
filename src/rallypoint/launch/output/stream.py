"""One output stream of one worker: its pipe, its unfinished line, its bar, and its destinations.

All of this runs in the pump's thread (pump.py). A stream that goes to a file only has no pipe: the worker writes the
file itself, and the end of the stream is read from there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import termios
import threading
from typing import NamedTuple

from rallypoint.launch.output.console import Console, line_prefix, write_all
from rallypoint.launch.output.line_filter import LineFilter
from rallypoint.launch.output.progress_bars import BarSplitter, last_state
from rallypoint.launch.output.routes import OutputRoute

__all__ = ["Stream", "StreamStyle", "last_lines"]

READ_BYTES = 256 * 1024
"""Size of one read, and of the pipe where it can be set."""

PIECE_BYTES = 64 * 1024
"""An unfinished line of this length is forwarded in pieces."""

HOLD_S = 0.1
"""How long an unfinished line is held back."""

BAR_S = 10.0
"""How often the state of a bar becomes a line, in files and where nothing can be redrawn."""

KEPT_BYTES, KEPT_LINES = 32 * 1024, 20
"""How much of a worker's stderr is kept for a traceback, and how many lines of it a report shows."""


def last_lines(data: bytes, most: int = KEPT_LINES) -> tuple[str, ...]:
    """Return the last lines of the output, as text; of a progress bar, its last state."""
    lines = [last_state(line) if b"\r" in line else line for line in data.split(b"\n")]
    return tuple(b"\n".join(lines).decode(errors="replace").splitlines()[-most:])


class StreamStyle(NamedTuple):
    """How a worker's output is shown."""

    label: str
    rank: int = 0
    prefix: bool = True
    """Whether lines begin with `[label]`."""

    header: str = ""
    """What lines of a teed stream begin with instead, if given."""

    bars: bool = False
    """Whether progress bars are recognized; otherwise carriage returns are forwarded as they are."""


class Stream:
    """One stream of one worker."""

    def __init__(
        self, route: OutputRoute, console: Console, style: StreamStyle, line_filter: LineFilter | None = None
    ) -> None:
        self.done = threading.Event()
        self.held, self._due_at = b"", 0.0
        self._console = console if route.console else None
        self._rank = style.rank
        self._bars = BarSplitter() if style.bars else None
        self._bar_at: float | None = None
        self._stored_state = b""
        self._filter = line_filter
        self._tail = bytearray()
        self._path, self._file, self._start_offset = route.path, -1, 0
        self._prefix = line_prefix(style.label, style.rank, console.colour) if style.prefix else b""
        has_header = bool(style.header) and route.path is not None
        if has_header:
            self._prefix = style.header.encode(errors="replace")
        self._folds = console.folds and bool(self._prefix) and not has_header
        if route.path is not None:
            route.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(route.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._start_offset = os.fstat(self._file).st_size
        if route.path is not None and self._console is None:
            self.reader, self.writer = -1, self._file
            self.done.set()
        else:
            self.reader, self.writer = _pipe()
        self._label = style.label

    def close_writer(self) -> None:
        """Close our copy of the worker's descriptor."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def abandon(self) -> None:
        """Close a stream that no worker has received yet."""
        self.close_writer()
        if self.reader >= 0:
            self._close()

    def begin(self) -> None:
        """Expect output, in the pump's thread."""
        if self._folds and self._console is not None:
            self._console.opened(self._rank, self._label, self._prefix)

    def waiting(self) -> int:
        """Return the number of bytes in the pipe."""
        size: int = struct.unpack("i", fcntl.ioctl(self.reader, termios.FIONREAD, b"\0" * 4))[0]
        return size

    def carry(self, most: int, now: float) -> int:
        """Read once and forward; return the number of bytes, 0 at the end, -1 if the pipe is empty."""
        try:
            data = os.read(self.reader, most)
        except BlockingIOError:
            return -1
        if data:
            self._keep(data)
            self._forward(data if self._bars is None else self._bars.feed(data), now)
            self._update_bar(now)
        return len(data)

    def due_at(self) -> float | None:
        """Return when `flush` must be called; None: after more output."""
        if self.held:
            return self._due_at if self._bar_at is None else min(self._due_at, self._bar_at)
        return self._bar_at

    def flush(self, now: float) -> None:
        """Show the unfinished line, or the state of a bar, if it is due."""
        if self.held and now >= self._due_at:
            self._release()
        if self._bar_at is not None and now >= self._bar_at and self._bars is not None:
            self._bar_at = now + BAR_S
            self._store_state(self._bars.state, now)

    def end(self, now: float) -> None:
        """Show the unfinished line, and close; if lines have a prefix, also finish the line."""
        if self._bars is not None:
            self._forward(self._bars.finish(), now)
            self._update_bar(now)
        if self._console is not None:
            if self._folds and self.held:
                self._show(b"\n", now)
            self._release()
            if self._prefix and self._console.unfinished is self:
                self._console.write(self, b"", b"\n")
            if self._folds:
                self._console.closed(self._rank)
        if self._filter is not None:
            self._filter.finish()
        self._close()

    def tail(self) -> bytes:
        """Return the end of the stream, up to KEPT_BYTES."""
        if self.reader >= 0 or self._path is None:
            return bytes(self._tail[-KEPT_BYTES:])
        try:
            with open(self._path, "rb") as file:
                file.seek(max(self._start_offset, os.fstat(file.fileno()).st_size - KEPT_BYTES))
                return file.read(KEPT_BYTES)
        except OSError:
            return b""

    def _keep(self, data: bytes) -> None:
        self._tail += data[-KEPT_BYTES:]
        if len(self._tail) > 2 * KEPT_BYTES:
            del self._tail[:-KEPT_BYTES]

    def _forward(self, data: bytes, now: float) -> None:
        """Send text to all destinations."""
        self._store(data)
        if self._filter is not None:
            self._filter.feed(data)
        if self._console is not None and data:
            self._show(data, now)

    def _store(self, data: bytes) -> None:
        """Write text to the file, if there is one."""
        if self._file >= 0 and not write_all(self._file, data):
            self._lose_file()

    def _update_bar(self, now: float) -> None:
        """Show the state of the bar: at once on a terminal, now and then as a line elsewhere."""
        state = b"" if self._bars is None else self._bars.state
        if not state:
            self._bar_at = None
        elif self._bar_at is None:
            self._bar_at = now + BAR_S
        if self._console is not None and self._console.is_terminal:
            self._console.set_bar(self, self._rank, self._prefix, state)

    def _store_state(self, state: bytes, now: float) -> None:
        """Keep a new state of a bar as a line, where it cannot be redrawn."""
        if state != self._stored_state:
            self._stored_state = state
            self._store(state + b"\n")
            if self._console is not None and not self._console.is_terminal:
                self._show(state + b"\n", now)

    def _show(self, data: bytes, now: float) -> None:
        assert self._console is not None
        cut = data.rfind(b"\n") + 1
        if cut and self._folds and self._console.unfinished is not self:
            self._console.fold(self._rank, self.held + data[:cut], now)
        elif cut:
            self._console.write(self, self._prefix, self.held + data[:cut])
        if cut or not self.held:
            self.held, self._due_at = data[cut:], now + HOLD_S
        else:
            self.held += data
        if len(self.held) >= PIECE_BYTES:
            self._release()

    def _release(self) -> None:
        """Show the unfinished line."""
        if self.held and self._console is not None:
            self._console.unfold()
            self._console.write(self, self._prefix, self.held)
            self.held = b""

    def _lose_file(self) -> None:
        """Continue without the file, as when its disk is full: the worker must not block."""
        self._close_file()
        if self._console is not None:
            lost = f"rallypoint: cannot write {self._path}; further output goes to the console only\n"
            self._console.write(self._console, b"", lost.encode())

    def _close(self) -> None:
        os.close(self.reader)
        if self._file >= 0:
            self._close_file()

    def _close_file(self) -> None:
        with contextlib.suppress(OSError):  # a network file system may report late that its disk is full
            os.close(self._file)
        self._file = -1


def _pipe() -> tuple[int, int]:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    with contextlib.suppress(AttributeError, OSError):  # unsupported, or over the user's limit on pipe memory
        fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, READ_BYTES)
    return reader, writer
