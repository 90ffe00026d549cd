"""What the tests of the storage share."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest
from tests.storage import logs
from tests.storage.kernels import FdatasyncKernel

from rallypoint.storage import log_writer
from rallypoint.storage.kernel_sync import KernelSync


@pytest.fixture
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make syncing cost nothing, for tests that open a log a thousand times and in which no machine dies."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop to which logs are attached, and which runs while a test waits for a commit."""
    loop = asyncio.new_event_loop()
    monkeypatch.setattr(logs, "LOOP", loop)
    yield loop
    loop.close()


def attached(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kernel: Any) -> None:
    if request.param == "kernel":
        request.getfixturevalue("loop")
        monkeypatch.setattr(log_writer, "KernelSync", kernel)


@pytest.fixture(params=["thread", pytest.param("kernel", marks=pytest.mark.needs("aio"))])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test twice: a thread syncs, and the kernel does where it can."""
    attached(request, monkeypatch, KernelSync)


@pytest.fixture(params=["thread", "kernel"])
def both_ways_watched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test twice, too, but the kernel syncs by `os.fdatasync`, which the test replaces."""
    attached(request, monkeypatch, FdatasyncKernel)
