"""Fixtures of the suite: a kind of store, a place where one is, and a handle on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint import Store

from .kinds import KINDS, Kind, Place

FLAWS = {
    "test_a_number_that_is_none_is_named_as_the_caller_named_it": "store/base.py lets NotAnInteger through with the "
    "prefixed name of the key (and StoreFull); then `as_said` can go from test_machine.py",
    "test_what_is_no_number_is_not_counted_on[tcp-": "store/tcp.py, _why_not_counted: a number past 64 bits is one to "
    "int(), so the server's refusal is taken for a lost connection, and the store for lost",
    "test_a_row_is_true_of_ours[add-range-tcp]": "the same",
    "test_what_is_true_now_needs_no_time[tcp-inf]": "store/link.py: no socket takes an endless timeout (OverflowError)",
    "test_what_is_missing_is_named_once_and_a_queue_is_no_value[tcp]": "store/tcp.py, _missing and wait_values: a key "
    "asked for twice is missing twice, and a queue counts as a value",
    "test_a_barrier_of_more_than_64_bits_is_a_barrier[tcp": "store/tcp.py: struct.error, which names nothing",
    "test_an_endless_timeout_can_be_set_and_read": "store/base.py, timeout: no timedelta is endless (OverflowError)",
    "test_it_agrees_with_the_model[tcp": "the last two of store/tcp.py",
    "test_what_wakes_a_call[tcp-get, not by a queue of that name]": "sometimes: store/tcp.py, wait_values: a key that "
    "is written between the empty answer and the look whether it is there is returned as empty",
}
"""Tests that are known to fail, by what their names start with, and why. Whoever mends one takes it out."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name, why in FLAWS.items():
            if item.path.parent == Path(__file__).parent and item.name.startswith(name):
                item.add_marker(pytest.mark.xfail(reason=why, strict=not why.startswith("sometimes")))


@pytest.fixture(params=KINDS, ids=str)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.fixture
def place(kind: Kind, tmp_path: Path) -> Iterator[Place]:
    with kind.world(tmp_path) as fresh:
        yield fresh()


@pytest.fixture
def store(place: Place) -> Iterator[Store]:
    with place.open() as store:
        yield store
