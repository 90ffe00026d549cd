"""What the tests of the storage share."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make syncing cost nothing, for tests that open a log a thousand times and in which no machine dies."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)
