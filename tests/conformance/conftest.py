"""Fixtures of the suite: a kind of store, a place where one is, and a handle on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint import Store

from .kinds import KINDS, Kind, Place


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
