"""Lines of results and how they are shown: medians, quartiles, ratios, and whether a target is reached.

A ratio is ours divided by theirs. It is shown twice: of the two medians, and as the median of the ratios of adjacent
slices, which background load disturbs less; the second one decides. Where the target lies between the quartiles, the
verdict says so: another run may end otherwise.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

HEAD = ("what", "where", "ours", "peer", "theirs", "of medians", "of slices", "target", "verdict")


class Target(NamedTuple):
    """A bound for the ratio; or for our own figure, where it has a unit."""

    at_least: float | None = None
    at_most: float | None = None
    unit: str = ""

    def __str__(self) -> str:
        return f"{'≤' if self.at_least is None else '≥'} {self.bound:g} {self.unit}".rstrip()

    @property
    def bound(self) -> float:
        """The number itself."""
        return self.at_least if self.at_least is not None else self.at_most or 0.0

    def judge(self, figures: Sequence[float]) -> str:
        """Say whether the median keeps the bound."""
        low, middle, high = quartiles(figures)
        reached = middle >= self.bound if self.at_least is not None else middle <= self.bound
        return ("reached" if reached else "NOT reached") + (", within the spread" if low < self.bound < high else "")


class Line(NamedTuple):
    """One thing measured: our figures and, where there is a peer, its figures, taken in turn."""

    what: str
    where: str
    unit: str
    ours: list[float]
    peer: str = ""
    theirs: Sequence[float] = ()
    target: Target | None = None

    def cells(self) -> tuple[str, ...]:
        """Return the line's cells, in the order of HEAD."""
        of_medians = of_slices = ""
        ratios = self.ratios()
        if self.theirs:
            of_medians = f"{statistics.median(self.ours) / statistics.median(self.theirs):.2f}"
        if ratios:
            of_slices = spread(ratios, "{:.2f}")
        verdict = self.target.judge(self.ours if self.target.unit else ratios) if self.target else ""
        theirs = f"{spread(self.theirs)} {self.unit}" if self.theirs else ""
        target = str(self.target) if self.target else ""
        ours = f"{spread(self.ours)} {self.unit}"
        return (self.what, self.where, ours, self.peer, theirs, of_medians, of_slices, target, verdict)

    def ratios(self) -> list[float]:
        """Return the ratios of adjacent slices; none where ours and theirs were not taken in turn."""
        paired = len(self.ours) == len(self.theirs) and (self.target is None or not self.target.unit)
        return [ours / theirs for ours, theirs in zip(self.ours, self.theirs, strict=True)] if paired else []


def quartiles(figures: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    if len(figures) == 1:
        return figures[0], figures[0], figures[0]
    low, middle, high = statistics.quantiles(figures, n=4, method="inclusive")
    return low, middle, high


def spread(figures: Sequence[float], form: str = "") -> str:
    """Show a median with its quartiles."""
    low, middle, high = quartiles(figures)
    form = form or ("{:,.0f}" if middle >= 100 else "{:.1f}")
    shown = form.format(middle)
    return shown if len(figures) == 1 else f"{shown} ({form.format(low)} - {form.format(high)})"


def table(lines: Sequence[Line]) -> str:
    """Return lines as a Markdown table that is also readable as it is."""
    rows = [HEAD, *(line.cells() for line in lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    rows.insert(1, tuple("-" * width for width in widths))
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    )
