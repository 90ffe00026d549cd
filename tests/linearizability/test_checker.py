"""The checker itself: it must accept what could have happened and reject what could not."""

from __future__ import annotations

from typing import Any

import pytest

from .checker import FOREVER, Operation, check

Row = tuple[str, str, tuple[Any, ...], Any, float, float]
"""Process, kind of operation, arguments, result, and when it was called and returned."""


def history(*rows: Row) -> list[Operation]:
    return [
        Operation(process, kind, "k", args, result, called, returned)
        for process, kind, args, result, called, returned in rows
    ]


POSSIBLE = {
    "one after the other": history(("a", "set", (b"1",), None, 0, 1), ("b", "get", (), b"1", 2, 3)),
    "a read that overlaps a write may see the old value": history(
        ("a", "set", (b"1",), None, 0, 5), ("b", "get", (), None, 1, 2)
    ),
    "or the new one": history(("a", "set", (b"1",), None, 0, 5), ("b", "get", (), b"1", 1, 2)),
    "adds overlap and both count": history(("a", "add", (1,), 2, 0, 5), ("b", "add", (1,), 1, 0, 5)),
    "a lost write may have happened": history(("a", "set", (b"1",), None, 0, FOREVER), ("b", "get", (), b"1", 9, 10)),
    "or not": history(("a", "set", (b"1",), None, 0, FOREVER), ("b", "get", (), None, 9, 10)),
    "a lost write may happen late": history(
        ("a", "set", (b"1",), None, 0, FOREVER), ("b", "get", (), None, 1, 2), ("b", "get", (), b"1", 3, 4)
    ),
    "items come in order": history(
        ("a", "push", (b"1",), None, 0, 1),
        ("a", "push", (b"2",), None, 2, 3),
        ("b", "pop", (), b"1", 4, 5),
        ("c", "pop", (), b"2", 4, 5),
    ),
    "one of two swaps wins": history(
        ("a", "swap", (None, b"a"), (True, b"a"), 0, 5), ("b", "swap", (None, b"b"), (False, b"a"), 0, 5)
    ),
}

IMPOSSIBLE = {
    "a read misses a write that had returned": history(("a", "set", (b"1",), None, 0, 1), ("b", "get", (), None, 2, 3)),
    "an add counts twice": history(("a", "add", (1,), 1, 0, 1), ("b", "get", (), b"2", 2, 3)),
    "an add is lost": history(("a", "add", (1,), 1, 0, 1), ("b", "add", (1,), 1, 2, 3)),
    "a value goes back": history(
        ("a", "set", (b"1",), None, 0, 1), ("a", "set", (b"2",), None, 2, 3), ("b", "get", (), b"1", 4, 5)
    ),
    "a lost write appears, vanishes and appears": history(
        ("a", "set", (b"1",), None, 0, FOREVER),
        ("b", "get", (), b"1", 1, 2),
        ("c", "set", (b"2",), None, 3, 4),
        ("b", "get", (), b"2", 5, 6),
        ("b", "get", (), b"1", 7, 8),
    ),
    "two pops take one item": history(
        ("a", "push", (b"1",), None, 0, 1), ("b", "pop", (), b"1", 2, 3), ("c", "pop", (), b"1", 2, 3)
    ),
    "items overtake each other": history(
        ("a", "push", (b"1",), None, 0, 1), ("a", "push", (b"2",), None, 2, 3), ("b", "pop", (), b"2", 4, 5)
    ),
    "an item is lost": history(("a", "push", (b"1",), None, 0, 1), ("b", "pop", (), None, 2, 3)),
    "both swaps win": history(
        ("a", "swap", (None, b"a"), (True, b"a"), 0, 5), ("b", "swap", (None, b"b"), (True, b"b"), 0, 5)
    ),
    "an append lands twice": history(("a", "append", (b"x",), None, 0, 1), ("b", "get", (), b"xx", 2, 3)),
}


@pytest.mark.parametrize("name", POSSIBLE)
def test_a_possible_history_is_accepted(name: str) -> None:
    assert check(POSSIBLE[name]) is None


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_impossible_history_is_rejected(name: str) -> None:
    assert check(IMPOSSIBLE[name]) is not None


def test_the_operations_of_each_key_are_checked_separately() -> None:
    bad = [operation._replace(key="bad") for operation in IMPOSSIBLE["an add is lost"]]
    assert check(POSSIBLE["one after the other"] + bad) == bad
