"""Progress bars: the last state remains, text passes as it is, and a terminal shows one line per rank."""

from __future__ import annotations

import itertools

import pytest

from rallypoint.launch.output.progress_bars import MAX_STATE, BarSplitter, clip
from rallypoint.launch.output.stream import last_lines

TQDM = [b"\r  0%|    | 0/2", b"\r 50%|##  | 1/2", b"\r100%|####| 2/2", b"\n", b"after\n"]
NESTED = [
    b"\router 0/2",
    *(b"\n", b"\rinner 0/2", b"\x1b[A", b"\n", b"\rinner 1/2", b"\x1b[A", b"\n", b"\rinner 2/2", b"\x1b[A"),
    b"\router 1/2",
    *(b"\n", b"\rinner 0/2", b"\x1b[A", b"\n", b"\rinner 2/2", b"\x1b[A"),
    *(b"\router 2/2", b"\n"),
]


def split(chunks: list[bytes]) -> tuple[bytes, bytes]:
    """Return the text of some output, and the state of the bar at its end."""
    splitter = BarSplitter()
    return b"".join([splitter.feed(chunk) for chunk in chunks]), splitter.state


@pytest.mark.parametrize(
    ("output", "text", "state"),
    [
        (b"one\ntwo\n", b"one\ntwo\n", b""),
        (b"unfinished", b"unfinished", b""),
        (b"dos\r\nlines\r\n", b"dos\r\nlines\r\n", b""),
        (b"\xff\xfe\0\x1b[31mred\n", b"\xff\xfe\0\x1b[31mred\n", b""),
        (b"\r 10%\r 20%", b"", b" 20%"),
        (b"\r 10%\r 20%\n", b" 20%\n", b""),
        (b"10%\r20%\r", b"", b"20%"),
        (b"10%\r20%\r\n", b"20%\n", b""),
        (b"before\n\r 10%\r\xff%", b"before\n", b"\xff%"),
        (b"\r 10%\r    \r", b"", b""),
        (b"\r 10%\r    \rdone\n", b"done\n", b""),
        (b"\r\r\n", b"\n", b""),
        (b"\n\r 10%\n\n", b"\n 10%\n\n", b""),
    ],
)
def test_text_and_state(output: bytes, text: bytes, state: bytes) -> None:
    assert split([output]) == (text, state)
    if b"\r\n" not in output and not text.endswith(b"unfinished"):
        assert split([output[at : at + 1] for at in range(len(output))])[1] == state


def test_tqdm_leaves_its_last_state() -> None:
    assert split(TQDM) == (b"100%|####| 2/2\nafter\n", b"")
    assert split(TQDM[:2]) == (b"", b" 50%|##  | 1/2")


def test_nested_bars_are_one_bar_and_a_line_for_each_state_of_the_outer_one() -> None:
    text, _ = split(NESTED)
    assert text == b"outer 0/2\nouter 1/2\nouter 2/2\n"


@pytest.mark.parametrize("output", [b"".join(TQDM), b"".join(NESTED), b"a\r\nb\r\n\r1\r2\nc"])
def test_it_does_not_matter_how_output_is_cut_into_pieces(output: bytes) -> None:
    whole = split([output])
    for first, second in itertools.combinations(range(len(output) + 1), 2):
        assert split([output[:first], output[first:second], output[second:]]) == whole


def test_text_that_was_forwarded_and_is_then_overwritten_is_a_line() -> None:
    assert split([b"loading", b"\rdone\n"]) == (b"loading\ndone\n", b"")
    assert split([b"dos", b"\r", b"\n"]) == (b"dos\r\n", b"")


def test_the_state_of_a_bar_that_is_not_ended_is_a_line_at_the_end() -> None:
    splitter = BarSplitter()
    assert splitter.feed(b"text\r 10%") == b""
    assert splitter.finish() == b" 10%\n"
    assert splitter.finish() == b"" and splitter.state == b""


def test_a_state_of_any_length_is_not_kept() -> None:
    splitter = BarSplitter()
    data = b"\r" + b"x" * MAX_STATE
    assert splitter.feed(data) == data
    assert splitter.feed(b"y\n") == b"y\n"


@pytest.mark.parametrize(
    ("text", "columns", "shown"),
    [
        ("12345", 3, "123"),
        ("12345", 5, "12345"),
        ("\x1b[31mred\x1b[0m", 3, "red"),
        ("日本語", 5, "日本"),
        ("e\u0301e", 2, "e\u0301e"),
        ("a\tb\x07c\x1b[2Kd", 9, "abcd"),
        ("x", 0, ""),
    ],
)
def test_a_line_is_cut_to_the_width_of_a_terminal(text: str, columns: int, shown: str) -> None:
    assert clip(text.encode(), columns).decode() == shown


def test_a_failure_report_has_the_traceback_and_not_all_states_of_a_bar() -> None:
    bar = b"".join(b"\r%3d%%" % n for n in range(100))
    assert last_lines(bar + b"\nTraceback\nError\n") == (" 99%", "Traceback", "Error")
