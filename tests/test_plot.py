"""`benchmarks/plot.py` writes SVG in which every point, name and mark is in its place."""

from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree

import pytest
from benchmarks.plot import plot

SVG = "{http://www.w3.org/2000/svg}"
CURVES = {
    "barrier, ours": [(16.0, 2.0), (64.0, 8.0), (256.0, 32.0)],
    "barrier, <torch> & co": [(16.0, 2.0), (64.0, 9.0), (256.0, 32.0)],
}


@pytest.fixture
def drawn() -> ElementTree.Element:
    return ElementTree.fromstring(plot("How it grows", "members", "ms", CURVES))


def texts(drawn: ElementTree.Element) -> dict[str | None, ElementTree.Element]:
    return {text.text: text for text in drawn.iter(f"{SVG}text")}


def test_every_point_is_on_its_curve_and_says_its_figures(drawn: ElementTree.Element) -> None:
    circles = list(drawn.iter(f"{SVG}circle"))
    places = [place for line in drawn.iter(f"{SVG}polyline") for place in line.attrib["points"].split()]
    assert [f"{circle.attrib['cx']},{circle.attrib['cy']}" for circle in circles] == places
    assert [circle.findtext(f"{SVG}title") for circle in circles] == [
        f"{name}: {y:g} at {x:g}" for name, curve in CURVES.items() for x, y in curve
    ]


def test_equal_factors_are_equal_distances(drawn: ElementTree.Element) -> None:
    line = next(drawn.iter(f"{SVG}polyline")).attrib["points"].split()
    (x0, y0), (x1, y1), (x2, y2) = (tuple(map(float, place.split(","))) for place in line)
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2) and x1 > x0
    assert y1 - y0 == pytest.approx(y2 - y1, abs=0.2) and y1 < y0, "more is further up"


def test_axes_and_curves_have_names_that_do_not_cover_each_other(drawn: ElementTree.Element) -> None:
    said = texts(drawn)
    assert {"How it grows", "members", "ms", "16", "64", "256", "1", "10", "100", *CURVES} == set(said)
    heights = sorted(float(said[name].attrib["y"]) for name in CURVES)
    assert all(below - above > 15 for above, below in pairwise(heights))


def test_one_point_is_enough() -> None:
    drawn = ElementTree.fromstring(plot("t", "x", "y", {"a": [(16.0, 10.0)]}))
    assert len(list(drawn.iter(f"{SVG}circle"))) == 1
