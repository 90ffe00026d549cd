"""Transcripts: tests of pure code as text files of commands and their output.

A transcript is a list of blocks, separated by blank lines. A block has commands, a line `----`, and the output. Lines
that start with `#` are comments. A `Run` executes one command and returns lines of output. The actual output is
compared with the file as text, so a failure is a diff. To accept a change, rewrite the files and read the diff:

    RALLYPOINT_REWRITE=1 pytest tests/transcripts && git diff tests/transcripts

Rejected: assertions in Python. A history of thirty steps is read by a person, and a change of words touches them all.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

__all__ = ["Run", "check_transcript", "replay_transcript"]

DASHES = "----"

Run = Callable[[str], Iterable[str]]
"""Executes one command, and returns the lines that it prints."""


def replay_transcript(text: str, run: Run) -> str:
    """Run every command of a transcript, and return the transcript with the actual output.

    Raises ValueError if a block has no line of dashes.
    """
    blocks = [block.splitlines() for block in text.strip("\n").split("\n\n") if block.strip("\n")]
    written = []
    for number, lines in enumerate(blocks, 1):
        comments_only = all(line.startswith("#") for line in lines)
        if not comments_only and DASHES not in lines:
            raise ValueError(f"block {number} has no line {DASHES}: {lines}")
        commands = lines if comments_only else lines[: lines.index(DASHES)]
        output = [out for line in commands if not line.startswith("#") for out in run(line)]
        written.append("\n".join(commands if comments_only else [*commands, DASHES, *output]))
    return "\n\n".join(written) + "\n"


def check_transcript(path: str | os.PathLike[str], run: Run) -> None:
    """Replay a file; raise AssertionError with a diff if the output differs.

    If the variable RALLYPOINT_REWRITE is set, rewrite the file instead.
    """
    path = Path(path)
    expected = path.read_text(encoding="utf-8")
    actual = replay_transcript(expected, run)
    if actual == expected:
        return
    if os.environ.get("RALLYPOINT_REWRITE"):
        path.write_text(actual, encoding="utf-8")
        return
    diff = difflib.unified_diff(
        expected.splitlines(), actual.splitlines(), f"{path.name} says", "actual output", "", ""
    )
    raise AssertionError("\n" + "\n".join(diff))
