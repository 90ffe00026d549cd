"""A server for each module that needs one, on uvloop and without it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.wire import Serving


@pytest.fixture(scope="module", params=["uvloop", "asyncio"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    place: Path = tmp_path_factory.mktemp("server")
    with Serving(place, uvloop=request.param == "uvloop") as serving:
        yield serving
