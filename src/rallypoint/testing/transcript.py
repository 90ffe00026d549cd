"""Transcripts: text files of commands and their output.

A transcript is a list of blocks, separated by blank lines. A block has commands, a line `----`, and the output. Lines
that start with `#` are comments. `replay` runs the commands and returns the transcript with the actual output; a test
compares the two as text, so a failure is a diff. To accept a change, rewrite the transcripts:

    RALLYPOINT_REWRITE=1 pytest tests/histories && git diff tests/histories
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from pathlib import Path

DASHES = "----"


def replay(text: str, run: Callable[[str], list[str]]) -> str:
    """Run every command of a transcript, and return the transcript with the actual output."""
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


def check(path: Path, run: Callable[[str], list[str]]) -> None:
    """Replay a file and fail with a diff if the output differs; with RALLYPOINT_REWRITE, rewrite the file."""
    expected = path.read_text()
    actual = replay(expected, run)
    if os.environ.get("RALLYPOINT_REWRITE"):
        path.write_text(actual)
        return
    diff = difflib.unified_diff(
        expected.splitlines(), actual.splitlines(), f"{path.name} says", "actual output", "", ""
    )
    assert actual == expected, "\n" + "\n".join(diff)
