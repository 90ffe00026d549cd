"""What most tests of a client use: a store, a proxy that cuts connections, threads."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.outage_log import DEADLINE_S
from tests.served import server_fixture

import rallypoint
from rallypoint.testing import CuttingProxy

server = server_fixture(grace=DEADLINE_S)


@pytest.fixture
def cutter(server: rallypoint.Server) -> Iterator[CuttingProxy]:
    """A proxy of the server."""
    with CuttingProxy(server.port) as cutter:
        yield cutter


@pytest.fixture
def store(server: Any) -> Iterator[rallypoint.Store]:
    """A store on the server."""
    with rallypoint.connect(server.url, timeout=DEADLINE_S) as store:
        yield store


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(20) as pool:
        yield pool
