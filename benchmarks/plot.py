"""Plot: a few curves over logarithmic axes, as a small SVG that needs nothing and reads on light and dark pages.

Pure: figures go in, text comes out. A curve's name stands at its right end, in its colour, and a point tells its
figures to whoever points at it. Rejected: matplotlib, a large dependency for four lines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

Point = tuple[float, float]

WIDTH, HEIGHT = 680, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 500, 40, 340
LINE_HEIGHT = 16
COLOURS = ("#2f81f7", "#db6d28", "#2da44e", "#bf4b8a")
"""Each can be seen on white and on black."""

STYLE = """
text { font: 12px sans-serif; fill: #444 }
.frame { stroke: #8888; fill: none }
.curve { stroke-width: 2; fill: none }
@media (prefers-color-scheme: dark) { text { fill: #ccc } }
"""


class Axis(NamedTuple):
    """A logarithmic scale from `low` at one pixel to `high` at another, and the values that are marked on it."""

    low: float
    high: float
    begins: float
    ends: float
    marks: Sequence[float]

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        span = math.log(self.high / self.low) or 1.0
        return round(self.begins + (self.ends - self.begins) * math.log(value / self.low) / span, 1)


def plot(title: str, across: str, up: str, curves: Mapping[str, Sequence[Point]]) -> str:
    """Return the curves as an SVG; `across` and `up` say what is on the axes, and all figures are above 0."""
    xs = sorted({x for curve in curves.values() for x, _ in curve})
    x_axis = Axis(xs[0], xs[-1], LEFT, RIGHT, xs)
    powers = [math.log10(y) for curve in curves.values() for _, y in curve]
    decades = [10.0**power for power in range(math.floor(min(powers)), math.ceil(max(powers)) + 1)]
    y_axis = Axis(decades[0], decades[-1], BOTTOM, TOP, decades)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        _text(LEFT, TOP - 18, title),
        _text((LEFT + RIGHT) / 2, HEIGHT - 16, across, 'text-anchor="middle"'),
        _text(16, (TOP + BOTTOM) / 2, up, f'text-anchor="middle" transform="rotate(-90 16 {(TOP + BOTTOM) / 2})"'),
        *_frame(x_axis, y_axis),
        *_curves(x_axis, y_axis, curves),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _text(x: float, y: float, words: str, how: str = "") -> str:
    return f'<text x="{x}" y="{y}" {how}>{escape(words)}</text>'


def _frame(x_axis: Axis, y_axis: Axis) -> Iterable[str]:
    for value in x_axis.marks:
        x = x_axis.at(value)
        yield f'<path class="frame" d="M{x} {TOP}V{BOTTOM}"/>'
        yield _text(x, BOTTOM + LINE_HEIGHT, f"{value:,.10g}", 'text-anchor="middle"')
    for value in y_axis.marks:
        y = y_axis.at(value)
        yield f'<path class="frame" d="M{LEFT} {y}H{RIGHT}"/>'
        yield _text(LEFT - 6, y + 4, f"{value:,.10g}", 'text-anchor="end"')


def _curves(x_axis: Axis, y_axis: Axis, curves: Mapping[str, Sequence[Point]]) -> Iterable[str]:
    ends = _apart({name: y_axis.at(curve[-1][1]) for name, curve in curves.items()})
    for (name, curve), colour in zip(curves.items(), COLOURS, strict=False):
        places = [(x_axis.at(x), y_axis.at(y)) for x, y in curve]
        way = " ".join(f"{x},{y}" for x, y in places)
        yield f'<polyline class="curve" stroke="{colour}" points="{way}"/>'
        for (x, y), (px, py) in zip(curve, places, strict=True):
            told = escape(f"{name}: {y:,.3g} at {x:,.10g}")
            yield f'<circle cx="{px}" cy="{py}" r="3" fill="{colour}"><title>{told}</title></circle>'
        yield _text(RIGHT + 8, ends[name] + 4, name, f'style="fill: {colour}"')


def _apart(heights: Mapping[str, float]) -> dict[str, float]:
    """Move names down until none covers another."""
    placed: dict[str, float] = {}
    lowest = -math.inf
    for name, height in sorted(heights.items(), key=lambda one: one[1]):
        lowest = placed[name] = max(height, lowest + LINE_HEIGHT)
    return placed
