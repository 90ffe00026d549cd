"""Fixtures of a server, and of what stands before it, for modules that differ only in the server's settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest

import rallypoint

__all__ = ["server_fixture"]


def server_fixture(
    scope: Literal["function", "module"] = "function", **settings: Any
) -> Callable[[], Iterator[rallypoint.Server]]:
    """Return a fixture: a server in its own process, of these settings."""

    @pytest.fixture(scope=scope)
    def server() -> Iterator[rallypoint.Server]:
        with rallypoint.Server(**settings) as server:
            yield server

    return server
