"""One output stream of one worker, and the console that shows it without mixing lines.

All of this runs in the pump's thread (pump.py). A console remembers which stream wrote its last, unfinished line: if
another stream writes next, a line break is inserted first. A stream that goes to a file only has no pipe: the worker
writes the file itself, and the end of the stream is read from there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import stat
import struct
import termios
import threading
import time

from rallypoint.launch.output.routes import OutputRoute
from rallypoint.readiness import wait_writable

__all__ = ["Console", "Stream", "last_lines"]

READ_BYTES = 256 * 1024
"""Size of one read, and of the pipe where it can be set."""

PIECE_BYTES = 64 * 1024
"""An unfinished line of this length is forwarded in pieces."""

KEPT_BYTES, KEPT_LINES = 32 * 1024, 20
"""How much of a worker's stderr is kept for a traceback, and how many lines of it a report shows."""

COLOURS = tuple(f"\x1b[{code}m".encode() for code in (36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94, 91))
PLAIN = b"\x1b[0m"


def last_lines(data: bytes, most: int = KEPT_LINES) -> tuple[str, ...]:
    """Return the last lines of the output, as text."""
    return tuple(data.decode(errors="replace").splitlines()[-most:])


class Console:
    """The agent's stdout or stderr, and the stream whose line on it is unfinished."""

    def __init__(self, descriptor: int, colour: bool | None) -> None:
        self._descriptor = descriptor
        self.colour = os.isatty(descriptor) if colour is None else colour
        self.unfinished: object = None
        self._gone = False
        # Other processes may write there, too: in a pipe only writes up to PIPE_BUF are atomic, elsewhere all are.
        is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
        self._max_write = select.PIPE_BUF if is_pipe else 1 << 30

    def write(self, source: object, prefix: bytes, data: bytes) -> None:
        """Write lines; the last one may be unfinished."""
        whole = data.endswith(b"\n")
        if prefix:
            data = data.replace(b"\n", b"\n" + prefix, data.count(b"\n") - whole)
        if self.unfinished is not source:
            data = (b"" if self.unfinished is None else b"\n") + prefix + data
        self.unfinished = None if whole else source
        at = 0
        while at < len(data) and not self._gone:
            end = len(data)
            if end - at > self._max_write:
                end = data.rfind(b"\n", at, at + self._max_write) + 1 or data.find(b"\n", at) + 1 or end
            self._gone = not _write(self._descriptor, data[at:end])
            at = end


class Stream:
    """One stream of one worker: its pipe, its unfinished line, and its destinations."""

    def __init__(
        self, route: OutputRoute, console: Console, label: str, rank: int, prefix: bool, header: str = ""
    ) -> None:
        self.done = threading.Event()
        self.held, self.held_at = b"", 0.0
        self._console = console if route.console else None
        self._tail = bytearray()
        self._path, self._file, self._start_offset = route.path, -1, 0
        self._prefix = _prefix(label, rank, console.colour) if prefix else b""
        if header and route.path is not None:
            self._prefix = header.encode(errors="replace")
        if route.path is not None:
            route.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(route.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._start_offset = os.fstat(self._file).st_size
        if route.path is not None and self._console is None:
            self.reader, self.writer = -1, self._file
            self.done.set()
        else:
            self.reader, self.writer = _pipe()

    def close_writer(self) -> None:
        """Close our copy of the worker's descriptor."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def abandon(self) -> None:
        """Close a stream that no worker has received yet."""
        self.close_writer()
        if self.reader >= 0:
            self.end()

    def waiting(self) -> int:
        """Return the number of bytes in the pipe."""
        size: int = struct.unpack("i", fcntl.ioctl(self.reader, termios.FIONREAD, b"\0" * 4))[0]
        return size

    def carry(self, most: int) -> int:
        """Read once and forward; return the number of bytes, 0 at the end, -1 if the pipe is empty."""
        try:
            data = os.read(self.reader, most)
        except BlockingIOError:
            return -1
        self._keep(data)
        if self._file >= 0 and not _write(self._file, data):
            self._lose_file()
        if self._console is not None and data:
            self._show(data)
        return len(data)

    def flush(self) -> None:
        """Show the unfinished line."""
        if self.held and self._console is not None:
            self._console.write(self, self._prefix, self.held)
            self.held = b""

    def end(self) -> None:
        """Show the unfinished line, and close; if lines have a prefix, also finish the line."""
        self.flush()
        if self._console is not None and self._prefix and self._console.unfinished is self:
            self._console.write(self, b"", b"\n")
        os.close(self.reader)
        if self._file >= 0:
            os.close(self._file)
        self.done.set()

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

    def _show(self, data: bytes) -> None:
        assert self._console is not None
        cut = data.rfind(b"\n") + 1
        if cut:
            self._console.write(self, self._prefix, self.held + data[:cut])
        if cut or not self.held:
            self.held, self.held_at = data[cut:], time.monotonic()
        else:
            self.held += data
        if len(self.held) >= PIECE_BYTES:
            self.flush()

    def _lose_file(self) -> None:
        """Continue without the file, as when its disk is full: the worker must not block."""
        os.close(self._file)
        self._file = -1
        if self._console is not None:
            lost = f"rallypoint: cannot write {self._path}; further output goes to the console only\n"
            self._console.write(self._console, b"", lost.encode())


def _prefix(label: str, rank: int, colour: bool) -> bytes:
    name = f"[{label}]".encode(errors="replace")
    return COLOURS[rank % len(COLOURS)] + name + PLAIN + b" " if colour else name + b" "


def _pipe() -> tuple[int, int]:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    with contextlib.suppress(AttributeError, OSError):  # unsupported, or over the user's limit on pipe memory
        fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, READ_BYTES)
    return reader, writer


def _write(descriptor: int, data: bytes) -> bool:
    """Write all of the data, blocking; return whether it succeeded."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:  # another process made the console non-blocking
            wait_writable(descriptor, timeout_s=None)
        except OSError:
            return False
    return True
