"""torchrun's `--duplicate-stdout-filters` and `--duplicate-stderr-filters`: copies of teed lines with certain texts.

They go to `attempt_N/filtered_stdout.log` and `filtered_stderr.log`, one file for all ranks of a node, each line with
the prefix that torchrun gives it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

__all__ = ["LineFilter", "parse_filters"]

MAX_LINE = 64 * 1024
"""A longer unfinished line is compared and copied in pieces."""


def parse_filters(text: str) -> tuple[str, ...]:
    """Parse texts that are separated by commas; a double comma is a comma in a text."""
    parts = (part.replace("\0", ",") for part in text.replace(",,", "\0").split(","))
    return tuple(part for part in parts if part)


class LineFilter:
    """Copies the lines of one stream that contain one of the texts; a disk that is full loses copies only."""

    def __init__(self, path: Path, texts: Sequence[str], prefix: str) -> None:
        self._path = path
        self._texts = [text.encode() for text in texts]
        self._prefix = prefix.encode(errors="replace")
        self._rest = b""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def feed(self, data: bytes) -> None:
        """Take some output of the stream."""
        data = self._rest + data
        *lines, self._rest = data.split(b"\n")
        self._copy([line + b"\n" for line in lines])
        if len(self._rest) >= MAX_LINE:
            self.finish()

    def finish(self) -> None:
        """Take the last line, which has no line break."""
        self._copy([self._rest] if self._rest else [])
        self._rest = b""

    def _copy(self, lines: Sequence[bytes]) -> None:
        found = [self._prefix + line for line in lines if any(text in line for text in self._texts)]
        if found:
            with contextlib.suppress(OSError), open(self._path, "ab", buffering=0) as file:
                file.write(b"".join(found))
