"""The console: shows lines of many streams without mixing them, and on a terminal the bars of the ranks below them.

All of this runs in the pump's thread (pump.py). Output is collected, and written by `flush`: many short lines in one
write. A console remembers which stream wrote its last, unfinished line: if another stream writes next, a line break is
inserted first.

The bars are the last lines on the terminal. They are erased before a line is written, and drawn again after it.
Elsewhere nothing can be redrawn: the streams show the state of a bar as a line, now and then (stream.py).
"""

from __future__ import annotations

import contextlib
import os
import select
import stat

from rallypoint.launch.output.folding import FoldedLine, LineFolder, rank_ranges
from rallypoint.launch.output.progress_bars import clip
from rallypoint.readiness import wait_writable

__all__ = ["Console", "line_prefix", "write_all"]

COLOURS = tuple(f"\x1b[{code}m".encode() for code in (36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94, 91))
BOLD, PLAIN = b"\x1b[1m", b"\x1b[0m"

BUFFER_BYTES = 1 << 20
"""More collected output than this is written at once."""

DRAW_S = 0.1
"""How often bars are redrawn."""


class Console:
    """The agent's stdout or stderr: the stream whose line on it is unfinished, folded lines, and bars."""

    def __init__(self, descriptor: int, colour: bool | None, folds: bool = False) -> None:
        self._descriptor = descriptor
        self.is_terminal = os.isatty(descriptor)
        self.colour = self.is_terminal if colour is None else colour
        self.unfinished: object = None
        self._folder = LineFolder() if folds else None
        self._node = ""
        self._prefixes: dict[int, bytes] = {}
        self._buffer = bytearray()
        self._gone = False
        # Other processes may write there, too: in a pipe only writes up to PIPE_BUF are atomic, elsewhere all are.
        is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
        self._max_write = select.PIPE_BUF if is_pipe else 1 << 30
        self._bars: dict[object, tuple[int, bytes, bytes]] = {}
        """Rank, prefix and state of the bar of each stream that has one."""

        self._drawn = 0
        """Number of lines that the bars on the terminal take."""

        self._draw_at: float | None = None
        """When the bars must be drawn again; None if they are up to date."""

        self._drawn_at = 0.0

    def write(self, source: object, prefix: bytes, data: bytes) -> None:
        """Show lines; the last one may be unfinished."""
        whole = data.endswith(b"\n")
        if prefix:
            data = data.replace(b"\n", b"\n" + prefix, data.count(b"\n") - whole)
        if self.unfinished is not source:
            data = (b"" if self.unfinished is None else b"\n") + prefix + data
        self.unfinished = None if whole else source
        self._buffer += data
        if len(self._buffer) > BUFFER_BYTES:
            self._write_out(self._drawn_at)

    def due_at(self) -> float | None:
        """Return when `flush` must be called at the latest, apart from new output; None: never."""
        folded = self._folder.due_at if self._folder else None
        due = [at for at in (folded, self._draw_at) if at is not None]
        return min(due) if due else None

    def flush(self, now: float) -> None:
        """Write what was collected, and the lines and bars that are due."""
        if self._folder is not None:
            self._show_folded(self._folder.take(now))
        self._write_out(now)

    def _write_out(self, now: float) -> None:
        """Write what was collected, and the bars if they are due."""
        if self._bars or self._drawn:
            if not self._buffer and (self._draw_at is None or now < self._draw_at):
                return
            self._draw(now)
        data, self._buffer = bytes(self._buffer), bytearray()
        at = 0
        while at < len(data) and not self._gone:
            end = len(data)
            if end - at > self._max_write:
                end = data.rfind(b"\n", at, at + self._max_write) + 1 or data.find(b"\n", at) + 1 or end
            self._gone = not write_all(self._descriptor, data[at:end])
            at = end

    def finish(self, now: float) -> None:
        """Write all that was collected, at the end."""
        self.unfold()
        self._draw_at = now
        self.flush(now)

    # Folded lines

    @property
    def folds(self) -> bool:
        """Whether equal lines of several ranks are shown once."""
        return self._folder is not None

    def opened(self, rank: int, label: str, prefix: bytes) -> None:
        """Expect a stream of a rank, with its label `node:rank` and its prefix."""
        if self._folder is not None:
            self._node = label.rpartition(":")[0]
            self._prefixes[rank] = prefix
            self._folder.opened(rank)

    def closed(self, rank: int) -> None:
        """Expect no more lines of a stream of a rank."""
        if self._folder is not None:
            self._folder.closed(rank)

    def fold(self, rank: int, data: bytes, now: float) -> None:
        """Show whole lines of a rank, together with equal ones of other ranks."""
        assert self._folder is not None
        for line in data.split(b"\n")[:-1]:
            self._folder.add(rank, line, now)

    def unfold(self) -> None:
        """Show all lines that wait for other ranks, before something else is written."""
        if self._folder is not None:
            self._show_folded(self._folder.take_all())

    def _show_folded(self, lines: list[FoldedLine]) -> None:
        for line in lines:
            if len(line.ranks) == 1:
                prefix = self._prefixes[next(iter(line.ranks))]
            else:
                name = f"[{self._node}:{rank_ranges(line.ranks)}]".encode(errors="replace")
                prefix = (BOLD + name + PLAIN if self.colour else name) + b" "
            self.write(line, prefix, line.data + b"\n")

    # Bars

    def set_bar(self, source: object, rank: int, prefix: bytes, state: bytes) -> None:
        """Show the state of a rank's bar, on a terminal; without a state, remove it."""
        if state:
            self._bars[source] = rank, prefix, state
        elif self._bars.pop(source, None) is None:
            return
        if self._draw_at is None:
            self._draw_at = self._drawn_at + DRAW_S

    def _draw(self, now: float) -> None:
        """Put collected output between the erased and the new bars."""
        up = b"\x1b[%dA" % (self._drawn - 1) if self._drawn > 1 else b""
        if self._drawn:
            self._buffer[:0] = b"\r" + up + b"\x1b[J"
        if self._bars and self.unfinished is not None:
            self._buffer += b"\n"
            self.unfinished = None
        size = self._size()
        bars = sorted(self._bars.values())[: max(1, size.lines - 1)]
        self._buffer += b"\n".join(_bar(prefix, state, size.columns - 1) for _, prefix, state in bars)
        self._drawn, self._drawn_at, self._draw_at = len(bars), now, None

    def _size(self) -> os.terminal_size:
        with contextlib.suppress(OSError):
            size = os.get_terminal_size(self._descriptor)
            if size.columns:
                return size
        return os.terminal_size((80, 24))


def _bar(prefix: bytes, state: bytes, columns: int) -> bytes:
    """Return the line of a bar, cut to the width of the terminal."""
    shown = clip(prefix, columns)
    room = columns - len(shown.decode())
    return (prefix if room else shown) + clip(state, room)


def line_prefix(label: str, rank: int, colour: bool) -> bytes:
    """Return the prefix of a rank's lines."""
    name = f"[{label}]".encode(errors="replace")
    return COLOURS[rank % len(COLOURS)] + name + PLAIN + b" " if colour else name + b" "


def write_all(descriptor: int, data: bytes) -> bool:
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
