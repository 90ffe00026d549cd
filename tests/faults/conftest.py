"""A server for each test that breaks things."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.raw_peer import ServerProcess

Start = Callable[..., ServerProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start servers with settings of the test's choice; each must end well, and must have raised nothing."""
    with ExitStack() as stack:
        yield lambda uvloop=True, **settings: stack.enter_context(ServerProcess(tmp_path, uvloop, **settings))
