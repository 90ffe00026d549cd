"""The record of what was measured: results.md, its sections, their tables, and single figures.

A run replaces the sections of the subjects that it measured, and leaves the others as they were; each says when, where
and how busy the machine was. The text that people read is the only record: a figure in it has three digits, which is
as exact as it is. Rejected: a second file with raw figures; the two could disagree, and nobody would look at it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(__file__).with_name("results.md")
READING = (
    "A figure is a median, with its quartiles in brackets. Ours and the peer run side by side and are measured in "
    "turn, in short slices. The ratio is ours / theirs: *of medians*, and *of slices*, the median of the ratios of "
    "adjacent slices, which decides. *One core*: servers and clients share it. *Two cores*: the servers have one, the "
    "clients the other. A load above 0.5 before a run means that others were at work: look at the quartiles."
)
FIGURE = re.compile(r"^(-?[\d,.]+)(?: \(.*\))? (\S+(?: \S+)?)$")
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}


class Figure(NamedTuple):
    """A median and its unit."""

    value: float
    unit: str

    @property
    def seconds(self) -> float:
        """The figure in seconds."""
        return self.value * SECONDS[self.unit]

    def __str__(self) -> str:
        """Return the figure with two digits, for a sentence."""
        if self.unit not in SECONDS:
            digits = f"{self.value:,.0f}" if self.value >= 10 else f"{self.value:.1f}"
            return f"{digits} {self.unit}"
        for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
            if self.seconds >= 0.999 * size or unit == "µs":
                return f"{_two_digits(self.seconds / size)} {unit}"
        raise AssertionError


def _two_digits(value: float) -> str:
    return f"{value:.1f}" if value < 9.95 else f"{float(f'{value:.2g}'):,.0f}"


class Row(NamedTuple):
    """One line of a table."""

    what: str
    where: str
    ours: Figure
    peer: str
    theirs: Figure | None
    target: str
    verdict: str

    @property
    def missed(self) -> bool:
        """Whether a target was not reached."""
        return self.verdict.startswith("NOT")


class Section(NamedTuple):
    """One subject: its title, its text below the title, and the rows of its tables."""

    title: str
    text: str
    rows: list[Row]

    def row(self, what: str, where: str = "", peer: str = "") -> Row:
        """Return the first row that fits; raise KeyError if there is none."""
        for row in self.rows:
            if row.what == what and where in ("", row.where) and peer in ("", row.peer):
                return row
        raise KeyError(f"benchmarks/results.md has no {what!r} ({where}) in {self.title!r}")


def read_results(text: str = "") -> dict[str, Section]:
    """Return the sections of results.md, by title."""
    parts = re.split(r"^## (.*)\n", text or RESULTS.read_text(encoding="utf-8"), flags=re.M)
    return {title: _section(title, body) for title, body in zip(parts[1::2], parts[2::2], strict=True)}


def write_results(measured: dict[str, str], order: Sequence[str]) -> None:
    """Replace these sections, by title, and keep the others that are known, in this order."""
    kept = {title: one.text for title, one in read_results().items()} if RESULTS.exists() else {}
    kept |= measured
    parts = [f"## {title}\n\n{kept[title]}" for title in order if title in kept]
    RESULTS.write_text("\n\n".join(["# Side by side", READING, *parts]) + "\n", encoding="utf-8")


def _section(title: str, body: str) -> Section:
    rows = map(_row, re.findall(r"^\|(.*)\|$", body, re.M))
    return Section(title, body.strip(), [row for row in rows if row is not None])


def _row(line: str) -> Row | None:
    cells = [cell.strip() for cell in line.split("|")]
    ours = read_figure(cells[2]) if len(cells) == 9 else None
    return Row(cells[0], cells[1], ours, cells[3], read_figure(cells[4]), cells[7], cells[8]) if ours else None


def read_figure(cell: str) -> Figure | None:
    """Return the median in a cell of a table; None if there is none."""
    found = FIGURE.match(cell)
    return Figure(float(found[1].replace(",", "")), found[2]) if found else None
