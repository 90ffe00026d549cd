"""One stream of one worker, and the console that it may be shown on: how lines stay whole.

All of this runs in the pump's thread (output.py). A console remembers whose line on it is not finished: if somebody
else comes next, a line break goes between, and if the same one goes on, nothing does. What goes to a file only has no
pipe: the worker writes the file itself, and its last lines are read from there.
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

from rallypoint.elastic.routes import Route

__all__ = ["Console", "Stream", "last_lines"]

READ_BYTES = 256 * 1024
"""How much is read at once, and how much a pipe may hold where that can be set."""

PIECE_BYTES = 64 * 1024
"""How long a line may be before a piece of it is passed on."""

KEPT_BYTES, KEPT_LINES = 32 * 1024, 20
"""How much of a worker's standard error is kept, for a traceback in it; how many lines a report shows."""

COLOURS = tuple(f"\x1b[{code}m".encode() for code in (36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94, 91))
PLAIN = b"\x1b[0m"


def last_lines(data: bytes, most: int = KEPT_LINES) -> tuple[str, ...]:
    """Return the last lines of what was printed, as text."""
    return tuple(data.decode(errors="replace").splitlines()[-most:])


class Console:
    """One descriptor that people look at, and whose line on it is not finished."""

    def __init__(self, descriptor: int, colour: bool | None) -> None:
        self._descriptor = descriptor
        self.colour = os.isatty(descriptor) if colour is None else colour
        self.unfinished: object = None
        self._gone = False
        # Others may write there, too. Into a pipe, so much goes in one piece; elsewhere, all that is written at once.
        is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
        self._most = select.PIPE_BUF if is_pipe else 1 << 30

    def write(self, source: object, prefix: bytes, data: bytes) -> None:
        """Write whole lines, or a piece of one at the end."""
        whole = data.endswith(b"\n")
        if prefix:
            data = data.replace(b"\n", b"\n" + prefix, data.count(b"\n") - whole)
        if self.unfinished is not source:
            data = (b"" if self.unfinished is None else b"\n") + prefix + data
        self.unfinished = None if whole else source
        at = 0
        while at < len(data) and not self._gone:
            end = len(data)
            if end - at > self._most:
                end = data.rfind(b"\n", at, at + self._most) + 1 or data.find(b"\n", at) + 1 or end
            self._gone = not _write(self._descriptor, data[at:end])
            at = end


class Stream:
    """One stream of one worker: the pipe, what is held of a line, and where it goes."""

    def __init__(self, to: Route, console: Console, label: str, rank: int, prefix: bool, header: str = "") -> None:
        self.done = threading.Event()
        self.held, self.held_at = b"", 0.0
        self._console = console if to.console else None
        self._tail = bytearray()
        self._path, self._file, self._begins = to.path, -1, 0
        self._prefix = _prefix(label, rank, console.colour) if prefix else b""
        if header and to.path is not None:
            self._prefix = header.encode(errors="replace")
        if to.path is not None:
            to.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(to.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._begins = os.fstat(self._file).st_size
        if to.path is not None and self._console is None:
            self.reader, self.writer = -1, self._file
            self.done.set()
        else:
            self.reader, self.writer = _pipe()

    def let_go(self) -> None:
        """Close our copy of the worker's end."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def abandon(self) -> None:
        """Close everything; nobody has it yet."""
        self.let_go()
        if self.reader >= 0:
            self.end()

    def waiting(self) -> int:
        """Return how many bytes are in the pipe."""
        size: int = struct.unpack("i", fcntl.ioctl(self.reader, termios.FIONREAD, b"\0" * 4))[0]
        return size

    def carry(self, most: int) -> int:
        """Read once and pass on; return how much it was, 0 at the end, -1 if there is nothing now."""
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
        """Show the beginning of a line that is held."""
        if self.held and self._console is not None:
            self._console.write(self, self._prefix, self.held)
            self.held = b""

    def end(self) -> None:
        """Show what is held, and close; where lines have a prefix, whatever comes next begins on a new one."""
        self.flush()
        if self._console is not None and self._prefix and self._console.unfinished is self:
            self._console.write(self, b"", b"\n")
        os.close(self.reader)
        if self._file >= 0:
            os.close(self._file)
        self.done.set()

    def tail(self) -> bytes:
        """Return the last that was written."""
        if self.reader >= 0 or self._path is None:
            return bytes(self._tail[-KEPT_BYTES:])
        try:
            with open(self._path, "rb") as file:
                file.seek(max(self._begins, os.fstat(file.fileno()).st_size - KEPT_BYTES))
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
        """Go on without the file: its disk is full, and the worker must not wait for that."""
        os.close(self._file)
        self._file = -1
        if self._console is not None:
            lost = f"rallypoint: {self._path} cannot be written; what follows is only shown here\n"
            self._console.write(self._console, b"", lost.encode())


def _prefix(label: str, rank: int, colour: bool) -> bytes:
    name = f"[{label}]".encode(errors="replace")
    return COLOURS[rank % len(COLOURS)] + name + PLAIN + b" " if colour else name + b" "


def _pipe() -> tuple[int, int]:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    with contextlib.suppress(AttributeError, OSError):  # not on this system, or a user's share of pipes is used up
        fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, READ_BYTES)
    return reader, writer


def _write(descriptor: int, data: bytes) -> bool:
    """Write all of it, however long that takes; say whether it could be."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:  # somebody made our console non-blocking
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()
        except OSError:
            return False
    return True
