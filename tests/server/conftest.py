"""A server for each module that needs one, with uvloop and without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.raw_peer import ServerProcess


@pytest.fixture(scope="module", params=["uvloop", "asyncio"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    place: Path = tmp_path_factory.mktemp("server")
    with ServerProcess(place, uvloop=request.param == "uvloop") as serving:
        yield serving
