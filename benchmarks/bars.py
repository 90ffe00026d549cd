"""Bars over a logarithmic axis, as a small SVG: how long each of several things takes, ours and the peer's.

Pure, as `plot.py`. A thing that never came to an end has no figure: its bar is missing, and its words say why.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from benchmarks.plot import COLOURS, LINE_HEIGHT, STYLE, Axis

WIDTH, LEFT, RIGHT, TOP = 680, 280, 580, 60
BAR, GAP = 14, 14


class Bar(NamedTuple):
    """One bar: whose it is, its figure (None: there is none), and the words behind it."""

    name: str
    value: float | None
    words: str


def bars(title: str, along: str, things: Sequence[tuple[str, Sequence[Bar]]]) -> str:
    """Return the bars of each thing, below each other; `along` says what is on the axis."""
    values = [bar.value for _, group in things for bar in group if bar.value is not None]
    low, high = (10.0**power for power in (math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))))
    decades = [low * 10**step for step in range(round(math.log10(high / low)) + 1)]
    axis = Axis(low, high, LEFT, RIGHT, decades)
    names = list(dict.fromkeys(bar.name for _, group in things for bar in group))
    bottom = TOP + sum(len(group) * BAR + GAP for _, group in things)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 40}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        _text(16, 22, title),
        *_legend(names),
        *(f'<path class="frame" d="M{axis.at(value)} {TOP - 6}V{bottom}"/>' for value in axis.marks),
        *(
            _text(axis.at(value), bottom + LINE_HEIGHT, f"{value:,.10g}", 'text-anchor="middle"')
            for value in axis.marks
        ),
        _text((LEFT + RIGHT) / 2, bottom + 34, along, 'text-anchor="middle"'),
        *_groups(axis, names, things),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _legend(names: Sequence[str]) -> Iterable[str]:
    at = 16.0
    for name, colour in zip(names, COLOURS, strict=False):
        yield f'<rect x="{at}" y="32" width="10" height="10" fill="{colour}"/>'
        yield _text(at + 15, 42, name)
        at += 40 + 7 * len(name)


def _groups(axis: Axis, names: Sequence[str], things: Sequence[tuple[str, Sequence[Bar]]]) -> Iterable[str]:
    y = TOP
    for thing, group in things:
        yield _text(LEFT - 8, y + BAR * len(group) / 2 + 4, thing, 'text-anchor="end"')
        for bar in group:
            end: float = LEFT
            if bar.value is not None:
                end = axis.at(bar.value)
                colour = COLOURS[names.index(bar.name)]
                yield f'<rect x="{LEFT}" y="{y}" width="{round(end - LEFT, 1)}" height="{BAR - 2}" fill="{colour}"/>'
            yield _text(end + 5, y + BAR - 4, bar.words)
            y += BAR
        y += GAP


def _text(x: float, y: float, words: str, how: str = "") -> str:
    return f'<text x="{x}" y="{y}" {how}>{escape(words)}</text>'
