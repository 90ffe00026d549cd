"""Processes that have imported torch, and a server for each test."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.request import urlopen

import pytest
from tests.served import server_fixture

import rallypoint
from rallypoint.deadline import Deadline

from .operations import Truth, on_torchs_own_server
from .torch_processes import AMPLE_S, TorchProcesses


@pytest.fixture(scope="session")
def _all_processes() -> Iterator[TorchProcesses]:
    torch_processes = TorchProcesses()
    yield torch_processes
    torch_processes.close()


@pytest.fixture
def torch_processes(_all_processes: TorchProcesses) -> Iterator[TorchProcesses]:
    yield _all_processes
    _all_processes.dismiss()


@pytest.fixture(scope="session")
def truth(_all_processes: TorchProcesses) -> Truth:
    """The transcript of torch's client on torch's server, and the keys that it leaves."""
    lines, keys = _all_processes.start(on_torchs_own_server).result()
    return lines, keys


server = server_fixture()


@pytest.fixture
def until_waiting(server: rallypoint.Server) -> Callable[[int], None]:
    """A function that returns when this many clients wait at the server, according to its statistics."""

    def look(clients: int) -> None:
        deadline, waiting = Deadline(AMPLE_S), -1
        while not deadline.expired():
            with urlopen(f"http://127.0.0.1:{server.port}/statistics") as page:
                waiting = int(json.load(page)["waiting"])
            if waiting == clients:
                return
        pytest.fail(f"{waiting} clients wait at the server, not {clients}")

    return look


@pytest.fixture
def interrupted(torch_processes: TorchProcesses, until_waiting: Callable[[int], None]) -> Callable[..., Any]:
    """A function that starts a process, interrupts it when it waits at the server, and returns its result."""

    def interrupt(function: Callable[..., Any], *arguments: Any) -> Any:
        member = torch_processes.start(function, *arguments)
        until_waiting(1)
        member.interrupt()
        return member.result()

    return interrupt
