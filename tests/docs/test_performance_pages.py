"""README.md and docs/performance.md show what benchmarks/results.md says; a run keeps what it did not measure."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from benchmarks import record
from benchmarks.bars import Bar, bars
from benchmarks.pages import ROOT, render_pages
from benchmarks.record import Figure, read_figure, read_results, write_results

SVG = "{http://www.w3.org/2000/svg}"


def test_the_pages_show_the_results() -> None:
    stale = [path for path, text in render_pages().items() if (ROOT / path).read_text(encoding="utf-8") != text]
    assert not stale, "write them again: python -m benchmarks --pages"


def test_every_missed_target_is_on_the_page() -> None:
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8").partition("<!-- missed begin")[2]
    missed = [row for section in read_results().values() for row in section.rows if row.missed]
    assert missed and len([line for line in page.splitlines() if line.startswith("| ")]) == len(missed) + 1


def test_every_section_is_of_a_subject() -> None:
    """Others would be lost with the next run."""
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks").glob("*.py")]
    assert set(read_results()) <= {title for text in sources for title in re.findall(r'^TITLE = "(.*)"$', text, re.M)}


@pytest.mark.parametrize(
    ("cell", "figure", "text"),
    [
        ("10.8 (10.8 - 12.0) ms", Figure(10.8, "ms"), "11 ms"),
        ("1,323 (1,293 - 1,384) ms", Figure(1323.0, "ms"), "1.3 s"),
        ("222 (218 - 232) ms", Figure(222.0, "ms"), "220 ms"),
        ("999 ms", Figure(999.0, "ms"), "1.0 s"),
        ("17.0 (16.9 - 17.1) µs/op", Figure(17.0, "µs/op"), "17 µs/op"),
        ("28.8 MB", Figure(28.8, "MB"), "29 MB"),
        ("0.5 a rank", Figure(0.5, "a rank"), "0.5 a rank"),
        ("45,996 (43,435 - 47,314) op/s", Figure(45996.0, "op/s"), "45,996 op/s"),
    ],
)
def test_figures_are_read_back(cell: str, figure: Figure, text: str) -> None:
    assert read_figure(cell) == figure
    assert str(figure) == text


def test_a_run_replaces_what_it_measured_and_keeps_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results.md")
    write_results(
        {"Second": "old", "First": "| a | one core | 1.0 ms | torch | 2.0 ms | 0.50 | 0.50 | ≤ 1 | reached |"},
        ["First", "Second"],
    )
    write_results({"Second": "new\n\n*Two* lines."}, ["First", "Second"])
    found = read_results(record.RESULTS.read_text(encoding="utf-8"))
    assert list(found) == ["First", "Second"] and found["Second"].text == "new\n\n*Two* lines."
    row = found["First"].row("a", peer="torch")
    assert (row.ours, row.theirs, row.target, row.missed) == (Figure(1.0, "ms"), Figure(2.0, "ms"), "≤ 1", False)
    with pytest.raises(KeyError, match="no 'b'"):
        found["First"].row("b")


def test_bars_are_as_long_as_their_figures_say() -> None:
    things = [
        ("a", [Bar("ours", 0.1, "100 ms"), Bar("<theirs>", 10.0, "10 s")]),
        ("b", [Bar("<theirs>", None, "never")]),
    ]
    drawn = ElementTree.fromstring(bars("t & t", "seconds", things))
    ours, theirs = (float(bar.attrib["width"]) for bar in drawn.iter(f"{SVG}rect") if bar.attrib["height"] == "12")
    whole = 2 * (theirs - ours) / 2
    assert ours == 0 and whole > 100, "from 0.1 to 10 there are two decades"
    assert {"a", "b", "t & t", "never", "100 ms", "<theirs>"} <= {text.text for text in drawn.iter(f"{SVG}text")}
