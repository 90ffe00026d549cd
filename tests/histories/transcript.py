"""Transcripts: text files that say what was done and what came out of it.

A transcript is a list of blocks, separated by blank lines. A block has commands, a line `----`, and the lines that
came out. Lines that start with `#` are for people. `replay` runs the commands and writes the transcript that they
really give; a test compares the two as text, so a failure is a diff. A change is accepted by writing it down:

    RALLYPOINT_REWRITE=1 pytest tests/histories && git diff tests/histories
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from pathlib import Path

DASHES = "----"


def replay(text: str, run: Callable[[str], list[str]]) -> str:
    """Run every command of a transcript, and return the transcript with what really came out."""
    blocks = [block.splitlines() for block in text.strip("\n").split("\n\n") if block.strip("\n")]
    written = []
    for number, lines in enumerate(blocks, 1):
        notes_only = all(line.startswith("#") for line in lines)
        if not notes_only and DASHES not in lines:
            raise ValueError(f"block {number} has no line {DASHES}: {lines}")
        said = lines if notes_only else lines[: lines.index(DASHES)]
        came = [out for line in said if not line.startswith("#") for out in run(line)]
        written.append("\n".join(said if notes_only else [*said, DASHES, *came]))
    return "\n\n".join(written) + "\n"


def check(path: Path, run: Callable[[str], list[str]]) -> None:
    """Replay a file and fail with a diff where it says something else; or write it anew, when asked to."""
    expected = path.read_text()
    actual = replay(expected, run)
    if os.environ.get("RALLYPOINT_REWRITE"):
        path.write_text(actual)
        return
    diff = difflib.unified_diff(
        expected.splitlines(), actual.splitlines(), f"{path.name} says", "what came out", "", ""
    )
    assert actual == expected, "\n" + "\n".join(diff)
