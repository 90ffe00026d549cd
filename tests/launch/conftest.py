"""The kinds of store that these tests run on, and a place to run nodes in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.launch.runs import Place
from tests.store_kinds import open_store, quick_heartbeat

__all__ = ["open_store", "quick_heartbeat"]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A directory for scripts, whose nodes end with the test."""
    with Place(tmp_path) as place:
        yield place
