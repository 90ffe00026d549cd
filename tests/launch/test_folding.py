"""Equal lines of several ranks are shown once; no line is lost, shown late, or out of its rank's order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.launch.output.folding import LINE_BYTES, MAX_BYTES, WINDOW_S, LineFolder, rank_ranges

Shown = list[tuple[bytes, list[int]]]


def folder_of(ranks: int) -> LineFolder:
    folder = LineFolder()
    for rank in range(ranks):
        folder.opened(rank)
    return folder


def shown(folder: LineFolder, now: float) -> Shown:
    return [(line.data, sorted(line.ranks)) for line in folder.take(now)]


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("0a 1a 2a", [(b"a", [0, 1, 2])]),
        ("0a 1b 2a", [(b"a", [0, 2]), (b"b", [1])]),
        ("0a 0b 1a 1b 2a 2b", [(b"a", [0, 1, 2]), (b"b", [0, 1, 2])]),
        ("0a 0a 1a 1a", [(b"a", [0, 1]), (b"a", [0, 1])]),
        ("0a 0b 1b 1a", [(b"a", [0]), (b"b", [0, 1]), (b"a", [1])]),
        ("0a 0b 0a 1a 1a", [(b"a", [0, 1]), (b"b", [0]), (b"a", [0, 1])]),
        ("0 1", [(b"", [0, 1])]),
    ],
)
def test_which_lines_are_one(printed: str, expected: Shown) -> None:
    folder = folder_of(3)
    for word in printed.split():
        folder.add(int(word[0]), word[1:].encode(), 0.0)
    assert shown(folder, WINDOW_S) == expected
    assert folder.due_at is None


def test_a_line_waits_for_the_others_and_not_longer_than_the_window() -> None:
    folder = folder_of(3)
    folder.add(0, b"a", 1.0)
    folder.add(1, b"a", 1.0 + WINDOW_S / 2)
    assert folder.due_at == 1.0 + WINDOW_S
    assert shown(folder, 1.0 + WINDOW_S * 0.9) == []
    assert shown(folder, 1.0 + WINDOW_S) == [(b"a", [0, 1])]


def test_a_line_that_all_have_printed_is_shown_at_once() -> None:
    folder = folder_of(2)
    folder.add(0, b"a", 0.0)
    folder.add(1, b"a", 0.0)
    assert shown(folder, 0.0) == [(b"a", [0, 1])]


def test_ranks_that_have_ended_are_not_waited_for() -> None:
    folder = folder_of(3)
    folder.opened(2)  # its other stream
    folder.add(0, b"a", 0.0)
    folder.add(1, b"a", 0.0)
    folder.closed(2)
    assert shown(folder, 0.0) == []
    folder.closed(2)
    assert shown(folder, 0.0) == [(b"a", [0, 1])]


def test_what_waits_is_bounded() -> None:
    folder = folder_of(2)
    most = MAX_BYTES - LINE_BYTES
    folder.add(0, b"x" * most, 0.0)
    assert shown(folder, 0.0) == []
    folder.add(0, b"", 0.0)
    assert [len(line) for line, _ in shown(folder, 0.0)] == [most]
    for _ in range(100_000):
        folder.add(0, b"", 0.0)
        folder.take(0.0)
    assert len(folder.take_all()) == MAX_BYTES // LINE_BYTES


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([b"a", b"b", b"c"]), st.floats(0, 0.3)), max_size=60))
def test_no_line_is_lost_late_or_out_of_order(printed: list[tuple[int, bytes, float]]) -> None:
    folder, now = folder_of(5), 0.0
    expected: dict[int, list[bytes]] = {rank: [] for rank in range(5)}
    found: dict[int, list[bytes]] = {rank: [] for rank in range(5)}
    waiting: list[tuple[float, int]] = []

    def take(lines: list[tuple[bytes, list[int]]]) -> None:
        for data, ranks in lines:
            for rank in ranks:
                found[rank].append(data)

    for rank, data, pause_s in printed:
        now += pause_s
        take(shown(folder, now))
        assert all(sum(map(len, found.values())) > before for at, before in waiting if now >= at + WINDOW_S)
        waiting.append((now, sum(map(len, expected.values()))))
        expected[rank].append(data)
        folder.add(rank, data, now)
    take([(line.data, sorted(line.ranks)) for line in folder.take_all()])
    assert found == expected


@pytest.mark.parametrize(
    ("ranks", "text"), [([0], "0"), ([0, 1], "0-1"), ([3, 1, 2, 7, 9, 8], "1-3,7-9"), ([0, 2, 4], "0,2,4")]
)
def test_ranks_are_shown_as_ranges(ranks: list[int], text: str) -> None:
    assert rank_ranges(ranks) == text
