"""A crew of processes that have torch, and a server for each test."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from urllib.request import urlopen

import pytest

import rallypoint
from rallypoint.deadline import Deadline

from .crew import AMPLE_S, Crew
from .operations import Transcript, on_torchs_own_server


@pytest.fixture(scope="session")
def _whole_crew() -> Iterator[Crew]:
    crew = Crew()
    yield crew
    crew.close()


@pytest.fixture
def crew(_whole_crew: Crew) -> Iterator[Crew]:
    yield _whole_crew
    _whole_crew.dismiss()


@pytest.fixture(scope="session")
def truth(_whole_crew: Crew) -> tuple[Transcript, list[str]]:
    """What torch's client does on torch's server, line by line, and the keys that it leaves."""
    lines, keys = _whole_crew.start(on_torchs_own_server).result()
    return lines, keys


@pytest.fixture
def server() -> Iterator[rallypoint.Server]:
    with rallypoint.Server() as server:
        yield server


@pytest.fixture
def until_waiting(server: rallypoint.Server) -> Callable[[int], None]:
    """Return a function that returns when so many clients wait for something in the server, as its page says."""

    def look(clients: int) -> None:
        deadline = Deadline(AMPLE_S)
        while not deadline.expired():
            with urlopen(f"http://127.0.0.1:{server.port}/") as page:
                found = re.search(r"<td>waiting</td><td>(\d+)</td>", page.read().decode())
            assert found, "the server's page no longer says how many wait"
            if int(found[1]) == clients:
                return
        pytest.fail(f"{found[1]} clients wait in the server, not {clients}")

    return look
