"""Equal lines of several ranks, shown once: `[node:0-63] …` instead of 64 lines.

A line waits up to WINDOW_S for the same line of other ranks, and is shown at once when every rank has printed it. The
lines of a rank keep their order, and a line is shown exactly once for every time that a rank printed it. What waits is
bounded in time and in bytes.

Rejected: to fold lines that differ only in numbers. A user who looks for the rank with another loss would not see it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["FOLD_FROM", "FoldedLine", "LineFolder", "rank_ranges"]

WINDOW_S = 0.2
"""How long a line waits for other ranks."""

MAX_BYTES, LINE_BYTES = 1 << 20, 512
"""Lines that wait are shown early when they take more than this together, and what a line takes beside its text."""

FOLD_FROM = 5
"""Number of workers on a node from which lines are folded by default; fewer are easier to read one by one."""


class FoldedLine(NamedTuple):
    """A line, and the ranks that printed it."""

    data: bytes
    ranks: set[int]
    number: int
    due_at: float


class LineFolder:
    """The lines that wait for other ranks, in the order in which they are shown."""

    def __init__(self) -> None:
        self._waiting: deque[FoldedLine] = deque()
        self._by_data: dict[bytes, list[FoldedLine]] = {}
        self._last: dict[int, int] = {}
        """The number of each rank's last line that may still wait."""

        self._numbers = 0
        self._bytes = 0
        self._printing: dict[int, int] = {}
        """Number of open streams of each rank."""

    def opened(self, rank: int) -> None:
        """Expect lines of a rank; call it once for each of its streams."""
        self._printing[rank] = self._printing.get(rank, 0) + 1

    def closed(self, rank: int) -> None:
        """Expect no more lines from a stream of a rank."""
        self._printing[rank] -= 1
        if not self._printing[rank]:
            del self._printing[rank]

    def add(self, rank: int, data: bytes, now: float) -> None:
        """Add a line of a rank."""
        after = self._last.get(rank, -1)
        equal = self._by_data.setdefault(data, [])
        if equal and equal[-1].number > after:
            line = equal[bisect_right(equal, after, key=_number)]
        else:
            line = FoldedLine(data, set(), self._numbers, now + WINDOW_S)
            self._numbers += 1
            self._bytes += len(data) + LINE_BYTES
            self._waiting.append(line)
            equal.append(line)
        line.ranks.add(rank)
        self._last[rank] = line.number

    def take(self, now: float) -> list[FoldedLine]:
        """Remove and return the lines to show now: those that have waited, or that no other rank can print."""
        taken = []
        while self._waiting and (
            now >= self._waiting[0].due_at or self._bytes > MAX_BYTES or self._is_complete(self._waiting[0])
        ):
            taken.append(self._pop())
        return taken

    def take_all(self) -> list[FoldedLine]:
        """Remove and return all lines that wait."""
        return [self._pop() for _ in range(len(self._waiting))]

    @property
    def due_at(self) -> float | None:
        """When the next line must be shown; None if no line waits."""
        return self._waiting[0].due_at if self._waiting else None

    def _is_complete(self, line: FoldedLine) -> bool:
        return len(line.ranks) >= len(self._printing) and self._printing.keys() <= line.ranks

    def _pop(self) -> FoldedLine:
        line = self._waiting.popleft()
        self._bytes -= len(line.data) + LINE_BYTES
        equal = self._by_data[line.data]
        del equal[0]  # lines with equal data are shown in their order, too
        if not equal:
            del self._by_data[line.data]
        return line


def _number(line: FoldedLine) -> int:
    return line.number


def rank_ranges(ranks: Iterable[int]) -> str:
    """Return ranks as ranges: 0-3,5."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(f"{low}-{high}" if high > low else str(low) for low, high in parts)
