"""Fixtures of the suite: a kind of store, the place of a new one, and a handle on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint import Store

from .kinds import KINDS, Kind, Place


@pytest.fixture(params=KINDS, ids=str)
def kind(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    return kind


@pytest.fixture
def place(kind: Kind, tmp_path: Path) -> Iterator[Place]:
    with kind.world(tmp_path) as fresh:
        yield fresh()


@pytest.fixture
def store(place: Place) -> Iterator[Store]:
    with place.open() as store:
        yield store


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests on a kind of store that needs an outside part."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        for value in callspec.params.values() if callspec else ():
            if isinstance(value, Kind) and value.needs:
                item.add_marker(pytest.mark.needs(value.needs))
