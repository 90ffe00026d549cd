"""The kinds of store that these tests run on."""

from __future__ import annotations

from tests.store_kinds import open_store

__all__ = ["open_store"]
